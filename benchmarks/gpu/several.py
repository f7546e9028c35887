"""Tests shardlab on 2 to 8 GPUs of this machine, or on two nodes of a cluster, and writes a record that names nobody.

    python benchmarks/gpu/several.py                                       # all GPUs of this machine
    python benchmarks/gpu/several.py --cluster cluster.yaml --nodes 2      # two nodes of a Slurm site

The command is `provision`, `jobs submit`, `collect fetch` and a record, in a workspace of its own. If it is interrupted, the
same command continues. If it is run again, runs that failed get another attempt. docs/several-gpus.md says what a record
decides.

Exit code: 0 if all checks hold and docs/results accepts the record; 1 if not; 2 if the input is wrong; 130 after Ctrl-C.
"""

# ruff: noqa: E402 - the folders must be found before the modules of shardlab are imported
from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

import nccl_bytes
import several_record
from nccl_bytes import LoggedBytes
from several_record import NOT_COMPLETED, WHY_NOT, CellRecord, GpuProofRecord

import shardlab
from collect.loading.loaded_run import LoadedRun
from collect.metric import compute_quantities
from collect.reading.load import LoadedCell, LoadedMatrix, load_matrix
from shardlab.cluster import cluster as cluster_file
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files
from shardlab.hardware import host
from shardlab.workspace.workspace import Workspace

