"""Result lines folded into the paper's tables, ours beside the published figure.

A table has a row a method and a column a (data, network), an out-of-distribution source or a
metric. A cell reads ``3.02 +/- 0.08, n=3 (2.95)`` (with a proper sign): mean and standard deviation
over three seeds, then in brackets what the paper prints; one seed has neither spread nor n.

A result's settings are part of what it is: results with different settings are never averaged, they
make rows of their own that say in what they differ. Only plain values count for this: a list or an
object in the settings is a curve that was measured along the way. Values are in percent.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignmixup.contracts import Result
from alignmixup.report import paper
from alignmixup.report.render import Table

__all__ = [
    "ACCURACIES",
    "KINDS",
    "RecipeName",
    "kinds_in",
    "parse_recipe",
    "read_results",
    "table",
]

ACCURACIES: Mapping[str, str] = {
    "best": "the best test epoch",
    "last": "the last epoch",
    "median10": "the median of the last ten epochs",
}


def read_results(paths: Iterable[str | Path]) -> list[Result]:
    """Read result lines from files, and from all ``results*.jsonl`` below folders.

    A folder without such files is read for its own ``*.jsonl``. A damaged line is an error; a last
    line that was never finished (the writer was stopped) is skipped with a warning.
    """
    # By resolved path, so that a file named twice, or within a named folder, is read once.
    files = {file.resolve(): file for path in paths for file in _result_files(Path(path))}
    return [result for file in files.values() for result in _read_file(file)]


def _result_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give a run folder or a results file")
    files = sorted(path.rglob("results*.jsonl")) or sorted(path.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{path} holds no results (*.jsonl); evaluate the run first")
    return files


def _read_file(file: Path) -> list[Result]:
    results = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            results.append(_read_line(line))
        except (TypeError, ValueError) as error:
            if number == len(lines):  # no line end behind it: the writer was stopped in the middle
                warnings.warn(f"{file}:{number}: skipped an unfinished last line", stacklevel=3)
            else:
                raise ValueError(f"{file}:{number}: not a result line: {error}") from error
    return results


def _read_line(line: bytes) -> Result:
    text = line.decode("utf-8")
    if not isinstance(json.loads(text), dict):
        raise ValueError("expected a JSON object")
    result = Result.from_json(text)
    if isinstance(result.value, bool) or not isinstance(result.value, int | float):
        raise ValueError(f"value must be a number, got {result.value!r}")
    if not isinstance(result.seed, int | None):
        raise ValueError(f"seed must be an integer or null, got {result.seed!r}")
    if not isinstance(result.settings, dict):
        raise ValueError(f"settings must be an object, got {result.settings!r}")
    for name in ("task", "metric", "recipe", "date"):
        if not isinstance(getattr(result, name), str):
            raise ValueError(f"{name} must be a string, got {getattr(result, name)!r}")
    return result


@dataclass(frozen=True, slots=True)
class RecipeName:
    """The parts of ``cifar10-r18-alignmixup-fast``; the suffix is what no other part explains."""

    data: str
    network: str
    method: str
    suffix: str = ""


def parse_recipe(name: str) -> RecipeName:
    """Split a recipe's name; a network or method the paper does not know may stand in it too."""
    data, _, rest = name.rpartition("/")[2].partition("-")
    network, rest = _take(rest, paper.NETWORKS)
    network = {"vgg": "vgg-gap"}.get(network, network)  # recipes have its short name
    method, suffix = _take(rest, paper.METHODS)
    if not (data and network and method):
        raise ValueError(
            f"recipe name {name!r} does not read as data-network-method, "
            "such as cifar10-r18-alignmixup"
        )
    return RecipeName(data, network, method, suffix)


def _take(text: str, known: Iterable[str]) -> tuple[str, str]:
    """Split the longest known name off the front, or else the first word."""
    for name in sorted(known, key=len, reverse=True):
        if text == name or text.startswith(name + "-"):
            return name, text[len(name) + 1 :]
    head, _, tail = text.partition("-")
    return head, tail


