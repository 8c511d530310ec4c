"""AdaIN: statistics, the two kinds of networks, files and checksums, fitting, class distances."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.ops.adain import (
    AdaIN,
    adain,
    find_weights,
    load_adain,
    reference_adain,
    save_adain,
    small_adain,
    style_statistics,
)
from alignmixup.training import adain_fit
from alignmixup.training.adain_fit import (
    add_distances,
    class_style_distances,
    fit_adain,
    train_small_adain,
)
from learning import small_shapes


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def untrained(seed: int = 0, width: int = 4) -> AdaIN:
    return small_adain(width, generator(seed)).eval().requires_grad_(requires_grad=False)


def pictures(count: int, side: int = 16) -> Tensor:
    return torch.rand(count, 3, side, side, generator=generator(1))


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "a" / "new" / "folder" / "small.safetensors"
    save_adain(untrained(), path, {"seed": "0"})
    return str(path)


# ---- statistics ----------------------------------------------------------------------------------


def test_features_take_the_statistics_of_another_style() -> None:
    f, g = (torch.randn(3, 5, 6, 7, generator=generator(s), dtype=torch.float64) for s in (0, 1))
    styled = style_statistics(adain(f, style_statistics(3 * g + 2)))
    wanted = style_statistics(3 * g + 2)
    torch.testing.assert_close(styled.mean, wanted.mean)
    torch.testing.assert_close(styled.std, wanted.std, rtol=2e-5, atol=0)  # the 1e-5 under the root


def test_own_style_changes_nothing() -> None:
    f = torch.randn(3, 5, 6, 7, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(adain(f, style_statistics(f)), f)


def test_statistics_are_those_of_a_loop() -> None:
    f = torch.randn(2, 3, 4, 5, generator=generator())
    s = style_statistics(f)
    for b in range(2):
        for c in range(3):
            values = f[b, c].flatten().double()
            mean = values.sum() / 20
            var = (values - mean).square().sum() / 19
            assert float(s.mean[b, c]) == pytest.approx(float(mean), abs=1e-6)
            assert float(s.std[b, c]) == pytest.approx(float((var + 1e-5).sqrt()), rel=1e-5)


def test_statistics_of_half_precision_and_of_one_position() -> None:
    f = torch.randn(2, 3, 8, 8, generator=generator()) * 20 + 100
    narrow = style_statistics(f.bfloat16())
    assert narrow.mean.dtype == torch.float32
    torch.testing.assert_close(narrow.std, style_statistics(f.bfloat16().float()).std)
    assert style_statistics(f[:, :, :1, :1]).std.isfinite().all()


# ---- networks ------------------------------------------------------------------------------------


PUBLISHED = ("vgg_normalised.pth", "decoder.pth")


def reference_files(folder: Path) -> dict[str, Tensor]:
    """Random weights under the names of pytorch-AdaIN's two files, and in one dictionary."""
    shapes = {name: t.shape for name, t in reference_adain().state_dict().items()}
    tensors = {
        name: torch.randn(shape, generator=generator(i)) * (2 / (9 * shape[-3])) ** 0.5
        if len(shape) == 4
        else torch.randn(shape, generator=generator(i)) * 0.1
        for i, (name, shape) in enumerate(shapes.items())
    }
    for prefix, stem in (("encoder.", "vgg_normalised"), ("decoder.", "decoder")):
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if stem == "vgg_normalised":
            mine["32.weight"] = torch.zeros(1)  # relu4_2 and what follows: not used
        torch.save(mine, folder / f"{stem}.pth")
    return tensors


# Where pytorch-AdaIN has its convolutions, and what comes after them besides a ReLU.
ENCODER = {0: "", 2: "", 5: "pool", 9: "", 12: "pool", 16: "", 19: "", 22: "", 25: "pool", 29: ""}
DECODER = {1: "up", 5: "", 8: "", 11: "", 14: "up", 18: "", 21: "up", 25: "", 28: "end"}


