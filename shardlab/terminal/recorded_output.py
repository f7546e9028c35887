"""The output of a command as HTML and as its JSON document, for a notebook in place of a terminal."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

import msgspec

from shardlab.terminal import printable
from shardlab.terminal.console import Output, OutputStream

if TYPE_CHECKING:
    from shardlab.terminal.rich_console import CleanConsole

WIDTH = 160  # columns; a notebook scrolls a wider table
_HTML = '<pre style="overflow-x: auto; white-space: pre; line-height: 1.3; font-family: monospace">{code}</pre>'


class RecordedOutput(Output):
    """An output that keeps all that is printed, drawn as on a terminal, and the JSON document."""

    def __init__(self) -> None:
        super().__init__()
        self.results = self.remarks = _RecordingStream(io.StringIO(), soft_wrap=False)
        self.document: Any = None
        """The document that `--json` would print, as dicts and lists."""

    def print_document(self, value: Any) -> None:
        """Keep the document."""
        self.document = msgspec.json.decode(printable.encode_printable_json(value))

    @property
    def html(self) -> str:
        """All that was printed, with its colours. Text is escaped."""
        return self.results.console.export_html(inline_styles=True, code_format=_HTML, clear=False)


class _RecordingStream(OutputStream):
    @functools.cached_property
    def console(self) -> CleanConsole:
        from shardlab.terminal.rich_console import CleanConsole

        return CleanConsole(file=self.file, record=True, width=WIDTH)

    @functools.cached_property
    def is_terminal(self) -> bool:
        return True
