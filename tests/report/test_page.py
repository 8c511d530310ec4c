"""The report page as text: what it holds, and that names from results do nothing in it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.page import Section, write_page
from alignmixup.report.page_html import script_json
from alignmixup.report.page_pictures import Pictures
from alignmixup.report.tables import table
from sample_page import sample_run

HOSTILE = (
    "</script><script>hacked()</script>",
    "<img src=x onerror=hacked()>",
    "\"'><svg onload='hacked()'>",
    "a & b \u2028 ]]> -->",
)


def accuracy(value, key, seed=0, **more):
    fields = {"epoch": 300, "trained": {"train.epochs": 300}, **more}
    return Result("accuracy", "top1_median10", value, key=key, seed=seed, **fields)


class Elements(HTMLParser):
    """Collects what a browser would make of a page: elements, attributes, text and scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_data(self, data):
        self.texts.append(data)


def written(tmp_path, results, **more) -> str:
    page = write_page(results, [], tmp_path, **more)
    assert page == tmp_path / "report.html"
    return page.read_text(encoding="utf-8")


def data_of(text):
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_wherever_they_stand(tmp_path, name):
    key = RecipeKey(name, name, name, name)
    results = [
        accuracy(96.0, key, seed, trained={name: name}, hardware=name, commit=name)
        for seed in (0, 1)
    ]
    diagram = {"edges": [0.0, 1.0], "counts": [3], "confidence": [0.5], "accuracy": [0.4]}
    more = {"key": key, "seed": 0, "epoch": 300}
    results += [
        Result("calibration", "ece", 1.0, {"reliability": diagram}, **more),
        Result("ood", "auroc", 90.0, {"source": name}, **more),
    ]
    harmless = [accuracy(96.0, RecipeKey("a", "a", "a", "a"), seed) for seed in (0, 1)]
    harmless += [result.stamped(key=harmless[0].key) for result in results[2:]]
    plain = Elements(written(tmp_path, harmless, title="t"))
    page = Elements(text := written(tmp_path, results, title=name))
    assert set(page.tags) == set(plain.tags)
    assert page.tags.count("script") == plain.tags.count("script")
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert [a for a in page.attributes if a[1] == "src"] == []
    assert sum(name in piece for piece in page.texts) >= 3
    assert any(name in run["title"] for run in data_of(text)["runs"])


def test_script_json_reads_back_and_cannot_end_its_script():
    for name in HOSTILE:
        text = script_json({name: [name]})
        assert json.loads(text) == {name: [name]}
        assert not set("<>&") & set(text)


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    text = written(tmp_path, [accuracy(96.0, RecipeKey("cifar10", "r18", "alignmixup"))])
    page = Elements(text)
    links = [value for _, name, value in page.attributes if name in ("href", "src")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "data:image/svg+xml" in text  # the icon, which browsers ask for otherwise
    assert "default-src 'none'" in text


def test_published_figures_stand_beside_ours(tmp_path):
    key = RecipeKey("cifar10", "r18", "alignmixup")
    text = written(
        tmp_path, [accuracy(value, key, seed) for seed, value in enumerate((96.4, 96.6))]
    )
    rows = re.findall(r"<tr.*?</tr>", text, re.S)
    ours = next(row for row in rows if ">AlignMixup<" in row)
    assert "3.50" in ours
    assert "\u00b1 0.14" in ours
    assert re.search(r'class="number published"[^>]*>2\.95<', ours)
    paper = next(row for row in rows if ">PuzzleMix<" in row)
    assert 'class="paper"' in paper
    label = re.search(r"<label[^>]*>(?:(?!</label>).)*id=\"published\".*?</label>", text)
    assert label is not None
    assert label[0].endswith("> Rows that only the paper has</label>")  # shown while it is checked


def test_settings_are_readable_in_every_alphabet_and_one_epoch_is_singular(tmp_path):
    path = "folder:/a/\u732b@16"
    key = RecipeKey("folder_\u732b_16", "r18", "mine")
    results = [
        Result("accuracy", "top1_last", 90.0, key=key, epoch=1, trained={"data.name": name})
        for name in (path, "b")
    ]
    text = written(tmp_path, results)
    first, second = data_of(text)["runs"]
    assert {first["settings"]["data.name"], second["settings"]["data.name"]} == {path, "b"}
    assert f"data.name={path}" in " ".join(Elements(text).texts)
    assert first["title"].endswith(", 1 epoch")
    assert "1 epochs" not in text


def test_a_reason_for_missing_pictures_names_each_kind_once():
    missing = {"run": "one name", "left_out": "no boxes"}
    left_out = Pictures({"localization": [missing, missing]}, has_folders=True).left_out()
    assert left_out.count("localization") == 1


def test_methods_that_the_paper_does_not_have_are_named_as_in_the_tables(tmp_path):
    lines = [accuracy(80.0, RecipeKey("cifar100", "r18", "resizemix"))]
    texts = Elements(written(tmp_path, lines)).texts
    assert "ResizeMix" in table(lines, "accuracy", paper_rows=False).rows[0]
    assert "ResizeMix" in texts
    assert "resizemix" not in texts


def test_own_sections_come_first_and_are_trusted(tmp_path):
    html = "<p id='mine'>A <b>bold</b> word.</p>"
    result = accuracy(96.0, RecipeKey("pets", "r18", "input"))
    text = written(tmp_path, [result], sections=[Section("About & more", html)])
    assert html in text
    assert "About &amp; more" in text
    assert text.index("About &amp; more") < text.index("<h2>Top-1 error")


def test_a_path_to_a_file_is_that_file(tmp_path):
    out = tmp_path / "deep" / "mine.html"
    result = accuracy(96.0, RecipeKey("pets", "r18", "input"))
    assert write_page([result], [], out) == out
    assert out.exists()
    assert not Path(tmp_path, "report.html").exists()


def test_a_part_is_shown_in_the_section_that_asks_for_it_and_not_again(tmp_path):
    run = sample_run(tmp_path / "run")
    mine = Section("Mine", "<p>hello</p>", ["transport", "curves"])
    none = Section("None", "<p>nothing to see</p>", ["localization"])
    page = write_page([], [run], tmp_path, sections=[mine, none])
    text = page.read_text()
    (shown,) = re.findall(r"<h2>Mine</h2>(.*?)</section>", text, re.DOTALL)
    for part in ("hello", 'data-kind="transport"', "by epoch. The thin gray line"):
        assert part in shown
        assert text.count(part) == shown.count(part)
    assert "nothing to see" not in text
    with pytest.raises(ValueError, match="unknown part 'curve'"):
        Section("Mine", "", ["curve"])