def by_hand(x: Tensor, tensors: dict[str, Tensor], prefix: str, layers: dict[int, str]) -> Tensor:
    for index, then in layers.items():
        weight, bias = (tensors[f"{prefix}.{index}.{what}"] for what in ("weight", "bias"))
        if weight.shape[-1] == 3:
            x = F.pad(x, (1, 1, 1, 1), mode="reflect")
        x = F.conv2d(x, weight, bias)
        if then != "end" and weight.shape[-1] == 3:
            x = x.relu()
        if then == "pool":
            x = F.max_pool2d(x, 2, 2, ceil_mode=True)
        if then == "up":
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    return x


def test_reference_files_make_the_reference_network(tmp_path: Path) -> None:
    tensors = reference_files(tmp_path)
    net = load_adain(str(tmp_path))
    x = pictures(2, side=20)
    features = by_hand(x, tensors, "encoder", ENCODER)
    assert features.shape == (2, 512, 3, 3)  # 20, 10, 5 and, rounded up, 3
    torch.testing.assert_close(net.encode(x, input_size=20), features, atol=1e-4, rtol=1e-4)
    image = by_hand(features, tensors, "decoder", DECODER).clamp(0, 1)
    torch.testing.assert_close(net.decode(features, (24, 24)), image, atol=1e-4, rtol=1e-4)
    layers = net.to(torch.float32).encode_layers(F.interpolate(x, (64, 64)))
    assert [layer.shape[1] for layer in layers] == [64, 128, 256, 512]
    assert layers[-1].shape[2:] == (28, 28)  # images of any size are seen at 224

    found = find_weights(str(tmp_path))
    both = b"".join((tmp_path / name).read_bytes() for name in PUBLISHED)
    assert (found.kind, found.sha256) == ("reference", hashlib.sha256(both).hexdigest())

    one_file = tmp_path / "one.safetensors"
    save_adain(net, one_file)
    again = load_adain(str(one_file))
    assert find_weights(str(one_file)).kind == again.kind == "reference"
    assert torch.equal(again.encode(x, input_size=32), net.encode(x, input_size=32))


@pytest.mark.parametrize("side", [4, 15, 16, 33])
def test_small_networks_give_images_of_the_size_they_saw(side: int) -> None:
    net, x = untrained(), pictures(2, side)
    image = net.decode(net.encode(x), (side, side))
    assert image.shape == x.shape
    assert image.min() >= 0
    assert image.max() <= 1
    # An odd side is cut, not squeezed: each pixel is where the decoder has put it.
    assert torch.equal(image, net.decoder(net.encode(x))[..., :side, :side].clamp(0, 1))
    half = (side + 1) // 2
    assert [layer.shape[2] for layer in net.encode_layers(x)] == [side, half, half]
    assert torch.equal(net.encode_layers(x)[-1], net.encode(x))


def test_what_was_resized_for_the_network_is_resized_back() -> None:
    """Seen at 17 pixels, it comes back with 18: cut to 17, then brought to the images' size."""
    net, x = untrained(), pictures(2, 16)
    features = net.encode(x, input_size=17)
    seen = net.decoder(features)[..., :17, :17]
    expected = F.interpolate(seen, (16, 16), mode="bilinear", align_corners=False).clamp(0, 1)
    torch.testing.assert_close(net.decode(features, (16, 16), input_size=17), expected)
    # Seen at 16 pixels, images of 15 are squeezed to that, not cut.
    features = net.encode(x[..., :15, :15], input_size=16)
    whole = F.interpolate(net.decoder(features), (15, 15), mode="bilinear", align_corners=False)
    torch.testing.assert_close(net.decode(features, (15, 15), input_size=16), whole.clamp(0, 1))


def test_a_new_network_returns_gray_for_gray() -> None:
    """Pixels are near 0.5: filters start around there, half of them active."""
    net, gray = untrained(), torch.full((1, 3, 8, 8), 0.5)
    torch.testing.assert_close(net.encode(gray), torch.zeros(1, 8, 4, 4))
    torch.testing.assert_close(net.decode(net.encode(gray), (8, 8)), gray)
    assert 0.3 < float((net.encode_layers(pictures(50))[0] > 0).float().mean()) < 0.7


