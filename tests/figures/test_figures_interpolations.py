"""Decoded interpolations and the teaser: their ends are the decoded images."""

import json

import numpy as np
import pytest
import torch

from alignmixup.cli import main
from alignmixup.contracts import RecipeKey
from alignmixup.datasets import shapes
from alignmixup.experiments import built_in
from alignmixup.experiments.built_in import BuiltIn, DecodedSource, decoded_source, small_recipe
from alignmixup.experiments.painters import LayerDecoder
from alignmixup.experiments.run import train
from alignmixup.figures import interpolations, pose, teaser
from alignmixup.figures.interpolations import Interpolation, draw_interpolations, interpolation
from alignmixup.figures.teaser import teaser_pictures
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec
from alignmixup.ops.align import align_mix
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings

RNG = np.random.default_rng(0)
SHARES = (0.0, 0.5, 1.0)
TINY = BuiltIn(
    width=4,
    epochs=1,
    decoder_epochs=1,
    num_train=64,
    num_test=40,
    head_epochs=1,
    head_images=64,
)


@pytest.fixture(scope="module")
def images():
    return shapes("test", 40)


@pytest.fixture(scope="module")
def painter(images):
    net = build(NetSpec("preact_resnet18", width=4), 10, images.mean, images.std, 32, seed=0)
    with torch.random.fork_rng():  # whatever ran before, the same first weights
        torch.manual_seed(0)
        decoder = LayerDecoder(net, "layer3", 32, channels=16).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():  # untrained, but not blank
        decoder.decoder.to_image.weight.normal_(0, 5, generator=rng)
    return decoder


@torch.no_grad()
def decoded(painter, features):
    return painter.paint(features).permute(0, 2, 3, 1).numpy()


def test_interpolations_begin_and_end_with_the_decoded_images(painter, images):
    x = images.images[[0, 1]] / 255
    grid = interpolation(painter, x, (0.0, 0.4, 1.0))
    first, second = decoded(painter, painter.features(x))
    assert np.abs(first - second).max() > 0.02
    for mixes in (grid.keep_first["unaligned"], grid.keep_second["unaligned"]):
        np.testing.assert_allclose(mixes[0], second, atol=1e-5)
        np.testing.assert_allclose(mixes[2], first, atol=1e-5)
    np.testing.assert_allclose(grid.keep_first["aligned"][2], first, atol=1e-5)
    np.testing.assert_allclose(grid.keep_second["aligned"][0], second, atol=1e-5)
    A, swap = painter.features(x), torch.tensor([1, 0])
    carried = align_mix(A, swap, torch.tensor(0.0))[:1]
    np.testing.assert_allclose(grid.keep_first["aligned"][:1], decoded(painter, carried), atol=1e-5)
    carried = align_mix(A, swap, torch.tensor(1.0), keep="partner")[:1]
    shown = grid.keep_second["aligned"][2:]
    np.testing.assert_allclose(shown, decoded(painter, carried), atol=1e-5)
    # Where the kept image is absent, aligned and unaligned must differ.
    assert np.abs(grid.keep_first["aligned"][0] - second).max() > 1e-3


def pair():
    def mixes():
        return {name: RNG.random((3, 4, 4, 3)) for name in ("aligned", "unaligned")}

    return Interpolation(*RNG.random((2, 4, 4, 3)), SHARES, mixes(), mixes(), ("cat", "car"))


def test_every_mix_is_in_its_row_and_column_aligned_above_unaligned():
    pairs = [pair(), pair()]
    (axes,) = draw_interpolations(pairs, "title").axes
    placed = {}
    for image in axes.images:
        left, right, _, top = image.get_extent()
        assert right - left == pytest.approx(1)
        placed[round(top, 3), round(left, 3)] = np.asarray(image.get_array())
    assert len(placed) == 2 * (2 + 2 * 3)
    tops = sorted({top for top, _ in placed})
    lefts = sorted({left for _, left in placed})
    assert (len(tops), len(lefts)) == (4, 4)
    labels = {t.get_text(): t.get_position() for t in axes.texts}
    for number, given in enumerate(pairs):
        for row, name in enumerate(("aligned", "unaligned")):
            top = tops[2 * number + row]
            np.testing.assert_array_equal(placed[top, lefts[0]], (given.first, given.second)[row])
            shown = np.stack([placed[top, left] for left in lefts[1:]])
            np.testing.assert_array_equal(shown[::-1], given.keep_first[name])
    # The label of a row stands beside it; that of a column above it.
    for text in (t for t in axes.texts if t.get_text() in ("aligned", "unaligned")):
        row = (tops.index(round(text.get_position()[1] - 0.5, 3))) % 2
        assert text.get_text() == ("aligned", "unaligned")[row]
    for left, share in zip(lefts[1:], reversed(SHARES), strict=True):
        assert labels[f"{share:g}"][0] == pytest.approx(left + 0.5, abs=1e-3)
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("unaligned") == texts.count("aligned") == texts.count("$x'$ car") == 2


