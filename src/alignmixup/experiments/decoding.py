"""From features back to images: a decoder for the frozen, trained encoder of a run.

    A = F(x),   x^ = D(A)   or   D(f(A)),   D (and f) trained on clean images alone

as in the paper's figures. The decoder is in the run's folder:

    RUN/decoder.safetensors   its weights; during training, the state to resume from
    RUN/decoder.json          its settings and errors, for people

A run of AlignMixup/AE has its own decoder, which is used if none was trained, or if the trained one
was deleted.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from alignmixup.checking import check_choices
from alignmixup.contracts import ImageSet, Mixer, Result
from alignmixup.datasets import FileSet
from alignmixup.experiments.batches import eval_batches, load_split, side_of, train_batches
from alignmixup.experiments.data_record import Sets, own_test_set
from alignmixup.experiments.load import Run, load_run
from alignmixup.experiments.painters import (
    Kind,
    LayerDecoder,
    OwnDecoder,
    Painter,
    Reconstruction,
    reconstruction,
)
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import (
    alone_in,
    append_results,
    read_recipe,
    read_run,
    write_json,
)
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.models.autoencoder import AutoencodingClassifier
from alignmixup.models.zoo import default_tap
from alignmixup.training.checkpoint import load_checkpoint, naming_damage, remove_checkpoint
from alignmixup.training.decoder_fit import FACTS, DecoderFit, OtherSettings, fit_decoder

DECODER = "decoder.safetensors"
PASS_SETS = "pass the same sets to train_decoder(run, sets=...)"


@dataclass(frozen=True)
class DecoderSettings:
    """What a decoder is trained on and how.

    ``kind`` is ``map`` (D reads the layer's map), ``vector`` (the paper's: a fully connected f
    makes 512 numbers of it first) or ``own`` (the decoder that an autoencoder was trained with:
    nothing is trained, and other settings are refused). ``layer`` defaults to the one whose map
    the run mixes or, if it mixes none, to the paper's in such a network: ``encoder`` of an
    autoencoder. ``channels`` is the width of D's first map; None: that of the layer, within bounds.
    """

    layer: str | None = None
    kind: Kind = "map"
    epochs: int = 30
    batch_size: int = 128
    lr: float = 2e-3
    channels: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("epochs", "batch_size", "channels"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "kind" and getattr(self, field.name) != field.default
        ]
        if self.kind == "own" and given:
            raise ValueError(
                f"kind='own' trains nothing, so {', '.join(given)} has no effect: leave it out"
            )


def train_decoder(
    run: Path | str,
    settings: DecoderSettings | None = None,
    *,
    data_root: Path | str | None = None,
    sets: Sets | None = None,
    device: str = "auto",
    again: bool = False,
    quiet: bool = False,
    on_step: Callable[[], object] | None = None,
) -> Reconstruction:
    """Train a decoder for the run in this folder, or resume its training.

    A finished one is only read, and one with other settings is refused, unless ``again`` deletes
    it. Of kind ``own``, the autoencoder's decoder is measured, and ``again`` deletes the one that
    was trained in its place. The error on the test images is appended to the run's results, once.
    ``on_step`` is called after each step.
    """
    folder = Path(run)
    settings = settings or DecoderSettings()
    there = read_run(folder)
    recipe = there.recipe
    if sets is None:
        test_set = own_test_set(folder, recipe.data, there.images, data_root, remedy=PASS_SETS)
        train_set = load_split(recipe.data, "train", data_root)
    else:
        train_set, test_set = sets.train, sets.test
    opened = _open_finished(folder, train_set, device)
    place = next(opened.model.parameters()).device
    test_batches = eval_batches(recipe.data, recipe.train, test_set, place)
    if settings.kind == "own":
        measured = reconstruction(OwnDecoder(opened.model), test_batches)
        _check_finite(measured, "the run has diverged")
        if again:
            _delete(folder)
        _record(opened, {"kind": "own", "layer": OwnDecoder.layer}, measured)
        return measured
    settings = dataclasses.replace(settings, layer=settings.layer or mixed_layer(opened))
    decoder = _layer_decoder(opened, settings, side_of(recipe.data, train_set))
    with alone_in(folder):
        try:
            fit = _fit(decoder, opened, settings, train_set, again, quiet, on_step)
        except OtherSettings as error:
            raise ValueError(f"{error}, or --again to start afresh") from None
        measured = reconstruction(decoder.eval(), test_batches)
        _check_finite(measured, "train it --again with a lower --lr")
        _describe(folder / DECODER, settings, fit, measured)
        _record(opened, dataclasses.asdict(settings), measured)
    return measured


def _check_finite(measured: Reconstruction, remedy: str) -> None:
    if not math.isfinite(measured.error):
        raise ValueError(f"the decoder's error on the test images is {measured.error}: {remedy}")


def _delete(folder: Path) -> None:
    remove_checkpoint(folder / DECODER)
    (folder / DECODER).with_suffix(".json").unlink(missing_ok=True)


def _open_finished(folder: Path, images: ImageSet | FileSet, device: str) -> Run:
    side = side_of(read_recipe(folder).data, images)
    run = load_run(folder, num_classes=images.num_classes, image_size=side, device=device)
    if run.epoch < run.recipe.train.epochs:
        raise ValueError(
            f"the run in {folder} is at epoch {run.epoch} of {run.recipe.train.epochs}: finish it "
            "first, as its features still change"
        )
    return run


def mixed_layer(run: Run) -> str:
    """Return the layer this run mixes at, or the one the paper mixes at in such a network."""
    mixer = run.recipe.mixer
    if isinstance(mixer, AlignMixup | AlignMixupAE):
        return mixer.layer
    return default_tap(run.recipe.net, run.model)


def align_settings(mixer: Mixer) -> tuple[float, int]:
    """Return eps and the number of iterations this mixer aligns with, or AlignMixup's defaults."""
    aligns = mixer if isinstance(mixer, AlignMixup | AlignMixupAE) else AlignMixup
    return aligns.eps, aligns.num_iters


