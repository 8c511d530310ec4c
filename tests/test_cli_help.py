"""Help as a stranger reads it: every flag, task and command is described, with examples."""

import ast
import itertools
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import tyro

from alignmixup import cli
from alignmixup.cli import main
from alignmixup.cli.doctor import describe_machine
from alignmixup.cli.examples import EXAMPLES
from alignmixup.cli.material import DATA_COMMANDS
from alignmixup.cli.program import COMMANDS
from alignmixup.experiments.machine import Extra, inspect_machine
from alignmixup.recipes.catalog import recipe_names
from alignmixup.registry import TASKS, register_task, task_abouts

CLI = Path(cli.__file__).parent
PAGES = [name for name in COMMANDS if name != "data"] + [f"data {name}" for name in DATA_COMMANDS]


def page(capsys, monkeypatch, *words, columns="200"):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def undescribed(source):
    """The fields of dataclasses, which are flags, that no string follows."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name != "Command":
            for field, after in itertools.pairwise([*node.body, None]):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and not (is_text and after.value.value.strip()):
                    yield f"{node.name}.{ast.unparse(field.target)}"


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.stem)
def test_every_flag_is_described(path):
    assert [*undescribed(path.read_text(encoding="utf-8"))] == []


def test_a_flag_without_a_description_is_found():
    assert [*undescribed('class A:\n    b: int\n    "what"\n    c: int = 1\n')] == ["A.c"]


@pytest.mark.parametrize("name", PAGES)
def test_every_command_has_examples(capsys, monkeypatch, name):
    assert f"Examples:\n  alignmixup {name}" in page(capsys, monkeypatch, *name.split())


@pytest.mark.parametrize("name", ["train", "evaluate", "recipes", "doctor", "figure", "decoder"])
def test_the_text_of_a_page_fits_a_terminal(capsys, monkeypatch, name):
    out = page(capsys, monkeypatch, name, columns="80")
    lines = [line for line in out.splitlines() if not line.startswith("usage: ")]
    assert [line for line in lines if len(line) > 80] == []


def test_every_example_is_a_command_that_parses():
    assert {*EXAMPLES} == {*PAGES}
    for name, examples in EXAMPLES.items():
        for example in examples:
            assert len(max(f"  alignmixup {example}".splitlines(), key=len)) <= 80
            words = shlex.split(example.replace("\\\n", " ").partition(" > ")[0], comments=True)
            assert " ".join(words).startswith(name)
            assert callable(COMMANDS[words[0]].parse(words[1:]))


@pytest.mark.parametrize(
    "words",
    [["--help"], ["doctor"], ["recipes"], ["recipes", "tiny-r18"], ["recipes", "--table", "adv"]],
)
def test_pages_fit_a_narrow_terminal(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(words) == 0
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 40]
    # A path or the name of a recipe stays whole.
    assert [line for line in wide if len(line.split()) > 1] == []


def test_an_error_on_a_terminal_is_broken_between_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["train", "no-recipe-of-this-name-that-is-longer-than-a-line"]
    assert main(words) == 1
    in_one_line = capsys.readouterr().err
    assert in_one_line.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 1
    broken = capsys.readouterr().err
    assert broken.split() == in_one_line.split()
    assert [line for line in broken.splitlines() if len(line) > 40 and len(line.split()) > 1] == []


def test_the_overview_fits_a_terminal(capsys):
    assert main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_help_of_data_names_its_commands(capsys):
    assert main(["data"]) == 0
    out = capsys.readouterr().out
    assert "usage: alignmixup data COMMAND" in out
    assert [name for name in DATA_COMMANDS if f"\n  {name} " not in out] == []


def test_tasks_are_described_from_their_source():
    """The lines that help reads without torch are those of the imported tasks."""
    assert {name: task.about for name, task in TASKS.items()} == task_abouts()
    assert all(task_abouts().values())


def test_a_task_of_a_plugin_is_in_the_help(capsys, monkeypatch):
    register_task("sharpness", about="how sharp the minimum is")(lambda model, batches: [])
    assert "how sharp the minimum is" in page(capsys, monkeypatch, "evaluate")


def test_recipes_are_listed_by_table(capsys):
    assert main(["recipes"]) == 0
    overview = capsys.readouterr().out.splitlines()
    assert len(overview) < 40
    assert main(["recipes", "--all"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert max(map(len, overview + every)) <= 80
    shown = [line.split()[0] for line in every if re.match(r"  \S", line)]
    assert sorted(name for name in shown if name != "recipe") == sorted(recipe_names())
    heads = [line.partition(":")[0] for line in every if re.match(r"[\w-]+: ", line)]
    assert heads[:3] == ["cls", "cls-imgnet", "cls-300"]
    assert heads[-1] == "published"


def test_doctor_prints_a_short_table_and_a_record(capsys, tmp_path, monkeypatch):
    (tmp_path / "cifar-10-batches-py").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.replace(str(tmp_path), "DATA").splitlines())) <= 80
    for name in (
        "torch",
        "GPU",
        "triton",
        "torch.compile",
        "[timm]",
        "[transformers]",
        "data",
        "disk",
    ):
        assert re.search(rf"^{re.escape(name)} ", out, re.M), name
    assert "cifar-10-batches-py" in out
    assert "alignmixup data fetch tiny" in out
    assert main(["doctor", "--json", "--data", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["data"]["cifar10"].endswith("cifar-10-batches-py")
    assert record["data"]["tiny"] is None
    assert 1 <= record["cores"] <= (os.cpu_count() or 1)
    assert {"timm", "logging"} <= record["extras"].keys()
    assert "test" not in record["extras"]


def test_doctor_names_the_remedy():
    from dataclasses import replace

    machine = replace(
        inspect_machine(),
        extras={
            "a": Extra({"one": "1.0", "two": None}, None),
            "b": Extra({"torchvision": "1.0"}, "torchvision does not import: nms"),
        },
        gpus=[{"name": "X100", "capability": "9.0", "memory_gib": 80.0}],
        disk_free_gib=0.5,
    )
    lines = dict(describe_machine(machine))
    assert lines["[a]"] == "! no two: pip install 'alignmixup[a]'"
    assert "from the same index" in lines["[b]"]
    assert lines["GPU"] == "X100, capability 9.0, 80.0 GiB"
    assert lines["disk"].startswith("! only 0.5 GiB")
    none = replace(machine, gpus=[], cuda="13.0")
    assert dict(describe_machine(none))["GPU"].startswith("! none that torch sees")


def test_the_overview_of_data_has_the_first_sentence_of_each_command(capsys):
    assert main(["data", "--help"]) == 0
    _, _, shard = capsys.readouterr().out.partition("\n  shard ")
    about, _, _ = shard.partition("\n\n")
    assert " ".join(about.split()).endswith("--dataset shards:OUT.")


def test_a_page_has_no_color_where_it_is_not_wanted(capsys, monkeypatch):
    monkeypatch.setitem(tyro._experimental_options, "ansi_codes", True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in page(capsys, monkeypatch, "doctor")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in page(capsys, monkeypatch, "doctor")
