"""The command `shardlab`, which runs the commands provision, jobs and collect.

`shardlab jobs` works in every shell. The command `jobs` alone does not, because `jobs` is a builtin of bash, zsh and fish.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from types import ModuleType

from shardlab import completion
from shardlab.errors import UnknownName
from shardlab.terminal import console, shell_init

COMMAND_SUMMARIES = {
    "provision": "prepare the machines of a cluster for training, and verify them",
    "jobs": "turn a matrix into runs: plan, submit, follow",
    "collect": "turn records into tables, figures, verdicts and a report",
}
SCHEMA_NAMES = ("cluster", "matrix")

EXAMPLE_COMMANDS = """\
example:
  shardlab provision init > cluster.yaml
  shardlab provision cluster.yaml
  shardlab jobs submit --matrix quickstart --wait
  shardlab collect summarize

  eval "$(shardlab shell-init)"          after this, `jobs submit ...` works in bash and zsh, although `jobs` is a builtin,
                                         and the Tab key completes verbs, options, matrices and run ids (in zsh, write
                                         the line after `compinit`)
  shardlab shell-init fish | source      the same in fish

Help for a command: shardlab COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    argv: the arguments of the program without its own name; None: the command-line arguments of this process. All arguments
    after the name of a command (provision, jobs, collect) are passed to that command.
    """
    argument_words = list(sys.argv[1:] if argv is None else argv)
    if completion.COMPLETION_VARIABLE in os.environ:
        argument_words = completion.find_words_to_complete(COMMAND_SUMMARIES)
    if argument_words and argument_words[0] in COMMAND_SUMMARIES:
        run_named_command: Callable[[list[str]], int] = _import_command_line(argument_words[0]).main
        return run_named_command(argument_words[1:])
    parser = _make_parser()
    completion.answer_shell(parser)
    arguments = parser.parse_args(argument_words)
    return console.run_command(functools.partial(_run_command, arguments))


def _import_command_line(package_name: str) -> ModuleType:
    """The module with the parser and the main function of a command.

    It is imported by name, because no module of the package shardlab has an import statement for provision, jobs or collect.
    """
    return importlib.import_module(f"{package_name}.cli")


def _make_parser() -> console.Parser:
    command_menu = "\n".join(f"  {command_name:10} {summary}" for command_name, summary in COMMAND_SUMMARIES.items())
    parser = console.Parser(
        prog="shardlab",
        description=f"Compare distributed-training strategies.\n\ncommands:\n{command_menu}\n"
        "  shell-init print shell code, after which `jobs submit` and the Tab key work in your shell\n"
        "  schema     the JSON Schema of cluster.yaml or matrix.yaml, for editors",
        epilog=EXAMPLE_COMMANDS,
    )
    console.add_version_option(parser)
    command = parser.add_argument("command", metavar="COMMAND", help=" | ".join([*COMMAND_SUMMARIES, "shell-init", "schema"]))
    completion.offer_completions(command, lambda _: [*COMMAND_SUMMARIES, "shell-init", "schema"])
    name_help = "shell-init: bash, zsh or fish; schema: cluster or matrix"
    name_argument = parser.add_argument("name", nargs="?", metavar="NAME", help=name_help)
    completion.offer_completions(name_argument, lambda _: [*SCHEMA_NAMES, *shell_init.CODE_BY_SHELL])
    return parser


def _run_command(arguments: argparse.Namespace) -> int:
    if arguments.command == "shell-init":
        shell_code = shell_init.make_shell_code(arguments.name, _import_command_line("jobs").parser().first_words)
        sys.stdout.buffer.write(os.fsencode(shell_code))  # as bytes, because paths are not always UTF-8
    elif arguments.command == "schema":
        if arguments.name not in SCHEMA_NAMES:
            raise UnknownName("schema", arguments.name or "", SCHEMA_NAMES)
        schema_text = resources.files("shardlab").joinpath("schemas", f"{arguments.name}.schema.json").read_text()
        sys.stdout.write(schema_text)
    else:
        raise UnknownName("command", arguments.command, [*COMMAND_SUMMARIES, "shell-init", "schema"])
    return 0
