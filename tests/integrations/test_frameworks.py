"""Each framework's loop trains as a loop of ours with the same draws, and resumes them."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import alignmixup as am
from alignmixup.integrations.draws import share_done, step_rng
from cases import NUM_CLASSES, TinyNet, images, labels
from torchvision_schemas import define_torchvision_schemas

# The frameworks' own advice on workers and devices, and what they still call of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

MIXER = am.AlignMixup("layer2", num_iters=5)
LR = 0.1


@pytest.fixture(autouse=True)
def _frameworks(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    define_torchvision_schemas()  # Lightning, timm and Transformers import torchvision
    monkeypatch.chdir(tmp_path)


def data() -> TensorDataset:
    return TensorDataset(images(16), labels(16))


def batches(size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(images(16).split(size), labels(16).split(size), strict=True)


def trained_by_hand(rngs: list[torch.Generator], accumulate: int = 1) -> TinyNet:
    """SGD over the batches in order, one generator a batch."""
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), LR)
    for number, ((x, y), rng) in enumerate(zip(batches(), rngs, strict=True), start=1):
        (MIXER(net, x, y, rng).loss() / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def assert_same_weights(net: nn.Module, expected: nn.Module) -> None:
    for found, value in zip(net.parameters(), expected.parameters(), strict=True):
        # Steps change weights by 1e-2; sums over samples may be in another order.
        torch.testing.assert_close(found, value, atol=1e-4, rtol=0)


@dataclass(frozen=True)
class Scheduled(am.InputMixup):
    """Input mixup that notes the progress of each draw."""

    def draw(self, batch_size, rng, progress=0.0):
        SEEN.append(progress)
        return super().draw(batch_size, rng)


SEEN: list[float] = []


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


# ---- Lightning -----------------------------------------------------------------------------------


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


def inside(layer: str) -> am.AlignMixup:
    return am.AlignMixup(f"net.{layer}", num_iters=5)


def test_lightning_trains_as_a_loop_by_hand() -> None:
    module = lightning_module(inside("layer2"))
    fit(module)
    assert_same_weights(module.net, trained_by_hand([step_rng(0, 0, i) for i in range(4)]))


def test_lightning_resumes_with_the_draws_of_an_uninterrupted_run() -> None:
    whole, first, second = (lightning_module(inside("layer2")) for _ in range(3))
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


def test_lightning_in_two_processes_averages_two_half_batches(monkeypatch) -> None:
    """With DDP each process mixes its half of a batch by the same draw."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    module = lightning_module(inside("layer2"))
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


# ---- Transformers --------------------------------------------------------------------------------


class Named(Dataset[dict[str, Tensor]]):
    """Samples in the names that Transformers use."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": images(16)[index], "labels": labels(16)[index]}


class Model(nn.Module):
    """A model as Transformers has them: it returns a loss beside its logits if it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import ImageClassifierOutput

        logits = self.net(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def hf_trainer(monkeypatch: pytest.MonkeyPatch, mixer: am.Mixer, **settings: Any) -> Any:
    import transformers

    from alignmixup.integrations.transformers import MixupTrainerMixin

    # tests/datasets is on the path and looks like the library of that name.
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)

    class InOrder(MixupTrainerMixin, transformers.Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    more = {name: settings.pop(name) for name in ("criterion", "model") if name in settings}
    args = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        **settings,
    }
    model = more.pop("model", None) or Model()
    arguments = transformers.TrainingArguments("out", **args)
    named = Named()
    return InOrder(model, arguments, train_dataset=named, eval_dataset=named, mixer=mixer, **more)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_trains_as_a_loop_by_hand(monkeypatch, accumulate: int) -> None:
    """Also with accumulation, though the model takes keyword arguments for its loss."""
    settings = {"gradient_accumulation_steps": accumulate}
    trainer = hf_trainer(monkeypatch, inside("layer2"), **settings)
    trainer.train()
    steps = [(i // accumulate, i % accumulate) for i in range(4)]
    expected = trained_by_hand([step_rng(0, *step) for step in steps], accumulate)
    assert_same_weights(trainer.model.net, expected)
    plain = nn.functional.cross_entropy(trainer.model.net.eval()(images(16)), labels(16))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.item(), abs=1e-4)


def test_trainer_resumes_with_the_draws_of_an_uninterrupted_run(monkeypatch) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = hf_trainer(monkeypatch, inside("layer2"), **saved)
    whole.train()
    again = hf_trainer(monkeypatch, inside("layer2"))
    again.train(resume_from_checkpoint="out/checkpoint-2")
    for found, value in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, value)


