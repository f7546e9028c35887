"""The output of commands on a terminal, with the library rich. `shardlab.terminal.console` imports this module when it is
needed, which is seldom if the output goes to a pipe or a file: the import takes longer than all other imports of a small
command together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import rich.table
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shardlab.terminal import printable
from shardlab.terminal.table import Table


class CleanConsole(Console):
    """A console of the library rich that cleans all text with `printable.clean` and does not interpret markup in text.

    Strings are cleaned before rich measures them, so that columns stay aligned. The segments that rich has rendered are cleaned
    again, so that no object that is printed can add an escape sequence. The only escape sequences that reach the terminal are
    the sequences that rich makes for styles and live tables.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Replaces a method of rich: raises the BrokenPipeError again, which `console.run_command` handles for all output."""
        raise  # noqa: PLE0704 - rich calls this method while it handles the BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Replaces a method of rich: makes a Text from a string, without control characters and escape sequences."""
        return super().render_str(printable.clean_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The cleaned pieces of text (segments) that rich prints for an object. Control segments of rich are not changed."""
        for segment in super().render(renderable, options):
            text, style, control_codes = segment
            if not control_codes:
                text = printable.clean_text(text)
                style = style.update_link(None) if style is not None and style.link else style
            yield Segment(text, style, control_codes)


def draw_table(table: Table[Any]) -> rich.table.Table:
    """A table of the library rich in the style of all tables of shardlab, without a frame.

    table: as `plain_table.fit_table` returned it, so that no number and no id is broken."""
    grid = rich.table.Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, is_number, is_folded in zip(table.headings, table.number_columns, table.folded_columns, strict=True):
        no_wrap = not is_folded and len(table.columns) > 1
        grid.add_column(heading, justify="right" if is_number else "left", overflow="fold", no_wrap=no_wrap)
    for row_index, row_texts in enumerate(table.texts):
        if any(row_texts):  # all of a row may be in columns that are left out
            grid.add_row(*row_texts, style=table.styles[row_index] if row_index < len(table.styles) else None)
    return grid
