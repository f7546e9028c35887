"""`collect track`: follows the records of one run and logs them to an experiment tracker until the run has ended."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import psutil

from collect import export, tracked_run
from collect.tracking.live_points import LivePoints
from shardlab import trackers
from shardlab.console import Output
from shardlab.state import FINAL
from shardlab.workspace import Workspace

LOOK_S = 2.0
NICENESS = 10  # lowers the priority of this process, so that it does not slow down the ranks of the run


def track(workspace: Workspace, run_id: str, tracker: str, parent: int | None, output: Output) -> int:
    """Log the run from its first record until it has ended, or the process `parent` has; exit code 0.

    A run that is logged again, as after a restart, replaces what was logged of it. Raises InputError for an unknown run or
    tracker, MissingExtra if the package of the tracker is not installed, and whatever the tracker raises.
    """
    trackers.must_be_known(tracker, "--to")
    trackers.must_be_installed(tracker, f"collect track --to {tracker}")
    follow = export.exports()[tracker].follow
    assert follow is not None, tracker
    folder, place = workspace.run(run_id), workspace.path / trackers.FOLDER
    supervisor = None if parent is None else psutil.Process(parent)
    if supervisor is not None:
        os.nice(NICENESS)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # as Slurm sends to all processes: the parent says when
            signal.signal(number, signal.SIG_IGN)
    run = folder.read_run()
    ended = False
    while not ended:
        project, begun = tracked_run.one(workspace, folder)
        opened = follow(project, _without_end(begun), place)
        output.line(f"{run_id} is logged to {place} ({tracker}).")
        points, count = LivePoints(folder, run), 0
        while True:
            over = folder.judge().state in FINAL or (supervisor is not None and _gone(supervisor))
            new = points.new()
            if new is None:
                opened.end(begun)
                output.line(f"{run_id}: its records were replaced; it is logged anew.")
                break
            opened.log(new)
            count += len(new)
            if over:
                opened.end(tracked_run.one(workspace, folder)[1])
                ended = True
                break
            time.sleep(LOOK_S)
    output.document({"run": run_id, "tracker": tracker, "folder": str(place), "points": count})
    return 0


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _without_end(run: tracked_run.Tracked) -> tracked_run.Tracked:
    """The description of the run for the tracker, without the values that are known only at the end of the run."""
    config = {key: value for key, value in run.config.items() if key != "state"}
    began_s = run.began_s if run.began_s is not None else time.time()
    hosts = run.hosts or os.uname().nodename
    return msgspec.structs.replace(run, config=config, points=[], metrics={}, began_s=began_s, hosts=hosts)
