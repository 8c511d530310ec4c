"""VGG-GAP: its convolutions against torchvision's, its count, its map, and that CAM explains it."""

import pytest
import torch

from alignmixup.models import VGGGAP

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_parameter_count():
    with torch.device("meta"):
        net = VGGGAP(200, MEAN, STD)
    # The 13 convolutions of VGG-16 have 14,714,688; the added one and the linear layer by hand.
    expected = 14_714_688 + (9 * 512 * 1024 + 1024) + (1024 * 200 + 200)
    assert sum(p.numel() for p in net.parameters()) == expected


def test_with_torchvisions_weights_the_features_are_torchvisions_before_the_last_pool(torchvision):
    vgg = torchvision.models.vgg
    theirs = vgg.make_layers(vgg.cfgs["D"])
    state = {f"features.{name}": value for name, value in theirs.state_dict().items()}
    state["classifier.0.weight"] = torch.zeros(2, 2)
    ours = VGGGAP(3, MEAN, STD)
    added, classifier = ours.conv6[0].weight.clone(), ours.head.linear.weight.clone()
    ours.load_torchvision(state)
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.features(x), theirs[:-1](x))
        assert ours.features(x).abs().max() > 0
    assert torch.equal(ours.conv6[0].weight, added)
    assert torch.equal(ours.head.linear.weight, classifier)


def test_the_mean_of_the_activation_map_and_the_bias_are_the_logits():
    net = VGGGAP(5, MEAN, STD, width=4).eval()
    seen = []
    net.conv6.register_forward_hook(lambda m, i, out: seen.append(out))
    with torch.no_grad():
        logits = net(torch.rand(2, 3, 224, 224))
    assert seen[0].shape == (2, 64, 14, 14)
    assert seen[0].min() == 0 < seen[0].max()
    cam = torch.einsum("kc,bchw->bkhw", net.head.linear.weight, seen[0])
    torch.testing.assert_close(cam.mean((2, 3)) + net.head.linear.bias, logits)


def test_weights_of_another_network_are_refused():
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        VGGGAP(3, MEAN, STD, width=4).load_torchvision({"conv1.weight": torch.zeros(1)})
