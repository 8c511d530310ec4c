"""The fused kernels of PuzzleMix and Co-Mixup against their references: the same labels.

Interpreted where there is no GPU, on few and small problems: the interpreter takes a second for one
of them. Processors contract products and sums as they like, and where one number is rounded to the
other side of a threshold a search ends elsewhere. So the joint assignment is given numbers whose
sums and products are exact, and the two must agree on every machine; cuts are compared by energy.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.ops import block_kernels as kernels
from alignmixup.ops.backend import choose_backend, refuse_blocks
from alignmixup.ops.gridcut import cut_ordered
from alignmixup.ops.joint import JointCosts, assign_blocks, joint_objective
from alignmixup.ops.puzzle import puzzle_energy, transport
from cases import TinyNet, draw_case, images, labels
from gridcut_oracles import ordered_energy, salient_pictures
from triton_interpreter import interpret_kernels

pytest.importorskip("triton")
interpret_kernels()

from alignmixup.ops.triton import (  # noqa: E402
    auction as _triton_auction,
    gridcut as _triton_gridcut,
    joint as _triton_joint,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_EXACT = DEVICE == "cpu"


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# ---- the ordered cut -----------------------------------------------------------------------------


def check_cut(unary: Tensor, down: Tensor, right: Tensor, **settings: int) -> None:
    cut = cut_ordered(unary, down, right, backend="triton", **settings)
    reference = cut_ordered(unary, down, right, backend="reference", **settings)
    assert (cut.backend, reference.backend) == ("triton", "reference")
    energy = ordered_energy(unary, down, right, cut.labels)
    torch.testing.assert_close(cut.energy, energy, rtol=1e-5, atol=1e-6)
    # Where one number is rounded to the other side of a threshold, the energies differ.
    near = torch.isclose(cut.energy, reference.energy, rtol=1e-5, atol=1e-6)
    assert near.float().mean() > (0.95 if len(near) > 50 else 0.6)
    torch.testing.assert_close(cut.energy, reference.energy, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("num_labels", "n", "m"),
    [
        *((3, 1, 1), (5, 1, 6), (2, 5, 3), (4, 3, 7)),
        *(
            pytest.param(*shape, marks=pytest.mark.slow)
            for shape in ((3, 6, 1), (3, 2, 2), (3, 8, 8), (3, 11, 13))
        ),
    ],
)
def test_cuts_of_any_shape(num_labels: int, n: int, m: int) -> None:
    check_cut(rand(4, num_labels, n, m), rand(4, n - 1, m, seed=1), rand(4, n, m - 1, seed=2))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_relaxations": 0, "num_sweeps": 1, "num_roundings": 1},
        {"num_relaxations": 7, "num_sweeps": 0, "num_roundings": 5},
        {"num_relaxations": 2, "num_sweeps": 5, "num_roundings": 40},
    ],
)
def test_cuts_with_other_settings(settings: dict[str, int]) -> None:
    check_cut(rand(3, 3, 5, 5), rand(3, 4, 5, seed=1), rand(3, 5, 4, seed=2), **settings)


@pytest.mark.parametrize("n", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8, 16))])
def test_cuts_of_puzzles(n: int) -> None:
    pictures = salient_pictures()
    num = 6 if IS_EXACT else 128
    perm = torch.arange(num).flip(0)
    lam = torch.linspace(0, 1, num)
    e = puzzle_energy(pictures.images[:num], pictures.saliency[:num], perm, lam, num_blocks=n)
    check_cut(e.unary.to(DEVICE), e.down.to(DEVICE), e.right.to(DEVICE))


@pytest.mark.parametrize("tile", [_triton_gridcut.TILE, 64])
def test_without_sweeps_a_cut_is_the_best_start(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """All of them at once, or two at a time. Light and heavy weights, so that each kind is best."""
    monkeypatch.setattr(_triton_gridcut, "TILE", tile)
    heavy = torch.tensor([0, 0.1, 1, 1, 3, 3, 9, 99], device=DEVICE).view(-1, 1, 1)
    unary = rand(8, 5, 4, 4) * 100 ** rand(8, 1, 4, 4, seed=3)
    args = unary, heavy * rand(8, 3, 4, seed=1), heavy * rand(8, 4, 3, seed=2)
    settings = {"num_relaxations": 3, "num_sweeps": 0, "num_roundings": 3}
    cut = cut_ordered(*args, backend="triton", **settings)
    reference = cut_ordered(*args, backend="reference", **settings)
    assert torch.equal(cut.labels, reference.labels)
    torch.testing.assert_close(cut.energy, reference.energy, rtol=1e-5, atol=1e-6)


def test_without_weights_or_sweeps_the_first_of_the_cheapest_labels_is_cut() -> None:
    unary = (rand(3, 4, 3, 3) * 4).floor()
    zero = torch.zeros(3, 2, 3, device=DEVICE)
    settings = {"num_relaxations": 1, "num_sweeps": 0, "num_roundings": 1}
    cut = cut_ordered(unary, zero, zero.mT.contiguous(), backend="triton", **settings)
    assert torch.equal(cut.labels, unary.argmin(1))
    assert torch.equal(cut.energy, unary.amin(1).sum((1, 2)))


def test_cuts_of_tiny_costs_are_those_of_large_ones() -> None:
    args = rand(3, 3, 4, 4), rand(3, 3, 4, seed=1), rand(3, 4, 3, seed=2)
    settings = {"num_relaxations": 3, "num_sweeps": 0, "num_roundings": 4, "backend": "triton"}
    cut = cut_ordered(*args, **settings)
    tiny = cut_ordered(*(2.0**-30 * costs for costs in args), **settings)
    assert torch.equal(tiny.labels, cut.labels)
    assert torch.equal(tiny.energy, 2.0**-30 * cut.energy)


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's numpy
def test_numbers_that_are_none_give_labels_all_the_same() -> None:
    """A network that has diverged must end in a loss that says so, not in a crash of the device."""
    unary = rand(2, 3, 4, 4)
    unary[0] = torch.nan
    cut = cut_ordered(unary, rand(2, 3, 4), rand(2, 4, 3), backend="triton")
    assert cut.labels.min() >= 0
    assert cut.labels.max() <= 2


# ---- the auction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))])
@pytest.mark.parametrize("t_eps", [0.8, pytest.param(0.05, marks=pytest.mark.slow), 0.0])
def test_transport_moves_the_same_blocks(n: int, t_eps: float) -> None:
    """Concentrated saliency and a small price of distance, so that many blocks want one place."""
    rng = torch.Generator().manual_seed(n)
    salient = (4 * torch.randn(5, n, n, generator=rng)).flatten(1).softmax(1).view(5, n, n)
    is_shown = torch.rand(5, n, n, generator=rng) < 0.4
    salient[0] = 1 / n**2
    salient[1] = torch.eye(n) / n
    is_shown[2], is_shown[3] = False, True
    x = torch.arange(n * n, dtype=torch.float32).view(1, 1, n, n).expand(5, 1, n, n)
    args = [tensor.to(DEVICE) for tensor in (x, salient, is_shown)]
    moved = transport(*args, t_eps, backend="triton")
    expected = transport(*args, t_eps, backend="reference")
    if t_eps == 0:
        assert torch.equal(moved, expected)
    else:
        assert (moved == expected).float().mean() > 0.8
    assert t_eps > 0.1 or n == 2 or (expected.cpu() != x).any()


@pytest.mark.parametrize("n", [3, 5])
def test_transport_with_exact_numbers(n: int) -> None:
    """In quarters, so that a place lost once, dearer by one, often costs as much as another."""
    rng = torch.Generator().manual_seed(n)
    salient = torch.randint(13, (3, n, n), generator=rng).to(DEVICE) / 4
    is_shown = (torch.rand(3, n, n, generator=rng) < 0.4).to(DEVICE)
    x = torch.arange(n * n, dtype=torch.float32, device=DEVICE).view(1, 1, n, n)
    args = (x.expand(3, 1, n, n), salient, is_shown, (n - 1) ** 2 / 4)
    moved = transport(*args, backend="triton")
    assert torch.equal(moved, transport(*args, backend="reference"))
    assert (moved != x).any()


def test_blocks_whose_saliency_is_no_number_stay() -> None:
    salient = torch.full((1, 3, 3), torch.nan, device=DEVICE)
    x = torch.arange(9.0, device=DEVICE).view(1, 1, 3, 3)
    is_shown = torch.ones(1, 3, 3, dtype=torch.bool, device=DEVICE)
    assert torch.equal(transport(x, salient, is_shown, backend="triton"), x)


# ---- the joint assignment ------------------------------------------------------------------------


def joint_costs(
    parts: int, inputs: int, n: int, penalty: str = "hard", sharpness: float = 2.0
) -> JointCosts:
    maps = salient_pictures().saliency[: parts * inputs] ** sharpness
    blocks = F.avg_pool2d(maps.unsqueeze(1), 32 // n, 32 // n).view(parts, inputs, -1)
    blocks = blocks[..., : n * n] / blocks[..., : n * n].sum(2, keepdim=True)
    # Far from the identity, to see every entry of A.
    A = torch.eye(inputs) + 0.25 * rand(parts, inputs, inputs, seed=3).cpu()
    is_real = torch.ones(parts, inputs, dtype=torch.bool)
    tensors = (_rounded(-blocks, 1024), _rounded((A + A.mT) / 2, 16), is_real)
    numbers = (round(256 * 0.32 / n**2) / 256, 2.0 ** -(n.bit_length() + 1), 0.75 * n**2)
    return JointCosts(*(tensor.to(DEVICE) for tensor in tensors), *numbers, penalty)


def _rounded(tensor: Tensor, parts: int) -> Tensor:
    """To so many parts of one: whatever is added or multiplied then fits a float32 exactly."""
    return (parts * tensor).round() / parts


@pytest.fixture
def _exact_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What halves save, exact as well."""
    monkeypatch.setattr("alignmixup.ops.joint.HALF_BONUS", 2.0**-11)
    if IS_EXACT:
        monkeypatch.setattr(_triton_joint, "BONUS", _triton_joint.tl.constexpr(2.0**-11))


