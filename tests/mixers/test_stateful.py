"""What holds for every mixer with parameters or state; rows of ``cases.py`` that have a module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from alignmixup import fusion
from alignmixup.contracts import Mixer, fusing
from alignmixup.mixers.stateful import (
    NormUpdates,
    follow,
    make_teacher,
    probe,
    run,
    run_and_keep,
    run_to,
)
from cases import ROWS, Row, TinyNet, images, labels, params

STATEFUL = [row for row in ROWS if row.mixer.attach(TinyNet(), images(6)).module is not None]
every_stateful_row = pytest.mark.parametrize("row", params(STATEFUL))


def module_of(mixer: Mixer) -> nn.Module:
    assert mixer.module is not None
    return mixer.module


def state_of(mixer: Mixer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module_of(mixer).state_dict().items()}


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def steps(row: Row, mixer: Mixer, net: nn.Module, numbers: range) -> list[Tensor]:
    """Train some steps; return their losses."""
    own = [p for p in module_of(mixer).parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([*net.parameters(), *own], lr=0.1)
    losses = []
    for number in numbers:
        draw = mixer.draw(6, torch.Generator().manual_seed(number), progress=number / 10)
        loss = mixer.apply(net, images(6, seed=number), labels(6), draw).loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@every_stateful_row
def test_the_same_draws_and_state_give_the_same_losses_and_next_state(row: Row) -> None:
    """Also from a state that was saved and loaded, as a run does."""
    net = TinyNet()
    mixer = row.attached(net, images(6))
    steps(row, mixer, net, range(2))
    saved = state_of(mixer), {k: v.clone() for k, v in net.state_dict().items()}
    ahead = steps(row, mixer, net, range(2, 4))
    twin = TinyNet(seed=1)
    other = row.mixer.attach(twin, images(6))
    module_of(other).load_state_dict(saved[0])
    twin.load_state_dict(saved[1])
    assert all(map(torch.equal, ahead, steps(row, other, twin, range(2, 4))))
    assert_same_state(state_of(mixer), state_of(other))
    with pytest.raises(AssertionError):  # ... and there is a state that changes
        assert_same_state(state_of(mixer), saved[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_stateful_row
def test_network_and_module_are_converted_together(row: Row, dtype: torch.dtype) -> None:
    """After ``attach``, as Lightning does for precision="bf16-true"."""
    net = TinyNet()
    mixer = row.attached(net, images(6))
    draws = [mixer.draw(6, torch.Generator().manual_seed(number)) for number in range(2)]
    plain = copy.deepcopy((mixer, net))

    def losses(mixer: Mixer, net: nn.Module, dtype: torch.dtype) -> Tensor:
        found = [mixer.apply(net, images(6).to(dtype), labels(6), draw).loss() for draw in draws]
        torch.stack(found).sum().backward()
        return torch.stack(found).detach().double()

    module_of(mixer).to(dtype)
    rough = 0.05 if dtype.itemsize == 2 else 1e-4
    expected = losses(*plain, torch.float32)
    converted = losses(mixer, net.to(dtype), dtype)
    torch.testing.assert_close(converted, expected, atol=0, rtol=rough)


@every_stateful_row
def test_without_gradients_no_state_is_written(row: Row) -> None:
    net = TinyNet()
    mixer = row.attached(net, images(6))
    steps(row, mixer, net, range(2))
    before = state_of(mixer)
    draw = mixer.draw(6, torch.Generator().manual_seed(9), progress=0.5)
    with torch.no_grad():
        one, two = (mixer.apply(net, images(6), labels(6), draw) for _ in range(2))
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.loss(), two.loss())
    assert_same_state(before, state_of(mixer))


@every_stateful_row
def test_state_is_written_at_fixed_addresses(row: Row) -> None:
    """A captured step writes where it was captured."""
    net = TinyNet()
    mixer = row.attached(net, images(6))
    places = {name: value.data_ptr() for name, value in module_of(mixer).state_dict().items()}
    steps(row, mixer, net, range(2))
    after = {name: value.data_ptr() for name, value in module_of(mixer).state_dict().items()}
    assert places == after


@every_stateful_row
def test_every_parameter_of_the_module_gets_a_gradient_in_the_first_step(row: Row) -> None:
    net = TinyNet()
    mixer = row.attached(net, images(6))
    draw = mixer.draw(6, torch.Generator().manual_seed(0))
    mixer.apply(net, images(6), labels(6), draw).loss().backward()
    for name, parameter in module_of(mixer).named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        else:
            assert parameter.grad is None, name


@every_stateful_row
def test_attaching_changes_neither_the_network_nor_the_settings(row: Row) -> None:
    net, twin = TinyNet(), TinyNet()
    mixer = row.mixer.attach(net, images(6))
    assert row.mixer.module is None
    assert mixer == row.mixer
    assert repr(mixer) == repr(row.mixer)
    assert_same_state(dict(net.state_dict()), dict(twin.state_dict()))
    assert all(p.grad is None for p in net.parameters())


@every_stateful_row
def test_what_a_pass_leaves_in_the_network_does_not_matter(row: Row) -> None:
    """Such tensors have no deep copy."""

    class Keeping(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = {"maps": [self.layer2(self.layer1(x))]}
            return self.fc(self.layer4(self.kept["maps"][0]).flatten(1))

        def train(self, mode: bool = True) -> None:
            super().train(mode)  # and returns nothing, as modules of users do

    net, twin = Keeping(), Keeping()
    twin(images(6))
    one, other = (row.attached(each, images(6)) for each in (net, twin))
    assert torch.equal(*(steps(row, m, n, range(1))[0] for m, n in ((one, net), (other, twin))))


@every_stateful_row
def test_a_mixer_that_is_not_attached_is_named(row: Row) -> None:
    with pytest.raises(ValueError, match=r"call mixer = mixer.attach\(model, x\) first"):
        row.mixer(TinyNet(), images(6), labels(6))


@every_stateful_row
def test_a_function_in_place_of_the_network_is_named(row: Row) -> None:
    net, x, y = TinyNet(), images(6), labels(6)
    mixer = row.attached(net, x)
    draw = mixer.draw(6, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"needs an nn\.Module, got a function"):
        mixer.apply(lambda images: net(images), x, y, draw)  # type: ignore[arg-type]


@every_stateful_row
def test_an_unknown_layer_is_named(row: Row) -> None:
    import dataclasses

    mixer = dataclasses.replace(row.mixer, layer="layer9")
    with pytest.raises(ValueError, match="there is no layer 'layer9' in TinyNet"):
        mixer.attach(TinyNet(), images(6))


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name != "automix"))
        for row in STATEFUL
    ],
)
def test_fused_steps_are_the_plain_steps(row: Row) -> None:
    """In a step that compiles, teacher, masks and losses are traced whole, without a break."""
    found = []
    for is_fused in (False, True):
        net = TinyNet()
        mixer = row.attached(net, images(6))
        with fusing(is_fused):
            found.append((steps(row, mixer, net, range(3)), state_of(mixer)))
    assert fusion._compiled
    (plain, before), (fused, after) = found
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(after, before)


@pytest.mark.unchecked_shapes
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.usefixtures("traced")
def test_a_compiled_pass_runs_the_hooks_of_its_own_network() -> None:
    """What was compiled for a network is not taken for an equal one with a hook elsewhere."""
    x, one, other = images(3), TinyNet(), TinyNet()
    with fusing():
        run_and_keep(one, x, "layer2")
        run(one, x)
        run_and_keep(other, x, "layer2")
        features, _ = run_and_keep(other, x, "layer4")
    assert torch.equal(features, run_and_keep(TinyNet(), x, "layer4")[0])


# ---- teacher -------------------------------------------------------------------------------------


def test_a_teacher_stays_copies_or_moves_between() -> None:
    net, other = TinyNet(seed=0), TinyNet(seed=1)
    for share, expected in ((0.0, net), (1.0, other)):
        teacher = make_teacher(net)
        follow(teacher, other, torch.tensor(share))
        for ours, theirs in zip(teacher.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    teacher = make_teacher(net)
    follow(teacher, other, torch.tensor(0.25))
    expected_weight = 0.75 * net.fc.weight + 0.25 * other.fc.weight
    torch.testing.assert_close(teacher.fc.weight.data, expected_weight.data)
    assert teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize("momentum", [0.1, 0.4])
def test_updates_of_batch_norms_are_those_of_more_passes(momentum: float) -> None:
    x, other = images(6), images(6, seed=1)
    one, two = make_teacher(TinyNet()), make_teacher(TinyNet())
    for net in (one, two):
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = momentum
    with NormUpdates(one) as updates:
        one(x)
    one(other)
    updates.repeat(3)
    for batch in (x, other, x, x.flip(0), x):
        two(batch)
    statistics = {name: value for name, value in two.named_buffers() if "running" in name}
    assert statistics
    for name, value in statistics.items():
        torch.testing.assert_close(one.get_buffer(name), value, msg=name)


def test_a_pass_can_stop_at_a_layer() -> None:
    net, x = TinyNet(), images(3)
    ran = []
    net.layer4.register_forward_hook(lambda *call: ran.append("layer4"))
    expected = copy.deepcopy(net.layer2)(copy.deepcopy(net.layer1)(x))
    assert torch.equal(run_to(net, x, "layer2"), expected)
    assert not ran
    features, logits = run_and_keep(net, x, "layer2")
    assert torch.equal(features, expected)
    assert logits.shape == (3, 5)
    assert ran == ["layer4"]
    assert torch.equal(net(x), run(net, x))  # the hook that stays does nothing by itself
    assert ran == ["layer4"] * 3


def test_a_layer_that_does_not_run_once_is_named() -> None:
    class Twice(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            self.layer1(x)
            return super().forward(x)

    with pytest.raises(ValueError, match=r"layer 'layer1' ran 2 times in one forward pass"):
        run_and_keep(Twice(), images(3), "layer1")


def test_a_teacher_of_a_network_in_evaluation_mode_is_in_training_mode() -> None:
    net = TinyNet().eval()
    teacher = make_teacher(net)
    assert all(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not any(module.training for module in net.modules())
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_one_image_is_enough_to_look_at_a_network() -> None:
    """In training mode a batch norm of vectors needs two."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    kept, logits = probe(net.train(), torch.rand(1, 3, 2, 2), "1")
    assert (kept.shape, logits.shape) == ((1, 4), (1, 2))
    assert net[2].training


def test_only_norms_that_a_pass_moves_are_moved_again() -> None:
    net = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3).eval(),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, momentum=None),
    )
    x = images(6)
    with NormUpdates(net) as updates:
        net(x)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    updates.repeat(1)
    moved = {name for name, value in net.state_dict().items() if not value.equal(before[name])}
    assert moved == {"0.running_mean", "0.running_var"}
