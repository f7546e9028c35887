"""Weights & Biases: offline runs in its own format, for `wandb sync` to send whenever a person wants that."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from collect import atomic_folder, tracked_run
from collect.export import Export, environment, package
from collect.loading.load import Loaded
from collect.summary import Summary
from collect.tracked_run import Tracked, TrackedStep

FOLDER = "wandb"  # the library's own name for it


def write(loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    """One offline run of Weights & Biases per run."""
    # The library's reports of its own errors leave the machine unless this is set before it is imported.
    with environment(WANDB_ERROR_REPORTING="false"), _without_complaints_of_logging():
        wandb = package("wandb")
        try:
            for run in tracked_run.runs(loaded, summary):
                opened = WandbRun(wandb, tracked_run.name(loaded), run, folder)
                opened.log(run.points)
                opened.end(run)
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


class WandbRun:
    """A run of Weights & Biases that is written into `folder`. Nothing of the machine that writes it is kept."""

    def __init__(self, wandb: ModuleType, project: str, run: Tracked, folder: Path, mode: str = "offline") -> None:
        settings = wandb.Settings(
            mode=mode,
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
        self._config, self._tags, self._began_s = run.config, run.tags, run.began_s or 0
        self._step, self._wall_s = -1, 0.0  # of the last row
        self._run = wandb.init(
            project=project,
            id=run.id,
            name=run.id,
            group=run.group,
            tags=run.tags,
            config=run.config,
            settings=settings,
            reinit="create_new",
        )

    def log(self, points: Sequence[TrackedStep]) -> None:
        """Points of one step become one row, at the moment of the first; of values of one name, the last one stays."""
        for point in points:
            if point.step != self._step:
                self._step, self._wall_s = point.step, point.wall_s
            times = {"_timestamp": self._wall_s, "_runtime": self._wall_s - self._began_s}  # not those of the library
            self._run.log(point.values | times, step=point.step)

    def end(self, run: Tracked) -> None:
        """Write the metrics, and what changed since the run was opened."""
        if new := {key: value for key, value in run.config.items() if key not in self._config}:
            self._run.config.update(new)
        if run.tags != self._tags:
            self._run.tags = tuple(run.tags)
        self._run.summary.update({f"metrics/{name}": value for name, value in run.metrics.items()})
        self._run.finish(exit_code=0 if run.state == "completed" else 1)


def follow(project: str, run: Tracked, folder: Path) -> WandbRun:
    """Offline, unless WANDB_MODE is `online`. Of this run nothing is kept that was written before."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    wandb = package("wandb")
    earlier = re.compile(rf"(offline-)?run-\d{{8}}_\d{{6}}-{re.escape(run.id)}")
    for path in (folder / FOLDER).iterdir() if (folder / FOLDER).exists() else ():
        if earlier.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path)
    folder.mkdir(parents=True, exist_ok=True)
    return WandbRun(wandb, project, run, folder, "online" if os.environ.get("WANDB_MODE") == "online" else "offline")


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
    follow=follow,
)
