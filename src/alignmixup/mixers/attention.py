"""Shared by methods that ask a network where it looks: its maps, and its class token's attention.

A pass over the clean batch runs without gradient and in evaluation mode, so that running statistics
do not move. The attention of the class token is

    a = mean over heads of softmax(q_0 k' / sqrt(d)), without the prefix tokens

from the queries and keys of one block: the network's own, fused attention stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignmixup.contracts import fusible
from alignmixup.hooks import Peeked, evaluating, peek
from alignmixup.mixers.layouts import COUNT, channels_first, patch_tokens
from alignmixup.ops.blend import without_autocast
from alignmixup.wrappers import (
    attribute_around,
    find_layer,
    layer_names,
    plain_module,
    without_reducer,
)

# Attributes of networks and attention layers that rotate queries and keys or add to their products.
POSITIONS = ("rope", "rel_pos", "shared_rel_pos")

# ---- a pass over the clean batch -----------------------------------------------------------------


def clean_map(net: nn.Module, x: Tensor, layer: str, *, training: bool = False) -> Tensor:
    """Return the output of ``layer`` for clean images, without gradient, as a map [b, c, h, w]."""
    with torch.no_grad(), _beside(net, training) as module, peek(module, layer) as peeked:
        module(x)
    return as_map(net, layer, peeked.output, x)


def clean_attention(net: nn.Module, x: Tensor, layer: str) -> Float[Tensor, "b h w"]:
    """Return the class token's attention on clean images, without gradient."""
    with torch.no_grad(), _beside(net) as module, peek_attention(module, layer) as attention:
        module(x)
    return attention.on_grid(x)


@contextmanager
def _beside(net: nn.Module, training: bool = False) -> Iterator[nn.Module]:
    """Return the module to run beside the step, in evaluation mode unless ``training``.

    Without DistributedDataParallel, whose buffers are synchronized in the step itself.
    """
    module = without_reducer(net)
    cache = torch.is_autocast_cache_enabled()
    # Autocast keeps the weights that it casts, up to torch 2.9 (at least) also those cast without
    # gradient: the parameters of the step that follows would get none.
    torch.set_autocast_cache_enabled(False)
    try:
        with nullcontext() if training else evaluating(module):
            yield module
    finally:
        torch.set_autocast_cache_enabled(cache)


def as_map(net: nn.Module, layer: str, output: Tensor, x: Tensor) -> Float[Tensor, "b c h w"]:
    """Return maps with channels first, and tokens [b, n, c] without prefix tokens on their grid."""
    if output.ndim == 4:
        return channels_first(net, layer, output, x)
    if output.ndim != 3:
        raise ValueError(
            f"layer {layer!r} returns {list(output.shape)}; maps [b, c, h, w] or tokens [b, n, c] "
            "are needed: choose a layer that returns one of these"
        )
    patches = patch_tokens(net, layer, output)
    return patches.transpose(1, 2).reshape(len(x), -1, *_grid(patches.shape[1], x))


def _grid(num_patches: int, x: Tensor) -> tuple[int, int]:
    """Return rows and columns of square patches that cover the images."""
    height, width = x.shape[2:]
    rows = round((num_patches * height / width) ** 0.5)
    if not rows or num_patches % rows:
        raise ValueError(
            f"{num_patches} patches are no grid on images of {height} x {width} pixels; choose a "
            f"layer whose tokens are square patches, or {COUNT}"
        )
    return rows, num_patches // rows


def find_classifier(net: nn.Module, classifier: str, layer: str, output: Tensor) -> nn.Linear:
    """Return the linear layer after the pooling of ``layer``, which returned ``output``."""
    linear = find_linear(net, classifier)
    if output.ndim != 4 or output.shape[1] != linear.in_features:
        raise ValueError(
            f"layer {layer!r} returns {list(output.shape)}, but classifier "
            f"{classifier!r} reads {linear.in_features} features: choose the layer "
            "[b, c, h, w] that is pooled before it"
        )
    return linear


def find_linear(net: nn.Module, classifier: str) -> nn.Linear:
    """Return the linear layer that returns the logits."""
    try:
        linear, _ = find_layer(net, classifier)
    except ValueError as error:
        modules = plain_module(net).named_modules()
        linears = [n.replace("_orig_mod.", "") for n, m in modules if isinstance(m, nn.Linear)]
        hint = f", perhaps classifier={linears[-1]!r}" if linears else ""
        raise ValueError(
            f"set classifier= to the linear layer that returns the logits{hint}: {error}"
        ) from None
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"classifier {classifier!r} is a {type(linear).__name__}; name the linear "
            "layer that returns the logits"
        )
    return linear


