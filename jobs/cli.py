"""The command `jobs`: plans, renders, submits and tracks the runs of a matrix."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jobs import datasets, forward, leftovers, menus, plan, render, submit, views, watch
from jobs.left import Left
from jobs.reconcile import Status
from jobs.scheduler import Full, How, scheduler
from jobs.select import select
from shardlab import cluster, console, state
from shardlab.cell import Cell
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.workspace import Workspace, chosen

EXAMPLES = {
    "plan": "jobs plan --matrix quickstart",
    "render": "jobs render --matrix quickstart --out /tmp/scripts",
    "submit": "jobs submit --matrix quickstart --wait",
    "status": "jobs status --watch",
    "logs": "jobs logs 'ddp-gpt2-tiny-*-r1' --rank 1 --follow",
    "cancel": "jobs cancel --where \"strategy == 'ddp'\"",
    "retry": "jobs retry --only failed,node_fail",
    "matrices": "jobs matrices",
    "strategies": "jobs strategies --json",
    "workloads": "jobs workloads",
    "launchers": "jobs launchers",
}
EPILOG = """example:
  jobs submit --matrix quickstart --wait

`jobs` is also a builtin command of your shell. Each of these lines runs this program instead:
  env jobs status        shardlab jobs status
  eval "$(shardlab shell-init)"     after this line, `jobs status` runs this program too
