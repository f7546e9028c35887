"""The command `collect`: makes tables, figures, verdicts and a report from the records of runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from collect.reading import unreadable_runs
from shardlab import completion, registry
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import gc_pause
from shardlab.matrix.cell import FASTEST_HZ, TELEMETRY_HZ
from shardlab.runs.rundir import RunDir
from shardlab.runs.trackers import TRACKERS
from shardlab.terminal import console
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.archive import SUFFIX
from shardlab.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collect.reading.load import Loaded

EXAMPLES = {
    "fetch": "collect fetch --run 'ddp-*'",
    "summarize": "collect summarize --matrix quickstart",
    "verdicts": "collect verdicts --strict",
    "explain": "collect explain 'ddp x2' throughput_per_s",
    "trace": "collect trace RUN --against OTHER",
    "timeline": "collect timeline RUN --perfetto timeline.json.gz",
    "watch": "collect watch --port 8080",
    "compare": "collect compare ../before .",
    "export": "collect export --to latex",
    "history": "collect history ../june ../july --since 2031-06-01",
    "archive": "collect archive --matrix quickstart --anonymous",
    "open": "collect open quickstart.shardlab.zip --out theirs",
    "sample": "collect sample --out node0.jsonl --hz 2",
    "track": "collect track ddp-gpt2-tiny-g2-b8-ea59285ce745-r1 --to tensorboard",
    "metrics": "collect metrics",
}
# Verbs that read a workspace. They remind the user to fetch the runs if the lease of the nodes ends soon.
WORKSPACE_VERBS = ("summarize", "verdicts", "explain", "trace", "timeline", "watch", "compare", "export", "archive")
LAST_PORT = 65535


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0 success; 1 a part of the task failed; 2 the input was wrong, and nothing was changed."""
    command_line = parser()
    completion.answer_shell(command_line)
    arguments = command_line.parse_args(argv)

    def command() -> int:
        output = Output.from_arguments(arguments)
        if getattr(arguments, "trust", False) and arguments.verb != "open":  # `open` makes the workspace first
            workspace_trust.store_consent(_workspace(arguments), output.print_remark)
        code = int(arguments.run(arguments, output))
        if arguments.verb in WORKSPACE_VERBS and (reminder := _fetch_reminder(_workspace(arguments))) is not None:
            output.print_remark(reminder, style="yellow")
        return code

    return console.run_command(command, name=f"collect {arguments.verb}")


def _fetch_reminder(workspace: Workspace) -> str | None:
    """A sentence that asks the user to fetch the runs, if the lease of the nodes ends soon; None if it does not end soon."""
    from datetime import UTC, datetime

    from shardlab.workspace import inventory

    lease = inventory.read_lease(workspace)
    return lease.copy_reminder(datetime.now(UTC)) if lease is not None else None


def parser() -> console.Parser:
    """The parser of the command line, with all verbs."""
    common = console.common_options()
    top_parser = console.Parser(
        prog="collect",
        description="Make tables, figures, verdicts and a report from the records of runs.",
        epilog="example:\n  collect fetch && collect summarize",
        parents=[common],
    )
    console.add_version_option(top_parser)
    verbs = console.Verbs(top_parser, common, EXAMPLES)
    for add_verb in (
        _add_fetch,
        _add_summarize,
        _add_verdicts,
        _add_explain,
        _add_trace,
        _add_timeline,
        _add_watch,
        _add_compare,
        _add_export,
        _add_history,
        _add_archive,
        _add_open,
        _add_sample,
        _add_track,
    ):
        add_verb(verbs)
    metrics_help = "list all metrics, also those of the workspace, with unit, direction and definition"
    console.add_trust_option(verbs.add("metrics", _metrics, metrics_help))
    return top_parser


def _add_fetch(verbs: console.Verbs) -> None:
    summary = "copy runs from the cluster if they are there, write checksums of their files, and report files that changed"
    verb = verbs.add("fetch", _fetch, summary)
    run_help = "only runs whose id matches; may be given several times"
    run = verb.add_argument("--run", dest="runs", action="append", default=[], metavar="GLOB", help=run_help)
    completion.offer_completions(run, Workspace.run_ids)
    prune_help = "then remove the files on the cluster or its nodes of runs that ended, if their checksums are those here"
    verb.add_argument("--prune", action="store_true", help=prune_help)
    verb.add_argument("--yes", action="store_true", help="remove without a question")
    console.add_trust_option(verb)


