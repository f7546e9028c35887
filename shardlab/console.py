"""What the commands provision, jobs and collect share: common options, output on the terminal, and exit codes."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardlab import __version__, command_start, printable
from shardlab.errors import ShardlabError, WorkspaceError

INTERRUPTED = "interrupted; finished work is kept, and the same command continues from there."
_NUMERIC = re.compile(r"[-+]?[0-9]|\Z")  # matches a text that begins with a number or is empty


class Parser(argparse.ArgumentParser):
    """A parser of argparse that accepts no abbreviated options. An error is one sentence on stderr, with exit code 2."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the message with the command that shows the help, and exit with code 2."""
        self.exit(2, printable.clean(f"{self.prog}: {message}. See: {self.prog} --help\n"))


def common_options() -> Parser:
    """The options that every command has, such as --json. A user may write them before or after the verb."""
    parent = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parent.add_argument("--workspace", metavar="DIR", help="folder with runs/ and report/ (default: $SHARDLAB_WORKSPACE or .)")
    parent.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parent.add_argument("-v", "--verbose", action="store_true", help="print more details on standard error")
    return parent


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the option --version."""
    parser.add_argument("--version", action="version", version=f"shardlab {__version__}")


class Verbs:
    """The verbs of a command, such as `submit` of `jobs`. Each verb has options, an example, and a function to call."""

    def __init__(self, top: Parser, common: Parser, examples: Mapping[str, str], *, sentences: bool = False) -> None:
        """Prepare the parser `top` of the command for verbs. common: the options that all verbs have.

        examples: the example of each verb, by the name of the verb. sentences: whether the help of a verb shows its summary as
        a sentence, with a capital letter and a full stop.
        """
        self._verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
        self._common, self._examples, self._sentences = common, examples, sentences

    def add(self, name: str, run: Callable[..., int], summary: str) -> Parser:
        """Add a verb to the command; returns the parser of the verb.

        run: the function that carries out the verb and returns the exit code. The parsed arguments contain this function as
        `run`. summary: what the verb does, for the help.
        """
        verb: Parser = self._verbs.add_parser(
            name,
            parents=[self._common],
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}." if self._sentences else summary,
            epilog=f"example:\n  {self._examples[name]}",
        )
        verb.set_defaults(run=run)
        return verb


class CleanConsole(Console):
    """A console of the library rich that cleans all text with `printable.clean` and does not interpret markup in text.

    Strings are cleaned before rich measures them, so that columns stay aligned. The segments that rich has rendered are cleaned
    again, so that no object that is printed can add an escape sequence. The only escape sequences that reach the terminal are
    the sequences that rich makes for styles and live tables.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Replaces a method of rich: makes a Text from a string, without control characters and escape sequences."""
        return super().render_str(printable.clean(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The cleaned pieces of text (segments) that rich prints for an object. Control segments of rich are not changed."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if not control:
                text = printable.clean(text)
                style = style.update_link(None) if style is not None and style.link else style
            yield Segment(text, style, control)


class Output:
    """The output of a command: results go to standard output, remarks to standard error.

    With --json, standard output contains only one JSON document, and everything else goes to standard error.
    """

    def __init__(self, *, json: bool = False, verbose: bool = False) -> None:
        self.json = json
        self.verbose = verbose
        self.results = CleanConsole(file=sys.stdout, soft_wrap=not sys.stdout.isatty())
        self.remarks = CleanConsole(file=sys.stderr, soft_wrap=True)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Output:
        """The output of a command with these parsed arguments, which contain the common options --json and --verbose."""
        return cls(json=getattr(arguments, "json", False), verbose=getattr(arguments, "verbose", False))

    @property
    def width(self) -> int | None:
        """The width of the terminal in columns; None if tables are printed as plain lines, for example into a file."""
        return self.results.width if self.results.is_terminal and not self.json else None

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line of the result: on standard output, or with --json on standard error."""
        (self.remarks if self.json else self.results).print(text, style=style)

    def script(self, text: str) -> bool:
        """Print a script for a person to copy, with tabs and long lines unchanged, to the same stream as `line`.

        Returns False and prints nothing if the script contains a character that is not printable, because such a character
        could control the terminal.
        """
        if not text.replace("\n", "").replace("\t", "").isprintable():
            return False
        stream = (self.remarks if self.json else self.results).file
        stream.write(f"{text}\n")
        stream.flush()
        return True

    def remark(self, text: str, style: str | None = None) -> None:
        """Print a line on standard error that is not part of the result."""
        self.remarks.print(text, style=style)

    def detail(self, text: str) -> None:
        """Print a remark only with --verbose."""
        if self.verbose:
            self.remark(text, style="dim")

    def ask(self, question: str) -> str:
        """Ask a question on standard error. Returns the line that the user types; empty if the input has ended (Ctrl-D)."""
        try:
            return self.remarks.input(question).strip()
        except EOFError:
            self.remark("")
            return ""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
        """Print a table: drawn by rich on a terminal, else as aligned plain lines. Columns of numbers are aligned to the right.

        columns: the heading of each column. rows: the cells of each row. styles: the style of each row on a terminal.
        """
        on_terminal = self.results.is_terminal and not self.json
        if title:
            self.line(title, style="bold" if on_terminal else None)
        if on_terminal:
            self.results.print(drawn_table(columns, rows, styles))
            self.results.print()
        else:
            stream = self.remarks.file if self.json else self.results.file
            stream.write(_aligned([columns, *rows], _of_numbers(columns, rows)))

    def log(self, log: printable.LogText, part: bytes) -> None:
        """Print the next part of a log of a run on standard output, cleaned.

        log: the object that cleans this log, part by part. part: the next bytes of the log.
        """
        self.results.file.write(log.add(part))
        self.results.file.flush()

    def document(self, value: Any) -> None:
        """Print `value` as the one JSON document of the command. Without --json, nothing is printed."""
        if self.json:
            sys.stdout.write(msgspec.json.format(printable.json(value), indent=2).decode() + "\n")
            sys.stdout.flush()


