"""The verb `jobs render`."""

from __future__ import annotations

from pathlib import Path

from jobs import on_controller
from jobs.planning import plan
from jobs.rendering import render
from jobs.verb import JobsVerb
from jobs.verbs import matrix_plan, sending, shared_options
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation


class RenderVerb(JobsVerb):
    """Write the run folders with their scripts, but submit nothing. If the runs start on another machine, only print the
    scripts, or write them to --out."""

    name = "render"
    example = "jobs render --matrix quickstart --out /tmp/scripts"
    permission = "use the templates of the workspace"
    makes_runs = True

    def add_options(self, parser: Parser) -> None:
        shared_options.add_matrix_options(parser)
        parser.add_argument("--out", metavar="DIR", help="folder for the run folders (default: runs/ of the workspace)")

    def run(self, invocation: Invocation) -> int:
        arguments, out, workspace = invocation.arguments, invocation.out, invocation.workspace
        planned = matrix_plan.plan_with_options(invocation)
        plan.must_fit_cluster(planned)
        if on_controller.is_preview(invocation):
            planned = matrix_plan.plan_preview(invocation, planned)
            if not arguments.out:
                return sending.print_preview(invocation, planned)
        runs_folder = Path(arguments.out).absolute() if arguments.out else workspace.runs
        if arguments.out:
            planned = plan.store_source_in(planned, runs_folder / ".source")
            rendered = plan.render_all(planned, workspace, runs_folder)
        else:
            with workspace.hold_runs_lock():
                rendered = plan.render_all(planned, workspace, runs_folder)
                render.store_expansion(workspace, planned.context, planned.matrix, planned.all_cells, planned.repeats_by_cell)
        out.print_line(f"{len(rendered.run_folders)} run(s) rendered in {runs_folder}; nothing was submitted.")
        for remark in planned.remarks:
            out.print_remark(f"note: {remark}")
        skip_count = sending.print_unreadable(out, rendered.skipped_statuses)
        out.print_document([{"id": run.run_id, "path": str(run.path)} for run in rendered.run_folders])
        return int(skip_count > 0)
