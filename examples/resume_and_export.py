"""Train, resume after a stop, predict and export: python examples/resume_and_export.py

Stop it with Ctrl-C or kill it, and start it again: training resumes where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import alignmixup as am
from alignmixup.datasets import shapes


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Return the files of the exported network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/export"))
    parser.add_argument("--recipe", default="cifar10-r18-alignmixup-fast")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--num-train", type=int, default=5000)
    parser.add_argument("--width", type=int, default=8)
    args = parser.parse_args(argv)

    sets = am.Sets(shapes("train", args.num_train), shapes("test", 100))
    changes = {
        "net.width": args.width,
        "train.epochs": args.epochs,
        "train.batch_size": min(64, args.num_train),
        "train.lr": 0.02,
    }
    run = am.train(args.recipe, args.out, sets=sets, changes=changes)  # or resume
    print(run.summary)

    run = am.load_run(args.out, device="cpu")  # what another program would do
    done = run.predict(sets.test.images[:3])
    for name, shares in zip(done.class_names, done.probabilities, strict=True):
        print(f"{name}: {shares.max():.0%}")

    files = run.export(args.out / "net.safetensors")
    print("written:", *files)
    return files


if __name__ == "__main__":
    main()
