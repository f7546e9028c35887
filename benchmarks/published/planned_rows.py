"""Plans published configurations as `jobs plan` does, each on the machine that its source names."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from published_rows import PublishedMachine, PublishedRow, read_configurations, read_machines

from jobs.planner import calibration, machine, predict
from jobs.planner.machine import PlannedMachine
from jobs.planning import plan, plan_predictions, resolve
from shardlab.cluster.cluster import load_cluster
from shardlab.cluster.cluster_keys import Network
from shardlab.errors import ShardlabError
from shardlab.matrix import matrix
from shardlab.matrix.cell import Cell
from shardlab.runs.prediction import Prediction
from shardlab.workspace.workspace import Workspace

GIB = 1 << 30


class PlannedRow(msgspec.Struct, frozen=True):
    """A published row and the prediction for it."""

    row: PublishedRow
    cell: Cell
    machine: PlannedMachine
    predicted: Prediction

    @property
    def time_ratio(self) -> float | None:
        """Predicted divided by measured time of a step; None if one of them is not known."""
        measured, predicted = self.row.measured_step_s, self.predicted.step_s
        return None if measured is None or predicted is None else predicted.likely / measured

    @property
    def time_inside(self) -> bool:
        """Whether the measured time is in the predicted range; 0.1 % outside still counts, as in `collect summarize`."""
        measured, predicted = self.row.measured_step_s, self.predicted.step_s
        assert measured is not None
        assert predicted is not None
        return predicted.low * 0.999 <= measured <= predicted.high * 1.001

    @property
    def memory_ratio(self) -> float | None:
        """Predicted divided by measured memory; None if one of them is not known or they are not comparable."""
        if self.row.memory_gib is None or not self.row.memory_comparable or self.predicted.tensor_bytes is None:
            return None
        wasted = self.predicted.memory_by_category.get("fragmentation")
        reserved = wasted.likely if wasted is not None and self.row.table.memory_is == "reserved" else 0.0
        return (self.predicted.tensor_bytes.likely + reserved) / GIB / self.row.memory_gib


def plan_rows(
    rows: Sequence[PublishedRow], *, one_card: bool = False, calibrated: bool = True
) -> tuple[list[PlannedRow], dict[str, str]]:
    """Plan rows, in a workspace of its own.

    one_card: whether every node has one network card, as if `cards_per_node` did not exist. calibrated: whether docs/results
    corrects the predictions. Returns (the planned rows, why `jobs plan` refuses the others by their names).
    """
    by_machine: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        by_machine[row.machine].append(row)
    planned: list[PlannedRow] = []
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="shardlab-published-") as folder:
        workspace = Workspace(Path(folder))
        _write_models(workspace.path)
        earlier = plan_predictions.load_calibration(workspace) if calibrated else calibration.NO_CALIBRATION
        for name, machine_rows in by_machine.items():
            cluster_file = _write_cluster(workspace.path, name, read_machines()[name], one_card=one_card)
            planned_machine = machine.plan_machine(load_cluster(cluster_file), None)
            planned += [
                PlannedRow(row, cell, planned_machine, predict.predict_run(cell, planned_machine, calibration=earlier))
                for row, cell in _resolve(workspace, cluster_file, machine_rows, refused)
            ]
    order = {row.name: number for number, row in enumerate(rows)}
    return sorted(planned, key=lambda item: order[item.row.name]), refused


def _write_models(folder: Path) -> None:
    for name, configuration in read_configurations().items():
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(configuration))


def _write_cluster(folder: Path, name: str, published: PublishedMachine, *, one_card: bool) -> Path:
    network = {"between_nodes": published.between_nodes, "link": published.link, "cards_per_node": published.cards_per_node}
    if one_card or "cards_per_node" not in Network.__struct_fields__:
        del network["cards_per_node"]
    gpus = {"type": published.gpu, "per_node": published.per_node, "memory_gib": published.memory_gib}
    content = {
        "schema": 1,
        "name": "published",
        "provider": "slurm",
        "storage": {"shared": "/scratch/me"},
        "gpus": {key: value for key, value in gpus.items() if value is not None},
        "network": {key: value for key, value in network.items() if value is not None},
        "slurm": {},
    }
    path = folder / f"cluster-{name}.yaml"
    path.write_bytes(msgspec.yaml.encode(content))
    return path


def _resolve(
    workspace: Workspace, cluster_file: Path, rows: list[PublishedRow], refused: dict[str, str]
) -> list[tuple[PublishedRow, Cell]]:
    """The cells of rows. A refusal names the entry of its row, which is then left out."""
    while rows:
        path = cluster_file.with_name("matrix.yaml")
        entries = [_write_cell(row, number) for number, row in enumerate(rows)]
        path.write_bytes(msgspec.json.encode({"schema": 1, "name": "published", "include": entries}))
        try:
            requested = matrix.load_matrix(path)
            capacity = plan.find_cluster_capacity(load_cluster(cluster_file))
            plugins = plan.find_own_plugins(workspace, requested)
            try:
                cells = resolve.resolve_cells(requested, capacity=capacity, plugins=plugins)
            finally:
                plugins.close()
            return [(rows[cell.seed], cell) for cell in cells]
        except ShardlabError as error:
            lines = {int(found[1]): line for line in str(error).splitlines() if (found := re.search(r"include\[(\d+)\]", line))}
            if not lines:
                raise
            refused |= {rows[number].name: line.partition("include")[2] for number, line in lines.items()}
            rows = [row for number, row in enumerate(rows) if number not in lines]
    return []


def _write_cell(row: PublishedRow, seed: int) -> dict[str, Any]:
    """The entry of a matrix for a row. seed: the number by which the cell is found again."""
    workload: Any = row.model.workload
    if row.model.configuration is not None:
        workload = {"transformers": f"{row.model.configuration}.json", "seq_len": row.cell["seq_len"]}
    options = {**row.model.options, **row.options}
    return {**row.cell, "workload": workload, **({"options": options} if options else {}), "seed": seed, "steps": 10}