def drawn_table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    """A table of the library rich in the style of all tables of shardlab, without a frame.

    columns: the heading of each column. rows: the cells of each row. styles: the style of each row.
    """
    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, numbers in zip(columns, _of_numbers(columns, rows), strict=True):
        drawn.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for index, row in enumerate(rows):
        drawn.add_row(*row, style=styles[index] if index < len(styles) else None)
    return drawn


def run(command: Callable[[], int], *, interrupted: str | None = INTERRUPTED) -> int:
    """Run a command and return its exit code. A ShardlabError or OSError becomes a sentence on stderr and an exit code.

    interrupted: the sentence that is printed after Ctrl-C or SIGTERM; None: the command handles these signals itself.
    """
    try:
        if interrupted is not None:
            command_start.raise_on_signal()
        code = command()
        sys.stdout.flush()
        return code
    except ShardlabError as error:
        sys.stderr.write(printable.clean(f"error: {error}") + "\n")
        return error.exit_code
    except KeyboardInterrupt:
        command_start.on_signal(lambda: command_start.leave("interrupted again."))
        sys.stderr.write(f"{interrupted or INTERRUPTED}\n")
        return command_start.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno is None:
            raise
        sys.stderr.write(printable.clean(f"error: {WorkspaceError.from_os_error(error, 'read or write')}") + "\n")
        return WorkspaceError.exit_code


def _of_numbers(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column, whether all its cells are empty or begin with a number. Such a column is aligned to the right."""
    return [all(_NUMERIC.match(row[index]) for row in rows) for index in range(len(columns))]


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """The rows of a table as text, one line for each row. right: for each column, whether it is aligned to the right."""
    lines = [[printable.one_line(cell.replace("\n", "; ")) for cell in row] for row in rows]
    widths = [max(cell_len(cell) for cell in column) for column in zip(*lines, strict=True)]
    set_ = [
        "  ".join(
            " " * (width - cell_len(cell)) + cell if to_right else cell + " " * (width - cell_len(cell))
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in lines
    ]
    return "".join(f"{line.rstrip()}\n" for line in set_)
