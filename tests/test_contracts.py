"""The shared contracts: draws, mixed batches, image sets, recipe keys and results."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import (
    Draw,
    ImageSet,
    Mixed,
    Mixer,
    RecipeKey,
    Result,
    fusible,
    fusing,
    sigmoid_bce,
    soft_targets,
)
from alignmixup.datasets.folder import BoxedFileSet, FileSet
from alignmixup.experiments.predict import Prediction
from alignmixup.ops.sinkhorn import Transport
from alignmixup.registry import MIXERS


@dataclass(frozen=True, slots=True)
class BoxedDraw(Draw):
    """A draw with more chance than most, as some methods have."""

    center: Tensor
    note: str = ""


def boxed() -> BoxedDraw:
    return BoxedDraw("cut", torch.tensor([1, 0]), torch.tensor(0.3), torch.rand(2, 2), note="kept")


# ---- draws ---------------------------------------------------------------------------------------


def test_tensors_are_all_the_tensors_of_a_subclass() -> None:
    draw = boxed()
    assert set(draw.tensors()) == {"perm", "lam", "center"}
    assert draw.tensors()["center"] is draw.center


def test_with_tensors_keeps_the_class_and_the_rest() -> None:
    draw = boxed()
    twin = draw.with_tensors({name: tensor.clone() for name, tensor in draw.tensors().items()})
    assert type(twin) is BoxedDraw
    assert (twin.case, twin.note) == ("cut", "kept")
    for name, tensor in draw.tensors().items():
        assert twin.tensors()[name] is not tensor
        assert torch.equal(twin.tensors()[name], tensor)
    only_lam = draw.with_tensors({"lam": torch.tensor(0.9)})
    assert only_lam.lam == torch.tensor(0.9)
    assert only_lam.perm is draw.perm
    with pytest.raises(TypeError, match="radius"):
        draw.with_tensors({"radius": torch.tensor(1.0)})


def test_to_moves_every_tensor_and_copies_none_that_is_there() -> None:
    draw = boxed()
    here = draw.to("cpu")
    assert all(here.tensors()[name] is tensor for name, tensor in draw.tensors().items())
    there = draw.to("meta")
    assert type(there) is BoxedDraw
    assert {tensor.device.type for tensor in there.tensors().values()} == {"meta"}
    assert there.case == "cut"


def test_records_of_tensors_are_equal_to_themselves_alone() -> None:
    """A comparison field by field would raise: torch has no single answer for a tensor."""
    first, second = (Draw("input", torch.arange(2), torch.tensor(0.5)) for _ in range(2))
    assert first == first
    assert first != second
    assert len({first, second}) == 2
    mixers = [MIXERS[name] for name in MIXERS]  # imports them all
    draws = [kind for kind in _below(Draw) if kind.__module__.startswith("alignmixup.mixers")]
    assert mixers
    assert len(draws) > 10
    for kind in (Draw, *draws, Mixed, ImageSet, FileSet, BoxedFileSet, Prediction, Transport):
        assert kind.__eq__ is object.__eq__, kind


def _below(kind: type) -> list[type]:
    return [found for each in kind.__subclasses__() for found in (each, *_below(each))]


def test_a_draw_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        boxed().case = "feat"


# ---- labels and losses ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint16])
def test_integers_become_one_hot(dtype: torch.dtype) -> None:
    rows = soft_targets(torch.tensor([2, 0, 2], dtype=dtype), 4)
    assert rows.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert rows.dtype == torch.float32


def test_soft_labels_pass() -> None:
    soft = torch.tensor([[0.25, 0.75]])
    assert soft_targets(soft, 2) is soft


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_soft_labels_of_many_classes_are_rounded_as_their_type_rounds(dtype: torch.dtype) -> None:
    """They sum to 1 as well as the type allows, and are mixed in float32 or better."""
    rows = torch.rand(8, 1000, generator=torch.Generator().manual_seed(0)).softmax(1).to(dtype)
    targets = soft_targets(rows, 1000)
    assert targets.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.equal(targets, rows.to(targets.dtype))


def test_no_labels_at_all_are_no_error() -> None:
    assert soft_targets(torch.empty(0, 3), 3).shape == (0, 3)
    assert soft_targets(torch.empty(0, dtype=torch.int64), 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 3]), r"0\.\.2, got 3; check the network's num_classes"),
        (torch.tensor([0, -1]), r"0\.\.2, got -1"),
        (torch.tensor([[0, 1]]), r"integer labels must have shape \[b\], got \[1, 2\]"),
        (torch.tensor([[0], [1]]), r"shape \[b\], got \[2, 1\]: squeeze them, or"),
        (torch.ones(2, 4), r"soft labels must have shape \[b, 3\] .* got \[2, 4\]"),
        (torch.ones(3), r"soft labels must have shape \[b, 3\] .* got \[3\]; .* labels\.long\(\)"),
        (torch.tensor([[0.2, 0.3, 0.5], [1.0, 1.0, 0.0]]), r"sum to 1 .* got 2 in row 1; divide"),
        (torch.tensor([[0.2, 0.3, 0.4]]), r"sum to 1 in each row, got 0.9 in row 0"),
        (torch.full((1, 3), torch.nan), r"sum to 1 in each row, got nan in row 0"),
    ],
)
def test_bad_labels_are_named(labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soft_targets(labels, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_row_may_be_off_by_a_thousandth(dtype: torch.dtype) -> None:
    """Shares are often written with three digits."""
    soft_targets(torch.tensor([[0.5, 0.4992]], dtype=dtype), 2)
    for last in (0.4985, 0.5015):
        with pytest.raises(ValueError, match="sum to 1 in each row"):
            soft_targets(torch.tensor([[0.5, last]], dtype=dtype), 2)


@pytest.mark.parametrize(
    "labels", [torch.zeros(2, dtype=torch.long), torch.zeros(2, 3), torch.zeros(2, 3).half()]
)
@pytest.mark.parametrize("multi_label", [False, True])
def test_labels_on_a_device_are_not_read(labels: Tensor, multi_label: bool) -> None:
    """Reading them would wait for the device; tensors on meta have no values to read."""
    rows = soft_targets(labels.to("meta"), 3, multi_label=multi_label)
    assert (rows.device.type, rows.dtype, rows.shape) == ("meta", torch.float32, (2, 3))


@pytest.mark.parametrize("labels", [torch.zeros(2, dtype=torch.long), torch.rand(2)])
@pytest.mark.parametrize("multi_label", [False, True])
def test_one_logit_takes_rows_of_multi_label_targets_alone(labels: Tensor, multi_label) -> None:
    """Its softmax is always 1, and class number 0 would be the positive class."""
    message = r"one logit .* set loss='sigmoid_bce' and pass labels \[b, 1\]"
    with pytest.raises(ValueError, match=message):
        soft_targets(labels, 1, multi_label=multi_label)
    with pytest.raises(ValueError, match=message):
        soft_targets(torch.ones(2, 1), 1)
    rows = torch.tensor([[0], [1]])
    assert torch.equal(soft_targets(rows, 1, multi_label=True), rows.float())


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets).square().mean()


def test_the_loss_is_all_there_is() -> None:
    logits, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    extra = {"reconstruction": torch.tensor(5.0), "prior": torch.tensor(0.5)}
    assert Mixed(logits, targets, criterion=squared).loss() == 2.0
    assert Mixed(logits, targets, extra, squared).loss() == 7.5
    assert Mixed(None, None, extra).loss() == 5.5
    assert Mixed(None, None, {"prior": torch.tensor(0.5)}).loss() == 0.5
    with pytest.raises(ValueError, match="neither logits nor extra"):
        Mixed(None, None).loss()


def test_a_loss_per_sample_is_returned_unless_others_are_added() -> None:
    logits, targets = torch.zeros(3, 4), torch.eye(4)[:3]
    per_sample = torch.nn.CrossEntropyLoss(reduction="none")
    assert Mixed(logits, targets).loss(per_sample).shape == (3,)
    for names in (["clean"], ["clean", "prior"]):
        extra = dict.fromkeys(names, torch.tensor(1.0))
        message = rf"returned \[3\], to which {' and '.join(names)} cannot be added.*mean"
        with pytest.raises(ValueError, match=message):
            Mixed(logits, targets, extra).loss(per_sample)


def test_a_criterion_of_ones_own_replaces_that_of_the_mixer_and_keeps_the_rest() -> None:
    logits, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    mixed = Mixed(logits, targets, {"prior": torch.tensor(0.5)})
    assert mixed.loss(squared) == 2.5
    weight = torch.tensor([1.0, 3.0])
    weighted = mixed.loss(nn.CrossEntropyLoss(weight=weight))
    by_hand = -(targets * weight * logits.log_softmax(1)).sum()
    torch.testing.assert_close(weighted, by_hand + 0.5)
    for wrong in (nn.CrossEntropyLoss, "ce"):
        with pytest.raises(ValueError, match=r"such as nn\.CrossEntropyLoss\(\), got "):
            mixed.loss(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sigmoid_bce_is_the_mean_over_samples_and_classes(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, generator=rng, dtype=torch.float64).to(dtype)
    targets = torch.rand(4, 3, generator=rng)
    p = logits.double().sigmoid()
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()
    torch.testing.assert_close(sigmoid_bce(logits, targets).double(), expected, atol=1e-6, rtol=0)


def test_multi_label_targets_need_not_sum_to_one() -> None:
    rows = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert soft_targets(rows, 3, multi_label=True) is rows
    assert torch.equal(soft_targets(rows.long(), 3, multi_label=True), rows)
    assert soft_targets(torch.tensor([2]), 3, multi_label=True).tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match=r"lie in \[0, 1\], got values from 0 to 2"):
        soft_targets(2 * rows, 3, multi_label=True)
    with pytest.raises(ValueError, match=r"lie in \[0, 1\], got values from -1 to"):
        soft_targets(-rows, 3, multi_label=True)
    with pytest.raises(ValueError, match="set loss='sigmoid_bce' for multi-label"):
        soft_targets(rows, 3)


def test_accuracy_under_mixing_is_the_label_mass_that_is_hit() -> None:
    targets = torch.tensor([[0.7, 0.3, 0.0], [0.0, 1.0, 0.0]])
    logits = torch.tensor([[0.0, 2.0, 1.0], [1.0, 2.0, 0.0]], requires_grad=True)
    mixed = Mixed(logits, targets)
    torch.testing.assert_close(mixed.accuracy_under_mixing(), torch.tensor((0.3 + 1) / 2))
    torch.testing.assert_close(mixed.accuracy_under_mixing(top=3), torch.tensor(1.0))
    assert not mixed.accuracy_under_mixing().requires_grad
    several = Mixed(logits, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert several.accuracy_under_mixing() == 0.5  # the second sample has no label to hit
    for bad, message in ((0, "from 1 to 3"), (4, "from 1 to 3, the classes, got 4")):
        with pytest.raises(ValueError, match=message):
            mixed.accuracy_under_mixing(top=bad)
    assert Mixed(logits, torch.zeros(2, 3)).accuracy_under_mixing() == 0
    for logits_or_none in (None, logits):
        with pytest.raises(ValueError, match="no logits"):
            Mixed(logits_or_none, None).accuracy_under_mixing()


def test_every_term_of_the_loss_gets_its_gradient() -> None:
    logits, weight = torch.zeros(1, 2, requires_grad=True), torch.ones((), requires_grad=True)
    Mixed(logits, torch.tensor([[1.0, 0.0]]), {"l2": 3 * weight}).loss().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5]]))
    assert weight.grad == 3


def test_a_mixer_without_its_parts_cannot_be_made() -> None:
    class Half(Mixer):
        def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
            return boxed()

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_calling_a_mixer_draws_for_the_batch_with_the_generator() -> None:
    class Record(Mixer):
        cases = {"only": 1.0}  # noqa: RUF012

        def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
            perm = torch.randperm(batch_size, generator=rng)
            return Draw("only", perm, torch.rand((), generator=rng))

        def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
            return Mixed(None, None, {"perm": draw.perm.float(), "lam": draw.lam})

    mixed = Record()(
        nn.Identity(), torch.rand(7, 2), torch.zeros(7), torch.Generator().manual_seed(3)
    )
    rng = torch.Generator().manual_seed(3)
    assert torch.equal(mixed.extra["perm"], torch.randperm(7, generator=rng).float())
    assert torch.equal(mixed.extra["lam"], torch.rand((), generator=rng))


def test_a_mixer_that_returns_something_else_is_named() -> None:
    class Plain(Mixer):
        cases = {"only": 1.0}  # noqa: RUF012

        def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
            return Draw("only", torch.arange(batch_size), torch.ones(()))

        def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
            return net(x)

    with pytest.raises(ValueError, match=r"^Plain\.apply must return a Mixed\(.*, got Tensor$"):
        Plain()(nn.Identity(), torch.rand(7, 2), torch.zeros(7))


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("num_classes", [3, 7])  # a loss would broadcast [7] to [7, 7]
def test_targets_of_another_shape_than_the_logits_are_named(num_classes: int) -> None:
    class Unsoftened(Mixer):
        cases = {"only": 1.0}  # noqa: RUF012

        def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
            return Draw("only", torch.arange(batch_size), torch.ones(()))

        def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
            return Mixed(net(x), y)

    named = rf"^Unsoftened\.apply returned logits \[7, {num_classes}\] and targets \[7\]: both must"
    with pytest.raises(ValueError, match=named):
        Unsoftened()(nn.Identity(), torch.rand(7, num_classes), torch.zeros(7))


def test_calling_a_mixer_hands_on_the_progress() -> None:
    class Scheduled(Mixer):
        cases = {"only": 1.0}  # noqa: RUF012

        def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
            return Draw("only", torch.arange(batch_size), torch.tensor(1 - progress))

        def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
            return Mixed(None, None, {"lam": draw.lam})

    for wrong in (-0.1, 7, float("nan")):
        with pytest.raises(ValueError, match=rf"from 0 to 1, got {wrong}: divide the step by"):
            Scheduled()(nn.Flatten(), torch.rand(2, 1, 1, 4), torch.arange(2), progress=wrong)
    for given, lam in (({}, 1.0), ({"progress": 0.25}, 0.75)):
        mixed = Scheduled()(nn.Identity(), torch.rand(7, 2), torch.zeros(7), **given)
        assert mixed.extra["lam"] == lam
    mixer = Scheduled()
    assert mixer.attach(nn.Identity(), torch.rand(7, 2)) is mixer
    assert mixer.module is None


# ---- image sets ----------------------------------------------------------------------------------


def image_set(**changes: object) -> ImageSet:
    good: dict[str, object] = {
        "name": "shapes",
        "split": "train",
        "images": torch.zeros(3, 3, 4, 5, dtype=torch.uint8),
        "labels": torch.tensor([0, 1, 1]),
        "class_names": ("disc", "ring"),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.2, 0.2, 0.2),
    }
    return ImageSet(**{**good, **changes})


def test_the_repr_of_an_image_set_is_one_short_line() -> None:
    """A notebook shows it; thousands of boxes would fill pages."""
    assert repr(image_set()) == "ImageSet('shapes', 'train', 3 images of 4 x 5, 2 classes)"
    boxes = tuple(torch.zeros(1, 4) for _ in range(3))
    assert repr(image_set(boxes=boxes)).endswith("2 classes, boxes)")


def test_an_image_set_counts_itself() -> None:
    assert len(image_set()) == 3
    assert image_set().num_classes == 2
    empty = image_set(
        images=torch.zeros(0, 3, 4, 4, dtype=torch.uint8), labels=torch.empty(0).long()
    )
    assert len(empty) == 0
    assert len(image_set(boxes=(torch.zeros(1, 4),) * 3).boxes) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"images": np.zeros((3, 3, 4, 5), np.uint8)},
            r"images must be a tensor, got ndarray: use torch\.as_tensor",
        ),
        ({"labels": [0, 1, 0]}, "labels must be a tensor, got list: use"),
        ({"labels": torch.rand(3)}, r"labels must be integers \[n\], got torch.float32 \[3\]"),
        ({"labels": torch.zeros(3, 1).int()}, r"integers \[n\], got torch.int32 \[3, 1\]"),
        ({"images": torch.zeros(3, 3, 4, 5)}, r"must be uint8 .* got torch.float32 \[3, 3, 4, 5\]"),
        ({"images": torch.zeros(3, 1, 4, 5, dtype=torch.uint8)}, r"got torch.uint8 \[3, 1, 4, 5\]"),
        ({"images": torch.zeros(3, 4, 5, dtype=torch.uint8)}, r"got torch.uint8 \[3, 4, 5\]"),
        ({"labels": torch.tensor([0, 1])}, "3 images but 2 labels"),
        ({"labels": torch.tensor([0, 2, 1])}, r"labels must lie in 0\.\.1, got 2"),
        ({"labels": torch.tensor([0, -3, 1])}, r"labels must lie in 0\.\.1, got -3"),
        ({"boxes": (torch.zeros(1, 4),) * 2}, "3 images but boxes for 2"),
    ],
)
def test_a_bad_image_set_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"shapes/train: .*{message}"):
        image_set(**changes)


# ---- results -------------------------------------------------------------------------------------


KEY = RecipeKey("tiny", "r18", "none", "fast")
BASE = RecipeKey("cifar10", "r18", "none", "fast")


def test_a_name_is_rendered_from_the_parts_of_a_key() -> None:
    plain = RecipeKey("cifar10", "wrn28-10", "alignmixup-ae")
    assert (plain.name, plain.labels) == ("cifar10-wrn28-10-alignmixup-ae", ())
    twin = plain.labeled("unaligned", "", "fast")
    assert twin.name == "cifar10-wrn28-10-alignmixup-ae-unaligned-fast"
    assert (twin.variant, twin.labels) == ("unaligned-fast", ("unaligned", "fast"))
    assert twin.labeled() == twin != plain
    assert len({plain, twin, dataclasses.replace(twin, variant="")}) == 2


def test_a_line_of_before_keys_has_one_of_its_settings_and_its_old_name() -> None:
    old = {"task": "accuracy", "metric": "top1", "value": 95.1, "recipe": "ablation-cifar100-ae-xA"}
    trained = {"mixer": "AlignMixupAE", "data.name": "cifar100", "net.name": "preact_resnet18"}
    read = Result.from_json(json.dumps({**old, "trained": trained}))
    expected = RecipeKey("cifar100", "preact_resnet18", "AlignMixupAE", "ablation-cifar100-ae-xA")
    assert read.key == expected
    assert Result.from_json(read.to_json()) == read
    older = Result.from_json(json.dumps(old))
    assert older.key == RecipeKey("unknown", "unknown", "unknown", "ablation-cifar100-ae-xA")


def result() -> Result:
    return Result("fgsm", "error", 12.5, settings={"eps": 8 / 255, "steps": [1, 2], "note": None})


def test_a_result_is_one_line_of_json_and_back() -> None:
    stamped = result().stamped(key=KEY, base=BASE, seed=3, epoch=200, version="0.1.0")
    line = stamped.to_json()
    assert "\n" not in line
    assert json.loads(line)["settings"] == {"eps": 8 / 255, "steps": [1, 2], "note": None}
    assert Result.from_json(line) == stamped
    assert (stamped.task, stamped.value, stamped.seed) == ("fgsm", 12.5, 3)
    assert result().seed is None  # stamping makes another record


def test_a_line_without_provenance_is_a_result_too() -> None:
    short = '{"task": "accuracy", "metric": "top1", "value": 95.1}'
    assert Result.from_json(short) == Result("accuracy", "top1", 95.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(1.0), "high", None, True])
def test_what_is_no_number_is_not_written(value):
    what = re.escape(f"ece = {value} of tiny-r18-none-fast cannot be recorded")
    with pytest.raises(ValueError, match=what):
        Result("calibration", "ece", value, key=KEY).to_json()


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(1.0)])
def test_a_setting_that_json_does_not_have_is_not_written(value):
    with pytest.raises(ValueError, match=r"calibration ece = 1\.0 of no recipe cannot be recorded"):
        Result("calibration", "ece", 1.0, {"bin_width": value}).to_json()


def test_a_line_of_an_earlier_version_that_has_one_is_read():
    line = '{"task": "reconstruction", "metric": "error", "value": NaN}'
    assert math.isnan(Result.from_json(line).value)


def test_what_is_not_known_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown fields \['gpu', 'host'\]"):
        Result.from_json('{"task": "a", "metric": "b", "value": 1, "host": "x", "gpu": 1}')
    with pytest.raises(TypeError, match="machine"):
        result().stamped(machine="x")
    with pytest.raises(ValueError, match="has a value"):
        Result.from_json('{"task": "a", "metric": "b"}')


@pytest.mark.unchecked_shapes
def test_what_is_fusible_is_compiled_inside_the_block_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled as far as the graphs: whether the machine has a C++ compiler is not our law."""
    to_graphs = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", to_graphs)
    traced = []

    @fusible
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return (x + 1) * factor

    x = torch.randn(5, requires_grad=True)
    expected = scaled(x, 3.0)
    with fusing():
        fused = scaled(x, 3.0)
        with fusing(False):
            scaled(x, 3.0)
    assert traced == [False, True, False]
    torch.testing.assert_close(fused, expected)
    (gradient,) = torch.autograd.grad(fused.sum(), x)
    assert torch.equal(gradient, torch.full((5,), 3.0))


def test_chance_comes_from_a_generator_or_from_torch():
    from alignmixup.mixers.input_mixup import InputMixup

    net, x, y = torch.nn.Flatten(), torch.rand(6, 1, 1, 4), torch.arange(6) % 4
    first, again = (
        InputMixup()(net, x, y, rng=torch.Generator().manual_seed(3)).targets for _ in range(2)
    )
    assert torch.equal(first, again)
    for wrong in (0, 3, "cpu"):
        with pytest.raises(ValueError, match=r"rng must be a torch.Generator, got"):
            InputMixup()(net, x, y, rng=wrong)


def test_keys_pickled_before_they_moved_still_open():
    key = RecipeKey("cifar10", "r18", "cutmix")
    now = pickle.dumps(key, protocol=2)
    before = now.replace(b"calignmixup.results\n", b"calignmixup.contracts\n")
    assert before != now
    assert pickle.loads(before) == key
