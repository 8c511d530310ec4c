"""Captured steps on a GPU: the same draws give the same training as plain steps."""

import dataclasses
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from alignmixup.datasets import DeviceLoader, shapes
from alignmixup.mixers.adautomix import AdAutoMix
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.automix import AutoMix
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.gridmix import GridMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.recursivemix import RecursiveMix
from alignmixup.mixers.samix import SAMix
from alignmixup.mixers.snapmix import SnapMix
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import TransMix
from alignmixup.models import PreActResNet18
from alignmixup.models.zoo import NetSpec, build
from alignmixup.training import TrainSettings
from alignmixup.training.distributed import wrapped
from alignmixup.training.optim import make_optimizer
from alignmixup.training.steps import CapturedStep, PlainStep, capture_stream, make_step, prepared
from tiny_transformer import TinyTransformer

pytestmark = pytest.mark.gpu

SETTINGS = TrainSettings(
    batch_size=32, lr=0.02, nesterov=True, clip_norm=5.0, capture=True, channels_last=True
)
MIXERS = [
    NoMix(),
    InputMixup(),
    Cutout(),
    CutMix(),
    OneOf(mode="elem", prob=0.8),
    OneOf(mode="pair"),
    ManifoldMixup(),
    AlignMixup(),
    AlignMixup(lam_per_sample=True, aligned=False),
    AttentiveMix(),
    SnapMix(),
    TokenMix(grid=8, score="area"),
    # With parameters and state of their own.
    RecursiveMix(),
    GridMix("cells", local_weight=1.0),
    AutoMix(),
    AutoMix.two_heads(),
    SAMix(global_eta=0.1),
    AdAutoMix(),
    AdAutoMix.two_heads(),
]
# Vectors and tensors, both with their decoder: five and six cases.
AUTOENCODERS = [
    (AlignMixupAE(), "vector"),
    (AlignMixupAE(layers=("x", "A", "E")), "tensor"),
    (AlignMixupVAE(), "vector"),
    (AlignMixupVAE(layers=("x", "A", "E")), "tensor"),
]


def classifier():
    torch.manual_seed(0)
    half = (0.5, 0.5, 0.5)
    return PreActResNet18(10, half, half, width=16)


