"""ResNet-50 against torchvision's own, its count, its maps, and the loading of weights."""

import pytest
import torch

from alignmixup.models import ResNet50

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def layer4_of(net, x):
    seen = []
    net.layer4.register_forward_hook(lambda m, i, out: seen.append(out))
    with torch.no_grad():
        net(x)
    return seen[0]


@pytest.fixture(scope="module")
def theirs(torchvision):
    """Their network with random weights and BN figures that are not the identity."""
    net = torchvision.models.resnet50(weights=None)
    rng = torch.Generator().manual_seed(3)
    for name, tensor in net.state_dict().items():
        if "bn" in name or "downsample.1" in name:
            figures = torch.rand(tensor.shape, generator=rng)
            tensor.copy_(figures * 0.5 + 0.5 if tensor.is_floating_point() else tensor)
    return net.eval()


def test_parameter_count():
    with torch.device("meta"):
        net = ResNet50(1000, MEAN, STD)
    assert sum(p.numel() for p in net.parameters()) == 25_557_032


def test_with_torchvisions_weights_the_logits_are_torchvisions(theirs):
    ours = ResNet50(1000, MEAN, STD)
    ours.load_torchvision(theirs.state_dict())
    x = torch.rand(2, 3, 64, 64)
    normalized = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        expected = theirs(normalized)
        torch.testing.assert_close(ours.eval()(x), expected, rtol=1e-4, atol=1e-4)
    assert expected.std(dim=0).max() > 1e-2  # the two images do get different logits


def test_for_other_classes_the_head_is_kept(theirs):
    ours = ResNet50(7, MEAN, STD)
    before = ours.head.linear.weight.clone()
    ours.load_torchvision(theirs.state_dict())
    assert torch.equal(ours.head.linear.weight, before)
    assert torch.equal(ours.layer4[2].conv3.weight, theirs.layer4[2].conv3.weight)
    assert torch.equal(ours.normalize.mean.flatten(), torch.tensor(MEAN))


def test_incomplete_weights_are_refused(theirs):
    state = dict(theirs.state_dict())
    del state["layer3.4.conv2.weight"]
    with pytest.raises(RuntimeError, match=r"layer3\.4\.conv2\.weight"):
        ResNet50(1000, MEAN, STD).load_torchvision(state)


@pytest.mark.parametrize(("last_stride", "side"), [(2, 7), (1, 14)])
def test_layer4_map_at_224_pixels(last_stride, side):
    net = ResNet50(3, MEAN, STD, width=4, last_stride=last_stride)
    assert layer4_of(net, torch.rand(1, 3, 224, 224)).shape == (1, 128, side, side)


def test_last_stride_1_computes_the_same_weights_more_densely(torchvision):
    strided, dense = (ResNet50(3, MEAN, STD, width=4, last_stride=s).eval() for s in (2, 1))
    dense.load_state_dict(strided.state_dict())
    x = torch.rand(1, 3, 64, 64)
    # The first block alone is a convolution with a stride: every second position is the same.
    below = strided.layer3(strided.layer2(strided.layer1(strided.stem(strided.normalize(x)))))
    torch.testing.assert_close(strided.layer4[0](below), dense.layer4[0](below)[..., ::2, ::2])
