"""The effect of alignment by layer: what is measured, and the bars that show it."""

import itertools
from types import SimpleNamespace

import pytest

from alignmixup.datasets import shapes
from alignmixup.figures import effect
from alignmixup.figures.effect import draw_effects, layer_effects
from alignmixup.figures.sources import Source, network_source
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec


@pytest.fixture(scope="module")
def images():
    return shapes("test", 60)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(effect, "NUM_IMAGES", 2)


def measured(layer, features, pooled, logits, plan_entropy):
    return SimpleNamespace(
        layer=layer, features=features, pooled=pooled, logits=logits, plan_entropy=plan_entropy
    )


@pytest.mark.slow
def test_alignment_before_a_pooled_head_changes_nothing_and_before_a_flattened_one_does(small):
    logits = {}
    for head in ("pool", "flatten"):
        effects, left_out = layer_effects(network_source(None, 0, None, head=head))
        assert [e.layer for e in effects] == ["layer1", "layer2", "layer3", "layer4"]
        assert not left_out
        logits[head] = effects[-1].logits
    assert logits["pool"] < 1e-5
    assert logits["flatten"] > 1e-2


def test_layers_too_large_to_measure_are_named(small, monkeypatch):
    monkeypatch.setattr(effect, "MOST_POSITIONS", 64)
    effects, left_out = layer_effects(network_source(None, 0, None))
    assert left_out == ["layer1", "layer2"]
    assert [e.layer for e in effects] == ["layer3", "layer4"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("preact_resnet18", [f"encoder.layer{i}" for i in (1, 2, 3, 4)]),
        # Its normalization and ReLU come after the last stage: another map.
        ("wrn16_8", [*(f"encoder.layer{i}" for i in (1, 2, 3)), "encoder"]),
    ],
)
def test_a_map_with_two_names_is_measured_once(small, images, name, layers):
    spec = NetSpec(name, width=4, autoencoder="vector")
    net = build(spec, 10, images.mean, images.std, 32).eval()
    source = Source(net, "encoder", images, "autoencoder", num_iters=5)
    assert [e.layer for e in layer_effects(source)[0]] == layers


def test_the_changes_are_dots_on_a_log_axis():
    effects = [measured("layer1", 0.4, 1e-7, 0.05, 0.9), measured("layer2", 0.3, 0, 1e-8, 0)]
    top, bottom = draw_effects({"net": effects}, "effect").axes
    assert not top.patches  # a bar on an axis without a zero has no length
    heights = [
        float(y) for line in top.lines if line.get_label()[0] != "_" for y in line.get_ydata()
    ]
    assert heights == [0.4, 0.3, 1e-7, effect.SMALLEST, 0.05, 1e-8]
    assert [bar.get_height() for bar in bottom.patches] == [0.9, 0]
    assert [t.get_text() for t in bottom.get_xticklabels()] == ["layer1", "layer2"]
    assert top.get_yscale() == "log"


@pytest.mark.parametrize(
    ("layers", "shown", "is_slanted"),
    [
        ([f"encoder.layer{i}" for i in (1, 2, 3, 4)], ["layer1", "layer2", "layer3", "layer4"], 0),
        (["encoder.layer3", "encoder"], ["encoder.layer3", "encoder"], 0),
        ([f"encoder.layer{i}" for i in (1, 2, 3)] + ["encoder"], None, 1),
    ],
)
def test_names_of_layers_do_not_touch(layers, shown, is_slanted):
    effects = [measured(layer, 0.4, 1e-7, 0.05, 0.9) for layer in layers]
    figure = draw_effects({"net": effects}, "effect")
    for axes in figure.axes:
        labels = axes.get_xticklabels()
        assert [label.get_text() for label in labels] == (shown or layers)
        assert all(bool(label.get_rotation()) == is_slanted for label in labels)
    figure.draw_without_rendering()
    # Slanted ones begin below the others; level ones must leave a gap.
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert is_slanted or all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
