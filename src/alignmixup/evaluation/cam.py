"""Class activation maps (CAM, Zhou et al. 2016) of any network that pools and then classifies.

    z_k = b_k + sum_c W_kc mean_hw F_c(h, w)          CAM_k(h, w) = sum_c W_kc F_c(h, w)

F is the map before global average pooling, W and b the linear layer after it; so the mean of CAM_k
over positions plus b_k is the logit of class k. The pair is found by one forward pass: the linear
layer that returns the logits, and the layer whose mean over positions is its input. If a functional
ReLU is in between, F is the map after it. A network with its own kind of maps has a method

    class_maps(x, classes) -> (logits [b, k], maps [b, h, w])

for the given classes, or for the predicted ones if they are None, which is used instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.evaluation.forward import (
    Forward,
    Normalization,
    autocast,
    check_finite,
    check_labels,
)
from alignmixup.hooks import evaluating


@dataclass(frozen=True, slots=True)
class PoolHead:
    """The names of the layer before global average pooling and of the linear layer after it."""

    layer: str
    classifier: str


@dataclass(frozen=True, slots=True)
class ClassMaps:
    """The map of one class of each image, and the logits of the same forward pass."""

    logits: Float[Tensor, "b k"]
    maps: Float[Tensor, "b h w"]
    classes: Int[Tensor, " b"]


def class_maps(
    model: nn.Module,
    x: Float[Tensor, "b c i j"],
    classes: Int[Tensor, " b"] | None = None,
    *,
    head: PoolHead | None = None,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
) -> ClassMaps:
    """Return the map of ``classes``, or of the predicted classes, for pixels ``x`` in [0, 1].

    ``head`` names the layers; by default they are found. ``normalized_by`` is the mean and std by
    which images are normalized for the model, if it does not normalize them itself.
    """
    model = _plain(model)
    forward = Forward(model, normalized_by, amp_dtype)
    with evaluating(model), torch.no_grad():
        own = getattr(model, "class_maps", None)
        if own is not None and head is None:
            return _own_maps(own, forward, x, classes)
        head = head or find_pool_head(model, x, normalized_by=normalized_by)
        layer, linear = _named(model, head.layer), _linear(model, head.classifier)
        seen: dict[str, Tensor] = {}
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(_watch(layer, lambda out, _: seen.update(features=out)))
            hooks.enter_context(_watch(linear, lambda _, given: seen.update(pooled=given)))
            logits = forward(x)
        features = _checked_features(seen, head, linear)
        chosen = _chosen(logits, classes)
        maps = torch.einsum("bc,bchw->bhw", linear.weight[chosen].to(features), features)
    return ClassMaps(logits, maps, chosen)


def find_pool_head(
    model: nn.Module,
    x: Float[Tensor, "b c i j"],
    *,
    layer: str | None = None,
    classifier: str | None = None,
    normalized_by: Normalization | None = None,
) -> PoolHead:
    """Find the two layers by a forward pass of the first image; a given name is kept."""
    model = _plain(model)
    if layer is not None:
        _named(model, layer)
    if classifier is not None:
        _linear(model, classifier)
    if layer is not None and classifier is not None:
        return PoolHead(layer, classifier)
    trace = _Trace()
    with evaluating(model), torch.no_grad(), contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(_watch(module, trace.recorder(name, module)))
        logits = Forward(model, normalized_by)(x[:1])
    classifier = classifier or trace.find_classifier(logits)
    if classifier not in trace.linear_inputs:
        raise ValueError(f"layer {classifier!r} did not run in the forward pass: name another")
    return PoolHead(layer or trace.find_layer(classifier), classifier)


def _plain(model: nn.Module) -> nn.Module:
    # A compiled module ignores hooks that are added after its first call.
    return getattr(model, "_orig_mod", model)


@contextlib.contextmanager
def _watch(module: nn.Module, see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``see(output, input)`` whenever the module has run."""

    def hook(_: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        see(out, given[0] if given else None)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _Trace:
    """Record of a forward pass: the linear layers, and the mean of every map."""

    def __init__(self) -> None:
        self.linear_inputs: dict[str, Tensor] = {}
        self.linear_outputs: dict[str, Tensor] = {}
        self.means: dict[str, _Means] = {}
        self.pooled: list[Tensor] = []
        self.behind_pool: set[str] = set()

    def recorder(self, name: str, module: nn.Module) -> Callable[[Any, Any], None]:
        def record(out: Any, given: Any) -> None:
            if isinstance(module, nn.Linear) and isinstance(given, Tensor) and given.ndim == 2:
                self.linear_inputs[name], self.linear_outputs[name] = given, out
            elif isinstance(out, Tensor) and out.ndim == 4:
                if _pools(module, given, out):
                    self.pooled.append(out)
                    return
                if any(given is pooled for pooled in self.pooled):
                    self.behind_pool.add(name)
                # Now, because an in-place ReLU may change the map later.
                self.means.pop(name, None)
                self.means[name] = _Means.of(out)

        return record

    def find_classifier(self, logits: Tensor) -> str:
        for name, out in reversed(self.linear_outputs.items()):
            if out.shape == logits.shape and torch.equal(out.to(logits.dtype), logits):
                return name
        raise ValueError(
            "the model's logits are not the output of a linear layer on pooled features, so it "
            f"has no class activation maps; its linear layers: {sorted(self.linear_outputs)}. "
            "Name another with classifier=, or use a network that ends in a global pool head"
        )

    def find_layer(self, classifier: str) -> str:
        pooled = self.linear_inputs[classifier]
        fitting = [
            name
            for name, means in self.means.items()
            if means.give(pooled) or means.give(pooled, after_relu=True)
        ]
        for name in reversed(fitting):
            if not self.means[name].is_one:
                return name
        if fitting and fitting[-1] in self.behind_pool:
            raise ValueError(
                f"the model has no pooling head: {fitting[-1]!r} changes the pooled features "
                f"before {classifier!r}, so its logits are not a mean over positions"
            )
        if fitting:
            raise ValueError(
                f"the map before the pooling is {fitting[-1]!r}, of 1 x 1: there is nothing to "
                "localize in it; use larger images or a network with smaller strides"
            )
        raise ValueError(
            f"the model has no pooling head: {classifier!r} does not read the mean over positions "
            "of any layer's map (a head on a flattened map, on tokens or on a maximum has no class "
            "activation maps); if a function rather than a layer makes that map, make it a module"
        )


@dataclass(frozen=True, slots=True)
class _Means:
    """The means over positions of a map, and of the map after a ReLU."""

    plain: Float[Tensor, "b c"]
    after_relu: Float[Tensor, "b c"]
    is_half: bool
    is_one: bool  # a map of one position

    @classmethod
    def of(cls, features: Float[Tensor, "b c h w"]) -> _Means:
        wide = _wide(features)
        is_half, is_one = wide.dtype != features.dtype, features[0, 0].numel() == 1
        return cls(wide.mean(dim=(2, 3)), wide.relu().mean(dim=(2, 3)), is_half, is_one)

    def give(self, pooled: Tensor, *, after_relu: bool = False) -> bool:
        """Return whether these are the pooled features, within the precision of their dtypes."""
        mean, found = self.after_relu if after_relu else self.plain, _wide(pooled)
        if mean.shape != found.shape:
            return False
        tolerance = 2e-2 if self.is_half or found.dtype != pooled.dtype else 1e-4
        gap, size = (mean - found).abs().max(), found.abs().max()
        return bool(gap <= tolerance * size.clamp(min=1e-6))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _pools(module: nn.Module, given: Any, out: Tensor) -> bool:
    """Return whether this is the pooling: no weights, a map in and one position out."""
    shrinks = isinstance(given, Tensor) and given.shape[2:] != out.shape[2:] == (1, 1)
    return shrinks and not list(module.parameters())


def _named(model: nn.Module, name: str, kind: type[nn.Module] = nn.Module) -> nn.Module:
    """Return the submodule of that name, or raise with the names of this ``kind``."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name not in modules:
        known = [n for n, m in modules.items() if n and isinstance(m, kind)]
        some = ", ".join(known if len(known) < 40 else known[-40:])
        raise ValueError(f"the model has no layer {name!r}; there are {some or 'none'}")
    return modules[name]


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = _named(model, name, nn.Linear)
    if not isinstance(module, nn.Linear):
        raise ValueError(f"the classifier {name!r} is a {type(module).__name__}, not an nn.Linear")
    return module


def _checked_features(
    seen: dict[str, Tensor], head: PoolHead, linear: nn.Linear
) -> Float[Tensor, "b c h w"]:
    """Return the map whose mean the classifier read, in float32 or better."""
    for what, name in (("features", head.layer), ("pooled", head.classifier)):
        if not isinstance(seen.get(what), Tensor):
            raise ValueError(f"layer {name!r} returned no tensor in the forward pass; name another")
    features, pooled = seen["features"], seen["pooled"]
    if features.ndim != 4 or features.shape[1] != linear.in_features:
        raise ValueError(
            f"layer {head.layer!r} returns {list(features.shape)}, but {head.classifier!r} needs "
            f"maps [b, {linear.in_features}, h, w] to pool"
        )
    means = _Means.of(features)
    if means.give(pooled):
        return _wide(features)
    if means.give(pooled, after_relu=True):
        return _wide(features).relu()
    raise ValueError(
        f"the model has no pooling head at {head.layer!r}: {head.classifier!r} does not read "
        "the mean of its map over positions"
    )


def _chosen(logits: Tensor, classes: Tensor | None) -> Int[Tensor, " b"]:
    check_finite(logits)
    if classes is None:
        return logits.argmax(dim=1)
    classes = classes.to(logits.device, torch.int64)
    check_labels(classes, logits.shape[1])
    return classes


def _own_maps(
    own: Callable[..., Any], forward: Forward, x: Tensor, classes: Tensor | None
) -> ClassMaps:
    """Return the maps of a network with its own method."""
    if classes is not None:
        # Checked here, because its indexing would not name a wrong label.
        classes = _chosen(forward(x), classes)
    x = forward.prepared(x)
    with autocast(x, forward.amp_dtype):
        logits, maps = own(x, classes)
    logits, maps = logits.float(), maps.float()
    return ClassMaps(logits, maps, _chosen(logits, classes))
