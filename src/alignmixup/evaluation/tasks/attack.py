"""Error under attack: FGSM, PGD, and a stronger check, within an L-infinity ball around the pixels.

    x_0     = x, or clip(x + U(-eps, eps))
    x_{t+1} = clip(x_t + step * sign(grad_x loss(f(x_t), y)))

where clip is to [x - eps, x + eps] and to [0, 1]. FGSM is one step of length eps from x itself.
eps and step are in units of the pixel range [0, 1], so normalization happens inside the model, or
here by ``normalized_by``. The model is in eval mode, batch statistics included; only the gradient
with respect to the input is computed.

The steps follow the protocol of the PuzzleMix robustness script (eps 8/255 for FGSM; eps 4/255,
step 2/255, 20 steps and a random start for PGD). Which of the steps a published table quotes is
not known, so the error after every one of them is in ``settings["errors_by_step"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from alignmixup.checking import check_choices
from alignmixup.contracts import Result
from alignmixup.evaluation.forward import (
    ALONE,
    NO_IMAGES,
    Batches,
    Forward,
    Normalization,
    amp_name,
    check_classes,
    check_finite,
    check_labels,
    labeled_pixels,
    model_device,
)
from alignmixup.hooks import evaluating
from alignmixup.registry import register_task
from alignmixup.training.distributed import Team

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Attack:
    """The settings of an attack.

    ``loss`` is what the steps increase: cross-entropy, or the margin max_{j != y} z_j - z_y, whose
    gradient does not vanish where the softmax saturates. An image is broken if it is wrong after
    the last step (``keep="last"``), or clean or after any step (``"any"``), in one of the
    ``restarts``.
    """

    eps: float
    step: float
    num_steps: int
    random_start: bool = False
    restarts: int = 1
    loss: Literal["ce", "margin"] = "ce"
    keep: Literal["last", "any"] = "last"

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 1:
            raise ValueError(f"eps must lie in [0, 1] (pixels; 8/255 is usual), got {self.eps}")
        if not 0 < self.step <= 1 and not self.step == self.eps == 0:
            raise ValueError(f"step must lie in (0, 1] (pixels; 2/255 is usual), got {self.step}")
        if self.num_steps < 1 or self.restarts < 1:
            raise ValueError(
                f"num_steps and restarts must be at least 1, "
                f"got {self.num_steps} and {self.restarts}"
            )
        if self.restarts > 1 and not self.random_start:
            raise ValueError("restarts without random_start all take the same path; set it to True")
        check_choices(self)


@register_task(
    "fgsm",
    about="error under FGSM, one signed gradient step",
    check=lambda o: _check(Attack(o["eps"], o["eps"], 1), o["chunk"]),
)
def fgsm(
    model: nn.Module,
    batches: Batches,
    eps: float = 8 / 255,
    *,
    loss: Literal["ce", "margin"] = "ce",
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    chunk: int = 256,
    on_images: Progress | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return the error under one signed gradient step of length ``eps``, and the clean error."""
    attack = Attack(eps=eps, step=eps, num_steps=1, loss=loss)
    forward = Forward(model, normalized_by, amp_dtype)
    return run_attack("fgsm", forward, batches, attack, 0, chunk, on_images, team)


