"""AlignMixup/AE and /VAE: which case trains what, layer sets, laws of mixing, the prior term."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.datasets.loading.device_loader import DeviceLoader
from alignmixup.datasets.shapes import shapes
from alignmixup.evaluation.effect import alignment_effect
from alignmixup.hooks import tap
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE, NoiseDraw, gaussian_kl
from alignmixup.models import Head, Normalize
from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.ops.align import align_mix
from alignmixup.training.optim import make_optimizer
from alignmixup.training.settings import TrainSettings
from alignmixup.training.steps import PlainStep, make_step
from cases import NUM_CLASSES, draw_case, images, labels, with_lam

MEAN, STD = (0.5, 0.375, 0.25), (0.25, 0.1875, 0.3125)


class Backbone(nn.Module):
    """From normalize to head like our networks, but tiny: 8 x 4 x 4 from 16 x 16."""

    def __init__(self) -> None:
        super().__init__()
        self.normalize = Normalize(MEAN, STD)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = nn.Conv2d(8, 8, 3, 2, 1)
        self.head = Head(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer1(self.stem(self.normalize(x))))


def network(embedding: str = "vector", *, seed: int = 0, **options: bool) -> AutoencodingClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = AutoencodingClassifier(
            Backbone(), 16, embedding=embedding, embedding_dim=12, embedding_channels=3, **options
        )
        if net.decoder is not None:
            # Its zero start would keep the first gradient from the encoder.
            nn.init.normal_(net.decoder.to_image.weight, std=0.1)
    return net


AE = AlignMixupAE
VAE = {"embedding_dim": 12}

# Every row of the ablation table is one of these layer sets, with its clean case or without.
EXPECTED = {
    ("x",): "input",
    ("A",): "feat feat'",
    ("e",): "embed",
    ("E",): "embed embed'",
    ("x", "e"): "input embed",
    ("x", "A"): "input feat feat'",
    ("x", "E"): "input embed embed'",
    ("x", "A", "e"): "input feat feat' embed",
    ("x", "A", "E"): "input feat feat' embed embed'",
}
SETS = list(itertools.product(("ae", "vae"), EXPECTED, (True, False), (True, False)))
QUICK = (("x",), ("x", "A", "e"), ("x", "A", "E"))  # the others run with the slow tests


def set_param(kind: str, layers: tuple[str, ...], clean: bool, aligned: bool) -> Any:
    name = f"{kind}-{''.join(layers)}-{clean:d}{aligned:d}"
    marks = [pytest.mark.slow] * (layers not in QUICK)
    return pytest.param(kind, layers, clean, aligned, id=name, marks=marks)


every_set = pytest.mark.parametrize(
    ("kind", "layers", "clean", "aligned"), [set_param(*each) for each in SETS]
)


def mixer_of(kind: str, **settings: object) -> AlignMixupAE:
    return AlignMixupVAE(**VAE, **settings) if kind == "vae" else AlignMixupAE(**settings)


def network_of(kind: str, layers: tuple[str, ...], **options: bool) -> AutoencodingClassifier:
    embedding = "tensor" if "E" in layers else "vector"
    return network(embedding, variational=kind == "vae", **options)


# ---- which case trains what ----------------------------------------------------------------------


def trained_parts(net: nn.Module) -> set[str]:
    """The parts all of whose parameters got a gradient; a part that got some is an error."""
    parts = set()
    for name, part in net.named_children():
        grads = [p.grad is not None and bool(p.grad.any()) for p in part.parameters()]
        untouched = [p.grad is None for p in part.parameters()]
        assert all(grads) or all(untouched), name
        if any(grads):
            parts.add(name)
    return parts


@every_set
def test_clean_trains_no_classifier_and_mixed_no_decoder(kind, layers, clean, aligned) -> None:
    mixer = mixer_of(kind, layers=layers, clean=clean, aligned=aligned)
    for case in mixer.cases:
        net = network_of(kind, layers, decoder=clean)
        mixed = mixer.apply(net, images(6), labels(6), draw_case(mixer, case, 6))
        assert (mixed.logits is None) == (case == "clean")
        mixed.loss().backward()
        last = "decoder" if case == "clean" else "classifier"
        # A bias right before batch norm has no effect: the backbone's one is not looked at.
        net.encoder.stem[0].bias = None
        assert trained_parts(net) == {"encoder", "embed", last}


def test_a_step_leaves_what_its_case_does_not_train_bit_for_bit() -> None:
    """Momentum and weight decay, too, pass over a parameter without a gradient."""
    net, mixer = network(), AlignMixupAE()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for case in ("clean", "feat", "clean", "embed"):
        before = {key: value.clone() for key, value in net.state_dict().items()}
        draw = draw_case(mixer, case, 6)
        optimizer.zero_grad(set_to_none=True)
        mixer.apply(net, images(6), labels(6), draw).loss().backward()
        optimizer.step()
        after = net.state_dict()
        changed = {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])}
        last = "decoder" if case == "clean" else "classifier"
        assert changed == {"encoder", "embed", last}


def test_the_clean_case_mixes_nothing() -> None:
    """Whatever perm and lam are, it is the error of each image's own reconstruction."""
    net, mixer, x = network().eval(), AlignMixupAE(reconstruction_weight=0.5), images(6)
    draw = with_lam(draw_case(mixer, "clean", 6), 0.3)
    mixed = mixer.apply(net, x, labels(6), draw)
    output = net.decoder(net.embed(net.encoder(net.normalize(x))))
    each = ((output - net.normalize(x)) ** 2).sum((1, 2, 3)) / (3 * 16 * 16)
    assert set(mixed.extra) == {"reconstruction"}
    torch.testing.assert_close(mixed.loss(), 0.5 * each.mean())
    assert mixed.targets is None


