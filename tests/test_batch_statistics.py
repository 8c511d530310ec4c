"""The script that estimates batch statistics anew: rows for all cases, and the run unchanged."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import torch

import alignmixup as am
from alignmixup.cli import main

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "batch_statistics.py"
spec = importlib.util.spec_from_file_location("batch_statistics", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_statistics_of_features_mixed_later_are_those_of_clean_images(tmp_path, capsys):
    """Batch norm before the mixed layer sees clean images in the cases feat and feat'."""
    words = "--dataset shapes --limit 64 --net.width 4 --train.epochs 1 --train.batch-size 16"
    folder = str(tmp_path / "run")
    recipe = "cifar10-r18-alignmixup-fast"
    assert main(["train", recipe, "--out", folder, "--train.device", "cpu", *words.split()]) == 0
    before = am.load_run(folder).model.state_dict()
    capsys.readouterr()
    options = ["--steps", "3", "--draws", "2"]
    script.main([folder, *options])
    rows = dict(
        re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()
    )
    assert {*rows} >= {"as saved", "drawn again", "input alone", "feat alone", "without mixing"}
    text = (tmp_path / "run" / "results.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    found = [line for line in lines if line["task"] == "batch_statistics"]
    assert len(found) == 2 * (1 + 2 * 5)
    command = shlex.join(["python", "benchmarks/batch_statistics.py", folder, *options])
    assert {line["command"] for line in found} == {command}
    assert f"{found[0]['value']:.2f} {found[1]['value']:.2f}" == rows["as saved"]
    assert rows["feat alone"] == rows["feat' alone"] == rows["without mixing"]
    after = am.load_run(folder).model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
