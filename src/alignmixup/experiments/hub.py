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
    from huggingface_hub import PyTorchModelHubMixin
except ImportError:
    raise ImportError("huggingface_hub is missing: pip install 'alignmixup[hub]'") from None


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

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images in [0, 1]."""
        logits: Tensor = self.model(images)
        return logits
