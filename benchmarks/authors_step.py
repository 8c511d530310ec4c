"""Compare steps of the code that the authors of AlignMixup released with ours.

    git clone https://github.com/shashankvkt/AlignMixup_CVPR22
    PYTHONPATH=src python benchmarks/authors_step.py AlignMixup_CVPR22 [--steps 9] [--network r18]

Each step starts with our weights in both networks. Both get the same images, labels, shares,
partners and cases, in float64 on a CPU. Printed are the case, our loss, the iterations of their
solver, which may stop early, the difference of the losses, and the norm of the difference of the
gradients over that of the gradient. Then ours takes the step, with their optimizer. Their code
wants a GPU and global random numbers: ``.cuda()`` does nothing here, and their draws are replaced
by ours.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.contracts import Draw
from alignmixup.datasets.shapes import shapes
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.models.zoo import NetSpec, build

# Our network, the layer that is mixed, their folder and module, the side of the images.
NETWORKS = {
    "r18": ("preact_resnet18", "layer4", "cifar10_100", "resnet18_classifier", 32),
    "wrn16-8": ("wrn16_8", "norm", "cifar10_100", "wrn16x8_classifier", 32),
    "tiny-r18": ("preact_resnet18", "layer4", "tiny_imgnet", "resnet18_classifier", 64),
    "r50": ("resnet50", "layer4", "imagenet", "resnet50_classifier", 224),
}
CLASSES = ("Resnet_classifier", "WideResNet_classifier")
COINS = {"input": (0,), "feat": (1, 0), "feat'": (1, 1)}  # of their two calls of randint
NUM_CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", type=Path)
    parser.add_argument("--network", choices=NETWORKS, default="r18")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()
    name, layer, folder, module, side = NETWORKS[arguments.network]
    mixer = AlignMixup.released(layer)
    images = shapes("train", arguments.batch * arguments.steps, side)
    spec = NetSpec(name)
    ours = build(spec, NUM_CLASSES, images.mean, images.std, side, seed=0).double().train()
    optimizer = torch.optim.SGD(ours.parameters(), arguments.lr, momentum=0.9, weight_decay=1e-4)
    with imported(arguments.repository / folder, f"models.{module}") as their_module:
        (make,) = (getattr(their_module, kind) for kind in CLASSES if hasattr(their_module, kind))
        theirs: nn.Module = make(NUM_CLASSES).double().train()
        rng = torch.Generator().manual_seed(0)
        print("step,case,loss,their_iterations,loss_difference,gradient_difference")
        for step in range(arguments.steps):
            here = slice(step * arguments.batch, (step + 1) * arguments.batch)
            x, y = images.images[here].double() / 255, images.labels[here]
            draw = mixer.draw(len(x), rng)
            draw = replace(draw, case=list(COINS)[step % len(COINS)], lam=draw.lam.double())
            copy_weights(ours, theirs)
            with counted_iterations() as count:
                their_loss = step_of_theirs(theirs, ours.normalize(x), y, draw)
            our_loss = mixer.apply(ours, x, y, draw).loss()
            for net, loss in ((ours, our_loss), (theirs, their_loss)):
                net.zero_grad()
                loss.backward()
            ours_all, theirs_all = gradient(ours), gradient(theirs)
            worst = float((ours_all - theirs_all).norm() / ours_all.norm())
            apart = abs(float(our_loss.detach() - their_loss.detach()))
            numbers = f"{float(our_loss.detach()):.6f},{len(count) // 2},{apart:.1e},{worst:.1e}"
            print(f"{step + 1},{draw.case},{numbers}", flush=True)
            optimizer.step()


def gradient(net: nn.Module) -> Tensor:
    """Return the gradient of all parameters as one vector."""
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@contextmanager
def imported(folder: Path, name: str) -> Iterator[ModuleType]:
    """Import a module of theirs, which finds its own by bare names."""
    sys.path.insert(0, str(folder))
    try:
        with patch.object(Tensor, "cuda", lambda self: self):
            yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Both networks have the same parameters and buffers in the same order."""
    mine = [value for name, value in ours.state_dict().items() if not name.startswith("normalize")]
    for target, value in zip(theirs.state_dict().values(), mine, strict=True):
        target.copy_(value)


def step_of_theirs(net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Tensor:
    """Return the loss as their training script computes it."""
    coins = iter(COINS[draw.case])
    with (
        patch("random.randint", lambda low, high: next(coins)),
        patch("numpy.random.permutation", lambda size: draw.perm.numpy()),
    ):
        logits, own, other = net(x, y, float(draw.lam), mode="train")
    return draw.lam * F.cross_entropy(logits, own) + (1 - draw.lam) * F.cross_entropy(logits, other)


@contextmanager
def counted_iterations() -> Iterator[list[None]]:
    """Count the calls of logsumexp, of which their solver makes two in an iteration."""
    calls: list[None] = []
    plain = torch.logsumexp

    def counting(*args: object, **options: object) -> Tensor:
        calls.append(None)
        return plain(*args, **options)  # type: ignore[arg-type,no-any-return]

    with patch("torch.logsumexp", counting):
        yield calls


if __name__ == "__main__":
    main()