def check_assignment(costs: JointCosts, restarts: int, **settings: object) -> Tensor:
    parts, inputs, sites = costs.unary.shape
    rng = torch.Generator().manual_seed(1)
    start = torch.randint(inputs, (restarts, parts, inputs, sites), generator=rng)
    start = start.to(DEVICE) % costs.is_real.sum(1).view(1, -1, 1, 1)
    found = assign_blocks(costs, start, backend="triton", **settings)
    expected = assign_blocks(costs, start, backend="reference", **settings)
    assert (found.backend, expected.backend) == ("triton", "reference")
    if IS_EXACT:
        assert torch.equal(found.shares, expected.shares)
    else:
        # One number rounded otherwise, and the search ends elsewhere: about as low, on the whole.
        ours, theirs = (joint_objective(costs, a.shares) for a in (found, expected))
        assert (ours - theirs).mean().abs() < 0.05 * theirs.abs().mean()
        near = torch.isclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert parts < 8 or near.float().mean() >= 0.5
    return found.shares


@pytest.mark.usefixtures("_exact_bonus")
@pytest.mark.parametrize(
    ("inputs", "n", "settings"),
    [
        pytest.param(3, 2, {}, marks=pytest.mark.slow),
        pytest.param(5, 4, {}, marks=pytest.mark.slow),
        (4, 3, {"half_labels": False}),
        pytest.param(
            *(4, 4, {"half_labels": False, "resolve_ties": False, "num_iters": 1}),
            marks=pytest.mark.slow,
        ),
        pytest.param(5, 3, {"num_iters": 2, "num_sweeps": 1}, marks=pytest.mark.slow),
    ],
)
def test_assignments(inputs: int, n: int, settings: dict[str, object]) -> None:
    shares = check_assignment(joint_costs(1, inputs, n), 2, **settings)
    assert torch.equal(shares.sum(3), torch.ones_like(shares[..., 0]))


