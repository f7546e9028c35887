"""The exceptions that are shown to users. The message of an exception is a sentence for the user; its class sets the exit code.

::

    ShardlabError            the command failed                           exit 1
    ├── InputError           the input is wrong, nothing was changed      exit 2
    │   └── UnknownName      no plug-in, file or key has this name        exit 2
    ├── WorkspaceError       the workspace cannot be read or written      exit 1
    └── MissingExtra         an optional set of packages is not installed exit 1

Any other exception is a defect of shardlab and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardlab import extras


class ShardlabError(Exception):
    """A failure that is shown to the user as one or more sentences. exit_code: the exit code of the command that failed."""

    exit_code = 1


class InputError(ShardlabError):
    """The input is wrong. The message says what was found, where, and what is allowed. Nothing was changed."""

    exit_code = 2


def _simplify_spelling(name: str) -> str:
    """The name without case, hyphens, underscores and spaces: papers write `ZeRO-3` where a matrix has `zero3`."""
    return re.sub(r"[-_\s]", "", name.casefold())


MOST_RUNS = 4  # ids of runs in a message, which are long


class UnknownName(InputError):
    """An unknown name. The message lists the allowed names and suggests the most similar name.

    kind: what was named, such as `strategy`. name: the unknown name. allowed_names: the names that are allowed.
    place: the place where the name was found; the message begins with this text.
    summaries: the meaning of each allowed name; if given, the message has a line for each allowed name.
    """

    def __init__(
        self, kind: str, name: str, allowed_names: Iterable[str], place: str = "", summaries: Mapping[str, str] | None = None
    ) -> None:
        sorted_names = sorted(allowed_names)
        name_by_spelling = {_simplify_spelling(allowed_name): allowed_name for allowed_name in reversed(sorted_names)}
        similar_spellings = difflib.get_close_matches(_simplify_spelling(name), name_by_spelling, n=1)
        suggestion = f" Did you mean {name_by_spelling[similar_spellings[0]]!r}?" if similar_spellings else ""
        place_prefix = f"{place}: " if place else ""
        allowed_text = f" {', '.join(sorted_names) or 'none'}."
        if kind == "run" and len(sorted_names) > MOST_RUNS:
            shown_names = ", ".join(sorted_names[:MOST_RUNS])
            allowed_text = (
                f" {shown_names} and {len(sorted_names) - MOST_RUNS} more, or a short name such as c3.2 (`jobs status`)."
            )
        if summaries:
            allowed_text = "".join(f"\n  {name:<{max(map(len, sorted_names))}}  {summaries[name]}" for name in sorted_names)
        super().__init__(f"{place_prefix}unknown {kind} {name!r}.{suggestion} Allowed:{allowed_text}")


class WorkspaceError(ShardlabError):
    """Raised if the workspace cannot be read or written."""

    @classmethod
    def from_os_error(cls, error: OSError, action: str) -> WorkspaceError:
        """Turn an OSError into a WorkspaceError, whose message says what failed and what to do next.

        action: the action that failed, as a verb such as `read`.
        """
        path_text = f" {Path(error.filename)}" if error.filename else ""
        folder_advice = _advise_folder(Path(error.filename or ""))
        failure_text = {
            errno.ENOSPC: "the disk is full; free some space and run the same command again",
            errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
            errno.EROFS: f"the file system is read-only; {folder_advice}",
            errno.EACCES: f"permission denied; {folder_advice}",
            errno.EPERM: f"permission denied; {folder_advice}",
        }.get(error.errno or 0, error.strerror or str(error))
        return cls(f"cannot {action}{path_text}: {failure_text}.")


def _advise_folder(failed_path: Path) -> str:
    """What helps if nothing can be written at a path: the variable or the option with which the user chooses another
    folder."""
    for cache_variable, default_folder in (("XDG_CACHE_HOME", "~/.cache"), ("XDG_STATE_HOME", "~/.local/state")):
        own_folder = Path(os.environ.get(cache_variable) or os.path.expanduser(default_folder))  # noqa: PTH111 - Path's raises without a home
        if failed_path.is_absolute() and (failed_path.is_relative_to(own_folder) or own_folder.is_relative_to(failed_path)):
            return f"set {cache_variable} to a folder in which you may write"
    return "if it is in the workspace, choose another folder with --workspace"


class MissingExtra(ShardlabError):
    """A command needs an optional package that is not installed."""

    def __init__(self, needed_for: str, module: str) -> None:
        """needed_for: what needs the package, the beginning of the message. module: a key of extras.EXTRA_OF_MODULE."""
        super().__init__(
            f"{needed_for} needs the package {module!r}, which is not installed here; "
            f"install it with: {extras.make_install_command(extras.EXTRA_OF_MODULE[module])}"
        )

    @classmethod
    def from_import_error(cls, error: ModuleNotFoundError, needed_for: str) -> MissingExtra | None:
        """The MissingExtra for a failed import; None if no extra installs the module."""
        module = (error.name or "").partition(".")[0]
        return cls(needed_for, module) if module in extras.EXTRA_OF_MODULE else None
