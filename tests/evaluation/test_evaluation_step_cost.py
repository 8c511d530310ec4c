"""Cost: counts by hand, percentiles by hand, and a model that is left as it was."""

import time

import pytest
import torch
from torch import nn

from alignmixup.contracts import Draw, Mixed, Mixer, soft_targets
from alignmixup.evaluation.tasks.step_cost import Timing, count_parameters, step_cost, time_steps
from alignmixup.mixers.automix import AutoMix


class Plain(Mixer):
    """Trains on the batch as it is, and keeps the cases it was given."""

    def __init__(self, **cases):
        self._cases = cases or {"clean": 1.0}
        self.applied = []

    @property
    def cases(self):
        return self._cases

    def draw(self, batch_size, rng, progress=0.0):
        shares = torch.tensor(list(self._cases.values()))
        case = list(self._cases)[int(torch.multinomial(shares, 1, generator=rng))]
        return Draw(case, torch.arange(batch_size), torch.ones(()))

    def apply(self, net, x, y, draw):
        assert net.training
        assert torch.is_grad_enabled()
        self.applied.append(draw.case)
        if draw.case == "slow":
            time.sleep(0.02)
        logits = net(x)
        return Mixed(logits, soft_targets(y, logits.shape[1]))


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )


def batch(device="cpu"):
    rng = torch.Generator().manual_seed(1)
    return torch.rand(5, 3, 6, 6, generator=rng).to(device), torch.tensor([0, 1, 1, 0, 1]).to(
        device
    )


def by_metric(results):
    return {r.metric: r for r in results}


def test_parameters_are_counted_by_hand():
    net = small_net()
    net[0].weight.requires_grad_(False)
    total = 3 * 4 * 9 + 4 + 4 + 4 + 64 * 2 + 2
    assert count_parameters(net) == (total, total - 108)
    found = by_metric(step_cost(net, batch()[0], num_steps=1, num_warmup=0))["params"]
    assert found.task == "cost"
    assert found.value == total / 1e6
    assert found.settings["trainable"] == (total - 108) / 1e6


def test_a_shared_parameter_counts_once():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert count_parameters(net) == (9 + 3 + 3, 15)


def test_percentiles_by_hand():
    timing = Timing((5.0, 1.0, 2.0, 3.0, 4.0, 6.0), None)
    assert timing.percentile(50) == 3.5
    assert timing.percentile(20) == 2.0
    assert timing.percentile(80) == 5.0


def test_warm_up_is_not_timed():
    calls = []
    timing = time_steps(lambda: calls.append(1), torch.device("cpu"), num_steps=4, num_warmup=3)
    assert (len(calls), len(timing.ms)) == (7, 4)
    assert timing.peak_memory_mb is None


def test_training_step_costs_more_than_forward():
    mixer = Plain()
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 900, 2))
    x, y = torch.rand(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
    found = by_metric(step_cost(net, x, y, mixer=mixer, num_steps=5, num_warmup=2))
    assert len(mixer.applied) == 7
    training = found["ms_per_batch"]
    assert 0 < found["ms_forward"].value < training.value
    assert training.settings["mixer"] == "Plain"
    assert training.settings["p20"] <= training.value <= training.settings["p80"]
    assert not any("memory" in metric for metric in found)  # not known on the CPU


def test_cases_are_weighted_by_their_probability():
    mixer = Plain(slow=0.25, quick=0.75, never=0.0)
    found = by_metric(step_cost(small_net(), *batch(), mixer=mixer, num_steps=3, num_warmup=1))
    assert sorted(mixer.applied) == ["quick"] * 4 + ["slow"] * 4
    by_case = found["ms_per_batch"].settings["p50_by_case"]
    assert set(by_case) == {"slow", "quick"}
    assert by_case["slow"] > 20
    expected = 0.25 * by_case["slow"] + 0.75 * by_case["quick"]
    assert found["ms_per_batch"].value == pytest.approx(expected)


def test_case_that_never_comes_is_an_error():
    mixer = Plain()
    mixer._cases = {"clean": 0.5, "other": 0.5}
    mixer.draw = lambda b, rng: Draw("clean", torch.arange(b), torch.ones(()))
    with pytest.raises(ValueError, match="never returns the cases"):
        step_cost(small_net(), *batch(), mixer=mixer, num_steps=1)


def test_model_is_left_as_it_was():
    net = small_net().train()
    net[1].eval()
    x, y = batch()
    net(x).sum().backward()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    grads = [p.grad.clone() for p in net.parameters()]
    step_cost(net, x, y, mixer=Plain(), num_steps=2, num_warmup=1)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    assert net.training
    assert not net[1].training


def test_model_is_left_as_it_was_by_a_step_that_fails():
    net = small_net()
    x, _ = batch()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match="labels"):
        step_cost(net, x, torch.full((5,), 7), mixer=Plain(), num_steps=2)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_bad_input():
    net, (x, y) = small_net(), batch()
    with pytest.raises(ValueError, match="needs labels y for 5 images, got none"):
        step_cost(net, x, mixer=Plain())
    with pytest.raises(ValueError, match="got 4"):
        step_cost(net, x, y[:4], mixer=Plain())
    with pytest.raises(ValueError, match="no image"):
        step_cost(net, x[:0])
    with pytest.raises(ValueError, match="num_steps"):
        step_cost(net, x, num_steps=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_and_events_on_cuda():
    x, y = batch("cuda")
    others = torch.cuda.memory_allocated() / 2**20
    found = by_metric(step_cost(small_net().cuda(), x, y, mixer=Plain(), num_steps=3))
    assert found["ms_per_batch"].value > 0
    assert 0 < found["peak_memory_forward_mb"].value < found["peak_memory_mb"].value < others + 100


def test_a_mixer_with_parameters_is_timed_with_them():
    net, (x, y) = small_net(), batch()
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    how = {"num_steps": 1, "num_warmup": 1}
    found = by_metric(step_cost(net, x, y, mixer=AutoMix("0"), **how))
    assert found["ms_per_batch"].value > 0
    assert found["ms_per_batch"].settings["mixer"] == "AutoMix"
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())