@pytest.mark.parametrize(
    ("preference", "num_iters"), [(1.5, 3), pytest.param(0.5, 3, marks=pytest.mark.slow), (0.5, 1)]
)
def test_ties(preference: float, num_iters: int) -> None:
    """Five outputs that show the same two inputs: pushed by 1 each, before the last iteration."""
    unary = torch.zeros(1, 5, 4, device=DEVICE)
    unary[0, 0, :2] = unary[0, 1, 2:] = -preference
    is_real = torch.ones(1, 5, dtype=torch.bool, device=DEVICE)
    eye = torch.eye(5, device=DEVICE).unsqueeze(0)
    costs = JointCosts(unary, eye, is_real, beta=0.0, gamma=1.0, tau=100.0)
    shares = check_assignment(costs, 1, half_labels=False, num_iters=num_iters)
    is_tied = preference > 1 or num_iters == 1
    assert (shares.sum(2)[..., :2] == 2).all() == is_tied


@pytest.mark.usefixtures("_exact_bonus")
@pytest.mark.slow
def test_a_soft_penalty() -> None:
    check_assignment(joint_costs(1, 4, 3, "soft"), 1, num_iters=2)


@pytest.mark.usefixtures("_exact_bonus")
@pytest.mark.parametrize(
    ("seed", "inputs", "beta", "gamma"), [(1, 4, 1, 2), (5, 3, 1, 4), (7, 4, 16, 1)]
)
def test_assignments_of_four_blocks(seed: int, inputs: int, beta: int, gamma: int) -> None:
    """Crowded outputs, halves and ties; four outputs of which the last is filled up."""
    rng = torch.Generator().manual_seed(seed)
    unary = -torch.randint(33, (1, inputs, 4), generator=rng) / 64
    A = torch.eye(inputs) + torch.randint(5, (1, inputs, inputs), generator=rng) / 16
    is_real = torch.arange(inputs).unsqueeze(0) < 3
    tensors = (tensor.to(DEVICE) for tensor in (unary, (A + A.mT) / 2, is_real))
    costs = JointCosts(*tensors, beta / 64, gamma / 64, 3.0, "soft")
    shares = check_assignment(costs, 1, num_iters=3)
    assert (shares[0].sum((1, 2)) == 4 * is_real[0].to(shares)).all()