def _add_summarize(verbs: console.Verbs) -> None:
    verb = verbs.add("summarize", _summarize, "print tables and write the report")
    _add_matrix(verb)
    verb.add_argument("--out", metavar="DIR", help="write the report to this folder (default: report/ in the workspace)")
    _add_baseline(verb)
    verb.add_list_option("--images", metavar="FORMAT,...", help="also write every figure as a file: svg, png or svg,png")
    verify_help = "compare the checksums of telemetry with those in its cache, and not only the size and time of its files"
    verb.add_argument("--verify", action="store_true", help=verify_help)
    console.add_trust_option(verb)


def _add_verdicts(verbs: console.Verbs) -> None:
    summary = "compare the claims and printed numbers of a study with the measured values"
    verb = verbs.add("verdicts", _verdicts, summary)
    _add_matrix(verb)
    _add_baseline(verb)
    verb.add_argument("--strict", action="store_true", help="exit with code 1 if a claim is contradicted")


def _add_explain(verbs: console.Verbs) -> None:
    verb = verbs.add("explain", _explain, "show where a number comes from: definition, formula, repeats, runs, files and lines")
    row_help = "a row of the summary: its name as tables print it, its id or the start of its id, or one of its runs"
    verb.add_argument("row", metavar="ROW", help=row_help)
    verb.add_argument("metric", metavar="METRIC", help="the name of a metric, as `collect metrics` lists it")
    _add_matrix(verb)
    _add_baseline(verb)
    console.add_trust_option(verb)


def _add_trace(verbs: console.Verbs) -> None:
    summary = "show how profiled steps spend their time and what they wait for, and why two runs differ"
    verb = verbs.add("trace", _trace, summary)
    run_help = "a run id, a path (with a slash) to a folder or file of Chrome traces, or the name that `jobs trace` printed"
    completion.offer_completions(verb.add_argument("profiled", metavar="RUN", help=run_help), Workspace.run_ids)
    against_help = "say why a step takes longer than one of OTHER, and which operators are new, gone or changed"
    completion.offer_completions(verb.add_argument("--against", metavar="OTHER", help=against_help), Workspace.run_ids)
    hta_help = "round times and leave out the last step, as HolisticTraceAnalysis does"
    verb.add_argument("--like-hta", action="store_true", help=hta_help)


def _add_timeline(verbs: console.Verbs) -> None:
    summary = "show the steps and clocks of all ranks of a run, and the rank that the others wait for"
    verb = verbs.add("timeline", _timeline, summary)
    completion.offer_completions(verb.add_argument("shown", metavar="RUN", help="a run id"), Workspace.run_ids)
    perfetto_help = "also write steps, telemetry, events and traces of all hosts on one clock to FILE, for ui.perfetto.dev"
    verb.add_argument("--perfetto", metavar="FILE", help=f"{perfetto_help} (compressed if it ends in .gz)")


def _add_watch(verbs: console.Verbs) -> None:
    summary = "serve a page on this machine that shows queue, curves and telemetry while runs go on, until Ctrl-C"
    verb = verbs.add("watch", _watch, summary)
    verb.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: 0, any free port)")


def _add_compare(verbs: console.Verbs) -> None:
    verb = verbs.add("compare", _compare, "compare the same cells of two workspaces, archives or matrices")
    verb.add_argument("a", metavar="A", help="a matrix of this workspace, the folder of a workspace, or an archive")
    verb.add_argument("b", metavar="B", help="the same kinds of values as A; the output says how B differs from A")
    matrix_help = "if A and B are workspaces: the matrix to compare (default: the last matrix of each)"
    verb.add_argument("--matrix", metavar="NAME", help=matrix_help)


def _add_export(verbs: console.Verbs) -> None:
    verb = verbs.add("export", _export, "write tables for papers or programs, or runs for experiment trackers")
    _add_matrix(verb)
    formats = registry.plugin_names("collect.exports")
    completion.offer_completions(
        verb.add_argument("--to", required=True, metavar="FORMAT", help=", ".join(formats)), lambda _: formats
    )
    verb.add_argument("--out", metavar="DIR", help="write to this folder (default: export/FORMAT in the workspace)")


def _add_history(verbs: console.Verbs) -> None:
    summary = "show when the same cells ran in several workspaces, how fast, and what had changed"
    verb = verbs.add("history", _history, summary)
    verb.add_argument("places", nargs="*", metavar="DIR", help="folders of workspaces, or archives (default: the workspace)")
    verb.add_argument("--since", metavar="DATE", help="only runs from this date on (ISO 8601)")
    verb.add_argument("--until", metavar="DATE", help="only runs up to this time (ISO 8601; a date: its first moment)")


