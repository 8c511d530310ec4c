"""FGSM and PGD: the laws of the ball, agreement with foolbox, and how errors may move."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from alignmixup.evaluation import Pixels
from alignmixup.evaluation.forward import Forward
from alignmixup.evaluation.tasks.attack import (
    LOSSES,
    Attack,
    fgsm,
    pgd,
    run_attack,
    strong_attack,
    trajectory,
)


def make_problem(n):
    """Blobs around three random images: learnable, yet with images near the borders."""
    rng = torch.Generator().manual_seed(0)
    centers = 0.35 + 0.3 * torch.rand(3, 3, 4, 4, generator=rng, dtype=torch.float64)
    y = torch.arange(n) % 3
    x = centers[y] + 0.15 * torch.randn(n, 3, 4, 4, generator=rng, dtype=torch.float64)
    return x.clamp(0, 1), y


@pytest.fixture(scope="module")
def trained():
    """A small network trained for a moment, in float64 so that oracles agree to the last step."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(48, 32),
            nn.BatchNorm1d(32),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(32, 3),
        )
        model = model.double()
        images, labels = make_problem(480)
        x, y, *unseen = images[:240], labels[:240], images[240:], labels[240:]
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval(), *unseen


def as_batches(x, y, batch_size=50):
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def end_of(model, x, y, attack, start=None):
    *_, last = trajectory(model, x, y, attack, x if start is None else start)
    return last


def error(results):
    return {r.metric: r.value for r in results}["top1_error"]


ATTACKS = [
    Attack(eps=8 / 255, step=8 / 255, num_steps=1),
    Attack(eps=0.1, step=0.07, num_steps=5),
    Attack(eps=0.1, step=0.3, num_steps=4, loss="margin"),
    Attack(eps=0.0, step=0.1, num_steps=2),
    Attack(eps=1.0, step=0.5, num_steps=3),
]


# Laws


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_point_stays_in_the_ball_and_among_the_images(trained, attack, dtype):
    model, x, y = trained
    model, x = (nn.Sequential(*model).to(dtype), x.to(dtype))
    start = x + attack.eps * (2 * torch.rand_like(x) - 1)
    points = list(trajectory(model, x, y, attack, start))
    model.double()
    assert len(points) == attack.num_steps + 1
    for images, _ in points:
        assert (images - x).abs().max() <= attack.eps + 1e-6
        assert images.min() >= 0
        assert images.max() <= 1


def test_a_point_comes_with_its_own_logits(trained):
    model, x, y = trained
    for images, logits in trajectory(model, x, y, ATTACKS[1], x):
        torch.testing.assert_close(logits, model(images).detach())
        assert not images.requires_grad


def test_error_does_not_fall_as_eps_grows(trained):
    model, x, y = trained
    # A larger step along the same direction may overshoot on single images of a curved model:
    # one image in a hundred is allowed for.
    for attack in (fgsm, lambda *a: pgd(*a, step=0.02, random_start=False)):
        errors = [
            error(attack(model, as_batches(x, y), eps)) for eps in (0.0, 0.02, 0.05, 0.1, 0.2)
        ]
        assert all(b >= a - 1 for a, b in itertools.pairwise(errors)), errors
        assert errors[-1] > errors[0] + 30


def test_error_does_not_fall_as_steps_grow(trained):
    model, x, y = trained
    (result, _) = pgd(model, as_batches(x, y), 0.06, 0.01, num_steps=12)
    errors = result.settings["errors_by_step"]
    # The same allowance: an image on the border may step back over it.
    assert all(b >= a - 1 for a, b in itertools.pairwise(errors)), errors
    assert errors[-1] > errors[0] + 5


