"""The report page in a browser: it works by mouse and keyboard, and asks nothing of the network.

Skipped where there is no Chromium, unless ALIGNMIXUP_REQUIRE_BROWSER=1.
"""

import csv
import io
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignmixup.cli import main
from alignmixup.contracts import RecipeKey, Result
from alignmixup.report.page import write_page
from sample_page import CLASSES, recipe_settings, sample_results, sample_run
from small_demo import shrink_demo

WIDTHS = {"phone": (390, 844), "desktop": (1200, 850)}


def missing(why):
    if os.environ.get("ALIGNMIXUP_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{why}, and ALIGNMIXUP_REQUIRE_BROWSER=1 forbids to skip", pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="module")
def chromium():
    """One browser for the tests of this file in this process."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    found = [path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))]
    if not found:
        missing("no Chromium on this machine")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found[0], args=quiet)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a small set of results with a run folder."""
    folder = tmp_path_factory.mktemp("report")
    # With a published log beside the curve, and without one.
    runs = [sample_run(folder / data, data) for data in ("cifar10", "pets")]
    results = sample_results() + sample_results("cifar100")[:14]
    return write_page(results, runs, folder, recipe_settings=recipe_settings)


@contextmanager
def opened(browser, path, size="desktop", **more):
    """The page in a window; at the end it must have had no error and no request elsewhere."""
    width, height = WIDTHS[size]
    page = browser.new_page(viewport={"width": width, "height": height}, **more)
    problems = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (problems.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda request: problems.append(request.url))
    page.goto(path.resolve().as_uri())
    yield page
    own = path.resolve().as_uri()
    assert [p for p in problems if p != own and not p.startswith(("data:", "blob:"))] == []
    page.close()


def table(page, name):
    return page.locator(f'figure.table[data-name="{name}"]')


def column(of, number):
    return [
        row.locator("th, td").nth(number).inner_text()
        for row in of.locator("tbody tr:visible").all()
    ]


@pytest.mark.parametrize(("size", "scheme"), [("phone", "light"), ("desktop", "dark")])
def test_it_opens_at_any_width(chromium, report, tmp_path, size, scheme):
    with opened(chromium, report, size, color_scheme=scheme) as page:
        visible = "figure.chart:visible [data-chart]"
        num_charts = page.locator(visible).count()
        assert num_charts >= 8
        page.wait_for_function(
            "n => document.querySelectorAll('figure.chart svg.marks').length >= n", arg=num_charts
        )
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= WIDTHS[size][0]
        picture = page.screenshot(path=tmp_path / "page.png")
        assert len(picture) > 5000
        page.emulate_media(media="print")
        assert page.locator("form.controls").is_hidden()
        ink = "e => getComputedStyle(e).fill"  # on paper, also of charts drawn in dark mode
        assert page.locator(".marks text").first.evaluate(ink) == "rgb(0, 0, 0)"
        # A name of a column that sticks would be printed over rows.
        stuck = "[...document.querySelectorAll('th')].map(e => getComputedStyle(e).position)"
        assert set(page.evaluate(stuck)) == {"static"}


def test_a_phone_shows_conclusions_without_scrolling_sideways(chromium, report):
    with opened(chromium, report, "phone") as page:
        compared = table(page, "comparisons")
        wide, shown = compared.locator(".scroll").evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert wide <= shown <= WIDTHS["phone"][0]
        row = compared.locator("tbody tr:visible").first
        words = row.locator("td:last-child").inner_text()
        assert words.endswith(("better", "higher", "lower", "no difference shown"))
        assert (
            row.locator("td:nth-child(7)").evaluate("e => getComputedStyle(e, '::before').content")
            == '"difference "'
        )
        compared.get_by_role("button", name="Difference").click()  # it sorts here, too
        assert compared.locator("thead th").nth(6).get_attribute("aria-sort") == "ascending"


def test_names_of_columns_stand_above_their_numbers(chromium, report):
    right = """e => {
        const range = document.createRange();
        range.selectNodeContents(e.querySelector("button") || e);
        return range.getBoundingClientRect().right;
    }"""
    with opened(chromium, report) as page:
        errors = table(page, "accuracy-cifar10-r18")
        head = errors.locator("thead th").nth(1).evaluate(right)
        cell = errors.locator("tbody tr:visible td").first.evaluate(right)
        assert abs(head - cell) < 1


def test_charts_of_several_data_sets_are_labeled_and_hide_with_their_label(chromium, report):
    with opened(chromium, report) as page:
        groups = page.locator("section", has_text="Calibration").locator(".group h3")
        names = ["CIFAR-10, R-18", "CIFAR-100, R-18"]
        assert groups.locator("visible=true").all_inner_texts() == names
        page.select_option("#place", names[1])
        assert groups.locator("visible=true").all_inner_texts() == names[1:]