def test_trainer_reports_progress(monkeypatch) -> None:
    SEEN.clear()
    hf_trainer(monkeypatch, Scheduled()).train()
    assert SEEN == [0.0, 0.25, 0.5, 0.75]


def test_trainer_names_what_it_would_not_apply(monkeypatch) -> None:
    model = Model()
    model.config = argparse.Namespace()  # Trainer reads it before it smooths labels
    with pytest.raises(ValueError, match=r"label_smoothing_factor .* pass criterion="):
        hf_trainer(monkeypatch, MIXER, model=model, label_smoothing_factor=0.1)
    trainer = hf_trainer(monkeypatch, MIXER, criterion=nn.CrossEntropyLoss(label_smoothing=0.1))
    trainer.model.train()
    with pytest.raises(ValueError, match=r"got \['labels', 'mask'\].*remove_unused_columns=False"):
        trainer.compute_loss(trainer.model, {"labels": labels(4), "mask": labels(4)})
    batch = {"pixel_values": images(4), "labels": labels(4)}
    trainer.mixer = am.InputMixup()
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss.requires_grad
    assert outputs["logits"].shape == (4, NUM_CLASSES)


# ---- timm ----------------------------------------------------------------------------------------


def run_task(task: Any, wanted: range) -> None:
    optimizer = torch.optim.SGD(task.trainable_module.parameters(), LR)
    for number, (x, y) in enumerate(batches()):
        if number in wanted:
            result = task(x, y)
            assert result["output"].shape == (4, NUM_CLASSES)
            optimizer.zero_grad()
            result["loss"].backward()
            optimizer.step()


def test_timm_task_trains_as_a_loop_by_hand_and_resumes() -> None:
    from alignmixup.integrations.timm import MixupTask

    expected = trained_by_hand([step_rng(0, i) for i in range(4)])
    first = MixupTask(TinyNet(), MIXER, verbose=False)
    run_task(first, range(2))
    state = first.get_checkpoint_state()
    second = MixupTask(TinyNet(), MIXER, verbose=False)
    second.load_checkpoint_state(state["state_dict"], state["task_state"])
    run_task(second, range(2, 4))
    assert_same_weights(second.trainable_module, expected)
    x, y = images(4), labels(4)
    plain = nn.functional.cross_entropy(second.eval().trainable_module(x), y)
    torch.testing.assert_close(second(x, y)["loss"], plain)


def test_timm_task_is_compiled_and_wrapped_in_ddp(tmp_path) -> None:
    from alignmixup.integrations.timm import MixupTask

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.compiler.reset()
    try:
        task = MixupTask(TinyNet(), Scheduled(), nn.CrossEntropyLoss(), num_steps=4, verbose=False)
        task.mixer = MIXER
        task.compile(backend="eager")
        task.prepare_distributed()
        assert isinstance(task.trainable_module, DistributedDataParallel)
        run_task(task, range(4))
        expected = trained_by_hand([step_rng(0, i) for i in range(4)])
        assert_same_weights(task.trainable_module, expected)
        task.mixer, task.step = Scheduled(), 2
        SEEN.clear()
        task(images(4), labels(4))
        assert SEEN == [0.5]
    finally:
        torch.distributed.destroy_process_group()
        torch.compiler.reset()
