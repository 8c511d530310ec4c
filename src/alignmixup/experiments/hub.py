"""A network of ours on the Hugging Face Hub: ``pip install 'alignmixup[hub]'``.

run.export("my-model", format="hub")
model = HubModel.from_pretrained("my-model")        # or a name on the Hub
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from alignmixup.models import NetSpec, build

try:
    from huggingface_hub import ModelCard, PyTorchModelHubMixin
except ImportError:
    raise ImportError("huggingface_hub is missing: pip install 'alignmixup[hub]'") from None


CARD = """---
library_name: alignmixup
pipeline_tag: image-classification
tags:
- mixup
---
# {network}, {num_classes} classes

An image classifier trained with alignmixup. It takes RGB images of {size} x {size} pixels in [0, 1]
and normalizes them itself; it returns logits.

```python
from alignmixup.experiments.hub import HubModel  # pip install 'alignmixup[hub]'

model = HubModel.from_pretrained("FOLDER OR NAME ON THE HUB").eval()
print(model.class_names[int(model(images)[0].argmax())])
```

Classes: {classes}.
"""
MOST_CLASSES = 20  # that a card lists


class HubModel(nn.Module, PyTorchModelHubMixin, library_name="alignmixup", tags=["mixup"]):
    """A network with ``save_pretrained``, ``from_pretrained`` and ``push_to_hub``.

    Args:
        spec: The settings of the network, those of a ``NetSpec``.
        arguments: The arguments of ``alignmixup.models.build``: classes, normalization, size.
        class_names: The names of the classes, in the order of the logits.
    """

    def __init__(
        self, spec: Mapping[str, Any], arguments: Mapping[str, Any], class_names: Sequence[str]
    ) -> None:
        super().__init__()
        self.class_names = tuple(class_names)
        self.model = build(NetSpec(**spec), **arguments)
        self._facts = {"network": spec["name"], "size": arguments["image_size"]}

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the text that the Hub shows: what the network takes, its classes, how to load."""
        num_classes = len(self.class_names)
        classes = ", ".join(self.class_names[:MOST_CLASSES])
        if num_classes > MOST_CLASSES:
            classes += f" and {num_classes - MOST_CLASSES} more, in config.json"
        return ModelCard(CARD.format(**self._facts, num_classes=num_classes, classes=classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images in [0, 1]."""
        logits: Tensor = self.model(images)
        return logits
