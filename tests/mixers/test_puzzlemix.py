"""PuzzleMix: its saliency pass, its energy, its transport, and what images and labels become."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alignmixup.contracts import Draw, soft_cross_entropy
from alignmixup.mixers.puzzlemix import PuzzleDraw, PuzzleMix, _uniform_noise
from alignmixup.ops.gradient_saliency import block_saliency, gradient_saliency
from alignmixup.ops.gridcut import GridCut, cut_ordered
from alignmixup.ops.puzzle import puzzle_energy, repeat_blocks, transport
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels, with_lam
from gridcut_oracles import ordered_energy, salient_pictures
from learning import check_it_teaches

EVERY_GRID = [str(n) for n in PuzzleMix().grids]


class Watched(nn.Module):
    """A network that remembers what it was shown, and in which mode."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seen: list[Tensor] = []
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        self.modes.append(self.training)
        logits: Tensor = self.net(x)
        return logits


# ---- the saliency pass ---------------------------------------------------------------------------


class _HalfGradient(torch.autograd.Function):
    """Round gradients to float16, as the layers of a network in autocast do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.half().float()


@pytest.mark.parametrize("clean_lam", [0.0, 1.0])
def test_float16_keeps_the_saliency_of_a_confident_network(clean_lam: float) -> None:
    """The gradient of a mean over 64 images is smaller than the least number of float16."""

    class Confident(TinyNet):
        is_half = False

        def forward(self, x: Tensor) -> Tensor:
            logits = 1e-3 * super().forward(x) + 15 * torch.eye(NUM_CLASSES)[labels(64)]
            return _HalfGradient.apply(logits) if self.is_half else logits

    found = []
    for is_half in (False, True):
        net = Confident("pool").eval()
        net.is_half = is_half
        saliency = gradient_saliency(net, images(64), labels(64), clean_lam=clean_lam, loss="ce")
        found.append([saliency.maps])
        if clean_lam:
            saliency.extra["clean"].backward()
            found[-1].append(net.fc.weight.grad)
    assert found[0][0].amax((1, 2)).min() > 0
    for exact, half in zip(*found, strict=True):
        torch.testing.assert_close(half, exact, atol=0.05 * float(exact.abs().max()), rtol=0.05)


def test_saliency_is_the_gradient_of_the_loss() -> None:
    net, x, y = TinyNet().double().eval(), images(4, dtype=torch.float64), labels(4)
    saliency = gradient_saliency(net, x, y)
    seen = x.clone().requires_grad_()
    F.cross_entropy(net(seen), y).backward()
    torch.testing.assert_close(saliency.gradient, seen.grad)
    expected = seen.grad.square().mean(1).sqrt()
    largest = seen.grad.abs().amax((1, 2, 3))
    torch.testing.assert_close(saliency.maps * largest.view(-1, 1, 1), expected)


def test_saliency_of_the_normalized_input() -> None:
    """``std`` turns the gradient at a pixel into that at the normalized input."""
    std, net, x, y = (0.2, 0.3, 0.5), TinyNet().double().eval(), images(4), labels(4)
    x = x.double()
    scale = torch.tensor(std, dtype=torch.float64).view(3, 1, 1)
    inner = gradient_saliency(net, x / scale, y)
    outer = gradient_saliency(nn.Sequential(Scaled(scale), net), x, y, std=std)
    torch.testing.assert_close(outer.maps, inner.maps)


class Scaled(nn.Module):
    def __init__(self, std: Tensor) -> None:
        super().__init__()
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        return x / self.std


def test_a_discarded_pass_leaves_no_trace() -> None:
    """Modes, running statistics and gradients are as before, also where modes were mixed."""
    net = TinyNet()
    net.layer2.eval()
    net.layer1.requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    is_learned = [parameter.requires_grad for parameter in net.parameters()]
    asked: list[bool] = []
    net.register_forward_pre_hook(
        lambda m, _: asked.extend(parameter.requires_grad for parameter in m.parameters())
    )
    watched = Watched(net)
    saliency = gradient_saliency(watched, images(4), labels(4))
    assert watched.modes == [False]
    assert not any(asked)  # compiled code would work out gradients that nobody wants
    assert [parameter.requires_grad for parameter in net.parameters()] == is_learned
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert saliency.extra == {}


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_a_kept_pass_adds_its_gradients(loss: str) -> None:
    """One backward pass gives what two would: that of the mixed loss and that of the clean one."""
    x, y = images(6, dtype=torch.float64), labels(6)
    mixer = PuzzleMix(clean_lam=0.7, loss=loss)
    draw = draw_case(mixer, "4", 6)
    net = TinyNet().double()
    watched = Watched(net)
    mixed = mixer.apply(watched, x, y, draw)
    (3 * mixed.loss()).backward()
    assert watched.modes == [True, True]
    twin = TinyNet().double()
    scale = 0.7 * (2 / NUM_CLASSES if loss == "bce" else 1)
    clean = scale * F.cross_entropy(twin(x), y)
    again = mixed.criterion(twin(watched.seen[1]), mixed.targets)
    (3 * (clean + again)).backward()
    torch.testing.assert_close(mixed.loss(), clean + again)
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_hooks_of_parameters_run_once() -> None:
    """As rates per layer or clipping by hooks: twice would scale the clean gradient twice."""
    mixer = PuzzleMix(clean_lam=1.0)
    draw = draw_case(mixer, "4", 4)
    plain, hooked = TinyNet(), TinyNet()
    for parameter in hooked.parameters():
        parameter.register_hook(lambda gradient: -0.5 * gradient)
    for net in (plain, hooked):
        mixer.apply(net, images(4), labels(4), draw).loss().backward()
    for one, other in zip(plain.parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(other.grad, -0.5 * one.grad, atol=1e-6, rtol=1e-4)


def test_hooks_of_layers_see_the_gradient_of_the_loss() -> None:
    """Saliency takes a multiple of it, which a hook that clips would cut."""
    x, y = images(4, dtype=torch.float64), labels(4)
    mixer = PuzzleMix(clean_lam=1.0, loss="ce")
    draw = draw_case(mixer, "4", 4)
    nets = [TinyNet().double() for _ in range(2)]
    for net in nets:
        net.layer2.register_full_backward_hook(lambda _, grads, __: (grads[0].clamp(-0.01, 0.01),))
    watched = Watched(nets[0])
    mixed = mixer.apply(watched, x, y, draw)
    mixed.loss().backward()
    clean = F.cross_entropy(nets[1](x), y)
    (clean + mixed.criterion(nets[1](watched.seen[1]), mixed.targets)).backward()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_second_derivative_of_a_kept_pass_is_an_error() -> None:
    mixer, net = PuzzleMix(clean_lam=1.0), TinyNet()
    loss = mixer.apply(net, images(4), labels(4), draw_case(mixer, "4", 4)).loss()
    with pytest.raises(ValueError, match=r"no second derivative: set clean_lam=0"):
        torch.autograd.grad(loss, [*net.parameters()], create_graph=True)


def test_a_checkpointed_network_has_the_same_saliency() -> None:
    """Checkpointing runs the layers again in the backward pass: in the mode of the first time."""

    class Checkpointed(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return logits

    net, x, y = TinyNet(), images(4), labels(4)
    again = Checkpointed()
    again.load_state_dict(net.state_dict())
    one, other = (gradient_saliency(each, x, y) for each in (net, again))
    assert torch.equal(one.gradient, other.gradient)


class Functional(nn.Module):
    """A network whose weights are not its own parameters."""

    def __init__(self, net: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.net, self.weights = net, weights

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.net, self.weights, (x,))


@pytest.mark.parametrize("clean_lam", [0.0, 1.0])
def test_weights_from_elsewhere_have_their_gradients(clean_lam: float) -> None:
    mixer, net = PuzzleMix(clean_lam=clean_lam), TinyNet()
    draw = draw_case(mixer, "2", 4)
    mixer.apply(net, images(4), labels(4), draw).loss().backward()
    expected = [parameter.grad for parameter in net.parameters()]
    own = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    made = {name: 1.0 * weight for name, weight in own.items()}  # shared by both passes of a step
    for weights in (own, made):
        loss = mixer.apply(Functional(TinyNet(), weights), images(4), labels(4), draw).loss()
        found = torch.autograd.grad(loss, list(own.values()))
        torch.testing.assert_close(list(found), expected, atol=1e-6, rtol=1e-4)


def test_weights_with_a_history_are_not_frozen() -> None:
    """As where a copy of a network is a step of gradient descent ahead of it."""
    net = TinyNet()
    weight = net.fc.weight.detach().clone().requires_grad_()
    del net.fc.weight
    net.fc._parameters["weight"] = 1.0 * weight
    PuzzleMix().apply(net, images(4), labels(4), draw_case(PuzzleMix(), "2", 4)).loss().backward()
    assert weight.grad.abs().max() > 0


def test_frozen_parameters_stay_frozen() -> None:
    net = TinyNet()
    net.layer1.requires_grad_(False)
    mixer = PuzzleMix(clean_lam=1.0)
    mixer.apply(net, images(4), labels(4), draw_case(mixer, "2", 4)).loss().backward()
    assert all(parameter.grad is None for parameter in net.layer1.parameters())
    assert net.fc.weight.grad.abs().max() > 0


def test_a_network_without_gradient_is_equally_salient_everywhere() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x.flatten(1)[:, :NUM_CLASSES]

    saliency = gradient_saliency(Flat(), images(2), labels(2))
    assert torch.equal(block_saliency(saliency.maps, 4), torch.full((2, 4, 4), 1 / 16))


@pytest.mark.parametrize("clean_lam", [0.0, 1.0])
def test_a_part_without_gradients_is_named(clean_lam: float) -> None:
    class Probe(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.layer4(self.layer2(self.layer1(x)))
            return self.fc(features.flatten(1))

    with pytest.raises(ValueError, match=r"no gradient at the images.* freeze it by requires_grad"):
        gradient_saliency(Probe(), images(2), labels(2), clean_lam=clean_lam)


def test_tiny_gradients_are_not_lost() -> None:
    """1e-25 squared is zero in float32."""
    net = TinyNet().eval()
    with torch.no_grad():
        net.fc.weight.mul_(1e-25)
    maps = gradient_saliency(net, images(2), labels(2)).maps
    assert maps.isfinite().all()
    assert maps.std() > 0.01


# ---- the energy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_energy_is_the_one_of_the_paper(n: int) -> None:
    """With two labels: saliency lost, prior, and the cost of each meeting of blocks, by loops.

    The decomposition into unary terms and weights may only add a constant, the same for all z.
    """
    pictures, rng = salient_pictures(), torch.Generator().manual_seed(0)
    x, s = pictures.images[:4].double(), pictures.saliency[:4].double()
    perm, lam = torch.tensor([1, 0, 3, 2]), torch.tensor([0.3, 0.8, 0.5, 0.95])
    e = puzzle_energy(x, s, perm, lam, num_blocks=n, num_labels=2)
    z = torch.randint(2, (5, 4, n, n), generator=rng)
    for i in range(4):
        differences = [
            float(ordered_energy(e.unary, e.down, e.right, z[k])[i])
            - paper_energy(x, s, i, int(perm[i]), float(lam[i]), z[k, i])
            for k in range(5)
        ]
        assert max(differences) - min(differences) < 1e-8
    fine = ordered_energy(e.unary, e.down, e.right, z[0]) - ordered_energy(
        e.unary, e.down, e.right, z[1]
    )
    assert fine.abs().min() > 1e-4  # the labellings do differ


def paper_energy(x: Tensor, s: Tensor, i: int, j: int, lam: float, z: Tensor) -> float:
    n, eta, gamma = len(z), 0.2, 0.5
    block, smooth = x.shape[-1] // n, 1.2 / (16 * n)
    pair = [x[j], x[i]]  # z = 1 shows the anchor, i
    shares = [F.avg_pool2d(s[k][None, None], block)[0, 0] for k in (j, i)]
    shares = [share / share.sum() for share in shares]
    patch = min(4, block)
    colors = [F.avg_pool2d(image[None], patch)[0] for image in pair]
    k = block // patch
    total = 0.0
    for r, c in itertools.product(range(n), repeat=2):
        here = int(z[r, c])
        total += float(shares[1 - here][r, c])
        total -= eta / n**2 * math.log((lam if here else 1 - lam) + 1e-8)
        if r + 1 < n:
            below = int(z[r + 1, c])
            upper = colors[here][:, (r + 1) * k - 1, c * k : (c + 1) * k]
            lower = colors[below][:, (r + 1) * k, c * k : (c + 1) * k]
            total += smooth * (gamma * float((upper - lower).abs().mean()) + (here != below))
        if c + 1 < n:
            beside = int(z[r, c + 1])
            left = colors[here][:, r * k : (r + 1) * k, (c + 1) * k - 1]
            right = colors[beside][:, r * k : (r + 1) * k, (c + 1) * k]
            total += smooth * (gamma * float((left - right).abs().mean()) + (here != beside))
    return total


def test_three_labels_have_a_binomial_prior() -> None:
    """Equal images and equal saliency: what is left of the unary cost is the prior."""
    x, s, lam = torch.full((1, 3, 8, 8), 0.5), torch.ones(1, 8, 8), torch.tensor(0.3)
    e = puzzle_energy(x, s, torch.tensor([0]), lam, num_blocks=2, num_labels=3)
    expected = -0.2 / 4 * torch.tensor([0.7**2, 2 * 0.7 * 0.3, 0.3**2]).log()
    torch.testing.assert_close(e.unary[0, :, 0, 0] - 0.25, expected)
    torch.testing.assert_close(e.down, torch.full((1, 1, 2), 1.2 / 32))


def test_the_energy_has_the_precision_of_the_saliency() -> None:
    """Images of half precision are widened first, so nothing is rounded but the images."""
    pictures = salient_pictures()
    narrow, perm, lam = (
        pictures.images[:4].half(),
        torch.tensor([1, 0, 3, 2]),
        torch.full((4,), 0.3),
    )
    found = puzzle_energy(narrow, pictures.saliency[:4], perm, lam, num_blocks=4)
    wanted = puzzle_energy(narrow.float(), pictures.saliency[:4], perm, lam, num_blocks=4)
    for name in ("unary", "down", "right"):
        assert getattr(found, name).dtype == torch.float32
        assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_masks_show_the_salient_half() -> None:
    """The anchor is salient on the left, the partner on the right: each keeps its side."""
    maps = torch.full((2, 16, 16), 0.01)
    maps[0, :, :8], maps[1, :, 8:] = 1.0, 1.0
    draw = Draw("4", torch.tensor([1, 0]), torch.tensor(0.5))
    mask = PuzzleMix().mask(torch.full((2, 3, 16, 16), 0.5), maps, draw, 4)
    assert (mask[0, :, :2] == 1).all()
    assert (mask[0, :, 2:] == 0).all()
    assert torch.equal(mask[1], 1 - mask[0])


# ---- transport -----------------------------------------------------------------------------------


def test_everything_shown_stays_where_it_is() -> None:
    salient = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
    x = images(3)
    assert torch.equal(transport(x, salient, torch.ones(3, 4, 4, dtype=torch.bool)), x)


def test_a_salient_block_moves_into_view() -> None:
    """All saliency in one hidden block, next to the shown half: the two blocks change places."""
    x = torch.arange(16.0).view(1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    salient = torch.full((1, 4, 4), 1e-3)
    salient[0, 1, 2] = 1.0
    is_shown = torch.zeros(1, 4, 4, dtype=torch.bool)
    is_shown[0, :, :2] = True
    moved = transport(x, salient, is_shown, t_eps=0.8)[0, 0, ::2, ::2]
    assert moved[1, 1] == x[0, 0, 2, 4]  # into the nearest shown place
    assert len(moved.unique()) >= 15


def test_transport_against_a_loop() -> None:
    rng = torch.Generator().manual_seed(0)
    num, n = 6, 4
    x = torch.rand(num, 3, 12, 12, generator=rng)
    salient = (3 * torch.randn(num, n, n, generator=rng)).flatten(1).softmax(1).view(num, n, n)
    is_shown = torch.rand(num, n, n, generator=rng) < 0.5
    moved = transport(x, salient, is_shown, t_eps=0.3)
    num_moved = 0
    for i in range(num):
        source = loop_auction(salient[i].flatten(), is_shown[i].flatten(), 0.3, n)
        num_moved += sum(source[place] != place for place in range(n * n))
        for place, block in enumerate(source):
            r, c = divmod(place, n)
            fr, fc = divmod(block, n)
            got = moved[i, :, 3 * r : 3 * r + 3, 3 * c : 3 * c + 3]
            assert torch.equal(got, x[i, :, 3 * fr : 3 * fr + 3, 3 * fc : 3 * fc + 3])
    assert num_moved > 10


def loop_auction(salient: Tensor, is_shown: Tensor, t_eps: float, n: int) -> list[int]:
    size = n * n
    distance = [
        [math.dist(divmod(i, n), divmod(j, n)) ** 2 for j in range(size)] for i in range(size)
    ]
    cost = [
        [
            t_eps * distance[i][j] / (n - 1) ** 2 - float(salient[i]) * bool(is_shown[j])
            for j in range(size)
        ]
        for i in range(size)
    ]
    winner: dict[int, int] = {}
    for _ in range(n):
        choice = [min(range(size), key=lambda j, row=row: (row[j], j)) for row in cost]
        winner = {}
        for i, place in enumerate(choice):
            if place not in winner or cost[i][place] < cost[winner[place]][place]:
                winner[place] = i
        for i, place in enumerate(choice):
            if winner[place] != i:
                cost[i][place] += 1
    return [winner.get(place, place) for place in range(size)]


# ---- images and labels ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_GRID)
def test_targets_are_the_shares_one_sees(case: str) -> None:
    """Class k is the color k / 4: the mean color of a mixed image is that of its target."""
    y = labels(10)
    x = (y / (NUM_CLASSES - 1)).view(-1, 1, 1, 1).expand(-1, 3, 16, 16).contiguous()
    mixer, shares = PuzzleMix(), []
    for seed in range(3):
        watched = Watched(TinyNet())
        mixed = mixer.apply(watched, x, y, draw_case(mixer, case, 10, seed))
        torch.testing.assert_close(mixed.targets.sum(1), torch.ones(10))
        colors = torch.linspace(0, 1, NUM_CLASSES)
        torch.testing.assert_close(watched.seen[1].mean((1, 2, 3)), mixed.targets @ colors)
        shares.append(mixed.targets.amax(1))
    assert torch.cat(shares).unique().numel() > 2  # more than whole images


@pytest.mark.parametrize("use_transport", [True, False])
def test_every_block_shows_the_two_images_in_the_mask_s_shares(use_transport: bool) -> None:
    """Pixel by pixel without transport; with it, blocks of the two images."""
    mixer = PuzzleMix(use_transport=use_transport, t_size=-1, grids=(4,))
    x, net = images(6, seed=5), Watched(TinyNet())
    draw = with_lam(mixer.draw(6, torch.Generator().manual_seed(1)), 0.5)
    maps = gradient_saliency(net, x, labels(6)).maps
    mixed = mixer.apply(net, x, labels(6), draw)
    mask = mixer.mask(x, maps, draw, 4)
    wide = repeat_blocks(mask, 4).unsqueeze(1)
    one, two = x, x[draw.perm]
    if use_transport:
        salient = block_saliency(maps, 4)
        one = transport(one, salient, mask > 0)
        two = transport(two, salient[draw.perm], mask < 1)
    torch.testing.assert_close(net.seen[-1], wide * one + (1 - wide) * two)
    share = mask.mean((1, 2)).unsqueeze(1)
    one_hot = torch.eye(NUM_CLASSES)[labels(6)]
    torch.testing.assert_close(mixed.targets, share * one_hot + (1 - share) * one_hot[draw.perm])


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_a_whole_share_is_one_image(lam: float) -> None:
    mixer, x, net = PuzzleMix(), images(5), Watched(TinyNet())
    for case in mixer.cases:
        draw = with_lam(draw_case(mixer, case, 5), lam)
        mixer.apply(net, x, labels(5), draw)
        assert torch.equal(net.seen[-1], x if lam == 1 else x[draw.perm])


def test_one_share_for_each_pair() -> None:
    mixer = PuzzleMix(grids=(4,))
    draw = dataclasses.replace(
        mixer.draw(4, torch.Generator().manual_seed(0)), lam=torch.tensor([1.0, 0.0, 0.5, 1.0])
    )
    net = Watched(TinyNet())
    mixer.apply(net, images(4), labels(4), draw)
    assert torch.equal(net.seen[1][[0, 3]], images(4)[[0, 3]])
    assert torch.equal(net.seen[1][1], images(4)[draw.perm[1]])


def test_the_layout_of_the_images_is_kept() -> None:
    x = images(4).to(memory_format=torch.channels_last)
    net, mixer = Watched(TinyNet()), PuzzleMix()
    for case in mixer.cases:
        mixer.apply(net, x, labels(4), draw_case(mixer, case, 4))
        assert net.seen[-1].is_contiguous(memory_format=torch.channels_last)


def test_normalized_images_with_their_mean_and_std() -> None:
    """A loader that normalizes, or a network that does: the same step."""
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    m, s = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (mean, std))

    class Normalized(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x - m) / s)

    x, y = images(6, dtype=torch.float64), labels(6)
    inside = PuzzleMix(adv_prob=0.5, saliency_std=std)
    outside = PuzzleMix(adv_prob=0.5, mean=mean, std=std)
    for case in inside.cases:
        draw = draw_case(inside, case, 6)
        one = inside.apply(Normalized().double(), x, y, draw)
        two = outside.apply(TinyNet().double(), (x - m) / s, y, draw)
        torch.testing.assert_close(two.logits, one.logits)
        assert torch.equal(two.targets, one.targets)


# ---- the adversarial option ----------------------------------------------------------------------


def test_adversarial_noise_is_bounded_and_goes_where_the_coins_say() -> None:
    mixer = PuzzleMix(grids=(2,), adv_prob=0.5, adv_eps=0.1, use_transport=False)
    x, net = 0.2 + 0.6 * images(6), Watched(TinyNet())
    draw = with_lam(draw_case(mixer, "2+adv", 6), 1.0)  # only the anchor shows
    assert isinstance(draw, PuzzleDraw)
    draw = dataclasses.replace(draw, strength=torch.tensor(1.0))
    for coins, is_noisy in (([1.0, 0.0], True), ([0.0, 1.0], False), ([1.0, 1.0], True)):
        net.seen.clear()
        mixer.apply(net, x, labels(6), dataclasses.replace(draw, coins=torch.tensor(coins)))
        start, mixed = net.seen
        assert 0.045 < (start - x).abs().mean() < 0.055  # uniform in [-eps, eps]
        noise = mixed - x
        assert noise.abs().max() <= 0.1 + 1e-6
        assert torch.equal(mixed, x) != is_noisy
        if is_noisy:
            assert noise.abs().mean() > 0.07  # a step of eps + 2/255 from there, cut off at eps


def test_adversarial_noise_starts_from_what_the_network_saw() -> None:
    """Where the start leaves [0, 1] and is cut off, the step is made from the cut-off noise."""
    mixer = PuzzleMix(grids=(2,), adv_prob=1.0, adv_eps=0.1, use_transport=False)
    x, y, net = images(6).round(), labels(6), Watched(TinyNet().eval())  # black and white
    draw = with_lam(draw_case(mixer, "2+adv", 6), 1.0)
    draw = dataclasses.replace(draw, strength=torch.tensor(1.0), coins=torch.tensor([1.0, 0.0]))
    mixer.apply(net, x, y, draw)
    start, mixed = net.seen
    seen = start.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(TinyNet().eval()(seen), y), seen)
    noise = (start - x + (0.1 + 2 / 255) * gradient.sign()).clamp(-0.1, 0.1)
    is_sure = gradient.abs() > 1e-3 * gradient.abs().max()  # the sign of others may be rounding
    assert is_sure.float().mean() > 0.9
    torch.testing.assert_close(mixed[is_sure], (x + noise).clamp(0, 1)[is_sure])


def test_adversarial_noise_raises_the_loss() -> None:
    mixer = PuzzleMix(grids=(2,), adv_prob=1.0, adv_eps=0.05, use_transport=False)
    x, y, net = images(64), labels(64), TinyNet().eval()
    draw = with_lam(mixer.draw(64, torch.Generator().manual_seed(0)), 1.0)
    assert isinstance(draw, PuzzleDraw)
    draw = dataclasses.replace(draw, strength=torch.tensor(1.0))
    noisy = soft_cross_entropy(mixer.apply(net, x, y, draw).logits, torch.eye(NUM_CLASSES)[y])
    assert noisy > 1.05 * F.cross_entropy(net(x), y)


def test_noise_is_splitmix64_of_the_pixels_number() -> None:
    """In whole numbers of any size; the seed is added to the number of the pixel."""
    seed, bits = 2**61 + 12345, 2**64 - 1
    expected = []
    for number in range(60):
        z = (number * 0x9E3779B97F4A7C15 + seed) & bits
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
        expected.append((z ^ (z >> 31)) >> 40)
    noise = _uniform_noise(torch.tensor(seed), torch.zeros(1, 3, 4, 5, dtype=torch.float64), 0.25)
    unit = torch.tensor(expected, dtype=torch.float64) / 2**24
    torch.testing.assert_close(noise.flatten(), (2 * unit - 1) * 0.25, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "settings",
    [{"eta": 3.0}, {"beta": 5.0}, {"gamma": 0.1}, {"neigh_size": 2}, {"num_labels": 2}],
)
def test_the_mask_is_the_cut_of_the_energy_with_these_settings(settings: dict[str, float]) -> None:
    x, maps = images(6), images(6, seed=1).mean(1)
    mixer = PuzzleMix(backend="reference", **settings)
    draw = draw_case(mixer, "4", 6)
    chosen = {"eta": 0.2, "beta": 1.2, "gamma": 0.5, "neigh_size": 4, "num_labels": 3, **settings}
    energy = puzzle_energy(x, maps, draw.perm, draw.lam, num_blocks=4, **chosen)
    seen = []

    def cut(*costs: Tensor, backend: str) -> GridCut:
        seen.append((*costs, backend))
        return cut_ordered(*costs, backend=backend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alignmixup.mixers.puzzlemix.cut_ordered", cut)
        mask = mixer.mask(x, maps, draw, 4)
    ((unary, down, right, backend),) = seen
    assert backend == "reference"
    for ours, theirs in ((unary, energy.unary), (down, energy.down), (right, energy.right)):
        assert torch.equal(ours, theirs)
    found = cut_ordered(energy.unary, energy.down, energy.right).labels
    assert torch.equal(mask, found / (chosen["num_labels"] - 1))


def test_seeds_give_different_and_uniform_noise() -> None:
    mixer, net = PuzzleMix(grids=(2,), adv_prob=1.0, adv_eps=0.1), Watched(TinyNet())
    x = torch.full((16, 3, 16, 16), 0.5)
    draw = mixer.draw(16, torch.Generator().manual_seed(0))
    assert isinstance(draw, PuzzleDraw)
    for seed in (5, 6):
        mixer.apply(net, x, labels(16), dataclasses.replace(draw, seed=torch.tensor(seed)))
    one, two = ((net.seen[k] - 0.5).flatten() / 0.1 for k in (0, 2))
    for noise in (one, two):
        counts = torch.histc(noise, bins=10, min=-1, max=1)
        chi_square = ((counts - 1228.8).square() / 1228.8).sum()
        assert chi_square < 40  # nine degrees of freedom: one in 100,000
        pairs = torch.stack([noise[:-1], noise[1:]])
        assert pairs.corrcoef()[0, 1].abs() < 0.04
    assert torch.stack([one, two]).corrcoef()[0, 1].abs() < 0.04


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_noise_is_the_same_in_every_precision(dtype: torch.dtype) -> None:
    """Up to the rounding of the images: 2^-9 between 0.5 and 1 in bfloat16."""
    mixer = PuzzleMix(grids=(2,), adv_prob=1.0, adv_eps=0.1)
    draw = mixer.draw(6, torch.Generator().manual_seed(0))
    seen = []
    for kind in (torch.float32, dtype):
        net = Watched(TinyNet().to(kind))
        mixer.apply(net, torch.full((6, 3, 16, 16), 0.625, dtype=kind), labels(6), draw)
        seen.append(net.seen[0].double())
    torch.testing.assert_close(seen[1], seen[0], atol=2**-8, rtol=0)
    assert (seen[1] - 0.625).abs().mean() > 0.04  # uniform up to 0.1


def test_coins_fall_independently() -> None:
    mixer, rng = PuzzleMix(adv_prob=0.3), torch.Generator().manual_seed(0)
    coins = torch.stack([mixer.draw(2, rng).coins for _ in range(2000)])
    outcomes = (coins @ torch.tensor([2.0, 1.0])).long().bincount(minlength=4) / 2000
    expected = torch.tensor([0.49, 0.21, 0.21, 0.09])
    torch.testing.assert_close(outcomes, expected, atol=0.03, rtol=0)


# ---- settings and bad input ----------------------------------------------------------------------


def test_published_settings() -> None:
    default = PuzzleMix()
    assert (default.alpha, default.num_labels, default.eta, default.beta) == (1.0, 3, 0.2, 1.2)
    assert (default.gamma, default.neigh_size, default.t_size) == (0.5, 4, 4)
    assert (default.t_eps, default.clean_lam, default.adv_prob) == (0.8, 0.0, 0.0)
    assert default.cases == dict.fromkeys(["2", "4", "8", "16"], 0.25)
    assert (PuzzleMix.tiny_imagenet().clean_lam, PuzzleMix.tiny_imagenet().t_size) == (1.0, -1)
    assert (PuzzleMix.imagenet().neigh_size, PuzzleMix.imagenet().loss) == (2, "ce")


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grids": ()}, r"grids must be different integers .* got \(\)"),
        ({"grids": (4, 4)}, r"got \(4, 4\)"),
        ({"grids": (1,)}, r"got \(1,\)"),
        ({"grids": 4}, r"grids must be a tuple of integers, such as \(2, 4\), got 4"),
        ({"grids": (2.0,)}, r"a tuple of integers, .* got \(2.0,\)"),
        ({"num_labels": 1}, "num_labels must be an integer >= 2, got 1"),
        ({"num_labels": 2.5}, "num_labels must be an integer >= 2, got 2.5"),
        ({"eta": -0.1}, "eta must be >= 0 and finite, got -0.1"),
        ({"eta": math.nan}, "eta must be >= 0 and finite, got nan"),
        ({"beta": math.nan}, "beta must be >= 0 and finite, got nan"),
        ({"gamma": math.inf}, "gamma must be >= 0 and finite, got inf"),
        ({"t_eps": math.nan}, "t_eps must be >= 0 and finite, got nan"),
        ({"adv_eps": math.nan}, "adv_eps must be >= 0 and finite, got nan"),
        ({"clean_lam": math.nan}, "clean_lam must be >= 0 .* got nan"),
        ({"t_size": 0}, "t_size must be an integer >= 1, or -1 .*, got 0"),
        ({"adv_prob": 1.5}, "adv_prob must lie in .* got 1.5"),
        ({"mean": (0.5,)}, "set both mean and std or neither"),
        ({"mean": (0.5,), "std": (0.0,)}, "std positive"),
        ({"mean": (0.5,), "std": (0.5,), "saliency_std": (0.5,)}, "excludes std"),
        ({"clean_lam": -1.0}, "clean_lam must be >= 0 .* -1.0"),
        ({"saliency_std": (0.0,)}, "saliency_std must be positive"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PuzzleMix(**settings)


@pytest.mark.unchecked_shapes
def test_bad_images_are_named() -> None:
    def apply(x: Tensor, case: str = "4", **settings: object) -> None:
        mixer = PuzzleMix(**settings)
        draw = Draw(case, torch.arange(2), torch.tensor(0.5))
        mixer.apply(TinyNet(), x, labels(2), draw)

    x = images(2)
    with pytest.raises(ValueError, match=r"needs pixels in \[0, 1\], got values from .* to 2"):
        apply(2 * x / x.max())
    with pytest.raises(ValueError, match=r"square images .* got \[2, 3, 16, 12\]"):
        apply(x[..., :12])
    # Whatever grid is drawn: here 4 and then 8, which fit, where 16 and then 4 do not.
    with pytest.raises(ValueError, match="16 blocks do not divide images of 12 pixels"):
        apply(x[..., :12, :12], grids=(4, 16))
    with pytest.raises(ValueError, match="neigh_size 3 does not divide a block of 4 pixels"):
        apply(x, "8", grids=(8, 4), neigh_size=3, t_size=-1)
    with pytest.raises(ValueError, match="t_size 3 does not divide a block of 4 pixels"):
        apply(x, "8", grids=(8, 4), t_size=3)
    odd = PuzzleMix(grids=(2, 4, 7, 14), neigh_size=7, t_size=-1)  # as the card has it
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, NUM_CLASSES))
    for case in odd.cases:
        odd.apply(net, torch.rand(2, 3, 28, 28), labels(2), draw_case(odd, case, 2))
    with pytest.raises(ValueError, match="needs a PuzzleDraw"):
        apply(x, "4+adv", adv_prob=0.5)
    with pytest.raises(ValueError, match="has 1 values, but the images have 3 channels"):
        apply(x, saliency_std=(0.5,))


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learns_shapes() -> None:
    # Small grids: sixteen by sixteen blocks on the CPU are most of the time and none of the point.
    check_it_teaches(PuzzleMix(grids=(2, 4), loss="ce"), epochs=8)


@pytest.mark.gpu
@pytest.mark.parametrize("clean_lam", [0.0, 1.0])
def test_a_step_can_be_captured(clean_lam: float) -> None:
    mixer = PuzzleMix(adv_prob=0.5, clean_lam=clean_lam)
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        here = mixer.apply(TinyNet().double(), images(6).double(), labels(6), draw)
        net, x, y = TinyNet().double().cuda(), images(6).double().cuda(), labels(6).cuda()
        there = draw.to("cuda")
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
        assert torch.equal(mixed.targets.cpu(), here.targets)
