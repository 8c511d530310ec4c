"""Class activation maps: the law that ties them to the logits, and which networks have them."""

import pytest
import torch
from torch import nn

from alignmixup.evaluation.cam import PoolHead, class_maps, find_pool_head
from alignmixup.models import NetSpec, build

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class Pooled(nn.Module):
    """A network of somebody else: layers by other names, dropout before the classifier."""

    def __init__(self, num_classes=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 5, 3))
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(5, num_classes)

    def forward(self, x):
        return self.fc(self.drop(self.pool(self.act(self.trunk(x))).flatten(1)))


def images(n=3, size=32, seed=0):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def own(name, size, **options):
    spec = NetSpec(name, width=4, **options)
    net = build(spec, 5, MEAN, STD, image_size=size, seed=0)
    with torch.no_grad():  # a bias that is easy to miss must not be missed
        net.head.linear.bias.add_(torch.arange(5.0))
    return net


NETS = {
    "preact": (lambda: own("preact_resnet18", 32), 32, "layer4", "head.linear"),
    "wrn": (lambda: own("wrn16_8", 32), 32, "norm", "head.linear"),
    "resnet50": (lambda: own("resnet50", 64, last_stride=1), 64, "layer4", "head.linear"),
    "vgg_gap": (lambda: own("vgg_gap", 48), 48, "conv6", "head.linear"),
    "foreign": (Pooled, 12, "act", "fc"),
}


@pytest.mark.parametrize("case", NETS)
def test_mean_of_the_map_plus_bias_is_the_logit(case):
    make, size, layer, classifier = NETS[case]
    net, x = make(), images(size=size)
    head = find_pool_head(net, x)
    assert head == PoolHead(layer, classifier)
    bias = net.get_submodule(classifier).bias
    for k in range(len(bias)):
        found = class_maps(net, x, torch.full((len(x),), k))
        assert found.maps.shape[1] > 1
        torch.testing.assert_close(
            found.maps.mean(dim=(1, 2)) + bias[k], found.logits[:, k], atol=1e-5, rtol=1e-4
        )
        with torch.no_grad():
            torch.testing.assert_close(found.logits, net.eval()(x))


def test_without_classes_the_map_is_that_of_the_predicted_class():
    net, x = Pooled(), images(size=12)
    found = class_maps(net, x)
    assert torch.equal(found.classes, found.logits.argmax(dim=1))
    torch.testing.assert_close(found.maps, class_maps(net, x, found.classes).maps)
    other = class_maps(net, x, (found.classes + 1) % 4)
    assert not torch.allclose(found.maps, other.maps)


def test_map_by_a_loop_over_positions():
    net, x = Pooled().eval(), images(size=9)
    with torch.no_grad():
        features = net.act(net.trunk(x))
    found = class_maps(net, x, torch.tensor([2, 0, 1]))
    for i, k in enumerate([2, 0, 1]):
        for row in range(5):
            for column in range(5):
                value = net.fc.weight[k] @ features[i, :, row, column]
                torch.testing.assert_close(found.maps[i, row, column], value)


def test_normalized_by_is_what_the_model_sees():
    net, x = Pooled(), images(size=12)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    inside = class_maps(net, x, normalized_by=(MEAN, STD))
    torch.testing.assert_close(inside.maps, class_maps(net, (x - mean) / std).maps)


def test_modes_and_hooks_are_given_back():
    net = Pooled().train()
    net.trunk.eval()
    class_maps(net, images(size=12))
    assert net.training
    assert not net.trunk.training
    assert all(not m._forward_hooks for m in net.modules())


def test_compiled_module_is_looked_into():
    net, x = Pooled(), images(size=12)
    compiled = torch.compile(net, backend="eager")
    compiled(x)  # hooks that come after this call would be ignored
    torch.testing.assert_close(class_maps(compiled, x).maps, class_maps(net, x).maps)


class MaxPooled(Pooled):
    def __init__(self):
        super().__init__()
        self.pool = nn.AdaptiveMaxPool2d(1)


def flat():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 10 * 10, 3))


@pytest.mark.parametrize(
    "make", [MaxPooled, flat, lambda: own("preact_resnet18", 12, head="flatten")]
)
def test_model_without_a_pooling_head_is_an_error(make):
    with pytest.raises(ValueError, match="no pooling head"):
        class_maps(make(), images(size=12))


def test_model_without_a_linear_layer_is_an_error():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="not the output of a linear layer"):
        class_maps(net, images(size=12))


def test_map_of_one_position_is_an_error():
    with pytest.raises(ValueError, match="1 x 1"):
        find_pool_head(own("preact_resnet18", 8), images(size=8))


def test_names_given_are_checked():
    net, x = Pooled(), images(size=12)
    assert find_pool_head(net, x, layer="act", classifier="fc") == PoolHead("act", "fc")
    assert find_pool_head(net, x, layer="trunk") == PoolHead("trunk", "fc")
    with pytest.raises(ValueError, match=r"no layer 'layer9'.*trunk"):
        find_pool_head(net, x, layer="layer9")
    with pytest.raises(ValueError, match="is a AdaptiveAvgPool2d, not"):
        find_pool_head(net, x, classifier="pool")
    with pytest.raises(ValueError, match=r"returns \[3, 6, 10, 10\]"):
        class_maps(net, x, head=PoolHead("trunk.1", "fc"))
    net.act = nn.Sigmoid()
    with pytest.raises(ValueError, match="does not read"):
        class_maps(net, x, head=PoolHead("trunk", "fc"))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_relu_that_is_no_layer_belongs_to_the_map(in_place):
    class Functional(Pooled):
        def forward(self, x):
            return self.fc(nn.functional.relu(self.trunk(x), inplace=in_place).mean((2, 3)))

    torch.manual_seed(0)
    net, x = Functional(), images(size=12)
    with torch.no_grad():
        features = net.trunk(x)
    assert features.min() < 0 < features.max()
    assert find_pool_head(net, x) == PoolHead("trunk", "fc")
    found = class_maps(net, x, torch.tensor([2, 0, 1]))
    expected = torch.einsum("bc,bchw->bhw", net.fc.weight[[2, 0, 1]], features.relu())
    torch.testing.assert_close(found.maps, expected)


def test_a_normalization_behind_the_pool_is_named_as_what_is_in_the_way():
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.GroupNorm(1, 5), nn.Flatten(),
        nn.Linear(5, 3),
    )  # fmt: skip
    with pytest.raises(ValueError, match="'2' changes the pooled features before '4'"):
        find_pool_head(net, images(size=12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_maps_in_other_precisions(dtype):
    torch.manual_seed(0)
    net, x = Pooled(), images(size=12)
    expected = class_maps(net, x, torch.tensor([2, 0, 1]))
    net.to(dtype)
    assert find_pool_head(net, x) == PoolHead("act", "fc")
    found = class_maps(net, x, torch.tensor([2, 0, 1]))
    wide = torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.maps, expected.maps.to(wide), atol=1e-2, rtol=0)


def test_labels_out_of_range_are_an_error():
    with pytest.raises(ValueError, match=r"0\.\.3"):
        class_maps(Pooled(), images(size=12), torch.tensor([0, 4, 1]))
