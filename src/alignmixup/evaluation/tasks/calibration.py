"""Calibration: does a confidence of 80 % mean being right four times in five?

Confidence p_i = max softmax; M bins of equal width, bin l = (l/M, (l+1)/M], zero in the first.
B_m are the images of bin m, n all images, acc and conf the means over B_m; empty bins are ignored.

    ECE = sum_m |B_m|/n |acc - conf|                 MCE = max_m |acc - conf|
    OE  = sum_m |B_m|/n conf max(conf - acc, 0)      UE = sum_m |B_m|/n conf max(acc - conf, 0)
    NLL = -mean log p(y)                             Brier = mean sum_k (p_k - [k = y])^2

ECE after Guo et al. 2017, OE after Thulasidasan et al. 2019. ECE, MCE, OE and UE are in percent.
torchmetrics closes its bins on the left and has an extra bin for a confidence of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from alignmixup.contracts import Result, Skipped
from alignmixup.evaluation.forward import ALONE, Batches, Normalization, amp_name, collect_logits
from alignmixup.registry import register_task
from alignmixup.training.distributed import Team

TEMPERATURES = (0.01, 100.0)


@dataclass(frozen=True, slots=True)
class Reliability:
    """A reliability diagram: per bin the count and the mean confidence and accuracy in [0, 1].

    Plain numbers, as in the settings of a result: ``Reliability(**settings["reliability"])`` reads
    it back. An empty bin has count, confidence and accuracy 0.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    confidence: Sequence[float]
    accuracy: Sequence[float]

    @property
    def ece(self) -> float:
        """The expected calibration error, as a fraction."""
        return sum(share * abs(gap) for share, _, gap in self._filled())

    @property
    def mce(self) -> float:
        """The largest gap of any bin that has images, as a fraction."""
        return max(abs(gap) for _, _, gap in self._filled())

    @property
    def oe(self) -> float:
        """The over-confidence error, as a fraction."""
        return sum(share * conf * max(gap, 0.0) for share, conf, gap in self._filled())

    @property
    def ue(self) -> float:
        """The under-confidence error, as a fraction."""
        return sum(share * conf * max(-gap, 0.0) for share, conf, gap in self._filled())

    def _filled(self) -> list[tuple[float, float, float]]:
        """Return (share of all images, confidence, confidence - accuracy) of each filled bin."""
        n = sum(self.counts)
        bins = zip(self.counts, self.confidence, self.accuracy, strict=True)
        return [(count / n, conf, conf - acc) for count, conf, acc in bins if count]


@register_task(
    "calibration",
    about="expected calibration error, over-confidence, NLL, Brier score",
    units={"nll": "nats", "brier": ""},
    check=lambda o: _check(o["num_bins"]),
)
def calibration(
    model: nn.Module,
    batches: Batches,
    *,
    num_bins: int = 15,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return all measures of calibration; the settings of ECE have the diagram."""
    logits, labels = collect_logits(model, batches, normalized_by, amp_dtype, team)
    values, diagram = calibration_metrics(logits, labels, num_bins)
    settings = {"num_bins": num_bins, "num_images": len(labels), "amp_dtype": amp_name(amp_dtype)}
    return _results("calibration", values, settings, diagram)


@register_task(
    "temperature",
    about="calibration after temperature scaling",
    units={"nll": "nats", "brier": "", "temperature": ""},
    check=lambda o: _check(o["num_bins"], o["held_out"]),
)
def temperature_scaling(
    model: nn.Module,
    batches: Batches,
    *,
    held_out: float = 0.5,
    seed: int = 0,
    num_bins: int = 15,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Fit one temperature on a random share of the images and measure on the rest.

    ``held_out`` is the share for the fit, drawn by ``seed``. Metrics are ``temperature``, those of
    ``calibration`` with it, and with the suffix ``_before`` without it, on the same images.
    """
    _check(num_bins, held_out)
    logits, labels = collect_logits(model, batches, normalized_by, amp_dtype, team)
    n = len(labels)
    num_fit = round(held_out * n)
    if not 0 < num_fit < n:
        raise Skipped(
            f"held_out={held_out} of {n} images leaves {num_fit} to fit and {n - num_fit} to "
            "measure; both must have some: use more images"
        )
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=rng, device="cpu").to(labels.device)
    fit, rest = order[:num_fit], order[num_fit:]
    temperature = fit_temperature(logits[fit], labels[fit])
    before, _ = calibration_metrics(logits[rest], labels[rest], num_bins)
    scaled = logits[rest].double() / temperature
    after, diagram = calibration_metrics(scaled, labels[rest], num_bins)
    values = {"temperature": temperature, **after}
    values |= {f"{metric}_before": value for metric, value in before.items()}
    settings = {
        "num_bins": num_bins,
        "num_images": n - num_fit,
        "held_out": held_out,
        "seed": seed,
        "temperature": temperature,
        "amp_dtype": amp_name(amp_dtype),
    }
    return _results("temperature", values, settings, diagram)


