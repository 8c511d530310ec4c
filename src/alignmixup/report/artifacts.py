"""Pictures that the page shows of a run, as JSON files in the run's folder.

    RUN/page/interpolations.json   decoded mixes of two images for a slider over lam
    RUN/page/transport.json        the plan between the positions of two images
    RUN/page/localization.json     class activation maps with the boxes found and the true ones
    RUN/page/confusion.json        confusion matrix and the most certain mistakes

Each file is one object with ``version`` (1), ``kind`` (the name of the file), ``epoch`` (of the
weights it was made with), ``run`` (the name of the recipe) and ``caption``. Images are PNG files as
data URIs; several in a row are one strip. The other fields:

    interpolations   shares [k]; pairs: {first, second, names [2], rows: {name: strip of k images}}
    transport        grid [h, w]; pairs: {first, second, names [2], plan}: plan[i][j] is the share
                     of the mass of position i of the first image that goes to j, in per mille
    localization     examples: {image, heat, size [h, w], box or null, true_boxes, iou, caption},
                     boxes x0, y0, x1, y1 in pixels
    confusion        classes, counts [k][k] (rows: true), num_images, mistakes: {image, true,
                     predicted, confidence in percent}

What cannot be made has ``left_out``, a sentence with the reason, in place of these.
``figures.run_pictures`` writes the files; reading them needs no network and no images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignmixup.files import write_text

FOLDER = "page"
VERSION = 1
KINDS = ("interpolations", "transport", "localization", "confusion")

Artifact = Mapping[str, Any]


def write_artifact(run: Path, kind: str, fields: Mapping[str, object]) -> Path:
    """Write one artifact into the folder of a run; replace an older one."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of artifact {kind!r}; choose from {', '.join(KINDS)}")
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.json"
    record = {"version": VERSION, "kind": kind, **fields}
    write_text(path, json.dumps(record, separators=(",", ":")))
    return path


def read_artifact(run: Path, kind: str) -> Artifact | None:
    """Read one artifact; None where there is none.

    Raises:
        ValueError: If the file is damaged or of another version.
    """
    path = run / FOLDER / f"{kind}.json"
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it to have it made again") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ValueError(f"{path} is not of version {VERSION}: delete it to have it made again")
    return record


def read_artifacts(runs: Sequence[Path]) -> dict[str, list[Artifact]]:
    """Read the artifacts of all runs by their kind; kinds without any are empty.

    Several of one recipe, such as its seeds, are named after their folders.
    """
    read = {
        kind: [(run, found) for run in runs if (found := read_artifact(run, kind)) is not None]
        for kind in KINDS
    }
    return {
        kind: [_told_apart(run, own, found) for run, own in found] for kind, found in read.items()
    }


def _told_apart(run: Path, own: Artifact, found: Sequence[tuple[Path, Artifact]]) -> Artifact:
    is_alone = sum(other.get("run") == own.get("run") for _, other in found) == 1
    return own if is_alone else {**own, "run": run.resolve().name}
