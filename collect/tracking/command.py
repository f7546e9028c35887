"""`collect track`: follows the records of one run and logs them to an experiment tracker until the run has ended."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import psutil

from collect import export, tracked_run
from collect.tracking.live_points import LivePoints
from shardlab.runs import trackers
from shardlab.runs.state import FINAL_STATES
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

READING_PERIOD_S = 2.0
NICENESS = 10  # lowers the priority of this process, so that it does not slow down the ranks of the run


def track_run(workspace: Workspace, run_id: str, tracker: str, parent_pid: int | None, output: Output) -> int:
    """Log a run from its first record until the run or the process `parent_pid` has ended. Returns exit code 0.

    If a run is logged again, for example after a restart, the new data replaces what was logged of the run before.

    Raises InputError if the run or the tracker is not known, MissingExtra if the package of the tracker is not installed, and
    any error of the tracker.
    """
    trackers.check_tracker_name(tracker, "--to")
    trackers.check_tracker_installed(tracker, f"collect track --to {tracker}")
    follow_run = export.load_export_formats()[tracker].follow
    assert follow_run is not None, tracker
    run_dir, tracker_folder = workspace.find_run_dir(run_id), workspace.path / trackers.TRACKER_FOLDER
    parent_process = None if parent_pid is None else psutil.Process(parent_pid)
    if parent_process is not None:
        os.nice(NICENESS)
        # Slurm sends these signals to all processes of a job. They are ignored, because this process ends after its parent.
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_IGN)
    run_record = run_dir.read_run()
    is_finished = False
    while not is_finished:
        project_name, described_run = tracked_run.read_tracked_run(workspace, run_dir)
        follower = follow_run(project_name, _remove_end_values(described_run), tracker_folder)
        output.print_line(f"{run_id} is logged to {tracker_folder} ({tracker}).")
        live_points, point_count = LivePoints(run_dir, run_record), 0
        while True:
            has_run_ended = run_dir.judge().state in FINAL_STATES or (parent_process is not None and _has_ended(parent_process))
            new_points = live_points.read_new_points()
            if new_points is None:
                follower.end(described_run)
                output.print_line(f"{run_id}: its records were replaced; it is logged anew.")
                break
            follower.log(new_points)
            point_count += len(new_points)
            if has_run_ended:
                follower.end(tracked_run.read_tracked_run(workspace, run_dir)[1])
                is_finished = True
                break
            time.sleep(READING_PERIOD_S)
    output.print_document({"run": run_id, "tracker": tracker, "folder": str(tracker_folder), "points": point_count})
    return 0


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _remove_end_values(run: tracked_run.TrackedRun) -> tracked_run.TrackedRun:
    """The description of a run for the tracker, without the values that are only known at the end of the run."""
    initial_config = {key: value for key, value in run.config.items() if key != "state"}
    began_s = run.began_s if run.began_s is not None else time.time()
    hosts_text = run.hosts or os.uname().nodename
    return msgspec.structs.replace(run, config=initial_config, timed_steps=[], metrics={}, began_s=began_s, hosts=hosts_text)
