"""Completes half-typed command lines in the user's shell, with the library argcomplete.

`shardlab shell-init` prints shell code that starts this program at each press of the Tab key and names the line in environment
variables. The parser of the command then says which verbs and options may follow; the values of options are given by `offer`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.workspace.workspace import Workspace

IS_ASKED = "_ARGCOMPLETE"  # set by argcomplete's shell code: which word of the line is the name of the command, counted from 1
SHELL = "_ARGCOMPLETE_SHELL"  # set by the same code: the name of the shell


def offer(action: argparse.Action, list_names: Callable[[Workspace], Iterable[str]], *, endings: tuple[str, ...] = ()) -> None:
    """Complete an argument with names.

    list_names: returns the names for a workspace. endings: files with these endings are completed too, such as `.yaml`.
    """

    def complete(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
        from argcomplete.completers import FilesCompleter

        names: list[str] = []
        with contextlib.suppress(ShardlabError):
            names += list_names(Workspace.find(getattr(parsed_args, "workspace", None)))
        return [*names, *(FilesCompleter(endings)(prefix) if endings else [])]

    action.completer = complete  # type: ignore[attr-defined]  # where argcomplete looks


def strategies(workspace: Workspace) -> Iterable[str]:
    """The strategies in the last matrix of a workspace, sorted."""
    return sorted({entry.cell.strategy for entry in workspace.expansion(None).cells})


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """If the shell asks how a command line may continue, answer and end this process."""
    if IS_ASKED in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)


def words_to_complete(commands: Container[str]) -> list[str]:
    """If the shell asks about `jobs ...` or `shardlab jobs ...`, returns ["jobs"], and the same for each of the commands.

    Otherwise returns an empty list: the shell asks about the words of the command `shardlab` itself. zsh sends the whole line,
    of which only the command after the last `;`, `&` or `|` counts.
    """
    line, point = os.environ.get("COMP_LINE", ""), int(os.environ.get("COMP_POINT", "0"))
    start = max(line.rfind(separator, 0, point) + 1 for separator in ";&|") if os.environ.get(SHELL) == "zsh" else 0
    typed = line[start:point]
    os.environ |= {"COMP_LINE": line[start:], "COMP_POINT": str(point - start)}
    finished = [Path(word).name for word in f"{typed}|".split()[:-1]]  # without the word that is being typed
    for index, name in enumerate(finished[:2]):
        if name in commands:
            os.environ[IS_ASKED] = str(index + 1)
            return [name]
    return []
