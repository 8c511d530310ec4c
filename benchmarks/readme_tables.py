"""The tables of measured results in README.md and docs/findings.md, made from ``results/``.

    PYTHONPATH=src python benchmarks/readme_tables.py    # rewrite the tables between their markers

A table stands between ``<!-- results: NAME -->`` and ``<!-- end of results -->``. ``PAGES`` says
which results each shows: a new run appears once its lines are in ``results/``
(``benchmarks/record.py``) and this is run again. A test fails while a page differs from what this
makes.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alignmixup.contracts import Result
from alignmixup.report import paper
from alignmixup.report.reading import read_results
from alignmixup.report.statistics import compare

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.S)
METHODS = {
    **paper.METHODS,
    "baseline": "no mixing",
    "input": "input mixup",
    "manifold": "manifold mixup",
    "resizemix": "ResizeMix",
    "fmix": "FMix",
    "oneof": "OneOf: input mixup or CutMix, label smoothing",
    "adautomix": "AdAutoMix",
}
OWN = {"style_weights"}  # what each run has of its own
LEAST_EPOCHS = 10  # scored on a plateau, else it has no row


@dataclass(frozen=True)
class Quantity:
    """A column: a task, a metric, and the settings that its results must have."""

    header: str
    task: str
    metric: str
    digits: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)

    def is_of(self, result: Result) -> bool:
        return (result.task, result.metric) == (self.task, self.metric) and has(
            result.settings, self.settings
        )


TOP1 = Quantity("top-1", "accuracy", "top1_median10", 2)
FGSM = Quantity("FGSM error", "fgsm", "top1_error", settings={"eps": 8 / 255})
ECE = Quantity("ECE", "calibration", "ece", settings={"num_bins": 15})
AUROC = Quantity("AuROC", "ood", "auroc", settings={"source": "uniform", "score": "max_softmax"})


@dataclass(frozen=True)
class Methods:
    """One row per method, for runs of one variant of the recipes and one length.

    ``trained`` are settings of training that the results must have recorded. ``intro`` stands above
    the table, where README.md itself has no sentence for it yet.
    """

    data: str
    network: str
    variant: str
    epochs: int
    columns: tuple[Quantity, ...] = (TOP1, FGSM, ECE, AUROC)
    trained: Mapping[str, object] = field(default_factory=dict)
    intro: str = ""

    def render(self, results: Path) -> list[str]:
        """Return the lines of the table; none where nothing has been measured."""
        chosen = [r for r in read_results([results]) if self._has(r)]
        found = {r.key.method for r in chosen if r.key is not None and TOP1.is_of(r)}
        if not found:
            return []
        rows = [
            [METHODS[method], *(_cell(_by_seed(chosen, method, q), q.digits) for q in self.columns)]
            for method in METHODS
            if method in found
        ]
        shown = [r for r in chosen if any(quantity.is_of(r) for quantity in self.columns)]
        table = _pipes(["method", *(q.header for q in self.columns)], rows)
        intro = [self.intro, ""] if self.intro else []
        return [*intro, *table, "", _origin(shown, f"{self.epochs:,} epochs")]

    def _has(self, result: Result) -> bool:
        key = result.key
        if key is None or result.epoch != self.epochs:
            return False
        place = (key.data, key.network, key.variant)
        return place == (self.data, self.network, self.variant) and has(
            result.trained, self.trained
        )


@dataclass(frozen=True)
class Plateaus:
    """Mean accuracy over stretches of epochs, the authors' log beside our curves.

    Both are averaged over the epochs that we scored. A stretch that is not at its end yet is cut at
    our last epoch. ``curve`` names files in ``results/curves`` with ``{seed}`` in them.
    """

    log: str
    curve: str
    spans: tuple[tuple[int, int], ...]
    data: str
    network: str
    method: str
    variant: str

    def render(self, results: Path) -> list[str]:
        """Return the lines of the table; none where there is no curve."""
        log = _read_curve(results / "curves" / self.log, "top1")
        curves = {}
        for path in sorted((results / "curves").glob(self.curve.format(seed="*"))):
            start, end = self.curve.split("{seed}")
            seed = int(path.name[len(start) : -len(end)])
            curves[seed] = [_read_curve(path, name) for name in ("top1", "lr")]
        if not curves:
            return []
        last = {seed: max(rates) for seed, (_, rates) in curves.items()}
        rows, rate = [], 0.0
        for first, end in self.spans:
            end = min(end, max(last.values()))
            tops = {s: top for s, (top, _) in curves.items() if last[s] >= end}
            epochs = [e for e in range(first, end + 1) if all(e in top for top in tops.values())]
            if len(epochs) < LEAST_EPOCHS:
                continue
            now = next(iter(curves.values()))[1][first]
            what = f", learning rate {now:g}" if now != rate else ""
            rate = now
            ours = {s: statistics.fmean(top[e] for e in epochs) for s, top in tops.items()}
            theirs = statistics.fmean(log[e] for e in epochs)
            rows.append([f"{first:,} to {end:,}{what}", f"{theirs:.2f}", _cell(ours, 2)])
        length = f"{max(last.values()):,} of {max(log):,} epochs"
        ends = [r for r in read_results([results]) if self._has(r, last)]
        return [*_pipes(["epochs", "authors' log", "ours"], rows), "", _origin(ends, length)]

    def _has(self, result: Result, last: Mapping[int, int]) -> bool:
        """Whether it is the accuracy at the end of one of the curves."""
        key = result.key
        if key is None or result.seed is None or result.metric != "top1_last":
            return False
        place = (key.data, key.network, key.method, key.variant)
        is_ours = place == (self.data, self.network, self.method, self.variant)
        return is_ours and last.get(result.seed) == result.epoch


@dataclass(frozen=True)
class Losses:
    """Mean training loss over stretches of epochs, the authors' log beside one of our curves.

    The standard error of the difference takes the epochs for independent samples.
    """

    log: str
    curve: str
    spans: tuple[tuple[int, int], ...]

    def render(self, results: Path) -> list[str]:
        """Return the lines of the table."""
        curves = [_read_curve(results / "curves" / name, "loss") for name in (self.log, self.curve)]
        rows = []
        for first, end in self.spans:
            epochs = range(first, min(end, *map(max, curves)) + 1)
            if len(epochs) < LEAST_EPOCHS:
                continue
            (theirs, error), (ours, own_error) = (
                (statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5)
                for values in ([curve[epoch] for epoch in epochs] for curve in curves)
            )
            cells = [f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.4f}"]
            rows.append(
                [f"{first:,} to {epochs[-1]:,}", *cells, f"{math.hypot(error, own_error):.4f}"]
            )
        return _pipes(["epochs", "authors' log", "ours", "difference", "standard error"], rows)


@dataclass(frozen=True)
class Spread:
    """How much the epochs of a run differ after the last fall of the rate, and what its best adds.

    ``runs`` are a label, a file in ``results/curves``, and the first epoch that counts.
    """

    runs: tuple[tuple[str, str, int], ...]

    def render(self, results: Path) -> list[str]:
        """Return the lines of the table."""
        rows = []
        for label, name, first in self.runs:
            top1 = _read_curve(results / "curves" / name, "top1")
            late = [value for epoch, value in top1.items() if epoch >= first]
            mean, best = statistics.fmean(late), max(top1.values())
            numbers = (f"{mean:.2f}", f"{statistics.pstdev(late):.2f}", f"{best:.2f}")
            rows.append([label, str(len(late)), *numbers, f"+{best - mean:.2f}"])
        return _pipes(["run", "epochs", "mean", "deviation", "best epoch", "best over mean"], rows)


@dataclass(frozen=True)
class Arm:
    """A row of a study: a network and a variant, compared with the variant ``base``."""

    label: str
    network: str
    variant: str
    base: str = ""


@dataclass(frozen=True)
class Study:
    """Settings of one method side by side, each with its paired difference from another one."""

    data: str
    method: str
    epochs: int
    arms: tuple[Arm, ...]
    quantity: Quantity = Quantity("top-1, last epoch", "accuracy", "top1_last", 2)

    def render(self, results: Path) -> list[str]:
        """Return the lines of the table; none where nothing has been measured."""
        chosen = [
            r
            for r in read_results([results])
            if r.key is not None
            and (r.key.data, r.key.method, r.epoch) == (self.data, self.method, self.epochs)
            and self.quantity.is_of(r)
        ]
        rows, shown = [], []
        for arm in self.arms:
            own, base = (
                [r for r in chosen if (r.key.network, r.key.variant) == (arm.network, variant)]  # type: ignore[union-attr]
                for variant in (arm.variant, arm.base)
            )
            values = _by_seed(own, self.method, self.quantity)
            made = compare(values, _by_seed(base, self.method, self.quantity))
            cells = [f"{made.difference:+.2f}", made.interval()] if made else ["-", "-"]
            if values:
                rows.append([arm.label, _cell(values, self.quantity.digits), *cells])
                shown += own
        if not rows:
            return []
        header = ["", self.quantity.header, "difference from unaligned", "95 % interval"]
        return [*_pipes(header, rows), "", _origin(shown, f"{self.epochs:,} epochs")]


@dataclass(frozen=True)
class Statistics:
    """Scores with the statistics of batch norm estimated anew, over several networks.

    Of each network the mean over the draws; ``ways`` are kinds of statistics and their labels.
    """

    data: str
    epochs: int
    variants: tuple[str, ...]
    ways: Mapping[str, str]
    metrics: Mapping[str, str]

    def render(self, results: Path) -> list[str]:
        """Return the lines of the table; none where nothing has been measured."""
        chosen = [
            r
            for r in read_results([results])
            if r.key is not None
            and r.task == "batch_statistics"
            and (r.key.data, r.epoch) == (self.data, self.epochs)
            and r.key.variant in self.variants
        ]
        if not chosen:
            return []
        rows = []
        for way, label in self.ways.items():
            cells = []
            for metric in self.metrics.values():
                draws: dict[object, list[float]] = {}
                for r in chosen:
                    if (r.metric, r.settings["statistics"]) == (metric, way):
                        draws.setdefault((r.key, r.seed), []).append(r.value)
                means = [statistics.fmean(values) for values in draws.values()]
                least, most = f"{min(means):.2f}", f"{max(means):.2f}"
                cells.append(f"{statistics.fmean(means):.2f} ({least} to {most})")
            rows.append([label, *cells])
        networks = len({(r.key, r.seed) for r in chosen})
        length = f"{networks} networks, {self.epochs:,} epochs"
        table = _pipes(["statistics of", *self.metrics], rows)
        return [*table, "", _origin(chosen, length).partition("; ")[0].removesuffix(".*") + ".*"]


def has(values: Mapping[str, object], wanted: Mapping[str, object]) -> bool:
    """Whether ``values`` has all that is wanted."""
    return all(values.get(name) == value for name, value in wanted.items())


Table = Methods | Plateaus | Losses | Spread | Study | Statistics
README: Mapping[str, Table] = {
    **{
        f"plateaus-{data}": Plateaus(
            log=f"authors-{data}-r18.csv",
            curve=data + "-r18-alignmixup-released-seed{seed}.csv",
            spans=((301, 500), (521, 600), (801, 1000), (1021, 1500), (1521, 2000)),
            data=data,
            network="r18",
            method="alignmixup",
            variant="released",
        )
        for data in ("cifar100", "cifar10")
    },
    "cifar10-300": Methods("cifar10", "r18", "fast", 300, trained={"net.block": "standard"}),
    "cifar100-300": Methods(
        "cifar100",
        "r18",
        "300",
        300,
        intro="CIFAR-100, PreActResNet-18 with the authors' block and optimizer, 300 epochs (%):",
    ),
    "cifar100-200": Methods(
        "cifar100",
        "r18",
        "fast",
        200,
        columns=(TOP1, FGSM, ECE),
        intro="CIFAR-100, PreActResNet-18 with the authors' block, cosine schedule (%):",
    ),
}


SPREAD = (
    *(
        (f"authors' log, {label}", f"authors-{name}.csv", first)
        for label, name, first in (
            ("CIFAR-10, R-18", "cifar10-r18", 1521),
            ("CIFAR-10, WRN16-8", "cifar10-wrn16-8", 1521),
            ("CIFAR-100, R-18", "cifar100-r18", 1521),
            ("CIFAR-100, WRN16-8", "cifar100-wrn16-8", 1521),
            ("Tiny-ImageNet, R-18", "tiny-r18", 921),
        )
    ),
    ("ours, CIFAR-100, R-18", "cifar100-r18-alignmixup-released-seed0.csv", 1521),
    *(
        (f"ours, 300 epochs, {METHODS[method]}", f"cifar100-r18-{method}-300-seed0.csv", 241)
        for method in ("baseline", "input", "cutmix", "manifold", "alignmixup")
    ),
)
LONG_STUDY = (
    Arm("pooled head, unaligned", "r18", "study-unaligned"),
    Arm("pooled head, released order", "r18", "study-released", "study-unaligned"),
    Arm("`layer3`, unaligned", "r18", "study-layer3-unaligned"),
    Arm("`layer3`, exact", "r18", "study-layer3-exact", "study-layer3-unaligned"),
)
CLEAN = Quantity(
    "top-1, clean statistics",
    "batch_statistics",
    "top1",
    2,
    settings={"statistics": "without mixing", "draw": 0},
)
FINDINGS: Mapping[str, Table] = {
    **{
        f"losses-{data}": Losses(
            log=f"authors-{data}-r18.csv",
            curve=f"{data}-r18-alignmixup-released-seed0.csv",
            spans=(
                (11, 100),
                (101, 300),
                (301, 500),
                (521, 600),
                (601, 1000),
                (1021, 1500),
                (1521, 2000),
            ),
        )
        for data in ("cifar100", "cifar10")
    },
    "best-epoch": Spread(SPREAD),
    "alignment-study-200": Study("cifar100", "alignmixup", 200, LONG_STUDY),
    "alignment-study-200-clean": Study("cifar100", "alignmixup", 200, LONG_STUDY, CLEAN),
    "batch-statistics": Statistics(
        "cifar100",
        200,
        ("study-unaligned", "study-released"),
        {
            "as saved": "the run, as saved",
            "drawn again": "the mixer's draws, again",
            "input alone": "mixed images alone",
            "without mixing": "clean images",
        },
        {"top-1 (%)": "top1", "ECE (%)": "ece"},
    ),
    "alignment-study": Study(
        "cifar100",
        "alignmixup",
        35,
        (
            Arm("pooled head, unaligned", "r18", "study-unaligned"),
            Arm("pooled head, exact: the same logits", "r18", "study-exact", "study-unaligned"),
            Arm("pooled head, released order", "r18", "study-released", "study-unaligned"),
            Arm("the same, 1,000 iterations", "r18", "study-converged", "study-unaligned"),
            Arm("flattened head, unaligned", "r18-flatten", "study-unaligned"),
            Arm("flattened head, exact", "r18-flatten", "study-exact", "study-unaligned"),
            Arm("`layer3`, unaligned", "r18", "study-layer3-unaligned"),
            Arm("`layer3`, exact", "r18", "study-layer3-exact", "study-layer3-unaligned"),
        ),
    ),
}
PAGES = {"README.md": README, "docs/findings.md": FINDINGS}


def update(text: str, results: Path, tables: Mapping[str, Table]) -> str:
    """Return a page with the tables between its markers made anew."""
    unknown = {name for _, name, _ in MARKED.findall(text)} ^ tables.keys()
    if unknown:
        raise ValueError(f"a marker or a table is missing: {sorted(unknown)}")

    def made(found: re.Match[str]) -> str:
        lines = tables[found[2]].render(results)
        body = "\n" + "\n".join(lines) + "\n\n" if lines else ""
        return f"{found[1]}{body}{found[3]}"

    return MARKED.sub(made, text)


def _by_seed(results: Iterable[Result], method: str, quantity: Quantity) -> dict[int, float]:
    """Return the newest value of each seed; raise where the runs differ in a setting."""
    chosen = [
        r for r in results if r.key is not None and r.key.method == method and quantity.is_of(r)
    ]
    trained = {repr(sorted((k, v) for k, v in r.trained.items() if k not in OWN)) for r in chosen}
    if len(trained) > 1:
        raise ValueError(
            f"runs of {method} differ in their settings; narrow the table by trained=: {trained}"
        )
    return {r.seed or 0: r.value for r in sorted(chosen, key=lambda r: r.date)}


def _cell(values: Mapping[int, float], digits: int) -> str:
    if not values:
        return "-"
    text = f"{statistics.fmean(values.values()):.{digits}f}"
    if len(values) == 1:
        return text
    return f"{text} \u00b1 {statistics.stdev(values.values()):.{digits}f}, n={len(values)}"


def _pipes(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _origin(results: Sequence[Result], length: str) -> str:
    """Name seeds, length, hardware and commits in one line."""
    seeds = sorted({r.seed for r in results if r.seed is not None})
    what = f"one seed ({seeds[0]})" if len(seeds) == 1 else f"seeds {_join(map(str, seeds))}"
    hardware = _join(sorted({r.hardware for r in results}))
    commits = sorted({r.commit for r in results})
    spread = "; \u00b1 is the standard deviation over n seeds" if len(seeds) > 1 else ""
    many = "commits" if len(commits) > 1 else "commit"
    return f"*{length}, {what}, {hardware}, {many} {_join(commits)}{spread}.*"


def _join(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _read_curve(path: Path, name: str) -> dict[int, float]:
    """Return a column by epoch, without the epochs that have no value."""
    with path.open(encoding="utf-8", newline="") as file:
        return {int(row["epoch"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


def main() -> None:
    for name, tables in PAGES.items():
        page = ROOT / name
        page.write_text(update(page.read_text("utf-8"), ROOT / "results", tables), "utf-8")


if __name__ == "__main__":
    main()