def _add_archive(verbs: console.Verbs) -> None:
    summary = "write one file with the runs of a matrix, the matrix, the cluster and the report, for other people"
    verb = verbs.add("archive", _archive, summary)
    _add_matrix(verb)
    verb.add_argument("--out", metavar="FILE", help=f"write this file (default: MATRIX{SUFFIX} in the workspace)")
    gib_help = "largest sum of all files; snapshots, traces, logs and telemetry are left out, in this order, to stay below it"
    verb.add_argument("--max-gib", type=float, default=1.0, metavar="N", help=f"{gib_help} (default: 1)")
    anonymous_help = "replace names of users, hosts, accounts, sites and paths in all files"
    verb.add_argument("--anonymous", action="store_true", help=anonymous_help)


def _add_open(verbs: console.Verbs) -> None:
    summary = "check an archive, write it into a new workspace, and write the report there"
    verb = verbs.add("open", _open, summary)
    verb.add_argument("archived", metavar="FILE", help="an archive, as `collect archive` writes it")
    verb.add_argument("--out", metavar="DIR", help="the new workspace (default: named after the file, in the current folder)")
    console.add_trust_option(verb)


def _add_sample(verbs: console.Verbs) -> None:
    verb = verbs.add("sample", _sample, "write telemetry of this machine until a signal arrives")
    verb.add_argument("--out", required=True, metavar="FILE", help="append the samples to this file")
    hz_help = f"samples per second, at most {FASTEST_HZ:g} (default: {TELEMETRY_HZ:g})"
    verb.add_argument("--hz", type=float, default=TELEMETRY_HZ, metavar="N", help=hz_help)
    verb.add_argument("--parent", type=int, metavar="PID", help="also stop when the process with this id has ended")
    played_help = "load this stub of NVML in place of the driver's library, and mark the GPUs as played"
    verb.add_argument("--played", metavar="LIBRARY", help=played_help)


def _add_track(verbs: console.Verbs) -> None:
    verb = verbs.add("track", _track, "log a run to an experiment tracker while it goes on, until it ends")
    completion.offer_completions(verb.add_argument("followed", metavar="RUN", help="a run id"), Workspace.run_ids)
    to_help = f"{', '.join(TRACKERS)}; writes into track/ of the workspace (docs/exports.md)"
    completion.offer_completions(verb.add_argument("--to", required=True, metavar="TRACKER", help=to_help), lambda _: TRACKERS)
    verb.add_argument("--parent", type=int, metavar="PID", help="also stop when the process with this id has ended")


def _workspace(arguments: argparse.Namespace) -> Workspace:
    return Workspace.find(getattr(arguments, "workspace", None))


def _fetch(args: argparse.Namespace, output: Output) -> int:
    from collect.fetching import fetch_command

    return fetch_command.fetch_and_print(_workspace(args), args.runs, output, prunes=args.prune, confirmed=args.yes)


def _summarize(arguments: argparse.Namespace, output: Output) -> int:
    from collect import write_report
    from collect.findings import comparability, prediction_scores
    from collect.reading import own_metrics
    from collect.reading.load import load_matrix
    from collect.report import pictures, terminal
    from collect.summary import summarize
    from shardlab.workspace import measured_power

    images = pictures.parse_formats(arguments.images, "--images") if arguments.images else ()
    workspace = _workspace(arguments)
    with gc_pause.pause_collector():
        loaded = load_matrix(workspace, arguments.matrix, "verify" if arguments.verify else "read")
        user_metrics = own_metrics.compute_own_metrics(workspace, loaded.expansion.name)
        user_metrics.add_to(loaded)
        summary = summarize(loaded, comparability.baseline_strategy(arguments.baseline, loaded))
        summary.remarks.extend(user_metrics.remarks())
        folder = Path(arguments.out).absolute() if arguments.out else workspace.report
        write_report.write(folder, workspace, loaded, summary, images)
        with contextlib.suppress(WorkspaceError):  # with --out, a workspace that is read-only can have a report
            measured_power.write(workspace, loaded.expansion.name, prediction_scores.watts_per_gpu(loaded))
    terminal.print_summary(output, summary)
    output.print_line(f"report: {folder / write_report.PAGE}")
    output.print_document(summary)
    return max(int(bool(user_metrics.faults)), unreadable_runs.print_unreadable_runs(output, _unreadable_reasons(loaded)))


