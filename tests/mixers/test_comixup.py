"""Co-Mixup: its joint assignment against brute force and a plain search, images and labels."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.contracts import Draw
from alignmixup.mixers.comixup import CoDraw, CoMixup, mix_blocks, mix_labels
from alignmixup.ops.joint import JointCosts, _State, assign_blocks, joint_objective
from cases import NUM_CLASSES, TinyNet, images, labels
from gridcut_oracles import salient_pictures
from learning import check_it_teaches


def draw_from(mixer: CoMixup, batch_size: int, seed: int = 0) -> CoDraw:
    draw = mixer.draw(batch_size, torch.Generator().manual_seed(seed))
    assert isinstance(draw, CoDraw)
    return draw


def realistic_costs(
    parts: int, inputs: int, n: int, penalty: str = "hard", sharpness: float = 1.0
) -> JointCosts:
    """The paper's costs, from the saliency of a network, as it is or sharper."""
    rng = torch.Generator().manual_seed(0)
    count = parts * inputs
    rows = torch.arange(count) % 256
    maps = salient_pictures().saliency[rows].double() ** sharpness
    blocks = F.avg_pool2d(maps.unsqueeze(1), 32 // n).view(count, -1)
    gammas = torch._standard_gamma(torch.full((parts, inputs), 2.0), generator=rng).double()
    prior = (gammas / gammas.sum(1, keepdim=True)).log() * 0.05 / n**2
    unary = -(blocks / blocks.sum(1, keepdim=True)).view(parts, inputs, -1) - prior.unsqueeze(2)
    windows = F.avg_pool2d(maps.unsqueeze(1), 8, 1).flatten(1).argmax(1).view(parts, inputs)
    peaks = torch.stack([windows // 25, windows % 25], dim=2).double()
    distance = torch.cdist(peaks, peaks, p=1)
    distance = distance * inputs / distance.sum((1, 2), keepdim=True).clamp_min(1e-12)
    compatibility = 0.999 * torch.eye(inputs).double() + 0.001 * distance
    is_real = torch.ones(parts, inputs, dtype=torch.bool)
    return JointCosts(unary, compatibility, is_real, 0.32 / n**2, 1 / n**2, 0.83 * n**2, penalty)


def random_start(restarts: int, costs: JointCosts, seed: int = 0) -> Tensor:
    parts, inputs, sites = costs.unary.shape
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(inputs, (restarts, parts, inputs, sites), generator=rng)


def one_part(costs: JointCosts, part: int, times: int) -> JointCosts:
    tensors = {
        name: getattr(costs, name)[part].expand(times, *getattr(costs, name).shape[1:])
        for name in ("unary", "compatibility", "is_real")
    }
    return dataclasses.replace(costs, **tensors)


def assigned(costs: JointCosts, start: Tensor, **settings: object) -> Tensor:
    return assign_blocks(costs, start, **settings).shares


# ---- the joint assignment ------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", ["hard", "soft"])
def test_objective_against_loops(penalty: str) -> None:
    costs = realistic_costs(2, 5, 2, penalty)
    costs = dataclasses.replace(costs, tau=2.0)
    rng = torch.Generator().manual_seed(0)
    shares = torch.rand(2, 5, 4, 5, generator=rng, dtype=torch.float64).softmax(3)
    values = joint_objective(costs, shares)
    edges = [(0, 1), (2, 3), (0, 2), (1, 3)]
    for p in range(2):
        total = 0.0
        for j in range(5):
            total += float((shares[p, j].T * costs.unary[p]).sum())
            for u, v in edges:
                total += costs.beta / 2 * float((shares[p, j, u] - shares[p, j, v]).square().sum())
            others = sum(shares[p, k].sum(0) for k in range(5) if k != j)
            counts = costs.compatibility[p] @ others
            less = 2.0 if penalty == "soft" else 0.0
            excess = torch.where(counts > 2.0, counts - less, 0.0)
            total += costs.gamma * float(shares[p, j].sum(0) @ excess)
        assert float(values[p]) == pytest.approx(total, rel=1e-9)


# Over 13 seeds of network and start no part missed the minimum.
@pytest.mark.parametrize(
    ("inputs", "parts"), [(2, 120), pytest.param(3, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("penalty", ["hard", "soft"])
def test_tiny_parts_reach_the_minimum(inputs: int, parts: int, penalty: str) -> None:
    above = above_the_minimum(realistic_costs(parts, inputs, 2, penalty), num_restarts=8)
    assert (above >= -1e-9).all()
    assert above.mean() < 1e-3
    assert (above > 1e-6).float().mean() < 0.1 or parts < 10


# Over 13 seeds the mean was at most 0.23 % above, and at least 0.77 % with a single restart; up to
# 12 of 120 parts missed the minimum, one by 11 %.
@pytest.mark.parametrize("sharpness", [2.0, 3.0, 4.0])
def test_tiny_parts_with_sharp_saliency_come_near_the_minimum(sharpness: float) -> None:
    above = above_the_minimum(realistic_costs(120, 2, 2, sharpness=sharpness), num_restarts=16)
    assert (above >= -1e-9).all()
    assert above.mean() < 5e-3
    assert (above > 1e-6).float().mean() < 0.2


def above_the_minimum(costs: JointCosts, num_restarts: int) -> Tensor:
    """By how much of it each part is above the least value of all."""
    start = random_start(num_restarts, costs)
    shares = assigned(costs, start, half_labels=False, resolve_ties=False)
    least = torch.tensor(least_of_all(costs), dtype=torch.float64)
    return (joint_objective(costs, shares) - least) / least.abs()


def least_of_all(costs: JointCosts) -> list[float]:
    """The least value on two by two blocks: of two inputs there are 256 ways, of three 531,441."""
    parts, inputs, _ = costs.unary.shape
    every = torch.cartesian_prod(*[torch.arange(inputs)] * (4 * inputs)).view(-1, inputs, 4)
    ways = [F.one_hot(some, inputs).double() for some in every.split(50_000)]
    return [
        min(float(joint_objective(one_part(costs, part, len(w)), w).min()) for w in ways)
        for part in range(parts)
    ]


# The saliency of the network as it is, and raised to powers that make it ever sharper. Over 13
# seeds every part was below the search, by 0.8 % of it at least at (8, 2), elsewhere by 8 %.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "n", "sharpness"),
    [
        pytest.param(20, 4, 1.0, marks=pytest.mark.slow),
        pytest.param(20, 4, 2.0, marks=pytest.mark.slow),
        (20, 4, 4.0),
        (12, 4, 3.0),
        pytest.param(8, 4, 1.0, marks=pytest.mark.slow),
        pytest.param(6, 4, 1.0, marks=pytest.mark.slow),
        (8, 2, 1.0),
    ],
)
def test_not_above_conditional_modes_with_ten_restarts(
    inputs: int, n: int, sharpness: float
) -> None:
    """No part of the paper's size is, nor any smaller one at the saliency of a network."""
    ours, searched = compare_with_conditional_modes(inputs, n, sharpness)
    assert (ours <= searched + 0.05 * searched.abs()).all()
    assert (ours.mean(1) < searched.mean()).all()


# Over 13 seeds the mean of six parts was 2 % or more below; a single part up to 7 % above.
@pytest.mark.slow
@pytest.mark.parametrize("inputs", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_small_parts_with_sharp_saliency_are_below_conditional_modes_on_the_whole(
    inputs: int,
) -> None:
    """There a plain search is now and then luckier, by a few per cent."""
    ours, searched = compare_with_conditional_modes(inputs, 4, 3.0, parts=16)
    assert (ours.mean(1) < searched.mean()).all()
    assert (ours <= searched + 0.25 * searched.abs().mean()).all()


def compare_with_conditional_modes(
    inputs: int, n: int, sharpness: float, parts: int | None = None
) -> tuple[Tensor, Tensor]:
    """The objective of whole inputs alone and of the full assignment, and of a plain search."""
    parts = parts or 40 // inputs
    costs = realistic_costs(parts, inputs, n, sharpness=sharpness)
    start = random_start(CoMixup().num_restarts, costs)
    plain = assigned(costs, start, half_labels=False, resolve_ties=False)
    full = assigned(costs, start)
    num_sweeps = 3 if inputs == 20 else 6
    searched = [search_modes(one_part(costs, part, 10), num_sweeps) for part in range(parts)]
    ours = torch.stack([joint_objective(costs, plain), joint_objective(costs, full)])
    return ours, torch.tensor(searched, dtype=torch.float64)


def search_modes(costs: JointCosts, num_sweeps: int) -> float:
    """Set one block at a time to its best input, from ten random starts; the best value found."""
    restarts, inputs, sites = costs.unary.shape
    side = round(sites**0.5)
    labels = random_start(1, costs, seed=1)[0]
    eye = torch.eye(inputs, dtype=torch.float64)
    rows = torch.arange(restarts)
    shown = F.one_hot(labels, inputs).double().sum(2)
    for _ in range(num_sweeps):
        for j in range(inputs):
            for site in range(sites):
                old = labels[:, j, site]
                shown[rows, j, old] -= 1
                many = shown.unsqueeze(1).repeat(1, inputs, 1, 1)
                many[:, :, j] += eye
                counts = (many.sum(2, keepdim=True) - many) @ costs.compatibility[:, None]
                crowding = (many * torch.where(counts > costs.tau, counts, 0.0)).sum((2, 3))
                r, c = divmod(site, side)
                near = [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
                value = costs.unary[:, :, site] + costs.gamma * crowding
                for row, column in near:
                    if 0 <= row < side and 0 <= column < side:
                        value = value - costs.beta * eye[labels[:, j, row * side + column]]
                best = value.argmin(1)
                labels[:, j, site] = best
                shown[rows, j, best] += 1
    return float(joint_objective(costs, F.one_hot(labels, inputs).double()).min())


def test_shares_are_whole_or_halves_and_halves_occur() -> None:
    costs = realistic_costs(3, 12, 4)
    shares = assigned(costs, random_start(4, costs))
    assert torch.equal(shares.sum(3), torch.ones_like(shares.sum(3)))
    assert set(shares.unique().tolist()) == {0.0, 0.5, 1.0}
    plain = assigned(costs, random_start(4, costs), half_labels=False)
    assert set(plain.unique().tolist()) == {0.0, 1.0}


def test_halves_are_of_inputs_the_output_shows() -> None:
    """The last block is as good with input 0 as with 2: halves of both, where 2 is shown at all."""
    unary = torch.zeros(1, 5, 4, dtype=torch.float64)
    unary[0, [0, 1, 0, 2], [0, 1, 3, 3]] = -1
    eye, is_real = torch.eye(5, dtype=torch.float64)[None], torch.ones(1, 5, dtype=torch.bool)
    for third, last in ((1, [1.0, 0, 0, 0, 0]), (2, [0.5, 0, 0.5, 0, 0])):
        unary[0, 1:3, 2] = 0
        unary[0, third, 2] = -1
        costs = JointCosts(unary, eye, is_real, beta=0.0, gamma=0.0, tau=100.0)
        shares = assigned(costs, random_start(2, costs), resolve_ties=False)
        expected = F.one_hot(torch.tensor([0, 1, third, 0]), 5).double()
        expected[3] = torch.tensor(last)
        assert torch.equal(shares, expected.expand(1, 5, 4, 5))


def test_crowding_spreads_the_inputs() -> None:
    """One input is better than all others everywhere: without the penalty every output shows it."""
    costs = realistic_costs(1, 6, 4)
    unary = costs.unary.clone()
    unary[0, 2] -= 0.3
    greedy = dataclasses.replace(costs, unary=unary, gamma=0.0)
    fair = dataclasses.replace(costs, unary=unary)
    start = random_start(4, costs)
    assert (assigned(greedy, start)[0, ..., 2] == 1).all()
    shown = assigned(fair, start)[0, ..., 2].sum((0, 1))
    assert shown < 3 * 16


def test_tied_outputs_are_pushed_apart() -> None:
    """Two of two inputs have every reason to look alike: half and half, left and right."""
    unary = torch.zeros(1, 2, 4, dtype=torch.float64)
    unary[0, 0, [0, 2]] = unary[0, 1, [1, 3]] = -0.1
    is_real = torch.ones(1, 2, dtype=torch.bool)
    eye = torch.eye(2, dtype=torch.float64)[None]
    # A third input fills up the part, as it does in the mixer.
    unary, eye = F.pad(unary, (0, 0, 0, 1)), F.pad(eye, (0, 1, 0, 1))
    is_real = F.pad(is_real, (0, 1))
    costs = JointCosts(unary, eye, is_real, beta=0.02, gamma=0.11, tau=100.0)
    start = torch.zeros(1, 1, 3, 4, dtype=torch.int64)
    alike = assigned(costs, start, half_labels=False, resolve_ties=False)[0, :2]
    assert torch.equal(alike[0], alike[1])
    assert (alike.sum(1) > 0).sum(1).tolist() == [2, 2]
    apart = assigned(costs, start, half_labels=False)[0, :2]
    assert apart[0].sum(0)[0] < apart[1].sum(0)[0]  # the first input is dearer in the first output


@pytest.mark.parametrize("penalty", ["hard", "soft"])
def test_the_last_changes_are_the_best_of_all_single_blocks(penalty: str) -> None:
    """In each output in turn, by trying them: of whole blocks and of halves, at an edge or not."""
    parts, inputs, side = 6, 4, 3
    rng = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    compatibility = 0.9 * torch.eye(inputs, dtype=torch.float64).expand(parts, -1, -1)
    is_real = torch.ones(parts, inputs, dtype=torch.bool)
    is_real[0, -1] = False
    unary = 2 * rand(parts, inputs, side**2)
    costs = JointCosts(unary, compatibility, is_real, 0.3, 0.1, tau=5.0, penalty=penalty)
    state = _State.of(costs, (rand(parts, inputs, side**2) * is_real.sum(1).view(-1, 1, 1)).long())
    other = _State.of(costs, (rand(parts, inputs, side**2) * is_real.sum(1).view(-1, 1, 1)).long())
    is_half = rand(parts, inputs, side**2, 1) < 0.7
    before = torch.where(is_half, (state.shares + other.shares) / 2, state.shares)
    state.shares = before.clone()
    state.descend()
    expected = before.clone()
    for part in range(parts):
        for j in range(int(is_real[part].sum())):
            now = expected[part, j]
            choices = ((now == 0) & is_real[part]).nonzero()
            trials = expected[part].repeat(len(choices) + 1, 1, 1, 1)  # the last one as it is
            for trial, (site, new) in zip(trials, choices.tolist(), strict=False):
                trial[j, site] = torch.eye(inputs)[new]
            values = joint_objective(one_part(costs, part, len(trials)), trials)
            expected[part] = trials[values.argmin()]
    torch.testing.assert_close(state.shares, expected)
    is_changed = (expected != before).any(3)
    assert is_changed.sum() > 15  # of 23 outputs
    assert (before.amax(3)[is_changed] < 1).any()
    assert (before.amax(3)[is_changed] == 1).any()


@pytest.mark.parametrize("num_iters", [1, 2, 3, 5])
def test_ties_are_pushed_apart_before_the_last_iteration(
    num_iters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("improve", "push_ties_apart"):
        monkeypatch.setattr(_State, name, lambda *args, name=name: calls.append(name))
    costs = realistic_costs(1, 4, 2)
    assigned(costs, random_start(1, costs), num_iters=num_iters)
    push = ["push_ties_apart"] if num_iters > 1 else []
    assert calls == ["improve"] * (num_iters - 1) + push + ["improve"]


def tied_costs(outputs: int, preference: float) -> JointCosts:
    """All outputs show inputs 0 and 1, a half each; another input costs ``preference`` more."""
    unary = torch.full((1, outputs, 4), 0.0)
    unary[0, 0, :2] = unary[0, 1, 2:] = -preference
    eye = torch.eye(outputs).unsqueeze(0)
    is_real = torch.ones(1, outputs, dtype=torch.bool)
    return JointCosts(unary, eye, is_real, beta=0.0, gamma=1.0, tau=100.0)


def test_a_tie_costs_one_however_many_outputs_share_it() -> None:
    start = torch.tensor([0, 0, 1, 1]).expand(1, 1, 5, 4).contiguous()
    state = _State.of(tied_costs(5, 1.5), start[0])
    state.push_ties_apart()
    assert state.push[0, :, 0].tolist() == [1, 1, 1, 1, 0]
    assert state.push[0, :, 1].tolist() == [0, 1, 1, 1, 1]
    assert not state.push[0, :, 2:].any()
    # A preference of 1.5 outweighs a push of 1, and one of 0.5 does not.
    kept = assigned(tied_costs(5, 1.5), start, half_labels=False)
    assert (kept.sum(2)[..., :2] == 2).all()
    assert not (assigned(tied_costs(5, 0.5), start, half_labels=False).sum(2)[..., :2] == 2).all()


@pytest.mark.parametrize("penalty", ["hard", "soft"])
def test_the_mixer_solves_the_papers_costs_with_its_settings(
    monkeypatch: pytest.MonkeyPatch, penalty: str
) -> None:
    """Parts of eight pictures, against costs that are stated without the mixer."""
    seen: list[tuple[JointCosts, dict[str, object]]] = []

    def watched(costs: JointCosts, start: Tensor, **settings: object) -> object:
        seen.append((costs, settings))
        return assign_blocks(costs, start, **settings)

    monkeypatch.setattr("alignmixup.mixers.comixup.assign_blocks", watched)
    search = {"num_iters": 2, "num_sweeps": 1, "half_labels": False, "resolve_ties": False}
    mixer = CoMixup(part_size=8, num_restarts=3, penalty=penalty, backend="reference", **search)
    gammas = torch._standard_gamma(
        torch.full((3, 8), 2.0), generator=torch.Generator().manual_seed(0)
    )
    prior = (gammas.double() / gammas.double().sum(1, keepdim=True)).flatten()
    draw = dataclasses.replace(draw_from(mixer, 24), prior=prior)
    maps = salient_pictures().saliency[torch.arange(24)].double()
    shares = mixer.shares(maps, draw)
    ((costs, settings),) = seen
    expected = realistic_costs(3, 8, 4, penalty)
    for field in dataclasses.fields(JointCosts):
        ours, theirs = getattr(costs, field.name), getattr(expected, field.name)
        if isinstance(ours, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
        else:
            assert ours == theirs
    assert settings == {**search, "backend": "reference"}
    start = (draw.start.flatten(2).transpose(0, 1).reshape(3, 8, 3, 16) * 8).long()
    found = assign_blocks(expected, start.permute(2, 0, 1, 3), **settings)
    assert torch.equal(shares, found.shares)


def test_parts_do_not_see_each_other() -> None:
    costs = realistic_costs(4, 8, 4)
    start = random_start(4, costs)
    together = assigned(costs, start)
    for part in range(4):
        alone = assigned(one_part(costs, part, 1), start[:, part : part + 1])
        assert torch.equal(alone[0], together[part])


def test_what_fills_up_a_part_changes_nothing() -> None:
    """A part of five, filled up to eight with nonsense, is the part of five."""
    costs = realistic_costs(2, 5, 4)
    start = random_start(4, costs)
    wide = dataclasses.replace(
        costs,
        unary=F.pad(costs.unary, (0, 0, 0, 3), value=-5.0),
        compatibility=F.pad(costs.compatibility, (0, 3, 0, 3)),
        is_real=F.pad(costs.is_real, (0, 3)),
    )
    narrow = assigned(costs, start)
    filled = assigned(wide, F.pad(start, (0, 0, 0, 3)))
    assert torch.equal(filled[:, :5, :, :5], narrow)
    assert filled[:, 5:].abs().sum() == 0
    assert filled[..., 5:].abs().sum() == 0


# ---- images and labels ---------------------------------------------------------------------------


class Watched(nn.Module):
    """A network that remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        logits: Tensor = self.net(x)
        return logits


@pytest.mark.parametrize("batch_size", [1, 2, 3, 20, 23, 41])
def test_targets_are_the_shares_one_sees(batch_size: int) -> None:
    """Each class is a corner of the color cube: a pixel's color tells the classes it shows."""
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])
    y = labels(batch_size)
    noise = 1e-3 * images(batch_size)  # or there is no saliency to go by
    x = (corners[y].view(-1, 3, 1, 1) + noise).clamp(0, 1)
    mixer, net = CoMixup(), Watched()
    mixed = mixer.apply(net, x, y, draw_from(mixer, batch_size))
    torch.testing.assert_close(mixed.targets.sum(1), torch.ones(batch_size))
    seen = net.seen[1].mean((2, 3))
    torch.testing.assert_close(seen, mixed.targets @ corners, atol=2e-3, rtol=0)
    if batch_size >= 20:
        assert (mixed.targets.amax(1) < 0.99).float().mean() > 0.3  # it does mix


def test_blocks_are_pixel_for_pixel_those_of_the_inputs() -> None:
    x, part_size = images(5), 3
    shares = torch.zeros(2, 3, 4, 3)
    shares[:, :, :, 0] = 1
    shares[0, 1, 2] = torch.tensor([0.0, 0.5, 0.5])
    shares[1, 1, 3] = torch.tensor([0.0, 1.0, 0.0])
    mixed = mix_blocks(x, shares, part_size)
    assert torch.equal(mixed[0], x[0])
    assert torch.equal(mixed[1][:, :8], x[0][:, :8])
    torch.testing.assert_close(mixed[1][:, 8:, :8], (x[1] + x[2])[:, 8:, :8] / 2)
    assert torch.equal(mixed[3], x[3])
    assert torch.equal(mixed[4][:, 8:, 8:], x[4][:, 8:, 8:])
    assert torch.equal(mixed[4][:, :8], x[3][:, :8])
    targets = mix_labels(torch.eye(5), shares, part_size)
    torch.testing.assert_close(targets[1], torch.tensor([0.75, 0.125, 0.125, 0, 0]))
    torch.testing.assert_close(targets[4], torch.tensor([0, 0, 0, 0.75, 0.25]))


def test_samples_mix_within_their_part_only() -> None:
    mixer, y = CoMixup(part_size=4), torch.arange(10)
    draw = draw_from(mixer, 10)

    class Ten(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(NUM_CLASSES, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.more(super().forward(x))

    targets = mixer.apply(Ten(), images(10), y, draw).targets
    for first in (0, 4, 8):
        inside = targets[first : first + 4, first : first + 4]
        torch.testing.assert_close(inside.sum(1), torch.ones(len(inside)))


def test_the_clean_loss_is_kept() -> None:
    mixer, x, y = CoMixup(), images(6), labels(6)
    mixed = mixer.apply(TinyNet(), x, y, draw_from(mixer, 6))
    clean = 2 / NUM_CLASSES * F.cross_entropy(TinyNet()(x), y)
    torch.testing.assert_close(mixed.extra["clean"], clean)
    silent = CoMixup(clean_lam=0.0).apply(TinyNet(), x, y, draw_from(mixer, 6))
    assert silent.extra == {}


def test_the_layout_of_the_images_is_kept() -> None:
    x, net, mixer = images(6).to(memory_format=torch.channels_last), Watched(), CoMixup()
    mixer.apply(net, x, labels(6), draw_from(mixer, 6))
    assert net.seen[1].is_contiguous(memory_format=torch.channels_last)


# ---- chance and settings -------------------------------------------------------------------------


@pytest.mark.unchecked_shapes  # hundreds of draws of the same shapes
@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.009, 0.011])
def test_a_prior_of_small_alpha_has_its_law(alpha: float) -> None:
    """The variance of a share of two is 1 / 4 / (2 alpha + 1): nearly always 0 or 1."""
    mixer, rng = CoMixup(alpha=alpha, part_size=2, num_restarts=1), torch.Generator().manual_seed(0)
    prior = mixer.draw(4000, rng).prior.view(2000, 2)
    torch.testing.assert_close(prior.sum(1), torch.ones(2000))
    assert float(prior[:, 0].mean()) == pytest.approx(0.5, abs=0.04)
    assert float(prior[:, 0].var()) == pytest.approx(0.25 / (2 * alpha + 1), abs=0.01)


def test_a_dirichlet_prior_for_each_part() -> None:
    mixer = CoMixup(grids=(2, 4))
    draw = draw_from(mixer, 47)
    for part in draw.prior.split(20):
        torch.testing.assert_close(part.sum(), torch.ones(()))
    assert draw.start.shape == (16, 47, int(draw.case), int(draw.case))
    rng = torch.Generator().manual_seed(0)
    priors = torch.stack([CoMixup().draw(20, rng).prior for _ in range(2000)])
    # Dirichlet(2, ..., 2): mean 1/20, variance (1/20) (19/20) / (40 + 1).
    assert float(priors.mean()) == pytest.approx(0.05, rel=1e-3)
    assert float(priors.var()) == pytest.approx(0.05 * 0.95 / 41, rel=0.05)


def test_published_settings() -> None:
    default = CoMixup()
    assert (default.alpha, default.part_size, default.grids) == (2.0, 20, (4,))
    assert (default.beta, default.gamma, default.eta) == (0.32, 1.0, 0.05)
    assert (default.omega, default.threshold, default.clean_lam) == (0.001, 0.83, 1.0)
    assert (default.num_iters, default.compat_size, default.compat_stride) == (4, 8, 1)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, "alpha must be positive and finite, got 0.0"),
        ({"part_size": 0}, "part_size must be an integer >= 1, got 0"),
        ({"num_restarts": 0}, "num_restarts must be an integer >= 1, got 0"),
        ({"grids": (0,)}, r"grids must be different integers .* got \(0,\)"),
        ({"penalty": "firm"}, "penalty must be 'hard' or 'soft', got 'firm'"),
        ({"omega": 2.0}, "omega must lie in .* got 2.0"),
        ({"beta": -1.0}, "beta must be >= 0 and finite, got -1.0"),
        ({"eta": math.nan}, "eta must be >= 0 and finite, got nan"),
        ({"gamma": math.inf}, "gamma must be >= 0 and finite, got inf"),
        ({"threshold": math.nan}, "threshold must be >= 0 and finite, got nan"),
        ({"clean_lam": math.inf}, "clean_lam must be >= 0 .* got inf"),
        ({"grids": 4}, r"grids must be a tuple of integers, such as \(2, 4\), got 4"),
        ({"grids": (4.0,)}, r"a tuple of integers, .* got \(4.0,\)"),
        ({"part_size": 8.0}, "part_size must be an integer >= 1, got 8.0"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoMixup(**settings)


@pytest.mark.unchecked_shapes
def test_bad_input_is_named() -> None:
    mixer = CoMixup()
    bare = Draw("4", torch.arange(2), torch.ones(()))
    with pytest.raises(ValueError, match="CoMixup needs a CoDraw, got a Draw"):
        mixer.apply(TinyNet(), images(2), labels(2), bare)
    with pytest.raises(ValueError, match=r"into 4 blocks per side, got \[2, 3, 14, 14\]"):
        mixer.apply(TinyNet(), images(2)[..., :14, :14], labels(2), draw_from(mixer, 2))
    # A grid that does not fit is named at once, not when it happens to be drawn.
    several = CoMixup(grids=(2, 3))
    start = dataclasses.replace(draw_from(CoMixup(grids=(2,)), 2), case="2")
    with pytest.raises(ValueError, match=r"into 3 blocks per side, got \[2, 3, 16, 16\]"):
        several.apply(TinyNet(), images(2), labels(2), start)


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learns_shapes() -> None:
    small = CoMixup(part_size=5, grids=(2,), num_restarts=1, num_iters=2, clean_lam=0.0, loss="ce")
    check_it_teaches(small, epochs=8)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [20, 26])
def test_a_step_can_be_captured(batch_size: int) -> None:
    mixer, x, y = CoMixup(), images(batch_size).double(), labels(batch_size)
    draw = draw_from(mixer, batch_size)
    here = mixer.apply(TinyNet().double(), x, y, draw)
    net, x, y, there = TinyNet().double().cuda(), x.cuda(), y.cuda(), draw.to("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mixer.apply(TinyNet().double().cuda(), x, y, there).loss().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed = mixer.apply(net, x, y, there)
        loss = mixed.loss()
        loss.backward()
    graph.replay()
    torch.testing.assert_close(loss.cpu(), here.loss(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mixed.targets.cpu(), here.targets)
