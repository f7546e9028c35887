"""Keeps the tables that a command prints, so that a test can compare each cell with a number that the test wrote itself."""

from shardlab.console import Output


class PrintedTables(Output):
    """An output that keeps each printed table.

    rows_of: maps the title of a table to its rows; a row maps the heading of each column to the cell.
    """

    def __init__(self):
        super().__init__()
        self.rows_of = {}

    def table(self, title, columns, rows, styles=()):
        assert title not in self.rows_of, f"the title {title} is printed twice"
        assert len(set(columns)) == len(columns), f"{title}: two columns have the same heading"
        self.rows_of[title] = [dict(zip(columns, row, strict=True)) for row in rows]
