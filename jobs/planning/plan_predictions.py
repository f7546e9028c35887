"""Predicts memory and time of the cells of a plan, corrected by the measurements of runs that completed in the workspace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jobs.planner import calibration, gpu_results, predict
from jobs.planner import machine as planned_machine
from jobs.planner.calibration import Calibration, MeasuredRatio
from jobs.planning import gpu_hours
from shardlab.cluster.cluster import Cluster
from shardlab.errors import ShardlabError
from shardlab.matrix.cell import AnyCell, select_trainings
from shardlab.runs import prediction
from shardlab.runs.prediction import Prediction
from shardlab.runs.rehearsed import RehearsalAnswer
from shardlab.runs.rundir import RunDir
from shardlab.workspace import inventory, measured_power
from shardlab.workspace.workspace import Workspace

UNKNOWN_WORK = "shardlab does not know what a command does, so it predicts nothing about it."


def predict_cells(
    workspace: Workspace,
    cluster: Cluster,
    cells: Sequence[AnyCell],
    recorded_s_by_cell: Mapping[str, float],
    answer_by_cell: Mapping[str, RehearsalAnswer] | None = None,
) -> dict[str, Prediction]:
    """The prediction of a run of each cell, by the name of the cell. Of a cell that shardlab does not train, nothing is known.

    recorded_s_by_cell: the mean duration of earlier runs in seconds, by the name of the cell. answer_by_cell: the results of
    rehearsals of the planner, by the name of the cell.
    """
    all_reduces = inventory.read_all_reduces(workspace, cluster.name)
    machine_by_type = {
        gpu_type: planned_machine.plan_machine(cluster, gpu_type, all_reduces) for gpu_type in {cell.gpu_type for cell in cells}
    }
    node_bytes_by_type = {
        gpu_type: inventory.read_node_bytes(workspace, cluster.select_gpu_type(gpu_type)) for gpu_type in machine_by_type
    }
    run_calibration = (
        load_calibration(workspace)
        if any(machine.on_gpu for machine in machine_by_type.values())
        else calibration.NO_CALIBRATION
    )
    return {cell.name(): Prediction(how=UNKNOWN_WORK) for cell in cells} | {
        cell.name(): predict.predict_run(
            cell,
            machine_by_type[cell.gpu_type],
            calibration=run_calibration,
            occupied_gpus=gpu_hours.count_occupied_gpus(cell, cluster),
            recorded_s=recorded_s_by_cell.get(cell.name()),
            rehearsal=(answer_by_cell or {}).get(cell.name()),
            node_bytes=node_bytes_by_type[cell.gpu_type],
        )
        for cell in select_trainings(cells)
    }


def load_calibration(workspace: Workspace) -> Calibration:
    """The calibration of predictions by completed runs of the workspace, and, for cells without such runs, by the results of
    `make gpu-proof`."""
    proof_ratios = gpu_results.read_proof_ratios(gpu_results.list_result_folders(workspace.path))
    proof_calibration = calibration.build_calibration(proof_ratios, calibration.RESULTS_NOUN)
    return calibration.build_calibration(read_run_ratios(workspace), fallback=proof_calibration)


def read_run_ratios(workspace: Workspace) -> Iterator[MeasuredRatio]:
    """The ratios of measured to predicted time and memory, and the power of a GPU, for each completed run of the workspace that
    trained on a GPU and had a prediction."""
    power_w_by_run = measured_power.read_all_powers(workspace)
    for run_dir in workspace.list_run_dirs():
        try:
            if (run_ratio := _measure_ratio(run_dir, power_w_by_run.get(run_dir.run_id))) is not None:
                yield run_ratio
        except ShardlabError:
            continue  # `collect` reports a damaged run; predictions are made without the run


def _measure_ratio(run_dir: RunDir, power_w: float | None) -> MeasuredRatio | None:
    """The ratios of measured to predicted values of one run; None if the run did not complete, is a rehearsal, had a fault
    on purpose, or has no prediction for a GPU that was made before its submission."""
    earlier_prediction = prediction.read_prediction(run_dir.path)
    if earlier_prediction is None or earlier_prediction.gpu is None or (result := run_dir.read_result()) is None:
        return None
    if result.state != "completed" or run_dir.is_rehearsal():
        return None
    cell = run_dir.read_run().training_cell
    if cell.instruments.straggler is not None or cell.instruments.lost_worker is not None:
        return None
    step_s = result.step_time_ms.median / 1000 if result.step_time_ms is not None else None
    peak_bytes = (result.peak_memory_bytes or {}).get("allocated")
    return calibration.measure_ratio(
        cell,
        earlier_prediction.gpu,
        (earlier_prediction.formula_step_s or 0.0, earlier_prediction.step_parts_s.get("compute", 0.0)),
        step_s,
        peak_bytes / earlier_prediction.formula_tensor_bytes
        if peak_bytes and earlier_prediction.formula_tensor_bytes
        else None,
        power_w,
    )
