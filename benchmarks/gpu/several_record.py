"""The record of a proof on several GPUs, and the check that docs/results accepts it.

    python benchmarks/gpu/several_record.py docs/results/*/several-gpus.json

Exit code: 0 if every record is accepted; 2 if a record is refused, with the reasons.

A record names nobody: it has no field for a free text. Every text is a word of a list, a version, or the name of a GPU model
that shardlab knows, every reason is a sentence of WHY_NOT, and the file has the bytes that several.py writes. A number that was
not measured is absent and has a reason; it is never 0.
"""

from __future__ import annotations

import datetime
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shardlab.hardware.gpu_models import find_gpu_model, load_gpu_models
from shardlab.runs.state import STATE_MEANINGS

SCHEMA = 1
Version = Annotated[str, msgspec.Meta(pattern=r"^\d{1,4}(\.\d{1,4}){1,2}\Z")]
GpuName = Annotated[
    str,
    msgspec.Meta(pattern=r"^(NVIDIA|Tesla|Quadro|GeForce|GRID|TITAN) [A-Za-z0-9]+([ .+-][A-Za-z0-9]+)*\Z", max_length=60),
]
# The end of the name of a part of a GPU: MIG 1g.5gb, MIG 1c.3g.40gb+me.
MIG_PART = re.compile(r" MIG (\dc\.)?\dg\.\d{1,3}gb(\+(me|gfx|all)(\.all)?)?\Z")
# The whole name of a vGPU: GRID A100-4C, NVIDIA A40-48Q.
VGPU = re.compile(r"(GRID|NVIDIA) ([A-Z]{1,3}\d{1,4})[A-Z]{0,2}(-Ada)?(-\d)?-\d{1,3}[ABCQ](ME)?")
Date = Annotated[str, msgspec.Meta(pattern=r"^20\d\d-[01]\d-[0-3]\d\Z")]
Transport = Annotated[str, msgspec.Meta(pattern=r"^(P2P|SHM|NET/(IB|IBext|Socket|OFI|AWS Libfabric|Libfabric|other))\Z")]
Strategy = Literal[
    "ddp", "fsdp2", "zero3", "tp", "pp-1f1b", "tp-fsdp2", "fsdp2-hsdp", "pp-fsdp2", "fsdp1-full-shard", "fsdp2-zero2", "zero2"
]  # fmt: skip
Precision = Literal["bf16", "fp32"]
ON_MESHES = ("tp-fsdp2", "fsdp2-hsdp", "pp-fsdp2")  # in the matrix if the ranks can be a mesh of two dimensions
Verdict = Literal["holds", "fails", "not measured"]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1024)]

UNFINISHED = {"planned", "pending", "running"}
NOT_COMPLETED = "the run did not complete"
# Number of a cell -> why it may be absent. Bytes are those of all ranks in one step. Bytes of links come from counters, which
# count all programs, between the first and the last timed step.
WHY_NOT = {
    "loss_difference": "the work was not compared with that of one process",
    "parameter_difference": "the work was not compared with that of one process",
    "step_ms": "no step was free of instruments",
    "theory_bytes": "the strategy has no formula",
    "counted_bytes": "the same-work proof counted no collectives",
    "traced_bytes": "the traces do not have the size of every collective",
    "nccl_bytes": "the logs of the ranks do not have NCCL's lines about its collectives, or lines that cannot be read",
    "nvlink_bytes": "NVML has no counter of NVLink, or its samples do not cover the timed steps",
    "pcie_bytes": "NVML has no counter of PCIe, or its samples do not cover the timed steps",
    "rdma_bytes": "the ranks are on one node, or no adapter has a counter of RDMA",
    "network_bytes": "the ranks are on one node, or the samples do not cover the timed steps",
    "communication_ms": "the traces have no kernels of a GPU (CUPTI)",
    "exposed_communication_ms": "the traces have no kernels of a GPU (CUPTI)",
    "overlap_pct": "the traces have no kernels of a GPU (CUPTI), or none of NCCL",
    "step_time_over_prediction": "the planner predicted no step time for this cell on this GPU",
    "memory_over_prediction": "the planner predicted no memory for this cell",
    "sent_over_prediction": "the planner predicted no traffic for this cell, or its ranks send different numbers of bytes",
}
MAY_BE_ZERO = {
    "loss_difference", "parameter_difference", "nvlink_bytes", "rdma_bytes", "network_bytes", "communication_ms",
    "exposed_communication_ms", "overlap_pct",
}  # fmt: skip


class CellRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cell of the matrix: what its run did and what was measured."""

    strategy: Strategy
    precision: Precision
    tp: Positive
    pp: Positive
    state: str
    """The state of the latest attempt, one of STATE_MEANINGS."""
    work: Literal["proven", "different", "other work", "not provable", "not proven"] | None = None
    """The verdict of the same-work proof; null: the run has no result."""
    transports: dict[Transport, Annotated[int, msgspec.Meta(ge=1)]] = {}
    """Connections between ranks by transport, from NCCL's log; empty: the log does not say them."""
    gpudirect: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many of the connections between nodes bypass the memory of the hosts."""
    unread_nccl_lines: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many lines of NCCL's log about collectives cannot be read; if there are any, the cell has no nccl_bytes."""
    numbers: dict[str, float]
    """Measured numbers, by their names in WHY_NOT."""
    not_measured: dict[str, str]
    """Why each of the other numbers is absent."""


class ProofCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the questions that the record answers."""

    name: str
    verdict: Verdict
    cells: Annotated[int, msgspec.Meta(ge=0)]
    """The number of cells on which the verdict rests."""
    lowest: float | None = None
    """The smallest ratio or difference of these cells; null: the check has no number."""
    highest: float | None = None


class GpuProofRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a proof on several GPUs measured."""

    schema: Literal[1] = SCHEMA
    date: Date
    gpu: GpuName
    nodes: Annotated[int, msgspec.Meta(ge=1, le=2)]
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1, le=8)]
    provider: Literal["local", "ssh", "virtual", "slurm", "cloudlab"]
    links: list[Literal["NVLink", "PIX", "PXB", "PHB", "NODE", "SYS"]]
    """How the GPUs of a node are connected, by NVML."""
    shardlab: Version
    torch: Version
    cuda: Version | None
    """Null: torch was built without CUDA, so the GPUs are not real ones."""
    nccl: Version | None
    driver: Version | None
    model: dict[
        Literal["n_layer", "n_head", "n_embd", "seq_len", "global_batch_size", "steps"], Annotated[int, msgspec.Meta(ge=1)]
    ]
    verified: bool
    """Whether all checks of `provision` passed before the runs."""
    matrix_cells: Positive
    """The number of cells of the whole matrix."""
    cells: list[CellRecord]
    checks: list[ProofCheck]


def judge(cells: Sequence[CellRecord], nodes: int) -> list[ProofCheck]:
    """The checks of a record, computed from its cells."""
    works = [cell.work for cell in cells if cell.work in ("proven", "different")]
    is_read = not any(cell.unread_nccl_lines for cell in cells)
    work_verdict: Verdict = "not measured" if not works else "holds" if set(works) == {"proven"} else "fails"
    return [
        ProofCheck("every cell completed", _judge_states({cell.state for cell in cells}), len(cells)),
        ProofCheck("same work as one process", work_verdict, len(works)),
        *(
            _judge_ratio(what, cells, lambda cell, upper=upper, lower=lower: _ratio(cell, upper, lower), 0.97, 1.03, is_read)
            for what, upper, lower in (
                ("NCCL's bytes / counted bytes", "nccl_bytes", "counted_bytes"),
                ("traced bytes / NCCL's bytes", "traced_bytes", "nccl_bytes"),
            )
        ),
        _judge_ratio("bytes of the links / NCCL's bytes", cells, lambda cell: _link_ratio(cell, nodes), 0.95, 1.25, is_read),
        _judge_ratio("hidden communication (%)", cells, lambda cell: cell.numbers.get("overlap_pct"), 0.0, 100.0),
        *(
            _judge_ratio(f"{what} / prediction", cells, lambda cell, name=name: cell.numbers.get(name), low, high)
            for what, name, low, high in (
                ("step time", "step_time_over_prediction", 0.67, 1.5), ("memory", "memory_over_prediction", 0.8, 1.25),
                ("counted bytes", "sent_over_prediction", 0.97, 1.03),
            )
        ),
    ]  # fmt: skip


