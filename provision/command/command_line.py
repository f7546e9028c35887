"""The command line of `provision`: the order of its words, and what the values of its options may be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlab import completion
from shardlab.errors import UnknownName
from shardlab.verb import CommandParser, Verb

EXAMPLE_COMMANDS = """\
example:
  provision init > cluster.yaml          a cluster file of this machine
  provision plan                         what would change on the cluster of ./cluster.yaml
  provision cluster.yaml                 make these changes, and verify that two ranks can train

Options of a verb: provision VERB --help. Without a verb, the verb is apply, and the options above are those of apply.
If the first word is a verb, it is read as the verb; write a cluster file with such a name as ./down.
Commas or spaces separate the items of a list: --limit node0,node1 is --limit node0 node1.

exit code: 0 success; 1 a node or a check failed; 2 the input is wrong, and nothing was changed;
130 after Ctrl-C or SIGTERM: commands on the nodes were ended, or are listed if they may still run;
run the same command again to continue
"""
FILE_USAGE = "[FILE] "  # the part of the usage of a verb that says where the cluster file is
VERBS_WITHOUT_FILE = ("hardware", "init")
DEFAULT_VERB = "apply"


class ProvisionParser(CommandParser):
    """The parser of `provision [FILE] [VERB]`. Options may be before, between and after these words.

    The parsed arguments have the path of the cluster file, or None, as `cluster`, and the words of the command as `words`.
    """

    def __init__(self, verbs: Sequence[Verb]) -> None:
        description = "Prepare the machines of a cluster for training, and verify them."
        super().__init__(prog="provision", description=description, epilog=EXAMPLE_COMMANDS)
        file_help = "the cluster file (default: cluster.yaml of the workspace)"
        file_argument = self.add_argument("cluster", nargs="?", metavar="FILE", help=file_help)
        completion.offer_completions(file_argument, lambda _: (), file_endings=(".yaml", ".yml"))
        self.add_verbs(verbs)
        self.list_ends = self.verb_parsers.keys()
        self.usage = "provision [FILE] [VERB] [OPTION ...]"
        for verb in verbs:
            parser = self.verb_parsers[verb.name]
            if verb.name in VERBS_WITHOUT_FILE:
                parser.prog = parser.prog.replace(FILE_USAGE, "")
            if verb.name == DEFAULT_VERB:
                verb.add_options(self)  # for the help and the completion: `_order_words` puts all options behind the verb
            self.ends_list_by_option |= parser.ends_list_by_option

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(self._order_words(args), argparse.Namespace(words=args))

    def _order_words(self, command_words: Sequence[str]) -> list[str]:
        """The words in the order that argparse needs: the cluster file, if it is given, then the verb, then all options."""
        action_by_option: dict[str, argparse.Action] = {}
        for parser in self.verb_parsers.values():
            action_by_option |= parser._option_string_actions
        free_words, option_words = self._split_words(command_words, action_by_option)
        if "--version" in option_words or (not self.verb_parsers.keys() & free_words and {"-h", "--help"} & {*option_words}):
            return option_words  # of the command and not of a verb
        if unknown_options := [
            word for word in option_words if word.startswith("--") and word.partition("=")[0] not in action_by_option
        ]:
            self.error(f"unrecognized arguments: {' '.join(unknown_options)}")
        file_word = free_words.pop(0) if free_words and free_words[0] not in self.verb_parsers else None
        if file_word is not None and not free_words and not may_be_file(file_word):
            self.error(str(UnknownName("cluster file or verb", file_word, self.verb_parsers)))
        verb = free_words.pop(0) if free_words else "plan" if "--check" in option_words else DEFAULT_VERB
        if verb not in self.verb_parsers:
            self.error(str(UnknownName("verb", verb, self.verb_parsers)))
        if file_word is not None and verb in VERBS_WITHOUT_FILE:
            self.error(f"{verb} takes no cluster file: found {file_word}")
        if free_words and free_words[0] in self.verb_parsers:
            self.error(f"found two verbs, {verb} and {free_words[0]}. Allowed: one; write a cluster file {verb} as ./{verb}")
        if free_words and file_word is None and verb not in VERBS_WITHOUT_FILE and may_be_file(free_words[0]):
            self.error(f"the cluster file comes before the verb: provision {free_words[0]} {verb}")
        if free_words:
            self.error(f"found the word {free_words[0]} after the verb {verb}, which takes none")
        return [*([] if file_word is None else [file_word]), verb, *option_words]

    def _split_words(self, command_words: Sequence[str], actions: Mapping[str, argparse.Action]) -> tuple[list[str], list[str]]:
        """Returns (the words that are no options and no values of options, the other words). actions: of all verbs, by
        option."""
        free_words: list[str] = []
        option_words: list[str] = []
        is_option_value = False
        remaining_words = iter(self.join_list_items(command_words))
        for word in remaining_words:
            if word == "--":
                free_words += remaining_words
            elif word.startswith("-"):
                option_words.append(word)
                is_option_value = word in actions and actions[word].nargs != 0
            else:
                (option_words if is_option_value else free_words).append(word)
                is_option_value = False
        return free_words, option_words


def parse_names(names_text: str) -> list[str]:
    """The names in the value of an option, which are separated by commas."""
    names = [name.strip() for name in names_text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"found {names_text!r}. Allowed: one or more names, separated by commas or spaces")
    return names


def parse_count(count_text: str) -> int:
    """The number in the value of an option."""
    if not count_text.isdecimal() or int(count_text) < 1:
        raise argparse.ArgumentTypeError(f"found {count_text!r}. Allowed: a whole number, 1 or more")
    return int(count_text)


def may_be_file(word: str) -> bool:
    """Whether a word can be the cluster file. A name of a node or an operation is no file."""
    return "/" in word or "." in word or Path(word).exists()
