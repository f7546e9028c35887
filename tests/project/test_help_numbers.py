"""Every number and default in a help text is the number that the program uses.

A help text is written by hand. If the default or the limit of an option changes and its text does not, the help is wrong.
"""

import argparse
import re

import pytest

import collect.cli
import jobs.cli
import provision.cli
import shardlab.cli
import trainers.__main__
from shardlab.matrix import cell
from shardlab.terminal import console

DEFAULT = re.compile(r"\(default: ([^)]*)\)")
# Defaults that no parser has, because the command finds them when it runs: tests of the command hold them.
FOUND_LATER = {
    "$SHARDLAB_WORKSPACE or .", "cluster.yaml of the workspace", "cluster.yaml of the workspace, else this machine", "all",
    "as set in the matrix", "runs/ of the workspace", "the log of the launcher, then the log of rank 0", "that of the GPU",
    "the last matrix", "the last matrix of each", "report/ in the workspace", "the matrix's baseline",
    "export/FORMAT in the workspace", "the workspace", "MATRIX.shardlab.zip in the workspace",
    "named after the file, in the current folder", "that of the workload", "usual for the model", "that of the cluster",
    "as few as the cluster needs", "one", "the name of the first file", "as the files show",
}  # fmt: skip
# Defaults that the text explains in other words than (default: ...).
SAID_OTHERWISE = {"python -m trainers tokenize --tokenizer": ("bytes", "bytes: one token per byte (default)")}
# Other numbers in help texts: the words around each number, with the number that the program uses. None: no number of ours.
OTHER_NUMBERS = {
    "exit code 1 if a run did not end as expected": None,
    "exit with code 1 if a claim is contradicted": None,
    "exit with code 1 if the repeats show": None,
    'such as "throughput < 0.95"': None,
    "exit with code 1 also if the repeats": None,
    'such as "gpus > 1"': None,
    "takes 10 s to minutes": None,
    "such as a100-80gb or its NVML name": None,
    "such as n_layer=48": None,
    "port on 127.0.0.1": None,
    "only runs from this date on (ISO 8601)": None,
    "only runs up to this time (ISO 8601; a date: its first moment)": None,
    "samples per second, at most 50 ": f"samples per second, at most {cell.FASTEST_HZ:g} ",
}


def options_of(parser):
    """Each option and argument of a parser and of its verbs: (the words of the command, the action of argparse)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from options_of(verb)
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            yield parser.prog, action


def parser_of_trainers(monkeypatch):
    """The parser of `python -m trainers`, which is made when the command runs."""
    parsers = []
    monkeypatch.setattr(console.Parser, "parse_args", lambda self, _: parsers.append(self) or self.exit())
    with pytest.raises(SystemExit):
        trainers.__main__.main([])
    return parsers[0]


@pytest.fixture
def options(monkeypatch):
    """Every option of every command: {words of the command and name of the option: the action of argparse}."""
    parsers = [shardlab.cli._make_parser(), provision.cli.parser(), jobs.cli.parser(), collect.cli.parser()]
    parsers.append(parser_of_trainers(monkeypatch))
    return {
        f"{command} {(action.option_strings or [action.dest])[-1]}": action
        for parser in parsers
        for command, action in options_of(parser)
    }


def test_every_default_of_a_help_text_is_the_default_of_the_option(options):
    faults = []
    for name, action in options.items():
        default = None if action.default in (argparse.SUPPRESS, []) or action.default is False else action.default
        text, told = action.help or "", DEFAULT.search(action.help or "")
        if name in SAID_OTHERWISE:
            value, words = SAID_OTHERWISE[name]
            is_right = default == value and words in text
        elif told is None:
            is_right = default is None
        elif default is None:
            is_right = told[1] in FOUND_LATER
        else:
            is_right = told[1].split(", any")[0] == (f"{default:g}" if isinstance(default, float) else str(default))
        if not is_right:
            faults.append(f"{name}: the default is {action.default}, the help text says: {text}")
    assert not faults, "\n".join(faults)
    texts = [found[1] for action in options.values() if (found := DEFAULT.search(action.help or ""))]
    assert set(texts) >= FOUND_LATER, "the test lists a default that no help text says"
    assert len(texts) > 60


def test_an_option_whose_default_is_a_number_reads_numbers(options):
    """Without a type, argparse gives the text that a user wrote, and the default alone is a number."""
    reading = {name: action for name, action in options.items() if action.nargs != 0}  # without those that take no value
    of_numbers = {name: action for name, action in reading.items() if type(action.default) in (int, float)}
    assert {name: action.type for name, action in of_numbers.items() if action.type is None} == {}
    assert len(of_numbers) > 5


def test_every_other_number_of_a_help_text_is_the_number_of_the_program(options):
    unknown, seen = [], set()
    for name, action in options.items():
        text = DEFAULT.sub("", action.help or "")
        for words, own in OTHER_NUMBERS.items():
            if words in text:
                assert own in (None, words), f"{name}: the text says {words}, and the program has {own}"
                seen.add(words)
                text = text.replace(words, "")
        if re.search(r"\d", text):
            unknown.append(f"{name}: {text}")
    assert not unknown, "numbers that no test holds:\n" + "\n".join(unknown)
    assert seen == OTHER_NUMBERS.keys()
