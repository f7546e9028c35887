"""Reports which runs will end before the lease of their nodes, and holds back the runs that would end later.

`jobs plan`, `jobs submit` and `jobs status` print the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from statistics import fmean
from typing import Any

import msgspec

from jobs.invocation import Invocation
from jobs.planning.plan import MatrixPlan
from jobs.planning.repeats import order_runs_by_repeat
from jobs.rendering import render
from jobs.scheduler import SubmitOptions
from jobs.status.reconcile import Status, select_last_attempts, statuses
from jobs.submission.lease_schedule import EstimatedEnd, NodeSchedule, RunTime, estimate_run_time
from jobs.submission.submit import RunDecision
from shardlab.cluster.lease import Lease
from shardlab.errors import InputError, WorkspaceError
from shardlab.runs.run import parse_run_id, run_id
from shardlab.runs.rundir import RunDir
from shardlab.terminal import moments
from shardlab.workspace import inventory
from shardlab.workspace.inventory import Inventory
from shardlab.workspace.workspace import Workspace

BASES = {"recorded": "by recorded times", "limit": "by time limits"}
MOST_NAMED_RUNS = 5  # the most run ids that a sentence names


class LeaseReport(msgspec.Struct, frozen=True):
    """The lease of the nodes, and whether the unfinished runs will end before the lease ends."""

    lease: Lease
    """The lease."""
    stale: bool
    """Whether the data of the lease may be out of date."""
    nodes: int
    """The number of nodes on which runs can run. The estimate assumes that a run uses whole nodes."""
    runs: int
    """The number of runs in the estimate: runs that have not ended, without the runs in `held`."""
    ends: datetime | None
    """The latest end of the runs that end before the lease; None if no run ends before the lease, or if `unknown` is not
    empty."""
    late: list[str]
    """The ids of the runs that are not held back and would not end before the lease."""
    held: list[str]
    """The ids of the runs that are held back, because they would not end before the lease."""
    unknown: list[str]
    """The ids of the runs that may or may not end before the lease: neither a time limit nor a recorded time is known for the
    run or for a run before it."""
    bases: dict[str, int]
    """The source of an estimate (recorded, limit or unknown) -> the number of runs in the estimate with this source."""

    def document(self) -> dict[str, Any]:
        """The report for JSON: the fields of the lease and the other fields of this report, in one object."""
        other_fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "lease"}
        return {**msgspec.to_builtins(self.lease), **other_fields}

    def sentences(self, current_time: datetime) -> list[str]:
        """Sentences for people: when the lease ends, and whether the runs end before the lease."""
        urge = self.lease.copy_reminder(current_time)
        return [self.lease.describe(current_time), *self._describe_runs(), *([urge] if urge is not None else [])]

    def _describe_runs(self) -> list[str]:
        sentences = []
        estimated = ", ".join(f"{BASES[key]} for {count}" for key, count in sorted(self.bases.items()) if key in BASES)
        basis = f" (whole nodes, {self.nodes} of them, one run after another; {estimated})" if estimated else ""
        if self.late:
            sentences.append(
                f"{len(self.late)} of {self.runs} run(s) would not end before the lease{basis}: {_name_runs(self.late)}. To "
                "ask for an extension: provision CLUSTER.yaml extend --hours N --reason TEXT"
            )
        elif self.ends is not None:
            sentences.append(
                f"{self.runs} run(s) end before the lease, the last about {moments.format_time(self.ends)}{basis}."
            )
        if self.unknown:
            sentences.append(
                f"of {len(self.unknown)} run(s) it is not known whether they end before the lease, because neither a time "
                f"limit nor a recorded time is known: {_name_runs(self.unknown)}. Set `time_limit` in the matrix."
            )
        if self.held:
            sentences.append(
                f"{len(self.held)} run(s) are held back, because they would not end before the lease: {_name_runs(self.held)}. "
                "After an extension: jobs retry --only held"
            )
        return sentences


class LeaseEstimate:
    """Estimates which runs end before the lease. Runs must be added in the order in which they start."""

    def __init__(self, leased_inventory: Inventory, current_time: datetime) -> None:
        """Start without runs: all nodes are free. leased_inventory: it must have a lease."""
        assert leased_inventory.lease is not None
        self.lease, self._current_time = leased_inventory.lease, current_time
        self._schedule = NodeSchedule(len(leased_inventory.with_role("worker") or leased_inventory.nodes))
        self._left_s = self.lease.left_s(current_time)
        self._late: list[str] = []
        self._held: list[str] = []
        self._unknown: list[str] = []
        self._last_s: float | None = None
        self._bases: Counter[str] = Counter()

    def add(self, run: RunTime, after: EstimatedEnd | None = None, *, or_hold: bool = False) -> EstimatedEnd | None:
        """Add a run, and return when it is estimated to end.

        after: the end of another run, before which this run does not start. or_hold: if the run would not end before the lease,
        list it in the report as held back instead of adding it, and return None.
        """
        end = self._schedule.estimate_end(run, after)
        is_late = end.end_s > self._left_s
        if is_late and or_hold:
            self._held.append(run.run_id)
            return None
        self._bases[run.source] += 1
        if is_late:
            self._late.append(run.run_id)
        elif end.is_least:
            self._unknown.append(run.run_id)
        else:
            self._last_s = max(self._last_s or 0.0, end.end_s)
        return self._schedule.add(run, after)

    def add_remaining(self, runs: Sequence[Status], workspace: Workspace, recorded: Mapping[str, float]) -> None:
        """Add the running and the pending runs of the workspace, running runs first, and list the runs that are held back.

        recorded: the mean seconds of a run, by the name of its cell.
        """
        self._held += [run.id for run in runs if run.held and run.state == "planned"]
        unfinished = [run for run in runs if run.state in ("running", "pending") and not run.held and not run.is_unreadable]
        for run in sorted(unfinished, key=lambda run: run.state != "running"):
            elapsed_s = (run.duration_s or 0.0) if run.state == "running" else 0.0
            self.add(estimate_run_time(RunDir(workspace.runs / run.id).read_run(), recorded, elapsed_s))

    def why_held(self, run: RunTime, after: EstimatedEnd | None = None) -> str:
        """A sentence that says why the method `add` held a run back. after: as for `add`."""
        end = self._schedule.estimate_end(run, after)
        end_text = moments.format_time(self._current_time + timedelta(seconds=end.end_s))
        return (
            f"held back, because the lease ends {moments.format_time(self.lease.expires)} and the run would end "
            f"about {end_text}"
            f"{' or later' if end.is_least else ''}{f' ({BASES[run.source]})' if run.source in BASES else ''}: after an "
            "extension, `jobs retry --only held` sends it; `--ignore-lease` sends it all the same"
        )

    def report(self) -> LeaseReport:
        """The report on the lease and on all runs that were added to this estimate."""
        end = self._current_time + timedelta(seconds=self._last_s) if self._last_s is not None and not self._unknown else None
        return LeaseReport(
            lease=self.lease,
            stale=self.lease.is_stale(self._current_time),
            nodes=self._schedule.nodes,
            runs=self._bases.total(),
            ends=end,
            late=self._late,
            held=self._held,
            unknown=self._unknown,
            bases=dict(self._bases),
        )


def mean_recorded_s(runs: Iterable[Status]) -> dict[str, float]:
    """The mean duration in seconds of the runs that completed in their first attempt, by the name of the cell."""
    times: dict[str, list[float]] = {}
    for run in runs:
        parts = parse_run_id(run.id)
        if parts is not None and parts.attempt == 1 and run.state == "completed" and run.duration_s is not None:
            times.setdefault(parts.cell, []).append(run.duration_s)
    return {cell: fmean(seconds) for cell, seconds in times.items()}


def report_on_workspace(workspace: Workspace, current_time: datetime) -> LeaseReport | None:
    """The report on all runs of the workspace that have not ended.

    None if the nodes have no lease, or if the inventory cannot be read (the commands that submit runs report this fault).
    """
    try:
        leased_inventory = inventory.read_leased_inventory(workspace)
    except (InputError, WorkspaceError):
        return None
    if leased_inventory is None:
        return None
    estimate = LeaseEstimate(leased_inventory, current_time)
    runs = statuses(workspace, select_last_attempts(workspace.all_runs()))
    estimate.add_remaining(runs, workspace, mean_recorded_s(runs))
    return estimate.report()


def hold_late_runs(
    invocation: Invocation, decisions: list[RunDecision], source: render.RenderContext, submit_options: SubmitOptions
) -> tuple[list[RunDecision], LeaseReport | None]:
    """Hold back the runs that would not end before the lease, unless --ignore-lease is given.

    decisions: the decision on each run. Returns (the decisions, in which late runs are marked as held back; the report).
    Without a lease, returns (the decisions unchanged, None). Raises InputError."""
    workspace, current_time = invocation.workspace, datetime.now(UTC)
    leased_inventory = inventory.read_leased_inventory(workspace, source.where.name)
    if leased_inventory is None:
        return decisions, None
    at_once = 1 if submit_options.pack else submit_options.at_once
    estimate = LeaseEstimate(leased_inventory, current_time)
    sent_ids = {decision.run.run_id for decision in decisions if decision.send}
    runs = statuses(workspace, select_last_attempts(workspace.all_runs()))
    recorded = mean_recorded_s(runs)
    estimate.add_remaining([run for run in runs if run.id not in sent_ids], workspace, recorded)
    checked, sent = list[RunDecision](), list[EstimatedEnd]()
    for decision in decisions:
        if decision.send:
            limit = sorted(sent, key=lambda end: end.end_s)[-at_once] if at_once is not None and len(sent) >= at_once else None
            run_time = estimate_run_time(decision.run, recorded)
            end = estimate.add(run_time, limit, or_hold=not invocation.arguments.ignore_lease)
            if end is None:
                why = estimate.why_held(run_time, limit)
                checked.append(msgspec.structs.replace(decision, send=False, held_back=not _is_in_queue(decision), why=why))
                continue
            sent.append(end)
        checked.append(decision)
    return checked, estimate.report()


def hold_late_folders(workspace: Workspace, waiting: Sequence[RunDir], number: int, *, pack: bool) -> list[RunDir]:
    """Hold back waiting runs that would not end before the lease, and return the other waiting runs, in order.

    waiting: the runs that wait to be submitted. number: how many of them are about to be submitted; runs behind them in the
    list are returned unchecked. pack: whether the runs run one after another in one allocation. The reason is written into the
    events of each run that is held back. Without a lease, all waiting runs are returned. Raises ShardlabError.
    """
    current_time = datetime.now(UTC)
    leased_inventory = inventory.read_leased_inventory(workspace)
    if leased_inventory is None:
        return list(waiting)
    estimate = LeaseEstimate(leased_inventory, current_time)
    runs = statuses(workspace, select_last_attempts(workspace.all_runs()))
    recorded, not_sent = mean_recorded_s(runs), {folder.run_id for folder in waiting}
    estimate.add_remaining([run for run in runs if run.id not in not_sent], workspace, recorded)
    kept_folders, end_before = list[RunDir](), None
    for index, folder in enumerate(waiting):
        if len(kept_folders) == number:
            return [*kept_folders, *waiting[index:]]
        run_time = estimate_run_time(folder.read_run(), recorded)
        end = estimate.add(run_time, end_before, or_hold=True)
        if end is None:
            folder.write_event("controller", "held", why=estimate.why_held(run_time, end_before))
            continue
        end_before = end if pack else None
        kept_folders.append(folder)
    return kept_folders


def report_on_plan(workspace: Workspace, planned: MatrixPlan, current_time: datetime) -> LeaseReport | None:
    """The report on the runs of a plan, without runs that have ended in this workspace; None without a lease. Raises
    InputError."""
    leased_inventory = inventory.read_leased_inventory(workspace, planned.source.where.name)
    if leased_inventory is None:
        return None
    estimate = LeaseEstimate(leased_inventory, current_time)
    for cell, repeat in order_runs_by_repeat(planned.cells, planned.repeats):
        folder = RunDir(workspace.runs / run_id(cell, repeat))
        if not folder.path.exists() or not folder.has_ended():
            estimate.add(estimate_run_time(render.make_run(cell, repeat, 1, planned.source), planned.recorded))
    return estimate.report()


def _is_in_queue(decision: RunDecision) -> bool:
    """Whether the run is already in the scheduler's queue, where it is held because the installed packages changed."""
    return decision.now is not None and decision.now.held and decision.now.state == "pending"


def _name_runs(run_ids: Sequence[str]) -> str:
    return ", ".join(run_ids[:MOST_NAMED_RUNS]) + (", ..." if len(run_ids) > MOST_NAMED_RUNS else "")
