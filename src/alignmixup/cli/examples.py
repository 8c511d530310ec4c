"""Examples of each command, as its help shows them; a test reads every one as a command line."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "doctor": ("doctor", "doctor --json > machine.json   # for a bug report"),
    "demo": ("demo", "demo --out /tmp/demo --epochs 2"),
    "recipes": (
        "recipes                       # the tables of the paper",
        "recipes cifar10-r18           # recipes with this in their name",
        "recipes cifar10 --table adv   # how to measure a table, on CIFAR-10",
    ),
    "train": (
        "train cifar10-r18-alignmixup-fast",
        "train cifar10-r18-alignmixup-fast --dataset shapes --limit 500 \\\n"
        "      --train.epochs 2 --net.width 8              # a trial, without data",
        "train cifar10-r18-cutmix-fast --dataset folder:pets@64 --out pets",
        "train cifar10-r18-cutmix-fast --dataset folder:pets@64 --out pets \\\n"
        "      --train.epochs 400 --extend                 # more epochs after the end",
    ),
    "sweep": (
        "sweep 'cifar10-r18-*-fast' --workers 3 --minutes 60",
        "sweep 'cifar10-r18-*' --launcher slurm --workers 20 \\\n"
        "      --launch slurm_partition=gpu timeout_min=600",
        "sweep cifar10-r18-input cifar10-r18-cutmix --seeds 0 1 2 \\\n      --train.epochs 300",
    ),
    "evaluate": (
        "evaluate runs/RUN --tasks all",
        "evaluate runs/RUN --tasks pgd --set pgd.num_steps=40 pgd.eps=8/255",
        "evaluate runs/RUN --tasks ood --ood lsun-crop --ood folder:textures",
        "evaluate runs/RUN --dataset folder:more-pets@64",
    ),
    "predict": (
        "predict runs/RUN photo.jpg",
        "predict runs/RUN photos --top 5 --json > predictions.jsonl",
    ),
    "export": ("export runs/RUN net.safetensors", "export runs/RUN net.pt2 --format torch-export"),
    "detect": (
        "detect runs/RUN --data voc --root datasets",
        "detect runs/RUN --data coco --limit 100 --epochs 1   # a trial",
    ),
    "report": (
        "report runs",
        "report runs/a runs/b --out tables",
        "report results --accuracy best",
    ),
    "figure": ("figure methods", "figure correspondences --run runs/RUN --out figures"),
    "decoder": ("decoder runs/RUN", "decoder runs/RUN --layer layer3 --epochs 10"),
    "adain": ("adain cifar10 --out adain.safetensors", "adain folder:pets@64 --out a.safetensors"),
    "data list": ("data list",),
    "data check": ("data check cifar10", "data check tiny --data /data"),
    "data fetch": ("data fetch cifar10", "data fetch cifar100 --data /data"),
    "data shard": ("data shard imagenet /data/imagenet-shards --data /data",),
    "bench": (
        "bench",
        "bench 'cifar100-r18-*-fast' --repeats 20 --out bench.csv",
        "bench --device cpu --batch-size 8 --repeats 3",
    ),
}
