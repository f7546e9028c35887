"""The command `collect`: from records to tables, figures and a report."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab import console, cycles, registry
from shardlab.console import Output
from shardlab.errors import InputError, MissingExtra
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace

if TYPE_CHECKING:
    from collect.load import Loaded

FASTEST_HZ = 10.0  # above it the sampler was measured to slow the ranks that it watches


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0 all good, 1 something asked for did not succeed, 2 wrong input, nothing changed."""
    arguments = parser().parse_args(argv)
    return console.run(lambda: int(arguments.command(arguments, Output.of(arguments))))


def parser() -> console.Parser:
    common = console.common_options()
    top = console.Parser(
        prog="collect",
        description="From the records of runs to tables, figures and a report.",
        epilog="example:\n  collect fetch && collect summarize",
        parents=[common],
    )
    console.add_version(top)
    verbs = top.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, summary: str, example: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=summary, description=summary, epilog=f"example:\n  {example}", parents=[common])

    fetch = verb("fetch", "bring runs together and checksum them; say what changed since", "collect fetch --run 'ddp-*'")
    fetch.add_argument("--run", action="append", default=[], metavar="GLOB", help="only these runs; may be given again")
    fetch.set_defaults(command=_fetch)

    summarize = verb("summarize", "tables on the terminal, the report on disk", "collect summarize --matrix quickstart")
    _add_matrix(summarize)
    summarize.add_argument("--out", metavar="DIR", help="the report's folder (default: report/ in the workspace)")
    summarize.add_argument("--baseline", metavar="STRATEGY", help="speed-up is against this strategy (default: the matrix's)")
    summarize.add_argument("--images", metavar="FORMATS", help="every figure as a file too: svg, png or svg,png")
    summarize.set_defaults(command=_summarize)

    verdicts = verb("verdicts", "a study's claims and printed numbers, against what was measured", "collect verdicts --strict")
    _add_matrix(verdicts)
    verdicts.add_argument("--baseline", metavar="STRATEGY", help="speed-up is against this strategy (default: the matrix's)")
    verdicts.add_argument("--strict", action="store_true", help="exit with 1 where a claim is contradicted")
    verdicts.set_defaults(command=_verdicts)

    trace = verb(
        "trace", "where the time of profiled steps went, and which operators differ", "collect trace RUN --against OTHER"
    )
    trace.add_argument("run", metavar="RUN", help="a run, or a folder or file of Chrome traces (with a slash in its name)")
    trace.add_argument("--against", metavar="RUN", help="say which operators are new, gone or changed against this one")
    trace.add_argument("--like-hta", action="store_true", help="round and leave out as HolisticTraceAnalysis does")
    trace.set_defaults(command=_trace)

    compare = verb("compare", "the same cells in two workspaces or matrices, side by side", "collect compare ../before .")
    compare.add_argument("a", metavar="A", help="a matrix of this workspace, or the folder of a workspace")
    compare.add_argument("b", metavar="B", help="the same; what is said is of B beside A")
    compare.add_argument("--matrix", metavar="NAME", help="of both workspaces (default: the last one of each)")
    compare.set_defaults(command=_compare)

    export = verb("export", "tables for papers and programs, runs for trackers", "collect export --to latex --out tables/")
    _add_matrix(export)
    export.add_argument("--to", required=True, metavar="FORMAT", help=", ".join(registry.modules("collect.exports")))
    export.add_argument("--out", metavar="DIR", help="the folder to write (default: export/FORMAT in the workspace)")
    export.set_defaults(command=_export)

    sample = verb("sample", "write telemetry of this machine until told to end", "collect sample --out node0.jsonl --hz 2")
    sample.add_argument("--out", required=True, metavar="FILE", help="the file to append samples to")
    sample.add_argument("--hz", type=float, default=2.0, metavar="N", help=f"per second, at most {FASTEST_HZ:g} (default: 2)")
    sample.add_argument("--parent", type=int, metavar="PID", help="end when this process is gone")
    sample.set_defaults(command=_sample)

    metrics = verb("metrics", "list the figures of merit with unit, direction and definition", "collect metrics")
    metrics.set_defaults(command=_metrics)
    return top


