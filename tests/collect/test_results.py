"""`shardlab.open`: the same numbers as `collect summarize` and `collect compare`, as data frames, figures and HTML."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import support_collect as support

import shardlab
from collect.metric import Metric, set_workspace_metrics
from collect.reading.load import load_matrix
from collect.summary import summarize
from shardlab.errors import InputError, MissingExtra, UnknownName
from shardlab.matrix.study import Deviation
from shardlab.workspace.workspace import Workspace

SINGLE, DDP = support.cell(), support.cell("ddp", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A workspace with three runs of one cell, one run of another, and a deviation whose reason looks like HTML."""
    made = Workspace(tmp_path_factory.mktemp("results") / "mine")
    support.keep(made, [SINGLE, DDP], repeats=3)
    for repeat in (1, 2, 3):
        support.completed(made, DDP, repeat)
    support.completed(made, SINGLE, 1)
    expansion = made.read_expansion(None)
    expansion.title = "<b>title</b>"
    expansion.deviations = [Deviation("steps", 10, 5, "given by --set")]
    made.store_expansion(expansion)
    return made.path


def test_the_import_of_shardlab_loads_nothing_that_is_heavy():
    code = "import sys, shardlab; assert 'open' in dir(shardlab); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert [
        name for name in modules if name.partition(".")[0] in ("jobs", "collect", "polars", "numpy", "msgspec", "torch")
    ] == []


def test_an_unknown_name_of_the_package_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="module 'shardlab' has no attribute 'nothing'"):
        _ = shardlab.nothing


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    code = "import sys; sys.modules['polars'] = None; import shardlab; shardlab.open('.')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{MissingExtra.__name__}: shardlab.open needs the package 'polars', which is not installed here" in done.stderr


def test_the_frame_of_cells_has_the_numbers_of_the_summary(folder):
    cells = shardlab.open(folder).cells()
    summary = summarize(load_matrix(Workspace(folder), None), "single")
    assert cells["cell"].to_list() == [row.id for row in summary.rows]
    assert cells["throughput_per_s"].to_list() == [row.metrics["throughput_per_s"].value for row in summary.rows]
    assert cells["throughput_per_s_low"].to_list()[0] is None  # one repeat has no interval
    assert cells["mfu_pct"].to_list() == [None, None]


def test_the_frame_of_runs_has_a_row_for_each_repeat(folder):
    results = shardlab.open(str(folder), matrix="quickstart")
    runs = results.runs()
    of_ddp = runs.filter(pl.col("strategy") == "ddp", pl.col("state") == "completed")
    assert of_ddp["repeat"].to_list() == [1, 2, 3]
    means = of_ddp["throughput_per_s"].mean(), results.cells().filter(pl.col("gpus") == 2)["throughput_per_s"].item()
    assert means[0] == pytest.approx(means[1])
    planned = runs.filter(pl.col("strategy") == "single", pl.col("repeat") == 2)
    assert planned.select("state", "throughput_per_s").rows() == [("planned", None)]
    assert results.matrices == ["quickstart"]


def test_a_comparison_has_its_metrics_as_a_frame_and_its_remarks(folder):
    compared = shardlab.open(folder).compare(folder, str(folder))
    rates = compared.metrics().filter(pl.col("metric") == "throughput_per_s")
    assert rates["ratio"].to_list() == [1.0, 1.0]
    assert compared.comparison.pairs[1].remarks[0] == "the same runs in both"
    assert "the same runs in both" in compared._repr_html_()


def test_a_figure_is_one_of_plotly_with_its_caption(folder):
    figure = shardlab.open(folder).figure("throughput-per-s")
    assert type(figure).__name__ == "Figure"
    assert {trace.meta for trace in figure.data if isinstance(trace.meta, str)} == {SINGLE.name(), DDP.name()}
    assert "var(--" not in figure.to_json()
    assert isinstance(figure.layout.meta, str)
    with pytest.raises(UnknownName, match=r"unknown figure 'nothing'.*throughput-per-s"):
        shardlab.open(folder).figure("nothing")


def test_a_notebook_shows_what_a_terminal_shows_with_texts_escaped(folder):
    shown = shardlab.open(folder)._repr_html_()
    assert "&lt;b&gt;title&lt;/b&gt;" in shown
    assert "<b>title" not in shown
    assert "changed matrix: 1 changes by --adapt, to fit the cluster, or by --set" in shown
    assert "is half the 95 % interval" in shown
    assert shown.startswith("<pre")


def test_metrics_of_another_workspace_do_not_appear(folder):
    results = shardlab.open(folder)
    results.cells()
    set_workspace_metrics([Metric(name="strange", unit="s", direction="neither", definition="", of_run=lambda run: None)])
    assert "strange" not in results.cells().columns


def test_a_folder_that_does_not_exist_or_has_no_runs_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nothing: no such folder\. Allowed: the folder of a workspace\."):
        shardlab.open(Path("nothing"))
    with pytest.raises(InputError, match="no matrix was submitted here"):
        shardlab.open(tmp_path).cells()