@dataclass(frozen=True, slots=True)
class _Measure:
    """One measured quantity: where our results have it and where the paper prints it."""

    task: str
    metric: str  # of our results; {which} stands for best, last or median10
    tables: tuple[str, ...] = ()
    printed: str = ""  # the paper's metric, where it is not ours
    label: str | None = None  # the paper's, where it is not given
    digits: int = 2

    def name(self) -> str:
        metric = paper.METRICS.get(self.printed or self.metric)
        return self.label if self.label is not None else metric.name if metric else self.metric

    def ours(self, value: float) -> float:
        """Turn our accuracy into the error that the paper shows."""
        return 100 - value if self.task == "accuracy" else value

    def published(self, data: str, network: str, method: str, source: str) -> float | None:
        """Return the printed figure of one cell from the first table that has it."""
        for table in self.tables:
            metric = "top1" if table == "levit" else self.printed or self.metric
            value = paper.published(
                table=table,
                data=data,
                network=network,
                method=method,
                metric=metric,
                source=source,
            )
            if value is not None:
                return 100 - value if metric == "top1" else value
        return None


_TOP1 = ("cls", "cls-imgnet", "levit")
_OOD = ("ood", "ood_extra")

# The title of each kind of table and what it shows.
KINDS: Mapping[str, tuple[str, tuple[_Measure, ...]]] = {
    "accuracy": (
        "Top-1 error (%)",
        (_Measure("accuracy", "top1_{which}", _TOP1, "top1_error", label=""),),
    ),
    "robustness": (
        "Top-1 error (%) under attack",
        (
            _Measure("fgsm", "top1_error", ("adv",), "fgsm_error", label="FGSM"),
            _Measure("pgd", "top1_error", ("adv",), "pgd_error", label="PGD"),
        ),
    ),
    "ood": (
        "Out-of-distribution detection (%)",
        (
            _Measure("ood", "det_acc_half", _OOD, digits=1),
            _Measure("ood", "auroc", _OOD, digits=1),
            _Measure("ood", "aupr_id", _OOD, digits=1),
            _Measure("ood", "aupr_ood", _OOD, digits=1),
            _Measure("ood", "det_acc_best", label="Det Acc (best threshold)", digits=1),
            _Measure("ood", "fpr95", label="FPR95", digits=1),
        ),
    ),
    "calibration": (
        "Calibration (%)",
        (
            _Measure("calibration", "ece", ("supp-calibration",)),
            _Measure("calibration", "oe", ("supp-calibration",)),
        ),
    ),
    "localization": (
        "Weakly supervised localisation (%)",
        (
            _Measure("localization", "top1_loc", ("wsol",), digits=1),
            _Measure("localization", "maxboxacc_v2", ("wsol",), digits=1),
        ),
    ),
    "detection": ("Transfer to detection (%)", (_Measure("detection", "map", ("detection",)),)),
    "cost": (
        "Cost of training",
        (
            _Measure("cost", "params", ("cls-imgnet",), label="parameters (M)", digits=1),
            _Measure("cost", "ms_per_batch", ("cls-imgnet",), digits=1),
        ),
    ),
}


def kinds_in(results: Iterable[Result]) -> list[str]:
    """Return the kinds of table for which there is at least one result."""
    tasks = {result.task for result in results}
    return [kind for kind, (_, measures) in KINDS.items() if any(m.task in tasks for m in measures)]


@dataclass(frozen=True, slots=True)
class _Column:
    data: str
    network: str
    source: str
    measure: _Measure


@dataclass(frozen=True, slots=True)
class _Row:
    method: str
    suffix: str
    settings: tuple[tuple[str, str], ...]  # those in which results of one cell differ


