"""What all evaluations share: modes, devices, ranges, labels; and accuracy."""

import pytest
import torch
from torch import nn

import alignmixup as am
from alignmixup.evaluation import Pixels, collect_logits, evaluating, predict
from alignmixup.evaluation.forward import Forward, autocast
from alignmixup.evaluation.outliers import Outliers
from alignmixup.evaluation.tasks.accuracy import accuracy
from alignmixup.evaluation.tasks.attack import fgsm, pgd, strong_attack
from alignmixup.evaluation.tasks.calibration import calibration, temperature_scaling
from alignmixup.evaluation.tasks.ood import ood

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def small_net(num_classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, num_classes),
    )


def batches(n=10, num_classes=3, seed=1, batch_size=4):
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, 6, 6, generator=rng)
    y = torch.randint(num_classes, (n,), generator=rng)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


class Constant(nn.Module):
    """Gives prepared logits, by the order of the images."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.seen = logits, 0

    def forward(self, x):
        first, self.seen = self.seen, self.seen + len(x)
        return self.logits[first : self.seen]


BRIGHT = Outliers("bright", lambda n: [x.sqrt() for x, _ in batches(seed=2)])
TASKS = {
    "accuracy": accuracy,
    "fgsm": fgsm,
    "pgd": lambda model, data, **kw: pgd(model, data, num_steps=2, **kw),
    "strong_attack": lambda model, data, **kw: strong_attack(
        model, data, num_steps=2, restarts=2, **kw
    ),
    "calibration": calibration,
    "temperature_scaling": temperature_scaling,
    "ood": lambda model, data, **kw: ood(model, data, [BRIGHT], **kw),
}


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_leaves_the_model_as_it_was(name):
    model = small_net().train()
    model[1].eval()  # a frozen batch norm inside a model in train mode
    model[5].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = modes(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    first = TASKS[name](model, batches())
    assert modes(model) == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[5].bias.grad is None
    assert [p.requires_grad for p in model[5].parameters()] == [False, True]
    # Dropout off and batch statistics fixed: a model in eval mode gives the same numbers.
    assert [r.value for r in first] == [r.value for r in TASKS[name](model.eval(), batches())]


def test_the_default_device_of_torch_is_not_used():
    """As after torch.set_default_device("cuda")."""
    tasks = ["accuracy", "fgsm", "pgd", "strong_attack", "calibration", "temperature", "ood"]
    options = {"pgd": {"num_steps": 2}, "strong_attack": {"num_steps": 2, "restarts": 2}}
    sources = ["uniform", "gaussian-added"]
    model, data, found = small_net(), batches(), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            scores = am.evaluate(model, data, tasks=tasks, options=options, ood=sources)
        assert not scores.failed
        found.append([r.value for r in scores.results])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", TASKS)
def test_modes_come_back_after_an_error(name):
    model = small_net().train()
    model[1].eval()
    before = modes(model)
    broken = [*batches(), (torch.full((2, 3, 6, 6), 7.0), torch.zeros(2, dtype=torch.long))]
    with pytest.raises(ValueError, match="must lie in"):
        TASKS[name](model, broken)
    assert modes(model) == before


@pytest.mark.parametrize("name", TASKS)
def test_a_normalizing_loader_gives_the_figures_of_a_normalizing_model(name):
    inner = small_net().double().eval()
    pixels = Pixels(MEAN, STD)

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return inner(pixels.normalize(x))

    data = [(x.double(), y) for x, y in batches()]
    outside = [(pixels.normalize(x), y) for x, y in data]
    assert outside[0][0].min() < 0
    ours = TASKS[name](Normalized(), data)
    theirs = TASKS[name](inner, outside, normalized_by=(MEAN, STD))
    assert [r.metric for r in ours] == [r.metric for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.value == pytest.approx(b.value, abs=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_normalized_images_are_refused_with_their_range_and_the_remedy(name):
    data = [(Pixels(MEAN, STD).normalize(x), y) for x, y in batches()]
    with pytest.raises(ValueError, match=r"\[-\d.*normalized_by=\(mean, std\)"):
        TASKS[name](small_net(), data)


@pytest.mark.parametrize("name", TASKS)
def test_results_are_json(name):
    for result in TASKS[name](small_net(), batches()):
        assert type(result).from_json(result.to_json()).value == result.value


@pytest.mark.parametrize("name", [name for name in TASKS if name != "ood"])
@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_named(name, label):
    data = batches()
    data[1][1][2] = label
    with pytest.raises(ValueError, match=rf"0\.\.2, got {label}"):
        TASKS[name](small_net(), data)


@pytest.mark.parametrize("name", TASKS)
def test_one_logit_is_refused_and_two_score_as_its_sigmoid(name):
    """All images would be of class 0, and confidently so."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = small_net(1)

        def forward(self, x):
            z = self.one(x)
            return torch.cat((torch.zeros_like(z), z), dim=1)

    for num_classes in (1, 2):
        with pytest.raises(ValueError, match=r"one logit.* torch\.cat"):
            TASKS[name](small_net(1), batches(num_classes=num_classes))
    assert TASKS[name](Two(), batches(num_classes=2))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("empty", [[], [(torch.rand(0, 3, 6, 6), torch.zeros(0).long())]])