@pytest.mark.parametrize("input_size", [None, 17])
def test_images_of_half_precision_are_widened_before_anything_else(input_size: int | None) -> None:
    net, narrow = untrained(), pictures(2).bfloat16()
    found = net.encode(narrow, input_size)
    assert found.dtype == torch.float32
    assert torch.equal(found, net.encode(narrow.float(), input_size))


@pytest.mark.parametrize("size", [(1, 1), (2, 8)])
def test_images_that_are_too_small_to_mirror_are_named(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 3 x 3 pixels, got \[2, 3, .* set input_size"):
        untrained().encode(torch.rand(2, 3, *size))
    assert untrained().encode(torch.rand(2, 3, *size), input_size=16).shape[2:] == (8, 8)
    assert untrained().encode(torch.rand(2, 3, 3, 3)).isfinite().all()


def test_building_and_loading_touch_no_global_chance(weights: str) -> None:
    before = torch.get_rng_state()
    untrained()
    load_adain(weights)
    reference_adain()
    train_small_adain(pictures(4), steps=2, width=2)
    assert torch.equal(before, torch.get_rng_state())


# ---- files ---------------------------------------------------------------------------------------


def test_a_saved_network_comes_back_bit_for_bit(weights: str) -> None:
    net, x = load_adain(weights), pictures(3)
    assert torch.equal(net.encode(x), untrained().encode(x))
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert load_adain(weights) is net  # read once
    found = find_weights(weights)
    assert found.metadata == {"seed": "0"}
    assert found.sha256 == hashlib.sha256(Path(weights).read_bytes()).hexdigest()
    assert json.loads(json.dumps(dataclasses.asdict(found)))["kind"] == "small"


def test_a_file_that_changes_is_read_again(weights: str) -> None:
    first = load_adain(weights)
    save_adain(untrained(seed=1, width=5), weights)
    assert load_adain(weights) is not first
    assert torch.equal(load_adain(weights).encode(pictures(2)), untrained(1, 5).encode(pictures(2)))


def test_a_relative_path_is_one_of_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the same name, size and time in two folders are two files."""
    for seed in (0, 1):
        monkeypatch.chdir(tmp_path)
        Path(str(seed)).mkdir()
        monkeypatch.chdir(str(seed))
        save_adain(untrained(seed), "a.safetensors")
        os.utime("a.safetensors", (10**9, 10**9))
        found = load_adain("a.safetensors")
        assert torch.equal(found.encode(pictures(1)), untrained(seed).encode(pictures(1)))


def test_a_checksum_is_checked(weights: str) -> None:
    right = find_weights(weights).sha256
    load_adain(weights, sha256=right.upper())
    with pytest.raises(ValueError, match=f"has sha256 {right}, expected 0000"):
        load_adain(weights, sha256="0" * 64)


@pytest.mark.parametrize(
    "names",
    [
        ("vgg_normalised.pth", "decoder.pth"),  # pytorch-AdaIN
        ("vgg_normalised.pth", "decoder.pth.tar"),  # StyleMix
        ("vgg_normalized.pth", "decoder.pth"),
    ],
)
def test_the_published_files_are_found_by_their_names(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    reference_files(tmp_path)
    encoder, decoder = ((tmp_path / name).read_bytes() for name in PUBLISHED)
    folder = tmp_path / "models"
    folder.mkdir()
    for name, content in zip(names, (encoder, decoder), strict=True):
        (folder / name).write_bytes(content)
    found = find_weights(str(folder))
    assert (found.kind, found.sha256) == (
        "reference",
        hashlib.sha256(encoder + decoder).hexdigest(),
    )
    assert load_adain(str(folder)).kind == "reference"


def test_what_is_no_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs the weights .* `alignmixup adain` .* with vgg"):
        find_weights("")
    with pytest.raises(FileNotFoundError, match=r"no AdaIN weights at .*nowhere.safetensors"):
        load_adain(str(tmp_path / "nowhere.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"contains none of .*vgg_normalized.safetensors"):
        load_adain(str(tmp_path))
    (tmp_path / "a.pth").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a.pth is not a .safetensors file; .* pass the folder"):
        load_adain(str(tmp_path / "a.pth"))
    save_file({"a": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"b.safetensors is not an AdaIN network"):
        load_adain(str(tmp_path / "b.safetensors"))
    with pytest.raises(ValueError, match=r"name a .safetensors file to write to, got 'x.pth'"):
        save_adain(untrained(), "x.pth")


@pytest.mark.parametrize("content", [b"", b"x" * 200, b"PK\x03\x04 a broken archive"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_damaged_reference_files_are_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    for stem in ("vgg_normalized", "decoder"):
        (tmp_path / f"{stem}{suffix}").write_bytes(content)
    message = rf"vgg_normalized{suffix} is damaged, or contains more .* download it again"
    with pytest.raises(ValueError, match=message):
        load_adain(str(tmp_path))


def test_a_network_in_the_place_of_its_tensors_is_named(tmp_path: Path) -> None:
    reference_files(tmp_path)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "decoder.pth")
    with pytest.raises(ValueError, match=r"decoder\.pth is damaged, .* save the state dict only"):
        load_adain(str(tmp_path))


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    tensors = reference_files(tmp_path)
    for stem in ("vgg_normalised", "decoder"):
        kept = torch.load(tmp_path / f"{stem}.pth", weights_only=True)
        torch.save({k: v.half() for k, v in kept.items()}, tmp_path / f"{stem}.pth")
    net = load_adain(str(tmp_path))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert torch.equal(net.encoder[0].weight, tensors["encoder.0.weight"].half().float())
    assert net.decode(net.encode(pictures(1, 32), input_size=32), (32, 32)).isfinite().all()


def test_a_file_of_ours_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    what = {"alignmixup-adain": json.dumps({"kind": "small"})}
    save_file({"decoder.0.bias": torch.zeros(6)}, tmp_path / "a.safetensors", what)
    with pytest.raises(ValueError, match=r"lacks tensors of the small network: .*encoder\.0\.bias"):
        load_adain(tmp_path / "a.safetensors")


def test_weights_of_another_network_are_named(tmp_path: Path) -> None:
    reference_files(tmp_path)
    kept = torch.load(tmp_path / "decoder.pth", weights_only=True)
    torch.save({k: v for k, v in kept.items() if k != "5.bias"}, tmp_path / "decoder.pth")
    with pytest.raises(ValueError, match=r"lacks tensors of the reference .*'decoder.5.bias'"):
        load_adain(str(tmp_path))
    torch.save({**kept, "5.bias": torch.zeros(3)}, tmp_path / "decoder.pth")
    with pytest.raises(ValueError, match="does not fit the reference network"):
        load_adain(str(tmp_path))
    torch.save([1], tmp_path / "decoder.pth")
    with pytest.raises(ValueError, match="must contain a state dict, got list"):
        load_adain(str(tmp_path))


# ---- fitting -------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    image_set = small_shapes("train", 60)
    one, two, other = (
        fit_adain(image_set, tmp_path / f"{i}.safetensors", steps=4, seed=seed, width=3)
        for i, seed in enumerate((0, 0, 1))
    )
    assert one.weights.sha256 == two.weights.sha256 != other.weights.sha256
    assert (one.psnr, one.style_gap) == (two.psnr, two.style_gap)
    assert one.weights.metadata == {
        "data": "shapes/train",
        "num_images": "60",
        "steps": "4",
        "seed": "0",
        "width": "3",
    }


def test_scaling_the_encoder_leaves_images_as_they_are() -> None:
    net, x = untrained(), pictures(8)
    before = net.decode(net.encode(x), (16, 16))
    adain_fit._normalize_encoder(net, x)
    torch.testing.assert_close(net.decode(net.encode(x), (16, 16)), before, atol=1e-5, rtol=1e-5)
    for layer in net.encode_layers(x):
        assert float(layer.mean()) == pytest.approx(1, rel=1e-4)


@pytest.mark.slow
def test_a_fit_reconstructs_and_transfers_style(tmp_path: Path) -> None:
    """Against a fit of two steps. Over six seeds 2.05 to 6.1 dB more, 9 to 59 % of its style gap;
    33 to 73 % of the variance of held-out images is left, after two steps 102 to 166 %."""
    train = small_shapes("train", 500)
    begun, fit = (
        fit_adain(train, tmp_path / f"{steps}.safetensors", steps=steps, width=8)
        for steps in (2, 200)
    )
    assert fit.psnr > begun.psnr + 0.5
    assert fit.style_gap < 0.8 * begun.style_gap
    net = load_adain(fit.weights.path)
    test = small_shapes("test", 100).images / 255
    error = F.mse_loss(net.decode(net.encode(test), (16, 16)), test)
    assert error < 0.95 * test.var()


@pytest.mark.unchecked_shapes
def test_what_cannot_be_fitted_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 steps, one for each half, got 1"):
        train_small_adain(pictures(4), steps=1)
    with pytest.raises(ValueError, match=r"two or more images .* got \[1, 3, 16, 16\]"):
        train_small_adain(pictures(1), steps=2)
    with pytest.raises(ValueError, match="width must be at least 1 channel, got 0"):
        train_small_adain(pictures(4), steps=2, width=0)
    with pytest.raises(ValueError, match=r"classes \[3, 4.*\] have no image"):
        fit_adain(few_classes(), tmp_path / "a.safetensors", steps=2, width=2)


def few_classes() -> ImageSet:
    image_set = small_shapes("train", 30)
    return dataclasses.replace(image_set, labels=torch.arange(30) % 3)


# ---- distances -----------------------------------------------------------------------------------


def test_distances_are_those_of_a_loop() -> None:
    net, x = untrained(), pictures(10)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 2])
    averages = []
    for k in range(3):
        total = 0
        for image in x[labels == k]:
            parts = [style_statistics(layer) for layer in net.encode_layers(image[None])]
            total = total + torch.cat([torch.cat([p.mean, p.std], 1).flatten() for p in parts])
        averages.append(total / int((labels == k).sum()))
    distances = class_style_distances(net, x, labels, 3, batch_size=4)
    for i in range(3):
        for j in range(3):
            expected = (averages[i] - averages[j]).square().mean()
            assert float(distances[i, j]) == pytest.approx(float(expected), rel=1e-4, abs=1e-9)


def test_classes_of_another_color_are_further_apart() -> None:
    """Class 1 is class 0 in other pictures of the same kind; class 2 is much darker."""
    x, labels = pictures(60), torch.arange(60) % 3
    x[labels == 2] *= 0.3
    distances = class_style_distances(untrained(), x, labels, 3)
    assert torch.equal(distances, distances.T)
    assert distances[0, 2] > 20 * distances[0, 1] > 0


def test_distances_travel_with_the_weights(tmp_path: Path) -> None:
    image_set = small_shapes("train", 60)
    path = tmp_path / "a.safetensors"
    fit_adain(image_set, path, steps=2, width=2)
    net = load_adain(str(path))
    kept = net.class_distances
    assert kept.sum() / 90 == pytest.approx(1, rel=1e-4)  # a small network's, over their mean
    assert torch.equal(load_file(path)["class_distances"], kept)
    halves = dataclasses.replace(
        image_set, labels=torch.arange(60) % 2, class_names=("even", "odd")
    )
    found = add_distances(str(path), halves, tmp_path / "b.safetensors")
    assert load_adain(found.path).class_distances.shape == (2, 2)
    assert found.metadata["distances"] == "shapes/train"
    assert found.metadata["from_sha256"] == find_weights(str(path)).sha256
    assert load_adain(str(path)).class_distances is kept  # what others loaded is left alone
    torch.testing.assert_close(load_adain(found.path).encode(pictures(2)), net.encode(pictures(2)))
