"""Decides whether code in a workspace may be executed: only if this user created the workspace, or trusts it (--trust).

A workspace that was unpacked from an archive, or copied from elsewhere, may contain code of another person. A file in
.shardlab, the mark, says that the workspace was created on this account or that the user trusts it. A mark contains a
seal, which is computed from the inode numbers of the workspace, of .shardlab and of the mark, with a key in the user's home
folder. A copy of the workspace has other inode numbers, so the mark is not valid there.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import InputError, WorkspaceError

if TYPE_CHECKING:
    from shardlab.workspace import Workspace

MARK = "trusted.json"  # the file in .shardlab that marks the workspace as trusted
CODE = ("workloads", "strategies", "metrics")  # folders of a workspace whose Python files shardlab executes
ANSWERS = "own"  # the folder in .shardlab with copies of the workspace's code, and answers of `python -m trainers` about it
SOURCE = "source"  # the folder in .shardlab with copies of shardlab's own source, which runs use
KEY_BYTES = 32  # length of the key in the user's home folder


class TrustMark(msgspec.Struct, frozen=True):
    """The content of the mark.

    seal: the HMAC-SHA256, in hexadecimal, of the inode numbers of the workspace, of .shardlab and of the mark.
    """

    schema: int
    seal: str


def begin(workspace: Workspace) -> None:
    """Mark a workspace as trusted if it is new: shardlab has stored nothing in it yet, and it contains no code.

    This function must be called before the first file is stored in the workspace. If the mark cannot be written, for example
    because the home folder is read-only, code of the workspace is executed only with --trust.
    """
    if not workspace.own.exists() and not workspace.runs.exists() and not any(map(has_code, _folders(workspace))):
        with contextlib.suppress(WorkspaceError):
            trust(workspace)


def has_code(folder: Path) -> bool:
    """Whether a folder contains Python files. folder: one of the folders CODE of a workspace."""
    return any(name.endswith(".py") for name in files.names(folder))


def is_trusted(workspace: Workspace) -> bool:
    """Whether the workspace has a valid mark: it was created on this account, or the user trusts it."""
    path = workspace.own / MARK
    try:
        mark, key = msgspec.json.decode(files.read(path), type=TrustMark), files.read(_key())
        seal = _seal(workspace, key, path.stat().st_ino)
        return len(key) == KEY_BYTES and hmac.compare_digest(mark.seal.encode(), seal.encode())
    except (OSError, *DECODE_FAULTS):
        return False


def trust(workspace: Workspace) -> None:
    """Mark the workspace as trusted. Raises WorkspaceError."""
    files.make_folder(workspace.own)
    key = _key_or_new()
    new = workspace.own / f".{MARK}.{secrets.token_hex(4)}.tmp"
    with files.as_workspace_error("write"):
        for answer in (workspace.own / ANSWERS).glob("*.json"):  # perhaps from another person, so not trusted
            answer.unlink(missing_ok=True)
        for folder in (workspace.own / SOURCE, *_folders(workspace)):
            for bytecode in folder.glob("**/__pycache__"):  # else Python may run bytecode that differs from the source
                shutil.rmtree(bytecode, ignore_errors=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(files.as_json(TrustMark(1, _seal(workspace, key, os.fstat(descriptor).st_ino))))
            new.rename(workspace.own / MARK)
        finally:
            new.unlink(missing_ok=True)


def must_be_trusted(workspace: Workspace, code: Sequence[Path], *, trusted: bool) -> None:
    """Raise InputError if code of the workspace is to be executed, but the workspace is not trusted.

    code: the files that are to be executed; if the list is empty, nothing is checked. trusted: whether the user gave --trust;
    the workspace is then marked as trusted.
    """
    if not code or is_trusted(workspace):
        return
    if trusted:
        trust(workspace)
        return
    raise InputError(
        f"{code[0]}: not executed, because nothing shows that this workspace began on this account; it may have come with an "
        "archive. If you wrote its code or have read all of it, allow it with --trust."
    )


def _folders(workspace: Workspace) -> list[Path]:
    return [workspace.path / name for name in CODE]


def _seal(workspace: Workspace, key: bytes, mark: int) -> str:
    numbers = (workspace.real_path.stat().st_ino, workspace.own.stat().st_ino, mark)
    return hmac.new(key, f"shardlab workspace {numbers}".encode(), hashlib.sha256).hexdigest()


def _key() -> Path:
    """The path of the file with the user's key. Raises OSError if the user has no home folder."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return state / "shardlab" / "workspaces.key"


def _key_or_new() -> bytes:
    with files.as_workspace_error("write"):
        path = _key()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            files.write_new(new, secrets.token_bytes(KEY_BYTES), mode=0o600)
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # FileExistsError: another process has just made the key
            new.unlink()
        key = files.read(path)
    if len(key) != KEY_BYTES:
        raise WorkspaceError(f"cannot use {path}: it has {len(key)} bytes instead of {KEY_BYTES}; remove it.")
    return key
