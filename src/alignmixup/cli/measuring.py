"""Commands that measure: ``evaluate``, and ``report`` for what it found."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, UseAppendAction

from alignmixup.cli.parsing import Call, listing, parse_setting, read_words
from alignmixup.cli.printing import Watch, note_unfinished, print_table


@dataclass
class Evaluate:
    """Evaluate a trained run and append the results to its results.jsonl.

    Under torchrun every process evaluates its share of the images; rank 0 prints and writes."""

    run: Positional[Path]
    """Folder of the run."""
    tasks: tuple[str, ...] = ("accuracy",)
    """Names of tasks, or 'all' for everything the data allow."""
    set: tuple[str, ...] = ()
    """Options of tasks, e.g. pgd.num_steps=40 fgsm.eps=4/255 ood.score=energy."""
    ood: UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Images for the task ood, e.g. uniform lsun-crop folder:PATH; defaults to all found."""
    dataset: str | None = None
    """Score on the test split of other data with the same classes: shapes, folder:PATH@64, ..."""
    clean_statistics: bool = False
    """Estimate the statistics of batch norm anew first, from training images without mixing."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    seed: int = 0
    """Seed of random starts and noise images."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""

    def __call__(self) -> None:
        from alignmixup.experiments.load import Run, load_run
        from alignmixup.experiments.run_folder import read_recipe
        from alignmixup.experiments.scoring import evaluate, join_processes, other_images
        from alignmixup.registry import TASKS

        team, device = join_processes(self.device)
        images = None
        if self.dataset is not None:
            images = other_images(self.run, self.dataset, self.data, team, device)
        run: Path | Run = self.run
        if self.clean_statistics:
            run = load_run(self.run, device=device).with_clean_statistics(data_root=self.data)
        with Watch(is_shown=team.is_rank_zero) as watch:
            done = evaluate(
                run,
                images,
                tasks=self.tasks,
                options=_options(self.set),
                ood=[name for names in self.ood for name in names] or ["all"],
                data_root=self.data,
                seed=self.seed,
                device=device,
                on_task=watch.task,
                on_images=watch.images,
                team=team,
            )
        if not team.is_rank_zero:
            return
        if done.results:
            epochs = read_recipe(self.run).train.epochs
            note_unfinished(self.run, done.results[0].epoch, epochs)
        table = Table("task", "metric", "value", "unit", "source", box=None)
        for result in done.results:
            source = str(result.settings.get("source", ""))
            unit = TASKS[result.task].unit(result.metric)
            table.add_row(result.task, result.metric, f"{result.value:.3f}", unit, source)
        print_table(table)
        for name, why in done.left_out.items():
            print(f"left out {name}: {why}")
        for name, why in done.failed.items():
            print(f"failed {name}: {why}")
        if done.failed:
            failed = ", ".join(done.failed)
            raise RuntimeError(f"failed: {failed}; the other results are saved")


def parse_evaluate(args: list[str]) -> Call:
    """Read the words after ``evaluate``; its help lists the tasks that are registered."""
    from alignmixup.registry import task_abouts

    return read_words(Evaluate, "evaluate", args, about=listing("Tasks:", task_abouts()))


def _options(texts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """pgd.num_steps=40 as {"pgd": {"num_steps": 40}}."""
    options: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, value = parse_setting(text, "pgd.num_steps=40")
        task, _, name = path.partition(".")
        options.setdefault(task, {})[name] = value
    return options


@dataclass
class Report:
    """Compare the results of runs with the paper: a page to open in a browser, and tables.

    --out DIR writes DIR/report.html, one file that works offline, and tables.md and tables.tex for
    papers. Runs far shorter than their recipe are smoke tests: hidden on the page until a box is
    ticked, and left out of the tables.
    """

    runs: Positional[tuple[Path, ...]]
    """Folders of runs, or files of result lines."""
    out: Path | None = None
    """Folder of the page and the tables; None: print a summary only."""
    accuracy: Literal["median10", "last", "best"] = "median10"
    """Which accuracy: the median of the last ten epochs (the last epoch of a run of fewer than 30),
    the last, or the best test epoch."""
    smoke_tests: bool = False
    """Keep smoke tests in the tables."""
    no_pictures: bool = False
    """Only read pictures of runs; by default those that are missing are made, from the data."""
    title: str = "alignmixup report"
    """Title of the page."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup.experiments.provenance import recipe_settings
        from alignmixup.files import make_folder
        from alignmixup.report.curves import run_folders
        from alignmixup.report.page import write_page
        from alignmixup.report.reading import read_results
        from alignmixup.report.render import write_tables
        from alignmixup.report.summary import comparison_table, paper_tables, summarize
        from alignmixup.report.terminal import plain, to_text, wrap

        if self.out is not None:
            files = [path for path in (self.out, *self.out.parents) if path.is_file()]
            if files or self.out.suffix == ".html":
                what = f"{files[0]} is a file" if files else f"{self.out} names a page"
                raise ValueError(f"--out must be a folder, for report.html and tables; {what}")
        if not self.runs:
            raise ValueError("name folders of runs or files of results: alignmixup report runs")
        results = read_results(self.runs)
        summary = summarize(results, self.accuracy, recipe_settings, smoke_tests=self.smoke_tests)
        if not summary.tables:
            where = ", ".join(str(path) for path in self.runs)
            raise ValueError(
                f"no results in {where} for a table (--accuracy {self.accuracy}): the top-1 error "
                "is that of a run trained to its end; the other tables need a task, such as "
                "'alignmixup evaluate RUN --tasks calibration'"
            )
        if self.out is not None:
            make_folder(self.out)  # now: pictures take minutes
        width = Console().width  # of the terminal, or COLUMNS, or 80
        for each in summary.tables:
            print(to_text(each, width))
        lines = list(summary.lines)
        if self.out is None:
            lines.append("--out DIR writes all of it as a page with charts, and for papers")
        for line in lines:
            print("\n".join(wrap(plain(line), width, indent="  ")))
        if self.out is None:
            return
        if not self.no_pictures:
            from alignmixup.figures.run_pictures import make_pictures

            make_pictures(
                run_folders(self.runs),
                self.data,
                lambda run: print(f"making the pictures of {run} ...", file=sys.stderr),
            )
        page = write_page(
            results,
            self.runs,
            self.out,
            title=self.title,
            which=self.accuracy,
            recipe_settings=recipe_settings,
        )
        tables = paper_tables(summary, self.accuracy, recipe_settings)
        compared = comparison_table(summary.grids)
        for path in write_tables([*tables, *([compared] if compared else [])], self.out):
            print(path)
        print(page)