def train(
    mixer, step_kind, num_steps=24, settings=SETTINGS, *, lr=0.005, make_net=classifier, wrap=None
):
    net = make_net().cuda().to(memory_format=torch.channels_last)
    loader = DeviceLoader(shapes("train", 320), 32, 0, "cuda", channels_last=True)
    mixer = mixer.attach(net, loader.gather(loader.rows(0)[:32])[0])
    optimizer = make_optimizer(net, settings, mixer)
    module = net if wrap is None else wrap(net)
    plain = PlainStep(module, mixer, optimizer, settings, loader.gather)
    step = step_kind(plain)
    rng = torch.Generator().manual_seed(1)
    rows = torch.cat([loader.rows(e) for e in range(-(-num_steps // len(loader)))])
    losses = []
    for i in range(num_steps):
        for group in plain.optimizer.param_groups:
            group["lr"].fill_(lr * (1 - i / num_steps))
        losses.append(step((rows[32 * i : 32 * (i + 1)],), mixer.draw(32, rng)))
    return torch.stack(losses).cpu(), step


def captured_step(plain):
    return CapturedStep(plain, torch.device("cuda"))


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda m: type(m).__name__)
def test_captured_steps_are_the_plain_steps(mixer):
    plain, _ = train(mixer, lambda p: p)
    captured, step = train(mixer, captured_step)
    assert step.path == "captured"
    assert len(step._graphs) == len(mixer.cases)
    # Convolutions may take other algorithms in a graph's memory: float32 differences that training
    # multiplies step by step, hence a per cent after two dozen steps at a low rate.
    torch.testing.assert_close(captured, plain, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    "mixer", [TransMix.released(), TokenMix(grid=8)], ids=lambda m: type(m).__name__
)
def test_captured_steps_of_a_transformer_are_the_plain_steps(mixer):
    """Labels by attention: peeked in the step itself, and in a pass of its own."""

    def transformer():
        return TinyTransformer(num_classes=10)

    plain, _ = train(mixer, lambda p: p, make_net=transformer)
    captured, step = train(mixer, captured_step, make_net=transformer)
    assert step.path == "captured"
    assert set(step._graphs) == set(mixer.cases)
    torch.testing.assert_close(captured, plain, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("mixer", "embedding"),
    AUTOENCODERS,
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_captured_autoencoder_steps_are_the_plain_steps(mixer, embedding):
    """The clean case trains the decoder and the others the classifier: no graph may mix them up."""

    def autoencoder():
        is_variational = isinstance(mixer, AlignMixupVAE)
        spec = NetSpec(
            "preact_resnet18", width=16, autoencoder=embedding, variational=is_variational
        )
        return build(spec, 10, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 32)

    # Sixty steps, so that each case is drawn often enough to be captured and replayed, at a rate so
    # low that they stay comparable: on a CPU, two trainings whose first weights differ by 3e-7 end
    # up to 0.22 of the way apart that the encoder goes, and 0.86 at a rate of 0.01. A part that a
    # graph does not train would be all of its way apart.
    losses, parts = {}, {}
    for kind in (PlainStep, CapturedStep):
        wrap = captured_step if kind is CapturedStep else lambda plain: plain
        losses[kind], step = train(mixer, wrap, 60, lr=0.001, make_net=autoencoder)
        net = step.plain.net if kind is CapturedStep else step.net
        parts[kind] = weights_by_part(net)
    assert step.path == "captured"
    assert set(step._graphs) == set(mixer.cases)
    torch.testing.assert_close(losses[CapturedStep], losses[PlainStep], rtol=2e-2, atol=1e-2)
    start = weights_by_part(autoencoder())
    assert set(start) == {"encoder", "embed", "classifier", "decoder"}
    for part, begin in start.items():
        plain, captured = parts[PlainStep][part], parts[CapturedStep][part]
        assert (captured - plain).norm() < 0.5 * (plain - begin).norm(), part


def weights_by_part(net):
    flat = {
        name: [p.detach().cpu().flatten() for p in part.parameters()]
        for name, part in net.named_children()
    }
    return {name: torch.cat(weights) for name, weights in flat.items() if weights}


@pytest.fixture
def nccl():
    """A group of one process."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mixer", [CutMix(), AlignMixup()], ids=lambda m: type(m).__name__)
def test_captured_steps_hold_the_communication(mixer, compiles, nccl):
    stream = capture_stream(torch.device("cuda"))

    def wrap(net):
        with torch.cuda.stream(stream):
            module = wrapped(net, uses_all=True)
        return prepared(module, dataclasses.replace(SETTINGS, compile=compiles))

    def captured_on_stream(plain):
        return CapturedStep(plain, torch.device("cuda"), stream)

    plain, _ = train(mixer, lambda p: p, 40)
    captured, step = train(mixer, captured_on_stream, 40, wrap=wrap)
    assert step.path == "captured"
    assert set(step._graphs) == set(mixer.cases)
    torch.testing.assert_close(captured, plain, rtol=2e-2, atol=1e-2)


class Waits(nn.Module):
    """Waits for the device in the middle of its forward: no graph can hold it."""

    def __init__(self):
        super().__init__()
        # Random numbers too: a failed capture must not take them along.
        self.dropout, self.head = nn.Dropout(0.01), nn.Linear(3, 10)

    def forward(self, x):
        mean = self.dropout(x.mean((2, 3)))
        return self.head(mean) if float(mean.sum()) > -1 else self.head(-mean)


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["alone", "wrapped"])
def test_what_cannot_be_captured_is_run_plainly_and_says_so(is_wrapped, request):
    net, module = Waits().cuda(), None
    stream = capture_stream(torch.device("cuda"))
    if is_wrapped:
        request.getfixturevalue("nccl")
        with torch.cuda.stream(stream):
            module = wrapped(net, uses_all=True)
    loader = DeviceLoader(shapes("train", 64), 32, 0, "cuda")
    settings = dataclasses.replace(SETTINGS, clip_norm=None)
    optimizer = make_optimizer(net, settings)
    plain = PlainStep(module or net, NoMix(), optimizer, settings, loader.gather)
    step = make_step(plain, torch.device("cuda"), stream)
    rng = torch.Generator()
    losses = [float(step((loader.rows(0)[:32],), NoMix().draw(32, rng))) for _ in range(20)]
    assert step.path.startswith("plain for ['clean']")
    assert losses[-1] < losses[0]
