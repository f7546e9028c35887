"""The text of a table's columns, the rows that it shows, and the columns that fit a terminal."""

import pytest

from shardlab.terminal.plain_table import fit_table, format_table
from shardlab.terminal.table import CellText, Column, Table, make_text_table


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (Column("", lambda value: value), 12_345, "12,345"),
        (Column("", lambda value: value), 0.5, "0.5000"),
        (Column("", lambda value: value, digits=2), 0.5, "0.50"),
        (Column("", lambda value: value), None, ""),
        (Column("", lambda value: value, "ms", scale=1e6), 2_500_000, "2.500"),
        (Column("", lambda value: value, "ms", scale=1e6), 0, "0"),
        (Column("", lambda value: value, is_signed=True), 3, "+3"),
        (Column("", lambda value: value, is_signed=True), -3, "-3"),
        (Column("", lambda value: value, is_signed=True), 0, "0"),
        (Column("", lambda value: value, longest=4), "abcd", "abcd"),
        (Column("", lambda value: value, longest=4), "abcde", "abc…"),
        (Column("", lambda value: value), CellText("3", "± 1"), "3 ± 1"),
        (Column("", lambda value: value), "  indented", "  indented"),
    ],
)
def test_a_column_makes_the_text_of_a_value(column, value, text):
    assert str(column.text(value)) == text


def test_a_heading_has_the_unit_and_numbers_are_aligned_to_the_right():
    columns = [Column("Name", lambda row: row[0]), Column("Time", lambda row: row[1], "ms")]
    assert format_table(Table("", columns, [("a", 1), ("bc", None)])) == "Name  Time (ms)\na             1\nbc\n"
    assert Table("", [Column("Group", str, is_number=False)], ["3 shards"]).number_columns == [False]


def test_the_limit_of_rows_counts_for_each_group():
    rows = ["a1", "a2", "a3", "b1"]
    table = Table("title", [Column("Row", str)], rows, most_rows=2, group=lambda row: row[0])
    assert (table.shown_rows, table.left_out) == (["a1", "a2", "b1"], 1)
    assert table.title_with_rest == "title; 1 more in --json"
    assert Table("title", [Column("Row", str)], rows, most_rows=4).title_with_rest == "title"


def test_columns_with_the_same_heading_have_their_own_widths():
    table = Table("", [Column("", lambda row: "a" * 10, priority=1), Column("", lambda row: "b" * 3)], [1])
    assert format_table(fit_table(table, 8)) == "\nbbb\n"


def test_the_columns_with_the_highest_priority_leave_a_narrow_terminal_first():
    headings = {"name": 0, "first": 1, "second": 2, "empty": 3}
    columns = [
        Column(heading, lambda row, heading=heading: "" if heading == "empty" else "x" * 6, priority=priority)
        for heading, priority in headings.items()
    ]
    table = Table("", [*columns, Column("why", lambda row: "yyyy " * 10, is_sentence=True)], [0])
    shown = {width: fit_table(table, width).headings for width in (60, 48, 47, 22, 21, 13, 5)}
    assert shown == {
        60: ["name", "first", "second", "why"],
        48: ["name", "first", "second", "why"],
        47: ["name", "first", "second"],
        22: ["name", "first", "second"],
        21: ["name", "first"],
        13: ["name"],
        5: ["name"],
    }
    assert fit_table(make_text_table("", ["a"], []), 80).headings == ["a"]
    assert fit_table(table, 13).hidden == ["first (xxxxxx)", "second (xxxxxx)", "why"]  # the texts are those of all rows
    hidden_line = "hidden at 13 columns: first (xxxxxx); second (xxxxxx); why (wider terminal, --json)"
    assert fit_table(table, 13).describe_hidden(13) == hidden_line
    assert fit_table(table, 60).describe_hidden(60) == ""


def test_a_long_heading_is_folded_between_words_before_a_column_is_left_out():
    columns = [Column("Name", lambda row: "x" * 4), Column("All timed steps, network", lambda row: 123, "KiB", priority=1)]
    assert fit_table(Table("", columns, [0]), 36).headings == ["Name", "All timed steps, network (KiB)"]
    assert fit_table(Table("", columns, [0]), 35).headings == ["Name", "All timed\nsteps,\nnetwork (KiB)"]
    assert fit_table(Table("", columns, [0]), 8).headings == ["Name"]
