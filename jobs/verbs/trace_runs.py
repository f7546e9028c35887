"""The verb `jobs trace`: sends the analysis of a folder of profiler traces as runs, each of which analyses a part of the files.

The runs follow the same protocol as training runs: they are submitted exactly once, and have states, logs, retries and step
records (one step for each trace file). `collect trace NAME` merges their summaries.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jobs import on_controller
from jobs.planning import plan
from jobs.rendering import render
from jobs.submission import submit
from jobs.verb import JobsVerb
from jobs.verbs import sending, shared_options
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.matrix.cell import Cell, Optimizer
from shardlab.runs.trace_part import TRACE_STRATEGY, TracePart
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation

PER_RUN = 32  # the most trace files that one run analyses
MOST_PER_RUN = 100_000
_DIGITS = re.compile(r"(\d+)")


class TraceRuns(msgspec.Struct, frozen=True):
    """The runs that analyse the traces of a folder."""

    name: str
    """The common name of these runs, as a matrix has a name."""
    parts: list[tuple[Cell, TracePart]]
    """For each run, by its cell, the trace files that it analyses."""


class TraceRunsVerb(JobsVerb):
    """Analyse a folder of profiler traces as runs on a cluster; `collect trace` merges them."""

    name = "trace"
    example = "jobs trace /scratch/alice/traces --cluster cluster.yaml --wait"
    permission = "start runs"
    starts_runs = makes_runs = True

    def add_options(self, parser: Parser) -> None:
        folder_help = "folder of Chrome traces, *.json or *.json.gz, that all nodes can read"
        parser.add_argument("folder", metavar="FOLDER", help=folder_help)
        shared_options.add_cluster(parser)
        per_run_help = f"number of trace files that one run analyses (default: {PER_RUN})"
        parser.add_argument("--per-run", type=int, default=PER_RUN, metavar="N", help=per_run_help)
        shared_options.add_wait(parser)
        shared_options.add_sharing_options(parser)
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        out, workspace = invocation.out, invocation.workspace
        runs = find_trace_runs(invocation)
        cells, parts = [cell for cell, _ in runs.parts], {cell.name(): part for cell, part in runs.parts}
        repeats = dict.fromkeys(parts, 1)
        source = msgspec.structs.replace(render.make_render_context(runs.name, invocation.cluster, workspace), traces=parts)
        options = shared_options.read_submit_options(invocation, source)
        on_controller.must_suit_cluster(source.where, workspace)
        submit.check_runs(workspace, cells, repeats, source)
        plan.must_run_here(source, allow_login_node=invocation.arguments.here, trains=False)
        with workspace.hold_runs_lock():
            all_readable = sending.finish_interrupted(invocation, source)
            decisions = submit.decide_runs(workspace, cells, repeats, source)
            submit_plan = sending.send_runs(invocation, sending.plan_submission(invocation, decisions, source, options))
        code = sending.report_sent(invocation, submit_plan, all_readable=all_readable)
        out.print_remark(f"note: when all have completed, `collect trace {runs.name}` merges them.")
        return code


def find_trace_runs(invocation: Invocation) -> TraceRuns:
    """The runs that analyse the folder of the command line. Raises InputError if there is nothing to analyse.

    The name and the cells depend on the files, their sizes and their times, so the same command, if it is given again later,
    submits only runs for new or changed files.
    """
    folder, per_run = Path(invocation.arguments.folder).absolute(), invocation.arguments.per_run
    if not 1 <= per_run <= MOST_PER_RUN:
        raise InputError(f"--per-run: found {per_run}. Allowed: 1 to {MOST_PER_RUN}.")
    cluster = invocation.cluster
    if cluster.has_separate_folders:
        raise InputError(
            f"jobs trace: the nodes of the cluster {cluster.name} share no folder, so they cannot read the same traces. "
            "Allowed: a cluster whose nodes share a folder, or `collect trace` on one machine."
        )
    _must_be_shared(folder, cluster)
    trace_paths = _find_traces(folder)
    names = [path.name for path in trace_paths]
    chunks = [names[start : start + per_run] for start in range(0, len(names), per_run)]
    file_states = [(path.name, (status := path.stat()).st_size, status.st_mtime_ns) for path in trace_paths]
    name = f"traces-{_digest_value([str(folder), per_run, file_states])}"
    parts = [TracePart(folder=str(folder), files=chunk, place=index, parts=len(chunks)) for index, chunk in enumerate(chunks)]
    return TraceRuns(name, [(_make_trace_cell(name, part), part) for part in parts])


def _find_traces(folder: Path) -> list[Path]:
    """The trace files of a folder, in the numeric order of their names. Raises InputError if there are none."""
    with files.as_workspace_error("read"):
        paths = [path for path in folder.glob("*.json*") if not path.name.startswith(".") and path.is_file()]
    if not paths:
        raise InputError(f"{folder}: no traces. Allowed: a folder with Chrome traces, *.json or *.json.gz.")
    if unsuited_path := next((path for path in paths if not files.is_utf8(path.name)), None):
        raise InputError(f"{folder}: the name {unsuited_path.name!r} is not valid UTF-8. Allowed: names in UTF-8.")
    return sorted(paths, key=lambda path: [(int(part) if part.isdecimal() else -1, part) for part in _DIGITS.split(path.name)])


def _must_be_shared(folder: Path, cluster: Cluster) -> None:
    """Raises InputError if the nodes of the cluster could not read the folder."""
    shared_folder = cluster.storage.shared if cluster.provider != "local" else None
    if shared_folder is not None and not folder.resolve().is_relative_to(Path(shared_folder).resolve()):
        raise InputError(
            f"{folder}: lies outside of {shared_folder}, which the nodes of {cluster.name} share; they would not find the "
            f"traces. Allowed: a folder in {shared_folder}."
        )


def _make_trace_cell(name: str, part: TracePart) -> Cell:
    """The cell of a run that analyses traces, whose steps are the trace files. Its optimizer and its seed mean nothing; they
    are in the hash, so other values would name other runs."""
    return Cell(
        workload=f"part-{part.place:05d}", strategy=TRACE_STRATEGY, launcher=TRACE_STRATEGY, gpus=1, dp=1,
        global_batch_size=len(part.files),
        micro_batch_size=1, steps=len(part.files), prove="off", optimizer=Optimizer("sgd", 1.0), seed=0,
        options={"traces": name},
    )  # fmt: skip


def _digest_value(value: Sequence[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:12]
