"""Lightning trains as a loop by hand with the same draws, also in two processes, and resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import alignmixup as am
from alignmixup.integrations.draws import share_done, step_rng
from alignmixup.wrappers import layer_names
from cases import TinyNet, images, labels
from docstring_example import run_example
from forked import Forked
from hand_loop import INSIDE, LR, MIXER, SEEN, Scheduled, assert_same_weights, data, trained_by_hand
from torchvision_schemas import define_torchvision_schemas

# The framework's own advice on workers and devices, and what it still calls of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _framework(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    define_torchvision_schemas()  # which the framework imports
    monkeypatch.chdir(tmp_path)


def test_draws_depend_on_seed_and_step_alone() -> None:
    first, again = (MIXER.draw(8, step_rng(1, 2, 3)) for _ in range(2))
    assert first.case == again.case
    assert torch.equal(first.perm, again.perm)
    shares = {
        float(torch.rand((), generator=step_rng(0, step), dtype=torch.float64))
        for step in range(100)
    }
    assert len(shares) == 100
    assert [share_done(3, 4), share_done(5, 4), share_done(1, -1)] == [0.75, 1.0, 0.0]
    assert share_done(1, float("inf")) == 0.0


def lightning_module(mixer: am.Mixer) -> Any:
    from lightning.pytorch import LightningModule

    from alignmixup.integrations.lightning import MixupModule

    class Module(MixupModule, LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mixer = TinyNet(), mixer

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), LR)

    return Module()


def fit(module: Any, batch_size: int = 4, ckpt_path: str | None = None, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, **settings}
    trainer = Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, DataLoader(data(), batch_size), ckpt_path=ckpt_path)
    return trainer


def test_lightning_trains_as_a_loop_by_hand() -> None:
    module = lightning_module(INSIDE)
    fit(module)
    assert_same_weights(module.net, trained_by_hand([step_rng(0, 0, i) for i in range(4)]))


def test_lightning_resumes_with_the_draws_of_an_uninterrupted_run() -> None:
    whole, first, second = (lightning_module(INSIDE) for _ in range(3))
    fit(whole, max_epochs=2)
    fit(first, max_epochs=1).save_checkpoint("epoch.ckpt")
    fit(second, max_epochs=2, ckpt_path="epoch.ckpt")
    for found, value in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, value)


def test_lightning_reports_progress_and_takes_an_own_loss() -> None:
    module = lightning_module(Scheduled())
    module.mixed_loss = lambda mixed: mixed.loss(nn.CrossEntropyLoss(label_smoothing=0.1))
    SEEN.clear()
    trainer = fit(module, max_epochs=2)
    assert [step / 8 for step in range(8)] == SEEN
    assert 0 <= trainer.callback_metrics["train_accuracy_under_mixing"] <= 1


@pytest.mark.parametrize("mixer", [None, am.CutMix, "cutmix"])
def test_lightning_names_what_is_no_mixer(mixer: Any) -> None:
    with pytest.raises(ValueError, match=r"mixer must be a mixer, such as .*CutMix\(\), got "):
        lightning_module(mixer).training_step((images(4), labels(4)), 0)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [({"image": images(4), "label": labels(4)}, "dict"), ([images(4)] * 3, "list of 3")],
)
def test_lightning_names_a_batch_that_is_no_pair(batch: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"got a {kind}: override .* super\(\)\.training_step"):
        lightning_module(MIXER).training_step(batch, 0)


@pytest.mark.slow
def test_lightning_in_two_processes_averages_two_half_batches() -> None:
    """With DDP each process mixes its half of a batch by the same draw.

    In a process of its own, which has one thread: a fork loses the others of torch.
    """
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    program = (
        f"import sys\nsys.path[:0] = {paths}\nimport torch\ntorch.set_num_threads(1)\n"
        "import test_integrations_lightning as tests\ntests.two_processes()\nprint('same')\n"
    )
    environment = {"OMP_NUM_THREADS": "1", "PL_GLOBAL_SEED": "0"}
    assert Forked(program, [], environment).finish()[-1] == "same"


def two_processes() -> None:
    define_torchvision_schemas()
    module = lightning_module(INSIDE)
    fit(module, batch_size=8, devices=2, strategy="ddp_fork", limit_train_batches=1)
    net = TinyNet()
    for rank in range(2):
        part = copy.deepcopy(net)
        rows = list(DistributedSampler(data(), 2, rank, seed=0))  # as Lightning makes them
        x, y = images(16)[rows], labels(16)[rows]
        MIXER(part, x, y, step_rng(0, 0, 0)).loss().backward()
        for parameter, own in zip(net.parameters(), part.parameters(), strict=True):
            half = own.grad / 2
            parameter.grad = half if parameter.grad is None else parameter.grad + half
    torch.optim.SGD(net.parameters(), LR).step()
    assert_same_weights(module.net, net)


def test_the_example_of_the_docstring_runs() -> None:
    import lightning

    from alignmixup.integrations.lightning import MixupModule

    given = {"lightning": lightning, "MixupModule": MixupModule, "make_network": TinyNet}
    names = run_example(MixupModule, given)
    assert isinstance(names["Classifier"]().configure_optimizers(), torch.optim.SGD)


# ---- Fabric --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_distributed", [False, True], ids=["plain", "DDP"])
@pytest.mark.parametrize(
    "mixer",
    [
        am.AlignMixup("layer2"),
        am.PuzzleMix(clean_lam=1.0),
        am.AutoMix("layer2"),
        am.SnapMix("layer4", "fc"),
    ],
    ids=lambda mixer: type(mixer).__name__,
)
def test_fabric_keeps_the_names_of_layers(mixer: am.Mixer, is_distributed: bool) -> None:
    """A module of ``Fabric.setup`` trains as the network in it."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    net = TinyNet("pool")
    twin = copy.deepcopy(net)
    wrapped = fabric.setup(net)
    if is_distributed:  # as the strategy "ddp" does it in several processes
        wrapped._modules["_forward_module"] = nn.parallel.DistributedDataParallel(net)
    assert layer_names(wrapped) == layer_names(net)
    for each, call in ((wrapped, fabric.backward), (twin, torch.autograd.backward)):
        torch.manual_seed(0)
        attached = mixer.attach(each, images(6))
        for step in range(3):
            call(attached(each, images(6), labels(6), step_rng(0, step)).loss())
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("clean_lam", [0.0, 1.0])
def test_saliency_in_mixed_precision_of_fabric(clean_lam: float) -> None:
    """Fabric refuses a backward pass other than its own."""
    from lightning.fabric import Fabric

    fabric, net = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed"), TinyNet("pool")
    wrapped, mixer = fabric.setup(net), am.PuzzleMix(clean_lam=clean_lam)
    loss = mixer(wrapped, images(6), labels(6), step_rng(0, 0)).loss()
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        loss.backward(retain_graph=True)
    fabric.backward(loss)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in net.parameters())
