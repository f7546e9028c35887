"""The command `collect`: makes tables, figures, verdicts and a report from the records of runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from collect.reading import unreadable_runs
from shardlab import completion, registry
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import gc_pause
from shardlab.matrix.cell import FASTEST_HZ, TELEMETRY_HZ
from shardlab.runs.trackers import TRACKERS
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.verb import CommandParser, Invocation, Verb, run_command_line
from shardlab.workspace import workspace_trust
from shardlab.workspace.archive import ARCHIVE_SUFFIX
from shardlab.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collect.reading.load import LoadedMatrix

LAST_PORT = 65535


class ReadingVerb(Verb):
    """A verb that reads a workspace. It reminds the user to fetch the runs if the lease of the nodes ends soon."""


class FetchVerb(Verb):
    """Copy runs from the cluster if they are there, write checksums of their files, and report files that changed."""

    name = "fetch"
    example = "collect fetch --run 'ddp-*'"

    def add_options(self, parser: Parser) -> None:
        run_help = "only runs whose id matches; may be given several times"
        run_option = parser.add_argument("--run", dest="runs", action="append", default=[], metavar="GLOB", help=run_help)
        completion.offer_completions(run_option, Workspace.list_run_ids)
        prune_help = "then remove the files on the cluster or its nodes of runs that ended, if their checksums are those here"
        parser.add_argument("--prune", action="store_true", help=prune_help)
        parser.add_argument("--yes", action="store_true", help="remove without a question")
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        from collect.fetching import fetch_command

        args, workspace = invocation.arguments, invocation.workspace
        return fetch_command.fetch_and_print(workspace, args.runs, invocation.out, must_prune=args.prune, is_confirmed=args.yes)


class SummarizeVerb(ReadingVerb):
    """Print the answer (with -v: all tables and remarks) and write the report."""

    name = "summarize"
    example = "collect summarize --matrix quickstart"

    def add_options(self, parser: Parser) -> None:
        _add_matrix_option(parser)
        parser.add_argument("--out", metavar="DIR", help="write the report to this folder (default: report/ in the workspace)")
        _add_baseline_option(parser)
        parser.add_list_option("--images", metavar="FORMAT,...", help="also write every figure as a file: svg, png or svg,png")
        verify_help = "compare the checksums of telemetry with those in its cache, and not only the size and time of its files"
        parser.add_argument("--verify", action="store_true", help=verify_help)
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        from collect import write_report
        from collect.figures import memory_parts
        from collect.findings import comparability, prediction_scores
        from collect.reading import own_metrics
        from collect.reading.load import load_matrix
        from collect.report import answer, pictures, terminal
        from collect.summary import summarize
        from shardlab.workspace import measured_power

        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
        image_formats = pictures.parse_formats(arguments.images, "--images") if arguments.images else ()
        with gc_pause.pause_collector():
            loaded = load_matrix(workspace, arguments.matrix, "verify" if arguments.verify else "read")
            user_metrics = own_metrics.compute_own_metrics(workspace, loaded.expansion.name)
            user_metrics.add_to_runs(loaded)
            summary = summarize(loaded, comparability.choose_baseline_strategy(arguments.baseline, loaded))
            summary.remarks.extend(user_metrics.list_remarks())
            report_folder = Path(arguments.out).absolute() if arguments.out else workspace.report
            write_report.write_report(report_folder, workspace, loaded, summary, image_formats)
            with contextlib.suppress(WorkspaceError):  # with --out, a workspace that is read-only can have a report
                measured_power.write_powers(workspace, loaded.expansion.name, prediction_scores.compute_watts_per_gpu(loaded))
        tensor_memory = memory_parts.map_tensor_memory(loaded.cells)
        print_results = terminal.print_summary if out.verbose else answer.print_answer
        print_results(out, summary, tensor_memory)
        out.print_line(f"report: {report_folder / write_report.PAGE}")
        out.print_document(summary)
        return max(int(bool(user_metrics.faults)), _print_unreadable_runs(invocation, loaded))


class VerdictsVerb(ReadingVerb):
    """Compare the claims and printed numbers of a study with the measured values."""

    name = "verdicts"
    example = "collect verdicts --strict"

    def add_options(self, parser: Parser) -> None:
        _add_matrix_option(parser)
        _add_baseline_option(parser)
        parser.add_argument("--strict", action="store_true", help="exit with code 1 if a claim is contradicted")

    def run(self, invocation: Invocation) -> int:
        from collect.findings import comparability
        from collect.reading.load import load_matrix
        from collect.report import terminal
        from collect.summary import summarize

        arguments, out = invocation.arguments, invocation.out
        loaded = load_matrix(invocation.workspace, arguments.matrix)
        summary = summarize(loaded, comparability.choose_baseline_strategy(arguments.baseline, loaded))
        terminal.print_verdicts(out, summary)
        printed_keys = (
            "matrix", "title", "rehearsal", "illustrative", "remarks", "verdicts", "reported", "deviations", "assumed", "notes",
        )  # fmt: skip
        out.print_document({key: getattr(summary, key) for key in printed_keys})
        is_contradicted = arguments.strict and any(verdict.verdict == "contradicted" for verdict in summary.verdicts)
        return max(int(is_contradicted), _print_unreadable_runs(invocation, loaded))


class ExplainVerb(ReadingVerb):
    """Show where a number comes from: definition, formula, repeats, runs, files and lines."""

    name = "explain"
    example = "collect explain 'ddp x2' throughput_per_s"

    def add_options(self, parser: Parser) -> None:
        row_help = "a row of the summary: its short name, its name in tables, its id or the start of it, or one of its runs"
        parser.add_argument("row", metavar="ROW", help=row_help)
        parser.add_argument("metric", metavar="METRIC", help="the name of a metric, as `collect metrics` lists it")
        _add_matrix_option(parser)
        _add_baseline_option(parser)
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        from collect.explain import command

        args = invocation.arguments
        options = (args.matrix, args.baseline, args.row, args.metric)
        return command.show_explanation(invocation.workspace, *options, invocation.out)


class TraceVerb(ReadingVerb):
    """Show how profiled steps spend their time and what they wait for, and why two runs differ."""

    name = "trace"
    example = "collect trace RUN --against OTHER"

    def add_options(self, parser: Parser) -> None:
        run_help = (
            "a run id, a path (with a slash) to Chrome traces or to a memory snapshot, or the name that `jobs trace` printed"
        )
        completion.offer_completions(parser.add_argument("run", metavar="RUN", help=run_help), Workspace.list_run_ids)
        against_help = "say why a step takes longer than one of OTHER, and which operators are new, gone or changed"
        completion.offer_completions(
            parser.add_argument("--against", metavar="OTHER", help=against_help), Workspace.list_run_ids
        )
        hta_help = "round times and leave out the last step, as HolisticTraceAnalysis does"
        parser.add_argument("--like-hta", action="store_true", help=hta_help)

    def run(self, invocation: Invocation) -> int:
        from collect.importing import log_formats, snapshot_report
        from collect.sources import snapshot
        from collect.traces import command

        args = invocation.arguments
        if "/" in args.run and snapshot.is_snapshot_file(Path(args.run)):
            return snapshot_report.show_snapshot(Path(args.run), invocation.out)
        if "/" in args.run and Path(args.run).is_file():
            log_formats.refuse_importable_log(Path(args.run))
        return command.show_traces(invocation.workspace, args.run, args.against, invocation.out, like_hta=args.like_hta)


class TimelineVerb(ReadingVerb):
    """Show the steps and clocks of all ranks of a run, and the rank that the others wait for."""

    name = "timeline"
    example = "collect timeline RUN --perfetto timeline.json.gz"

    def add_options(self, parser: Parser) -> None:
        completion.offer_completions(
            parser.add_argument("run", metavar="RUN", help="a run: its id, the beginning of the id, or its short name"),
            Workspace.list_run_ids,
        )
        perfetto_help = "also write steps, telemetry, events and traces of all hosts on one clock to FILE, for ui.perfetto.dev"
        parser.add_argument("--perfetto", metavar="FILE", help=f"{perfetto_help} (compressed if it ends in .gz)")

    def run(self, invocation: Invocation) -> int:
        from collect.timeline import command

        args = invocation.arguments
        return command.show_timeline(invocation.workspace, args.run, args.perfetto, invocation.out)


class WatchVerb(ReadingVerb):
    """Serve a page on this machine that shows queue, curves and telemetry while runs go on, until Ctrl-C."""

    name = "watch"
    example = "collect watch --port 8080"

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: 0, any free port)")

    def run(self, invocation: Invocation) -> int:
        from collect.watch import server

        port = invocation.arguments.port
        if not 0 <= port <= LAST_PORT:
            raise InputError(f"--port: found {port}. Allowed: 0 (any free port) to {LAST_PORT}.")
        return server.serve_live_page(invocation.workspace, port, invocation.out)


class CompareVerb(ReadingVerb):
    """Compare the same cells of two workspaces, archives or matrices."""

    name = "compare"
    example = "collect compare ../before ."

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("a", metavar="A", help="a matrix of this workspace, the folder of a workspace, or an archive")
        parser.add_argument("b", metavar="B", help="the same kinds of values as A; the output says how B differs from A")
        matrix_help = "if A and B are workspaces: the matrix to compare (default: the last matrix of each)"
        parser.add_argument("--matrix", metavar="NAME", help=matrix_help)
        fail_help = (
            "exit with code 1 if the repeats show that the ratio B / A of a metric is so, such as "
            '"throughput < 0.95"; may be given several times'
        )
        parser.add_argument("--fail-if", action="append", default=[], metavar="EXPRESSION", help=fail_help)
        strict_help = "with --fail-if: exit with code 1 also if the repeats of a cell do not decide"
        parser.add_argument("--strict", action="store_true", help=strict_help)

    def run(self, invocation: Invocation) -> int:
        from collect.comparison import command

        args = invocation.arguments
        return command.show_comparison(
            invocation.workspace, args.a, args.b, args.matrix, invocation.out, args.fail_if, is_strict=args.strict
        )


class ExportVerb(ReadingVerb):
    """Write tables for papers or programs, or runs for experiment trackers."""

    name = "export"
    example = "collect export --to latex"

    def add_options(self, parser: Parser) -> None:
        _add_matrix_option(parser)
        format_names = [name.replace("_", "-") for name in registry.list_plugin_names("collect.exports")]
        format_option = parser.add_argument("--to", required=True, metavar="FORMAT", help=", ".join(format_names))
        completion.offer_completions(format_option, lambda _: format_names)
        parser.add_argument("--out", metavar="DIR", help="write to this folder (default: export/FORMAT in the workspace)")

    def run(self, invocation: Invocation) -> int:
        from collect import export
        from collect.reading.load import load_matrix
        from collect.summary import summarize

        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
        export_format = export.find_export_format(arguments.to)
        loaded = load_matrix(workspace, arguments.matrix)
        export_folder = Path(arguments.out).absolute() if arguments.out else workspace.path / "export" / export_format.name
        written_paths = export.write_export(export_format, loaded, summarize(loaded, loaded.expansion.baseline), export_folder)
        for written_path in written_paths:
            out.print_line(str(written_path))
        out.print_document({"format": export_format.name, "files": [str(written_path) for written_path in written_paths]})
        return _print_unreadable_runs(invocation, loaded)


class HistoryVerb(Verb):
    """Show when the same cells ran in several workspaces, how fast, and what had changed."""

    name = "history"
    example = "collect history ../june ../july --since 2031-06-01"

    def add_options(self, parser: Parser) -> None:
        folders_help = "folders of workspaces, or archives (default: the workspace)"
        parser.add_argument("folders", nargs="*", metavar="DIR", help=folders_help)
        parser.add_argument("--since", metavar="DATE", help="only runs from this date on (ISO 8601)")
        parser.add_argument("--until", metavar="DATE", help="only runs up to this time (ISO 8601; a date: its first moment)")

    def run(self, invocation: Invocation) -> int:
        from collect.history import command

        args = invocation.arguments
        return command.show_history(invocation.workspace, args.folders, args.since, args.until, invocation.out)


class ArchiveVerb(ReadingVerb):
    """Write one file with the runs of a matrix, the matrix, the cluster and the report, for other people."""

    name = "archive"
    example = "collect archive --matrix quickstart --anonymous"

    def add_options(self, parser: Parser) -> None:
        _add_matrix_option(parser)
        parser.add_argument("--out", metavar="FILE", help=f"write this file (default: MATRIX{ARCHIVE_SUFFIX} in the workspace)")
        gib_help = (
            "largest sum of all files; snapshots, traces, logs and telemetry are left out, in this order, to stay below it"
        )
        parser.add_argument("--max-gib", type=float, default=1.0, metavar="N", help=f"{gib_help} (default: 1)")
        anonymous_help = "replace names of users, hosts, accounts, sites and paths in all files"
        parser.add_argument("--anonymous", action="store_true", help=anonymous_help)

    def run(self, invocation: Invocation) -> int:
        from collect.archiving import command

        args = invocation.arguments
        options = (args.matrix, args.out, args.max_gib)
        return command.write_archive(invocation.workspace, *options, invocation.out, anonymize=args.anonymous)


class OpenVerb(Verb):
    """Check an archive, write it into a new workspace, and write the report there."""

    name = "open"
    example = "collect open quickstart.shardlab.zip --out theirs"

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("archive", metavar="FILE", help="an archive, as `collect archive` writes it")
        out_help = "the new workspace (default: named after the file, in the current folder)"
        parser.add_argument("--out", metavar="DIR", help=out_help)
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        from collect.archiving import command

        args = invocation.arguments
        return command.open_archive(args.archive, args.out, invocation.out, trusted=args.trust)


class ImportVerb(Verb):
    """Make a run from logs of another program: GPU and host telemetry, steps, a memory snapshot."""

    name = "import"
    example = "collect import gpu.csv train.log --strategy fsdp --gpus 8"

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("files", nargs="+", metavar="FILE", help="logs of one run (docs/bring-your-own-logs.md)")
        as_help = "read all files as this format, in place of recognizing it; an unknown one lists all"
        parser.add_argument("--as", dest="format", metavar="FORMAT", help=as_help)
        into_help = "the matrix that gets the run, a new or a present one (default: imported)"
        completion.offer_completions(
            parser.add_argument("--into", default="imported", metavar="MATRIX", help=into_help), Workspace.list_matrix_names
        )
        parser.add_argument("--name", metavar="NAME", help="label: what was trained (default: the name of the first file)")
        parser.add_argument("--strategy", default="imported", metavar="NAME", help="label: the strategy (default: imported)")
        parser.add_argument("--gpus", type=int, metavar="N", help="label: the number of GPUs (default: as the files show)")
        host_help = "label: the host of telemetry that names none (default: imported)"
        parser.add_argument("--host", default="imported", metavar="NAME", help=host_help)
        parser.add_argument("--zone", default="UTC", metavar="ZONE", help="zone of times that name none (default: UTC)")
        parser.add_argument("--start", metavar="TIME", help="time of the first line of files without times or dates")
        every_help = "seconds between the lines of files without times (default: 1)"
        parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help=every_help)
        parser.add_argument(
            "--columns", metavar="NAMES", help="names of the columns of a CSV file without a heading, with commas between them"
        )

    def run(self, invocation: Invocation) -> int:
        from collect.importing import import_command

        args = invocation.arguments
        options = import_command.ImportOptions(
            args.format, args.into, args.name, args.strategy, args.gpus, args.host, args.zone, args.start, args.every,
            args.columns,
        )  # fmt: skip
        return import_command.import_logs(invocation.workspace, args.files, options, invocation.out)


class SampleVerb(Verb):
    """Write telemetry of this machine until a signal arrives."""

    name = "sample"
    example = "collect sample --out node0.jsonl --hz 2"

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("--out", required=True, metavar="FILE", help="append the samples to this file")
        hz_help = f"samples per second, at most {FASTEST_HZ:g} (default: {TELEMETRY_HZ:g})"
        parser.add_argument("--hz", type=float, default=TELEMETRY_HZ, metavar="N", help=hz_help)
        _add_parent_option(parser)
        played_help = "load this stub of NVML in place of the driver's library, and mark the GPUs as played"
        parser.add_argument("--played", type=Path, metavar="LIBRARY", help=played_help)

    def run(self, invocation: Invocation) -> int:
        from collect.sampler import loop

        args = invocation.arguments
        return loop.record_samples(Path(args.out), args.hz, args.parent, args.played, invocation.out)


class TrackVerb(Verb):
    """Log a run to an experiment tracker while it goes on, until it ends."""

    name = "track"
    example = "collect track ddp-gpt2-tiny-g2-b8-ea59285ce745-r1 --to tensorboard"

    def add_options(self, parser: Parser) -> None:
        completion.offer_completions(
            parser.add_argument("run", metavar="RUN", help="a run: its id, the beginning of the id, or its short name"),
            Workspace.list_run_ids,
        )
        to_help = f"{', '.join(TRACKERS)}; writes into track/ of the workspace (docs/exports.md)"
        tracker_option = parser.add_argument("--to", required=True, metavar="TRACKER", help=to_help)
        completion.offer_completions(tracker_option, lambda _: TRACKERS)
        _add_parent_option(parser)

    def run(self, invocation: Invocation) -> int:
        from collect.tracking import command

        args = invocation.arguments
        return command.track_run(invocation.workspace, args.run, args.to, args.parent, invocation.out)


class MetricsVerb(Verb):
    """List all metrics, also those of the workspace, with unit, direction and definition."""

    name = "metrics"
    example = "collect metrics"

    def add_options(self, parser: Parser) -> None:
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        from collect.explain import command

        return command.print_metrics(invocation.workspace, invocation.out)


VERBS: tuple[Verb, ...] = (
    FetchVerb(), SummarizeVerb(), VerdictsVerb(), ExplainVerb(), TraceVerb(), TimelineVerb(), WatchVerb(), CompareVerb(),
    ExportVerb(), HistoryVerb(), ArchiveVerb(), OpenVerb(), ImportVerb(), SampleVerb(), TrackVerb(), MetricsVerb(),
)  # fmt: skip


def parser() -> CommandParser:
    """The parser of the command line, with all verbs."""
    command_parser = CommandParser(
        prog="collect",
        description="Make tables, figures, verdicts and a report from the records of runs.",
        epilog="example:\n  collect fetch && collect summarize",
    )
    command_parser.add_verbs(VERBS)
    return command_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0 success; 1 a part of the task failed; 2 the input was wrong, and nothing was changed."""
    return run_command_line(parser(), argv, _carry_out)


