"""The numbers that a study printed, shown in tables like the tables of the study."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from collect.report.study_tables import arrange_reported, make_footnotes, metric_heading
from collect.verdicts.reported import ReportedResult

MATRICES = Path(__file__).parents[3] / "matrices"


def entry(where, metric, printed, of="", **cell):
    return ReportedResult(where=where, metric=metric, cell=cell, printed=printed, kind="measured", of=of)


def study(name):
    stated = yaml.safe_load((MATRICES / f"{name}.yaml").read_text())["reported"]
    return [entry(one["where"], one["metric"], one["printed"], one.get("of") or "", **one["cell"]) for one in stated]


def drawn(entries, where):
    """One table as text: (keys, headings, rows). A field contains the number that the study printed. where: names the table."""
    (table,) = [table for table in arrange_reported(entries).tables if table.where == where]
    heads = [(head.over, head.text) if head.over else head.text for head in table.heads]
    fields = [[*row.names, *("" if place is None else entries[place].printed for place in row.fields)] for row in table.rows]
    return table.keys, heads, fields


def test_a_metric_over_a_grid_is_a_table_with_the_columns_of_the_study():
    """Table 3 of study 3 has one column for each number of ranks, as in the paper."""
    keys, heads, rows = drawn(study("paper3"), "table 3")
    assert (keys, heads) == (["Strategy", "Workload"], [("Ranks", "1"), ("Ranks", "2"), ("Ranks", "4")])
    assert rows[0] == ["ddp", "vgg16", "487.55", "230.74", "113.81"]
    assert rows[-1] == ["fsdp1-full-shard", "convnext-large", "5891.63", "2786.49", "1490.43"]
    assert len(rows) == 6


def test_a_grid_with_a_gap_is_not_crossed():
    """If a combination of strategy and ranks has no number, the table has one row per number, without columns of ranks."""
    entries = [entry("table 1", "x_s", str(n), strategy=name, gpus=n) for name, n in (("a", 1), ("a", 2), ("b", 1))]
    assert drawn(entries, "table 1") == (["Strategy", "Ranks"], ["X"], [["a", "1", "1"], ["a", "2", "2"], ["b", "1", "1"]])


def test_metrics_are_columns_and_the_extra_value_of_a_place_is_a_column():
    """Table 4.1.2 of study 2 has one column for each metric, as in the paper."""
    keys, heads, rows = drawn(study("paper2"), "table 4.1.2")
    assert (keys, heads) == (["Strategy", "Ranks"], ["Train time", "Speed up", "Effective throughput"])
    assert rows[1] == ["ddp", "2", "58.3s", "1.93x", "62,870 tokens/sec"]


def test_numbers_of_short_and_long_runs_are_in_one_row():
    keys, heads, rows = drawn(study("paper2"), "table 4.2.5")
    assert (keys, heads) == (["Strategy", "Ranks"], ["Peak memory", "Memory efficiency", "Overlap", "Non compute"])
    assert rows[0] == ["single", "1", "~12GB", "", "", "0ms"]
    assert rows[2] == ["fsdp1-full-shard", "2", "~4GB", "300%", "95.14%", "95ms"]
    same = [entry("table 1", "x_s", printed, strategy="ddp", steps=n) for n, printed in ((1, "a"), (2, "b"), (3, "c"))]
    assert drawn(same, "table 1") == (["Steps"], ["X"], [["1", "a"], ["2", "b"], ["3", "c"]])


def test_a_table_of_one_cell_has_one_row_per_metric_or_operator():
    """Several metrics of one cell are listed one below the other. In a table of operators, each operator is a row."""
    entries = study("paper2")
    assert drawn(entries, "section 4.2.1")[2][0] == ["Memory parameter, bytes", "474.70 MB"]
    keys, heads, rows = drawn(entries, "table 4.5.1")
    assert (keys, heads) == (["Of"], ["Operator", "Operator count"])
    assert rows[2] == ["CatArrayBatchedCopy", "75", "1"]


def test_two_numbers_for_the_same_field_get_two_rows():
    """If a study has two numbers for the same field, each of them gets a row."""
    entries = [entry("table 1", "x_s", printed, strategy=name) for name, printed in (("a", "1"), ("a", "2"), ("b", "3"))]
    assert drawn(entries, "table 1") == (["Strategy"], ["X"], [["a", "1"], ["a", "2"], ["b", "3"]])


def test_places_with_few_numbers_are_listed_and_tables_are_sorted_by_number():
    entries = study("paper2")
    redrawn = arrange_reported(entries)
    first = ["table 2.4", "table 4.1.1", "table 4.1.2", "table 4.2.5", "table 4.3.1"]
    assert [table.where for table in redrawn.tables][:5] == first
    assert {entries[place].where for place in redrawn.single} >= {"section 1", "section 3.1"}


@pytest.mark.parametrize("name", [f"paper{n}" for n in range(1, 6)])
def test_every_number_of_a_study_is_in_the_tables_once(name):
    entries = study(name)
    assert sorted(places(arrange_reported(entries))) == list(range(len(entries)))


def places(redrawn):
    fields = [place for table in redrawn.tables for row in table.rows for place in row.fields if place is not None]
    assert sorted(fields) == sorted(place for table in redrawn.tables for place in table.places)
    return [*fields, *redrawn.single]


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
    redrawn = arrange_reported(entries)
    assert sorted(places(redrawn)) == list(range(len(entries)))
    for table in redrawn.tables:
        assert {(len(row.names), len(row.fields)) for row in table.rows} == {(len(table.keys), len(table.heads))}


def test_entries_with_the_same_remark_share_a_footnote():
    """Entries with the same remark get the same footnote; a remark about all entries is shown once for the table."""
    entries = [entry("table 1", "x_s", "1"), entry("table 1", "x_s", "2"), entry("table 1", "x_s", "3")]
    entries[0].notes = entries[1].notes = ["odd"]
    found = make_footnotes(entries, ["late", "", "late"], [0, 1, 2])
    assert (found.numbers, found.texts, found.common, found.doubts) == ({0: 1, 2: 1}, ["late"], [], ["odd"])
    found = make_footnotes(entries, ["late", "late", "late"], [0, 1, 2])
    assert (found.numbers, found.texts, found.common) == ({}, [], ["late"])


@pytest.mark.parametrize(
    ("name", "told"),
    [("peak_memory_bytes", ("Peak memory", "bytes")), ("throughput_per_s", ("Throughput", "per s")), ("gpu_pct", ("GPU", "%")),
     ("state", ("State", "")), ("energy_per_unit_j", ("Energy", "J per unit"))],
)  # fmt: skip
def test_a_metric_has_a_heading_and_its_unit(name, told):
    assert metric_heading(name) == told
