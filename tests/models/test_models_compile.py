"""Every network compiles to one graph and gives the logits it gives uncompiled."""

import pytest
import torch

from alignmixup.models import NetSpec, build


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    "spec",
    [
        NetSpec("preact_resnet18", width=4, head="flatten"),
        NetSpec("wrn16_8", width=2),
        pytest.param(NetSpec("resnet50", width=4), marks=pytest.mark.slow),
        NetSpec("vgg_gap", width=4),
    ],
    ids=lambda spec: spec.name,
)
def test_every_network_is_one_graph_with_equal_logits(spec):
    torch.compiler.reset()
    net = build(spec, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), image_size=32).eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(net, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, net(x))
