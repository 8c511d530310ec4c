"""The kinds of table the paper has: what each shows, and where the paper prints it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alignmixup.contracts import RecipeKey, Result
from alignmixup.report import paper

ACCURACIES: Mapping[str, str] = {
    "best": "the best test epoch",
    "last": "the last epoch",
    "median10": "the median of the last ten epochs",
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured quantity: its name in our results and in the paper's tables."""

    task: str
    metric: str  # of our results; {which} stands for best, last or median10
    printed: str = ""  # the paper's metric, if it prints this
    label: str | None = None  # shown in place of the paper's name
    digits: int = 2
    varies: bool = True  # from seed to seed

    def name(self) -> str:
        return paper.METRICS[self.printed].name if self.label is None else self.label

    def unit(self) -> str:
        """Return the paper's unit; what the paper does not print is in percent."""
        return paper.METRICS[self.printed].unit if self.printed else "%"

    def ours(self, value: float) -> float:
        """Turn our accuracy into the error that the paper shows."""
        return 100 - value if self.task == "accuracy" else value

    def published(self, key: RecipeKey, source: str) -> float | None:
        """Return the figure that the paper prints for this recipe, if any."""
        cell = paper.cell_beside(key, self.printed, source) if self.printed else None
        if cell is None:
            return None
        return cell.value if cell.top1_error is None else cell.top1_error


HUGE = 1e6
MORE_DIGITS = 3


def number(value: float, digits: int) -> str:
    """Return a value with its decimals; with more where it would read as 0 or 100 and is neither.

    A huge value, which no measure should have, is written in short.
    """
    if abs(value) >= HUGE:
        return f"{value:.3e}"
    texts = [f"{value:.{digits + more}f}" for more in range(MORE_DIGITS + 1)]
    return next((t for t in texts if float(t) not in (0, 100) or float(t) == value), texts[0])


# The title of each kind of table and what it shows.
KINDS: Mapping[str, tuple[str, tuple[Measure, ...]]] = {
    "accuracy": ("Top-1 error", (Measure("accuracy", "top1_{which}", "top1_error", label=""),)),
    "robustness": (
        "Top-1 error under attack",
        (
            Measure("fgsm", "top1_error", "fgsm_error", "FGSM"),
            Measure("pgd", "top1_error", "pgd_error", "PGD"),
            Measure("strong_attack", "top1_error", label="strong attack"),
        ),
    ),
    "ood": (
        "Out-of-distribution detection",
        (
            # The paper's detection accuracy; ODIN's, at the best threshold, is below.
            Measure("ood", "det_acc_half", "det_acc_half", "Det Acc at 0.5", digits=1),
            Measure("ood", "auroc", "auroc", digits=1),
            Measure("ood", "aupr_id", "aupr_id", digits=1),
            Measure("ood", "aupr_ood", "aupr_ood", digits=1),
            Measure("ood", "det_acc_best", label="Det Acc at the best threshold", digits=1),
            Measure("ood", "fpr95", label="FPR95", digits=1),
        ),
    ),
    "calibration": (
        "Calibration",
        (Measure("calibration", "ece", "ece"), Measure("calibration", "oe", "oe")),
    ),
    "localization": (
        "Weakly supervised localization",
        (
            Measure("localization", "top1_loc", "top1_loc", digits=1),
            Measure("localization", "maxboxacc_v2", "maxboxacc_v2", digits=1),
        ),
    ),
    "detection": ("Transfer to detection", (Measure("detection", "map", "map"),)),
    "cost": (
        "Cost of training",
        (
            Measure("cost", "params", "params", digits=1, varies=False),
            Measure("cost", "ms_per_batch", "ms_per_batch", "time a batch", digits=1),
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
