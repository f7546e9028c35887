"""The folder of a command: which of its files runs need, their digest, and the frozen copy from which each run gets its own.

Runs need the files that git would add: no ignored files but those that `include` names, and nothing that `exclude` names. The
copy is made at submission, in the folder .shardlab/own of the workspace, so a change of the user's folder reaches no run that
is already submitted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

import msgspec

from jobs.plugins import plugin_store
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.matrix import command
from shardlab.matrix.matrix import Matrix
from shardlab.plugins.command_copies import MOST_BYTES, MOST_FILES, digest_files, find_copy, is_intact, list_copy
from shardlab.runs.rundir import WORK_FOLDER
from shardlab.workspace.workspace import Workspace

_INTERPRETER = re.compile(r"python[\d.]*|(ba|da|z|)sh")
MOST_NAMED_FILES = 3  # the largest files that a refusal names
MOST_GIT_S = 60.0  # the most seconds for git to list the files


class CommandFolder(msgspec.Struct, frozen=True):
    """The folder of a command, as it is now."""

    path: Path
    """The user's folder."""
    files: list[str]
    """The paths of the files that runs need, relative to the folder, sorted."""
    digest: str
    """The digest of the names, modes and contents of these files: 16 hexadecimal digits of SHA-256."""
    ignored: list[str] = []
    """The files and whole folders that git ignores and runs do not get, but for Python's caches. Git also leaves out a
    repository inside the folder."""
    is_sent: bool = False
    """Whether another machine sent the files."""


def read_folders(matrix: Matrix, workspace: Workspace) -> dict[str, CommandFolder]:
    """The folder of each command of a matrix, by the name of the command. Raises InputError.

    If another machine sent the folder, it is the frozen copy in the store of the workspace.
    """
    matrix_path = Path(matrix.path)
    folders = {}
    for command_name, workload in matrix.command_by_name.items():
        sent_folder = command.find_sent_folder(matrix_path, workload)
        if sent_folder is None:
            folders[command_name] = read_folder(matrix_path.parent / workload.folder, workload.exclude, workload.include)
        else:
            must_have_frozen_copy(store := plugin_store.find_store(workspace), sent_folder.digest)
            frozen_copy = find_copy(store, sent_folder.digest)
            folders[command_name] = CommandFolder(frozen_copy, list_copy(frozen_copy), sent_folder.digest, is_sent=True)
        _must_have_script(command_name, [str(word) for word in workload.command], folders[command_name])
    return folders


def _must_have_script(command_name: str, command_words: Sequence[str], folder: CommandFolder) -> None:
    """Raises InputError if the words of a command begin with a relative path, after `python` if they do, that its runs do not
    have. A path with a placeholder is not checked."""
    script = _find_script(command_words)
    if script is None or "{" in script or Path(script).is_absolute():
        return
    path = PurePosixPath(os.path.normpath(script))
    folders = {str(parent) for file in folder.files for parent in PurePosixPath(file).parents}
    if str(path) not in folders and not {str(path), *map(str, path.parents)} & {*folder.files}:  # a parent may be a link
        fault = "it is outside, git ignores it, or `exclude` names it" if (folder.path / path).exists() else "it does not exist"
        allowed = "a path in `folder`, or an absolute path"
        raise InputError(
            f"{command_name}: runs would not find {script} in a copy of {folder.path}: {fault}. Allowed: {allowed}."
        )


def _find_script(words: Sequence[str]) -> str | None:
    """The path of the script in a command line, its first word or the one after an interpreter and its options; None if that is
    no path, such as a program or a module."""
    if not _INTERPRETER.fullmatch(words[0]):
        is_program = "/" not in words[0] and (not words[0].endswith(".py") or shutil.which(words[0]) is not None)
        return None if is_program or words[0].startswith("-") else words[0]
    arguments = iter(words[1:])
    for argument in arguments:
        if argument in ("-m", "-c"):
            return None
        if argument in ("-X", "-W"):
            next(arguments, None)
        elif not argument.startswith("-"):
            return argument if argument.endswith((".py", ".sh")) else None
    return None