# ---- layer sets and chance -----------------------------------------------------------------------


@pytest.mark.unchecked_shapes  # hundreds of draws of the same shapes
@every_set
def test_cases_are_equally_probable(kind, layers, clean, aligned) -> None:
    """Chi-square at one in ten thousand, from a fixed seed."""
    mixer = mixer_of(kind, layers=layers, clean=clean, aligned=aligned)
    cases = EXPECTED[layers].split() + ["clean"] * clean
    assert set(mixer.cases) == set(cases)
    assert all(math.isclose(share, 1 / len(cases)) for share in mixer.cases.values())
    rng = torch.Generator().manual_seed(0)
    drawn = [mixer.draw(2, rng).case for _ in range(60 * len(cases))]
    distance = sum((drawn.count(case) - 60) ** 2 / 60 for case in cases)
    assert distance <= scipy.stats.chi2.ppf(1 - 1e-4, max(1, len(cases) - 1))


def test_the_papers_cases() -> None:
    assert len(AlignMixupAE().cases) == 5  # "one out of five cases"
    assert len(AlignMixupAE(layers=("x", "A")).cases) == 4  # the Algorithm
    weighted = AlignMixupAE(weights={"clean": 1.0, "input": 2.0, "embed": 0.0, "feat": 1.0})
    assert weighted.cases == {"clean": 0.25, "input": 0.5, "feat": 0.25}


def test_noise_is_standard_normal_and_follows_the_generator() -> None:
    mixer = AlignMixupVAE(embedding_dim=64)
    one, other = (mixer.draw(64, torch.Generator().manual_seed(5)) for _ in range(2))
    assert isinstance(one, NoiseDraw)
    assert torch.equal(one.noise, other.noise)
    assert one.noise.shape == (64, 64)
    assert scipy.stats.kstest(one.noise.flatten().numpy(), "norm").pvalue > 1e-3
    moved = one.with_tensors({name: t.clone() for name, t in one.tensors().items()})
    assert moved.noise is not one.noise
    assert torch.equal(moved.noise, one.noise)


# ---- the laws of mixing --------------------------------------------------------------------------


