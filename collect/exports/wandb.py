"""Weights & Biases: offline runs in its own format, for `wandb sync` to send whenever a person wants that."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from collect import atomic_folder, tracked_run
from collect.export import Export, environment, package
from collect.loading.load import Loaded
from collect.summary import Summary
from collect.tracked_run import Tracked

FOLDER = "wandb"  # the library's own name for it


def write(loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    """One offline run of Weights & Biases per run."""
    # The library's reports of its own errors leave the machine unless this is set before it is imported.
    with environment(WANDB_ERROR_REPORTING="false"), _without_complaints_of_logging():
        wandb = package("wandb")
        try:
            for run in tracked_run.runs(loaded, summary):
                _run(wandb, tracked_run.name(loaded), run, folder)
        finally:
            wandb.teardown()
    atomic_folder.must_have_room(folder)  # a process of the library writes the runs, and ends well also if the disk is full
    _tidy(folder / FOLDER)


@contextlib.contextmanager
def _without_complaints_of_logging() -> Iterator[None]:
    """The library keeps a log beside each run. On a full disk `logging` would print a traceback for each line of that log."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def _run(wandb: ModuleType, project: str, run: Tracked, folder: Path) -> None:
    """Nothing of the machine that exports is kept: it is not the one that trained."""
    settings = wandb.Settings(
        mode="offline",
        root_dir=str(folder),
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        host=run.hosts or "unknown",
    )
    opened = wandb.init(
        project=project,
        id=run.id,
        name=run.id,
        group=run.group,
        tags=run.tags,
        config=run.config,
        settings=settings,
        reinit="create_new",
    )
    for point in run.points:
        times = {"_timestamp": point.wall_s, "_runtime": point.wall_s - (run.began_s or 0)}  # not those of the export
        opened.log(point.values | times, step=point.step)
    opened.summary.update({f"metrics/{name}": value for name, value in run.metrics.items()})
    opened.finish(exit_code=0 if run.state == "completed" else 1)


def _tidy(folder: Path) -> None:
    """Keep the runs alone: the logs tell of the export, and links would lead to where it was written first."""
    for left in folder.iterdir() if folder.exists() else ():
        if left.is_symlink() or left.is_file():
            left.unlink()
            continue
        for inside in left.iterdir():
            if inside.is_dir():
                shutil.rmtree(inside)


EXPORT = Export(
    name="wandb",
    summary="one offline run of Weights & Biases per run, for wandb sync",
    holds=frozenset({FOLDER}),
    write=write,
    extra="wandb",
    package="wandb",
)
