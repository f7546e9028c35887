"""What the commands provision, jobs and collect share: common options, output on the terminal, and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import stat
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import msgspec

from shardlab import __version__
from shardlab.errors import MissingExtra, ShardlabError, WorkspaceError
from shardlab.terminal import command_start, plain_table, printable
from shardlab.terminal.table import Table, make_text_table

if TYPE_CHECKING:
    from shardlab.terminal.rich_console import CleanConsole

INTERRUPTED_SENTENCE = "interrupted; finished work is kept, and the same command continues from there."


class Parser(argparse.ArgumentParser):
    """A parser of argparse that accepts no abbreviated options. An error is one sentence on stderr, with exit code 2."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.ends_list_by_option: dict[str, Callable[[str], bool]] = {}
        self.list_ends: Container[str] = ()  # words before which every list ends

    def add_list_option(self, option: str, *, ends_list: Callable[[str], bool] = lambda word: False, **settings: Any) -> None:
        """Add an option whose value is a list. A user separates the items by commas or spaces; argparse gets one text with
        commas.

        ends_list: whether a word, such as a verb, is not an item, so that the list ends before it. settings: as for
        `add_argument`."""
        self.ends_list_by_option[option] = ends_list
        self.add_argument(option, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self.join_list_items(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_intermixed_args(self.join_list_items(args), namespace)

    def join_list_items(self, words: Sequence[str] | None) -> list[str]:
        """The words of a command line, in which the items of each list are one word. words: None: those of this process."""
        joined_words: list[str] = []
        ends_list: Callable[[str], bool] | None = None  # of the list to which the next word may belong
        for word in sys.argv[1:] if words is None else words:
            if word.startswith("-"):
                ends_list = self.ends_list_by_option.get(word.partition("=")[0])
            elif ends_list is not None and (word in self.list_ends or ends_list(word)):
                ends_list = None
            elif ends_list is not None and joined_words[-1] not in self.ends_list_by_option:
                joined_words[-1] = f"{joined_words[-1].rstrip(',')},{word}"
                continue
            joined_words.append(word)
        return joined_words

    def error(self, message: str) -> NoReturn:
        """Print the message with the command that shows the help, and exit with code 2."""
        command_text = self.prog.replace(" [FILE]", "")  # a usage of provision has this optional word
        self.exit(2, printable.clean_text(f"{command_text}: {message.removesuffix('.')}. See: {command_text} --help\n"))

    @property
    def first_words(self) -> list[str]:
        """The words with which a command line of this parser may begin: verbs and options. `=` ends an option with a value."""
        words: list[str] = []
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                words += action.choices
            words += action.option_strings
            words += [f"{word}=" for word in action.option_strings if word.startswith("--") and action.nargs != 0]
        return words


def common_options() -> Parser:
    """The options that every command has, such as --json. A user may write them before or after the verb."""
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--workspace", metavar="DIR", help="folder with runs/ and report/ (default: $SHARDLAB_WORKSPACE or .)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="print more details on standard error")
    return parser


def add_version_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --version."""
    parser.add_argument("--version", action="version", version=f"shardlab {__version__}")


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --trust, for commands that ask `workspace_trust.must_be_allowed`."""
    trust_help = "allow this workspace of somebody else, or code in it, to act (docs/design/trust.md); read its files first"
    parser.add_argument("--trust", action="store_true", help=trust_help)


class OutputStream:
    """Standard output or standard error of a command. All text is cleaned with `printable.clean`."""

    def __init__(self, file: TextIO, *, soft_wrap: bool) -> None:
        """file: the stream. soft_wrap: whether lines longer than the width of the terminal are left to the terminal."""
        self.file = file
        self._soft_wrap = soft_wrap

    @functools.cached_property
    def console(self) -> CleanConsole:
        """The console of the library rich for this stream."""
        from shardlab.terminal.rich_console import CleanConsole

        return CleanConsole(file=self.file, soft_wrap=self._soft_wrap)

    @functools.cached_property
    def is_terminal(self) -> bool:
        """Whether the stream is a terminal. If FORCE_COLOR or TTY_COMPATIBLE is set, it decides instead, as in rich."""
        is_forced = "FORCE_COLOR" in os.environ or "TTY_COMPATIBLE" in os.environ
        return self.console.is_terminal if is_forced else self.file.isatty()

    def print_text(self, text: str, style: str | None = None) -> None:
        """Print a line. style: the style of the line on a terminal, in words of rich."""
        if self.is_terminal:
            self.console.print(text, style=style)
        else:
            self.file.write(printable.clean_text(text) + "\n")
            self.file.flush()


class Output:
    """The output of a command: results go to standard output, remarks to standard error.

    With --json, standard output contains only one JSON document, and everything else goes to standard error.
    """

    def __init__(self, *, json: bool = False, verbose: bool = False) -> None:
        self.json = json
        self.verbose = verbose
        self.results = OutputStream(sys.stdout, soft_wrap=not sys.stdout.isatty())
        self.remarks = OutputStream(sys.stderr, soft_wrap=True)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Output:
        """The output of a command with these parsed arguments, which contain the common options --json and --verbose."""
        return cls(json=getattr(arguments, "json", False), verbose=getattr(arguments, "verbose", False))

    @property
    def width(self) -> int | None:
        """The width of the terminal in columns; None if tables are printed as plain lines, for example into a file."""
        return self.results.console.width if self.results.is_terminal and not self.json else None

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print a line of the result: on standard output, or with --json on standard error."""
        (self.remarks if self.json else self.results).print_text(text, style=style)

    def print_script(self, script_text: str) -> bool:
        """Print a script for a person to copy, with tabs and long lines unchanged, to the same stream as `print_line`.

        Returns False and prints nothing if the script contains a character that is not printable, because such a character
        could control the terminal.
        """
        if not script_text.replace("\n", "").replace("\t", "").isprintable():
            return False
        script_stream = (self.remarks if self.json else self.results).file
        script_stream.write(f"{script_text}\n")
        script_stream.flush()
        return True

    def print_remark(self, text: str, style: str | None = None) -> None:
        """Print a line on standard error that is not part of the result."""
        self.remarks.print_text(text, style=style)

    def print_detail(self, text: str) -> None:
        """Print a remark only with --verbose."""
        if self.verbose:
            self.print_remark(text, style="dim")

    def ask(self, question: str) -> str:
        """Ask a question on standard error. Returns the line that the user types; empty if the input has ended (Ctrl-D)."""
        try:
            return self.remarks.console.input(question).strip()
        except EOFError:
            self.print_remark("")
            return ""

    def show_table(self, table: Table[Any]) -> None:
        """Print a table: drawn by rich on a terminal, else as aligned plain lines."""
        on_terminal = self.results.is_terminal and not self.json
        if table.title:
            self.print_line(table.title_with_rest, style="bold" if on_terminal else None)
        if on_terminal:
            from shardlab.terminal.rich_console import draw_table

            console = self.results.console
            fitted_table = plain_table.fit_table(table, console.width)
            console.print(draw_table(fitted_table))
            if hidden_line := fitted_table.describe_hidden(console.width):
                self.print_line(hidden_line, style="dim")
            console.print()
        else:
            table_stream = self.remarks.file if self.json else self.results.file
            table_stream.write(plain_table.format_table(table))

    def print_table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        styles: Sequence[str] = (),
        priorities: Mapping[str, int] | None = None,
    ) -> None:
        """Print a table of texts. columns: the heading of each column. rows: the cells of each row. The rest is as for
        `make_text_table`."""
        self.show_table(make_text_table(title, columns, rows, styles, priorities))

    def print_log(self, log_cleaner: printable.LogCleaner, log_part: bytes) -> None:
        """Print the next part of a log of a run on standard output, cleaned.

        log_cleaner: the object that cleans this log, part by part. log_part: the next bytes of the log.
        """
        self.results.file.write(log_cleaner.clean_part(log_part))
        self.results.file.flush()

    def print_document(self, json_value: Any) -> None:
        """Print `json_value` as the one JSON document of the command. Without --json, nothing is printed."""
        if self.json:
            sys.stdout.write(msgspec.json.format(printable.encode_printable_json(json_value), indent=2).decode() + "\n")
            sys.stdout.flush()


def _print_error(error: ShardlabError) -> int:
    """Print the sentence of an error on stderr, and return the exit code of the command that failed."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(printable.clean_text(f"error: {error}") + "\n")
    return error.exit_code


def run_command(action: Callable[[], int], *, name: str | None = None, interrupted: str | None = INTERRUPTED_SENTENCE) -> int:
    """Run a command and return its exit code. A ShardlabError or OSError becomes a sentence on stderr and an exit code.

    name: the words of the command, such as `collect summarize`; with them, a failed import of an optional package becomes a
    sentence too. interrupted: the sentence that is printed after Ctrl-C or SIGTERM; None: the command handles these signals
    itself.
    """
    os.umask(os.umask(0o077) | stat.S_IWOTH)  # no user of the machine may write into files that commands and runs make
    try:
        if interrupted is not None:
            command_start.raise_on_signal()
        exit_code = action()
        sys.stdout.flush()
        return exit_code
    except ShardlabError as error:
        return _print_error(error)
    except ModuleNotFoundError as error:
        missing_extra = MissingExtra.from_import_error(error, name) if name is not None else None
        if missing_extra is None:
            raise
        return _print_error(missing_extra)
    except KeyboardInterrupt:
        command_start.set_signal_action(lambda: command_start.exit_now("interrupted again."))
        sys.stderr.write(f"{interrupted or INTERRUPTED_SENTENCE}\n")
        return command_start.INTERRUPTED_CODE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno is None:
            raise
        return _print_error(WorkspaceError.from_os_error(error, "read or write"))
