"""The task of timm trains as a loop by hand with the same draws, also compiled and in DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from alignmixup.integrations.draws import step_rng
from cases import NUM_CLASSES, TinyNet, images, labels
from docstring_example import run_example
from hand_loop import LR, MIXER, SEEN, Scheduled, assert_same_weights, batches, trained_by_hand
from torchvision_schemas import define_torchvision_schemas

# The framework's own advice on workers and devices, and what it still calls of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _framework(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    define_torchvision_schemas()  # which the framework imports
    monkeypatch.chdir(tmp_path)


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


def test_timm_criteria_of_soft_targets_also_evaluate() -> None:
    """Training gives them rows of class shares, and so does evaluation, also by class numbers."""
    from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

    from alignmixup.integrations.timm import MixupTask

    x, y = images(4), labels(4)
    rows = nn.functional.one_hot(y, NUM_CLASSES).float()
    for criterion in (SoftTargetCrossEntropy(), BinaryCrossEntropy(smoothing=0.0)):
        task = MixupTask(TinyNet(), MIXER, criterion, verbose=False).eval()
        expected = criterion(task.trainable_module(x), rows)
        for target in (y, rows):
            torch.testing.assert_close(task(x, target)["loss"], expected)


def test_timm_task_names_what_is_no_mixer() -> None:
    from alignmixup.integrations.timm import MixupTask

    with pytest.raises(ValueError, match=r"such as alignmixup\.CutMix\(\), got <class"):
        MixupTask(TinyNet(), type(MIXER), verbose=False)  # type: ignore[arg-type]


@pytest.mark.usefixtures("process_group")
def test_timm_task_is_compiled_and_wrapped_in_ddp() -> None:
    from alignmixup.integrations.timm import MixupTask

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
        torch.compiler.reset()


def test_the_example_of_the_docstring_runs() -> None:
    import timm

    from alignmixup.integrations.timm import MixupTask

    x, y = torch.rand(2, 3, 224, 224), torch.arange(2)
    run_example(MixupTask, {"timm": timm, "MixupTask": MixupTask, "images": x, "labels": y})
