"""Rows of the ablation tables: each mixes what its name says, on the network its name says."""

import dataclasses
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from alignmixup import models
from alignmixup.contracts import RecipeKey, Result
from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.ops.align import align_mix
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.schema import on_data
from alignmixup.report.paper import cell_beside
from alignmixup.report.tables import table
from cases import draw_case, with_lam

# The paper's table, typed once more: layers, accuracy unaligned, accuracy aligned.
TABLE = {
    "alignmixup-x": ("x", None, None),
    "alignmixup-xe": ("x e", 80.81, None),
    "alignmixup-A": ("A", 79.07, 80.28),
    "alignmixup-e": ("e", 78.71, None),
    "alignmixup-xA": ("x A", 80.34, 81.71),
    "alignmixup-xAE": ("x A E", 80.46, 81.36),
    "alignmixup-xAe": ("x A e", 80.33, 81.92),
    "alignmixup-ae-x": ("x", None, None),
    "alignmixup-ae-xe": ("x e", 81.92, None),
    "alignmixup-ae-A": ("A", 79.39, 81.04),
    "alignmixup-ae-e": ("e", 79.49, None),
    "alignmixup-ae-xA": ("x A", 81.78, 81.85),
    "alignmixup-ae-xE": ("x E", 80.80, 81.54),
    "alignmixup-ae-xAe": ("x A e", 81.61, 82.18),
    "alignmixup-ae-xA2e": ("x A e", 81.47, 81.20),
    "alignmixup-ae-xA4e": ("x A e", 81.61, 82.18),
    "alignmixup-ae-xA8e": ("x A e", 80.49, 82.20),
    "alignmixup-vae-x": ("x", None, None),
    "alignmixup-vae-xmusigma": ("x e", 81.81, None),
    "alignmixup-vae-xA": ("x A", 81.35, 81.85),
    "alignmixup-vae-xMSigma": ("x E", 80.45, 81.10),
    "alignmixup-vae-xAmusigma": ("x A e", 81.00, 81.89),
}
CASES = {"x": {"input"}, "A": {"feat", "feat'"}, "e": {"embed"}, "E": {"embed", "embed'"}}
ITERATIONS = {
    0: 80.98,
    10: 80.96,
    20: 81.31,
    50: 81.42,
    100: 81.71,
    200: 81.50,
    500: 81.34,
    1000: 81.28,
}


def has_tensor(layers):
    return bool({"A", "E"} & set(layers.split()))


# (name without its prefix, key of TABLE, whether it is aligned)
ROWS = [
    *((key, key, True) for key, (layers, _, _) in TABLE.items() if has_tensor(layers)),
    *(
        (f"{key}-unaligned" if has_tensor(layers) else key, key, False)
        for key, (layers, _, _) in TABLE.items()
    ),
]
every_row = pytest.mark.parametrize(("name", "key", "aligned"), ROWS, ids=[r[0] for r in ROWS])
# Every third row; the others run with the slow tests.
some_rows = pytest.mark.parametrize(
    ("name", "key", "aligned"),
    [
        pytest.param(*row, id=row[0], marks=[pytest.mark.slow] * (i % 3 > 0))
        for i, row in enumerate(ROWS)
    ],
)


def recipe_of(name):
    return find_recipe(f"cifar100-r18-{name}")


@cache
def network(spec):
    return models.build(spec, 100, (0.5,) * 3, (0.25,) * 3, 32, seed=3).eval()


def test_the_tables_are_all_there_is():
    layers = {key.rpartition("-")[2] for key in TABLE}
    once = {name for name, _, _ in ROWS} | {f"alignmixup-iterations{n}" for n in ITERATIONS}
    expected = {f"cifar100-r18-{name}{fast}" for name in once for fast in ("", "-fast")}
    labels = layers | {f"iterations{n}" for n in ITERATIONS}
    found = {name for name in recipe_names() if labels & set(find_recipe(name).key.labels)}
    assert found == expected


@every_row
def test_the_figure_is_that_of_the_row(name, key, aligned):
    accuracy = TABLE[key][2 if aligned else 1]
    for twin in (name, f"{name}-fast"):
        cell = cell_beside(recipe_of(twin).key)
        if accuracy is None:
            assert cell is None
        else:
            assert (cell.table, cell.metric, cell.value) == ("ablation", "top1", accuracy)
            assert cell.top1_error == pytest.approx(100 - accuracy, abs=1e-9)


@every_row
def test_cases_are_those_of_the_layers(name, key, aligned):
    cases = set().union(*(CASES[layer] for layer in TABLE[key][0].split()))
    if key.startswith(("alignmixup-ae", "alignmixup-vae")):
        cases.add("clean")
    mixer = recipe_of(name).mixer
    assert dict(mixer.cases) == pytest.approx(dict.fromkeys(cases, 1 / len(cases)))
    assert (mixer.alpha, mixer.eps, mixer.num_iters) == (2.0, 0.1, 100)
    assert mixer.aligned == aligned


@some_rows
def test_mixing_is_that_of_the_row_worked_out_by_hand(name, key, aligned):
    """Where it happens, whether it is aligned, at which resolution: the logits say it all."""
    recipe = recipe_of(name).shrunk()
    net, mixer = network(recipe.net), recipe.mixer
    x = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(5)
    for case in set(mixer.cases) - {"clean"}:
        draw = with_lam(draw_case(mixer, case, 5), 0.3)
        with torch.no_grad():
            logits = mixer.apply(net, x, y, draw).logits
            expected = by_hand(net, key, aligned, draw, x)
            other = by_hand(net, key, not aligned, draw, x)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        is_tensor = case.startswith("feat") or (case.startswith("embed") and "E" in TABLE[key][0])
        is_pooled = not isinstance(net, AutoencodingClassifier)  # alignment is lost on it
        if is_tensor and not is_pooled:
            assert (logits - other).norm() > 1e-3 * logits.norm()


