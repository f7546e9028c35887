"""Renders the cells of a matrix with `jobs`, and runs each cell with forked ranks."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import forked
import msgspec
from records import Record

from jobs.planning import plan
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.runs import checkpoint
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

CELL_S, COMPILED_S = 90.0, 180.0  # time limit of one cell, without and with torch.compile; includes the start of CUDA
MOST_BYTES = 4 * 2**20  # larger traces and snapshots are not copied to the results
GRACE_S = 30.0  # a cell that is running when the time of the proof is over may run for this many seconds longer


@dataclass(frozen=True)
class How:
    """How the cells of a stage of the GPU proof (prove.py) are run.

    over: what carries the collectives, in words, for the records, such as `NCCL`.
    out: the folder for traces and snapshots.
    where: an expression that selects cells; '' selects all cells.
    ends: the value of time.monotonic() after which no further cell starts.
    prepare: a function that each rank calls first, with its rank number.
    """

    over: str
    out: Path
    where: str
    ends: float
    prepare: Callable[[int], None] = lambda rank: None


def made(folder: Path, matrix: str, how: How) -> Iterator[Record]:
    """Run the cells of a matrix and yield a record of each cell, as benchmarks/gpu/records.py describes it.

    folder: a new folder for the workspace. matrix: the text of the matrix file.
    """
    folder.mkdir()
    (folder / "cluster.yaml").write_text("schema: 1\nname: proof\nprovider: local\n")
    (folder / "proof.yaml").write_text(matrix)
    workspace = Workspace(folder)
    try:  # plan.of does not check that there is a GPU for each rank: in stage B, ranks share one GPU
        planned = plan.plan_matrix(
            workspace,
            str(folder / "proof.yaml"),
            cluster.find_cluster(None, workspace.path),
            where=how.where or None,
            repeats=None,
        )
    except InputError as error:
        if how.where and "selects none of" in str(error):
            return
        yield {"name": "plan", "verdict": "fails", "why": str(error)}
        return
    for run_dir in plan.render_all(planned, workspace, workspace.runs).run_folders:
        record = _record(run_dir, how)
        yield record
        if run_dir.read_run().cell.instruments.checkpoints is not None and record["verdict"] == "holds":
            yield _resumed(run_dir, how)


def sized(matrix: str, gpus: int) -> str:
    """The text of a matrix, with the words GPUS, HEADS, WIDTH and BATCH replaced by multiples of the number of GPUs."""
    for word, number in (("GPUS", gpus), ("HEADS", gpus), ("WIDTH", 32 * gpus), ("BATCH", 8 * gpus)):
        matrix = matrix.replace(word, str(number))
    return matrix


def _record(run_dir: RunDir, how: How) -> Record:
    cell = run_dir.read_run().cell
    named = {"name": run_dir.run_id, "strategy": cell.strategy, "precision": cell.precision, "workload": cell.workload,
             "ranks": cell.world_size,
             "over": "gloo over the host" if cell.servers else how.over}  # fmt: skip
    left_s = how.ends - time.monotonic()
    if left_s < 0:
        return {**named, "verdict": "dropped", "why": "the time was over"}
    if cell.strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        return {**named, "verdict": "dropped", "why": "deepspeed is not installed"}
    began, usual_s = time.monotonic(), COMPILED_S if cell.compile else CELL_S
    codes = forked.ranks(run_dir.path, cell.world_size, min(usual_s, left_s + GRACE_S), how.prepare)
    if forked.KILLED in codes and left_s + GRACE_S < usual_s:
        return {**named, "verdict": "dropped", "why": "the time was over"}
    named["took_s"] = round(time.monotonic() - began, 1)
    if any(codes):
        said = [event for event in run_dir.read_events() if event.event in ("oom", "failed")]
        why = str(said[0].data.get("why")) if said else f"exit codes {codes}"
        state = said[0].event if said else "failed"
        return {**named, "state": state, "verdict": _verdict(state in cell.expect), "why": why, "log": _tail(run_dir.path)}
    result = run_dir.read_result()
    work = result.same_work
    return {
        **named, "cell": msgspec.to_builtins(cell), "state": "completed",
        "verdict": _verdict(work.verdict == "proven" and not cell.expect), "work": work.verdict,
        "why": work.why, "loss_difference": work.loss_difference, "parameter_difference": work.parameter_difference,
        "files": _kept(run_dir, how.out),
        "step_ms": result.step_time_ms.median if result.step_time_ms else None,
        "peak_allocated_bytes": (result.peak_memory_bytes or {}).get("allocated"),
        "communication_bytes": result.communication_bytes, "peak_memory_bytes": result.peak_memory_bytes, "gpus": result.gpus,
    }  # fmt: skip


def _resumed(done: RunDir, how: How) -> Record:
    """Resume a run from its first checkpoint. The verdict is `holds` if the losses of the remaining steps are those of the
    original run."""
    frozen = done.read_run()
    run = msgspec.structs.replace(frozen, run_id=f"{frozen.run_id}-resumed", resume=[frozen.run_id])
    again = RunDir(done.path.with_name(run.run_id))
    again.path.mkdir()
    files.write_json(again.run_json, run)
    shutil.rmtree(checkpoint.list_checkpoints(done.path)[0])
    record = _record(again, how)
    if record["verdict"] != "holds":
        return record
    first, resumed = ({one.step: one.loss for one in folder.steps(0).records} for folder in (done, again))
    step = again.read_result().resumed_from_step
    same = bool(step) and bool(resumed) and all(first[number] == loss for number, loss in resumed.items())
    return {**record, "verdict": _verdict(same), "why": f"resumed from step {step}; losses {'equal' if same else 'differ'}"}


def _kept(run_dir: RunDir, out: Path) -> list[str]:
    """Copy rank 0's trace and snapshot to the folder of results if they exist and are small. Returns the names of the
    copies."""
    found = []
    for file in (run_dir.trace_file(0), run_dir.snapshot_file(0)):
        if file.exists() and file.stat().st_size <= MOST_BYTES:
            name = f"{run_dir.run_id}-{file.parent.name}.json.gz"
            shutil.copyfile(file, out / name)
            found.append(name)
    return found


def _verdict(holds: bool) -> str:
    return "holds" if holds else "fails"


def _tail(path: Path) -> str:
    """The last 6000 characters of the log of the first rank."""
    logs = sorted(path.glob("log/rank-*.log"))
    return logs[0].read_text(errors="replace")[-6000:] if logs else ""
