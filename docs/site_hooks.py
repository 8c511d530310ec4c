"""Put files of the repository that the pages link to into the site, under ``repository/``.

README, results and benchmarks live outside ``docs/``, and links between them and the pages are
relative to the repository, so that they work there too. For the site each link is rewritten to
the place where its target is published; one to a file that does not exist stays as it is, and the
strict build fails on it.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "repository"
PUBLISHED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "LICENSE",
    "benchmarks/*",
    "examples/*",
    "results/*",
    "results/curves/*",
)

# An inline link or image whose target is relative: not a URL, not an anchor of the same page.
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the published files of the repository to those of ``docs/``."""
    for pattern in PUBLISHED:
        paths = sorted(path for path in ROOT.glob(pattern) if path.is_file())
        for path in paths:
            files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
        folder = paths[0].parent
        if folder != ROOT and not (folder / "README.md").exists():
            listing = "".join(f"- [{path.name}]({path.name})\n" for path in paths)
            uri = site_path(folder / "README.md")
            files.append(File.generated(config, uri, content=f"# {folder.name}\n\n{listing}"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite relative links from places in the repository to places in the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(repository_path(here))

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        uri = next((uri for uri in candidates(target) if files.get_file_from_path(uri)), None)
        if uri is None:
            return match[0]
        return match[1] + posixpath.relpath(uri, posixpath.dirname(here) or os.curdir)

    return LINK.sub(rewrite, markdown)


def site_path(path: Path) -> str:
    """Return where a file of the repository outside ``docs/`` lies in the site."""
    return f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"


def repository_path(uri: str) -> str:
    """Return where a file of the site lies in the repository."""
    prefix = f"{OUTSIDE}/"
    return uri.removeprefix(prefix) if uri.startswith(prefix) else f"docs/{uri}"


def candidates(target: str) -> list[str]:
    """Return the places in the site that a path of the repository can have.

    The site's first page stands for the README, and the first card for the folder of the cards.
    """
    if target == "README.md":
        return ["index.md"]
    if target == "docs/methods":
        return ["methods/alignmixup.md"]
    if target.startswith("docs/"):
        return [target.removeprefix("docs/")]
    return [f"{OUTSIDE}/{target}", f"{OUTSIDE}/{target}/README.md"]
