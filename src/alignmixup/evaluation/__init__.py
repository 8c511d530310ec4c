"""The evaluations, one file each: a model and batches of images in, ``Result`` records out.

A task is imported from its own file (``from alignmixup.evaluation.tasks.attack import pgd``), since
several files are named after their task. What all of them share is here.
"""

from alignmixup.evaluation.forward import Pixels, Predictions, collect_logits, evaluating, predict

__all__ = ["Pixels", "Predictions", "collect_logits", "evaluating", "predict"]
