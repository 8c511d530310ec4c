"""The figure of heads: its networks are trained once, and pooling hides alignment."""

import json

import pytest

from alignmixup.cli import main
from alignmixup.experiments import built_in
from alignmixup.experiments.built_in import BuiltIn

TINY = BuiltIn(width=4, num_test=40, head_epochs=1, head_images=64)


@pytest.mark.slow
def test_alignment_before_pooling_changes_no_logits_in_any_trained_network(tmp_path, monkeypatch):
    monkeypatch.setattr(built_in, "BUILT_IN", TINY)
    assert main(["figure", "heads", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "heads.jsonl").read_text().splitlines()]
    changes = {
        (r["settings"]["network"], r["settings"]["layer"]): r["value"]
        for r in lines
        if r["metric"] == "logits"
    }
    assert len(changes) == 8
    for network, layer in (("pooled head", "layer4"), ("AE pooled f", "encoder")):
        assert changes.pop((network, layer)) < 1e-5
    assert all(value > 1e-3 for value in changes.values()), changes


def test_heads_take_no_run(capsys):
    assert main(["figure", "heads", "--run", "somewhere"]) == 1
    assert "leave out the run somewhere" in capsys.readouterr().err