@every_set
def test_a_whole_share_gives_the_image_back(kind, layers, clean, aligned) -> None:
    """lam = 1 is the plain forward, bit for bit; where the partner's positions are kept, 0 is."""
    net = network_of(kind, layers, decoder=clean).double()
    mixer = mixer_of(kind, layers=layers, clean=clean, aligned=aligned)
    x, one_hot = images(6, dtype=torch.float64), torch.eye(NUM_CLASSES)[labels(6)]
    for case in set(mixer.cases) - {"clean"}:
        draw = draw_case(mixer, case, 6)
        noise = {"noise": draw.noise} if kind == "vae" else {}
        if case.endswith("'") and aligned:
            # Sampled noise belongs to a row of the batch, not to an image: it stays in place.
            partner = {"noise": draw.noise[draw.perm.argsort()]} if noise else {}
            plain = net(x, **partner)[draw.perm]
            mixed = mixer.apply(net, x, labels(6), with_lam(draw, 0.0))
            torch.testing.assert_close(mixed.logits, plain, atol=1e-12, rtol=1e-12)
            assert torch.equal(mixed.targets, one_hot[draw.perm])
        else:
            mixed = mixer.apply(net, x, labels(6), with_lam(draw, 1.0))
            assert torch.equal(mixed.logits, net(x, **noise))
            assert torch.equal(mixed.targets, one_hot)
        between = mixer.apply(net, x, labels(6), with_lam(draw, 0.4))
        assert (between.logits - net(x, **noise)).norm() > 1e-3


@pytest.mark.parametrize("keep", ["anchor", "partner"])
@pytest.mark.parametrize("kind", ["ae", "vae"])
def test_the_tensor_embedding_is_aligned(kind: str, keep: str) -> None:
    """(M, Sigma) share one plan, whose costs are those of the stacked pair."""
    net = network("tensor", variational=kind == "vae").double().eval()
    mixer = mixer_of(kind, layers=("x", "E"))
    draw = with_lam(draw_case(mixer, "embed" if keep == "anchor" else "embed'", 6), 0.3)
    x = images(6, dtype=torch.float64)
    stacked = net.embed(net.encoder(net.normalize(x)))
    mixed = align_mix(stacked, draw.perm, draw.lam, keep=keep)
    code = mixed
    if kind == "vae":
        mu, sigma = mixed.chunk(2, dim=1)
        code = mu + sigma * draw.noise.view(mu.shape)
    expected = net.classifier(code.flatten(1))
    logits = mixer.apply(net, x, labels(6), draw).logits
    torch.testing.assert_close(logits, expected)
    unaligned = dataclasses.replace(mixer, aligned=False).apply(net, x, labels(6), draw).logits
    assert (logits - unaligned).norm() > 1e-3 * logits.norm()


def test_features_are_mixed_as_alignmixup_mixes_them() -> None:
    """At A the two mixers are one; resolution, iterations and all."""
    net, x = network().eval(), images(6)
    for settings in ({}, {"resolution": 2}, {"num_iters": 0}, {"aligned": False}, {"eps": 1.0}):
        ours, theirs = AlignMixupAE(**settings), AlignMixup("encoder", **settings)
        for case in ("input", "feat", "feat'"):
            draw = draw_case(theirs, case, 6)
            expected = theirs.apply(net, x, labels(6), draw)
            mixed = ours.apply(net, x, labels(6), draw)
            assert torch.equal(mixed.logits, expected.logits)
            assert torch.equal(mixed.targets, expected.targets)


def test_a_vector_is_mixed_where_logits_are() -> None:
    """f and g are linear: e mixed, A mixed without alignment and logits mixed are one thing."""
    net, x = network().double().eval(), images(6, dtype=torch.float64)
    mixer = AlignMixupAE(aligned=False)
    draw = with_lam(draw_case(mixer, "embed", 6), 0.3)
    at_e = mixer.apply(net, x, labels(6), draw).logits
    at_A = mixer.apply(net, x, labels(6), dataclasses.replace(draw, case="feat")).logits
    plain, lam = net(x), draw.lam.double()
    torch.testing.assert_close(at_e, lam * plain + (1 - lam) * plain[draw.perm])
    torch.testing.assert_close(at_A, at_e)


def test_vectors_are_never_aligned() -> None:
    net, x = network().eval(), images(6)
    draw = draw_case(AE(), "embed", 6)
    aligned = AE(aligned=True).apply(net, x, labels(6), draw).logits
    assert torch.equal(aligned, AE(aligned=False).apply(net, x, labels(6), draw).logits)


def test_pooled_embedding_sees_no_alignment_and_flattened_does() -> None:
    x = images(8)
    pooled = alignment_effect(network(pooled=True), "encoder", x)
    flattened = alignment_effect(network(), "encoder", x)
    tensor = alignment_effect(network("tensor"), "encoder", x)
    assert pooled.features > 0.05  # alignment does change A
    assert pooled.logits < 1e-5
    assert pooled.is_next_to_nothing
    assert flattened.logits > 0.02
    assert tensor.logits > 0.02