def _judge_states(states: set[str]) -> Verdict:
    if states & UNFINISHED:
        return "not measured"
    return "holds" if states == {"completed"} else "fails"


def _judge_ratio(
    name: str,
    cells: Iterable[CellRecord],
    compute: Callable[[CellRecord], float | None],
    low: float,
    high: float,
    is_complete: bool = True,
) -> ProofCheck:
    """Whether all ratios are in a range. is_complete: whether nothing was skipped; if not, the check cannot hold."""
    ratios = [ratio for cell in cells if (ratio := compute(cell)) is not None]
    if not ratios:
        return ProofCheck(name, "not measured", 0)
    holds = low <= min(ratios) and max(ratios) <= high
    verdict: Verdict = "fails" if not holds else "holds" if is_complete else "not measured"
    return ProofCheck(name, verdict, len(ratios), min(ratios), max(ratios))


def _ratio(cell: CellRecord, upper: str, lower: str) -> float | None:
    above, below = cell.numbers.get(upper), cell.numbers.get(lower)
    return None if above is None or not below else above / below


def _link_ratio(cell: CellRecord, nodes: int) -> float | None:
    """The bytes that the links carried, divided by those that NCCL's collectives send; None if a part is not known.

    With NVLink, bytes between nodes leave through the adapters. Without it, all bytes leave a GPU through PCIe.
    """
    numbers = cell.numbers
    adapters = "network_bytes" if "NET/Socket" in cell.transports else "rdma_bytes"
    between = numbers.get(adapters) if nodes > 1 else 0.0
    inside = numbers.get("nvlink_bytes")
    carried = numbers.get("pcie_bytes") if not inside else None if between is None else inside + between
    nccl_bytes = numbers.get("nccl_bytes")
    return carried / nccl_bytes if carried and nccl_bytes else None


def list_expected_cells(ranks: int) -> list[tuple[str, str]]:
    """(strategy, precision) of each cell of the matrix several-gpus.yaml, sorted."""
    has_mesh = ranks > 2 and ranks % 2 == 0
    strategies = [name for name in get_args(Strategy) if has_mesh or name not in ON_MESHES]
    return sorted([*((name, "bf16") for name in strategies), ("ddp", "fp32"), ("fsdp2", "fp32")])


