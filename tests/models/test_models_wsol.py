"""ACoL and ADL: what is hidden is hidden, what is left alone is left alone, and both train."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from alignmixup.models import NetSpec, build, initialize
from alignmixup.models.wsol import ADL, ACoL, ErasingLoss, add_adl

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def images(n=3, size=64, seed=0):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def acol(body="vgg", **options):
    net = ACoL(4, MEAN, STD, body=body, width=4, **options)
    initialize(net, torch.Generator().manual_seed(0))
    return net


@pytest.mark.parametrize("body", ["vgg", "resnet50"])
def test_second_branch_does_not_see_what_the_first_marks(body):
    net, x, y = acol(body).eval(), images(), torch.tensor([1, 3, 0])
    seen = []
    net.branch_b.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        out = net(x, y)
        features, maps = net.body(x), net.branch_a(net.body(x))
    (given,) = seen
    for i in range(3):
        plane = maps[i, y[i]]
        unit = (plane - plane.min()) / (plane.max() - plane.min())
        assert torch.equal(out.erased[i], unit > 0.6)
        assert 0 < out.erased[i].sum() < out.erased[i].numel()
        assert (given[i][:, out.erased[i]] == 0).all()
        assert torch.equal(given[i][:, ~out.erased[i]], features[i][:, ~out.erased[i]])
    assert (features[out.erased.unsqueeze(1).expand_as(features)] != 0).any()


@pytest.mark.parametrize("body", ["vgg", "resnet50"])
def test_fused_map_is_the_larger_of_both(body):
    net, x, y = acol(body).eval(), images(), torch.tensor([1, 3, 0])
    with torch.no_grad():
        out = net(x, y)
        logits, maps = net.class_maps(x, y)
        torch.testing.assert_close(logits, net(x))
    assert (maps >= out.map_a).all()
    assert (maps >= out.map_b).all()
    assert ((maps == out.map_a) | (maps == out.map_b)).all()
    assert maps.amin() >= 0
    torch.testing.assert_close(maps.amax(dim=(1, 2)), torch.ones(3))
    side = 64 // 16
    assert maps.shape == (3, side, side)


def test_map_of_the_predicted_class_where_none_is_named():
    net, x = acol().eval(), images()
    with torch.no_grad():
        logits, maps = net.class_maps(x, None)
        torch.testing.assert_close(maps, net.class_maps(x, logits.argmax(dim=1))[1])


@pytest.mark.parametrize("body", ["vgg", "resnet50"])
def test_both_branches_descend_along_their_gradients(body):
    """A short step against the gradient lowers the loss by the step times the squared norm.

    Each branch in its own parameters, so that what the first marks and the body gives stay.
    """
    net, x, y = acol(body).double().train(), images(4).double(), torch.tensor([0, 1, 2, 3])

    def losses():
        mixed = ErasingLoss()(net, x, y)
        return mixed.loss() - mixed.extra["erased"], mixed.extra["erased"]

    sum(losses()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    for branch, which in ((net.branch_b, 1), (net.branch_a, 0)):
        before = losses()[which].item()
        squared = sum(float(p.grad.square().sum()) for p in branch.parameters())
        assert squared > 0
        step = 1e-4 * before / squared
        with torch.no_grad():
            for p in branch.parameters():
                p -= step * p.grad
        fall = before - losses()[which].item()
        assert fall == pytest.approx(step * squared, rel=0.05)


@pytest.mark.parametrize("body", ["vgg", "resnet50"])
def test_the_body_learns_from_both_branches(body):
    net, x, y = acol(body).train(), images(4), torch.tensor([0, 1, 2, 3])
    mixed = ErasingLoss()(net, x, y)
    erased = mixed.extra["erased"]
    parameters = list(net.body.parameters())
    for loss in (mixed.loss() - erased, erased):
        grads = torch.autograd.grad(loss, parameters, retain_graph=True)
        assert all(grad.isfinite().all() and grad.any() for grad in grads)


def test_erasing_loss_is_the_sum_of_two_cross_entropies():
    net, x, y = acol().eval(), images(), torch.tensor([1, 3, 0])
    out = net(x, y)
    both = sum(nn.functional.cross_entropy(z, y) for z in (out.logits, out.logits_b))
    torch.testing.assert_close(ErasingLoss()(net, x, y).loss(), both)


def test_erasing_loss_refuses_other_networks_and_labels():
    with pytest.raises(ValueError, match="ACoL"):
        ErasingLoss()(nn.Flatten(), images(), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"0\.\.3"):
        ErasingLoss()(acol(), images(), torch.tensor([0, 1, 4]))


def test_body_takes_torchvision_weights(torchvision):
    state = {
        k: torch.full_like(v, 0.5) for k, v in torchvision.models.resnet50().state_dict().items()
    }
    net = ACoL(4, MEAN, STD, body="resnet50")
    net.load_torchvision(state)
    assert (net.body.layer4[2].conv3.weight == 0.5).all()
    assert net.body.normalize.mean.flatten().tolist() == pytest.approx(MEAN)


def test_adl_does_nothing_in_eval_mode():
    x = torch.randn(2, 3, 5, 5)
    layer = ADL().eval()
    assert layer(x) is x
    assert int(layer.steps) == 0


def test_adl_hides_what_is_attended_most():
    x = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    out = ADL(drop_rate=1.0, threshold=0.8).train()(x)
    attention = x.mean(dim=1)
    for i in range(2):
        is_peak = attention[i] > 0.8 * attention[i].max()
        assert 0 < is_peak.sum() < 25
        assert (out[i][:, is_peak] == 0).all()
        assert torch.equal(out[i][:, ~is_peak], x[i][:, ~is_peak])


def test_adl_stresses_by_the_sigmoid_of_attention():
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    out = ADL(drop_rate=0.0).train()(x)
    torch.testing.assert_close(out, x * torch.sigmoid(x.mean(dim=1, keepdim=True)))


def choices(layer, num_steps):
    x = torch.ones(1, 1, 1, 2) * torch.tensor([1.0, 0.1])  # the first position is the peak
    return [bool(layer(x)[0, 0, 0, 0] == 0) for _ in range(num_steps)]


def test_adl_chooses_at_random_at_its_rate_and_resumes():
    layer = ADL(drop_rate=0.75, seed=3).train()
    drawn = choices(layer, 2000)
    rate = sum(drawn) / 2000
    assert abs(rate - 0.75) < 5 * (0.75 * 0.25 / 2000) ** 0.5
    # Independent steps: two drops in a row come as often as chance has it.
    pairs = sum(a and b for a, b in pairwise(drawn)) / 1999
    assert abs(pairs - 0.75**2) < 0.06
    assert choices(ADL(seed=4).train(), 50) != drawn[:50]
    first = ADL(drop_rate=0.75, seed=3).train()
    choices(first, 20)
    again = ADL(drop_rate=0.75, seed=3).train()
    again.load_state_dict(first.state_dict())
    assert choices(again, 30) == drawn[20:50]


@pytest.mark.parametrize(
    ("name", "options", "num_layers"), [("vgg_gap", {}, 3), ("resnet50", {"last_stride": 1}, 2)]
)
def test_adl_in_our_networks(name, options, num_layers):
    net = build(NetSpec(name, width=4, **options), 4, MEAN, STD, image_size=64, seed=0)
    x, y = images(4), torch.tensor([0, 1, 2, 3])
    before = net.eval()(x)
    names = [n for n, _ in net.named_parameters()]
    assert add_adl(net) is net
    assert [n for n, _ in net.named_parameters()] == names
    assert sum(isinstance(m, ADL) for m in net.modules()) == num_layers
    assert torch.equal(net.eval()(x), before)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        optimizer.step()
    assert all(int(m.steps) == 3 for m in net.modules() if isinstance(m, ADL))
    assert len({m.seed for m in net.modules() if isinstance(m, ADL)}) == num_layers


def test_bad_options():
    with pytest.raises(ValueError, match="unknown body"):
        ACoL(4, MEAN, STD, body="alexnet")
    with pytest.raises(ValueError, match="threshold"):
        ACoL(4, MEAN, STD, threshold=1.5)
    with pytest.raises(ValueError, match="drop_rate"):
        ADL(drop_rate=2)
    with pytest.raises(ValueError, match="threshold"):
        ADL(threshold=0)
    with pytest.raises(ValueError, match="pass layers="):
        add_adl(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(ValueError, match="no layer 'layer9'"):
        add_adl(nn.Sequential(nn.ReLU()), ["layer9"])
    with pytest.raises(ValueError, match="has weights and is no nn"):
        add_adl(nn.Sequential(nn.Conv2d(3, 4, 3)), ["0"])
