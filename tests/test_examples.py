"""The scripts and the notebook of ``examples/`` run, at a small size."""

import ast
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import alignmixup as am
from alignmixup.cli import main
from alignmixup.experiments.accuracies import Evaluator
from alignmixup.registry import plugin_module
from forked import finish, start_team
from torchvision_schemas import define_torchvision_schemas

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "alignmixup.ipynb"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))

# Arguments of a run of a few steps.
SMALL = {
    "accelerate_loop": ["--epochs", "1", "--num-train", "32", "--batch-size", "8"],
    "custom_mixer": ["--steps", "8"],
    "fsdp_vit": ["--dim", "32", "--depth", "2", "--steps", "2", "--image-size", "16"],
    "hf_trainer": ["--epochs", "1", "--num-train", "128", "--hidden", "32", "--layers", "2"],
    "lightning_module": ["--epochs", "1", "--num-train", "32", "--batch-size", "8"],
    "own_recipe": ["--epochs", "1", "--limit", "64"],
    "plain_loop": ["--epochs", "1", "--num-train", "128"],
    "resume_and_export": ["--epochs", "2", "--num-train", "32", "--width", "4"],
    "timm_task": ["--steps", "2", "--batch-size", "4", "--layer", "blocks.1"],
    "timm_model": ["--steps", "2", "--batch-size", "4", "--image-size", "32"],
    "vit_tokens": ["--steps", "2", "--batch-size", "8", "--dim", "32", "--depth", "3"],
}


