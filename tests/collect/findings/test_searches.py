"""Searches for the largest batch size in the summary, in the report and in the exported files."""

import msgspec
import pytest
from support_collect import cell, completed, failed, keep, run_file

from collect.findings.searches import list_search_results
from collect.reading.load import load_matrix
from collect.report import text_tables
from collect.summary import summarize
from collect.write_report import write_report
from shardlab.files import files
from shardlab.matrix.batch_search import BatchSearch, try_cell
from shardlab.matrix.expansion import ExpandedCell
from shardlab.workspace.workspace import Workspace

LIMITS = {"ddp": 5, "fsdp2": 9}


def asked(largest=8):
    return BatchSearch("gpu_batch_size", "largest_that_fits", 1, 1, largest)


def searched(workspace, repeats=1, search=None, only=None):
    """Write a matrix of two searches for a batch size, and the runs of their tries. only: the batch sizes that were tried."""
    search = search or asked()
    first = [try_cell(cell(strategy, 2, steps=2), 1) for strategy in LIMITS]
    keep(workspace, first, repeats)
    expansion = workspace.read_expansion("quickstart")
    expansion.cells = [ExpandedCell(entry.id, entry.cell, entry.runs, search) for entry in expansion.cells]
    workspace.store_expansion(expansion)
    for one in first:
        for size in only or (1, 2, 4, 8, 6, 5):
            for repeat in range(1, repeats + 1):
                what, fits = try_cell(one, size), size <= LIMITS[one.strategy]
                if fits or size in (8, 6):
                    folder = completed(workspace, what, repeat) if fits else failed(workspace, what, repeat, "CUDA")
                    files.write_json(folder.run_json, msgspec.structs.replace(run_file(what, repeat), search=search))


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path)


def column(summary, name):
    (found,) = [column for column in summary.table.main.columns if column.name == name]
    return {(row.cell["strategy"], row.cell["micro_batch_size"]): str(found.text(row)) for row in summary.rows}


def test_each_try_of_a_search_is_a_row_and_one_row_has_the_largest_batch(workspace):
    """Each tried size has a row. The row of the largest size that fits has the metric largest_batch."""
    searched(workspace, repeats=2)
    summary = summarize(load_matrix(workspace, None), "single")
    found = column(summary, "largest_batch")
    # fsdp2 has no largest batch: even the largest size that the search may try fits.
    assert {key: value for key, value in found.items() if value} == {("ddp", 5): "5"}
    assert [size for strategy, size in found if strategy == "ddp"] == [1, 2, 4, 5, 6, 8]
    (row,) = [row for row in summary.rows if "largest_batch" in row.metrics]
    assert (row.metrics["largest_batch"].value, row.metrics["largest_batch"].n) == (5, 2)


def test_the_report_lists_the_tries_of_a_search_in_order(workspace):
    searched(workspace)
    loaded = load_matrix(workspace, None)
    ddp, fsdp2 = list_search_results(loaded.searches)
    ends = "1 completed → 2 completed → 4 completed → 8 oom → 6 oom → 5 completed"
    (texts,) = text_tables.make_searches_table([ddp]).texts
    assert texts == ["ddp ×2", "gpu_batch_size, the largest that fits", "1", "the largest that fits is 5", ends]
    assert ddp.best == 5
    assert fsdp2.says == "the largest that fits is 8, and larger sizes were not tried"
    assert set(ddp.cells) <= {one.id for one in loaded.cells}


def test_an_unfinished_search_has_no_result(workspace):
    searched(workspace, only=(1, 2, 4, 8))
    summary = summarize(load_matrix(workspace, None), "single")
    ddp = summary.searches[0]
    assert (ddp.best, ddp.says, ddp.path) == (None, "has not ended", "1 completed → 2 completed → 4 completed → 8 oom")
    assert not any("largest_batch" in row.metrics for row in summary.rows)


def test_a_search_without_tries_is_a_cell_without_runs(workspace):
    searched(workspace, only=(99,))
    summary = summarize(load_matrix(workspace, None), "single")
    assert (summary.searches, len(summary.rows)) == ([], 2)


def test_the_page_and_the_tables_show_the_result_of_a_search(workspace):
    searched(workspace)
    loaded = load_matrix(workspace, None)
    summary = summarize(loaded, "single")
    write_report(workspace.report, workspace, loaded, summary)
    page = (workspace.report / "index.html").read_text()
    section = page[page.index('<section id="searches">') :].partition("</section>")[0]
    assert "the largest that fits is 5" in section
    assert section.count('href="#runs-') == 6 + 4
    (table,) = [table for table in text_tables.make_text_tables(summary) if table.name == "searches"]
    assert len(table.rows) == 2


@pytest.mark.parametrize("size", [0, -1, 2**40])
def test_a_search_with_impossible_sizes_is_refused(size):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"key": "gpu_batch_size", "goal": "fastest", "start": size, "smallest": 1, "largest": 8}, BatchSearch)
