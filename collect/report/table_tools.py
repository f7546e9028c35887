"""Chooses the properties (strategy, ranks, batch, state ...) by which a reader can filter and group the tables of cells."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect.findings.columns import Column
from collect.findings.row import CellRow

MOST_VALUES = 24  # a key with more values gets no check boxes; the search field finds its values
LEAST_ROWS = 4  # a table with fewer rows gets no tools: the reader sees all of it at once


class Facet(msgspec.Struct, frozen=True):
    """A property of cells by which a table is filtered and grouped, such as the strategy.

    heading: the name of the property in the page. values: the value of each row of the summary, as text; "" if it has none.
    choices: the different values, each with a check box, in the order of the rows (numbers: ascending).
    """

    heading: str
    values: list[str]
    choices: list[str]


def facets(columns: Sequence[Column], rows: Sequence[CellRow]) -> list[Facet]:
    """The facets of the rows: each key that identifies the cells and has few values, and the states of the runs.

    columns, rows: those of the summary table. The columns before `state` are the keys that identify the cells.
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