def test_pgd_loss_is_at_least_the_fgsm_loss(trained):
    model, x, y = trained
    for eps in (0.02, 0.05, 0.1):
        one = end_of(model, x, y, Attack(eps, eps, 1))[1]
        many = end_of(model, x, y, Attack(eps, eps / 4, 20))[1]
        losses = [F.cross_entropy(z, y, reduction="none") for z in (one, many)]
        assert losses[1].mean() >= losses[0].mean()
        # Image by image a local climb may end lower; rarely, and by little.
        assert (losses[1] >= losses[0] - 1e-3).double().mean() > 0.97


def test_on_a_linear_model_of_two_classes_the_attack_is_the_worst_case():
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(2, 27, generator=rng, dtype=torch.float64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(27, 2).double())
    model[1].weight.data, model[1].bias.data = w, torch.zeros(2, dtype=torch.float64)
    # Away from 0 and 1, so that the worst case is x - eps sign(w_y - w_other).
    x = 0.3 + 0.4 * torch.rand(300, 3, 3, 3, generator=rng, dtype=torch.float64)
    y = model(x).argmax(dim=1)
    difference = (w[0] - w[1]).abs().sum()
    margin = (model(x)[:, 0] - model(x)[:, 1]).abs().detach()
    # Between two images: one at the very edge would be a matter of rounding.
    eps = float(margin.sort().values[149:151].mean() / difference)
    expected = 100 * float((margin < eps * difference).double().mean())
    for results in (
        fgsm(model, as_batches(x, y), eps),
        pgd(model, as_batches(x, y), eps, eps / 2, 5),
        strong_attack(model, as_batches(x, y), eps, num_steps=9, restarts=2),
    ):
        assert error(results) == pytest.approx(expected)
        assert results[1].metric == "clean_error"
        assert results[1].value == 0


def test_no_gradient_no_step():
    class Flat(nn.Module):
        def forward(self, x):
            return torch.stack([0 * x[:, 0, 0, 0] + 1, x[:, 1].sum(dim=(1, 2)) ** 2 * 0], dim=1)

    x = torch.rand(3, 3, 2, 2)
    points = list(trajectory(Flat(), x, torch.zeros(3).long(), ATTACKS[1], x))
    assert all(torch.equal(images, x) for images, _ in points)


def test_restarts_only_add_broken_images_and_keep_any_never_loses_one(trained):
    model, x, y = trained
    data = as_batches(x, y)
    errors = [error(pgd(model, data, 0.03, 0.01, 3, restarts=r)) for r in (1, 2, 4)]
    assert errors == sorted(errors)
    paths = Attack(0.05, 0.04, 6, True, 2, "margin", "any")
    (result, clean) = run_attack("any", Forward(model), data, paths, seed=1)
    by_step = result.settings["errors_by_step"]
    assert by_step == sorted(by_step)
    assert by_step[0] >= clean.value


@pytest.mark.parametrize("chunk", [7, 256])
def test_what_one_start_breaks_is_not_attacked_again_and_the_error_is_that_of_all_starts(
    trained, chunk
):
    model, x, y = trained
    data = as_batches(x, y)
    seen = []
    handle = model.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    attack = Attack(0.05, 0.04, 3, True, 4, "margin", "any")
    result, _ = run_attack("any", Forward(model), data, attack, seed=1, chunk=chunk)
    handle.remove()
    # Each start by itself, from the same random points.
    seeds = torch.randint(2**62, (4,), generator=torch.Generator().manual_seed(1))
    broken = model(x).argmax(1) != y
    for seed in seeds:
        rng = torch.Generator().manual_seed(int(seed))
        start = x + 0.05 * (2 * torch.rand(x.shape, generator=rng) - 1)
        for _, logits in trajectory(model, x, y, attack, start):
            broken |= logits.argmax(1) != y
    assert result.value == pytest.approx(100 * broken.double().mean().item())
    assert 0 < broken.sum() < len(x)
    assert sum(seen) < len(x) * (1 + 4 * 4)