# ---- the prior term ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 7), (3, 5, 2, 2)])
def test_kl_is_that_of_torch_distributions(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    mu = torch.randn(shape, generator=rng, dtype=torch.float64)
    sigma = torch.rand(shape, generator=rng, dtype=torch.float64) + 1e-3
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mu, sigma), normal(0 * mu, 0 * mu + 1))
    torch.testing.assert_close(gaussian_kl(mu, sigma), expected.flatten(1).sum(1))
    assert (gaussian_kl(0 * mu, 0 * mu + 1) == 0).all()


@pytest.mark.parametrize("embedding", ["vector", "tensor"])
def test_clean_losses_are_the_elbo_over_the_number_of_values(embedding: str) -> None:
    net, x = network(embedding, variational=True).double().eval(), images(6, dtype=torch.float64)
    layers = ("x", "A", "E" if embedding == "tensor" else "e")
    mixer = AlignMixupVAE(**VAE, layers=layers, reconstruction_weight=0.5, kl_weight=2.0)
    draw = draw_case(mixer, "clean", 6)
    mixed = mixer.apply(net, x, labels(6), draw)
    mu, sigma = net.embed(net.encoder(net.normalize(x))).chunk(2, dim=1)
    z = mu + sigma * draw.noise.view(mu.shape)
    squared = (net.decoder(z) - net.normalize(x)).square().sum() / 6
    kl = 0.5 * (mu**2 + sigma**2 - 1 - torch.log(sigma**2)).sum() / 6
    torch.testing.assert_close(mixed.loss(), 0.5 * (squared + 2.0 * kl) / (3 * 16 * 16))
    assert set(mixed.extra) == {"reconstruction", "kl"}


# ---- wrapped networks ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("kind", ["ae", "vae"])
@pytest.mark.parametrize("layers", [("x", "A", "e"), ("x", "A", "E")])
def test_a_compiled_network_gives_what_the_plain_one_gives(kind: str, layers) -> None:
    """Three rounds through all cases, in changing order, with new tensors each time."""
    torch.compiler.reset()
    plain = network_of(kind, layers).eval()
    net = torch.compile(copy.deepcopy(plain), backend="eager")
    mixer = mixer_of(kind, layers=layers)
    for seed in range(3):
        # Once a case is compiled, neither new tensors nor a change of case compiles it again.
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            for case in mixer.cases:
                draw, x = draw_case(mixer, case, 6, seed), images(6, seed)
                loss = mixer.apply(net, x, labels(6), draw).loss()
                torch.testing.assert_close(loss, mixer.apply(plain, x, labels(6), draw).loss())
    torch.compiler.reset()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["ae", "vae"])
def test_a_distributed_network_gives_what_the_plain_one_gives(kind: str) -> None:
    """No case uses all parameters, hence ``find_unused_parameters``."""
    plain, mixer = network_of(kind, ("e",)), mixer_of(kind)
    net = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True)
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        for module in (net, plain):
            module.zero_grad(set_to_none=True)
            mixer.apply(module, images(6), labels(6), draw).loss().backward()
        for ours, theirs in zip(net.module.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.gpu
@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("kind", ["ae", "vae"])
def test_a_captured_step_is_the_plain_one(kind: str) -> None:
    mixer, rng = mixer_of(kind), torch.Generator().manual_seed(0)
    draws = [mixer.draw(6, rng) for _ in range(60)]
    settings = TrainSettings(lr=0.01, capture=True)
    x, y = images(6).to("cuda"), labels(6).to("cuda")
    losses = []
    for is_captured in (False, True):
        net = network_of(kind, ("e",)).to("cuda")
        optimizer = make_optimizer(net, settings)
        step = PlainStep(net, mixer, optimizer, settings, lambda x, y: (x, y))
        take = make_step(step, torch.device("cuda")) if is_captured else step
        losses.append(torch.stack([take((x, y), draw) for draw in draws]))
        assert take.path == ("captured" if is_captured else "plain")
    torch.testing.assert_close(losses[0], losses[1], atol=1e-3, rtol=1e-3)


@pytest.mark.unchecked_shapes
def test_bf16_losses_are_float32_and_close() -> None:
    net, mixer = network(variational=True).eval(), AlignMixupVAE(**VAE)
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        full = mixer.apply(net, images(6), labels(6), draw).loss()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mixer.apply(net, images(6), labels(6), draw).loss()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, full, atol=0.02, rtol=0.02)  # bf16: eight bits