def _layer_decoder(run: Run, settings: DecoderSettings, image_size: int) -> LayerDecoder:
    assert settings.layer is not None
    decoder = LayerDecoder(
        run.model, settings.layer, image_size, kind=settings.kind, channels=settings.channels
    )
    return decoder.to(next(run.model.parameters()).device)


def _fit(
    decoder: LayerDecoder,
    run: Run,
    settings: DecoderSettings,
    images: ImageSet | FileSet,
    again: bool,
    quiet: bool,
    on_step: Callable[[], object] | None,
) -> DecoderFit:
    # Without a crop of the padded image: a decoder should not learn to paint its black border.
    spec = dataclasses.replace(run.recipe.data, pad=0)
    how = dataclasses.replace(
        run.recipe.train, batch_size=settings.batch_size, seed=settings.seed, channels_last=False
    )
    loader = train_batches(spec, how, images, next(run.model.parameters()).device)
    facts = {key: value for key, value in dataclasses.asdict(settings).items() if key != "seed"}
    if again:  # only now: the settings are known to be valid
        _delete(run.folder)
    return fit_decoder(
        decoder,
        loader,
        steps=settings.epochs * len(loader),
        lr=settings.lr,
        seed=settings.seed,
        parts=("embed", "decoder"),
        checkpoint=run.folder / DECODER,
        facts={**facts, "data": images.name, "run_epoch": run.epoch},
        quiet=quiet,
        on_step=on_step,
    )


def open_painter(
    run: Path | str, num_classes: int, image_size: int, device: str = "auto"
) -> tuple[Run, Painter]:
    """Load a run with its decoder: the one trained for it, else an autoencoder's own."""
    opened = load_run(run, num_classes=num_classes, image_size=image_size, device=device)
    path = opened.folder / DECODER
    if not path.exists():
        if isinstance(opened.model, AutoencodingClassifier) and opened.model.decoder is not None:
            return opened, OwnDecoder(opened.model)
        raise FileNotFoundError(
            f"{opened.folder} has no decoder: train one with 'alignmixup decoder {opened.folder}'"
        )
    there = load_checkpoint(path, FACTS)
    settings = cast(dict[str, object], there.facts["settings"])
    if there.facts["step"] != settings["steps"]:
        raise ValueError(
            f"{path} is at step {there.facts['step']} of {settings['steps']}: run "
            f"'alignmixup decoder {opened.folder}' with the same settings to resume"
        )
    if settings["run_epoch"] != opened.epoch:
        raise ValueError(
            f"{path} was trained for epoch {settings['run_epoch']} of the run, which is now at "
            f"{opened.epoch}: train it again with 'alignmixup decoder {opened.folder} --again'"
        )
    names = {field.name for field in dataclasses.fields(DecoderSettings)}
    known = {key: value for key, value in settings.items() if key in names}
    chosen = DecoderSettings(**known)  # type: ignore[arg-type]
    decoder = _layer_decoder(opened, chosen, image_size)
    with naming_damage(path):
        for name in ("embed", "decoder"):
            decoder.get_submodule(name).load_state_dict(there.part(f"model.{name}"))
    return opened, decoder.eval()


def _describe(
    path: Path, settings: DecoderSettings, fit: DecoderFit, measured: Reconstruction
) -> None:
    """Write the settings and errors of the decoder beside it."""
    record = {
        "settings": dataclasses.asdict(settings),
        "steps": len(fit.errors),
        "training_error": fit.final_error,
        **dataclasses.asdict(measured),
    }
    write_json(path.with_suffix(".json"), record)


def _record(run: Run, settings: Mapping[str, object], measured: Reconstruction) -> None:
    """Append the two errors to the run's results, unless they are there already."""
    path = run.folder / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    there = [Result.from_json(line) for line in lines if '"reconstruction"' in line]
    how = {**settings, "num_images": measured.num_images}
    where = origin(run.recipe, run.epoch, run.folder)
    results = [
        Result("reconstruction", metric, getattr(measured, metric), how)
        for metric in ("error", "mean_image_error")
    ]
    known = {(r.metric, r.value, json.dumps(dict(r.settings))) for r in there}
    new = [r for r in results if (r.metric, r.value, json.dumps(dict(r.settings))) not in known]
    append_results(run.folder, [r.stamped(**where, **provenance()) for r in new])
