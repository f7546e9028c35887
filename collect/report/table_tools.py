"""Chooses what a reader can filter and group the tables of cells by: their strategy, ranks, batch, other keys and state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect.findings.columns import Column
from collect.findings.row import CellRow

MOST_VALUES = 24  # a key with more values gets no check boxes; the search field finds its values
LEAST_ROWS = 4  # a table with fewer rows gets no tools: the reader sees all of it at once


class Facet(msgspec.Struct, frozen=True):
    """A property of cells by which a table is filtered and grouped, such as the strategy.

    heading: its name in the page. values: its value for each row of the summary, as text; "" if the row has none.
    choices: the different values, each with a check box, in the order of the rows (numbers: ascending).
    """

    heading: str
    values: list[str]
    choices: list[str]


def facets(columns: Sequence[Column], rows: Sequence[CellRow]) -> list[Facet]:
    """The facets of the rows: each key that identifies the cells and has few values, and the states of the runs.

    columns: of the summary table; the columns before `state` are the keys that identify the cells. rows: of the same table.
    """
    found = []
    for column in columns:
        if column.name == "state":
            states = [" and ".join(row.states) for row in rows]
            found.append(Facet(column.heading, states, list(dict.fromkeys(states))))
            break
        values = [str(cell) for cell in column.cells]
        choices = list(dict.fromkeys(filter(None, values)))
        found.append(Facet(column.heading, values, sorted(choices, key=float) if column.is_number else choices))
    return [facet for facet in found if 1 < len(facet.choices) <= MOST_VALUES]


def of_row(found: Sequence[Facet], row: int) -> str:
    """The values of all facets for one row, as a JSON list of texts. row: index of the row in the summary."""
    return msgspec.json.encode([facet.values[row] for facet in found]).decode()
