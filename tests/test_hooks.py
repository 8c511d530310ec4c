"""Taps: through every wrapper the action is applied once, or there is an error; nothing stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from alignmixup.contracts import Mixer
from alignmixup.evaluation.effect import alignment_effect
from alignmixup.experiments.painters import features_at
from alignmixup.hooks import peek, tap
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.mixers.automix import AutoMix
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.recursivemix import RecursiveMix
from alignmixup.wrappers import find_layer, layer_names, plain_module
from cases import TinyNet, draw_case, images, labels

pytestmark = [
    pytest.mark.unchecked_shapes,  # all of this traces code or hands it wrong things
    # The tracer's own, where a compiled layer stands after one that is not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")


def double(output: Tensor) -> Tensor:
    return 2 * output


def scale(output: Tensor, factor: Tensor) -> Tensor:
    return factor * output


def has_hooks(net: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def doubled(net: TinyNet, x: Tensor, layer: str) -> Tensor:
    """The plain forward of ``net`` with the named stage's output doubled, written out."""
    for name in ("layer1", "layer2", "layer4"):
        x = getattr(net, name)(x)
        x = 2 * x if name == layer else x
    return net.fc(x.flatten(1))


# ---- eager ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["layer1", "layer2", "layer4"])
def test_the_action_replaces_the_output_during_the_block_alone(layer: str) -> None:
    net, x = TinyNet(), images(4)
    plain, expected = net(x), doubled(net, x, layer)
    with tap(net, layer, double):
        assert torch.equal(net(x), expected)
    assert torch.equal(net(x), plain)
    assert not has_hooks(net)


def test_nested_names_and_arguments() -> None:
    net, x = TinyNet(), images(4)
    expected = doubled(net, x, "layer4")
    with tap(net, "layer4.2", scale, torch.tensor(2.0)):  # the ReLU at the end of layer4
        assert torch.equal(net(x), expected)
    with tap(net, "layer4.1", scale, torch.tensor(0.0)):
        assert torch.equal(net(x), net.fc.bias.expand(4, -1))


def test_without_an_action_the_forward_is_plain() -> None:
    net, x = TinyNet(), images(4)
    plain = net(x)
    with tap(net, "layer4", None):
        assert torch.equal(net(x), plain)
        assert not has_hooks(net)
    with tap(net, "layer4", None):
        pass  # nothing was to be done, so nothing was missed


def test_a_peek_is_not_overwritten_in_place() -> None:
    """As by nn.ReLU(inplace=True) after a convolution: the features read were those behind it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(8, 4)
    with peek(net, "0") as peeked:
        net(x)
    assert torch.equal(peeked.output, net[0](x))
    assert torch.equal(features_at(net, "0", x), net[0](x))


def test_several_layers_at_once() -> None:
    net, x = TinyNet(), images(4)
    with tap(net, "layer1", double), tap(net, "layer4", scale, torch.tensor(0.0)):
        assert torch.equal(net(x), net.fc.bias.expand(4, -1))
    assert not has_hooks(net)


@pytest.mark.parametrize("mixer", [AlignMixup("layre4"), ManifoldMixup(("layre4",))])
def test_a_missing_layer_lists_what_there_is(mixer: Mixer) -> None:
    net, draw = TinyNet(), mixer.draw(4, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="there is no layer 'layre4' in TinyNet") as error:
        mixer.apply(net, images(4), labels(4), draw)
    message = str(error.value)
    assert "; did you mean 'layer4' or " in message
    assert "'layer4'" in message.split("?")[0]
    assert "its layers: fc, layer1, layer2, layer4, layer1.0" in message
    assert not has_hooks(net)


@pytest.mark.parametrize(
    "layer", ["", ".", "layer4.", "layer4.9", "layer4.weight", "fc.bias", "head"]
)
def test_what_is_no_layer_is_refused(layer: str) -> None:
    """Also a parameter or a plain attribute (``head`` is a string here) of that name."""
    with pytest.raises(
        ValueError, match=r"there is no layer .* in TinyNet.*its layers: fc, layer1"
    ):
        find_layer(TinyNet(), layer)


def test_a_long_list_of_layers_is_cut_short() -> None:
    net = nn.Sequential(*[nn.Identity() for _ in range(50)])
    with pytest.raises(ValueError, match=r"its layers: 0, 1, 10, .*, \.\.\.$"):
        find_layer(net, "layer4")


class Wayward(TinyNet):
    """A network whose layers run as often as told, and which has one that never runs."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats, self.spare = repeats, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(x))
        for _ in range(self.repeats):
            x = self.layer4(x)
        return self.fc(x.flatten(1))


