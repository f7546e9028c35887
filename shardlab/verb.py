"""The verbs of the commands provision, jobs and collect, such as `submit` of `jobs`.

A verb is one class with its name, its help, its options and its action. `CommandParser` makes the parser of a command from its
verbs; the help, the completion in a shell (shardlab.completion) and the page docs/reference/commands.md follow from the parser.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shardlab import completion
from shardlab.terminal import console
from shardlab.terminal.console import Output, Parser
from shardlab.workspace.workspace import Workspace

if TYPE_CHECKING:
    from shardlab.cluster.cluster import Cluster


class Verb:
    """A verb of a command. Each verb is a subclass; its docstring is the sentence of the help that says what the verb does."""

    name: ClassVar[str]
    """The word on the command line."""
    example: ClassVar[str]
    """A command with this verb, for its help."""

    def add_options(self, parser: Parser) -> None:
        """Add the arguments and options of this verb to its parser."""

    def run(self, invocation: Invocation) -> int:
        """Carry out the verb. Returns the exit code of the command. Raises ShardlabError."""
        raise NotImplementedError


class Invocation:
    """One call of a command: its arguments and its output, and the workspace and the cluster that the arguments name."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """arguments: the parsed arguments of the command line."""
        self.arguments = arguments
        self.out = Output.from_arguments(arguments)

    @functools.cached_property
    def workspace(self) -> Workspace:
        """The workspace of --workspace, else of $SHARDLAB_WORKSPACE, else the current folder. Raises InputError if it is not a
        folder."""
        return Workspace.find(getattr(self.arguments, "workspace", None))

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The cluster: from the cluster file that the arguments name, else from cluster.yaml of the workspace, else this
        machine. The file is read only once. Raises InputError."""
        from shardlab.cluster import cluster  # not imported at the top: verbs of `collect` need no cluster

        file_argument: str | None = getattr(self.arguments, "cluster", None)
        return cluster.find_cluster(None if file_argument is None else Path(file_argument), self.workspace.path)


class CommandParser(Parser):
    """The parser of a command with verbs. The parsed arguments have the verb as `verb`."""

    def __init__(self, *, prog: str, description: str, epilog: str) -> None:
        self._common_options = console.common_options()
        super().__init__(prog=prog, description=description, epilog=epilog, parents=[self._common_options])
        console.add_version_option(self)
        self.verb_parsers: dict[str, Parser] = {}

    def add_verbs(self, verbs: Sequence[Verb]) -> None:
        """Add the verbs of the command."""
        verb_choices = self.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
        for verb in verbs:
            help_sentence = " ".join((verb.__doc__ or "").split())
            parser = verb_choices.add_parser(
                verb.name,
                parents=[self._common_options],
                help=f"{help_sentence[:1].lower()}{help_sentence[1:].removesuffix('.')}",
                description=help_sentence,
                epilog=f"example:\n  {verb.example}",
            )
            verb.add_options(parser)
            parser.set_defaults(verb=verb)
            self.verb_parsers[verb.name] = parser

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown_words = self.parse_known_args(args, namespace)
        if unknown_words:
            self.error(self._explain_unknown_words(unknown_words, arguments.verb))
        return arguments

    def _explain_unknown_words(self, unknown_words: Sequence[str], verb: Verb) -> str:
        unknown_option = unknown_words[0].partition("=")[0]
        verb_names = [name for name, parser in self.verb_parsers.items() if unknown_option in parser._option_string_actions]
        if not verb_names:
            return f"unrecognized arguments: {' '.join(unknown_words)}"
        if verb.name in verb_names:
            return f"{unknown_option} comes after the verb: {self.prog} {verb.name} {unknown_option}"
        verb_phrase = f"the verb{'s' if len(verb_names) > 1 else ''} {', '.join(verb_names)}"
        return f"{unknown_option} belongs to {verb_phrase} and cannot be combined with the verb {verb.name!r}"


def run_command_line(
    parser: CommandParser,
    argument_words: Sequence[str] | None,
    carry_out: Callable[[Invocation], int],
    interrupted_sentence: str | None = console.INTERRUPTED_SENTENCE,
) -> int:
    """Parse the words of a command and carry it out. Returns its exit code.

    argument_words: the words after the name of the command; None: those of this process. carry_out: carries out the command.
    interrupted_sentence: as for `console.run_command`.
    """
    completion.answer_shell(parser)
    invocation = Invocation(parser.parse_args(sys.argv[1:] if argument_words is None else argument_words))
    command_name = f"{parser.prog} {invocation.arguments.verb.name}"
    return console.run_command(lambda: carry_out(invocation), name=command_name, interrupted=interrupted_sentence)


def format_words(arguments: argparse.Namespace, *, omitted_names: Container[str] = ()) -> list[str]:
    """The words of a command line, after the name of the command, that give these arguments.

    omitted_names: names of arguments that are left out, such as `workspace`.
    """
    parser = Parser(parents=[console.common_options()])
    arguments.verb.add_options(parser)
    option_words: list[str] = [arguments.verb.name]
    positional_words: list[str] = []
    for parser_action in parser._actions:
        value = getattr(arguments, parser_action.dest, None)
        if value is None or value is False or value == parser_action.default or parser_action.dest in omitted_names:
            continue
        argument_values = value if isinstance(value, list) else [value]
        if not parser_action.option_strings:
            positional_words += map(str, argument_values)
        elif parser_action.nargs == 0:
            option_words.append(parser_action.option_strings[-1])
        else:
            option_words += [f"{parser_action.option_strings[-1]}={value}" for value in argument_values]
    return [*option_words, *(["--", *positional_words] if positional_words else [])]
