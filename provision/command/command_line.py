"""The command line of `provision`: its verbs and options, and which of them belong together."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardlab import completion
from shardlab.errors import InputError, UnknownName
from shardlab.terminal import console

VERBS = {
    "apply": "inspect the nodes, change what differs from the cluster file, and verify (the default verb)",
    "plan": "show what apply would change; change nothing",
    "facts": "show hardware and software of each node",
    "verify": "run only the acceptance checks",
    "request": "print what to request from the provider (CloudLab: a request RSpec, or a profile); change nothing",
    "hardware": "print the machines of CloudLab that have GPUs, by site and type; change nothing",
    "warm": "prepare in advance what takes long (practice nodes: base system and wheels)",
    "extend": "ask the provider for the machines for more hours (CloudLab: --hours N --reason TEXT)",
    "down": "remove what provision created (practice nodes and their network, an experiment of CloudLab)",
    "init": "print a commented cluster file of a Slurm site, SSH hosts, a CloudLab experiment or this machine; change nothing",
}
VERBS_WITHOUT_FILE = ("hardware", "init")  # verbs that take no cluster file
VERB_OF_OPTION = {"pretend": "plan", "profile": "request", "hours": "extend", "reason": "extend", "yes": "down"}
VERB_OF_OPTION |= dict.fromkeys(("site", "ssh", "cloudlab"), "init")  # option -> the only verb that has it
EXAMPLE = """\
example:
  provision init > cluster.yaml          a cluster file of this machine
  provision plan                         what would change on the cluster of ./cluster.yaml
  provision cluster.yaml                 make these changes, and verify that two ranks can train

If the first word is a verb, it is read as the verb; write a cluster file with such a name as ./down.
Commas or spaces separate the items of a list: --limit node0,node1 is --limit node0 node1.

exit code: 0 success; 1 a node or a check failed; 2 the input is wrong, and nothing was changed;
130 after Ctrl-C or SIGTERM: commands on the nodes were ended, or are listed if they may still run;
run the same command again to continue
"""


def parser() -> console.Parser:
    """The parser. Call `parse_intermixed_args`, which allows options between FILE and the verb, then `read_file_and_verb`."""
    verb_lines = "\n".join(f"  {verb:8} {help_text}" for verb, help_text in VERBS.items())
    command = console.Parser(
        prog="provision",
        description=f"Prepare the machines of a cluster for training, and verify them.\n\nverbs:\n{verb_lines}",
        epilog=EXAMPLE,
        parents=[console.common_options()],
    )
    file_help = "the cluster file (default: cluster.yaml of the workspace)"
    file = command.add_argument("file", nargs="?", metavar="FILE", help=file_help)
    verb = command.add_argument("verb", nargs="?", metavar="VERB", help=f"{' | '.join(VERBS)}")
    completion.offer_completions(file, lambda _: VERBS, endings=(".yaml", ".yml"))
    completion.offer_completions(verb, lambda _: VERBS)
    command.add_argument("--check", action="store_true", help="the same as the verb plan")
    command.add_list_option(
        "--limit", ends_list=_is_end, type=_parse_names, metavar="NODE,...", help="work only on these nodes"
    )
    command.add_list_option(
        "--only", ends_list=_is_end, type=_parse_names, metavar="OP,...", help="carry out only these operations"
    )
    command.add_list_option(
        "--skip", ends_list=_is_end, type=_parse_names, metavar="OP,...", help="carry out all operations except these"
    )
    command.add_argument(
        "--pretend",
        type=Path,
        metavar="FACTS.json",
        help="with the verb plan: take the facts of the nodes from this file, as --json prints them; no machine is reached",
    )
    command.add_argument(
        "--parallel",
        type=_parse_count,
        metavar="N",
        help="number of nodes that an operation changes at the same time (default: all)",
    )
    _add_init_options(command)
    command.add_argument(
        "--profile", action="store_true", help="request: print a profile (a script for geni-lib) instead of an RSpec"
    )
    here_help = "with provider local: check this machine although it is a login node of a Slurm cluster"
    command.add_argument("--here", action="store_true", help=here_help)
    command.add_argument("--hours", type=_parse_count, metavar="N", help="extend: hours to ask for")
    command.add_argument("--reason", metavar="TEXT", help="extend: why, for the administrators of the provider")
    command.add_argument("--yes", action="store_true", help="down: do not ask before machines are given back")
    console.add_trust_option(command)
    console.add_version_option(command)
    return command


def _add_init_options(command: console.Parser) -> None:
    """Add the options that say for which machines the verb init prints a cluster file."""
    command.add_argument(
        "--site",
        nargs="?",
        const="",
        metavar="USER@LOGIN",
        help="init: a Slurm site; without a value: this machine is its login node",
    )
    command.add_list_option(
        "--ssh", ends_list=VERBS.__contains__, type=_parse_names, metavar="HOST,...", help="init: machines with a login by SSH"
    )
    command.add_list_option(
        "--cloudlab",
        ends_list=VERBS.__contains__,
        type=lambda text: [Path(name) for name in _parse_names(text)],
        nargs="?",
        const=[],
        metavar="FILE,...",
        help="init: the manifests of a CloudLab experiment; on one of its nodes none is needed",
    )


def _parse_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"found {text!r}. Allowed: one or more names, separated by commas or spaces")
    return names


def _is_end(word: str) -> bool:
    """Whether a word cannot be the name of a node or of an operation, because it is a verb or the cluster file."""
    return word in VERBS or _may_be_file(word)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}. Allowed: a whole number, 1 or more")
    return int(text)


def read_file_and_verb(arguments: argparse.Namespace) -> tuple[str | None, str]:
    """Returns (the cluster file or None, the verb). Raises InputError for words that do not belong together."""
    first, second = arguments.file, arguments.verb
    if first in VERBS and second is not None:
        if second in VERBS:
            raise InputError(f"found two verbs, {first} and {second}. Allowed: one; write a cluster file {first} as ./{first}.")
        if first not in VERBS_WITHOUT_FILE and _may_be_file(second):
            raise InputError(f"the cluster file comes before the verb: provision {second} {first}.")
        raise InputError(f"found the word {second} after the verb {first}, which takes none. See: provision --help")
    file, given_verb = (None, first) if first in VERBS else (first, second)
    if file is not None and given_verb is None and not _may_be_file(file):
        raise UnknownName("cluster file or verb", file, VERBS)
    verb = given_verb or ("plan" if arguments.check else "apply")
    if verb not in VERBS:
        raise UnknownName("verb", verb, VERBS)
    if arguments.check and verb != "plan":
        raise InputError(f"--check means the verb plan and cannot be combined with the verb {verb!r}.")
    if file is not None and verb in VERBS_WITHOUT_FILE:
        raise InputError(f"{verb} takes no cluster file: found {file}.")
    for option, owner in VERB_OF_OPTION.items():
        if verb != owner and getattr(arguments, option) not in (None, False):
            raise InputError(
                f"--{option} belongs to the verb {owner} and cannot be combined with the verb {verb!r}. The verb comes before "
                f"the option: provision {owner} --{option}."
            )
    return file, verb


def _may_be_file(word: str) -> bool:
    return "/" in word or "." in word or Path(word).exists()
