"""What a matrix file leads to, as text: its plan, the record of a run, the stored expansion, and the page of its report.

Each function of EFFECTS takes (the path of a matrix file, a workspace). Nothing is trained: `measure` writes records of runs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import support_collect as support

from collect import summary
from collect.reading import load
from collect.report import page, terminal
from jobs.planning import datasets, plan
from jobs.rendering import render
from jobs.verbs import views
from shardlab.cluster import cluster
from shardlab.files import files
from shardlab.hardware.host import Host, Nic
from shardlab.hardware.nvml import Gpu
from shardlab.matrix.cell import Cell
from shardlab.runs.record import SameWork
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

LINKED = "ddp"  # the GPUs of the runs of this strategy have NVLink; the GPUs of all other runs have none


class KeptOutput(Output):
    """The output of a command, kept as text: lines, remarks, titles and rows of tables, and the JSON document."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def print_line(self, text: str, style: str | None = None) -> None:
        self.kept.append(text)

    print_remark = print_line

    def print_table(self, title: str, columns, rows, styles=()) -> None:  # type: ignore[no-untyped-def]
        self.kept += [title, *map(" ".join, rows)]

    def print_document(self, value: object) -> None:
        self.kept.append(msgspec.json.encode(value).decode())


def _planned(path: Path, workspace: Workspace) -> plan.MatrixPlan:
    return plan.plan_matrix(workspace, str(path), cluster.THIS_MACHINE, where=None, repeats=None)


def planned(path: Path, workspace: Workspace) -> str:
    """What `jobs plan` prints, without and with --json."""
    made, out = _planned(path, workspace), KeptOutput()
    views.print_plan(out, made, workspace, datasets.find_missing_data(made.cells, made.context, workspace))
    return "\n".join(out.kept)


def record(path: Path, workspace: Workspace) -> str:
    """The record of the first run, without the time at which it was made."""
    made = _planned(path, workspace)
    run = render.make_run(made.cells[0], 1, 1, made.context)
    return msgspec.json.encode(msgspec.structs.replace(run, created="")).decode()


def expansion(path: Path, workspace: Workspace) -> str:
    """The expansion that a workspace keeps, from which `collect` reads everything about the study."""
    made = _planned(path, workspace)
    render.store_expansion(workspace, made.context, made.matrix, made.all_cells, made.repeats_by_cell)
    return msgspec.json.encode(msgspec.structs.replace(workspace.read_expansion(made.context.matrix), path="")).decode()


def report(path: Path, workspace: Workspace) -> str:
    """The page of the report without its figures, and the output of `collect verdicts`; `measure` wrote the runs before."""
    made = _planned(path, workspace)
    render.store_expansion(workspace, made.context, made.matrix, made.all_cells, made.repeats_by_cell)
    loaded = load.load_matrix(workspace, made.context.matrix)
    shown = summary.summarize(loaded, loaded.expansion.baseline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "draw_figures", lambda *_: [])
        patch.setattr(page, "read_plotly_script", str)
        drawn = page.draw_page(loaded, msgspec.structs.replace(shown, created_s=0.0), workspace.report, workspace.runs)
    out = KeptOutput()
    terminal.print_verdicts(out, shown)
    return "\n".join([drawn.partition("<body")[2], *out.kept])


def measure(path: Path, workspace: Workspace) -> None:
    """Write completed runs on two nodes for each cell of a matrix, as if they had trained on GPUs."""
    for cell in _planned(path, workspace).cells:
        _complete(workspace, cell)


def _complete(workspace: Workspace, cell: Cell) -> None:
    gpus = [Gpu(uuid="GPU-0", name="NVIDIA A100", memory_bytes=80 << 30, nvlinks={"0": 12} if cell.strategy == LINKED else {})]
    found = {"train_time_s": 58.0, "same_work": SameWork(verdict="proven", why="")}
    folder = support.completed(workspace, cell, rehearsal=False, gpus=gpus, found=found)
    first = msgspec.json.decode(folder.environment_file(support.HOST).read_bytes(), type=Host)
    second = msgspec.structs.replace(first, host="node1", nics=[Nic("eth1", "physical", speed_mbps=10_000)])
    files.write_json(folder.environment_file("node1"), second, sync=False)


EFFECTS = {made.__name__: made for made in (planned, record, expansion, report)}