def test_pictures_are_as_large_whatever_the_number_of_pairs():
    sizes = []
    for count in (1, 3):
        figure = draw_interpolations([pair() for _ in range(count)], "")
        figure.draw_without_rendering()
        (axes,) = figure.axes
        left, right = axes.transData.transform([(0, 0), (1, 0)])[:, 0] / figure.dpi
        sizes.append(right - left)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    assert min(sizes) > 0.9  # inches


def test_the_teaser_shows_what_each_method_does(painter, images):
    x, y = images.images[[0, 1]] / 255, images.labels[[0, 1]]
    pictures = teaser_pictures(painter, x, y, images.class_names)
    shown = {p.title: p for p in pictures}
    assert list(shown) == [
        *("Image 1", "Input mixup", "CutMix"),
        *("Image 2", "Manifold mixup", "AlignMixup"),
    ]
    first, second = x.permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(shown["Image 1"].image, first)
    assert shown["Image 2"].caption == images.class_names[1]
    blend = teaser.SHARE * first + (1 - teaser.SHARE) * second
    np.testing.assert_allclose(shown["Input mixup"].image, blend, atol=1e-6)
    cut = shown["CutMix"].image
    is_first = (cut == first).all(-1)
    assert (is_first | (cut == second).all(-1)).all()
    assert 0.4 < is_first.mean() < 0.8
    A, swap, lam = painter.features(x), torch.tensor([1, 0]), torch.tensor(teaser.SHARE)
    aligned = align_mix(A, swap, lam, keep="partner")[:1]
    np.testing.assert_allclose(shown["AlignMixup"].image, decoded(painter, aligned)[0], atol=1e-5)


@pytest.mark.slow
def test_the_built_in_network_is_trained_once_and_serves_every_figure(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(built_in, "BUILT_IN", TINY)
    out = tmp_path / "figures"
    assert main(["figure", "interpolations", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "training a small network on the built-in shapes, once" in said.err
    assert "of the mean image's" in said.err
    (folder,) = (out / "built-in").glob("shapes-r18-baseline-*")
    weights = folder / "decoder.safetensors"
    written = weights.read_bytes()
    assert main(["figure", "teaser", "--out", str(out)]) == 0
    assert main(["figure", "pose", "--out", str(out)]) == 0
    assert weights.read_bytes() == written
    said = capsys.readouterr().err
    assert "epoch 1/1" not in said
    assert "training a small network" not in said
    for name in ("interpolations", "teaser", "pose"):
        assert (out / f"{name}.png").stat().st_size > 5000
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    lines = [json.loads(line) for line in (out / "pose.jsonl").read_text().splitlines()]
    ways = {(r["settings"]["plan"], r["settings"].get("kept_share")) for r in lines}
    assert {(plan, share) for plan in ("aligned", "oracle") for share in (0.0, 0.2, 1.0)} <= ways
    assert {r["task"] for r in lines} == {"pose"}
    assert RecipeKey(**lines[0]["key"]).name == "shapes-r18-baseline"
    assert lines[0]["date"]


class Blank:
    """A figure that is not drawn."""

    def savefig(self, path, **settings):
        path.touch()


def test_figures_of_a_run_are_those_of_its_decoder(tmp_path, capsys, monkeypatch, images):
    folder = tmp_path / "run"
    recipe = Recipe(
        key=RecipeKey("shapes", "r18", "baseline", "run"),
        data=DataSpec("shapes", flip=False, limit=24),
        net=NetSpec("preact_resnet18", width=4),
        mixer=AlignMixup("layer3", num_iters=7),
        train=TrainSettings(epochs=1, batch_size=16, milestones=(), device="cpu"),
    )
    train(recipe, folder, quiet=True)
    assert main(["figure", "teaser", "--run", str(folder), "--out", str(tmp_path)]) == 1
    assert f"has no decoder: train one with 'alignmixup decoder {folder}'" in (
        capsys.readouterr().err
    )
    size = ["--epochs", "1", "--batch-size", "8", "--channels", "2", "--device", "cpu"]
    assert main(["decoder", str(folder), *size]) == 0
    source = decoded_source(tmp_path, folder, 0, None)
    assert (source.painter.layer, source.num_iters) == ("layer3", 7)
    assert source.what == "shapes-r18-baseline-run, 1 epoch, decoder of layer3"
    assert source.where()["key"] == recipe.key
    drawn = []
    monkeypatch.setattr(
        interpolations, "draw_interpolations", lambda pairs, title: drawn.append(pairs) or Blank()
    )
    for words, count in (([], 3), (["--pairs", "2"], 2)):
        command = ["figure", "interpolations", "--run", str(folder), "--out", str(tmp_path)]
        assert main([*command, *words]) == 0
        assert len(drawn[-1]) == count
    assert set(drawn[-1][0].names) <= set(images.class_names)


def test_pose_is_measured_on_shapes_alone(tmp_path, monkeypatch, painter, images):
    recipe = small_recipe("x", NetSpec("preact_resnet18"), NoMix(), 1, 0)
    recipe = Recipe(**{**vars(recipe), "data": DataSpec("cifar10")})
    source = DecodedSource(painter, images, "what", 0.1, 100, recipe, 1)
    monkeypatch.setattr(pose, "decoded_source", lambda *args: source)
    with pytest.raises(ValueError, match="this run's data are cifar10"):
        pose.pose(tmp_path)