@pytest.mark.slow
def test_the_strong_attack_is_no_weaker_than_pgd_and_breaks_saturated_models(trained):
    model, x, y = trained
    data = as_batches(x, y)
    # One image of 240 may fall to the one and not to the other: up to 0.8 points seen.
    assert error(strong_attack(model, data, 0.04)) >= error(pgd(model, data, 0.04, 0.02)) - 2

    class Saturated(nn.Module):
        """The same decisions, but float32 cross-entropy has no gradient where it is right."""

        def forward(self, x):
            return 1e4 * model(x.double()).float()

    single = [(a.float(), b) for a, b in data]
    masked = error(pgd(Saturated(), single, 0.04, 0.02, random_start=False))
    true = error(pgd(model, data, 0.04, 0.02, random_start=False))
    assert masked < true - 5
    assert error(strong_attack(Saturated(), single, 0.04)) >= true - 1


def test_an_image_that_is_wrong_without_an_attack_is_broken_under_any():
    class WrongAtFirst(nn.Module):
        """Wrong about the images themselves, right about all that an attack makes of them."""

        calls = 0

        def forward(self, x):
            self.calls += 1
            right = torch.tensor([1.0, 0.0]) if self.calls > 1 else torch.tensor([0.0, 1.0])
            return right + 0 * x.sum(dim=(1, 2, 3), keepdim=True).flatten(1)

    data = [(torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.long))]
    for keep, expected in (("any", 100), ("last", 0)):
        attack = Attack(0.1, 0.05, 3, True, 2, "margin", keep)
        result, clean = run_attack("made", Forward(WrongAtFirst()), data, attack)
        assert (result.value, clean.value) == (expected, 100)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_images_are_attacked_within_the_ball(dtype):
    seen = []
    linear = nn.Linear(27, 4).to(dtype)

    class Half(nn.Module):
        def forward(self, x):
            seen.append(x.detach())
            return linear(x.flatten(1).to(dtype))

    x = torch.rand(30, 3, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    pgd(Half(), [(x, torch.arange(30) % 4)], eps=4 / 255, step=2 / 255, num_steps=5)
    gaps = [float((points.double() - x.double()).abs().max()) for points in seen]
    assert 4 / 255 - 1e-6 <= max(gaps) <= 4 / 255 + 1e-6


# Agreements


def foolbox_adversarials(model, x, y, name, eps, **settings):
    import foolbox

    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    attack = getattr(foolbox.attacks, name)(**settings)
    return attack.run(wrapped, x, y, epsilon=eps)


# foolbox imports a name of scipy's that scipy has moved; nothing of ours is concerned.
foolbox_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@foolbox_warns
@pytest.mark.parametrize("eps", [2 / 255, 8 / 255, 0.2])
def test_fgsm_equals_foolbox(trained, eps):
    model, x, y = trained
    theirs = foolbox_adversarials(model, x, y, "LinfFastGradientAttack", eps)
    ours = end_of(model, x, y, Attack(eps, eps, 1))
    torch.testing.assert_close(ours[0], theirs, atol=1e-12, rtol=0)
    expected = 100 * float((model(theirs).argmax(dim=1) != y).double().mean())
    assert error(fgsm(model, as_batches(x, y), eps)) == pytest.approx(expected)


@foolbox_warns
@pytest.mark.parametrize(("eps", "step", "num_steps"), [(4 / 255, 2 / 255, 20), (0.1, 0.03, 7)])
def test_pgd_equals_foolbox(trained, eps, step, num_steps):
    model, x, y = trained
    theirs = foolbox_adversarials(
        model, x, y, "LinfPGD", eps, abs_stepsize=step, steps=num_steps, random_start=False
    )
    ours = end_of(model, x, y, Attack(eps, step, num_steps))
    torch.testing.assert_close(ours[0], theirs, atol=1e-12, rtol=0)
    expected = 100 * float((model(theirs).argmax(dim=1) != y).double().mean())
    results = pgd(model, as_batches(x, y), eps, step, num_steps, random_start=False)
    assert error(results) == pytest.approx(expected)


@foolbox_warns
def test_a_normalizing_loader_is_attacked_in_pixel_space(trained):
    model, x, y = trained
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)

    class Undo(nn.Module):
        """A model that takes normalized images."""

        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(Pixels(mean, std).restore(x))

    data = [(Pixels(mean, std).normalize(a), b) for a, b in as_batches(x, y)]
    theirs = foolbox_adversarials(model, x, y, "LinfFastGradientAttack", 0.05)
    expected = 100 * float((model(theirs).argmax(dim=1) != y).double().mean())
    assert error(fgsm(Undo(), data, 0.05, normalized_by=(mean, std))) == pytest.approx(expected)