@pytest.mark.parametrize("wrap", [lambda net: net, compiled], ids=["eager", "compiled"])
def test_a_layer_that_runs_twice_is_an_error(wrap: Callable[[nn.Module], nn.Module]) -> None:
    mixer, net = AlignMixup(), Wayward(repeats=2)
    with pytest.raises(ValueError, match=r"'layer4' ran 2 times .*its layers: fc, layer1"):
        mixer.apply(wrap(net), images(4), labels(4), draw_case(mixer, "feat", 4))


def test_a_sequential_whose_parts_are_checkpointed_is_named() -> None:
    class Checkpointed(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer2(self.layer1(x))
            features = checkpoint_sequential(self.layer4, 1, x, use_reentrant=False)
            logits: Tensor = self.fc(features.flatten(1))
            return logits

    mixer = AlignMixup("layer4")
    with pytest.raises(ValueError, match=r"did not run .* parts ran by .*checkpointing; choose"):
        mixer(Checkpointed(), images(4), labels(4))


def test_a_layer_that_does_not_run_is_an_error() -> None:
    mixer, net = AlignMixup("spare"), Wayward(repeats=1)
    for case in ("input", "feat"):  # in the first step, whatever its case
        with pytest.raises(
            ValueError, match=r"'spare' did not run in this forward.*its layers: fc, layer1"
        ):
            mixer.apply(net, images(4), labels(4), draw_case(mixer, case, 4))
    assert not has_hooks(net)
    never = AlignMixup("spare", weights={"input": 1.0})
    never.apply(net, images(4), labels(4), draw_case(never, "input", 4))  # not needed there


def test_a_compiled_layer_that_does_not_run_is_an_error() -> None:
    mixer = AlignMixup("spare")
    with pytest.raises(ValueError, match="layer 'spare'"):
        mixer.apply(compiled(Wayward(repeats=1)), images(4), labels(4), draw_case(mixer, "feat", 4))


@pytest.mark.parametrize("case", ["feat", "feat'"])
def test_a_wrong_rank_is_named(case: str) -> None:
    mixer, net = AlignMixup("fc"), TinyNet()
    expected = r"'fc' returns \[4, 5\]; AlignMixup needs maps .*its layers: fc, layer1"
    with pytest.raises(ValueError, match=expected):
        mixer.apply(net, images(4), labels(4), draw_case(mixer, case, 4))
    assert not has_hooks(net)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class TwoHeads(TinyNet):
    """A network with a layer that gives two tensors, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pair(x)[0])


@pytest.mark.parametrize("mixer", [AlignMixup("pair"), ManifoldMixup(("pair",))])
def test_a_tuple_is_named(mixer: Mixer) -> None:
    case = list(mixer.cases)[-1]
    with pytest.raises(ValueError, match=r"'pair' returns a tuple of .*output=0 or output=1; its"):
        mixer.apply(TwoHeads(), images(4), labels(4), draw_case(mixer, case, 4))


class BatchSecond(nn.Module):
    """Tokens [n, b, c], as torch's own attention has them by default."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.tokens(self.patches(x).flatten(2).permute(2, 0, 1)).mean(0))


@pytest.mark.parametrize(
    "mixer",
    [
        AlignMixup("tokens"),
        AlignMixup("tokens", aligned=False),
        ManifoldMixup(("tokens",)),
        AlignMixupAE(embed="tokens", layers=("E",), clean=False),
    ],
)
def test_an_output_whose_rows_are_not_the_samples_is_named(mixer: Mixer) -> None:
    draw = draw_case(mixer, list(mixer.cases)[-1], 6)
    with pytest.raises(
        ValueError, match=r"'tokens' returns \[16, 6, 8\] for a batch of 6: .* first"
    ):
        mixer.apply(BatchSecond(), images(6), labels(6), draw)
    with pytest.raises(ValueError, match=r"'tokens' returns \[16, 6, 8\] for a batch of 6"):
        alignment_effect(BatchSecond(), "tokens", images(6))


class Checkpointed(TinyNet):
    """The two middle stages keep no features: backward runs them a second time."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        middle = nn.Sequential(self.layer2, self.layer4)
        features = checkpoint(middle, self.layer1(x), use_reentrant=self.is_reentrant)
        return self.fc(features.flatten(1))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("layer", ["layer2", "layer4"])
@pytest.mark.parametrize("wrap", [lambda net: net, compiled], ids=["eager", "compiled"])
def test_a_layer_that_backward_runs_again_is_an_error(
    is_reentrant: bool, layer: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """The second time nobody mixes: the gradient would be that of other features."""
    mixer = AlignMixup(layer)
    net, draw = wrap(Checkpointed(is_reentrant)), draw_case(mixer, "feat", 6)
    with pytest.raises(ValueError, match=rf"'{layer}' runs within torch.utils.checkpoint"):
        mixer.apply(net, images(6), labels(6), draw)
    with torch.no_grad():  # no backward, no second time
        assert mixer.apply(net, images(6), labels(6), draw).loss().isfinite()


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("wrap", [lambda net: net, compiled], ids=["eager", "compiled"])
def test_a_layer_beside_what_is_checkpointed_mixes(
    is_reentrant: bool, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    mixer = AlignMixup("layer1")
    draw, nets = draw_case(mixer, "feat", 6), (Checkpointed(is_reentrant), TinyNet())
    for net in nets:
        mixer.apply(wrap(net.eval()), images(6), labels(6), draw).loss().backward()
    for ours, plain in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


def test_what_has_no_layers_is_named() -> None:
    mixer = AlignMixup()
    with pytest.raises(ValueError, match="the layers of a function cannot be tapped"):
        mixer.apply(lambda x: x, images(4), labels(4), draw_case(mixer, "feat", 4))


@pytest.mark.filterwarnings(r"ignore:.torch\.jit\.\w+. is")  # deprecated or, from 3.14, unsupported
def test_a_scripted_module_is_named() -> None:
    mixer = AlignMixup("0")
    net = torch.jit.trace(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), images(4))
    with pytest.raises(ValueError, match="the layers of a TopLevelTracedModule cannot be tapped"):
        mixer.apply(net, images(4), labels(4), draw_case(mixer, "feat", 4))


@pytest.mark.filterwarnings(r"ignore:.torch\.jit\.\w+. is")
def test_a_traced_layer_of_a_plain_network_mixes() -> None:
    net, traced, mixer = TinyNet().eval(), TinyNet().eval(), AlignMixup()
    traced.layer4 = torch.jit.trace(traced.layer4, net.layer2(net.layer1(images(4))))
    draw = draw_case(mixer, "feat", 4)
    losses = [mixer.apply(each, images(4), labels(4), draw).loss() for each in (net, traced)]
    torch.testing.assert_close(*losses)


def test_a_layer_that_is_called_by_keyword_has_no_input_to_read() -> None:
    class Keyword(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=self.layer4(self.layer2(self.layer1(x))).flatten(1))

    net = Keyword()
    with (
        pytest.raises(ValueError, match="'fc' is called by keyword: pass its input by position"),
        tap(net, "fc", double, reads_input=True),
    ):
        net(images(4))


@pytest.mark.parametrize("place", ["action", "network"])
def test_nothing_stays_hooked_after_an_exception(place: str) -> None:
    net, x = TinyNet(), images(4)
    plain = net(x)

    def fail(*args: object) -> Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), tap(net, "layer2", fail):
        net(x)
    handle = net.fc.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"), tap(net, "layer2", double):
        net(x)
    handle.remove()
    assert not has_hooks(net)
    assert torch.equal(net(x), plain)


def test_a_hook_of_the_users_stays() -> None:
    net, seen = TinyNet(), []
    net.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with tap(net, "layer4", double):
        net(images(4))
    net(images(4))
    assert len(seen) == 2
    assert len(net.layer4._forward_hooks) == 1


def in_another_thread(function: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_another_thread_sees_the_plain_network_meanwhile() -> None:
    net, x = TinyNet(), images(4)
    plain, expected = net(x), doubled(net, x, "layer4")
    with tap(net, "layer4", double):
        assert torch.equal(in_another_thread(lambda: net(x)), plain)
        assert torch.equal(net(x), expected)


def test_threads_that_mix_at_once_each_see_their_own_mix() -> None:
    net, x, mixer = TinyNet(), images(4), AlignMixup()

    def scaled() -> Tensor:
        with tap(net, "layer4", scale, torch.tensor(3.0)):
            return net(x)

    def mixed(seed: int) -> Tensor:
        logits = mixer(net, x, labels(4), torch.Generator().manual_seed(seed)).logits
        assert logits is not None
        return logits

    tripled, expected = scaled(), doubled(net, x, "layer4")
    with tap(net, "layer4", double):
        assert torch.equal(in_another_thread(scaled), tripled)
        assert torch.equal(net(x), expected)
    alone = [mixed(seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(mixed, range(40)))
    assert all(map(torch.equal, alone, at_once))


def test_a_second_thread_that_mixes_a_compiled_network_is_an_error() -> None:
    net, x = compiled(TinyNet()), images(4)

    def mixed() -> Tensor:
        with tap(net, "layer4", double):
            return net(x)

    expected = doubled(TinyNet(), x, "layer4")
    with tap(net, "layer4", double):
        with pytest.raises(RuntimeError, match="another thread mixes at layer 'layer4'"):
            in_another_thread(mixed)
        assert torch.equal(net(x), expected)
    assert torch.equal(mixed(), expected)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        find_layer(nn.DataParallel(TinyNet()), "layer4")


# ---- wrappers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
def test_through_distributed_data_parallel(is_compiled: bool) -> None:
    mixer = AlignMixup()
    net, twin = TinyNet(), TinyNet()
    wrapped: nn.Module = DistributedDataParallel(net)
    wrapped = compiled(wrapped) if is_compiled else wrapped
    assert plain_module(wrapped) is net
    assert layer_names(wrapped) == layer_names(net)
    for case in mixer.cases:
        draw = draw_case(mixer, case, 4)
        ours = mixer.apply(wrapped, images(4), labels(4), draw).loss()
        theirs = mixer.apply(twin, images(4), labels(4), draw).loss()
        torch.testing.assert_close(ours, theirs)
        ours.backward()
        theirs.backward()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert is_compiled or not has_hooks(net)


fsdp_on_a_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of torch 2.6 needs a GPU"
)


def sharded(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in ("layer1", "layer4"):
        fully_shard(net.get_submodule(layer), mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


@fsdp_on_a_cpu
@pytest.mark.unchecked_shapes
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "mixer", [AlignMixup(), PuzzleMix(), PuzzleMix(clean_lam=1.0), CoMixup(), ManifoldMixup()]
)
def test_through_fully_shard(mixer: Mixer) -> None:
    net, twin = sharded(TinyNet()), TinyNet()
    for step in range(2):
        draw = mixer.draw(4, torch.Generator().manual_seed(step))
        for each in (net, twin):
            mixer.apply(each, images(4), labels(4), draw).loss().backward()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert isinstance(one.grad, DTensor)
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@fsdp_on_a_cpu
@pytest.mark.unchecked_shapes
@pytest.mark.usefixtures("process_group")
def test_what_cannot_be_attached_to_a_sharded_network_is_named() -> None:
    with pytest.raises(ValueError, match=r"AutoMix looks at the whole .* before fully_shard"):
        AutoMix("layer2").attach(sharded(TinyNet()), images(4))
    net = TinyNet()
    history, learned = (m.attach(net, images(4)) for m in (RecursiveMix(), AutoMix("layer2")))
    sharded(net)
    history(net, images(4), labels(4)).loss().backward()
    with pytest.raises(ValueError, match="which FSDP shards: use DistributedDataParallel"):
        learned(net, images(4), labels(4))


def train_steps(mixer: Mixer, net: nn.Module, num_steps: int = 12) -> list[float]:
    rng, losses = torch.Generator().manual_seed(1), []
    for step in range(num_steps):
        loss = mixer.apply(net, images(6, seed=step), labels(6), mixer.draw(6, rng)).loss()
        loss.backward()
        losses.append(loss.item())
    return losses


def compiled_itself(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def layer_compiled(net: TinyNet) -> nn.Module:
    net.layer4 = compiled(net.layer4)
    return net


def layer_compiled_itself(net: TinyNet) -> nn.Module:
    net.layer4.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    "mixer",
    [AlignMixup(), pytest.param(ManifoldMixup(), marks=pytest.mark.slow)],
    ids=["align", "manifold"],
)
@pytest.mark.parametrize("wrap", [compiled, compiled_itself])
def test_twelve_steps_compile_once_a_case(wrap: Callable, mixer: Mixer) -> None:
    expected = train_steps(mixer, TinyNet())
    counters.clear()
    got = train_steps(mixer, wrap(TinyNet()))
    assert got == pytest.approx(expected, abs=1e-5)
    assert 0 < counters["stats"]["unique_graphs"] <= len(mixer.cases)
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "layer", ["layer4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("layer4.2", "layer2"))]
)
@pytest.mark.parametrize("wrap", [layer_compiled, layer_compiled_itself])
def test_a_layer_compiled_by_itself(wrap: Callable, layer: str) -> None:
    """The tap may be at the compiled layer, inside it, or elsewhere; the names do not change."""
    mixer = AlignMixup(layer)
    expected = train_steps(mixer, TinyNet())
    counters.clear()
    net = wrap(TinyNet())
    assert layer_names(net) == layer_names(TinyNet())
    assert train_steps(mixer, net) == pytest.approx(expected, abs=1e-5)
    # A case that came before the first plain forward is compiled once more after it, and no more.
    train_steps(mixer, net)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs <= 2 * len(mixer.cases)
    train_steps(mixer, net)
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.parametrize("wrap", [compiled, compiled_itself])
def test_a_compiled_module_that_ran_before_is_an_error(wrap: Callable) -> None:
    """torch.compile ignores hooks that come later: a plain forward here would go unnoticed."""
    net, x = wrap(TinyNet()), images(6)
    net(x)
    for case in AlignMixup().cases:
        with pytest.raises(ValueError, match="compiled before the mixer's first call"):
            AlignMixup().apply(net, x, labels(6), draw_case(AlignMixup(), case, 6))
    mixer = ManifoldMixup()
    for case in mixer.cases.keys() - {"input"}:
        with pytest.raises(ValueError, match="compiled before the mixer's first call"):
            mixer.apply(net, x, labels(6), draw_case(mixer, case, 6))
    draw = draw_case(mixer, "input", 6)
    expected = mixer.apply(TinyNet(), x, labels(6), draw).loss()  # where no tap is needed
    torch.testing.assert_close(mixer.apply(net, x, labels(6), draw).loss(), expected)


@pytest.mark.parametrize("wrap", [layer_compiled, layer_compiled_itself])
def test_a_compiled_layer_that_ran_before_mixes(wrap: Callable) -> None:
    mixer, net, x = AlignMixup(), wrap(TinyNet()), images(6)
    net(x)
    for case in mixer.cases:
        draw = draw_case(mixer, case, 6)
        expected = mixer.apply(TinyNet(), x, labels(6), draw).loss()
        torch.testing.assert_close(mixer.apply(net, x, labels(6), draw).loss(), expected)


def test_after_a_reset_a_module_that_ran_before_works() -> None:
    mixer, net = AlignMixup(), compiled(TinyNet())
    net(images(6))
    draw = draw_case(mixer, "feat", 6)
    with pytest.raises(ValueError, match=r"torch.compiler.reset\(\)"):
        mixer.apply(net, images(6), labels(6), draw)
    torch.compiler.reset()  # the remedy the message names
    expected = mixer.apply(TinyNet(), images(6), labels(6), draw).loss()
    torch.testing.assert_close(mixer.apply(net, images(6), labels(6), draw).loss(), expected)


def test_a_compiled_module_is_plain_outside_the_block() -> None:
    mixer, net, twin = AlignMixup(), compiled(TinyNet()), TinyNet()
    mixer.apply(net, images(6), labels(6), draw_case(mixer, "feat", 6))
    torch.testing.assert_close(net(images(6)), twin(images(6)))
    net.eval(), twin.eval()
    twin.load_state_dict(plain_module(net).state_dict())
    torch.testing.assert_close(net(images(6)), twin(images(6)))


def test_a_compiled_module_is_plain_after_an_exception() -> None:
    net, x = compiled(TinyNet()), images(6)
    with pytest.raises(ZeroDivisionError), tap(net, "layer4", double):
        raise ZeroDivisionError
    torch.testing.assert_close(net(x), TinyNet()(x))


def test_a_wrong_rank_in_a_compiled_module_is_named() -> None:
    mixer = AlignMixup("fc")
    with pytest.raises(ValueError, match=r"'fc' returns \[6, 5\]"):
        mixer.apply(compiled(TinyNet()), images(6), labels(6), draw_case(mixer, "feat", 6))


def test_a_changed_batch_size_still_mixes() -> None:
    mixer, net, twin = AlignMixup(), compiled(TinyNet()), TinyNet()
    for batch_size in (6, 4, 1, 6):
        draw = draw_case(mixer, "feat", batch_size)
        x, y = images(batch_size), labels(batch_size)
        torch.testing.assert_close(
            mixer.apply(net, x, y, draw).loss(), mixer.apply(twin, x, y, draw).loss()
        )


def test_a_compiled_step() -> None:
    """The whole step compiled, the hook registered and removed inside it."""
    mixer, net = AlignMixup(), TinyNet()
    expected = train_steps(mixer, TinyNet())
    step = torch.compile(lambda x, y, draw: mixer.apply(net, x, y, draw).loss(), backend="eager")
    rng, losses = torch.Generator().manual_seed(1), []
    for number in range(12):
        loss = step(images(6, seed=number), labels(6), mixer.draw(6, rng))
        loss.backward()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)
    assert not has_hooks(net)


def test_a_tapped_compiled_module_is_not_kept_alive() -> None:
    net = TinyNet()
    with tap(compiled(net), "layer4", None):
        pass
    ghost = weakref.ref(net.layer4)
    del net
    torch.compiler.reset()
    gc.collect()
    assert ghost() is None
