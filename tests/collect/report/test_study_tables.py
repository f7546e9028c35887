"""The numbers that a study printed, shown in tables like the tables of the study."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from collect.report.study_tables import make_metric_heading, redraw_tables
from collect.report.verdict_text import ReportedLine
from collect.verdicts.reported import ReportedResult

MATRICES = Path(__file__).parents[3] / "matrices"


def entry(where, metric, printed, of="", own="", notes=(), **cell):
    """A number that a study printed and that was not measured. own: a remark about it alone."""
    result = ReportedResult(where=where, metric=metric, cell=cell, printed=printed, kind="measured", of=of, notes=[*notes])
    return ReportedLine(result, "the cell", printed, "", "", "", "", own, own)


def study(name):
    stated = yaml.safe_load((MATRICES / f"{name}.yaml").read_text())["reported"]
    return [entry(one["where"], one["metric"], one["printed"], one.get("of") or "", **one["cell"]) for one in stated]


def drawn(entries, where):
    """One table as text: (keys, headings, rows). A field contains the number that the study printed. where: names the table."""
    (table,) = [table for table, _ in redraw_tables(entries) if table.title == where.capitalize()]
    keys = [column.heading for column in table.columns if not column.is_number]
    heads = [column.heading_with_unit for column in table.columns if column.is_number]
    return keys, heads, [[*row.names, *(line.printed if line else "" for line in row.lines)] for row in table.rows]


def test_a_metric_over_a_grid_is_a_table_with_the_columns_of_the_study():
    """Table 3 of study 3 has one column for each number of ranks, as in the paper."""
    keys, heads, rows = drawn(study("paper3"), "table 3")
    assert (keys, heads) == (["Strategy", "Workload"], ["1 (ranks)", "2 (ranks)", "4 (ranks)"])
    assert rows[0] == ["ddp", "vgg16", "487.55", "230.74", "113.81"]
    assert rows[-1] == ["fsdp1-full-shard", "convnext-large", "5891.63", "2786.49", "1490.43"]
    assert len(rows) == 6


def test_a_grid_with_a_gap_is_not_crossed():
    """If a combination of strategy and ranks has no number, the table has one row per number, without columns of ranks."""
    entries = [entry("table 1", "x_s", str(n), strategy=name, gpus=n) for name, n in (("a", 1), ("a", 2), ("b", 1))]
    assert drawn(entries, "table 1") == (["Strategy", "Ranks"], ["X (s)"], [["a", "1", "1"], ["a", "2", "2"], ["b", "1", "1"]])


def test_metrics_are_columns_and_the_extra_value_of_a_place_is_a_column():
    """Table 4.1.2 of study 2 has one column for each metric, as in the paper."""
    keys, heads, rows = drawn(study("paper2"), "table 4.1.2")
    assert (keys, heads) == (["Strategy", "Ranks"], ["Train time (s)", "Speed up", "Effective throughput (per s)"])
    assert rows[1] == ["ddp", "2", "58.3s", "1.93x", "62,870 tokens/sec"]


def test_numbers_of_short_and_long_runs_are_in_one_row():
    keys, heads, rows = drawn(study("paper2"), "table 4.2.5")
    assert (keys, heads) == (
        ["Strategy", "Ranks"],
        ["Peak memory (bytes)", "Memory efficiency (%)", "Overlap (%)", "Non compute (ms)"],
    )
    assert rows[0] == ["single", "1", "~12GB", "", "", "0ms"]
    assert rows[2] == ["fsdp1-full-shard", "2", "~4GB", "300%", "95.14%", "95ms"]
    same = [entry("table 1", "x_s", printed, strategy="ddp", steps=n) for n, printed in ((1, "a"), (2, "b"), (3, "c"))]
    assert drawn(same, "table 1") == (["Steps"], ["X (s)"], [["1", "a"], ["2", "b"], ["3", "c"]])


def test_a_table_of_one_cell_has_one_row_per_metric_or_operator():
    """Several metrics of one cell are listed one below the other. In a table of operators, each operator is a row."""
    entries = study("paper2")
    assert drawn(entries, "section 4.2.1")[2][0] == ["Memory parameter, bytes", "474.70 MB"]
    keys, heads, rows = drawn(entries, "table 4.5.1")
    assert (keys, heads) == (["Of"], ["Operator (ms)", "Operator count"])
    assert rows[2] == ["CatArrayBatchedCopy", "75", "1"]


def test_two_numbers_for_the_same_field_get_two_rows():
    """If a study has two numbers for the same field, each of them gets a row."""
    entries = [entry("table 1", "x_s", printed, strategy=name) for name, printed in (("a", "1"), ("a", "2"), ("b", "3"))]
    assert drawn(entries, "table 1") == (["Strategy"], ["X (s)"], [["a", "1"], ["a", "2"], ["b", "3"]])


def test_places_with_few_numbers_are_listed_and_tables_are_sorted_by_number():
    entries = study("paper2")
    tables = [table for table, _ in redraw_tables(entries)]
    first = ["Table 2.4", "Table 4.1.1", "Table 4.1.2", "Table 4.2.5", "Table 4.3.1"]
    assert [table.title for table in tables][:5] == first
    assert tables[-1].title == "Numbers in the text of the study"
    assert {row.names[2] for row in tables[-1].rows} >= {"section 1", "section 3.1"}


@pytest.mark.parametrize("name", [f"paper{n}" for n in range(1, 6)])
def test_every_number_of_a_study_is_in_the_tables_once(name):
    entries = study(name)
    assert sorted(places(redraw_tables(entries))) == sorted(map(id, entries))


def places(redrawn):
    return [id(line) for table, _ in redrawn for row in table.rows for line in row.lines if line is not None]


values = st.one_of(st.integers(1, 3), st.sampled_from(["a", "b"]), st.none(), st.dictionaries(st.just("lr"), st.integers(1, 2)))
anything = st.builds(
    lambda where, metric, of, cell: entry(where, metric, "1", of, **cell),
    st.sampled_from(["table 1", "table 1, called so", "figure 2", "section 10.2", "head-to-head"]),
    st.sampled_from(["x_s", "state", "train_time_s"]),
    st.sampled_from(["", "gemm", "copy"]),
    st.dictionaries(st.sampled_from(["strategy", "gpus", "steps", "epochs", "optimizer"]), values),
)


@given(st.lists(anything, max_size=30))
def test_each_reported_number_is_in_exactly_one_field_of_a_table(entries):
    """Every reported number is in exactly one table, and all rows of a table have the same length."""
    redrawn = redraw_tables(entries)
    assert sorted(places(redrawn)) == sorted(map(id, entries))
    for table, _ in redrawn:
        assert {len(row.names) + len(row.lines) for row in table.rows} == {len(table.columns)}


def test_entries_with_the_same_remark_share_a_footnote():
    """Entries with the same remark get the same footnote; a remark about all entries is shown once for the table."""

    def footnotes(*remarks):
        """The footnotes of a table with these remarks on its numbers, and the link of each number to its footnote."""
        entries = [entry("table 1", "x_s", "1", own=remark, notes=["odd"], gpus=n) for n, remark in enumerate(remarks)]
        ((table, notes),) = redraw_tables(entries)
        return notes, [
            piece.link
            for row in table.rows
            for piece in table.columns[-1].pieces(row)
            if piece.style == "footnote" and piece.text
        ]

    found, links = footnotes("late", "", "late")
    assert (found.texts, found.common, found.doubts) == (["late"], [], ["odd"])
    assert links == ["#note-study-1-1", "#note-study-1-1"]
    found, links = footnotes("late", "late", "late")
    assert (found.texts, found.common, links) == ([], ["late"], [])


@pytest.mark.parametrize(
    ("name", "told"),
    [("peak_memory_bytes", ("Peak memory", "bytes")), ("throughput_per_s", ("Throughput", "per s")), ("gpu_pct", ("GPU", "%")),
     ("state", ("State", "")), ("energy_per_unit_j", ("Energy", "J per unit"))],
)  # fmt: skip
def test_a_metric_has_a_heading_and_its_unit(name, told):
    assert make_metric_heading(name) == told
