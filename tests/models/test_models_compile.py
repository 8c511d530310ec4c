"""Every network compiles to one graph and gives the logits it gives uncompiled.

In a process of its own: the runtime check of shapes that tests may switch on cannot be traced.
"""

import subprocess
import sys

PROGRAM = """
import torch
from alignmixup.models import NetSpec, build

for spec in (
    NetSpec("preact_resnet18", width=4, head="flatten"),
    NetSpec("wrn16_8", width=2),
    NetSpec("resnet50", width=4),
    NetSpec("vgg_gap", width=4),
):
    net = build(spec, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), image_size=32).eval()
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(net, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, net(x))
    print(spec.name)
"""


def test_every_network_is_one_graph_with_equal_logits():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["preact_resnet18", "wrn16_8", "resnet50", "vgg_gap"]