def _carry_out(invocation: Invocation) -> int:
    verb: Verb = invocation.arguments.verb
    if getattr(invocation.arguments, "trust", False) and not isinstance(verb, OpenVerb):  # `open` makes the workspace first
        workspace_trust.store_consent(invocation.workspace, invocation.out.print_remark)
    exit_code = verb.run(invocation)
    if isinstance(verb, ReadingVerb) and (reminder := _make_fetch_reminder(invocation.workspace)) is not None:
        invocation.out.print_remark(reminder, style="yellow")
    return exit_code


def _make_fetch_reminder(workspace: Workspace) -> str | None:
    """A sentence that asks the user to fetch the runs, if the lease of the nodes ends soon; None if it does not end soon."""
    from datetime import UTC, datetime

    from shardlab.workspace import inventory

    lease = inventory.read_lease(workspace)
    return lease.make_copy_reminder(datetime.now(UTC)) if lease is not None else None


def _print_unreadable_runs(invocation: Invocation, loaded: LoadedMatrix) -> int:
    """Print the runs of a matrix whose records cannot be read. Returns the exit code: 1 if any run is printed, else 0."""
    return unreadable_runs.print_unreadable_runs(invocation.out, [(run.folder, run.unreadable) for run in loaded.runs])


def _add_matrix_option(parser: Parser) -> None:
    """Add the option that chooses a matrix of the workspace."""
    matrix_help = "a matrix of this workspace (default: the last matrix)"
    completion.offer_completions(parser.add_argument("--matrix", metavar="NAME", help=matrix_help), Workspace.list_matrix_names)


def _add_baseline_option(parser: Parser) -> None:
    """Add the option that chooses the strategy to which speed-ups are relative."""
    baseline_help = "compute speed-up relative to this strategy (default: the matrix's baseline)"
    completion.offer_completions(
        parser.add_argument("--baseline", metavar="STRATEGY", help=baseline_help), completion.list_strategies
    )


def _add_parent_option(parser: Parser) -> None:
    """Add the option that names a process with which the verb ends."""
    parser.add_argument("--parent", type=int, metavar="PID", help="also stop when the process with this id has ended")
