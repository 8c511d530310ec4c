"""AlignMixup on our networks, on torchvision's and timm's: mixed at the layer, not around it."""

import pytest
import torch

from alignmixup.contracts import Draw
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.models.zoo import NetSpec, build, default_tap
from alignmixup.ops.align import align_mix
from alignmixup.ops.blend import blend_with_partner
from alignmixup.wrappers import attribute_around, find_layer
from torchvision_schemas import define_torchvision_schemas

HALF = (0.5, 0.5, 0.5)
MODELS = {
    "preact_resnet18": (NetSpec("preact_resnet18", width=4), 32),
    "preact_resnet18-flatten": (NetSpec("preact_resnet18", width=4, head="flatten"), 32),
    "wrn16_8": (NetSpec("wrn16_8", width=2), 32),
    "resnet50": (NetSpec("resnet50", width=8), 64),
    "vgg_gap": (NetSpec("vgg_gap", width=4), 64),
    "autoencoder": (NetSpec("preact_resnet18", width=4, autoencoder="vector"), 32),
    "torchvision": (NetSpec("torchvision:resnet18"), 64),
    "timm-levit": (NetSpec("timm:levit_128s"), 224),
    "timm-vit": (NetSpec("timm:vit_tiny_patch16_224"), 32),
}


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", ["feat", "feat'"])
def test_the_mixed_forward_is_the_network_from_the_mixed_layer_on(name, case):
    spec, size = MODELS[name]
    if ":" in spec.name:
        define_torchvision_schemas()
    net = build(spec, 10, HALF, HALF, size, seed=0).eval()
    layer = default_tap(spec, net)
    target, _ = find_layer(net, layer)
    x, y = torch.rand(3, 3, size, size), torch.tensor([1, 2, 3])
    perm, lam = torch.tensor([2, 0, 1]), torch.tensor(0.3)
    seen = []
    handle = target.register_forward_hook(lambda m, i, out: seen.append(out))
    plain = net(x)
    handle.remove()
    keep = "anchor" if case == "feat" else "partner"
    features, prefix = seen[0], attribute_around(net, layer, "num_prefix_tokens") or 0
    expected = align_mix(features[:, prefix:], perm, lam, keep=keep)
    if prefix:  # class tokens are mixed and not aligned
        expected = torch.cat((blend_with_partner(features[:, :prefix], perm, lam), expected), 1)
    handle = target.register_forward_hook(lambda m, i, out: expected)
    by_hand = net(x)
    handle.remove()
    mixed = AlignMixup(layer).apply(net, x, y, Draw(case, perm, lam))
    torch.testing.assert_close(mixed.logits, by_hand, atol=1e-5, rtol=1e-5)
    assert (mixed.logits - plain).norm() > 1e-4 * plain.norm()
    assert not target._forward_hooks
    mixed.loss().backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    assert gradients
    assert all(g.isfinite().all() for g in gradients)
