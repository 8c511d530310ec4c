"""Outputs that are not tensors: a part of them is mixed as the tensor itself would be."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import alignmixup as am
from alignmixup.contracts import Mixer
from alignmixup.outputs import Selection, as_logits
from alignmixup.wrappers import logits_module, without_reducer
from cases import TinyNet, draw_case, images, labels

Pair = namedtuple("Pair", ("maps", "note"))


@dataclass(frozen=True)
class Record:
    maps: Any
    note: str = "kept"


# How a layer packs its maps, and what names them.
PACKED: dict[str, tuple[Callable[[Tensor], Any], int | str]] = {
    "tuple": (lambda maps: (None, maps), 1),
    "from the end": (lambda maps: (None, maps), -1),
    "list": (lambda maps: [maps, "kept"], 0),
    "named tuple": (lambda maps: Pair(maps, "kept"), "maps"),
    "named tuple by index": (lambda maps: Pair(maps, "kept"), 0),
    "dict": (lambda maps: {"maps": maps, "note": "kept"}, "maps"),
    "dataclass": (Record, "maps"),
    "dict by index": (lambda maps: OrderedDict(note="kept", maps=maps), 1),
}


class Packed(nn.Module):
    """Return what a module returns inside something else."""

    def __init__(self, module: nn.Module, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.module, self.pack = module, pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.module(x))


class PackedNet(TinyNet):
    """A TinyNet whose layer4 returns its maps inside something else."""

    def __init__(self, pack: Callable[[Tensor], Any], key: int | str) -> None:
        super().__init__()
        self.key, self.seen = key, []
        self.layer4 = Packed(self.layer4, pack)

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer4(self.layer2(self.layer1(x)))
        self.seen.append(output)
        return self.fc(Selection("layer4", self.key).get(output).flatten(1))


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("kind", [am.AlignMixup, am.ManifoldMixup])
def test_a_part_is_mixed_as_the_tensor_would_be(kind: type[Mixer], packing: str) -> None:
    pack, key = PACKED[packing]
    plain = kind("layer4") if kind is am.AlignMixup else kind(("layer4",))
    chosen = kind("layer4", output=key) if kind is am.AlignMixup else kind(("layer4",), output=key)
    draw = draw_case(plain, list(plain.cases)[-1], 6)
    net = PackedNet(pack, key)
    expected = plain.apply(TinyNet(), images(6), labels(6), draw).logits
    assert torch.equal(chosen.apply(net, images(6), labels(6), draw).logits, expected)
    assert type(net.seen[0]) is type(pack(torch.zeros(1)))
    assert "kept" in str(net.seen[0]) or packing in ("tuple", "from the end")


def test_the_original_output_is_not_changed() -> None:
    for pack, key in PACKED.values():
        output, part = pack(torch.zeros(2)), Selection("layer", key)
        assert part.get(part.put(output, torch.ones(2))).sum() == 2
        assert part.get(output).sum() == 0


def test_maps_with_channels_last_are_read_and_written_back() -> None:
    maps, part = torch.rand(2, 3, 5, 7), Selection("layer", None, channels_last=True)
    assert part.get(maps).shape == (2, 7, 3, 5)
    assert torch.equal(part.put(maps, part.get(maps)), maps)
    tokens = torch.rand(2, 4, 7)
    assert part.get(tokens) is tokens
    assert part.put(tokens, tokens) is tokens


@pytest.mark.parametrize(
    ("output", "key", "message"),
    [
        ((torch.zeros(2), None), None, r"a tuple of \{0: \[2\], 1: NoneType\}.* by output=0"),
        (
            {"maps": torch.zeros(2)},
            None,
            r"a dict of .* another layer or, .* by output='maps'",
        ),
        ((torch.zeros(2), None), 1, "output=1 is not a tensor of it; use output=0"),
        ((torch.zeros(2),), 4, "output=4 is not a tensor of it; use output=0"),
        ((torch.zeros(2),), "maps", "output='maps' is not a tensor of it"),
        (torch.zeros(2), 0, "a tensor, which has no part 0: leave output out"),
        (
            Record(torch.zeros(2)),
            None,
            r"a Record of \{'maps': \[2\], 'note': str\}.*output='maps'",
        ),
        (Record(torch.zeros(2)), "note", "output='note' is not a tensor of it; use output='maps'"),
        ("text", None, "a str, not a tensor"),
    ],
)
def test_what_is_no_tensor_is_named(output: Any, key: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"layer 'encoder' returns .*{message}"):
        Selection("encoder", key).get(output)


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda z: z, None),
        (lambda z: {"loss": None, "logits": z}, None),
        (lambda z: (z, z + 1), None),
        (lambda z: [z], None),
        (lambda z: namedtuple("Out", ("aux", "logits"))(z + 1, z), None),
        (lambda z: SimpleNamespace(loss=None, logits=z), None),
        (lambda z: {"out": z}, "out"),
        (Record, "maps"),
        (lambda z: (z + 1, z), 1),
    ],
)
def test_logits_are_found_and_layers_keep_their_names(pack: Any, output: Any) -> None:
    net = Packed(TinyNet(), pack)
    wrapped = as_logits(net, output)
    assert torch.equal(wrapped(images(4)), TinyNet()(images(4)))
    mixer = am.AlignMixup("module.layer4")
    draw = draw_case(mixer, "feat", 4)
    expected = am.AlignMixup("layer4").apply(TinyNet(), images(4), labels(4), draw)
    mixed = mixer.apply(wrapped, images(4), labels(4), draw)
    assert torch.equal(mixed.logits, expected.logits)
    mixed.loss().backward()
    assert net.module.fc.weight.grad is not None
    assert am.alignment_effect(wrapped, mixer, images(4)).logits > 0


@pytest.mark.parametrize(
    ("pack", "output", "message"),
    [
        (lambda z: {"out": z}, None, r"a dict of \{'out': \[4, 5\]\}.*model, output='out'\)"),
        (lambda z: {"logits": None}, None, "there are no logits"),
        (lambda z: (z,), "logits", r"no output 'logits'.*as_logits\(model, output=0\)"),
        (lambda z: None, None, "Packed returns a NoneType"),
    ],
)
def test_missing_logits_are_named(pack: Any, output: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_logits(Packed(TinyNet(), pack), output)(images(4))


@pytest.mark.parametrize("output", [None, 0, "logits"])
def test_a_network_with_an_auxiliary_head_has_one_in_training_alone(output: Any) -> None:
    """Inception returns a named tuple in training and a tensor in evaluation."""
    kind = namedtuple("Outputs", ["logits", "aux_logits"])

    class Inception(TinyNet):
        def forward(self, x: Tensor) -> Any:
            logits = super().forward(x)
            return kind(logits, 2 * logits) if self.training else logits

    net = Inception()
    for each in (net.train(), net.eval()):
        logits = as_logits(each, output)(images(4))
        expected = each(images(4))
        torch.testing.assert_close(logits, getattr(expected, "logits", expected))


def test_a_network_without_a_tensor_of_logits_is_told_about_as_logits() -> None:
    net = Packed(TinyNet(), lambda z: {"logits": z})
    with pytest.raises(ValueError, match=r"alignmixup\.as_logits\(model\)"):
        am.InputMixup()(net, images(4), labels(4))


def test_the_wrapper_shares_mode_and_weights() -> None:
    net = TinyNet().eval()
    assert not as_logits(net).training
    assert list(as_logits(net).parameters()) == list(net.parameters())
    assert without_reducer(as_logits(net)).model is net


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("mixer", [am.RecursiveMix("module.layer4"), am.AutoMix("module.layer2")])
def test_the_wrapper_may_be_inside_another(mixer: am.Mixer) -> None:
    """A method with state and a measurement take the network out of what is around it."""
    net = Packed(TinyNet(), lambda z: {"out": z})
    plain = as_logits(net, "out")
    compiled = torch.compile(plain, backend="eager")
    for wrapped in (compiled, as_logits(compiled)):
        assert torch.equal(logits_module(wrapped)(images(4)), plain(images(4)))
        losses = []
        for each in (plain, wrapped):
            torch.compiler.reset()
            torch.manual_seed(0)
            attached = mixer.attach(each, images(4))
            rng = torch.Generator().manual_seed(0)
            losses.append(attached(each, images(4), labels(4), rng).loss().item())
        assert losses[1] == pytest.approx(losses[0])
        effect = am.alignment_effect(wrapped, "module.layer4", images(4))
        assert effect == am.alignment_effect(plain, "module.layer4", images(4))


@pytest.mark.unchecked_shapes
def test_a_compiled_network_mixes_a_part_of_its_output_without_compiling_again() -> None:
    pack, key = PACKED["tuple"]
    net, mixer = PackedNet(pack, key), am.AlignMixup("layer4", output=key)
    net.seen = type("Forget", (), {"append": lambda self, output: None})()
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            draw = draw_case(mixer, "feat", 6, seed)
            expected = am.AlignMixup("layer4").apply(TinyNet(), images(6), labels(6), draw).logits
            logits = mixer.apply(compiled, images(6), labels(6), draw).logits
            torch.testing.assert_close(logits, expected)
    torch.compiler.reset()
