"""The kinds of table the paper has: what each shows, and where the paper prints it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alignmixup.contracts import Result
from alignmixup.report import ablation, paper

__all__ = ["ACCURACIES", "KINDS", "Measure", "kinds_in"]

ACCURACIES: Mapping[str, str] = {
    "best": "the best test epoch",
    "last": "the last epoch",
    "median10": "the median of the last ten epochs",
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured quantity: where our results have it and where the paper prints it."""

    task: str
    metric: str  # of our results; {which} stands for best, last or median10
    tables: tuple[str, ...] = ()
    printed: str = ""  # the paper's metric, where it is not ours
    label: str | None = None  # the paper's, where it is not given
    digits: int = 2

    def name(self) -> str:
        metric = paper.METRICS.get(self.printed or self.metric)
        return self.label if self.label is not None else metric.name if metric else self.metric

    def unit(self) -> str:
        """The paper's unit of this metric; what it does not print is in percent."""
        metric = paper.METRICS.get(self.printed or self.metric)
        return metric.unit if metric else "%"

    def ours(self, value: float) -> float:
        """Turn our accuracy into the error that the paper shows."""
        return 100 - value if self.task == "accuracy" else value

    def published(
        self, data: str, network: str, method: str, source: str, suffix: str = ""
    ) -> float | None:
        """Return the printed figure of one cell from the first table that has it.

        ``suffix`` is the recipe's; a shorter schedule that the paper prints has its own table.
        """
        if data == ablation.FAMILY:
            return ablation.published(network, method) if self.task == "accuracy" else None
        is_short = self.task == "accuracy" and suffix in SHORTER
        for table in SHORTER[suffix] if is_short else self.tables:
            metric = "top1" if table == "levit" else self.printed or self.metric
            value = paper.published(
                table=table,
                data=data,
                network=network,
                method=method,
                metric=metric,
                source=source,
            )
            if value is not None:
                return 100 - value if metric == "top1" else value
        return None


_TOP1 = ("cls", "cls-imgnet", "levit")
# Accuracy after fewer epochs, by the suffix of the recipe: 300 on CIFAR-100, 100 on ImageNet.
SHORTER: Mapping[str, tuple[str, ...]] = {"300": ("cls-300",), "100": ("imgnet",)}
_OOD = ("ood", "ood_extra")

# The title of each kind of table and what it shows.
KINDS: Mapping[str, tuple[str, tuple[Measure, ...]]] = {
    "accuracy": (
        "Top-1 error",
        (Measure("accuracy", "top1_{which}", _TOP1, "top1_error", label=""),),
    ),
    "robustness": (
        "Top-1 error under attack",
        (
            Measure("fgsm", "top1_error", ("adv",), "fgsm_error", label="FGSM"),
            Measure("pgd", "top1_error", ("adv",), "pgd_error", label="PGD"),
            Measure("strong_attack", "top1_error", label="strong attack"),
        ),
    ),
    "ood": (
        "Out-of-distribution detection",
        (
            # The paper's detection accuracy; ODIN's, at the best threshold, is below.
            Measure("ood", "det_acc_half", _OOD, label="Det Acc at 0.5", digits=1),
            Measure("ood", "auroc", _OOD, digits=1),
            Measure("ood", "aupr_id", _OOD, digits=1),
            Measure("ood", "aupr_ood", _OOD, digits=1),
            Measure("ood", "det_acc_best", label="Det Acc at the best threshold", digits=1),
            Measure("ood", "fpr95", label="FPR95", digits=1),
        ),
    ),
    "calibration": (
        "Calibration",
        (
            Measure("calibration", "ece", ("supp-calibration",)),
            Measure("calibration", "oe", ("supp-calibration",)),
        ),
    ),
    "localization": (
        "Weakly supervised localisation",
        (
            Measure("localization", "top1_loc", ("wsol",), digits=1),
            Measure("localization", "maxboxacc_v2", ("wsol",), digits=1),
        ),
    ),
    "detection": ("Transfer to detection", (Measure("detection", "map", ("detection",)),)),
    "cost": (
        "Cost of training",
        (
            Measure("cost", "params", ("cls-imgnet",), label="parameters", digits=1),
            Measure("cost", "ms_per_batch", ("cls-imgnet",), label="time a batch", digits=1),
        ),
    ),
}


def kinds_in(results: Iterable[Result]) -> list[str]:
    """Return the kinds of table for which there is at least one result."""
    there = {(result.task, result.metric) for result in results}
    return [
        kind
        for kind, (_, measures) in KINDS.items()
        if any((m.task, m.metric.format(which=w)) in there for m in measures for w in ACCURACIES)
    ]