def test_no_images_is_an_error(name, empty):
    with pytest.raises(ValueError, match="no images"):
        TASKS[name](small_net(), empty)


@pytest.mark.parametrize("name", TASKS)
def test_logits_that_are_not_finite_are_an_error(name):
    model = small_net()
    model[5].bias.data[1] = torch.nan
    with pytest.raises(ValueError, match="not finite for"):
        TASKS[name](model, batches())


@pytest.mark.parametrize("name", TASKS)
def test_autocast_is_used_and_recorded(name):
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            out = self.net(x)
            seen.append(out.dtype)
            return out

    results = TASKS[name](Spy(), batches(), amp_dtype=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    assert {r.settings["amp_dtype"] for r in results} == {"bfloat16"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_a_model_runs_in_the_type_of_autocast_and_gives_float32(dtype):
    x = batches()[0][0]
    with autocast(x, dtype):
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        assert dtype in (None, torch.get_autocast_dtype("cpu"))
    if dtype != torch.float16:  # not every processor has its products
        assert Forward(small_net(), amp_dtype=dtype)(x).dtype == torch.float32


def test_images_get_the_type_of_the_first_floats_of_a_model():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("index", torch.arange(3))
            self.register_buffer("weight", torch.eye(3).double())

        def forward(self, x):
            return x.mean((2, 3))[:, self.index] @ self.weight

    logits = predict(Table(), [x for x, _ in batches()])
    torch.testing.assert_close(logits, torch.cat([x for x, _ in batches()]).mean((2, 3)).double())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x, y: [(x.numpy(), y)], "got ndarray; divide bytes by 255"),
        (lambda x, y: [((x * 255).to(torch.uint8), y)], "divide bytes by 255"),
        (lambda x, y: [(x[0], y)], r"shape \[3, 6, 6\]"),
        (lambda x, y: [(x, y[:1])], "4 integers for 4 images"),
        (lambda x, y: [(x, torch.eye(3)[y])], "4 integers for 4 images"),
        (lambda x, y: [(x, y.tolist())], "a tensor of 4 integers for 4 images, got list"),
        (lambda x, y: [x], "pairs"),
        (lambda x, y: x, r"tensor.split\(256\)"),
        (lambda x, y: [(x * torch.nan, y)], r"\[nan, nan\]"),
    ],
)
def test_bad_batches_are_explained(bad, message):
    x, y = batches()[0]
    with pytest.raises(ValueError, match=message):
        collect_logits(small_net(), bad(x, y))


def test_bad_normalization_and_bad_models_are_explained():
    with pytest.raises(ValueError, match="3 channels, got 1 and 1"):
        collect_logits(small_net(), batches(), normalized_by=([0.5], [0.5]))
    with pytest.raises(ValueError, match="a positive std"):
        collect_logits(small_net(), batches(), normalized_by=(MEAN, (0.2, 0.0, 0.2)))
    with pytest.raises(ValueError, match="are mean and std those"):
        collect_logits(small_net(), batches(), normalized_by=((0.5,) * 3, (2.0,) * 3))
    with pytest.raises(ValueError, match=r"got \[4, 4, 4, 4\] .* alignmixup\.as_logits"):
        collect_logits(small_net()[:1], batches())


@pytest.mark.parametrize("name", TASKS)
def test_pixels_under_the_name_of_normalized_images_are_refused(name):
    with pytest.raises(ValueError, match="pass the images as your normalizing loader returns them"):
        TASKS[name](small_net(), batches(), normalized_by=(MEAN, STD))


@pytest.mark.parametrize(
    ("mean", "std", "is_refused"), [(0.0, 0.5, True), (0.0, 1.0, False), (-1.0, 3.0, False)]
)
def test_pixels_are_refused_where_normalization_would_have_left_their_range(mean, std, is_refused):
    """Zero may stay zero: then white leaves [0, 1], unless the whole range stays inside."""
    pixels = Pixels((mean,) * 3, (std,) * 3)
    ranges = torch.tensor([[0.1, 0.6], [0.0, 0.9]])
    if is_refused:
        with pytest.raises(ValueError, match="as your normalizing loader returns them"):
            pixels.check_normalized(ranges)
    else:
        pixels.check_normalized(ranges)