def test_taps_and_decoding_go_together() -> None:
    """How pictures of interpolated features are made: mix A, decode what follows."""
    net, x = network().eval(), images(6)
    perm = torch.arange(6).roll(1)
    for lam, whose in ((1.0, x), (0.0, x[perm])):
        with tap(net, "encoder", lambda A, lam=lam: lam * A + (1 - lam) * A[perm]):
            picture = net(x, decode=True).image
        torch.testing.assert_close(picture, net(whose, decode=True).image)


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.unchecked_shapes  # they are checked everywhere else, and cost a third of the time
def test_one_training_of_all_cases_reconstructs_without_costing_accuracy_beyond_noise() -> None:
    """Held-out shapes; equal epochs, though one step in five trains no classifier.

    Over seeds 0 to 7 (docs/methods/alignmixup_ae.md) 27 to 31 % of the mean image's error is left,
    the accuracy is 32.0 to 37.5 % (chance is 10), and the difference of a pair has a deviation of
    1.9 points, so that the mean of two pairs has one of 1.3; three of these are noise.
    """
    pairs = [
        [trained_on_shapes(clean=clean, seed=seed) for clean in (True, False)] for seed in (0, 1)
    ]
    for full, _ in pairs:
        assert full.error_left < 0.4
        assert full.accuracy > 25
    assert sum(full.accuracy - without.accuracy for full, without in pairs) / 2 > -4.0


@dataclasses.dataclass(frozen=True)
class Trained:
    """Held-out accuracy in percent, and the reconstruction error as a part of the mean image's."""

    accuracy: float
    error_left: float


