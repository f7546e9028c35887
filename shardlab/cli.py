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

COMMANDS = {
    "provision": "prepare the machines of a cluster for training, and verify them",
    "jobs": "turn a matrix into runs: plan, submit, follow",
    "collect": "turn records into tables, figures, verdicts and a report",
}
SCHEMAS = ("cluster", "matrix")

EXAMPLE = """\
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
    words = list(sys.argv[1:] if argv is None else argv)
    if completion.COMPLETION_VARIABLE in os.environ:
        words = completion.words_to_complete(COMMANDS)
    if words and words[0] in COMMANDS:
        command: Callable[[list[str]], int] = _import_command_line(words[0]).main
        return command(words[1:])
    parser = _make_parser()
    completion.answer_shell(parser)
    arguments = parser.parse_args(words)
    return console.run_command(functools.partial(_run_command, arguments))


def _import_command_line(package: str) -> ModuleType:
    """The module with the parser and the main function of a command.

    It is imported by name, because no module of the package shardlab has an import statement for provision, jobs or collect.
    """
    return importlib.import_module(f"{package}.cli")


def _make_parser() -> console.Parser:
    menu = "\n".join(f"  {name:10} {summary}" for name, summary in COMMANDS.items())
    parser = console.Parser(
        prog="shardlab",
        description=f"Compare distributed-training strategies.\n\ncommands:\n{menu}\n"
        "  shell-init print shell code, after which `jobs submit` and the Tab key work in your shell\n"
        "  schema     the JSON Schema of cluster.yaml or matrix.yaml, for editors",
        epilog=EXAMPLE,
    )
    console.add_version_option(parser)
    command = parser.add_argument("command", metavar="COMMAND", help=" | ".join([*COMMANDS, "shell-init", "schema"]))
    completion.offer_completions(command, lambda _: [*COMMANDS, "shell-init", "schema"])
    name_help = "shell-init: bash, zsh or fish; schema: cluster or matrix"
    name = parser.add_argument("name", nargs="?", metavar="NAME", help=name_help)
    completion.offer_completions(name, lambda _: [*SCHEMAS, *shell_init.SHELLS])
    return parser


def _run_command(arguments: argparse.Namespace) -> int:
    if arguments.command == "shell-init":
        code = shell_init.make_shell_code(arguments.name, _import_command_line("jobs").parser().first_words)
        sys.stdout.buffer.write(os.fsencode(code))  # as bytes, because paths are not always UTF-8
    elif arguments.command == "schema":
        if arguments.name not in SCHEMAS:
            raise UnknownName("schema", arguments.name or "", SCHEMAS)
        text = resources.files("shardlab").joinpath("schemas", f"{arguments.name}.schema.json").read_text()
        sys.stdout.write(text)
    else:
        raise UnknownName("command", arguments.command, [*COMMANDS, "shell-init", "schema"])
    return 0
