"""Estimates which runs will not end before the lease of their nodes, and holds these runs back.

The estimate: a run takes whole nodes. It starts when enough nodes are free and all runs before it have started. It takes as
long as `gpu_hours.estimate_run_time` says, or no time if that is not known. Runs of other people and of other workspaces are
not known.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from statistics import fmean

import msgspec

from jobs.planning import gpu_hours
from jobs.planning.plan import MatrixPlan
from jobs.planning.repeats import order_runs_by_repeat
from jobs.rendering import render
from jobs.scheduler import SubmitOptions
from jobs.status.reconcile import read_statuses, select_last_attempts
from jobs.submission.submit import RunDecision
from shardlab.runs import prediction
from shardlab.runs.prediction import Prediction
from shardlab.runs.run import Run, make_run_id, parse_run_id
from shardlab.runs.rundir import RunDir
from shardlab.terminal import moments
from shardlab.workspace import inventory
from shardlab.workspace.inventory import Inventory
from shardlab.workspace.workspace import Workspace


class LeaseSchedule:
    """When the nodes become free, and which runs would end after the lease. Runs are added in the order in which they start.

    All times are in seconds from now.
    """

    def __init__(self, leased: Inventory, recorded_s: Mapping[str, float] | None = None, at_once: int | None = None) -> None:
        """leased: an inventory with a lease. recorded_s: the mean duration of a cell's completed runs, by the name of
        the cell. at_once: the most runs that run at the same time, of those that are held back if they are late; None: no
        limit."""
        assert leased.lease is not None
        self.lease, self._current_time = leased.lease, datetime.now(UTC)
        # when each node becomes free, sorted
        self._node_free_s = [0.0] * max(1, len(leased.list_with_role("worker") or leased.nodes))
        self._recorded_s, self._most_at_once = recorded_s or {}, at_once
        self._last_start_s, self._run_end_s = 0.0, list[float]()

    def add_unfinished(self, workspace: Workspace, excluded_ids: Container[str]) -> None:
        """Add the running and the pending runs of a workspace, except for runs with the ids `excluded_ids`. Their recorded
        durations are used for the runs that are added later."""
        runs = read_statuses(workspace, select_last_attempts(workspace.list_run_dirs()))
        durations_by_cell: dict[str, list[float]] = {}
        for run in runs:
            id_parts = parse_run_id(run.id)
            if id_parts is not None and id_parts.attempt == 1 and run.state == "completed" and run.duration_s is not None:
                durations_by_cell.setdefault(id_parts.cell_name, []).append(run.duration_s)
        self._recorded_s = {cell: fmean(durations_s) for cell, durations_s in durations_by_cell.items()}
        unfinished = [run for run in runs if run.state in ("running", "pending") and not run.held and not run.is_unreadable]
        for run in sorted(unfinished, key=lambda run: run.state != "running"):
            if run.id not in excluded_ids:
                elapsed_s = (run.duration_s or 0.0) if run.state == "running" else 0.0
                run_dir = RunDir(workspace.runs / run.id)
                run_prediction = prediction.read_prediction(run_dir.path)
                self.add_run(run_dir.read_run(), run_prediction, elapsed_s, always_add=True)

    def add_run(
        self, run: Run, run_prediction: Prediction | None, elapsed_s: float = 0.0, *, always_add: bool = False
    ) -> str | None:
        """Add a run, and return None; if the run would not end before the lease, return why the run is held back instead.

        run_prediction: the prediction of the run; None if there is none. elapsed_s: seconds since the run started. always_add:
        whether to add the run even if it would not end before the lease.
        """
        node_count = min(run.world.nnodes, len(self._node_free_s))
        left_s, source_clause = estimate_time_left(run, self._recorded_s, run_prediction, elapsed_s)
        start_s = max(self._last_start_s, self._node_free_s[node_count - 1])
        if self._most_at_once is not None and len(self._run_end_s) >= self._most_at_once and not always_add:
            start_s = max(start_s, sorted(self._run_end_s)[-self._most_at_once])
        end_s, is_late = start_s + left_s, start_s + left_s > self.lease.compute_left_s(self._current_time)
        if always_add or not is_late:
            self._last_start_s, self._node_free_s = start_s, sorted([*self._node_free_s[node_count:], *[end_s] * node_count])
            self._run_end_s += [] if always_add else [end_s]
        if not is_late:
            return None
        return (
            f"held back, because the lease ends {moments.format_time(self.lease.expires)} and the run would end "
            f"about {moments.format_time(self._current_time + timedelta(seconds=end_s))}{source_clause}: after an "
            "extension, `jobs retry --only held` sends it; `--ignore-lease` sends it all the same"
        )


def estimate_time_left(
    run: Run, recorded_s: Mapping[str, float], run_prediction: Prediction | None, elapsed_s: float = 0.0
) -> tuple[float, str]:
    """The seconds that a run still needs (0 if its time is not known), and their source in words.

    recorded_s: the mean duration of a cell's completed runs, by the name of the cell. run_prediction: the prediction of the
    run.
    elapsed_s: seconds since the run started; 0 if it has not started.
    """
    id_parts, mean_s, limit_s = parse_run_id(run.run_id), None, run.limit_s
    if run.search is not None:  # its tries have larger batches than the first try, of which recorded and predicted times are
        run_prediction, limit_s = None, None if limit_s is None else run.search.most_tries * limit_s
    elif id_parts is not None:
        mean_s = recorded_s.get(id_parts.cell_name)
    run_time = gpu_hours.estimate_run_time(mean_s, run_prediction, limit_s, elapsed_s)
    return (0.0, "") if run_time is None else (max(run_time.seconds - elapsed_s, 0.0), f" (by {run_time.source})")


def hold_back_late_runs(
    workspace: Workspace,
    leased_inventory: Inventory,
    decisions: list[RunDecision],
    context: render.RenderContext,
    submit_options: SubmitOptions,
) -> list[RunDecision]:
    """The decisions, in which the runs that would not end before the lease are marked as held back.

    leased_inventory: an inventory with a lease."""
    lease_schedule = LeaseSchedule(leased_inventory, at_once=1 if submit_options.is_packed else submit_options.most_runs)
    lease_schedule.add_unfinished(workspace, {decision.run.run_id for decision in decisions if decision.is_sent})
    checked_decisions = []
    for decision in decisions:
        run_prediction = context.predictions.get(decision.run.cell.name())
        if run_prediction is None and decision.status is not None:  # a new attempt; the last attempt has a prediction
            run_prediction = prediction.read_prediction(workspace.runs / decision.status.id)
        if decision.is_sent and (late_reason := lease_schedule.add_run(decision.run, run_prediction)) is not None:
            # a run that is already in the queue is held there, because the installed packages changed
            in_queue = decision.status is not None and decision.status.is_held_in_queue
            decision = msgspec.structs.replace(decision, is_sent=False, is_held_back=not in_queue, why=late_reason)
        checked_decisions.append(decision)
    return checked_decisions


def hold_late_folders(workspace: Workspace, waiting_runs: Sequence[RunDir], most_sent: int, *, pack: bool) -> list[RunDir]:
    """Hold back waiting runs that would not end before the lease, and return the other waiting runs, in order.

    waiting_runs: the runs that wait to be submitted. most_sent: how many of them are about to be submitted; runs behind them in
    the list are returned unchecked. pack: whether the runs run one after another in one allocation. The reason is written into
    the events of each run that is held back. Without a lease, all waiting runs are returned. Raises ShardlabError.
    """
    leased_inventory = inventory.read_leased_inventory(workspace)
    if leased_inventory is None:
        return list(waiting_runs)
    lease_schedule = LeaseSchedule(leased_inventory, at_once=1 if pack else None)
    lease_schedule.add_unfinished(workspace, {folder.run_id for folder in waiting_runs})
    sendable_folders = list[RunDir]()
    for index, folder in enumerate(waiting_runs):
        if len(sendable_folders) == most_sent:
            return [*sendable_folders, *waiting_runs[index:]]
        if (late_reason := lease_schedule.add_run(folder.read_run(), prediction.read_prediction(folder.path))) is None:
            sendable_folders.append(folder)
        else:
            folder.write_event("controller", "held", why=late_reason)
    return sendable_folders


def count_late_runs(plan: MatrixPlan, workspace: Workspace) -> int:
    """The number of runs of a plan that would not end before the lease. Runs that have ended in this workspace take no time.
    Raises InputError."""
    leased_inventory = inventory.read_leased_inventory(workspace, plan.context.cluster.name)
    if leased_inventory is None:
        return 0
    lease_schedule = LeaseSchedule(leased_inventory, plan.recorded_s)
    runs = [
        render.make_run(cell, repeat, 1, plan.context)
        for cell, repeat in order_runs_by_repeat(plan.cells, plan.repeats_by_cell)
        if not (run_dir := RunDir(workspace.runs / make_run_id(cell, repeat))).path.exists() or not run_dir.has_ended()
    ]
    return sum(lease_schedule.add_run(run, plan.predictions.get(run.cell.name()), always_add=True) is not None for run in runs)