MATRIX = Path(__file__).with_name("several-gpus.yaml")
MOST_GPUS, MOST_NODES = 8, 2
LEAST_HEADS, HEAD_WIDTH = 16, 64
LOCAL = "schema: 1\nname: this-machine\nprovider: local\n"
# Number of the record -> the metric of `collect` from which it is taken.
METRICS = {
    "step_ms": "step_time_ms", "theory_bytes": "sent_theory_bytes", "counted_bytes": "sent_counted_bytes",
    "traced_bytes": "sent_traced_bytes", "step_time_over_prediction": "step_time_over_prediction",
    "memory_over_prediction": "memory_over_prediction", "sent_over_prediction": "sent_over_prediction",
}  # fmt: skip
CUPTI_METRICS = ("communication_ms", "exposed_communication_ms", "overlap_pct")
LINK_METRICS = ("nvlink_bytes", "pcie_bytes", "rdma_bytes", "network_bytes")
TRANSPORTS = ("P2P", "SHM", "NET/IB", "NET/IBext", "NET/Socket", "NET/OFI", "NET/AWS Libfabric", "NET/Libfabric")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="cluster file (default: this machine)")
    parser.add_argument("--nodes", type=int, default=1, choices=range(1, MOST_NODES + 1), help="number of nodes (default: 1)")
    parser.add_argument("--gpus", type=int, help="GPUs of a node that are used (default: all, at most 8)")
    parser.add_argument("--workspace", type=Path, help="where runs are kept (default: .cache/gpu-proof/GPUS-NODES)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="where an accepted record is kept")
    parser.add_argument("--where", default="", help="only cells for which this holds, as in jobs plan")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps, which test only the command itself")
    arguments = parser.parse_args(argv)
    try:
        return _prove(arguments)
    except KeyboardInterrupt:
        print("interrupted; runs that were started go on. The same command continues.", file=sys.stderr)
        return 130
    except ShardlabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _prove(arguments: argparse.Namespace) -> int:
    cluster = cluster_file.load_cluster(arguments.cluster) if arguments.cluster else cluster_file.THIS_MACHINE
    gpus = _choose_gpus(cluster, arguments.gpus, arguments.nodes)
    folder = (arguments.workspace or ROOT / ".cache" / "gpu-proof" / f"{gpus}-{arguments.nodes}").resolve()
    files.make_folder(folder)
    _keep(folder / "cluster.yaml", arguments.cluster.read_text() if arguments.cluster else LOCAL)
    matrix_path = folder / MATRIX.name
    is_new = not matrix_path.exists()
    _keep(matrix_path, size_matrix(MATRIX.read_text(), gpus, arguments.nodes, is_tiny=arguments.tiny))
    workspace = ("--workspace", str(folder))
    where = ("--where", arguments.where) if arguments.where else ()
    pack = ("--pack",) if cluster.provider == "slurm" else ()
    verified = _call("provision", str(folder / "cluster.yaml"), *workspace) == 0
    _call("jobs", "submit", "--matrix", str(matrix_path), *where, "--wait", *pack, *workspace)
    if not is_new:
        _call("jobs", "retry", "--wait", *pack, *workspace)
    _call("collect", "fetch", *workspace)
    loaded = load_matrix(Workspace(folder), None)
    day = datetime.datetime.fromtimestamp(matrix_path.stat().st_mtime, datetime.UTC).date()
    record = make_record(loaded, cluster, (gpus, arguments.nodes), day=str(day), verified=verified)
    return _keep_record(record, folder, arguments.out.resolve())


def _choose_gpus(cluster: Cluster, asked: int | None, nodes: int) -> int:
    """The number of GPUs of each node. Raises InputError if there are too few, too many, or if their number is not known."""
    if cluster.provider == "local":
        machine = host.read_host()
        present, source = len(machine.gpus or ()), "this machine"
    else:
        present, source = (cluster.gpus.per_node or 0) if cluster.gpus else 0, "gpus.per_node of the cluster file"
    gpus = asked or min(present, MOST_GPUS)
    if not 1 <= gpus <= min(present, MOST_GPUS) or gpus * nodes < 2:
        raise InputError(
            f"--gpus: found {gpus} GPUs on each of {nodes} node(s); {source} has {present}. Allowed: 2 to {MOST_GPUS} GPUs "
            f"of a node, or 1 to {MOST_GPUS} of each of two nodes. For one GPU: benchmarks/gpu/prove.py."
        )
    if nodes > 1 and cluster.provider == "local":
        raise InputError("--nodes: found 2 for this machine. Allowed with --cluster FILE of a cluster of several nodes.")
    return gpus


def size_matrix(matrix: str, gpus: int, nodes: int, *, is_tiny: bool = False) -> str:
    """The text of the matrix for this number of GPUs on each of the nodes. Its heads, blocks and batch are divisible by the
    number of all GPUs."""
    ranks = gpus * nodes
    heads = ranks * (1 if is_tiny else -(-LEAST_HEADS // ranks))
    words = {
        "GPUS": ranks, "NODES": nodes, "BATCH": (2 if is_tiny else 8) * ranks, "HEADS": heads,
        "WIDTH": heads * (8 if is_tiny else HEAD_WIDTH), "RANKS": list(range(ranks)), "STEPS": 12 if is_tiny else 60,
        "TOKENS": 16 if is_tiny else 512,
    }  # fmt: skip
    head, separator, rest = matrix.partition("schema:")
    lines = [line for line in rest.splitlines() if "# mesh" not in line or (ranks > 2 and ranks % 2 == 0)]
    sized = re.sub(rf"\b({'|'.join(words)})\b", lambda match: str(words[match[0]]), "\n".join(lines))
    return f"{head}{separator}{sized}\n"


def _keep(path: Path, text: str) -> None:
    """Write a file of the workspace. Raises InputError if an earlier call wrote another text, to which its runs belong."""
    if path.exists() and path.read_text() != text:
        raise InputError(
            f"{path}: the workspace was begun with other settings. Allowed: the same ones, or another --workspace."
        )
    if not path.exists():
        files.write_atomic(path, text.encode())


def _call(package: str, *words: str) -> int:
    """Call a command of shardlab and return its exit code. Raises InputError if it rejects its input."""
    print(f"$ {package} {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", package, *words], cwd=ROOT, check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code == 2:
        raise InputError(f"`{package} {words[0]}` rejects its input: see above.")
    return code


def make_record(
    loaded: LoadedMatrix, cluster: Cluster, gpus_and_nodes: tuple[int, int], *, day: str, verified: bool
) -> GpuProofRecord:
    """The record of the runs of a matrix. Raises InputError if no run says on which GPU it ran."""
    gpus, nodes = gpus_and_nodes
    cells = [_record_cell(cell, nodes) for cell in loaded.cells if cell.runs]
    runs = [run for cell in loaded.cells for run in cell.runs if run.hosts and run.hosts[0].gpus]
    if not runs:
        raise ShardlabError("no run says on which GPU it ran: `jobs status` in the workspace says why runs failed.")
    machine = runs[0].hosts[0]
    torch = json.loads(runs[0].folder.environment_file(machine.host).read_bytes())["torch"]
    cell = runs[0].cell
    found_gpus = machine.gpus or []
    links = {"NVLink" for gpu in found_gpus if gpu.nvlinks}
    links |= {path for gpu in found_gpus for path in (gpu.paths or {}).values()}
    cuda = None if "+cpu" in torch["version"] else _version(torch["cuda"])
    model = {name: cell.options[name] for name in ("n_layer", "n_head", "n_embd")}
    model |= {"seq_len": cell.seq_len, "global_batch_size": cell.global_batch_size, "steps": cell.steps}
    document = {
        "date": day, "gpu": found_gpus[0].name, "nodes": nodes, "gpus_per_node": gpus, "provider": cluster.provider,
        "links": sorted(links), "shardlab": shardlab.__version__, "torch": _version(torch["version"]), "cuda": cuda,
        "nccl": _version(torch["nccl"]), "driver": _version(machine.gpu_driver), "model": model, "verified": verified,
        "matrix_cells": len(loaded.expansion.cells),
        "schema": several_record.SCHEMA, "cells": cells, "checks": several_record.judge(cells, nodes),
    }  # fmt: skip
    return msgspec.convert(msgspec.to_builtins(document), GpuProofRecord)


def _version(text: str | None) -> str | None:
    """The numbers of a version, without what a builder added: 2.13.0 of 2.13.0+cu130."""
    match = re.match(r"\d+(\.\d+){1,2}", text or "")
    return match[0] if match else None


def _record_cell(cell: LoadedCell, nodes: int) -> CellRecord:
    run = cell.runs[-1]
    logs = [run.folder.rank_log(rank) for rank in range(run.cell.gpus)] if run.completed else []
    logged_bytes = nccl_bytes.count_step_bytes(logs, run.world_steps.height if run.completed else 0)
    numbers = _measure(run, nodes, logged_bytes) if run.completed else {}
    nccl = run.nccl_transports if run.run is not None else None
    transports: dict[str, int] = {}
    for name, count in (nccl.channels if nccl else {}).items():
        known = name if name in TRANSPORTS else "NET/other"
        transports[known] = transports.get(known, 0) + count
    return CellRecord(
        strategy=cell.cell.strategy, precision=cell.cell.precision, tp=cell.cell.tp or 1, pp=cell.cell.pp or 1,
        state=run.verdict.state, work=run.result.same_work.verdict if run.result and run.result.same_work else None,
        transports=transports, gpudirect=nccl.gpudirect if nccl else 0, numbers=numbers,
        unread_nccl_lines=logged_bytes.unread_lines,
        not_measured={name: why if run.completed else NOT_COMPLETED for name, why in WHY_NOT.items() if name not in numbers},
    )  # fmt: skip


def _measure(run: LoadedRun, nodes: int, logged_bytes: LoggedBytes) -> dict[str, float]:
    """The numbers of a completed run that were measured, by their names in WHY_NOT."""
    quantities = {name: quantity.value for name, quantity in compute_quantities(run).items()}
    numbers: dict[str, float | None] = {name: quantities.get(metric) for name, metric in METRICS.items()}
    work = run.result.same_work if run.result else None
    if work is not None:
        numbers |= {"loss_difference": work.loss_difference, "parameter_difference": work.parameter_difference}
    if run.breakdowns and all(breakdown.source == "gpu" for breakdown in run.breakdowns):
        numbers |= {name: quantities.get(name) for name in CUPTI_METRICS}
    window_steps = run.world_steps.height - 1  # a window begins at the end of the first timed step
    for name in LINK_METRICS if window_steps > 0 else ():
        if name in quantities and (nodes > 1 or name in ("nvlink_bytes", "pcie_bytes")):
            numbers[name] = quantities[name] / window_steps
    numbers["nccl_bytes"] = logged_bytes.sent_bytes
    known = {name: float(number) for name, number in numbers.items() if number is not None}
    return {name: number for name, number in known.items() if number > 0 or name in several_record.MAY_BE_ZERO}


def _keep_record(record: GpuProofRecord, folder: Path, out: Path) -> int:
    """Print the checks and write the record; into `out` only if it is accepted. Returns the exit code."""
    content = several_record.encode_record(record)
    _, problems = several_record.read_record(content)
    for check in record.checks:
        span = "" if check.lowest is None or check.highest is None else f": {check.lowest:.4g} to {check.highest:.4g}"
        print(f"{check.verdict:13} {check.name}{span} ({check.cells} cells)")
    for cell in record.cells:
        if cell.unread_nccl_lines:
            lines_text = f"{cell.unread_nccl_lines} lines of NCCL's log about collectives cannot be read"
            print(f"{cell.strategy}, {cell.precision}: {lines_text}, so the bytes are not known", file=sys.stderr)
    name = re.sub(r"[^a-z0-9]+", "-", record.gpu.lower()).strip("-")
    nodes = f"-{record.nodes}-nodes" if record.nodes > 1 else ""
    path = (folder if problems else out / f"{record.date}-{record.gpus_per_node}-x-{name}{nodes}") / "several-gpus.json"
    files.make_folder(path.parent)
    files.write_atomic(path, content)
    for problem in problems:
        print(f"not in docs/results: {problem}", file=sys.stderr)
    print(f"{several_record.describe(record)}\nkept in {path}")
    return 1 if problems or any(check.verdict == "fails" for check in record.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