def _verdicts(arguments: argparse.Namespace, output: Output) -> int:
    from collect.findings import comparability
    from collect.reading.load import load_matrix
    from collect.report import terminal
    from collect.summary import summarize

    loaded = load_matrix(_workspace(arguments), arguments.matrix)
    summary = summarize(loaded, comparability.baseline_strategy(arguments.baseline, loaded))
    terminal.print_verdicts(output, summary)
    keys = ("matrix", "title", "rehearsal", "illustrative", "remarks", "verdicts", "reported", "deviations", "assumed", "notes")
    output.print_document({name: getattr(summary, name) for name in keys})
    contradicted = arguments.strict and any(verdict.verdict == "contradicted" for verdict in summary.verdicts)
    return max(int(contradicted), unreadable_runs.print_unreadable_runs(output, _unreadable_reasons(loaded)))


def _unreadable_reasons(loaded: Loaded) -> list[tuple[RunDir, str]]:
    return [(run.folder, run.unreadable) for run in loaded.runs]


def _explain(arguments: argparse.Namespace, output: Output) -> int:
    from collect.explain import command

    options = (arguments.matrix, arguments.baseline, arguments.row, arguments.metric)
    return command.show_explanation(_workspace(arguments), *options, output)


def _trace(args: argparse.Namespace, output: Output) -> int:
    from collect.traces import command

    return command.show_traces(_workspace(args), args.profiled, args.against, output, like_hta=args.like_hta)


def _timeline(arguments: argparse.Namespace, output: Output) -> int:
    from collect.timeline import command

    return command.show_timeline(_workspace(arguments), arguments.shown, arguments.perfetto, output)


def _watch(arguments: argparse.Namespace, output: Output) -> int:
    from collect.watch import server

    if not 0 <= arguments.port <= LAST_PORT:
        raise InputError(f"--port: found {arguments.port}. Allowed: 0 (any free port) to {LAST_PORT}.")
    return server.serve_live_page(_workspace(arguments), arguments.port, output)


def _compare(arguments: argparse.Namespace, output: Output) -> int:
    from collect.comparison import command

    return command.show_comparison(_workspace(arguments), arguments.a, arguments.b, arguments.matrix, output)


def _export(arguments: argparse.Namespace, output: Output) -> int:
    from collect import export
    from collect.reading.load import load_matrix
    from collect.summary import summarize

    workspace = _workspace(arguments)
    format_ = export.find_export_format(arguments.to)
    loaded = load_matrix(workspace, arguments.matrix)
    folder = Path(arguments.out).absolute() if arguments.out else workspace.path / "export" / format_.name
    paths = export.write(format_, loaded, summarize(loaded, loaded.expansion.baseline), folder)
    for path in paths:
        output.print_line(str(path))
    output.print_document({"format": format_.name, "files": [str(path) for path in paths]})
    return unreadable_runs.print_unreadable_runs(output, _unreadable_reasons(loaded))


def _history(arguments: argparse.Namespace, output: Output) -> int:
    from collect.history import command

    return command.show_history(_workspace(arguments), arguments.places, arguments.since, arguments.until, output)


def _archive(arguments: argparse.Namespace, output: Output) -> int:
    from collect.archiving import command

    options = (arguments.matrix, arguments.out, arguments.max_gib)
    return command.write_archive(_workspace(arguments), *options, output, anonymize=arguments.anonymous)


def _open(arguments: argparse.Namespace, output: Output) -> int:
    from collect.archiving import command

    return command.open_archive(arguments.archived, arguments.out, output, trusted=arguments.trust)


def _sample(arguments: argparse.Namespace, output: Output) -> int:
    from collect.sampler import loop

    played = Path(arguments.played) if arguments.played else None
    return loop.record_samples(Path(arguments.out), arguments.hz, arguments.parent, played, output)


def _track(arguments: argparse.Namespace, output: Output) -> int:
    from collect.tracking import command

    return command.track_run(_workspace(arguments), arguments.followed, arguments.to, arguments.parent, output)


def _metrics(arguments: argparse.Namespace, output: Output) -> int:
    from collect.explain import command

    return command.list_metrics(_workspace(arguments), output)


def _add_matrix(verb: console.Parser) -> None:
    """Add the option that chooses a matrix of the workspace."""
    matrix_help = "a matrix of this workspace (default: the last matrix)"
    completion.offer_completions(verb.add_argument("--matrix", metavar="NAME", help=matrix_help), Workspace.matrix_names)


def _add_baseline(verb: console.Parser) -> None:
    """Add the option that chooses the strategy to which speed-ups are relative."""
    baseline_help = "compute speed-up relative to this strategy (default: the matrix's baseline)"
    completion.offer_completions(
        verb.add_argument("--baseline", metavar="STRATEGY", help=baseline_help), completion.list_strategies
    )
