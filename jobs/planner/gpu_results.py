"""Reads the results of `make gpu-proof` (docs/results/DATE-GPU/) as measurements that calibrate predictions.

A folder of results has HOST.json, which describes the machine, and proof.jsonl, which has one record in each line. A record of
the stage that measures speed is used if it contains its cell and either a step time or a peak of memory. The cells of the other
stages are tiny models, which make four steps without a warm-up. No prediction was stored when the cell was measured, so the
formula of the planner is evaluated when the record is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

import jobs
from jobs.planner import calibration, gpu, link, memory, step_time
from jobs.planner.calibration import MeasuredRatio
from jobs.planner.machine import PlannedMachine
from shardlab.errors import WorkspaceError
from shardlab.files import json_file
from shardlab.hardware.host import Host
from shardlab.matrix.cell import Cell
from shardlab.runs.record import read_records

SPEED_STAGE = "D"  # the stage of the proof that measures speed
CHECKOUT_RESULTS = Path(jobs.__file__).resolve().parents[1] / "docs" / "results"  # exists only in a checkout of the repository


class ProofRecord(msgspec.Struct, frozen=True):
    """A line of proof.jsonl: the measurement of one cell. Only the fields that this module uses; docs/gpus.md describes all."""

    stage: str
    verdict: str
    cell: Cell | None = None
    step_ms: float | None = None
    """Median duration of the timed steps."""
    peak_allocated_bytes: int | None = None
    """The largest number of bytes that torch's allocator counted as allocated, on the rank with the highest peak."""


def list_result_folders(workspace: Path) -> list[Path]:
    """The folders with results of `make gpu-proof` in the workspace and in the checkout of shardlab."""
    workspace_folder = workspace.resolve() / "docs" / "results"
    return list(dict.fromkeys((workspace_folder, CHECKOUT_RESULTS)))


def read_proof_ratios(result_folders: Iterable[Path]) -> Iterator[MeasuredRatio]:
    """The ratios of measured to predicted time and memory of all results in these folders. Damaged files are left out."""
    for result_folder in result_folders:
        for proof_path in sorted(result_folder.glob("*/proof.jsonl")):
            machine = _read_machine(proof_path.parent / "HOST.json")
            if machine is not None:
                yield from _read_proof(proof_path, machine)


def _read_machine(host_path: Path) -> PlannedMachine | None:
    """The machine that HOST.json describes; None if the planner does not know the GPU model of the machine."""
    host = json_file.read_json_if_valid(host_path, Host)
    if host is None or not host.gpus or (model := gpu.find_gpu_model(host.gpus[0].name)) is None:
        return None
    return PlannedMachine(True, host.gpus[0].name, model, gpu.find_gpu_memory(model, None), link.make_data_sheet_link(model))


def _read_proof(proof_path: Path, machine: PlannedMachine) -> Iterator[MeasuredRatio]:
    try:
        proof_records = read_records(proof_path, ProofRecord).records
    except WorkspaceError:  # the file cannot be read
        return
    for proof_record in proof_records:
        if proof_record.cell is None or proof_record.stage != SPEED_STAGE or proof_record.verdict == "dropped":
            continue
        predicted_step = step_time.predict_step_time(proof_record.cell, machine)
        predicted_memory = memory.predict_memory(proof_record.cell, on_gpu=True)
        predicted_times = (
            (0.0, 0.0) if predicted_step is None else (predicted_step.step_s.likely, predicted_step.parts_s["compute"].likely)
        )
        peak_bytes = (
            proof_record.peak_allocated_bytes if predicted_memory.is_complete and predicted_memory.tensor_bytes.likely else None
        )
        measured_s = proof_record.step_ms / 1000 if proof_record.step_ms else None
        memory_ratio = peak_bytes / predicted_memory.tensor_bytes.likely if peak_bytes else None
        run_ratio = calibration.measure_ratio(proof_record.cell, machine.gpu_name, predicted_times, measured_s, memory_ratio)
        if run_ratio.time_ratio or run_ratio.memory_ratio:
            yield run_ratio