def trained_on_shapes(*, clean: bool, seed: int, epochs: int = 24, lr: float = 0.1) -> Trained:
    """Train {x, A, e} with the clean case or without it, the gradient clipped as in recipes."""
    train, test = shapes("train", 2000, image_size=16), shapes("test", 1000, image_size=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = NarrowBackbone(train.mean, train.std)
        net = AutoencodingClassifier(
            backbone, 16, embedding_dim=128, decoder_channels=48, decoder_blocks=1
        )
    mixer = AlignMixupAE(clean=clean, num_iters=10)
    loader = DeviceLoader(train, batch_size=100, seed=seed, pad=0, flip=False)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    rng = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for x, y in loader.epoch(epoch):
            optimizer.zero_grad()
            mixer(net, x, y, rng).loss().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    net.eval()
    x = test.images / 255
    with torch.no_grad():
        guess, decoded = net(x).argmax(1), net(x, decode=True)
    error = (decoded.output - decoded.target).square().mean()
    spread = (decoded.target - decoded.target.mean(0)).square().mean()
    return Trained(100 * float((guess == test.labels).float().mean()), float(error / spread))


class NarrowBackbone(nn.Module):
    """48 x 4 x 4 from 16 x 16 in three convolutions: what learns shapes in seconds."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        for i, (inner, outer, stride) in enumerate([(3, 12, 2), (12, 24, 1), (24, 48, 2)]):
            conv = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
            stage = nn.Sequential(conv, nn.BatchNorm2d(outer), nn.ReLU())
            self.add_module("stem" if i == 0 else f"layer{i}", stage)
        self.head = Head(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(self.normalize(x)))))


# ---- bad settings and networks -------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: AE(layers=()),
            r"layers must be different ones of \['x', 'A', 'e', 'E'\], got \(\)",
        ),
        (lambda: AE(layers=("x", "x")), "different ones"),
        (lambda: AE(layers=("x", "B")), r"got \('x', 'B'\)"),
        (lambda: AE(layers=("e", "E")), "a vector 'e' or a tensor 'E', got layers"),
        (lambda: AE(reconstruction_weight=0.0), "positive and finite, got 0.0; .* clean=False"),
        (lambda: AE(reconstruction_weight=math.inf), "positive and finite, got inf"),
        (lambda: AE(reconstruction_weight=math.nan), "positive and finite, got nan"),
        (lambda: AE(weights={"embed'": 1.0}), r"unknown cases \[\"embed'\"\]"),
        (lambda: AE(clean=False, weights={"clean": 1.0}), r"unknown cases \['clean'\]"),
        (lambda: AE(layers=("x",), weights={"feat": 1.0}), r"unknown cases \['feat'\]"),
        (lambda: AE(weights={"feat": 0.0}), "not all zero"),
        (lambda: AE(alpha=0.0), "alpha must be positive and finite, got 0.0"),
        (lambda: AE(eps=0.0), "eps must be a positive number, got 0.0"),
        (lambda: AE(num_iters=-1), "num_iters must be an integer >= 0 .* got -1"),
        (lambda: AE(resolution=0), "resolution must be an integer >= 1, got 0"),
        (lambda: AE(loss="mse"), "loss must be .*, got 'mse'"),
        (lambda: AE(layer=4), "a layer is the name .* got 4;"),
        (lambda: AE(embed=4), "a layer is the name .* got 4;"),
        (lambda: AlignMixupVAE(embedding_dim=0), "embedding_dim must be an integer >= 1, got 0"),
        (lambda: AlignMixupVAE(kl_weight=-1.0), "kl_weight must be >= 0 and finite, got -1.0"),
        (lambda: AlignMixupVAE(kl_weight=math.inf), "kl_weight must be >= 0 .* got inf"),
        (lambda: AlignMixupVAE(kl_weight=math.nan), "kl_weight must be >= 0 .* got nan"),
        (lambda: AlignMixupVAE(alpha=-1.0), "alpha must be positive and finite, got -1.0"),
    ],
)
def test_bad_settings_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_network_that_takes_no_noise_or_cannot_decode_is_named() -> None:
    x, y = images(4), labels(4)
    vae = AlignMixupVAE("layer1", layers=("x", "A"), clean=False)
    with pytest.raises(ValueError, match=r"Backbone.forward has no arguments \['noise'\]"):
        vae.apply(Backbone(), x, y, draw_case(vae, "input", 4))

    class Open(Backbone):
        def forward(self, x: Tensor, **further: Tensor) -> Tensor:
            return super().forward(x + further["noise"].mean())

    assert vae.apply(Open(), x, y, draw_case(vae, "input", 4)).loss().isfinite()
    net, ae = Backbone(), AE("layer1", layers=("x", "A"))
    net.decoder = nn.Identity()
    with pytest.raises(ValueError, match=r"Backbone.forward has no arguments \['decode'\]"):
        ae.apply(net, x, y, draw_case(ae, "clean", 4))


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("mixer", "case", "net", "message"),
    [
        (
            AE(),
            "clean",
            lambda: network(decoder=False),
            "this AutoencodingClassifier has none: .* decoder=True, or set clean=False",
        ),
        (AE("layer1", layers=("x",)), "clean", Backbone, "this Backbone has none"),
        (AE(layer="layer9"), "feat", network, "there is no layer 'layer9'"),
        (AE(layers=("E",)), "embed", network, r"returns \[6, 12\].* as 'e'"),
        (AE(), "embed", lambda: network("tensor"), r"returns \[6, 3, 2, 2\].* mix it as 'E'"),
        (
            AE(),
            "input",
            lambda: network(variational=True),
            "variational=True needs AlignMixupVAE, got AlignMixupAE",
        ),
        (AlignMixupVAE(), "input", network, "variational=False needs AlignMixupAE"),
        (
            AlignMixupVAE(embedding_dim=5),
            "input",
            lambda: network(variational=True),
            "set the mixer's embedding_dim to 12",
        ),
    ],
)
def test_networks_that_do_not_fit_are_named(mixer, case: str, net, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixer.apply(net(), images(6), labels(6), draw_case(mixer, case, 6))


def test_draws_of_another_mixer_are_named() -> None:
    draw = draw_case(AE(), "embed", 6)
    with pytest.raises(ValueError, match="case is 'embed', but this mixer has"):
        AE(layers=("x", "A")).apply(network(), images(6), labels(6), draw)
    bare = Draw("input", draw.perm, draw.lam)
    with pytest.raises(ValueError, match="AlignMixupVAE needs a NoiseDraw, got a Draw"):
        AlignMixupVAE(**VAE).apply(network(variational=True), images(6), labels(6), bare)


def test_calling_a_mixer_draws_and_applies() -> None:
    mixed = AlignMixupVAE(**VAE)(network(variational=True), images(6), labels(6))
    assert isinstance(mixed, Mixed)
    assert mixed.loss().isfinite()
