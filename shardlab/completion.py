"""Completes half-typed command lines in the user's shell, with the library argcomplete.

`shardlab shell-init` prints shell code that starts this program at each press of the Tab key and names the line in environment
variables. The parser of the command then says which verbs and options may follow; the values of options are given by
`offer_completions`."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.workspace.workspace import Workspace

# Set by argcomplete's shell code: which word of the line is the name of the command, counted from 1
COMPLETION_VARIABLE = "_ARGCOMPLETE"
SHELL_VARIABLE = "_ARGCOMPLETE_SHELL"  # set by the same code: the name of the shell


def offer_completions(
    action: argparse.Action, list_names: Callable[[Workspace], Iterable[str]], *, file_endings: tuple[str, ...] = ()
) -> None:
    """Complete an argument with names.

    list_names: returns the names for a workspace. file_endings: files with these endings are completed too, such as `.yaml`.
    """

    def complete(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
        from argcomplete.completers import FilesCompleter

        completions: list[str] = []
        with contextlib.suppress(ShardlabError):
            completions += list_names(Workspace.find(getattr(parsed_args, "workspace", None)))
        return [*completions, *(FilesCompleter(file_endings)(prefix) if file_endings else [])]

    action.completer = complete  # type: ignore[attr-defined]  # where argcomplete looks


def list_strategies(workspace: Workspace) -> Iterable[str]:
    """The strategies in the last matrix of a workspace, sorted."""
    return sorted({expanded_cell.cell.strategy for expanded_cell in workspace.read_expansion(None).cells})


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """If the shell asks how a command line may continue, answer and end this process."""
    if COMPLETION_VARIABLE in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)


def find_words_to_complete(command_names: Container[str]) -> list[str]:
    """If the shell asks about `jobs ...` or `shardlab jobs ...`, returns ["jobs"], and the same for each of the commands.

    Otherwise returns an empty list: the shell asks about the words of the command `shardlab` itself. zsh sends the whole line,
    of which only the command after the last `;`, `&` or `|` counts.
    """
    command_line, cursor_position = os.environ.get("COMP_LINE", ""), int(os.environ.get("COMP_POINT", "0"))
    command_start = (
        max(command_line.rfind(separator, 0, cursor_position) + 1 for separator in ";&|")
        if os.environ.get(SHELL_VARIABLE) == "zsh"
        else 0
    )
    typed_text = command_line[command_start:cursor_position]
    os.environ |= {"COMP_LINE": command_line[command_start:], "COMP_POINT": str(cursor_position - command_start)}
    # without the word that is being typed
    finished_words = [Path(finished_word).name for finished_word in f"{typed_text}|".split()[:-1]]
    for index, word in enumerate(finished_words[:2]):
        if word in command_names:
            os.environ[COMPLETION_VARIABLE] = str(index + 1)
            return [word]
    return []
