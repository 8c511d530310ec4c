"""What a mixer returns: logits against soft targets, and the loss of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from alignmixup.losses import Criterion, soft_cross_entropy


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """The result of a mixer: logits against soft targets, and any further losses.

    A case that trains no classifier (the reconstruction of ``AlignMixupAE``) has ``extra`` alone.

    Args:
        logits: Output of the network for the mixed batch, ``[b, k]``, or None.
        targets: Class shares of each mixed sample, ``[b, k]``, or None.
        extra: Further loss terms by name; ``loss`` adds all of them.
        criterion: Function of ``(logits, targets)`` that ``loss`` uses by default.
        smoothing: Share of the targets that label smoothing has spread evenly over all classes.

    Example:
        ```python
        mixed = am.AlignMixup("layer4")(model, x, y)
        loss = mixed.loss()

        weight = torch.linspace(0.5, 1.5, 10)  # class weights
        loss = mixed.loss(torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1))
        loss.backward()
        ```
    """

    logits: Float[Tensor, "b k"] | None
    targets: Float[Tensor, "b k"] | None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    criterion: Criterion = soft_cross_entropy
    smoothing: float = 0.0

    def loss(self, criterion: Criterion | None = None) -> Tensor:
        """Return the value to minimize: the classification loss, if any, plus all of ``extra``.

        Args:
            criterion: Your own function of ``(logits, targets)``, such as
                ``nn.CrossEntropyLoss(weight=...)``; defaults to that of the mixer.

        Returns:
            A scalar tensor with a gradient.

        Raises:
            ValueError: If there are neither logits nor extra losses, ``criterion`` is a class, or
                it returns no scalar and there are extra losses.
        """
        if isinstance(criterion, type) or not (criterion is None or callable(criterion)):
            raise ValueError(
                "criterion must be a function of (logits, targets), such as nn.CrossEntropyLoss(), "
                f"got {criterion!r}"
            )
        terms = list(self.extra.values())
        if self.logits is not None and self.targets is not None:
            terms.insert(0, (criterion or self.criterion)(self.logits, self.targets))
        if not terms:
            raise ValueError("this Mixed has neither logits nor extra losses: nothing to minimize")
        if len(terms) > 1 and terms[0].ndim:
            raise ValueError(
                f"criterion returned {list(terms[0].shape)}, to which {' and '.join(self.extra)} "
                "cannot be added: return a scalar, reduction='mean'"
            )
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def accuracy_under_mixing(self, top: int = 1) -> Tensor:
        """Return the share of the label mass that the predicted classes hit, mean over the batch.

        Without mixing it is the accuracy. A sample mixed of two classes in shares 0.7 and 0.3 gives
        0.7 or 0.3 to a prediction of one of them, so 1 cannot be reached with ``top=1``; it can
        with ``top=2``.

        Args:
            top: Number of classes with the largest logits that count as predicted.

        Returns:
            A scalar tensor in [0, 1] without a gradient.

        Raises:
            ValueError: If there are no logits, or fewer classes than ``top``.
        """
        if self.logits is None or self.targets is None:
            raise ValueError("this Mixed has no logits: there is no prediction to compare")
        num_classes = self.logits.shape[1]
        if not 1 <= top <= num_classes:
            raise ValueError(f"top must be from 1 to {num_classes}, the classes, got {top}")
        predicted = self.logits.detach().topk(top, dim=1).indices
        mass = self.targets.sum(1)
        hit = self.targets.gather(1, predicted).sum(1)
        # A multi-label sample without any class has no mass to hit.
        return torch.where(mass > 0, hit / mass, 0).sum() / (mass > 0).sum().clamp(min=1)