def table(
    results: Iterable[Result],
    kind: str,
    *,
    which: str = "median10",
    settings: Mapping[str, object] | None = None,
    ignore: Sequence[str] = ("seed",),
    paper_rows: bool = True,
) -> Table:
    """Fold results into one of the paper's tables.

    ``which`` chooses the accuracy: best, last or median10. ``settings`` keeps the results that have
    these settings; ``ignore`` names settings that do not tell results apart, such as the seed of
    an attack's random start. ``paper_rows`` shows the methods we have not run as well, with their
    published figure alone.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of table {kind!r}; choose from {', '.join(KINDS)}")
    if which not in ACCURACIES:
        raise ValueError(f"unknown accuracy {which!r}; choose from {', '.join(ACCURACIES)}")
    title, measures = KINDS[kind]
    chosen, repeated = _newest(_choose(list(results), measures, which, settings or {}), ignore)
    cells = _cells(chosen, measures, which, ignore)
    if not cells:
        raise ValueError(f"no results for a table of {kind} ({which=}, settings={settings})")
    columns = sorted({column for _, column in cells}, key=lambda c: _column_order(c, measures))
    rows = {row for row, _ in cells}
    if paper_rows:
        rows |= {_Row(m, "", ()) for m in paper.METHODS if _is_printed(m, columns)}
    body = [
        (_row_label(row), *(_cell_text(row, c, cells.get((row, c))) for c in columns))
        for row in sorted(rows, key=_row_order)
    ]
    shown = ("Method", *_column_labels(columns))
    notes = _notes(kind, which, columns, repeated)
    return Table(_full_title(title, kind, which, columns), shown, tuple(body), tuple(notes))


def _choose(
    results: list[Result],
    measures: Sequence[_Measure],
    which: str,
    settings: Mapping[str, object],
) -> list[Result]:
    wanted = {(m.task, m.metric.format(which=which)) for m in measures}
    return [
        r
        for r in results
        if (r.task, r.metric) in wanted and all(r.settings.get(k) == v for k, v in settings.items())
    ]


def _newest(results: list[Result], ignore: Sequence[str]) -> tuple[list[Result], int]:
    """Keep the newest of repeated measurements: the later date, or else the later line."""
    latest: dict[tuple[object, ...], Result] = {}
    for r in sorted(results, key=lambda r: r.date):
        name = parse_recipe(r.recipe)
        latest[name, r.seed, r.task, r.metric, _frozen(r.settings, ignore)] = r
    return list(latest.values()), len(results) - len(latest)


def _frozen(settings: Mapping[str, object], ignore: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (key, json.dumps(settings[key]))
        for key in sorted(settings)
        if key not in ignore and not isinstance(settings[key], list | tuple | dict)
    )


_Cells = dict[tuple[_Row, _Column], dict[object, float]]


def _cells(
    results: list[Result], measures: Sequence[_Measure], which: str, ignore: Sequence[str]
) -> _Cells:
    """Sort results into cells by seed, splitting rows where settings differ within a cell."""
    by_name = {(m.task, m.metric.format(which=which)): m for m in measures}
    places = []
    seen: dict[tuple[_Column, str, str], list[dict[str, str]]] = {}
    for r in results:
        name = parse_recipe(r.recipe)
        source = str(r.settings.get("source", "")) if r.task == "ood" else ""
        column = _Column(name.data, name.network, source, by_name[r.task, r.metric])
        rest = dict(_frozen(r.settings, (*ignore, "source") if source else ignore))
        seen.setdefault((column, name.method, name.suffix), []).append(rest)
        places.append((r, name, column, rest))
    split = {
        key
        for group in seen.values()
        for key in {k for s in group for k in s}
        if len({s.get(key) for s in group}) > 1
    }
    cells: _Cells = {}
    for r, name, column, rest in places:
        told = tuple(sorted((k, v) for k, v in rest.items() if k in split))
        cell = cells.setdefault((_Row(name.method, name.suffix, told), column), {})
        cell[r.seed] = column.measure.ours(r.value)
    return cells


def _printed(method: str, column: _Column) -> float | None:
    return column.measure.published(column.data, column.network, method, column.source)


def _is_printed(method: str, columns: Iterable[_Column]) -> bool:
    return any(_printed(method, column) is not None for column in columns)


def _column_order(column: _Column, measures: Sequence[_Measure]) -> tuple[object, ...]:
    return (
        measures.index(column.measure) if not column.source else 0,
        *_place(column.data, paper.DATA),
        *_place(column.network, paper.NETWORKS),
        *_place(column.source, paper.SOURCES),
        measures.index(column.measure),
    )


def _place(name: str, known: Mapping[str, str]) -> tuple[int, str]:
    """The paper's order first, then the alphabet."""
    names = list(known)
    return (names.index(name), "") if name in known else (len(names), name)


