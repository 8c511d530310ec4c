"""The ten commands of docs/get-started.md, run in order at small size."""

import os
import re
import signal
from pathlib import Path

import alignmixup as am
from alignmixup.cli import main
from alignmixup.registry import LOGGERS
from alignmixup.training import summarize
from alignmixup.training.ledger import LEDGER, read_ledger
from test_docs import commands

PAGE = Path(__file__).parents[1] / "docs" / "get-started.md"
SMALL = {"--limit": "40", "--net.width": "4", "--train.epochs": "4", "--train.batch-size": "20"}
STEPS = ["doctor", "demo", "recipes", "train", "train"]
STEPS += ["evaluate", "predict", "report", "figure", "export"]
RUN = Path("runs/first")


def pieces():
    """Each block of the page in order, with its language."""
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def small(words):
    """The same command with small settings."""
    return [SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)]


class Interrupt(am.Logger):
    """Presses Ctrl-C in the second epoch."""

    def __init__(self, folder):
        self.folder = folder

    def log(self, values, epoch):
        if epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_the_ten_commands_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LOGGERS, "_entries", {**LOGGERS, "interrupt": Interrupt})
    done, said = [], ""
    for language, code in pieces():
        if language == "python":
            exec(compile(code, str(PAGE), "exec"), {})
        elif language == "text" and done[-1] not in ("demo", "report"):  # of those, other tests
            assert code.split()[0] in said, f"the page shows other output of {done[-1]}"
        for words in commands(code) if language == "sh" else []:
            is_first = words[0] == "train" and "train" not in done
            done.append(words[0])
            if words[0] == "demo":
                continue  # tests/test_cli.py runs it
            extra = ["--logger", "interrupt"] if is_first else []
            assert main([*small(words), *extra]) == (130 if is_first else 0)
            assert not is_first or not summarize(RUN).is_complete
            shown = capsys.readouterr()
            said = shown.out + shown.err
    assert done == STEPS
    epochs = [event["epoch"] for event in read_ledger(RUN / LEDGER) if event["event"] == "epoch"]
    assert epochs == [*range(1, 5)]
    for path in ("results.jsonl", "../../net.safetensors", "../../net.json"):
        assert (RUN / path).stat().st_size > 100


def test_every_command_has_its_time_and_output():
    text = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^## \d+\. ", text, flags=re.M)[1:]
    assert len(sections) == 10
    for section in sections:
        assert re.search(r"\d+ s\b", section.partition("```text")[0]), section[:40]
        assert "```text" in section