def describe_folders(folder_by_command: Mapping[str, CommandFolder]) -> list[str]:
    """For each command whose files another machine sent, or in whose folder git ignores files: which files runs get, as a
    sentence."""
    sent_remarks = [
        f"{command_name}: runs get the files that were sent together with the matrix, also if there is such a folder here"
        for command_name, folder in folder_by_command.items()
        if folder.is_sent
    ]
    return sent_remarks + [
        f"{command_name}: runs do not get what git ignores: "
        f"{', '.join(folder.ignored[:MOST_NAMED_FILES])}{' and others' * (len(folder.ignored) > MOST_NAMED_FILES)}. "
        "If the command needs it, name it in `include`, or give its absolute path to the command."
        for command_name, folder in folder_by_command.items()
        if folder.ignored
    ]


def _check_patterns(key: str, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not pattern.strip("/. ") or pattern.startswith(("!", "#", "./")) or ".." in PurePosixPath(pattern).parts:
            raise InputError(
                f"{key}: found {pattern!r}. Allowed: a pattern of files in the folder as in .gitignore, such as data/ "
                "or *.pt, without ! and without .. or ./ before it."
            )


def read_folder(folder: Path, exclude_patterns: Sequence[str], include_patterns: Sequence[str] = ()) -> CommandFolder:
    """Read the folder of a command. exclude_patterns: patterns of files that runs do not need. include_patterns: patterns of
    files that runs need although git ignores them. Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder. Allowed: the folder of the script, relative to the matrix file.")
    _check_patterns("exclude", exclude_patterns)
    _check_patterns("include", include_patterns)
    listed_names, ignored_names = _list_files(folder, exclude_patterns, include_patterns)
    file_names = [name for name in listed_names if not (folder / name).is_dir() or (folder / name).is_symlink()]
    if len(file_names) > MOST_FILES:
        raise InputError(f"{folder}: has {len(file_names)} files. Allowed: {MOST_FILES}; leave the others out with `exclude`.")
    for name in file_names:
        if (folder / name).is_symlink() and not _stays_inside(folder / name, folder):
            raise InputError(
                f"{folder / name}: links to a file outside of {folder}, or by an absolute path, which runs would not "
                "find. Allowed: a relative link to a file inside."
            )
    bytes_by_name = {name: (folder / name).stat().st_size for name in file_names if (folder / name).exists()}
    if (total_bytes := sum(bytes_by_name.values())) > MOST_BYTES:
        largest_names = sorted(bytes_by_name, key=lambda name: -bytes_by_name[name])[:MOST_NAMED_FILES]
        raise InputError(
            f"{folder}: its files have {total_bytes / 1e6:.0f} MB, the largest are {', '.join(largest_names)}. "
            f"Allowed: {MOST_BYTES / 1e6:.0f} MB; leave data and checkpoints out with `exclude`, and give their path "
            "to the command."
        )
    return CommandFolder(folder, file_names, digest_files(folder, file_names), ignored_names)


def freeze_folders(workspace: Workspace, folders: Sequence[CommandFolder]) -> None:
    """Copy the folders of commands into the store of the workspace, unless it has an undamaged copy. Raises ShardlabError."""
    for command_folder in folders:
        store = plugin_store.find_store(workspace)
        if command_folder.is_sent or has_frozen_copy(store, command_folder.digest):  # a sent copy was checked before
            continue
        with open_new_copy(store, command_folder.digest, f"{command_folder.path}: changed while it was copied") as new_folder:
            for name in command_folder.files:
                (new_folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(command_folder.path / name, new_folder / name, follow_symlinks=False)


def open_new_copy(store_folder: Path, digest: str, fault_text: str) -> AbstractContextManager[Path]:
    """An empty folder, which becomes the frozen copy with this digest; see `plugin_store.open_new_copy`."""
    return plugin_store.open_new_copy(find_copy(store_folder, digest), lambda folder: is_intact(folder, digest), fault_text)


def has_frozen_copy(store_folder: Path, digest: str) -> bool:
    """Whether the store has an undamaged copy of a command's folder."""
    return is_intact(find_copy(store_folder, digest), digest)


def must_have_frozen_copy(store_folder: Path, digest: str) -> None:
    """Raises InputError if the workspace has no undamaged copy of a command's folder."""
    if not has_frozen_copy(store_folder, digest):
        raise InputError(
            f"{find_copy(store_folder, digest)}: the copy of the command's folder is missing or damaged, so its runs "
            "cannot be started again. Submit the matrix again where the folder is, or with `jobs submit --from FILE` "
            "if it came in an archive."
        )


def copy_into_run(store_folder: Path, digest: str, run_folder: Path) -> None:
    """Copy the frozen folder of a command into the new folder of a run, as its working folder. Raises ShardlabError."""
    must_have_frozen_copy(store_folder, digest)
    with files.as_workspace_error("write"):
        shutil.copytree(find_copy(store_folder, digest), run_folder / WORK_FOLDER, symlinks=True)


def _list_files(folder: Path, exclude: Sequence[str], include: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files in a folder that runs get, and what git ignores of the others. Without git, runs get all but hidden files."""
    if shutil.which("git") is None:
        paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if not path.is_dir())
        visible = [path for path in paths if not any(part.startswith(".") or part == "__pycache__" for part in path.parts)]
        return [str(path) for path in visible if not any(_matches_pattern(path, pattern) for pattern in exclude)], []
    unwanted = _make_pathspecs("exclude,glob", exclude)
    with tempfile.TemporaryDirectory(prefix="shardlab-command-") as empty_repository:
        argv = ["git", "-C", str(folder)]
        if _run_git([*argv, "rev-parse", "--is-inside-work-tree"]) is None:
            # an empty repository elsewhere, so that .gitignore counts and nothing is written into the user's folder
            _run_git(["git", "init", "--quiet", empty_repository])
            argv += ["--git-dir", f"{empty_repository}/.git", "--work-tree", "."]
        argv += ["ls-files", "-z", "--others"]
        listed_names = _split_names(_run_git([*argv, "--cached", "--exclude-standard", "--", ".", *unwanted]))
        included = _split_names(_run_git([*argv, "--", *_make_pathspecs("glob", include), *unwanted])) if include else []
        ignored = _split_names(_run_git([*argv, "--ignored", "--exclude-standard", "--directory", "--", ".", *unwanted]))
    if listed_names is None or included is None:
        raise InputError(f"{folder}: git cannot list its files. Allowed: a folder that git can read.")
    found_names = {name for name in (*listed_names, *included) if not name.endswith("/")}
    folders_in_use = {f"{parent}/" for name in found_names for parent in PurePosixPath(name).parents}
    left_out_names = [*(name for name in listed_names if name.endswith("/")), *(ignored or [])]
    ignored = [name for name in left_out_names if "__pycache__" not in name and name not in found_names | folders_in_use]
    return sorted(name for name in found_names if os.path.lexists(folder / name)), ignored


def _stays_inside(link: Path, folder: Path) -> bool:
    """Whether a link leads to a place inside the folder, by a relative path."""
    try:
        return not link.readlink().is_absolute() and link.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return False


def _anchor_pattern(pattern: str) -> str:
    """A pattern relative to the folder. As in .gitignore, a pattern without a slash before its end is for every level."""
    pattern_name = pattern.rstrip("/")
    return pattern_name.lstrip("/") if "/" in pattern_name else f"**/{pattern_name}"


def _make_pathspecs(magic: str, patterns: Sequence[str]) -> list[str]:
    """The patterns of files and folders in the form of git."""
    return [f":({magic}){form}" for pattern in map(_anchor_pattern, patterns) for form in (pattern, f"{pattern}/**")]


def _matches_pattern(path: Path, pattern: str) -> bool:
    """Whether a pattern matches a file, or a folder that has it. path: relative to the folder of the command."""
    anchored_pattern = f"/{_anchor_pattern(pattern)}".removeprefix("/**/")
    return any(PurePosixPath("/", parent).match(anchored_pattern) for parent in (path, *path.parents[:-1]))


def _split_names(git_output: bytes | None) -> list[str] | None:
    return None if git_output is None else [name for name in os.fsdecode(git_output).split("\0") if name]


def _run_git(argv: Sequence[str]) -> bytes | None:
    """The output of git; None if it failed."""
    try:
        # in a hook of git, variables name another repository
        environment = {
            name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
        }
        git_result = subprocess.run(
            argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=MOST_GIT_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git_result.stdout if git_result.returncode == 0 else None