# ---- attention of the class token ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClassAttention:
    """Queries and keys of one forward pass, and the number of tokens before the patches.

    ``heads`` is the number of heads, as the attention layer states it, or None.
    """

    queries: Peeked
    keys: Peeked
    prefix: int
    heads: int | None

    def on_grid(self, x: Tensor) -> Float[Tensor, "b h w"]:
        """Return the class token's attention to each patch of the images; no gradient flows."""
        q, k = self.queries.output, self.keys.output
        is_known = q.ndim == 4 and k.shape == q.shape and q.shape[2] > self.prefix
        if not is_known or self.heads not in (None, q.shape[1]):
            raise ValueError(
                f"queries {list(q.shape)} and keys {list(k.shape)} must be "
                f"[b, {self.heads or 'heads'}, tokens, d] with {self.prefix} tokens before the "
                "patches: name another attention layer, or use CutMix"
            )
        attention = class_attention(q, k, self.prefix)
        return attention.view(len(x), *_grid(attention.shape[1], x))


@contextmanager
def peek_attention(net: nn.Module, layer: str) -> Iterator[ClassAttention]:
    """Hand out the class token's attention at ``layer`` in one forward pass, which is unchanged."""
    layer, prefix = find_attention(net, layer)
    q_norm, k_norm = attention_layers(net, layer)
    heads = getattr(find_layer(net, layer)[0], "num_heads", None)
    with (
        peek(net, q_norm, has_gradient=False) as queries,
        peek(net, k_norm, has_gradient=False) as keys,
    ):
        yield ClassAttention(queries, keys, prefix, heads)


def attention_layers(net: nn.Module, layer: str) -> tuple[str, str]:
    """Return the two layers that ``peek_attention`` reads."""
    layer, _ = find_attention(net, layer)
    return f"{layer}.q_norm", f"{layer}.k_norm"


def find_attention(net: nn.Module, layer: str) -> tuple[str, int]:
    """Return the name of an attention layer and its number of prefix tokens.

    ``layer`` is a name, or "" for the last layer with ``q_norm`` and ``k_norm``, as timm calls
    them.
    """
    kind = type(plain_module(net)).__name__
    if not layer:
        names = [name.replace("_orig_mod.", "") for name, _ in plain_module(net).named_modules()]
        found = [n.removesuffix(".q_norm") for n in names if n.endswith(".q_norm")]
        layer = next((n for n in reversed(found) if f"{n}.k_norm" in names), "")
    if not {f"{layer}.q_norm", f"{layer}.k_norm"} <= set(layer_names(net)):
        raise ValueError(
            f"{layer or kind} has no q_norm and k_norm, whose outputs are the queries and keys of "
            "an attention: use a vision transformer with timm's names, such as "
            "attention='blocks.11.attn'"
        )
    if attribute_around(net, layer, "cls_token") is None:
        raise ValueError(
            f"{kind} has no class token (cls_token), whose attention is needed: use a network that "
            "has one, or CutMix"
        )
    for name in POSITIONS:
        if attribute_around(net, f"{layer}.q_norm", name) is not None:
            raise ValueError(
                f"{kind} adds positions after q_norm and k_norm ({name}), so its attention cannot "
                "be read there: use a network with position embeddings, or CutMix"
            )
    prefix: int | None = attribute_around(net, layer, "num_prefix_tokens")
    return layer, 1 if prefix is None else prefix


@fusible
def class_attention(
    queries: Float[Tensor, "b heads n d"], keys: Float[Tensor, "b heads n d"], prefix: int
) -> Float[Tensor, "b m"]:
    """Return the first token's attention to all but the ``prefix`` tokens, mean over heads."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    with without_autocast(queries):
        q, k = queries[:, :, 0].to(dtype), keys.to(dtype)
        scores = torch.einsum("bhd,bhnd->bhn", q, k) * q.shape[-1] ** -0.5
    attention: Tensor = scores.softmax(-1).mean(1)[:, prefix:]
    return attention


# ---- grids ---------------------------------------------------------------------------------------


def normalized(maps: Float[Tensor, "b h w"]) -> Float[Tensor, "b h w"]:
    """Return non-negative maps over their sums; uniform where a map is zero."""
    total = maps.sum((1, 2), keepdim=True)
    return torch.where(total > 0, maps / total, 1 / maps[0].numel())


def nearest(mask: Bool[Tensor, "*b n m"], size: tuple[int, int]) -> Bool[Tensor, "*b h w"]:
    """Resize a mask: a patch takes its top left pixel, a pixel the cell that it lies in."""
    rows, columns = (
        torch.arange(n, device=mask.device) * side // n
        for n, side in zip(size, mask.shape[-2:], strict=True)
    )
    return mask[..., rows.unsqueeze(1), columns]