def test_a_table_sorts_by_mouse_and_by_keyboard(chromium, report):
    with opened(chromium, report) as page:
        errors = table(page, "accuracy-cifar10-r18")
        head = errors.locator("thead th").nth(2)
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        up = [float(text.split()[0]) for text in column(errors, 2) if text]
        assert up == sorted(up)
        assert column(errors, 2)[-1] == ""  # the paper's rows have no value of ours
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert [float(text.split()[0]) for text in column(errors, 2) if text] == up[::-1]


def test_filters_hide_and_show_rows(chromium, report):
    with opened(chromium, report) as page:
        errors = table(page, "accuracy-cifar10-r18")
        methods = column(errors, 0)
        assert methods.count("CutMix") == 1  # the paper's; the smoke test is hidden
        page.check("#smoke")
        assert column(errors, 0).count("CutMix") == 2
        page.uncheck("#smoke")
        page.uncheck("#published")
        assert column(errors, 0) == ["Baseline", "Input mixup", "AlignMixup"]
        page.fill("#filter", "input")
        assert column(errors, 0) == ["Input mixup"]
        assert page.locator(".confusion tbody tr").first.is_visible()  # no rows of results
        page.fill("#filter", "")
        page.select_option("#place", "CIFAR-100, R-18")
        assert errors.is_hidden()
        assert table(page, "accuracy-cifar100-r18").is_visible()


def test_a_page_of_smoke_tests_alone_shows_them(chromium, tmp_path):
    smoke = [result for result in sample_results() if result.epoch == 4]
    path = write_page(smoke, [], tmp_path, recipe_settings=recipe_settings)
    with opened(chromium, path) as page:
        assert column(table(page, "runs"), 0) == ["cifar10-r18-cutmix"]
        page.uncheck("#smoke")
        assert table(page, "runs").is_hidden()


def test_the_slider_and_the_plan_work_by_keyboard(chromium, report):
    with opened(chromium, report) as page:
        slider = page.locator(".slider input").first
        strip = page.locator(".strip").first
        slider.focus()
        page.keyboard.press("Home")
        assert page.locator(".slider output").first.inner_text() == "\u03bb = 0.00"
        before = strip.evaluate("e => getComputedStyle(e).backgroundPosition")
        page.keyboard.press("End")
        assert page.locator(".slider output").first.inner_text() == "\u03bb = 1.00"
        assert strip.evaluate("e => getComputedStyle(e).backgroundPosition") != before
        pair = page.locator('.pictures[data-kind="transport"] .pair').first
        first = pair.locator(".stack").first
        first.focus()
        for key in ("ArrowUp", "ArrowLeft"):
            page.keyboard.press(key)
        assert "Row 1, column 1: 100 % of its mass goes to row 2, column 2" in pair.inner_text()
        box = first.bounding_box()
        page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.9 * box["height"])
        assert "Row 2, column 2: 100 % of its mass goes to row 1, column 1" in pair.inner_text()
        assert CLASSES[1] in pair.inner_text()  # shown as it is, not as an element


def test_settings_of_two_runs_and_csv(chromium, report):
    with opened(chromium, report) as page:
        page.select_option("#run-first", index=0)
        page.select_option("#run-second", index=1)
        assert page.locator("#difference tbody tr").all_inner_texts() == ["seed\t0\t1"]
        with page.expect_download() as download:
            table(page, "comparisons").locator("button.csv").click()
        text = Path(download.value.path()).read_text(encoding="utf-8")
        lines = list(csv.DictReader(io.StringIO(text)))
        assert download.value.suggested_filename == "comparisons.csv"
        shown = {line["Conclusion"] for line in lines}
        assert "AlignMixup is better" in shown
        assert len(lines) == table(page, "comparisons").locator("tbody tr:visible").count()


@pytest.mark.parametrize(
    "name", ["</script><script>hacked = 1</script>", "<img src=x onerror='hacked=1'>"]
)
def test_hostile_names_do_nothing(chromium, tmp_path, name):
    key = RecipeKey(name, name, name, name)
    bins = {"edges": [0.0, 1.0], "counts": [9], "confidence": [0.5], "accuracy": [0.4]}
    results = [
        Result("accuracy", "top1_last", 90.0, trained={name: name}, key=key, seed=0, epoch=40),
        Result("calibration", "ece", 1.0, {"reliability": bins}, key=key, seed=0, epoch=40),
        Result("ood", "auroc", 90.0, {"source": name}, key=key, seed=0, epoch=40),
    ]
    path = write_page(results, [], tmp_path, title=name)
    with opened(chromium, path) as page:
        page.wait_for_selector("svg.marks")
        page.locator("svg.marks [aria-roledescription]").first.hover()
        assert page.evaluate("typeof hacked") == "undefined"
        assert name in page.locator("h1").inner_text()


def test_the_page_of_the_demo_opens_and_its_slider_moves(chromium, monkeypatch, tmp_path):
    shrink_demo(monkeypatch)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    with opened(chromium, tmp_path / "report.html", "phone") as page:
        assert page.locator("h1").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"][0]
        slider = page.locator("input[type=range]").first
        before = slider.input_value()
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert slider.input_value() != before
