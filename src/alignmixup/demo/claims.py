"""What the demo's numbers say, in a table and in sentences that are computed from them.

A difference counts only if it exceeds two standard errors of a difference of two shares of n test
images, at most 2 sqrt(1 / (2 n)); less is called chance. Accuracy and error under attack are such
shares; the standard error of an AUROC is no larger, that of the ECE of the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from alignmixup.contracts import Result
from alignmixup.report.render import Table


@dataclass(frozen=True)
class Measure:
    """A number of the demo, in percent, and whether more of it is better."""

    name: str
    task: str
    metric: str
    is_more_better: bool
    about: str

    def verdict(self, value: float, baseline: float, least: float) -> str:
        """Return better, worse or chance."""
        gain = value - baseline if self.is_more_better else baseline - value
        if abs(gain) <= least:
            return "chance"
        return "better" if gain > 0 else "worse"


MEASURES = (
    Measure("test accuracy", "accuracy", "top1", True, "higher is better"),
    Measure("calibration error", "calibration", "ece", False, "ECE, lower is better"),
    Measure("error under attack", "fgsm", "top1_error", False, "FGSM, 1/255, lower is better"),
    Measure("unseen shapes detected", "ood", "auroc", True, "AUROC, 50 is guessing"),
)


WORDS = {"better": "better in", "worse": "worse in", "chance": "no different beyond chance in"}


def values(results: Sequence[Result]) -> dict[str, float]:
    """The newest value of each measure that is among the results of one run."""
    found = {}
    for result in sorted(results, key=lambda r: r.date):
        for measure in MEASURES:
            if (result.task, result.metric) == (measure.task, measure.metric):
                found[measure.name] = result.value
    return found


def margin(num_images: int) -> float:
    """The difference, in points, that two networks need on this many test images."""
    return 100 * 2 * math.sqrt(1 / (2 * num_images))


Scores = Mapping[str, Mapping[str, float]]


def table(scores: Scores, num_images: int) -> Table:
    """One row a method, one column a measure; each value beside what it says."""
    rows = []
    for method, found in scores.items():
        cells = [method]
        for measure in MEASURES:
            said = _verdict(scores, method, measure, num_images)
            value = f"{found[measure.name]:.1f}" if measure.name in found else "not measured"
            cells.append(f"{value} ({said})" if said else value)
        rows.append(tuple(cells))
    columns = ("method", *(f"{m.name} (%; {m.about})" for m in MEASURES))
    return Table("In percent, beside the network without mixing", columns, tuple(rows))


def least(num_images: int) -> str:
    """One sentence: what a difference must exceed to be called better or worse."""
    return (
        f"better, worse: by more than {margin(num_images):.1f} points, two standard errors of a "
        f"difference on {num_images} test images; chance: by less."
    )


def _verdict(scores: Scores, method: str, measure: Measure, num_images: int) -> str:
    """Better, worse, chance; empty for the baseline and for what was not measured."""
    baseline = next(iter(scores))
    have = [scores[name].get(measure.name) for name in (method, baseline)]
    if method == baseline or have[0] is None or have[1] is None:
        return ""
    return measure.verdict(have[0], have[1], margin(num_images))


def headline(scores: Scores, num_images: int) -> str:
    """One sentence on each method that mixes: where it was better, where worse."""
    said = []
    for method in list(scores)[1:]:
        verdicts = {m.name: _verdict(scores, method, m, num_images) for m in MEASURES}
        parts = [
            f"{words} {_listed([name for name, said in verdicts.items() if said == verdict])}"
            for verdict, words in WORDS.items()
            if verdict in verdicts.values()
        ]
        if parts:
            said.append(f"With {method} the network was {'; '.join(parts)}.")
    return " ".join(said) or "No network with mixing has been measured yet."


def confidences(results: Mapping[str, Sequence[Result]]) -> str:
    """One sentence: how far the mean confidence of each network is from its accuracy."""
    said = []
    for method, lines in results.items():
        found = [r for r in lines if (r.task, r.metric) == ("calibration", "ece")]
        if found:
            bins: Any = max(found, key=lambda r: r.date).settings["reliability"]
            sure, right = (
                100 * fmean(bins[name], weights=bins["counts"])
                for name in ("confidence", "accuracy")
            )
            said.append(f"{sure:.1f} and {right:.1f} % with {method}")
    return f"Mean confidence and accuracy are {_listed(said)}." if said else ""


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
