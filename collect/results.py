"""`shardlab.open`: the results of a matrix in Python, as data frames and figures."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import plotly.graph_objects
import polars as pl

from collect import flat_tables
from collect.comparison import command
from collect.comparison.compare import Comparison
from collect.figures import memory_parts
from collect.reading import own_metrics
from collect.reading.load import LoadedMatrix, load_matrix
from collect.reading.own_metrics import OwnMetrics
from collect.report import page, palette, terminal
from collect.summary import Summary, summarize
from shardlab.errors import InputError, UnknownName
from shardlab.terminal.recorded_output import RecordedOutput
from shardlab.workspace.workspace import Workspace


def open_results(workspace: str | Path = ".", matrix: str | None = None) -> MatrixResults:
    """Open the results of a workspace. Records are read when they are first needed, and only then; open the workspace again to
    see newer records. Raises shardlab.errors.InputError if the workspace is not a folder.

    workspace: the folder with runs/. matrix: the name of a matrix of the workspace; None: the last matrix.
    """
    if not Path(workspace).is_dir():
        raise InputError(f"{workspace}: no such folder. Allowed: the folder of a workspace.")
    return MatrixResults(Workspace.find(str(workspace)), matrix)


class MatrixResults:
    """The results of a matrix of a workspace. A notebook shows them as a terminal shows the output of `collect summarize`."""

    def __init__(self, workspace: Workspace, matrix: str | None) -> None:
        self._workspace = workspace
        self._matrix = matrix

    @property
    def matrices(self) -> list[str]:
        """The names of the matrices of the workspace."""
        return self._workspace.list_matrix_names()

    def cells(self) -> pl.DataFrame:
        """A data frame (polars) with one row per cell: its keys and states, and each metric with its interval, unit and kind. A
        metric without a value is null."""
        return flat_tables.clean_table_texts(flat_tables.make_summary_frame(self._summarize()))

    def runs(self) -> pl.DataFrame:
        """A data frame (polars) with one row per repeat, which is its latest attempt: cell, keys, state, and the value of each
        metric in the unit that `cells` names. A metric without a value is null."""
        return flat_tables.clean_table_texts(flat_tables.make_runs_frame(self._summarize()))

    def compare(self, a: str | Path, b: str | Path, matrix: str | None = None) -> ComparedResults:
        """Compare two sets of results, as `collect compare A B`. Raises shardlab.errors.InputError.

        a, b: each a matrix of this workspace, the folder of another workspace, or an archive. matrix: which matrix of the other
        workspaces; None: their last matrix.
        """
        return ComparedResults(command.compare_by_name(self._workspace, str(a), str(b), matrix))

    def figure(self, name: str) -> Any:
        """A figure of the report as a plotly.graph_objects.Figure. Its caption is `layout.meta`.

        name: the name of the figure, as `collect summarize --images` names its file. Raises UnknownName, which lists the
        figures that have data.
        """
        figure_by_name = {figure.name: figure for figure in page.draw_figures(self._loaded, self._summarize())}
        if name not in figure_by_name:
            raise UnknownName("figure", name, figure_by_name)
        figure_spec = palette.resolve_colours(figure_by_name[name].spec, palette.LIGHT)
        layout = figure_spec["layout"] | figure_spec["picture"] | {"meta": figure_by_name[name].caption}
        return plotly.graph_objects.Figure({"data": figure_spec["data"], "layout": layout})

    def _repr_html_(self) -> str:
        output = RecordedOutput()
        terminal.print_summary(output, self._summarize(), memory_parts.map_tensor_memory(self._loaded.cells))
        return output.html

    @cached_property
    def _loaded(self) -> LoadedMatrix:
        return load_matrix(self._workspace, self._matrix)

    @cached_property
    def _own_metrics(self) -> OwnMetrics:
        return own_metrics.compute_own_metrics(self._workspace, self._loaded.expansion.name)

    @cached_property
    def _summary(self) -> Summary:
        self._own_metrics.add_to_runs(self._loaded)
        summary = summarize(self._loaded, self._loaded.expansion.baseline)
        summary.remarks.extend(self._own_metrics.list_remarks())
        return summary

    def _summarize(self) -> Summary:
        """The summary. The list of all metrics gets those of this workspace, because another one may have been opened since."""
        self._own_metrics.add_to_menu()
        return self._summary


class ComparedResults:
    """Two compared sets of results. A notebook shows them as a terminal shows the output of `collect compare`."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        """The document of `collect compare --json`, as a typed value."""

    def metrics(self) -> pl.DataFrame:
        """A data frame (polars) with one row per cell and metric: the means, their ratio b / a and its 95 % interval."""
        rows = [
            {"cell": pair.label, **{field_name: getattr(metric, field_name) for field_name in metric.__struct_fields__}}
            for pair in self.comparison.pairs
            for metric in pair.metrics
        ]
        return flat_tables.clean_table_texts(pl.DataFrame(rows, infer_schema_length=None))

    def _repr_html_(self) -> str:
        output = RecordedOutput()
        command.print_comparison(output, self.comparison)
        return output.html