def by_hand(net, key, aligned, draw, x):
    """Logits of one case, from the parts of the network and the key of the row."""

    def mix(features):
        if aligned and features.ndim == 4:
            keep = "partner" if draw.case.endswith("'") else "anchor"
            return align_mix(features, draw.perm, draw.lam, keep=keep)
        return draw.lam * features + (1 - draw.lam) * features[draw.perm]

    if draw.case == "input":
        x = draw.lam * x + (1 - draw.lam) * x[draw.perm]
    is_plain = not isinstance(net, AutoencodingClassifier)
    parts = dict(net.named_children()) if is_plain else dict(net.encoder.named_children())
    A = net.normalize(x)
    for part in ("stem", "layer1", "layer2", "layer3", "layer4"):
        A = parts[part](A)
    if "A2" in key:  # in every case: A itself is 2 x 2
        A = F.avg_pool2d(A, 2)
    if draw.case.startswith("feat"):
        A = mix(A)
    if is_plain:
        return net.head(A)
    e = net.embed(A)
    if draw.case.startswith("embed"):
        e = mix(e)
    if key.startswith("alignmixup-vae"):
        mu, sigma = e.chunk(2, dim=1)
        e = mu + sigma * draw.noise.view(mu.shape)
    return net.classifier(e.flatten(1))


@some_rows
def test_networks_are_those_of_the_row(name, key, aligned):
    """At full width: 512 x 4 x 4 (2 x 2 or 8 x 8 where stated), e of 512, E of 128 x 2 x 2."""
    spec = recipe_of(name).net
    with torch.device("meta"):
        net = network(spec)
    kind, layers = recipe_of(name).key.method, TABLE[key][0]
    if kind == "alignmixup" and not {"e", "E"} & set(layers.split()):
        assert spec == find_recipe("cifar100-r18-alignmixup").net
        return
    side = 8 if "A8" in key else 2 if "A2" in key else 4
    with torch.no_grad():
        assert net.encoder(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 512, side, side)
    assert net.code_shape == ((128, 2, 2) if "E" in layers.split() else (512,))
    assert (net.decoder is None) == (kind == "alignmixup")
    assert net.variational == (kind == "alignmixup-vae")
    if kind == "alignmixup-vae":
        assert recipe_of(name).mixer.embedding_dim == net.code_dim


@pytest.mark.parametrize("num_iters", ITERATIONS)
def test_iterations_are_those_of_the_row(num_iters):
    recipe = recipe_of(f"alignmixup-iterations{num_iters}")
    headline = find_recipe("cifar100-r18-alignmixup")
    assert dataclasses.replace(recipe.mixer, num_iters=100) == headline.mixer
    assert recipe.mixer.num_iters == num_iters
    assert (recipe.net, recipe.train) == (headline.net, headline.train)
    cell = cell_beside(recipe.key)
    assert cell.top1_error == pytest.approx(100 - ITERATIONS[num_iters], abs=1e-9)


def test_headline_rows_are_those_of_the_classification_table():
    for ours, theirs in (
        ("alignmixup-xA", "alignmixup"),
        ("alignmixup-xA-unaligned", "alignmixup-unaligned"),
        ("alignmixup-ae-xAe", "alignmixup-ae"),
        ("alignmixup-ae-xA4e-unaligned-fast", "alignmixup-ae-unaligned-fast"),
    ):
        there = find_recipe(f"cifar100-r18-{theirs}")
        assert dataclasses.replace(recipe_of(ours), key=there.key) == there


def test_a_row_on_other_data_has_them_in_its_key_and_no_published_figure():
    own = recipe_of("alignmixup-ae-xAe-fast")
    recipe = on_data(own, "shapes")
    assert recipe.key == RecipeKey("shapes", "r18", "alignmixup-ae", "xAe-fast")
    assert (recipe.name, recipe.data.name) == ("shapes-r18-alignmixup-ae-xAe-fast", "shapes")
    assert recipe.base == own.key
    assert cell_beside(own.key) is not None
    assert cell_beside(recipe.key) is None
    result = Result("accuracy", "top1_median10", 60.0, key=recipe.key, seed=0)
    shown = table([result], "accuracy")
    assert "shapes" in shown.title
    assert shown.rows == (("AlignMixup/AE ({x, A, e}, fast)", "40.00"),)
    again = on_data(on_data(recipe, "folder:my/images@64"), "tiny")
    assert again.name == "tiny-r18-alignmixup-ae-xAe-fast"
    assert again.base == own.key
    assert on_data(again, "cifar100") == own


def test_a_fast_twin_differs_in_its_schedule_alone():
    paper, fast = recipe_of("alignmixup-vae-xMSigma"), recipe_of("alignmixup-vae-xMSigma-fast")
    assert dataclasses.replace(fast, key=paper.key, train=paper.train) == paper
    assert (paper.train.epochs, fast.train.epochs) == (2000, 300)
    assert fast.train == find_recipe("cifar100-r18-alignmixup-ae-fast").train
