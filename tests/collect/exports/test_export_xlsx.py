"""The Excel workbook of `collect export --to xlsx`, read back: numbers, units, blanks, and texts that are no formulas."""

import re
import sys
import zipfile

import openpyxl
import pytest
import support_collect as support

from collect import summary
from collect.cli import main
from collect.exports import xlsx
from collect.reading import load
from shardlab import extras
from shardlab.workspace.workspace import Workspace

FORMULAS = ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", " =1"]
STUDY = {
    "claims": [
        {"id": f"c{place}", "says": text, "where": "table 1", "test": "throughput_per_s(strategy='ddp') > 0"}
        for place, text in enumerate(FORMULAS)
    ],
    "reported": [
        {"where": "table 1", "cell": {"strategy": "single"}, "metric": "step_time_ms", "printed": "102 ms"},
        {"where": "table 1", "cell": {"strategy": "zero3"}, "metric": "step_time_ms", "printed": "soon"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(summary, folder of the export) of a matrix in which a cell never ran."""
    workspace = Workspace(tmp_path_factory.mktemp("xlsx"))
    cells = [support.cell(), support.cell("ddp", 2), support.cell("zero3", 2)]
    support.keep(workspace, cells, title="=1+1", **STUDY)
    for what in cells[:2]:
        for repeat in (1, 2, 3):
            support.completed(workspace, what, repeat)
    support.failed(workspace, cells[2], 1, "=cmd|' /C calc'!A1")
    assert main(["export", "--to", "xlsx", "--workspace", str(workspace.path)]) == 0
    return summary.summarize(load.load_matrix(workspace, None), "single"), workspace.path / "export" / "xlsx"


@pytest.fixture(scope="module")
def workbook(written):
    return openpyxl.load_workbook(written[1] / "tables.xlsx")


def near(value):
    """A number as a workbook keeps it, which is with 16 digits."""
    return pytest.approx(value, rel=1e-14)


def rows(sheet):
    head, *others = sheet.iter_rows(values_only=True)
    return [dict(zip(head, row, strict=True)) for row in others]


def test_each_table_has_a_sheet_with_frozen_headings_and_filters(workbook):
    assert workbook.sheetnames == ["about", "summary", "runs", "verdicts", "reported"]
    for sheet in workbook:
        assert sheet.freeze_panes == "B2"
        assert sheet.auto_filter.ref == sheet.dimensions
        assert all(cell.font.bold for cell in sheet[1])
        assert len({cell.value for cell in sheet[1]}) == sheet.max_column, "no heading is there twice"


def test_numbers_are_numbers_with_their_unit_in_the_heading_and_an_unknown_is_blank(written, workbook):
    summarized, _ = written
    found = rows(workbook["summary"])
    for row, fields in zip(summarized.rows, found, strict=True):
        estimate = row.metrics.get("step_time_ms")
        assert fields["id"] == row.id
        assert fields["gpus"] == row.cell["gpus"]
        assert fields["step_time_ms (ms)"] == (near(estimate.value) if estimate else None)
        assert fields["step_time_ms (ms), low"] == (near(estimate.low) if estimate else None)
        assert fields["rehearsal"] is True
    assert [fields["state"] for fields in found] == ["completed", "completed", summarized.rows[2].state]
    assert found[2]["throughput_per_s (tokens/s)"] is None
    assert found[0]["peak_memory_bytes (bytes)"] > 0
    assert found[0]["epochs"] is None


def test_every_run_has_a_row(written, workbook):
    found = {fields["run"]: fields for fields in rows(workbook["runs"])}
    runs = {run.run_id: run for row in written[0].rows for run in row.runs}
    assert found.keys() == runs.keys()
    for name, run in runs.items():
        assert found[name]["step_time_ms (ms)"] == (near(run.metrics["step_time_ms"]) if run.metrics else None)


def test_printed_and_measured_numbers_are_beside_each_other(written, workbook):
    first, second = rows(workbook["reported"])
    entry = written[0].reported[0]
    assert (first["printed"], first["reported"], first["unit of reported"]) == ("102 ms", 102, entry.reported.unit)
    assert (first["measured"], first["unit of measured"], first["n"]) == (near(entry.measured), "ms", 3)
    assert second["printed"] == "soon"
    assert second["reported"] is second["measured"] is second["measured / reported"] is None


def test_a_text_is_never_a_formula(workbook, written):
    assert [fields["what the study says"].strip() for fields in rows(workbook["verdicts"])] == [
        text.strip() for text in FORMULAS
    ]
    assert "=cmd|' /C calc'!A1" in {fields["why"] for fields in rows(workbook["runs"])}
    texts = [cell for sheet in workbook for row in sheet.iter_rows() for cell in row if isinstance(cell.value, str)]
    assert {cell.data_type for cell in texts} == {"s"}
    assert all(cell.quotePrefix for cell in texts)
    with zipfile.ZipFile(written[1] / "tables.xlsx") as packed:
        for name in packed.namelist():
            assert re.search(rb"<f[ >]", packed.read(name)) is None, name


def test_a_missing_or_infinite_number_is_an_empty_field():
    assert [xlsx._make_cell(None, value) for value in (None, "", float("nan"), float("inf"))] == [None] * 4
    assert [xlsx._make_cell(None, value) for value in (0, 0.0, False)] == [0, 0.0, False]


def test_without_openpyxl_a_sentence_says_what_to_install_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    workspace = support.matrix(tmp_path)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert main(["export", "--to", "xlsx", "--workspace", str(workspace.path)]) == 1
    said = capsys.readouterr().err
    assert "collect export --to xlsx needs the package 'openpyxl', which is not installed here" in said
    assert extras.make_install_command("xlsx") in said
    assert not (workspace.path / "export").exists()