def _add_matrix(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--matrix", metavar="NAME", help="a matrix of this workspace (default: the last one)")


def _need_report(command: str, *packages: str) -> None:
    """Raises MissingExtra where these packages of the report are left out."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            raise MissingExtra("report", f"collect {command}", package) from None


def _workspace(arguments: argparse.Namespace) -> Workspace:
    return Workspace.find(getattr(arguments, "workspace", None))


def _fetch(arguments: argparse.Namespace, output: Output) -> int:
    from collect import fetch

    workspace = _workspace(arguments)
    fetched = fetch.fetch(workspace, arguments.run, output.remark)
    columns = ["Run", "State", "Files (n)", "Size (KiB)", "Hashed (n)", "Cut files (n)", "Corrupt lines (n)"]
    rows = [
        [run.run, run.state, *(f"{n:,}" for n in (run.files, run.bytes // 1024, run.hashed, run.truncated, run.corrupt))]
        for run in fetched
    ]
    output.table("", columns, rows)
    for run in fetched:
        if run.damage:
            output.remark(f"{run.run}: damaged records: {run.damage}", style="yellow")
        for name in run.added:
            output.detail(f"{run.run}: {name}: new since it was fetched")
        for problem in run.problems:
            output.remark(f"{run.run}: {problem}", style="red")
        for name, kind in run.not_regular.items():
            output.remark(f"{run.run}: {name} is {kind}; only files and folders with names in UTF-8 are fetched", style="red")
    changed = sum(bool(run.problems) for run in fetched)
    if changed:
        output.remark(
            f"{changed} of {len(fetched)} runs differ from their manifest.json or from the cluster; their manifest.json was "
            "not changed. To resolve this for a run, remove its manifest.json and run the same command again."
        )
    elif not fetched:
        output.remark(f"{workspace.runs}: no runs yet.")
    _set_aside(output, [(RunDir(workspace.runs / run.run), run.unreadable) for run in fetched])
    output.document(fetched)
    return 0 if all(run.is_sound for run in fetched) else 1


def _summarize(arguments: argparse.Namespace, output: Output) -> int:
    _need_report("summarize", "polars", "plotly")
    from collect import pictures, report, terminal
    from collect.load import load
    from collect.summary import summarize

    images = pictures.formats(arguments.images, "--images") if arguments.images else ()
    workspace = _workspace(arguments)
    with cycles.not_searched():
        loaded = load(workspace, arguments.matrix)
        summary = summarize(loaded, _baseline(arguments.baseline, loaded))
        folder = Path(arguments.out).absolute() if arguments.out else workspace.report
        report.write(folder, workspace, loaded, summary, images)
    terminal.show(output, summary)
    output.line(f"report: {folder / report.PAGE}")
    output.document(summary)
    return _set_aside(output, _of_loaded(loaded))


def _verdicts(arguments: argparse.Namespace, output: Output) -> int:
    _need_report("verdicts")
    from collect import terminal
    from collect.load import load
    from collect.summary import summarize

    loaded = load(_workspace(arguments), arguments.matrix)
    summary = summarize(loaded, _baseline(arguments.baseline, loaded))
    terminal.verdicts(output, summary)
    kept = ("matrix", "title", "rehearsal", "illustrative", "remarks", "verdicts", "reported", "assumed", "notes")
    output.document({name: getattr(summary, name) for name in kept})
    contradicted = arguments.strict and any(verdict.verdict == "contradicted" for verdict in summary.verdicts)
    return max(int(contradicted), _set_aside(output, _of_loaded(loaded)))


def _set_aside(output: Output, runs: Iterable[tuple[RunDir, str]]) -> int:
    """Name every run whose records cannot be read, with the reason: 1 if there is such a run, else 0."""
    code = 0
    for folder, unreadable in runs:
        if unreadable:
            way_out = f"restore the file, or move the folder {folder.path} out of runs/, and run the same command again"
            output.remark(f"{folder.run_id}: set aside: {unreadable.rstrip('.')}; {way_out}.", style="red")
            code = 1
    return code


def _of_loaded(loaded: Loaded) -> list[tuple[RunDir, str]]:
    return [(run.folder, run.unreadable) for run in loaded.runs]


def _baseline(asked: str | None, loaded: Loaded) -> str:
    """The strategy that speed-up is against. Raises UnknownName for one that the matrix does not have."""
    from shardlab.errors import UnknownName

    strategies = {cell.cell.strategy for cell in loaded.cells}
    if asked is not None and asked not in strategies:
        raise UnknownName("baseline strategy", asked, strategies)
    return asked or loaded.expansion.baseline


def _trace(arguments: argparse.Namespace, output: Output) -> int:
    _need_report("trace", "numpy")
    from collect.traces import command

    return command.show(_workspace(arguments), arguments.run, arguments.against, output, like_hta=arguments.like_hta)


def _compare(arguments: argparse.Namespace, output: Output) -> int:
    _need_report("compare", "polars", "plotly")
    from collect.comparison import command

    return command.show(_workspace(arguments), arguments.a, arguments.b, arguments.matrix, output)


def _export(arguments: argparse.Namespace, output: Output) -> int:
    _need_report("export", "polars", "plotly")
    from collect import export
    from collect.load import load
    from collect.summary import summarize

    workspace = _workspace(arguments)
    format_ = export.export(arguments.to)
    loaded = load(workspace, arguments.matrix)
    folder = Path(arguments.out).absolute() if arguments.out else workspace.path / "export" / format_.name
    written = export.write(format_, loaded, summarize(loaded, loaded.expansion.baseline), folder)
    for path in written:
        output.line(str(path))
    output.document({"format": format_.name, "files": [str(path) for path in written]})
    return _set_aside(output, _of_loaded(loaded))


def _sample(arguments: argparse.Namespace, output: Output) -> int:
    from collect.sampler import loop
    from collect.sampler.gpu import GpuSource
    from collect.sampler.host import HostSource
    from collect.sampler.nic import NicSource

    if not 0 < arguments.hz <= FASTEST_HZ:
        raise InputError(f"--hz: found {arguments.hz:g}. Allowed: more than 0, at most {FASTEST_HZ:g}.")
    gpus = GpuSource()
    if gpus.why_absent:
        output.detail(f"no GPU telemetry: {gpus.why_absent}")
    tally = loop.run(Path(arguments.out), arguments.hz, arguments.parent, [HostSource(), NicSource(), gpus])
    failures = ", ".join(f"{what} unread {count} times" for what, count in tally.failures.items())
    output.remark(f"{tally.samples} samples, {tally.missed} ticks missed{'; ' + failures if failures else ''}")
    output.document(tally)
    return 0


def _metrics(_arguments: argparse.Namespace, output: Output) -> int:
    _need_report("metrics", "polars", "plotly")
    from collect.metric import menu

    metrics = menu()
    rows = [[metric.name, metric.unit, metric.direction, metric.definition] for metric in metrics]
    output.table("", ["Metric", "Unit", "Direction", "Definition"], rows)
    keys = ("name", "unit", "direction", "definition")
    output.document([{key: getattr(metric, key) for key in keys} for metric in metrics])
    return 0