def test_margin_loss_by_hand():
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, -1.0]])
    assert LOSSES["margin"](logits, torch.tensor([0, 2])) == (2 - 3) + (5 - -1)


@pytest.mark.parametrize("batch_size", [7, 240])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_figures_depend_on_the_seed_and_not_on_chunk_or_batch_size(trained, batch_size, chunk):
    model, x, y = trained
    settings = {"eps": 0.05, "step": 0.02, "num_steps": 3, "restarts": 2}
    expected = pgd(model, as_batches(x, y), seed=3, **settings)
    again = pgd(model, as_batches(x, y, batch_size), seed=3, chunk=chunk, **settings)
    assert [r.value for r in again] == [r.value for r in expected]
    assert again[0].settings["errors_by_step"] == expected[0].settings["errors_by_step"]
    assert expected[0].settings["num_images"] == len(x)


def test_another_seed_is_another_start(trained):
    model, x, y = trained
    paths = [
        pgd(model, as_batches(x, y), 0.08, 0.002, 6, seed=s)[0].settings["errors_by_step"]
        for s in range(4)
    ]
    assert len({tuple(path) for path in paths}) > 1


def test_attacks_work_where_the_caller_switched_gradients_off(trained):
    model, x, y = trained
    expected = error(fgsm(model, as_batches(x, y), 0.05))
    with torch.no_grad():
        assert error(fgsm(model, as_batches(x, y), 0.05)) == expected


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": 8.0}, "8/255 is usual"),
        ({"eps": -0.1}, "got -0.1"),
        ({"step": 0.0}, "step must"),
        ({"num_steps": 0}, "at least 1"),
        ({"restarts": 0}, "at least 1"),
        ({"restarts": 3, "random_start": False}, "same path"),
        ({"loss": "bce"}, "loss must be 'ce' or 'margin', got 'bce'"),
        ({"chunk": 0}, "chunk must"),
    ],
)
def test_bad_settings_are_explained(trained, settings, message):
    model, x, y = trained
    with pytest.raises(ValueError, match=message):
        pgd(model, as_batches(x, y), **settings)


def test_a_model_without_gradient_is_explained(trained):
    model, x, y = trained

    class Detached(nn.Module):
        def forward(self, x):
            return model(x).detach()

    with pytest.raises(ValueError, match="no gradient"):
        fgsm(Detached(), as_batches(x, y))


def test_progress_counts_images_by_their_share_of_the_steps(trained):
    model, x, y = trained
    told = []
    attack = Attack(0.05, 0.02, num_steps=4, random_start=True, restarts=2)
    options = {"seed": 1, "chunk": 16}
    batches = as_batches(x[:40], y[:40], batch_size=20)
    watched = run_attack("pgd", Forward(model), batches, attack, on_images=told.append, **options)
    # Chunks of 16, 4, 16 and 4 images, eight steps each.
    first = [2, 4, 6, 8, 10, 12, 14, 16, 16, 17, 17, 18, 18, 19, 19, 20]
    assert told == first + [20 + n for n in first]
    assert watched == run_attack("pgd", Forward(model), batches, attack, **options)