"""
INTERRUPTED = "interrupted; runs that were started continue, and their state is saved."
LONGEST_WAIT_S = 7 * 24 * 3600
RETRIED = "failed,node_fail,preempted,hung"


def parser() -> console.Parser:
    common = console.common_options()
    top = console.Parser(
        prog="jobs",
        description="Plan, render, submit and track the runs of a matrix of strategies and GPU counts.",
        epilog=EPILOG,
        parents=[common],
    )
    console.add_version(top)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> console.Parser:
        example = f"example:\n  {EXAMPLES[name]}"
        added: console.Parser = verbs.add_parser(
            name, parents=[common], help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=example
        )
        added.set_defaults(run=run)
        return added

    _of_a_matrix(verb("plan", _plan, "print the cells of a matrix, and which cells it excludes and why"))

    added = verb("render", _render, "write the run folders with their scripts, but submit nothing")
    _of_a_matrix(added)
    added.add_argument("--out", metavar="DIR", help="folder for the run folders (default: runs/ of the workspace)")

    added = verb("submit", _submit, "render and submit the runs of a matrix that were not submitted before")
    _of_a_matrix(added)
    _may_wait(added)
    added.add_argument("--after", metavar="RUN", help="on Slurm: start after these runs have ended (run id or shell pattern)")
    dry_run_help = "print what would be submitted, and submit nothing; with -v also print the scripts"
    added.add_argument("--dry-run", action="store_true", help=dry_run_help)
    resume_help = (
        "resume from a checkpoint of this run; cells may differ from it only in their ranks and how the ranks share the batch "
        "(if the checkpoint has the layout `whole`, also in their strategy)"
    )
    added.add_argument("--resume-from", metavar="RUN", help=resume_help)

    _may_share(added)

    added = verb("status", _status, "show the state of runs; cancel queued Slurm jobs whose runs have ended")
    _of_runs(added)
    added.add_argument("--watch", action="store_true", help="show a live table until all runs have ended or you press Ctrl-C")

    added = verb("cancel", _cancel, "cancel runs that are pending or running")
    _of_runs(added)
    added.add_argument("--all", action="store_true", help="cancel every run of the workspace that has not ended")

    added = verb("retry", _retry, "submit a new attempt of runs that failed (see --only)")
    _of_runs(added)
    _may_wait(added)
    _may_share(added)
    only_help = f"retry runs that ended in one of these states (default: {RETRIED})"
    added.add_argument("--only", default=RETRIED, metavar="STATE,...", help=only_help)

    added = verb("logs", _logs, "print the logs of a run")
    added.add_argument("run_id", metavar="RUN", help="a run id, or a shell pattern that matches exactly one run")
    rank_help = "print the log of rank N (default: the log of the launcher, then the log of rank 0)"
    added.add_argument("--rank", type=int, metavar="N", help=rank_help)
    added.add_argument("--follow", action="store_true", help="keep printing new output until the run has ended")

    verb("matrices", _menu(menus.matrices), "list the matrices that ship with shardlab")
    verb("strategies", _menu(menus.strategies), "list the strategies and their options")
    verb("workloads", _menu(menus.workloads), "list the workloads and their options")
    verb("launchers", _menu(menus.launchers), "list the launchers, which start the ranks of a run")
    return top


def _of_a_matrix(added: argparse.ArgumentParser) -> None:
    matrix_help = "name of a shipped matrix, or path of a matrix file (a path contains / or ends in .yaml)"
    added.add_argument("--matrix", required=True, metavar="NAME|FILE", help=matrix_help)
    cluster_help = "cluster file (default: cluster.yaml of the workspace, else this machine)"
    added.add_argument("--cluster", metavar="FILE", help=cluster_help)
    added.add_argument("--where", metavar="EXPR", help='only cells for which this expression is true, such as "gpus > 1"')
    added.add_argument("--repeats", type=int, metavar="N", help="number of runs of each cell (default: as set in the matrix)")
    scale_help = "tiny: rehearse every cell at a tiny size (its tiny twin), with all ranks on the CPU of one machine"
    added.add_argument("--scale", choices=plan.SCALES, default="full", help=scale_help)


def _of_runs(added: argparse.ArgumentParser) -> None:
    added.add_argument("runs", nargs="*", metavar="RUN", help="run ids or shell patterns (quote them)")
    added.add_argument("--matrix", metavar="NAME", help="only runs of this matrix")
    where_help = "only runs for which this expression is true, such as \"state == 'failed'\""
    added.add_argument("--where", metavar="EXPR", help=where_help)


def _may_wait(added: argparse.ArgumentParser) -> None:
    wait_help = "wait until all runs have ended; exit code 1 if a run did not end as expected"
    added.add_argument("--wait", action="store_true", help=wait_help)


def _may_share(added: argparse.ArgumentParser) -> None:
    gpus_help = "how long a run waits if other processes use its GPUs, before it fails (default: 0)"
    added.add_argument("--wait-gpus", type=int, default=0, metavar="SECONDS", help=gpus_help)
    added.add_argument("--max-parallel", type=int, metavar="N", help="on Slurm: at most N runs at a time")
    pack_help = "on Slurm: one allocation for all runs with the same sbatch options; they run one after another"
    added.add_argument("--pack", action="store_true", help=pack_help)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on this machine or on the controller of its cluster; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(words)

    def command() -> int:
        there = forward.elsewhere(arguments, workspace := _workspace(arguments))
        if there is not None:
            return forward.run(there, arguments, words, workspace)
        return int(arguments.run(arguments))

    return console.run(command, interrupted=INTERRUPTED)


def _plan(arguments: argparse.Namespace) -> int:
    out, workspace = Output.of(arguments), _workspace(arguments)
    planned = _planned(arguments, workspace)
    views.plan(out, planned, datasets.look(planned.cells, planned.source, workspace))
    return 0


def _render(arguments: argparse.Namespace) -> int:
    out, workspace = Output.of(arguments), _workspace(arguments)
    planned = _planned(arguments, workspace)
    plan.must_fit(planned)
    folder = Path(arguments.out).absolute() if arguments.out else workspace.runs
    if arguments.out:
        rendered = plan.render_all(planned, folder)
    else:
        with workspace.alone():
            rendered = plan.render_all(planned, folder)
            render.keep(workspace, planned.source, planned.matrix, planned.all_cells, planned.repeats)
    out.line(f"{len(rendered.folders)} run(s) rendered in {folder}; nothing was submitted.")
    for remark in planned.remarks:
        out.remark(f"note: {remark}")
    named = _named(out, rendered.set_aside)
    out.document([{"id": one.run_id, "path": str(one.path)} for one in rendered.folders])
    return int(named > 0)


def _submit(arguments: argparse.Namespace) -> int:
    out, workspace = Output.of(arguments), _workspace(arguments)
    planned = _planned(arguments, workspace)
    plan.must_fit(planned)
    forward.must_suit(planned.source.where, workspace)
    _data_must_be_there(out, workspace, planned.cells, planned.source)
    submit.check(workspace, planned.cells, planned.repeats, planned.source, arguments.resume_from)
    if arguments.dry_run:
        steps = submit.decide(workspace, planned.cells, planned.repeats, planned.source, arguments.resume_from)
        views.steps(out, steps, sent=False)
        named = _named(out, [step.now for step in steps if step.now is not None])
        views.scripts(out, steps, workspace, planned.source)
        out.document([{"id": step.run.run_id, "send": step.send, "why": step.why} for step in steps])
        return int(named > 0)
    plan.must_train_here(planned.source)
    how = _how(arguments, tuple(chosen(workspace.run_ids(), [arguments.after])) if arguments.after else ())
    with workspace.alone():
        whole = _resolved(out, workspace, planned.source)
        steps = submit.decide(workspace, planned.cells, planned.repeats, planned.source, arguments.resume_from)
        render.keep(workspace, planned.source, planned.matrix, planned.all_cells, planned.repeats)
        left = _send(arguments, workspace, steps, planned.source, how)
    return max(int(not whole), _sent(arguments, workspace, steps, left, planned.remarks))


def _status(arguments: argparse.Namespace) -> int:
    out, workspace = Output.of(arguments), _workspace(arguments)

    def look() -> list[Status]:
        return select(workspace, arguments.runs, arguments.matrix, arguments.where)

    if arguments.watch:
        found = watch.status(out, workspace, look)
    else:
        views.status(out, found := look(), workspace)
    return int(not _tidied(out, workspace, found))


def _cancel(arguments: argparse.Namespace) -> int:
    out, workspace = Output.of(arguments), _workspace(arguments)
    if not (arguments.runs or arguments.where or arguments.matrix or arguments.all):
        raise InputError("say what to cancel: run ids, --where, --matrix, or --all.")
    found = select(workspace, arguments.runs, arguments.matrix, arguments.where)
    ended = watch.cancel(workspace, [one for one in found if one.state not in state.FINAL and not one.set_aside])
    leftover = sum(one.leftover for one in found)
    if ended or not leftover:
        out.line(f"{len(ended)} run(s) cancelled." if ended else "nothing to cancel: all selected runs have ended.")
    out.document({"runs": ended})
    tidied = _tidied(out, workspace, found)
    return 0 if tidied and all(one.state in state.FINAL for one in ended) else 1


def _retry(arguments: argparse.Namespace) -> int:
    out, workspace = Output.of(arguments), _workspace(arguments)
    only = {name.strip() for name in arguments.only.split(",") if name.strip()}
    if unknown := sorted(only - state.FINAL - {"unknown"}):
        allowed = ", ".join(sorted(state.FINAL - {"completed"}))
        raise InputError(f"--only: {unknown[0]!r} is not a state in which a run ends. Allowed: {allowed}.")
    found = select(workspace, arguments.runs, arguments.matrix, arguments.where)
    source = render.source("", cluster.find(None, workspace.path), workspace, wait_gpus_s=_wait_gpus_s(arguments))
    how = _how(arguments)
    cells = [step.run.cell for step in submit.retry(workspace, found, only, source)]
    plan.must_train_here(source)
    _data_must_be_there(out, workspace, cells, source)
    with workspace.alone():
        whole = _resolved(out, workspace, source)
        found = select(workspace, arguments.runs, arguments.matrix, arguments.where)
        whole = _tidied(out, workspace, found, of_scheduler=False) and whole
        steps = submit.retry(workspace, found, only, source)
        left = _send(arguments, workspace, steps, source, how)
    return max(int(not whole), _sent(arguments, workspace, steps, left))


def _logs(arguments: argparse.Namespace) -> int:
    return watch.logs(Output.of(arguments), _workspace(arguments), arguments.run_id, arguments.rank, follow=arguments.follow)


def _data_must_be_there(out: Output, workspace: Workspace, cells: Sequence[Cell], source: render.Source) -> None:
    """Raises InputError if a data set of these cells is missing; prints a note if it is not known whether nodes have them."""
    found = datasets.look(cells, source, workspace)
    if found.unknown:
        out.remark(f"note: {found.unknown}")
    datasets.must_be_there(found)


def _resolved(out: Output, workspace: Workspace, source: render.Source) -> bool:
    """Finish interrupted submissions of earlier commands and print what was done.

    Returns whether every record of the scheduler can be read.
    """
    for sentence in scheduler(source.scheduler).resolve(workspace):
        out.remark(sentence)
    damaged = scheduler(source.scheduler).damaged(workspace)
    for sentence in damaged:
        out.remark(sentence, style="red")
    return not damaged


def _tidied(out: Output, workspace: Workspace, found: Sequence[Status], *, of_scheduler: bool = True) -> bool:
    """Cancel leftover jobs and name every record that is set aside; return whether no damaged record is left.

    of_scheduler: whether to check the schedulers' own records as well.
    """
    cancelled = leftovers.cancel(found)
    for sentence in cancelled.sentences:
        out.remark(sentence)
    names = {one.scheduler["name"] for one in found if not one.set_aside} if of_scheduler else set()
    named = _named(out, found)
    damaged = [sentence for name in sorted(names) for sentence in scheduler(name).damaged(workspace)]
    for sentence in damaged:
        out.remark(sentence, style="red")
    return cancelled.all_gone and not named and not damaged


def _named(out: Output, found: Sequence[Status]) -> int:
    """Name every run that is set aside, with the reason; return their number."""
    set_aside = [one for one in found if one.set_aside]
    for one in set_aside:
        out.remark(f"{one.id}: {one.why}", style="red")
    return len(set_aside)


def _send(
    arguments: argparse.Namespace,
    workspace: Workspace,
    steps: Sequence[submit.Step],
    source: render.Source,
    how: How,
) -> Left | None:
    """Submit the runs. If the scheduler is full and the command waits, return the runs that are left. Raises ShardlabError."""
    try:
        submit.send(workspace, steps, source, how)
    except Full as full:
        if not arguments.wait:
            raise
        return Left(workspace, source.scheduler, how, full)
    return None


def _sent(
    arguments: argparse.Namespace,
    workspace: Workspace,
    steps: Sequence[submit.Step],
    left: Left | None,
    remarks: Sequence[str] = (),
) -> int:
    """Print what was submitted, and wait for the runs if --wait is given; return the exit code."""
    out = Output.of(arguments)
    views.steps(out, steps, sent=True, waiting={folder.run_id for folder in left.folders} if left else ())
    for remark in remarks:
        out.remark(f"note: {remark}")
    if left:
        out.remark(f"note: Slurm accepts no more jobs for now ({left.problem}); the rest is submitted when there is room.")
    tidied = _tidied(out, workspace, [step.now for step in steps if step.now is not None and not step.send], of_scheduler=False)
    code = watch.finish(out, workspace, [step.run.run_id for step in steps], wait=arguments.wait, left=left)
    return code if tidied else max(code, 1)


def _how(arguments: argparse.Namespace, after: tuple[str, ...] = ()) -> How:
    if arguments.max_parallel is not None and not 1 <= arguments.max_parallel <= 100_000:
        raise InputError(f"--max-parallel: found {arguments.max_parallel}. Allowed: 1 to 100000.")
    return How(at_once=arguments.max_parallel, pack=arguments.pack, after=after)


def _menu(show: Callable[[Output], None]) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        show(Output.of(arguments))
        return 0

    return run


def _planned(arguments: argparse.Namespace, workspace: Workspace) -> plan.Plan:
    return plan.of(
        workspace,
        arguments.matrix,
        cluster_file=arguments.cluster,
        where=arguments.where,
        repeats=arguments.repeats,
        scale=arguments.scale,
        wait_gpus_s=_wait_gpus_s(arguments),
    )


def _wait_gpus_s(arguments: argparse.Namespace) -> int:
    """The value of --wait-gpus; 0 if the command has no such option. Raises InputError."""
    seconds: int = getattr(arguments, "wait_gpus", 0)
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise InputError(f"--wait-gpus: found {seconds}. Allowed: 0 to {LONGEST_WAIT_S} seconds.")
    return seconds


def _workspace(arguments: argparse.Namespace) -> Workspace:
    return Workspace.find(getattr(arguments, "workspace", None))


if __name__ == "__main__":
    sys.exit(main())