def encode_record(record: GpuProofRecord) -> bytes:
    """The content of the file of a record."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def read_record(content: bytes) -> tuple[GpuProofRecord | None, list[str]]:
    """Returns (the record, the reasons why docs/results refuses it); the record is None if `content` is no record."""
    try:
        record = msgspec.json.decode(content, type=GpuProofRecord)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        return None, [f"{error}. Allowed: what benchmarks/gpu/several.py writes."]
    problems = list(_find_problems(record))
    if content != encode_record(record):
        problems.append("the file has other bytes than benchmarks/gpu/several.py writes. Allowed: a file that was not edited.")
    return record, problems


def _find_problems(record: GpuProofRecord) -> Iterator[str]:
    if record.cuda is None or record.nccl is None or record.driver is None:
        yield "cuda, nccl and driver: not all are known, so the GPUs may be fake. Allowed: records of real GPUs."
    if record.nodes * record.gpus_per_node < 2:
        yield "gpus_per_node: found 1 GPU in all. Allowed: 2 GPUs or more; for one GPU: make gpu-proof."
    if not _is_known_gpu(record.gpu):
        yield "gpu: no model that shardlab knows. Allowed: a name of shardlab/hardware/gpu_models.yaml."
    if not _is_past_date(record.date):
        yield f"date: found {record.date}. Allowed: a day that is not in the future."
    if len(record.model) != 6:
        yield "model: a size is missing. Allowed: what benchmarks/gpu/several.py writes."
    expected = list_expected_cells(record.nodes * record.gpus_per_node)
    if sorted((cell.strategy, cell.precision) for cell in record.cells) != expected or record.matrix_cells != len(expected):
        yield f"cells: found {len(record.cells)}. Allowed: all {len(expected)} cells of the matrix, each once, without --where."
    if not any("nccl_bytes" in cell.numbers for cell in record.cells):
        yield "nccl_bytes: no cell has them, so nothing shows that NCCL carried data. Allowed: runs over NCCL."
    for number, cell in enumerate(record.cells):
        yield from (f"cells[{number}] ({cell.strategy}, {cell.precision}): {problem}" for problem in _find_cell_problems(cell))
    if record.checks != judge(record.cells, record.nodes):
        yield "checks: they are not those that follow from the cells. Allowed: a record that was not edited."


def _is_known_gpu(name: str) -> bool:
    """Whether a name is that of a GPU model that shardlab knows, of a MIG part of one, or of a vGPU on one."""
    vgpu = VGPU.fullmatch(name)
    is_on_known = vgpu is not None and any(re.search(rf"\b{vgpu[2]}(?!\d)", model.name) for model in load_gpu_models())
    return is_on_known or find_gpu_model(MIG_PART.sub("", name)) is not None


def _find_cell_problems(cell: CellRecord) -> Iterator[str]:
    if cell.state not in STATE_MEANINGS:
        yield f"state: unknown. Allowed: {', '.join(STATE_MEANINGS)}."
    if cell.state in UNFINISHED:
        yield f"its run is {cell.state}. Run the same command again; it continues."
    if cell.state != "completed" and cell.numbers:
        yield f"its run is {cell.state}, but it has numbers. Allowed: numbers of completed runs."
    if cell.unread_nccl_lines and "nccl_bytes" in cell.numbers:
        yield f"nccl_bytes: {cell.unread_nccl_lines} lines of NCCL's log were not read. Allowed: no number then."
    if cell.state == "completed" and cell.work is None:
        yield "it completed, but has no verdict of the same-work proof."
    if unknown := (cell.numbers.keys() | cell.not_measured.keys()) - WHY_NOT.keys():
        yield f"unknown number {sorted(unknown)[0]!r:.60}. Allowed: {', '.join(WHY_NOT)}."
        return
    for name, why in WHY_NOT.items():
        if (name in cell.numbers) == (name in cell.not_measured):
            yield f"{name}: allowed is either a number or the reason why it was not measured."
        elif name in cell.not_measured and cell.not_measured[name] not in (why, NOT_COMPLETED):
            yield f"{name}: its reason is not one of the known sentences."
        elif name in cell.numbers and not _is_measurement(name, cell.numbers[name]):
            yield f"{name}: found {cell.numbers[name]}. Allowed: a number {'from' if name in MAY_BE_ZERO else 'above'} 0."


def _is_past_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text) <= datetime.datetime.now(datetime.UTC).date()
    except ValueError:
        return False


def _is_measurement(name: str, number: float) -> bool:
    return math.isfinite(number) and (number > 0 or (number == 0 and name in MAY_BE_ZERO))


def main(argv: Sequence[str]) -> int:
    """Check records and print what was found. Returns the exit code."""
    if not argv:
        print(f"found no file. Allowed: python {Path(__file__).name} FILE...", file=sys.stderr)
        return 2
    accepted = True
    for name in argv:
        try:
            record, problems = read_record(Path(name).read_bytes())
        except OSError as error:
            record, problems = None, [f"the file cannot be read: {error.strerror}."]
        for problem in problems:
            print(f"{name}: refused: {problem}", file=sys.stderr)
        if record is not None and not problems:
            print(f"{name}: accepted: {describe(record)}")
        accepted = accepted and not problems
    return 0 if accepted else 2


def describe(record: GpuProofRecord) -> str:
    """The machine and the verdicts of a record, in one line."""
    counts = [
        f"{sum(check.verdict == verdict for check in record.checks)} {verdict}"
        for verdict in ("holds", "fails", "not measured")
    ]
    nodes = f"{record.nodes} nodes with {record.gpus_per_node}" if record.nodes > 1 else f"{record.gpus_per_node}"
    return f"{nodes} x {record.gpu}, {len(record.cells)} cells; checks: {', '.join(counts)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
