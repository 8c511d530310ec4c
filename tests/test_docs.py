"""Every Python block of the README and of the documentation runs, top to bottom, as a reader would.

Pages of the site are self-contained. In their shell blocks, ``bash`` commands are executed as well
and ``sh`` commands, which would take hours or the network, only parsed.
"""

import csv
import gc
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from alignmixup.cli import main
from alignmixup.cli.program import COMMANDS
from torchvision_schemas import define_torchvision_schemas

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
# What torchrun sets for the only process of a job; port 0 is any free one.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page, languages):
    """The fenced blocks in these languages, each with its language, in order."""
    fence = rf"^```({'|'.join(languages)})\n(.*?)^```"
    return re.findall(fence, page.read_text(encoding="utf-8"), re.M | re.S)


def commands(code):
    """The calls of our command line in a shell block, as lists of arguments."""
    lines = [shlex.split(line, comments=True) for line in code.splitlines()]
    return [words[words.index("alignmixup") + 1 :] for words in lines if is_call(words)]


def is_call(words):
    return "alignmixup" in words and words[0] in ("alignmixup", "torchrun")


class Model(nn.Module):
    """What the README calls 'model': somebody's own module with a layer4."""

    def __init__(self):
        super().__init__()
        self.layer4 = nn.Conv2d(3, 8, 3, 4, 1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.layer4(x).mean((2, 3)))


def given_names(page):
    """What a page may use without defining it: the README and the evaluations show fragments."""
    if page.name not in ("README.md", "evaluations.md"):
        return {}
    model = Model()
    x, y = torch.rand(8, 3, 16, 16), torch.randint(10, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "x": x, "loader": [(x, y), (x, y)], "optimizer": optimizer}


# It starts jobs of a cluster.
SLOW = {"docs/guides/many-machines.md"}
RUN = [
    pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
    for page, name in zip(PAGES, NAMES, strict=True)
]


@pytest.fixture
def _torchrun(monkeypatch):
    """A job of this process alone. A group that a page ends is ended after the test's networks."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", lambda: None)
        yield
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("page", RUN)
def test_blocks_run(page, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    if page.name == "many-gpus.md":
        request.getfixturevalue("_torchrun")
    torch.manual_seed(0)
    given = given_names(page)
    before = [p.clone() for p in given["model"].parameters()] if given else []
    for language, code in blocks(page, ("python", "bash")):
        if language == "python":
            if "import timm" in code:
                define_torchvision_schemas()
                pytest.importorskip("timm")
            exec(compile(code, str(page), "exec"), given)
            continue
        for words in commands(code):
            assert main(words) == 0, capsys.readouterr().err
    if page.name == "README.md":
        after = given["model"].parameters()
        assert not all(map(torch.equal, before, after)), "the README's loop trains nothing"
        assert "next to nothing" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_that_are_not_run_parse(page):
    for _, code in blocks(page, ("sh",)):
        for words in commands(code):
            assert callable(COMMANDS[words[0]].parse(words[1:]))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_excerpts_are_lines_of_an_example(page):
    """A ``py`` block is not run here but quoted from a script that a test runs."""
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    for _, code in blocks(page, ("py",)):
        quoted = (code, textwrap.indent(code, "    "))
        assert any(text in script for script in scripts for text in quoted), code


def test_tests_that_the_page_names_exist():
    page = (ROOT / "docs/testing.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_links_lead_somewhere():
    for page in [*PAGES, *OTHERS]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_lists_every_page():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", config.partition("\nnav:")[2]))
    missing = {str(p.relative_to(ROOT / "docs")) for p in PAGES[1:]} - listed
    assert not missing, f"add to the navigation of mkdocs.yml: {sorted(missing)}"


# The rows of the demo's page in order: variant and method.
DEMO_ROWS = [
    *(("demo", method) for method in ("baseline", "input", "alignmixup", "alignmixup-unaligned")),
    *(("demo-crops", method) for method in ("baseline", "input")),
    *(("demo-4000", method) for method in ("baseline", "input")),
]


def test_the_tables_of_the_demo_are_the_recorded_rows():
    with (ROOT / "benchmarks/cpu_demo.csv").open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["seed"]))
    page = (ROOT / "docs/guides/demo.md").read_text(encoding="utf-8")
    number = r"\d+\.\d"
    quoted = re.findall(rf"\| ({number}, {number}, {number}) (?=\|)", page)
    columns = {"demo": ("accuracy", "ece", "fgsm_error", "auroc_unseen")}
    recorded = [
        ", ".join(
            row[column] for row in rows if (row["variant"], row["method"]) == (variant, method)
        )
        for variant, method in DEMO_ROWS
        for column in columns.get(variant, ("accuracy", "ece"))
    ]
    assert quoted == recorded
