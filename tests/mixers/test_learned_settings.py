"""Two heads, pre-trained blocks (SAMix^P) and the global loss of SAMix, by hand and by loops."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import alignmixup as am
from alignmixup.contracts import soft_cross_entropy
from alignmixup.datasets import shapes
from alignmixup.mixers.adautomix import AdAutoMix, combined, group_shares, nearness, with_anchors
from alignmixup.mixers.automix import AutoMix
from alignmixup.mixers.learned import Learned
from alignmixup.mixers.samix import SAMix
from cases import NUM_CLASSES, TinyNet, images, labels
from learned_cases import METHODS, attached, drawn, maps

# ---- two heads -----------------------------------------------------------------------------------


TWO_HEADS = {
    "automix": AutoMix("layer2", heads=2, classifier="fc", switch=0.0),
    "samix": SAMix("layer2", heads=2, classifier="fc", switch=0.0),
}


def scaled_heads(mixer: Learned) -> None:
    """Make the second heads differ from the first ones and from each other."""
    with torch.no_grad():
        mixer.learner.head.weight.mul_(-2.0)
        mixer.learner.teacher_head.weight.mul_(3.0)


@pytest.mark.parametrize("name", TWO_HEADS)
def test_two_heads_are_two_networks_with_a_common_body(name: str) -> None:
    """By hand: copies of network and teacher whose classifier is replaced by the second head."""
    mixer, net = attached(dataclasses.replace(TWO_HEADS[name], ema=(1.0, 1.0)))
    scaled_heads(mixer)
    draw = drawn(mixer, 0.3)
    mixed = mixer.apply(net, images(6), labels(6), draw)
    twin, plain = attached(dataclasses.replace(TWO_HEADS[name], ema=(1.0, 1.0)))
    scaled_heads(twin)
    x, rows = images(6), torch.eye(NUM_CLASSES)[labels(6)]
    h = maps(twin)
    own = twin.mask(h, draw.perm, draw.lam, (16, 16))
    block = twin.mask(h, draw.block_perm, draw.block_lam, (16, 16))
    lam, teacher = draw.block_lam, twin.learner.teacher
    torch.testing.assert_close(mixed.extra["clean"], soft_cross_entropy(plain(x), rows))
    plain.fc.load_state_dict(twin.learner.head.state_dict())
    torch.testing.assert_close(mixed.logits, plain(own * x + (1 - own) * x[draw.perm]))
    teacher.fc.load_state_dict(twin.learner.teacher_head.state_dict())
    taught = teacher(block * x + (1 - block) * x[draw.block_perm])
    expected = soft_cross_entropy(taught, lam * rows + (1 - lam) * rows[draw.block_perm])
    torch.testing.assert_close(mixed.extra["block"], expected)


def test_two_heads_of_adautomix_are_two_networks_with_a_common_body() -> None:
    """The clean images of the network alone end in the first; those of the cosine do not."""
    settings = AdAutoMix("layer2", heads=2, classifier="fc", switch=0.0, ema=(1.0, 1.0))
    mixer, net = attached(settings)
    scaled_heads(mixer)
    draw = drawn(mixer, 0.3)
    mixed = mixer.apply(net, images(6), labels(6), draw)
    twin, plain = attached(settings)
    scaled_heads(twin)
    x, rows = images(6), torch.eye(NUM_CLASSES)[labels(6)]
    h = maps(twin)
    groups = with_anchors(draw.perms)
    shares, block_shares = group_shares(draw.lam, draw.block_lam, draw.others)
    own, block = (
        twin.masks(h, group, share, (16, 16))
        for group, share in zip(groups, (shares, block_shares), strict=True)
    )
    clean = soft_cross_entropy(plain(x), rows)
    torch.testing.assert_close(mixed.extra["clean"], 0.5 * clean)
    plain.fc.load_state_dict(twin.learner.head.state_dict())
    torch.testing.assert_close(mixed.logits, plain(combined(x, groups[0], own)))
    blended = plain(combined(x, groups[0], shares))
    mixup = soft_cross_entropy(blended, combined(rows, groups[0], shares))
    torch.testing.assert_close(mixed.extra["mixup"], 0.5 * mixup)
    teacher = twin.learner.teacher
    teacher.fc.load_state_dict(twin.learner.teacher_head.state_dict())
    sources, taught = teacher(x), teacher(combined(x, groups[1], block))
    loss = soft_cross_entropy(taught, combined(rows, groups[1], block_shares))
    near = nearness(taught, sources, groups[1], block_shares)
    torch.testing.assert_close(mixed.extra["block"], -0.3 * loss + 0.7 * near)


@pytest.mark.parametrize("name", ["automix", "adautomix"])
def test_each_head_is_trained_by_its_own_images(name: str) -> None:
    two_heads = AdAutoMix("layer2", heads=2, classifier="fc", switch=0.0)
    mixer, net = attached(TWO_HEADS.get(name, two_heads))
    mixed = mixer.apply(net, images(6), labels(6), drawn(mixer))
    heads = [net.fc.weight, mixer.learner.head.weight]
    losses = [mixed.extra["clean"], mixed.criterion(mixed.logits, mixed.targets)]
    for loss, is_own in zip(losses, ((True, False), (False, True)), strict=True):
        found = torch.autograd.grad(loss, heads, allow_unused=True, retain_graph=True)
        assert tuple(g is not None for g in found) == is_own
    assert not mixer.learner.teacher_head.weight.requires_grad
    assert len(net.fc._forward_hooks) == 0


def test_the_second_head_of_the_teacher_follows_that_of_the_network() -> None:
    mixer, net = attached(dataclasses.replace(TWO_HEADS["automix"], ema=(0.25, 0.25)))
    scaled_heads(mixer)
    before = mixer.learner.teacher_head.weight.clone()
    mixer.apply(net, images(6), labels(6), drawn(mixer))
    expected = 0.25 * before + 0.75 * mixer.learner.head.weight.detach()
    torch.testing.assert_close(mixer.learner.teacher_head.weight.data, expected)


def test_two_equal_heads_have_the_losses_of_one() -> None:
    """The second head starts as a copy of the first."""
    found = []
    for mixer in (dataclasses.replace(TWO_HEADS["automix"], heads=n) for n in (1, 2)):
        own, net = attached(mixer)
        found.append(own.apply(net, images(6), labels(6), drawn(own)).loss())
    torch.testing.assert_close(*found)


# ---- pre-trained blocks --------------------------------------------------------------------------


def saved_run(mixer: Learned, folder: Path, **other: Tensor) -> str:
    """A folder with the checkpoint of a run, as far as a mixer reads it."""
    state = {f"mixer.{name}": value for name, value in mixer.module.state_dict().items()}
    save_file({**state, **other}, folder / "checkpoint.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", ["automix", "samix"])
def test_a_pretrained_block_makes_its_masks_and_never_changes(name: str, tmp_path: Path) -> None:
    trained, _ = attached(dataclasses.replace(METHODS[name], switch=0.0))
    trained.learner.train()
    for seed in range(3):  # batch statistics of teacher and block
        trained.apply(TinyNet(), images(6, seed), labels(6), drawn(trained, seed=seed))
    folder = saved_run(trained, tmp_path)
    trained.learner.eval()
    net = TinyNet(seed=5)
    frozen = dataclasses.replace(METHODS[name], switch=0.0, pretrained=folder)
    frozen = frozen.attach(net, images(6))
    frozen.module.train()
    before = {k: v.clone() for k, v in frozen.module.state_dict().items()}
    draw = drawn(frozen, 0.3)
    mixed = frozen.apply(net, images(6), labels(6), draw)
    mixed.loss().backward()
    assert set(mixed.extra) == {"clean"}
    assert all(not p.requires_grad for p in frozen.module.parameters())
    assert all(p.grad is not None for p in net.parameters())
    for key, value in frozen.module.state_dict().items():
        assert torch.equal(value, before[key])
    x, plain = images(6), TinyNet(seed=5)
    plain(x)  # the clean pass: batch statistics
    mask = trained.mask(maps(trained), draw.perm, draw.lam, (16, 16))
    torch.testing.assert_close(mixed.logits, plain(mask * x + (1 - mask) * x[draw.perm]))


def test_a_pretrained_block_serves_a_network_of_other_classes(tmp_path: Path) -> None:
    trained, _ = attached(METHODS["samix"])
    folder, net = saved_run(trained, tmp_path), TinyNet()
    net.fc = nn.Linear(net.fc.in_features, 3)
    frozen = SAMix("layer2", pretrained=folder).attach(net, images(6))
    mixed = frozen.apply(net, images(6), labels(6) % 3, drawn(frozen))
    assert mixed.logits.shape == (6, 3)


@pytest.mark.slow
@pytest.mark.unchecked_shapes
def test_a_run_gives_its_block_to_another_run(tmp_path: Path) -> None:
    few = am.Sets(shapes("train", 32), shapes("test", 16))
    small = {"net.width": 4, "train.epochs": 1, "train.batch_size": 16}

    def train(name: str, **changes: object) -> dict[str, Tensor]:
        recipe, folder = "cifar10-r18-samix-fast", tmp_path / name
        am.train(recipe, folder, sets=few, changes={**small, **changes}, quiet=True)
        return load_file(folder / "checkpoint.safetensors")

    first = train("first")
    second = train("second", **{"mixer.pretrained": str(tmp_path / "first")})
    for name, value in first.items():
        if name.startswith("mixer.block."):
            assert torch.equal(second[name], value), name
        elif name.startswith("mixer.teacher."):
            assert torch.equal(second[name.replace("teacher", "encoder")], value), name
    assert any(not torch.equal(first[n], second[n]) for n in first if n.startswith("model."))
    ledger = (tmp_path / "second" / "ledger.jsonl").read_text()
    assert "test_teacher" not in ledger  # the frozen network is not scored


@pytest.mark.unchecked_shapes
def test_what_is_no_pretrained_block_is_named(tmp_path: Path) -> None:
    def attach(mixer: Learned) -> None:
        mixer.attach(TinyNet(), images(6))

    with pytest.raises(ValueError, match="must be the folder of a run, got 'nowhere'"):
        attach(SAMix("layer2", pretrained="nowhere"))
    (tmp_path / "checkpoint.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="must be the folder of a run"):
        attach(SAMix("layer2", pretrained=tmp_path))
    save_file({"model.fc.weight": torch.zeros(1)}, tmp_path / "checkpoint.safetensors")
    with pytest.raises(ValueError, match="has no block that makes masks"):
        attach(SAMix("layer2", pretrained=tmp_path))
    folder = saved_run(attached(METHODS["automix"])[0], tmp_path)
    with pytest.raises(ValueError, match=r"another method or network \(key.bias differs\)"):
        attach(SAMix("layer2", pretrained=folder))
    folder = saved_run(SAMix("layer1").attach(TinyNet(), images(6)), tmp_path)
    with pytest.raises(ValueError, match=r"another method or network \(key.bias differs\)"):
        attach(SAMix("layer2", pretrained=folder))


# ---- global loss ---------------------------------------------------------------------------------


def test_the_global_loss_of_samix_by_a_loop_over_rows() -> None:
    """A softmax over one class of the pair and all others, weighted by the label, in float64."""
    plain, net = attached(SAMix("layer2"))
    draw, x, y = drawn(plain, 0.3), images(6), labels(6)
    local = plain.apply(net, x, y, draw).extra
    mixer, net = attached(SAMix("layer2", global_eta=0.7))
    found = mixer.apply(net, x, y, draw).extra
    twin, _ = attached(SAMix("layer2"))
    mask = twin.mask(maps(twin), draw.block_perm, draw.block_lam, (16, 16))
    logits = twin.learner.teacher(mask * x + (1 - mask) * x[draw.block_perm]).detach().double()
    total, lam = 0.0, float(draw.block_lam)
    for row, own, other in zip(logits, y, y[draw.block_perm], strict=True):
        for i, j, weight in ((int(own), int(other), lam), (int(other), int(own), 1 - lam)):
            if i != j:
                kept = row[[i, *(k for k in range(NUM_CLASSES) if k not in (i, j))]]
                total -= weight * float(kept.log_softmax(0)[0])
    expected = float(local["block"].detach()) + 0.7 * total / 6
    assert float(found["block"].detach()) == pytest.approx(expected, rel=1e-4)
    for name in ("clean", "mask"):
        torch.testing.assert_close(found[name], local[name])
