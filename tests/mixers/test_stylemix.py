"""StyleMix and StyleCutMix: the four features, labels as shares of what is shown, auto gamma."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.stylecutmix import StyleCutDraw, StyleCutMix
from alignmixup.mixers.stylemix import StyleDraw, StyleMix, StyleMixer, mix_styles
from alignmixup.ops.adain import (
    adain,
    find_weights,
    load_adain,
    save_adain,
    small_adain,
    style_statistics,
)
from alignmixup.training.adain_fit import train_small_adain
from cases import NUM_CLASSES, TinyNet, draw_case, images, labels
from learning import check_it_teaches, small_shapes

SIZE = 16
DISTANCES = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 0.5], [4.0, 0.5, 0.0]])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained network: what the mixers do with its features does not depend on them."""
    path = tmp_path_factory.mktemp("style") / "small.safetensors"
    net = small_adain(4, torch.Generator().manual_seed(0))
    net.class_distances = DISTANCES.clone()
    save_adain(net, path)
    return str(path)


class Seen(nn.Module):
    """A network that keeps what it was shown."""

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.image = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.image = x
        return x.new_zeros(len(x), self.num_classes)


PERM = torch.tensor([3, 0, 4, 1, 5, 2])


def style_draw(content: float, style: float, joint: float = 0.5, r: float = 0.7) -> StyleDraw:
    lam = r * content + (1 - r) * style
    return StyleDraw("style", PERM, *(torch.tensor(v) for v in (lam, content, style, joint)))


def cut_draw(lam: float, style: float, gamma: float) -> StyleCutDraw:
    lam, style, gamma = (torch.tensor(v) for v in (lam, style, gamma))
    return StyleCutDraw("cut", PERM, lam, torch.tensor([0.4, 0.6]), style, gamma)


# ---- mixed features ------------------------------------------------------------------------------


def four_features(f: Tensor) -> dict[str, Tensor]:
    g = f[PERM]
    return {
        "11": f,
        "22": g,
        "12": adain(f, style_statistics(g)),
        "21": adain(g, style_statistics(f)),
    }


