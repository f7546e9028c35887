"""The table of docs/papers.md about what of the five studies is drawn, measured and decided (tools/record_studies.py)."""

import json
from pathlib import Path

import record_studies

from shardlab.matrix import matrix


def test_the_table_is_that_of_the_matrices_and_of_the_recorded_rehearsals():
    """If this test fails: make golden, then read the diff."""
    written = record_studies.PAGE.read_text().partition(record_studies.BEGIN)[2].partition(record_studies.END)[0].strip()
    assert written == record_studies.write_table(json.loads(record_studies.RECORD.read_text()))


def test_figures_that_the_table_names_are_figures_of_the_report():
    sources = "".join(path.read_text() for path in Path("collect/figures").glob("*.py"))
    named = {figure for entries in record_studies.FIGURES.values() for _, _, figure in entries if " " not in figure}
    assert {figure for figure in named if f'"{figure}"' not in sources} == set()


def test_a_number_without_its_instrument_or_cell_is_not_measurable(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(
        "schema: 1\nname: m\ndefaults: {workload: gpt2-tiny, global_batch_size: 8, seq_len: 16, steps: 3}\n"
        "axes: {strategy: [single, ddp]}\n"
        "include: [{when: \"strategy == 'ddp'\", instruments: {memory: categories}}]\n"
    )
    cells = record_studies.resolve_cells(matrix.load_matrix(path))
    expected = {("ddp", "memory_gradient_bytes"): True, ("single", "memory_gradient_bytes"): False, ("tp", "final_loss"): False}
    assert {
        (strategy, metric): record_studies.is_measured(cells, metric, {"strategy": strategy}) for strategy, metric in expected
    } == expected