def test_a_tiny_overshoot_is_clipped_and_more_is_refused():
    class Extremes(nn.Module):
        def forward(self, x):
            return torch.stack([x.flatten(1).amin(1), x.flatten(1).amax(1)], dim=1)

    x = torch.rand(4, 3, 6, 6)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = 1 + 5e-5, -5e-5
    logits = predict(Extremes(), [x])
    assert logits[0].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="must lie in"):
        predict(Extremes(), [x + 2e-4])
    with pytest.raises(ValueError, match="must lie in"):
        predict(Extremes(), [x.clamp(max=0.9) - 2e-4])


def test_logits_come_in_order_and_do_not_depend_on_the_batches():
    model = small_net()
    whole = collect_logits(model, batches(batch_size=10))
    parts = collect_logits(model, batches(batch_size=3))
    torch.testing.assert_close(parts.logits, whole.logits)
    assert torch.equal(parts.labels, whole.labels)
    with torch.no_grad():
        expected = model.eval()(batches(batch_size=10)[0][0])
    torch.testing.assert_close(whole.logits, expected)
    torch.testing.assert_close(predict(model, [x for x, _ in batches()]), expected)


def test_evaluating_restores_what_a_module_changes_in_the_block():
    model = small_net().train()
    with evaluating(model):
        assert not any(modes(model))
        model.train()
        model[2].eval()
    assert all(modes(model))


class Merging(nn.Linear):
    """A linear layer plus a low-rank product that its evaluation mode adds to the weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.requires_grad_(False)
        self.low = nn.Parameter(torch.ones(4, 1))
        self.is_merged = False

    def train(self, mode=True):
        if mode == self.is_merged:
            self.weight.data += (-1 if mode else 1) * self.low.data @ self.low.data.T
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) + (0 if self.is_merged else x @ self.low @ self.low.T)


def test_evaluating_ends_by_a_modules_own_train():
    model, x = nn.Sequential(Merging(), Merging()), torch.ones(2, 4)
    before = model(x)
    with evaluating(model):
        assert all(part.is_merged for part in model)
        torch.testing.assert_close(model(x), before)
    assert not any(part.is_merged for part in model)
    model(x).sum().backward()
    assert all(part.low.grad is not None for part in model)


def test_a_program_keeps_the_mode_it_was_exported_in():
    class Program(nn.Linear):
        """As torch.export makes them."""

        def train(self, mode=True):
            raise NotImplementedError

    model = nn.Sequential(nn.Flatten(), Program(12, 6), nn.Dropout())
    x = torch.rand(4, 3, 2, 2)
    assert torch.equal(predict(model[:2], [x]), model[:2](x))
    with evaluating(model):
        pass
    assert all(modes(model))


def test_accuracy_by_hand():
    logits = torch.eye(6).repeat(2, 1)  # image i says class i % 6; then 5, 4, 3, ...
    logits = logits + 0.01 * torch.arange(6).flip(0)
    labels = torch.tensor([0, 1, 2, 5, 5, 5, 0, 0, 0, 0, 0, 0])
    x = torch.rand(12, 3, 2, 2)
    results = accuracy(Constant(logits), [(x[:7], labels[:7]), (x[7:], labels[7:])])
    values = {r.metric: r.value for r in results}
    # Right at 0, 1, 2, 5, 6. Class 5 is the least likely except in row 5; class 0 is never last.
    assert values == {
        "top1": pytest.approx(500 / 12),
        "top1_error": pytest.approx(700 / 12),
        "top5": pytest.approx(1000 / 12),
    }
    assert results[0].settings == {"num_images": 12, "num_classes": 6, "amp_dtype": None}


@pytest.mark.parametrize("num_classes", [10, 100, 1000])
def test_of_equal_logits_the_first_classes_are_the_best(num_classes):
    # argmax calls every image class 0; top-5 then has the classes 0 to 4.
    data = [(torch.rand(10, 3, 2, 2), torch.arange(10))]
    results = accuracy(Constant(torch.zeros(10, num_classes)), data)
    assert {r.metric: r.value for r in results} == {"top1": 10, "top1_error": 90, "top5": 50}


def test_top5_needs_five_classes():
    assert [r.metric for r in accuracy(small_net(4), batches())] == ["top1", "top1_error"]
    five = {r.metric: r.value for r in accuracy(small_net(5), batches())}
    assert five["top5"] == 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", TASKS)
def test_batches_follow_the_model_to_its_device(name):
    model = small_net().double()
    data = [(x.double(), y) for x, y in batches()]
    expected = [r.value for r in TASKS[name](model, data)]
    assert [r.value for r in TASKS[name](model.cuda(), data)] == pytest.approx(expected, abs=1e-6)