@pytest.mark.parametrize(
    ("content", "style", "which"),
    [(1.0, 1.0, "11"), (0.0, 0.0, "22"), (1.0, 0.0, "12"), (0.0, 1.0, "21")],
)
@pytest.mark.parametrize("joint", [0.0, 1.0])
def test_whole_shares_give_one_of_the_four(
    content: float, style: float, which: str, joint: float
) -> None:
    f = torch.randn(6, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    mixed = mix_styles(f, PERM, *(torch.tensor(v) for v in (content, style, joint)))
    torch.testing.assert_close(mixed, four_features(f)[which])


@pytest.mark.parametrize(("content", "style"), [(0.3, 0.9), (0.6, 0.2), (0.5, 0.5)])
@pytest.mark.parametrize("joint", [0.0, 0.4, 1.0])
def test_mixed_features_are_the_formula(content: float, style: float, joint: float) -> None:
    f = torch.randn(6, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    low, high = max(0.0, content + style - 1), min(content, style)
    t = low + joint * (high - low)
    shares = {"11": t, "22": 1 - content - style + t, "12": content - t, "21": style - t}
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= -1e-9
    expected = sum(shares[which] * part for which, part in four_features(f).items())
    mixed = mix_styles(f, PERM, *(torch.tensor(v) for v in (content, style, joint)))
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)


def test_the_style_of_the_mix_is_the_mix_of_the_styles() -> None:
    """With all the content of the anchor, means and deviations follow the share of style."""
    f = torch.randn(6, 5, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = f * torch.arange(1.0, 7.0).view(6, 1, 1, 1)
    mixed = style_statistics(mix_styles(f.float(), PERM, *map(torch.tensor, (1.0, 0.25, 0.5))))
    one, other = style_statistics(f), style_statistics(f[PERM])
    for name in ("mean", "std"):
        expected = 0.25 * getattr(one, name) + 0.75 * getattr(other, name)
        torch.testing.assert_close(getattr(mixed, name).double(), expected, atol=1e-4, rtol=1e-4)


# ---- StyleMix ------------------------------------------------------------------------------------


def test_stylemix_shows_the_decoded_mix(weights: str) -> None:
    net, x, style = Seen(), images(6), load_adain(weights)
    draw = style_draw(0.3, 0.8)
    StyleMix(weights).apply(net, x, labels(6), draw)
    features = mix_styles(style.encode(x), PERM, draw.content, draw.style, draw.joint)
    torch.testing.assert_close(net.image, style.decode(features, (SIZE, SIZE)))
    assert not net.image.requires_grad
    assert 0 <= net.image.min() <= net.image.max() <= 1


@pytest.mark.parametrize("r", [0.0, 0.7, 1.0])
def test_stylemix_labels_weigh_content_and_style(weights: str, r: float) -> None:
    mixer = StyleMix(weights, prob=1.0, content_weight=r)
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        draw = mixer.draw(6, rng)
        share = r * draw.content + (1 - r) * draw.style
        expected = torch.eye(NUM_CLASSES)[labels(6)]
        expected = share * expected + (1 - share) * expected[draw.perm]
        mixed = mixer.apply(TinyNet(), images(6), labels(6), draw)
        torch.testing.assert_close(mixed.targets, expected)
        torch.testing.assert_close(mixed.targets.sum(1), torch.ones(6))


def test_stylemix_shares_are_drawn_apart(weights: str) -> None:
    """Content and style are independent; the label lies between them."""
    mixer, rng = StyleMix(weights, prob=1.0), torch.Generator().manual_seed(0)
    draws = [mixer.draw(2, rng) for _ in range(400)]
    content, style = (torch.stack([getattr(d, n) for d in draws]) for n in ("content", "style"))
    assert abs(float(torch.corrcoef(torch.stack([content, style]))[0, 1])) < 0.15
    assert all(
        min(d.content, d.style) - 1e-6 <= d.lam <= max(d.content, d.style) + 1e-6 for d in draws
    )


# ---- StyleCutMix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.2, 0.55, 0.9, 1.0])
@pytest.mark.parametrize("style", [0.0, 0.6])
def test_stylecutmix_labels_are_the_share_of_the_pixels_shown(
    weights: str, lam: float, style: float
) -> None:
    """Class k is one shade; with gamma = 1 nothing is stylised, and content is all there is."""
    shade = torch.arange(6).view(6, 1, 1, 1) / 8
    x, net = shade.repeat(1, 3, SIZE, SIZE), Seen(6)
    mixed = StyleCutMix(weights).apply(net, x, torch.arange(6), cut_draw(lam, style, 1.0))
    whose = (net.image[:, 0] * 8).round().long()
    for i in range(6):
        shown = torch.bincount(whose[i].flatten(), minlength=6) / SIZE**2
        torch.testing.assert_close(mixed.targets[i], shown)


@pytest.mark.parametrize(("lam", "style", "gamma"), [(0.4, 0.3, 0.0), (0.7, 0.9, 0.6)])
def test_stylecutmix_is_the_formula(weights: str, lam: float, style: float, gamma: float) -> None:
    """The authors' four terms with maps Rc, Rs and T = max(0, Rc + Rs - 1)."""
    net, x, adain_net = Seen(), images(6), load_adain(weights)
    draw = cut_draw(lam, style, gamma)
    mixed = StyleCutMix(weights).apply(net, x, labels(6), draw)

    side = int(SIZE * (1 - lam) ** 0.5)
    row, column = int(0.4 * SIZE), int(0.6 * SIZE)
    inside = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    rows = slice(max(row - side // 2, 0), row + side // 2)
    inside[rows, max(column - side // 2, 0) : column + side // 2] = True
    content, style_map = (~inside).float(), torch.full((SIZE, SIZE), style)
    t = (content + style_map - 1).clamp(min=0)
    parts = four_features(adain_net.encode(x))
    g12 = gamma * x + (1 - gamma) * adain_net.decode(parts["12"], (SIZE, SIZE))
    g21 = gamma * x[PERM] + (1 - gamma) * adain_net.decode(parts["21"], (SIZE, SIZE))
    expected = t * x + (1 - content - style_map + t) * x[PERM]
    expected = expected + (content - t) * g12 + (style_map - t) * g21
    torch.testing.assert_close(net.image, expected, atol=1e-5, rtol=1e-5)

    share = float(content.mean())
    share = 0.7 * share + 0.3 * (gamma * share + (1 - gamma) * style)
    one_hot = torch.eye(NUM_CLASSES)[labels(6)]
    torch.testing.assert_close(mixed.targets, share * one_hot + (1 - share) * one_hot[PERM])


def test_whole_shares_of_content_and_style_are_the_anchor_bit_for_bit(weights: str) -> None:
    net, x = Seen(), images(6, dtype=torch.float64)
    mixed = StyleCutMix(weights).apply(net, x, labels(6), cut_draw(1.0, 1.0, 0.3))
    assert torch.equal(net.image, x)
    assert torch.equal(mixed.targets, torch.eye(NUM_CLASSES)[labels(6)])


def test_without_stylised_pixels_it_is_cutmix(weights: str) -> None:
    draw = cut_draw(0.5, 0.3, 1.0)
    ours = StyleCutMix(weights).apply(TinyNet(), images(6), labels(6), draw)
    other = CutMix().apply(TinyNet(), images(6), labels(6), draw)
    assert torch.equal(ours.logits, other.logits)
    torch.testing.assert_close(ours.targets, other.targets)


# ---- automatic gamma -----------------------------------------------------------------------------


def test_auto_gamma_is_tanh_of_the_distance_of_the_classes(weights: str) -> None:
    mixer = StyleCutMix(weights, gamma="auto", delta=2.0, content_weight=0.0)
    y = torch.tensor([0, 1, 2, 2, 0, 0])
    partner = y[PERM]
    distance = DISTANCES[y, partner] + 2.0 * (y == partner)
    gamma = torch.tanh(distance / 2.0)
    assert len(gamma.unique()) == 4
    mixed = mixer.apply(Seen(3), images(6), y, cut_draw(1.0, 0.25, 0.9))
    # All content is the anchor's, so that the label is gamma + (1 - gamma) rs; gamma is not drawn.
    share = gamma + (1 - gamma) * 0.25
    one_hot = torch.eye(3)[y]
    expected = share[:, None] * one_hot + (1 - share[:, None]) * one_hot[PERM]
    torch.testing.assert_close(mixed.targets, expected)
    soft = mixer.apply(Seen(3), images(6), one_hot, cut_draw(1.0, 0.25, 0.9))
    torch.testing.assert_close(soft.targets, mixed.targets)


def test_auto_gamma_averages_over_the_classes_of_multi_label_targets(weights: str) -> None:
    mixer = StyleCutMix(
        weights, gamma="auto", delta=2.0, content_weight=0.0, loss="sigmoid_bce", prob=1.0
    )
    y = torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]])
    gamma = torch.zeros(6)
    for i, partner in enumerate(y[PERM]):
        pairs = [(k, m) for k in range(3) for m in range(3) if y[i, k] and partner[m]]
        far = [float(DISTANCES[k, m]) + 2.0 * (k == m) for k, m in pairs]
        gamma[i] = torch.tanh(torch.tensor(sum(far) / max(len(far), 1) / 2.0))
    share = (gamma + (1 - gamma) * 0.25)[:, None]
    expected = share * y + (1 - share) * y[PERM]
    for rows in (y, y.bool(), y.float()):
        mixed = mixer.apply(Seen(3), images(6), rows, cut_draw(1.0, 0.25, 0.9))
        torch.testing.assert_close(mixed.targets, expected)


def test_auto_gamma_takes_small_integers_as_class_numbers(weights: str) -> None:
    mixer, y = StyleCutMix(weights, gamma="auto"), labels(6) % 3
    draw = cut_draw(0.5, 0.25, 0.9)
    ours, small = (mixer.apply(Seen(3), images(6), t, draw) for t in (y, y.to(torch.uint8)))
    assert torch.equal(ours.targets, small.targets)


@pytest.mark.unchecked_shapes
def test_auto_gamma_without_its_distances_is_named(weights: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    save_adain(small_adain(2, torch.Generator().manual_seed(0)), bare)
    draw = cut_draw(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="hold no class distances, which gamma='auto' needs"):
        StyleCutMix(str(bare), gamma="auto").apply(TinyNet(), images(6), labels(6), draw)
    mixer = StyleCutMix(weights, gamma="auto")
    for y in (labels(6), torch.eye(5)[labels(6)]):
        with pytest.raises(
            ValueError, match="labels have 5 classes but the weights have distances of 3"
        ):
            mixer.apply(TinyNet(), images(6), y, draw)


# ---- both ----------------------------------------------------------------------------------------

MIXERS = [StyleMix, StyleCutMix]


def mixing_draw(mixer: StyleMixer, seed: int = 0) -> Draw:
    return draw_case(mixer, next(iter(mixer.cases)), 6, seed)


@pytest.mark.parametrize("kind", MIXERS)
def test_normalized_images_are_mixed_as_their_pixels(kind: type[StyleMixer], weights: str) -> None:
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    m, s = (torch.tensor(v).view(3, 1, 1) for v in (mean, std))
    plain, scaled, x = Seen(), Seen(), images(6)
    draw = mixing_draw(kind(weights))
    kind(weights).apply(plain, x, labels(6), draw)
    kind(weights, mean=mean, std=std).apply(scaled, (x - m) / s, labels(6), draw)
    torch.testing.assert_close(scaled.image * s + m, plain.image, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MIXERS)
def test_input_size_is_the_size_the_style_network_sees(
    kind: type[StyleMixer], weights: str
) -> None:
    native, same, larger, x = Seen(), Seen(), Seen(), images(6)
    draw = mixing_draw(kind(weights))
    for size, net in ((None, native), (SIZE, same), (2 * SIZE, larger)):
        kind(weights, input_size=size).apply(net, x, labels(6), draw)
        assert net.image.shape == x.shape
    assert torch.equal(native.image, same.image)
    assert not torch.allclose(native.image, larger.image, atol=1e-3)


@pytest.mark.parametrize("kind", MIXERS)
def test_the_style_network_gets_no_gradient(kind: type[StyleMixer], weights: str) -> None:
    net = TinyNet()
    kind(weights).apply(net, images(6), labels(6), mixing_draw(kind(weights))).loss().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert all(p.grad is None for p in load_adain(weights).parameters())


@pytest.mark.parametrize("kind", MIXERS)
def test_settings_and_weights_can_be_written_down(kind: type[StyleMixer], weights: str) -> None:
    mixer = kind(weights, sha256=find_weights(weights).sha256)
    fields = json.loads(json.dumps(dataclasses.asdict(mixer)))
    assert kind(**fields) == mixer
    what = json.loads(json.dumps(mixer.describe()))
    assert what["kind"] == "small"
    assert what["path"] == weights
    assert what["sha256"] == mixer.sha256


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("kind", MIXERS)
def test_a_path_will_do_for_weights(kind: type[StyleMixer], weights: str) -> None:
    by_path = kind(Path(weights))
    assert by_path == kind(weights)
    assert json.loads(json.dumps(by_path.describe())) == kind(weights).describe()


@pytest.mark.parametrize("kind", MIXERS)
def test_without_weights_the_first_call_fails_whatever_its_case(
    kind: type[StyleMixer], weights: str
) -> None:
    """And not when the first mixed step is drawn. Recipes may name such a mixer, so it is made."""
    message = "style mixing needs the weights of an AdaIN network"
    with pytest.raises(ValueError, match=message):
        kind().draw(6, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=message):
        kind()(TinyNet(), images(6), labels(6))
    for draw in (mixing_draw(kind(weights)), draw_case(kind(weights), "clean", 6)):
        with pytest.raises(ValueError, match=message):
            kind().apply(TinyNet(), images(6), labels(6), draw)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_clean_step_is_clean(kind: type[StyleMixer], weights: str) -> None:
    net, x, mixer = Seen(), images(6), kind(weights)
    mixed = mixer.apply(net, x, labels(6), draw_case(mixer, "clean", 6))
    assert torch.equal(net.image, x)
    assert torch.equal(mixed.targets, torch.eye(NUM_CLASSES)[labels(6)])


@pytest.mark.gpu
@pytest.mark.parametrize("gamma", ["beta", "auto"])
def test_a_captured_step_mixes_as_a_plain_one(weights: str, gamma: str) -> None:
    mixers = [StyleMix(weights, prob=1.0), StyleCutMix(weights, prob=1.0, gamma=gamma)]
    x, y, net = images(6).to("cuda"), (labels(6) % 3).to("cuda"), TinyNet().to("cuda")
    for mixer in mixers:
        rng = torch.Generator().manual_seed(0)
        static, side = mixer.draw(6, rng).to("cuda"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            mixer.apply(net, x, y, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = mixer.apply(net, x, y, static)
        for _ in range(3):
            draw = mixer.draw(6, rng)
            for name, buffer in static.tensors().items():
                buffer.copy_(getattr(draw, name))
            graph.replay()
            plain = mixer.apply(net, x, y, draw)
            torch.testing.assert_close(captured.targets, plain.targets)
            torch.testing.assert_close(captured.logits, plain.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StyleMix(prob=2.0), r"prob must lie in \[0, 1\], got 2.0"),
        (lambda: StyleMix(alpha=0.0), "alpha must be positive and finite, got 0.0"),
        (lambda: StyleMix(content_weight=1.5), r"content_weight must lie in \[0, 1\], got 1.5"),
        (lambda: StyleMix(input_size=8), "input_size must be an integer >= 16, got 8"),
        (lambda: StyleMix(input_size=224.0), "input_size must be an integer >= 16, got 224.0"),
        (lambda: StyleMix(std=(1.0, 1.0, 1.0)), "both mean and std or neither"),
        (lambda: StyleMix(sha256="00"), "sha256 '00' given without weights"),
        (lambda: StyleCutMix(gamma="none"), "gamma must be 'beta' or 'auto', got 'none'"),
        (lambda: StyleCutMix(gamma_alpha=-1.0), "alpha must be positive and finite, got -1.0"),
        (lambda: StyleCutMix(delta=0.0), "delta must be positive, got 0.0"),
        (lambda: StyleCutMix(loss="mse"), "loss must be .*, got 'mse'"),
    ],
)
def test_bad_settings_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("kind", MIXERS)
def test_what_cannot_be_stylised_is_named(kind: type[StyleMixer], weights: str) -> None:
    mixer = kind(weights)
    draw = mixing_draw(mixer)
    with pytest.raises(ValueError, match=r"RGB images \[b, 3, h, w\], got \[6, 1, 16, 16\]"):
        mixer.apply(TinyNet(), images(6)[:, :1], labels(6), draw)
    with pytest.raises(ValueError, match=r"needs pixels in \[0, 1\], got values from"):
        mixer.apply(TinyNet(), images(6) * 3 - 1, labels(6), draw)
    with pytest.raises(ValueError, match="expected 0000"):
        kind(weights, sha256="0" * 64).apply(TinyNet(), images(6), labels(6), draw)
    bare = Draw(draw.case, draw.perm, draw.lam)
    with pytest.raises(
        ValueError, match=r"needs a Style.*Draw, got a Draw: use the mixer's own draw"
    ):
        mixer.apply(TinyNet(), images(6), labels(6), bare)


# ---- learning ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Good enough for shapes to be told apart in what it decodes: 19.7 dB."""
    path = tmp_path_factory.mktemp("style") / "fitted.safetensors"
    images = small_shapes("train", 1000).images
    save_adain(train_small_adain(images, steps=800, width=16, batch_size=16), path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_it_learns_shapes(kind: type[StyleMixer], fitted: str) -> None:
    check_it_teaches(kind(fitted, prob=1.0, alpha=0.2), epochs=10)
