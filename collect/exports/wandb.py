"""Exports runs to Weights & Biases as offline runs in the format of wandb, which a user can upload later with `wandb sync`."""

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
from collect.export import Export, import_package, set_environment_variables
from collect.reading.load import LoadedMatrix
from collect.summary import Summary
from collect.tracked_run import TrackedRun, TrackedStep

WANDB_FOLDER = "wandb"  # the folder into which the library wandb writes runs


def write_offline_runs(loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one offline run of Weights & Biases for each run of the matrix."""
    # The library sends reports of its own errors over the network unless this variable is `false` when it is imported.
    with set_environment_variables(WANDB_ERROR_REPORTING="false"), _silence_logging_errors():
        wandb = import_package("wandb")
        try:
            for run in tracked_run.list_tracked_runs(loaded, summary):
                wandb_run = WandbRun(wandb, tracked_run.get_experiment_name(loaded), run, folder)
                wandb_run.log(run.timed_steps)
                wandb_run.end(run)
        finally:
            wandb.teardown()
    atomic_folder.check_free_space(folder)  # the library's process that writes the runs reports no error if the disk is full
    _remove_logs(folder / WANDB_FOLDER)


@contextlib.contextmanager
def _silence_logging_errors() -> Iterator[None]:
    """Turn off the error messages of `logging` inside the block.

    The library writes a log for each run. If the disk is full, `logging` would print a traceback for each line of this log.
    """
    earlier_value, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = earlier_value


class WandbRun:
    """An open run of Weights & Biases. It contains no data about the machine that writes it.

    folder: the folder in which the library writes the run.
    """

    def __init__(self, wandb: ModuleType, project: str, run: TrackedRun, folder: Path, mode: str = "offline") -> None:
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
        self._step, self._wall_s = -1, 0.0  # step and time of the last row
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

    def log(self, tracked_steps: Sequence[TrackedStep]) -> None:
        """Log the values of steps. tracked_steps: the steps, each with its number, its time, and its values by name.

        Points with the same step number become one row with the time of the first of these points. If two of them have a value
        of the same name, the later value is kept.
        """
        for tracked_step in tracked_steps:
            if tracked_step.step != self._step:
                self._step, self._wall_s = tracked_step.step, tracked_step.wall_s
            # Without these two values, the library would use the time at which `log` is called.
            wandb_times = {"_timestamp": self._wall_s, "_runtime": self._wall_s - self._began_s}
            self._run.log(tracked_step.values | wandb_times, step=tracked_step.step)

    def end(self, run: TrackedRun) -> None:
        """Write the metrics, and the configuration and tags that changed since the run was opened; then close the run."""
        if new_config := {key: value for key, value in run.config.items() if key not in self._config}:
            self._run.config.update(new_config)
        if run.tags != self._tags:
            self._run.tags = tuple(run.tags)
        self._run.summary.update({f"metrics/{name}": value for name, value in run.metrics.items()})
        self._run.finish(exit_code=0 if run.state == "completed" else 1)


def follow_run(project: str, run: TrackedRun, folder: Path) -> WandbRun:
    """Open a run of Weights & Biases for a run that is still going on. Earlier files of the run are removed.

    The run is offline unless the environment variable WANDB_MODE is `online`.
    """
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    wandb = import_package("wandb")
    run_folder_pattern = re.compile(rf"(offline-)?run-\d{{8}}_\d{{6}}-{re.escape(run.id)}")
    for run_folder in (folder / WANDB_FOLDER).iterdir() if (folder / WANDB_FOLDER).exists() else ():
        if run_folder_pattern.fullmatch(run_folder.name) and not run_folder.is_symlink():
            shutil.rmtree(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    return WandbRun(wandb, project, run, folder, "online" if os.environ.get("WANDB_MODE") == "online" else "offline")


def _remove_logs(folder: Path) -> None:
    """Remove everything except the runs from the library's folder: logs about the export, and links to the temporary folder."""
    for folder_entry in folder.iterdir() if folder.exists() else ():
        if folder_entry.is_symlink() or folder_entry.is_file():
            folder_entry.unlink()
            continue
        for inner_path in folder_entry.iterdir():
            if inner_path.is_dir():
                shutil.rmtree(inner_path)


EXPORT = Export(
    name="wandb",
    summary="one offline run of Weights & Biases per run, for wandb sync",
    written_names=frozenset({WANDB_FOLDER}),
    write=write_offline_runs,
    package="wandb",
    follow=follow_run,
)