@pytest.fixture
def load(monkeypatch):
    """Import a script by name, as Python would where it lies."""
    define_torchvision_schemas()
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def import_script(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return import_script


def test_every_script_has_a_small_run():
    assert sorted(SMALL) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_short_and_has_a_main(name):
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert ast.get_docstring(tree)
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert len(source.splitlines()) < 80


@pytest.mark.parametrize("mixer", ["AlignMixup", "CutMix", "ManifoldMixup"])
def test_plain_loop(load, mixer):
    assert 0 <= load("plain_loop").main([*SMALL["plain_loop"], "--mixer", mixer]) <= 100


def test_timm_model(load):
    losses = load("timm_model").main(SMALL["timm_model"])
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()


def test_timm_task(load):
    losses = load("timm_task").main(SMALL["timm_task"])
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()


# Advice of the frameworks on workers and devices, and what they still call of torch.
@pytest.mark.filterwarnings("ignore")
class TestFrameworks:
    def test_lightning_module(self, load, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # the script sets it, too; undone afterwards
        args = [*SMALL["lightning_module"], "--accelerator", "cpu"]
        trainer = load("lightning_module").main(args)
        assert trainer.global_step == 4
        metrics = trainer.callback_metrics
        assert {"train_loss", "train_accuracy_under_mixing", "val_accuracy"} <= metrics.keys()
        assert torch.stack(list(metrics.values())).isfinite().all()

    def test_hf_trainer(self, load, tmp_path, monkeypatch):
        # tests/datasets is on the path and looks like the library of that name.
        monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
        metrics = load("hf_trainer").main([*SMALL["hf_trainer"], "--out", str(tmp_path)])
        assert 0 < metrics["eval_loss"] < 10

    def test_accelerate_loop(self, load):
        from accelerate.state import AcceleratorState, GradientState, PartialState

        try:
            assert 0 <= load("accelerate_loop").main([*SMALL["accelerate_loop"]]) <= 1
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


def test_vit_tokens_reach_the_logits_except_after_the_last_block(load):
    effects = load("vit_tokens").main(SMALL["vit_tokens"])
    assert len(effects) == 3
    # The last block is followed by a mean over tokens, which an exact plan keeps.
    assert effects[:-1].min() > 10 * effects[-1]


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of torch 2.6 needs a GPU"
)
def test_fsdp_vit_in_one_process(load, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    losses = load("fsdp_vit").main(SMALL["fsdp_vit"])
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()


# Two ranks that hold half of each parameter, next to one that holds all and sees both batches.
SHARDED = """
import sys
import torch
import torch.distributed as dist
import alignmixup as am

sys.path.insert(0, sys.argv[1])
from fsdp_vit import ViT, shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
mixer = am.AlignMixup("blocks.1", num_iters=20)


def loss(model, rank):
    rng = torch.Generator().manual_seed(rank)
    x, y = torch.rand(4, 3, 16, 16, generator=rng), torch.arange(4)
    draw = am.Draw("feat", torch.tensor([1, 2, 3, 0]), torch.tensor(0.6))
    return mixer.apply(model, x, y, draw).loss()


models = []
for _ in range(2):
    torch.manual_seed(0)
    models.append(ViT(32, 2, 16, 4, 10))
whole, sharded = models[0], shard(models[1])
((loss(whole, 0) + loss(whole, 1)) / 2).backward()
loss(sharded, dist.get_rank()).backward()
parts = dict(sharded.named_parameters())
for name, parameter in whole.named_parameters():
    part = parts[name]
    if len(parameter) % 2 == 0:
        assert part.to_local().numel() == parameter.numel() // 2, name
    torch.testing.assert_close(part.grad.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-6)
dist.destroy_process_group()
print(len(parts), flush=True)
"""


@pytest.mark.slow
def test_sharded_parameters_get_the_gradients_of_whole_ones():
    first, second = finish(start_team(SHARDED, EXAMPLES))
    assert first == second
    assert int(first) > 20


def test_custom_mixer_keeps_the_contract(load):
    script = load("custom_mixer")
    assert len(script.main(SMALL["custom_mixer"])) == 8
    mixer, x, y = script.BandMix(), torch.rand(4, 3, 8, 8), torch.arange(4)
    shown = []

    class Spy(torch.nn.Module):
        def forward(self, images):
            shown.append(images)
            return images.mean((2, 3)) @ torch.ones(3, 4)

    draw = am.Draw("bands", torch.tensor([1, 2, 3, 0]), torch.tensor(0.75))
    mixed = mixer.apply(Spy(), x, y, draw)
    assert torch.equal(shown[0][:, :, :6], x[:, :, :6])
    assert torch.equal(shown[0][:, :, 6:], x[draw.perm][:, :, 6:])
    assert torch.equal(mixed.targets[0], torch.tensor([0.75, 0.25, 0, 0]))
    mixer.apply(Spy(), x, y, am.Draw("bands", draw.perm, torch.tensor(1.0)))
    assert torch.equal(shown[1], x)


def test_own_recipe_trains_by_its_file_and_from_python(tmp_path):
    path = EXAMPLES / "own_recipe.py"
    words = ["train", f"{path}:own_recipe", "--out", str(tmp_path / "a"), "--limit", "64"]
    assert main([*words, "--train.epochs", "1", "--mixer.strength", "0.5"]) == 0
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert record["mixer"] == {"kind": "FaintMix", "strength": 0.5}
    assert record["plugins"] == [str(path)]
    script = plugin_module(str(path))
    run = script.main([*SMALL["own_recipe"], "--out", str(tmp_path / "b")])
    assert run.recipe.mixer == script.FaintMix()


def test_resume_and_export_resumes_what_was_stopped(load, tmp_path, monkeypatch):
    script = load("resume_and_export")
    args = [*SMALL["resume_and_export"], "--out", str(tmp_path / "run")]

    def stop(self, net):
        os.kill(os.getpid(), signal.SIGINT)
        return {"top1": 0.0}

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "__call__", stop)
        with pytest.raises(KeyboardInterrupt):
            script.main(args)
    assert am.load_run(tmp_path / "run").epoch == 1
    written = script.main(args)
    assert [path.name for path in written] == ["net.safetensors", "net.json"]
    assert am.load_run(tmp_path / "run").epoch == 2


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_notebook_parses_and_is_saved_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
            assert not cell["outputs"]
            assert cell["execution_count"] is None


@pytest.mark.slow
def test_notebook_runs_top_to_bottom(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", plt.close)
    given = {}
    for number, code in enumerate(code_cells()):
        exec(compile(code, f"cell {number} of {NOTEBOOK.name}", "exec"), given)
