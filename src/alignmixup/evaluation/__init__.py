"""Evaluations: ``evaluate``, and in ``tasks`` one file each that registers itself.

A task takes a model and batches of images and returns ``Result`` records; what tasks share is here.
"""

from alignmixup.contracts import Skipped
from alignmixup.evaluation.forward import Pixels, Predictions, collect_logits, predict
from alignmixup.hooks import evaluating

__all__ = ["Pixels", "Predictions", "Skipped", "collect_logits", "evaluating", "predict"]
