"""The verb `jobs trace`: sends the analysis of a folder of profiler traces as runs, each of which analyses a part of the files.

The runs follow the same protocol as training runs: they are submitted exactly once, and have states, logs, retries and step
records (one step for each trace file). `collect trace NAME` merges their summaries.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from jobs import on_controller
from jobs.rendering import render
from jobs.submission import submit
from jobs.verb import JobsVerb
from jobs.verbs import sending, shared_options
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.matrix.cell import AnyCell
from shardlab.runs.trace_part import TRACE_STRATEGY, TracePart, find_trace_paths
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation

DEFAULT_FILES_PER_RUN = 32  # the most trace files that one run analyses
MOST_FILES_PER_RUN = 100_000
_DIGITS = re.compile(r"(\d+)")


class TraceRuns(msgspec.Struct, frozen=True):
    """The runs that analyse the traces of a folder."""

    matrix_name: str
    """The common name of these runs, as a matrix has a name."""
    cell_parts: list[tuple[AnyCell, TracePart]]
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
        shared_options.add_cluster_option(parser)
        per_run_help = f"number of trace files that one run analyses (default: {DEFAULT_FILES_PER_RUN})"
        parser.add_argument("--per-run", type=int, default=DEFAULT_FILES_PER_RUN, metavar="N", help=per_run_help)
        shared_options.add_wait_option(parser)
        shared_options.add_sharing_options(parser)
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        out, workspace = invocation.out, invocation.workspace
        runs = find_trace_runs(invocation)
        cells, parts_by_cell = ([cell for cell, _ in runs.cell_parts], {cell.name(): part for cell, part in runs.cell_parts})
        repeats = dict.fromkeys(parts_by_cell, 1)
        render_context = msgspec.structs.replace(
            render.make_render_context(runs.matrix_name, invocation.cluster, workspace), trace_part_by_cell=parts_by_cell
        )
        submit_options = shared_options.read_submit_options(invocation, render_context)
        on_controller.must_suit_workspace(render_context.cluster, workspace)
        submit.check_runs(workspace, cells, repeats, render_context)
        decide = partial(submit.decide_runs, workspace, cells, repeats, render_context)
        exit_code = sending.submit_runs(invocation, render_context, submit_options, decide, has_training=False)
        out.print_remark(f"note: when all have completed, `collect trace {runs.matrix_name}` merges them.")
        return exit_code


def find_trace_runs(invocation: Invocation) -> TraceRuns:
    """The runs that analyse the folder of the command line. Raises InputError if there is nothing to analyse.

    The name and the cells depend on the files, their sizes and their times, so the same command, if it is given again later,
    submits only runs for new or changed files.
    """
    traces_folder, files_per_run = Path(invocation.arguments.folder).absolute(), invocation.arguments.per_run
    if not 1 <= files_per_run <= MOST_FILES_PER_RUN:
        raise InputError(f"--per-run: found {files_per_run}. Allowed: 1 to {MOST_FILES_PER_RUN}.")
    cluster = invocation.cluster
    if cluster.has_separate_folders:
        raise InputError(
            f"jobs trace: the nodes of the cluster {cluster.name} share no folder, so they cannot read the same traces. "
            "Allowed: a cluster whose nodes share a folder, or `collect trace` on one machine."
        )
    _must_be_shared(traces_folder, cluster)
    trace_paths = _find_traces(traces_folder)
    trace_names = [path.relative_to(traces_folder).as_posix() for path in trace_paths]
    name_chunks = [trace_names[start : start + files_per_run] for start in range(0, len(trace_names), files_per_run)]
    statuses = [path.stat() for path in trace_paths]
    file_states = [(name, status.st_size, status.st_mtime_ns) for name, status in zip(trace_names, statuses, strict=True)]
    matrix_name = f"traces-{_digest_value([str(traces_folder), files_per_run, file_states])}"
    trace_parts = [
        TracePart(folder=str(traces_folder), files=chunk, place=index, parts=len(name_chunks))
        for index, chunk in enumerate(name_chunks)
    ]
    return TraceRuns(matrix_name, [(_make_trace_cell(matrix_name, part), part) for part in trace_parts])


def _find_traces(folder: Path) -> list[Path]:
    """The trace files of a folder and its subfolders, in the numeric order of their names. Raises InputError if there are
    none."""
    with files.as_workspace_error("read"):
        trace_paths = [path for path in find_trace_paths(folder) if path.is_file()]
    if not trace_paths:
        raise InputError(f"{folder}: no traces. Allowed: a folder with Chrome traces, *.json or *.json.gz.")
    if unsuited_path := next((trace_path for trace_path in trace_paths if not files.is_utf8(str(trace_path))), None):
        raise InputError(f"{folder}: the name {unsuited_path.name!r} is not valid UTF-8. Allowed: names in UTF-8.")
    return sorted(
        trace_paths,
        key=lambda trace_path: [
            (int(name_part) if name_part.isdecimal() else -1, name_part)
            for name_part in _DIGITS.split(str(trace_path.relative_to(folder)))
        ],
    )


def _must_be_shared(folder: Path, cluster: Cluster) -> None:
    """Raises InputError if the nodes of the cluster could not read the folder."""
    shared_folder = cluster.storage.shared if cluster.provider != "local" else None
    if shared_folder is not None and not folder.resolve().is_relative_to(Path(shared_folder).resolve()):
        raise InputError(
            f"{folder}: lies outside of {shared_folder}, which the nodes of {cluster.name} share; they would not find the "
            f"traces. Allowed: a folder in {shared_folder}."
        )


def _make_trace_cell(matrix_name: str, part: TracePart) -> AnyCell:
    """The cell of a run that analyses traces, whose steps are the trace files."""
    return AnyCell(
        workload=f"part-{part.place:05d}", strategy=TRACE_STRATEGY, launcher=TRACE_STRATEGY, gpus=1, steps=len(part.files),
        prove="off", options={"traces": matrix_name},
    )  # fmt: skip


def _digest_value(value: Sequence[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:12]