def _check(num_bins: int, held_out: float = 0.5) -> None:
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be a share between 0 and 1, got {held_out}")


def _results(
    task: str, values: dict[str, float], settings: Mapping[str, object], diagram: Reliability
) -> list[Result]:
    extra = {"ece": {"reliability": asdict(diagram)}}
    return [Result(task, m, value, {**settings, **extra.get(m, {})}) for m, value in values.items()]


def calibration_metrics(
    logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"], num_bins: int = 15
) -> tuple[dict[str, float], Reliability]:
    """Return ece, oe, ue, mce in percent, nll in nats and the Brier score; and the diagram."""
    # In float64, so that a confidence does not round into the next bin. Not exp(log p), which
    # would move a confidence of exactly 1/2 off its edge.
    z = logits.double()
    p = z.softmax(dim=1)
    confidence, predicted = p.max(dim=1)
    diagram = reliability(confidence, predicted == labels, num_bins)
    own = p.gather(1, labels.unsqueeze(1)).squeeze(1)
    values = {
        "ece": 100 * diagram.ece,
        "oe": 100 * diagram.oe,
        "ue": 100 * diagram.ue,
        "mce": 100 * diagram.mce,
        "nll": float(F.cross_entropy(z, labels)),
        # sum_k (p_k - [k = y])^2 = sum_k p_k^2 - 2 p_y + 1, without a one-hot matrix.
        "brier": float((p.square().sum(dim=1) - 2 * own + 1).mean()),
    }
    return values, diagram


def reliability(
    confidence: Float[Tensor, " n"], correct: Tensor, num_bins: int = 15
) -> Reliability:
    """Sort confidences in [0, 1] into equal bins, closed on the right, and average each bin."""
    _check(num_bins)
    if not len(confidence) or len(confidence) != len(correct):
        raise ValueError(
            f"one confidence and one outcome per image are needed, "
            f"got {len(confidence)} and {len(correct)}"
        )
    # On the CPU, where a sum by bins has a fixed order, so that results are reproducible.
    confidence, correct = confidence.double().cpu(), correct.double().cpu()
    low, high = float(confidence.min()), float(confidence.max())
    if not (low >= 0 and high <= 1 + 1e-9):
        raise ValueError(f"confidences must lie in [0, 1], got [{low:.4g}, {high:.4g}]")
    edges = torch.arange(num_bins + 1, dtype=torch.float64, device="cpu") / num_bins
    # With the inner edges, a value on an edge is in the bin on its left, zero in the first and one
    # in the last.
    index = torch.bucketize(confidence, edges[1:-1])
    counts = torch.bincount(index, minlength=num_bins)
    filled = counts.clamp(min=1)
    return Reliability(
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        confidence=tuple((index.bincount(confidence, num_bins) / filled).tolist()),
        accuracy=tuple((index.bincount(correct, num_bins) / filled).tolist()),
    )


def fit_temperature(logits: Float[Tensor, "n k"], labels: Int[Tensor, " n"]) -> float:
    """Return the temperature T in [0.01, 100] at which logits / T have the least NLL.

    NLL is convex in 1/T with derivative mean(E_p[z] - z_y), which bisection in log T brings to
    zero. If the NLL has no minimum inside (all right: T -> 0; worse than chance: T -> inf), the
    bound is returned.
    """
    if not len(logits):
        raise ValueError("fitting a temperature needs at least one image, got none")
    z = logits.double()
    z = z - z.amax(dim=1, keepdim=True)
    own = z.gather(1, labels.unsqueeze(1)).squeeze(1)

    def slope(log_t: float) -> float:
        p = (z / math.exp(log_t)).softmax(dim=1)
        return float(((p * z).sum(dim=1) - own).mean())

    low, high = TEMPERATURES
    left, right = math.log(low), math.log(high)
    if slope(left) <= 0:
        return low
    if slope(right) >= 0:
        return high
    while right - left > 1e-10:
        middle = (left + right) / 2
        left, right = (middle, right) if slope(middle) > 0 else (left, middle)
    return math.exp((left + right) / 2)