@pytest.mark.parametrize("penalty", ["hard", "soft"])
def test_single_changes_alone(penalty: str) -> None:
    """Without sweeps outputs keep their start, and one block of each may change in the end."""
    rng = torch.Generator().manual_seed(3)
    unary = -torch.randint(33, (4, 3, 4), generator=rng) / 64
    A = torch.eye(3) + torch.randint(5, (4, 3, 3), generator=rng) / 16
    is_real = torch.ones(4, 3, dtype=torch.bool)
    tensors = (tensor.to(DEVICE) for tensor in (unary, (A + A.mT) / 2, is_real))
    costs = JointCosts(*tensors, beta=1 / 8, gamma=1 / 8, tau=3.0, penalty=penalty)
    check_assignment(costs, 1, num_iters=1, num_sweeps=0)


@pytest.mark.slow
@pytest.mark.usefixtures("_exact_bonus")
def test_a_part_that_is_filled_up() -> None:
    costs = joint_costs(2, 4, 3)
    is_real = costs.is_real.clone()
    is_real[1, 3] = False
    shares = check_assignment(dataclasses.replace(costs, is_real=is_real), 1)
    assert shares[1, 3].abs().sum() == 0
    assert shares[1, ..., 3].abs().sum() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_exact_bonus")
def test_the_most_inputs() -> None:
    """32 of them, so that the last is the sign of a number; few blocks keep it short."""
    check_assignment(joint_costs(1, 32, 2), 1, num_iters=1, num_sweeps=1)


# ---- which path runs -----------------------------------------------------------------------------


def choose(backend: str, like: Tensor, *sizes: int) -> str:
    return choose_backend(backend, like.device, "reference", refuse_blocks, like, *sizes)


def test_auto_takes_the_kernels_on_a_gpu_and_not_elsewhere() -> None:
    expected = "triton" if DEVICE == "cuda" else "reference"
    assert choose("auto", rand(1), 16) == expected
    assert choose("auto", rand(1).double(), 16) == "reference"
    assert choose("auto", rand(1), 257) == "reference"
    assert choose("auto", rand(1), 65, 20) == "reference"
    assert choose("triton", rand(1), 256) == "triton"
    assert choose("triton", rand(1), 64, 32) == "triton"


@pytest.mark.unchecked_shapes
def test_asked_for_by_name_they_run_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        choose("cuda", rand(1), 16)
    with pytest.raises(ValueError, match=r"cannot run here: it computes in float32, got .*float64"):
        choose("triton", rand(1).double(), 16)
    with pytest.raises(ValueError, match="at most 256 blocks, got 400"):
        choose("triton", rand(1), 400)
    with pytest.raises(ValueError, match="at most 32 inputs, got 33"):
        choose("triton", rand(1), 16, 33)
    monkeypatch.setattr("alignmixup.ops.triton.common.INTERPRETED", False)
    with pytest.raises(ValueError, match="it needs a CUDA device, or TRITON_INTERPRET=1"):
        choose("triton", torch.rand(1), 16)


@pytest.mark.unchecked_shapes
def test_each_operator_asks_about_its_own_problem() -> None:
    with pytest.raises(ValueError, match="at most 256 blocks, got 272"):
        cut_ordered(rand(1, 3, 17, 16), rand(1, 16, 16), rand(1, 17, 15), backend="triton")
    with pytest.raises(ValueError, match="at most 256 blocks, got 289"):
        transport(rand(1, 3, 34, 34), rand(1, 17, 17), rand(1, 17, 17) < 0.5, backend="triton")
    for inputs, side, named in ((2, 9, "64 blocks, got 81"), (33, 2, "32 inputs, got 33")):
        is_real = torch.ones(1, inputs, dtype=torch.bool, device=DEVICE)
        unary, eye = rand(1, inputs, side**2), torch.eye(inputs, device=DEVICE)[None]
        costs = JointCosts(unary, eye, is_real, beta=0.0, gamma=0.0, tau=1.0)
        start = torch.zeros(1, 1, inputs, side**2, dtype=torch.int64, device=DEVICE)
        with pytest.raises(ValueError, match=f"at most {named}"):
            assign_blocks(costs, start, backend="triton")


