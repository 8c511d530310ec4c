"""The demo's page: what was measured, pictures of aligned features, and what is not shown."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignmixup.contracts import Result
from alignmixup.demo.claims import confidences, headline, least, table, values
from alignmixup.demo.setup import LAYER, METHODS, Size
from alignmixup.report.page import PAGE, Section, write_page
from alignmixup.report.render import to_html

CURVES = "Test accuracy after each epoch. Baseline is the network without mixing."
NEXT = {
    "alignmixup recipes": "every row of the paper's tables",
    "alignmixup train cifar10-r18-alignmixup-fast": "train one (needs the data and a GPU)",
    "alignmixup figure methods": "one pair under every method",
    "alignmixup report {runs} --out report": "these tables and charts without the text",
}


def write_story(
    out: Path,
    size: Size,
    results: Mapping[str, Sequence[Result]],
    match: Mapping[str, float],
    missing: Sequence[str] = (),
) -> Path:
    """Write the page of what is finished into the folder of the demo; return its path.

    ``results`` has those of each scored run by method, ``match`` how well each plan carries objects
    onto objects (``object_match``), if that is known; ``missing`` is what was not finished.
    """
    sections = [
        _measured(size, results, missing),
        Section("Learning curves", f"<p>{CURVES}</p>", ["curves"]),
        Section("Confidence", f"<p>{html.escape(confidences(results))}</p>", ["reliability"]),
    ]
    if match:
        pictures = ["interpolations", "transport"]
        sections.append(Section("Aligned features", _aligned(match), pictures))
    sections += [Section("What this does not show", _not_shown(size)), Section("Next", _next(out))]
    lines = [result for found in results.values() for result in found]
    folders = [out / "runs" / folder_name(method) for method in METHODS]
    # A folder is meant also if its name ends like that of a page.
    return write_page(lines, folders, out / PAGE, title="alignmixup demo", sections=sections)


def folder_name(method: str) -> str:
    """The name of the folder of a method's run."""
    return method.replace(" ", "-").lower()


def _measured(
    size: Size, results: Mapping[str, Sequence[Result]], missing: Sequence[str]
) -> Section:
    scores = {name: values(results[name]) for name in METHODS if name in results}
    text = [
        "Three small networks, equal but for the mixing, learned four shapes from "
        f"{size.num_train:,} images in {size.epochs} epoch{'s' * (size.epochs != 1)}, on this "
        "machine. So few images can be memorized, which is what mixing works against. There "
        "was no other augmentation."
    ]
    if missing:
        text.insert(0, f"The demo was stopped before it had finished: {', '.join(missing)}. The "
                       "same command continues it.")  # fmt: skip
    body = "".join(f"<p>{html.escape(line)}</p>" for line in text)
    if scores:
        note = f"{least(size.num_test)} Seed {size.seed}."
        body += f"<p><b>{html.escape(headline(scores, size.num_test))}</b></p>"
        body += f'<div class="scroll">{to_html(table(scores, size.num_test))}</div>'
        body += f'<p class="note">{html.escape(note)}</p>'
    return Section("What mixing changed", body)


def _aligned(match: Mapping[str, float]) -> str:
    aligned, unaligned = match["aligned"], match["unaligned"]
    verdict = (
        "so alignment carries objects onto objects"
        if aligned > unaligned + 0.1
        else "so in this run alignment does not carry objects onto objects"
    )
    return (
        f"<p>AlignMixup matches the positions of two images by their features at {LAYER} (8 x 8) "
        "before it mixes them. Where the features of the other image's object land is known for "
        f"shapes: the correlation with the kept image's object is {aligned:.2f} with alignment "
        f"and {unaligned:.2f} without, {html.escape(verdict)}.</p>"
        "<p>Below, a slider mixes decoded features of two images, with alignment and without. What "
        "to look for: whether the first image keeps its pose while it takes the colors of the "
        "second. The decoder was trained for seconds, so pictures are blurred.</p>"
    )


def _not_shown(size: Size) -> str:
    items = (
        f"Whether it holds for other seeds than {size.seed}: 'alignmixup demo --seed "
        f"{size.seed + 1} --out demo-{size.seed + 1}' measures another.",
        "How much of AlignMixup's difference comes from alignment and how much from mixing "
        "features: that needs the same network with AlignMixup(aligned=False).",
        "Photographs and networks of usual size. The README and the documentation have what was "
        "measured on CIFAR and Tiny-ImageNet, beside the paper's figures.",
        "Robustness to strong attacks: FGSM with 1/255 is a weak one. 'alignmixup evaluate RUN "
        "--tasks pgd strong_attack' is stronger.",
        "Mixing beside other augmentation: there is none here. Random crops also work against "
        "memorization, and may leave nothing for mixing to add.",
        "Many images and few epochs, where little can be memorized: mixing may gain nothing and "
        "cost calibration.",
    )
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"


def _next(out: Path) -> str:
    runs = shlex.quote(str(out / "runs"))
    items = (
        f"<li><code>{html.escape(command.format(runs=runs))}</code><br>{html.escape(about)}</li>"
        for command, about in NEXT.items()
    )
    return f"<ul>{''.join(items)}</ul>"
