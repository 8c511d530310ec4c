"""Trainer trains as a loop by hand with the same draws, also with accumulation, and resumes."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import alignmixup as am
from alignmixup.integrations.draws import step_rng
from cases import NUM_CLASSES, TinyNet, images, labels
from docstring_example import run_example
from hand_loop import INSIDE, LR, MIXER, SEEN, Scheduled, assert_same_weights, trained_by_hand
from torchvision_schemas import define_torchvision_schemas

# The framework's own advice on workers and devices, and what it still calls of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _framework(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    define_torchvision_schemas()  # which the framework imports
    monkeypatch.chdir(tmp_path)


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
    trainer = hf_trainer(monkeypatch, INSIDE, **settings)
    trainer.train()
    steps = [(i // accumulate, i % accumulate) for i in range(4)]
    expected = trained_by_hand([step_rng(0, *step) for step in steps], accumulate)
    assert_same_weights(trainer.model.net, expected)
    plain = nn.functional.cross_entropy(trainer.model.net.eval()(images(16)), labels(16))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.item(), abs=1e-4)


def test_trainer_resumes_with_the_draws_of_an_uninterrupted_run(monkeypatch) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = hf_trainer(monkeypatch, INSIDE, **saved)
    whole.train()
    again = hf_trainer(monkeypatch, INSIDE)
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


def test_trainer_names_what_is_no_mixer(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"such as alignmixup\.CutMix\(\), got <class"):
        hf_trainer(monkeypatch, am.CutMix)  # type: ignore[arg-type]


@pytest.mark.usefixtures("process_group")
def test_saliency_looks_through_as_logits_and_ddp() -> None:
    """Its own pass must not go through DDP, whose reducer expects a backward pass after each."""
    net, expected = Model(), TinyNet()
    wrapped = am.as_logits(DistributedDataParallel(net))
    mixer = am.PuzzleMix()
    for _ in range(2):
        mixer(wrapped, images(6), labels(6), step_rng(0)).loss().backward()
        mixer(expected, images(6), labels(6), step_rng(0)).loss().backward()
    for own, value in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, value.grad, atol=1e-4, rtol=0)


def test_the_example_of_the_docstring_runs(monkeypatch) -> None:
    import transformers

    from alignmixup.integrations.transformers import MixupTrainerMixin

    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = transformers.ViTConfig(image_size=16, patch_size=8, intermediate_size=16, **sizes)
    quiet = {"report_to": "none", "use_cpu": True, "max_steps": 1, "disable_tqdm": True}
    given = {
        "transformers": transformers,
        "MixupTrainerMixin": MixupTrainerMixin,
        "model": transformers.ViTForImageClassification(config),
        "args": transformers.TrainingArguments("out", **quiet),
        "data": [{"pixel_values": torch.rand(3, 16, 16), "labels": 1}] * 2,
    }
    run_example(MixupTrainerMixin, given)