def _row_order(row: _Row) -> tuple[object, ...]:
    return (*_place(row.method, paper.METHODS), row.suffix, row.settings)


def _row_label(row: _Row) -> str:
    extra = [row.suffix] if row.suffix else []
    extra += [f"{key}={value}" for key, value in row.settings]
    name = paper.METHODS.get(row.method, row.method)
    return f"{name} ({', '.join(extra)})" if extra else name


def _column_labels(columns: Sequence[_Column]) -> list[str]:
    """Name each column by what varies; data and network stand in the title if there is one pair."""
    several = len({(c.data, c.network) for c in columns}) > 1
    labels = []
    for c in columns:
        what = [paper.SOURCES.get(c.source, c.source), c.measure.name()]
        where = [_pair(c.data, c.network)] if several or not any(what) else []
        labels.append(" ".join(word for word in [*where, *what] if word))
    return labels


def _pair(data: str, network: str) -> str:
    return f"{paper.DATA.get(data, data)} {paper.NETWORKS.get(network, network)}"


def _full_title(title: str, kind: str, which: str, columns: Sequence[_Column]) -> str:
    pairs = {(c.data, c.network) for c in columns}
    where = f", {_pair(*pairs.pop())}" if len(pairs) == 1 else ""
    return title + where + (f", {ACCURACIES[which]}" if kind == "accuracy" else "")


def _cell_text(row: _Row, column: _Column, seeds: Mapping[object, float] | None) -> str:
    digits = column.measure.digits
    printed = _printed(row.method, column)
    theirs = "" if printed is None else f"({printed:.{digits}f})"
    if not seeds:
        # A variant of ours is not in the paper: without a figure of ours its cell is empty.
        return "-" if row.suffix or row.settings else theirs or "-"
    values = list(seeds.values())
    text = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        text += f" \u00b1 {statistics.stdev(values):.{digits}f}, n={len(values)}"
    return f"{text} {theirs}".strip()


def _notes(kind: str, which: str, columns: Sequence[_Column], repeated: int) -> list[str]:
    notes = [
        "In brackets: the figure published in the paper. "
        "\u00b1: standard deviation over n seeds; without n, one seed."
    ]
    if kind == "accuracy":
        notes.append(
            f"Ours is {ACCURACIES[which]}. The paper does not say which it prints; for AlignMixup "
            "it is the best test epoch of the authors' logs."
        )
        notes.extend(_log_notes(columns))
    if repeated:
        notes.append(f"{repeated} repeated measurements: the newest of each is shown.")
    return notes


def _log_notes(columns: Sequence[_Column]) -> list[str]:
    """Quote the medians of the authors' own logs where the table has their column."""
    pairs = [(c.data, c.network) for c in columns]
    medians = [f for f in paper.find(table="logs") if (f.data, f.network) in pairs]
    if not medians:
        return []
    quoted = ", ".join(
        f"{_pair(f.data, f.network)} {100 - f.value:.2f}" for f in medians if f.value is not None
    )
    return [f"AlignMixup, median of the last ten epochs in the authors' own logs: {quoted}."]