@pytest.mark.slow
def test_the_mixers_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for module, name in (
        (_triton_gridcut, "cut"),
        (_triton_auction, "auction"),
        (_triton_joint, "assign"),
    ):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, k=kernel, n=name: (ran.append(n), k(*a))[1])
    puzzle = PuzzleMix(grids=(2,), t_size=-1, backend="triton")
    joint = CoMixup(grids=(2,), num_restarts=1, num_iters=2, backend="triton")
    x, y, net = images(4).to(DEVICE), labels(4).to(DEVICE), TinyNet().to(DEVICE).eval()
    for mixer in (puzzle, joint):
        draw = draw_case(mixer, "2", 4)
        ours = mixer.apply(net, x, y, draw)
        plain = dataclasses.replace(mixer, backend="reference").apply(net, x, y, draw)
        torch.testing.assert_close(ours.targets, plain.targets)
    assert ran == ["cut", "auction", "assign"]


def test_torch_compile_takes_the_kernels_as_they_are() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def masks(unary: Tensor, down: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        cut, _ = kernels.cut_ordered(2 * unary, down, right, 4, 2, 12)
        return cut + 1, kernels.auction(unary[:, 0], unary[:, 1] > 0.5, 0.8)

    unary, down, right = rand(2, 3, 3, 3), rand(2, 2, 3), rand(2, 3, 2)
    found, places = masks(unary, down, right)
    expected = cut_ordered(2 * unary, down, right, backend="reference").labels + 1
    assert torch.equal(found, expected)
    assert torch.equal(places, kernels.auction(unary[:, 0], unary[:, 1] > 0.5, 0.8))


def test_the_operators_know_their_shapes() -> None:
    """What torch.compile is told about them, against what they give."""
    grids = (rand(2, 3, 2, 4), rand(2, 1, 4), rand(2, 2, 3), 1, 1, 2)
    costs = joint_costs(1, 3, 2)
    start = torch.zeros(1, 1, 3, 4, dtype=torch.int64, device=DEVICE)
    numbers = (costs.beta, costs.gamma, costs.tau, False, 1, 1, True, False)
    for operator, args in (
        (kernels.cut_ordered, grids),
        (kernels.auction, (rand(2, 3, 3), rand(2, 3, 3) > 0.5, 0.8)),
        (
            kernels.joint_assignment,
            (costs.unary, costs.compatibility, costs.is_real, start, *numbers),
        ),
    ):
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 16])
def test_full_batches_of_transport(n: int) -> None:
    rng = torch.Generator().manual_seed(0)
    salient = torch.randn(256, n, n, generator=rng).flatten(1).softmax(1).view(256, n, n)
    is_shown = torch.rand(256, n, n, generator=rng) < 0.5
    x = torch.arange(n * n, dtype=torch.float32).view(1, 1, n, n).expand(256, 1, n, n)
    args = [tensor.to(DEVICE) for tensor in (x, salient, is_shown)]
    moved = transport(*args, backend="triton")
    assert (moved == transport(*args, backend="reference")).float().mean() > 0.99


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "n"), [(20, 4), (20, 2), (8, 8), (32, 4)])
def test_full_parts(inputs: int, n: int) -> None:
    check_assignment(joint_costs(8 if inputs <= 20 else 4, inputs, n), 16)


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", [PuzzleMix(), PuzzleMix(clean_lam=1.0), CoMixup()], ids=str)
def test_a_step_with_kernels_can_be_captured(mixer: PuzzleMix | CoMixup) -> None:
    """And replays with other numbers in its buffers."""
    for case in mixer.cases:
        x, y = images(64).cuda(), labels(64).cuda()
        net = TinyNet().cuda().eval()
        draws = [draw_case(mixer, case, 64, seed).to("cuda") for seed in (0, 1)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = [mixer.apply(net, x, y, draw).targets.clone() for draw in draws]
        torch.cuda.current_stream().wait_stream(stream)
        static = draws[0].with_tensors({k: v.clone() for k, v in draws[0].tensors().items()})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            targets = mixer.apply(net, x, y, static).targets
        for draw, target in zip(draws, expected, strict=True):
            for name, buffer in static.tensors().items():
                buffer.copy_(getattr(draw, name))
            graph.replay()
            # Convolutions may add up in another order, and a mask with them turn out otherwise.
            assert (targets == target).all(1).float().mean() > 0.9