@register_task(
    "pgd",
    about="error under PGD, projected gradient ascent",
    check=lambda o: _check(
        Attack(o["eps"], o["step"], o["num_steps"], o["random_start"], o["restarts"]), o["chunk"]
    ),
)
def pgd(
    model: nn.Module,
    batches: Batches,
    eps: float = 4 / 255,
    step: float = 2 / 255,
    num_steps: int = 20,
    random_start: bool = True,
    seed: int = 0,
    restarts: int = 1,
    loss: Literal["ce", "margin"] = "ce",
    *,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    chunk: int = 256,
    on_images: Progress | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return the error after the last step of projected gradient ascent, and the clean error."""
    attack = Attack(eps, step, num_steps, random_start, restarts, loss)
    forward = Forward(model, normalized_by, amp_dtype)
    return run_attack("pgd", forward, batches, attack, seed, chunk, on_images, team)


@register_task(
    "strong_attack",
    about="error under a longer PGD on the margin, with restarts",
    check=lambda o: _check(
        Attack(o["eps"], o["eps"] / 4, o["num_steps"], True, o["restarts"]), o["chunk"]
    ),
)
def strong_attack(
    model: nn.Module,
    batches: Batches,
    eps: float = 4 / 255,
    seed: int = 0,
    *,
    num_steps: int = 50,
    restarts: int = 5,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    chunk: int = 256,
    on_images: Progress | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return the error under an attack that gradient masking does not easily pass.

    PGD on the margin loss, 50 steps of eps/4, five random starts; an image counts as broken if any
    point of any path breaks it. It is not AutoAttack: no package that offers it is both maintained
    and light (foolbox, our test oracle, has none). If the error is well above the PGD error, the
    robustness comes from vanishing gradients.
    """
    attack = Attack(eps, eps / 4, num_steps, True, restarts, "margin", "any")
    forward = Forward(model, normalized_by, amp_dtype)
    return run_attack("strong_attack", forward, batches, attack, seed, chunk, on_images, team)


def _check(attack: Attack, chunk: int) -> None:
    """Raise for a bad ``chunk``; the attack has checked itself."""
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 image, got {chunk}")


def run_attack(
    task: str,
    forward: Forward,
    batches: Batches,
    attack: Attack,
    seed: int = 0,
    chunk: int = 256,
    on_images: Progress | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return ``top1_error`` under the attack and ``clean_error``, in percent.

    ``chunk`` images are attacked at a time. Random starts follow the order of the images: the same
    seed gives the same starts for any chunk and batch size. float16 loses small gradients, which
    makes an attack weaker; prefer bfloat16 or None. ``on_images`` is called after every step with
    the number of images done, those under attack counted by their share of the steps. A process of
    ``team`` attacks its share, from the starts that one process would draw.
    """
    _check(attack, chunk)
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "an attack needs gradients, which torch.inference_mode() disables: call it outside"
        )
    model = forward.model
    starts = _start_generators(attack, seed)
    n, num_clean = 0, 0
    num_broken = torch.zeros(attack.num_steps, dtype=torch.int64, device="cpu")
    device = model_device(model)
    with team.agreed(), evaluating(model):
        for images, labels in labeled_pixels(batches, forward.normalized_by, device, team):
            for x, y in zip(torch.split(images, chunk), torch.split(labels, chunk), strict=True):
                with torch.no_grad():
                    clean = forward(x)
                check_classes(clean)
                check_labels(y, clean.shape[1])
                wrong = clean.argmax(dim=1) != y
                on_steps = _by_steps(on_images, n, len(x), attack) if on_images else None
                broken = _broken_by_step(forward, x, y, wrong, attack, starts, on_steps, team)
                n += len(x)
                num_clean += int(wrong.sum())
                num_broken += broken.sum(dim=1).cpu()
    counts = (n, num_clean, *num_broken.tolist())
    n, num_clean, *all_broken = team.total(counts, device or torch.device("cpu"))
    if not n:
        raise ValueError(NO_IMAGES)
    errors = [100 * count / n for count in all_broken]
    settings = {**asdict(attack), "seed": seed, "num_images": n}
    settings["amp_dtype"] = amp_name(forward.amp_dtype)
    return [
        Result(task, "top1_error", errors[-1], {**settings, "errors_by_step": errors}),
        Result(task, "clean_error", 100 * num_clean / n, settings),
    ]


def _start_generators(attack: Attack, seed: int) -> list[torch.Generator]:
    # One generator per restart, so that more restarts do not change the first ones. On the CPU,
    # so that the starts do not depend on the device.
    rng = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (attack.restarts,), generator=rng, device="cpu")
    return [torch.Generator().manual_seed(int(s)) for s in seeds]


def _by_steps(on_images: Progress, before: int, num_images: int, attack: Attack) -> Progress:
    """Convert the steps taken on ``num_images`` after ``before`` others into images done."""
    total = attack.restarts * attack.num_steps
    return lambda steps: on_images(before + num_images * steps // total)


def _broken_by_step(
    forward: Forward,
    x: Tensor,
    y: Tensor,
    wrong: Bool[Tensor, " b"],
    attack: Attack,
    starts: list[torch.Generator],
    on_steps: Progress | None,
    team: Team,
) -> Bool[Tensor, "t b"]:
    """Return which images are broken after each step, over all restarts.

    With ``keep="any"``, images that one start has broken are left out of the next ones.
    """
    broken = torch.zeros(attack.num_steps, len(x), dtype=torch.bool, device=x.device)
    left = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for restart, rng in enumerate(starts):
        # Drawn for all images, also if none is left: a start depends only on their order. Between
        # two images of this process are those of the others.
        start = x
        if attack.random_start:
            unit = torch.rand((team.size * len(x), *x.shape[1:]), generator=rng, device="cpu")
            start = x + attack.eps * (2 * unit[team.rows] - 1).to(x)
        if not left.any():
            continue
        so_far = wrong[left]
        for t, (_, logits) in enumerate(trajectory(forward, x[left], y[left], attack, start[left])):
            check_finite(logits)
            now = logits.argmax(dim=1) != y[left]
            so_far = so_far | now
            if t:
                broken[t - 1, left] |= so_far if attack.keep == "any" else now
                if on_steps:
                    on_steps(restart * attack.num_steps + t)
        if attack.keep == "any":
            left = ~broken[-1]
    return broken


def trajectory(
    forward: Callable[[Tensor], Tensor],
    x: Float[Tensor, "b c h w"],
    y: Int[Tensor, " b"],
    attack: Attack,
    start: Float[Tensor, "b c h w"],
) -> Iterator[tuple[Float[Tensor, "b c h w"], Float[Tensor, "b k"]]]:
    """Yield the start, clipped to the ball, and the point after each step, with their logits.

    ``forward`` maps pixels to logits. The forward pass of the next gradient also scores the step
    before it.
    """
    low, high = (x - attack.eps).clamp(min=0), (x + attack.eps).clamp(max=1)
    current = start.clamp(low, high)
    for _ in range(attack.num_steps):
        logits, gradient = _gradient(forward, current, y, attack)
        yield current, logits
        current = (current + attack.step * gradient.sign()).clamp(low, high)
    with torch.no_grad():
        last = forward(current)
    yield current, last


def _gradient(
    forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, attack: Attack
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = forward(x)
        if not logits.requires_grad:
            raise ValueError(
                "the model's logits carry no gradient to the images; "
                "does its forward run under torch.no_grad or detach?"
            )
        # The sum, not the mean: images are independent in eval mode, and dividing by the batch
        # size would bring gradients nearer to underflow.
        (gradient,) = torch.autograd.grad(LOSSES[attack.loss](logits, y), x)
    return logits.detach(), gradient


def _margin(logits: Tensor, y: Tensor) -> Tensor:
    own = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, y.unsqueeze(1), -torch.inf)
    return (others.amax(dim=1) - own).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": partial(F.cross_entropy, reduction="sum"),
    "margin": _margin,
}
