"""Tiny-ImageNet's official folder at small size, for tests."""

from __future__ import annotations

from PIL import Image

from alignmixup.datasets.tiny_imagenet import TinyLayout

__all__ = ["COLOURS", "LAYOUT", "WNIDS", "make_tiny", "save"]

LAYOUT = TinyLayout(num_classes=3, train_per_class=2, num_val=4)
WNIDS = ["n03", "n01", "n02"]  # wnids.txt is not sorted
COLOURS = {"n01": (200, 30, 30), "n02": (30, 200, 30), "n03": (30, 30, 200)}


def save(path, color, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (64, 64), color).save(path, quality=95)


def make_tiny(tmp_path):
    """Write the official folder at small size."""
    folder = tmp_path / "tiny-imagenet-200"
    for wnid in WNIDS:
        rows = []
        for i in range(2):
            path = folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG"
            save(
                path,
                77 if (wnid, i) == ("n02", 1) else COLOURS[wnid],
                "L" if (wnid, i) == ("n02", 1) else "RGB",
            )
            rows.append(f"{wnid}_{i}.JPEG\t{i}\t10\t63\t{20 + i}\n")
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("".join(rows))
    lines = []
    for i, wnid in enumerate(["n02", "n03", "n01", "n02"]):
        save(folder / "val" / "images" / f"val_{i}.JPEG", COLOURS[wnid])
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t{i}\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (folder / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius auratus\nn02\ttoad\n")
