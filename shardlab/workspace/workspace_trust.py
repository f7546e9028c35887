"""Decides whether a command may act in a workspace: start, send, cancel, log in, execute code, use templates, send a token.

Reading and drawing are free. Everything else asks `must_be_allowed`. A command may act

- in an *own* workspace: it began on this account, all files that steer commands belong to this user, and no other user may
  write there;
- in a workspace to which the user *consented* (--trust): consent holds for the digests of the files that steer commands, so a
  new or changed file is asked about again.

The proof is a file in the user's home folder, which no other user can write. It is tied to a mark in .shardlab, which has one
name for each user: the proof holds the inode numbers and the change time (ctime) of the mark. Nobody can set a change time, so
a copy of the workspace has no proof, and neither has a workspace that is unpacked again with the same inode numbers.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files, plugin_source
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.terminal import printable

if TYPE_CHECKING:
    from shardlab.cluster.cluster import Cluster
    from shardlab.workspace.workspace import Workspace

ANSWERS_FOLDER = "own"  # the folder in .shardlab with copies and descriptions of the workspace's code
SOURCE_FOLDER = "source"  # the folder in .shardlab with copies of shardlab's own source, which runs use
BYTECODE_FOLDER = "__pycache__"
STEERING_NAMES = ("inventory.json", "away.json", "submissions")  # files and folders in .shardlab that steer commands
UNREADABLE_DIGEST = "unreadable"
MOST_NAMED_FILES = 5  # the most files that a refusal names
_PROOF_NAME = re.compile(r"[0-9a-f]{32}")


class Proof(msgspec.Struct, kw_only=True):
    """A file in the user's home folder: this user's right to act in one workspace."""

    schema: int = 2
    workspace: str
    """The path, for people who read the file."""
    inodes: list[int]
    """The inode numbers of the workspace, of .shardlab and of the mark."""
    ctime_ns: int | None
    """The time of the mark's last change in nanoseconds since the epoch. A workspace in which other users may write has no
    mark, because they could remove it; its proof holds only the inode number of the workspace, and its file has a name that is
    computed from the path."""
    began: bool
    """Whether the workspace began on this account; False: the user consented."""
    unshown: list[str] = []
    """What the cluster file that was there before does; see `list_powers`."""
    files: dict[str, str] = {}
    """Consent: the SHA-256 of each file, by its path in the workspace."""


def make_mark_path(workspace: Workspace) -> Path:
    """The path of this user's mark."""
    return workspace.shardlab_folder / f"trusted.{os.geteuid()}.json"


def begin_workspace(workspace: Workspace) -> None:
    """Make a workspace this user's own if it is new. This function must be called before the first file is stored in it.

    A workspace with a faulty cluster file does not begin. If only this user may write in the workspace, this process gives no
    group the right to write to files that it makes. Raises WorkspaceError if the proof cannot be written, and InputError if
    the user has no home folder.
    """
    if not workspace.explain_exposed_folders():  # else a folder made with the umask 002 would make the workspace foreign
        os.umask(os.umask(0o077) | stat.S_IWGRP)
    if _may_begin(workspace):
        try:
            unseen_powers = _list_cluster_file_powers(workspace)
        except InputError:
            return
        _make_proofs_folder()
        with _hold_beginning_lock():
            if _may_begin(workspace):  # else another command has begun it in the meantime
                _write_proof(workspace, began_here=True, unshown=unseen_powers)


def must_be_allowed(workspace: Workspace, action: str, other_files: Iterable[Path] = (), *, only_writes: bool = False) -> None:
    """Raise InputError unless this user may act in the workspace. Every act that is more than reading asks this function.

    action: what the command is about to do, as in `this command would ...`. other_files: further files in the workspace that
    steer the act, such as scripts that wait. only_writes: whether the command neither starts anything nor logs in."""
    other_files = list(other_files)
    if not is_allowed(workspace, other_files) and not _is_allowed_now(workspace, other_files):
        exposed_reasons = workspace.explain_exposed_folders()
        cause = (
            f"{exposed_reasons[0].rstrip('.')}"
            if exposed_reasons
            else "nothing shows that this workspace began on this account"
        )
        unknown_files = sorted(_list_files_without_consent(workspace, other_files))
        remainder = f" and {len(unknown_files) - MOST_NAMED_FILES} more" if len(unknown_files) > MOST_NAMED_FILES else ""
        file_list = (
            f" Not allowed yet: {', '.join(map(printable.clean_to_one_line, unknown_files[:MOST_NAMED_FILES]))}{remainder}."
            if unknown_files
            else ""
        )
        raise InputError(
            f"{workspace.path}: not allowed: this command would {action}, and {cause}; files of another person may steer it."
            f"{file_list} If you wrote these files or have read all of them, allow it with --trust."
        )
    if not only_writes and (unshown := list_unshown_powers(workspace)):
        raise InputError(
            f"{workspace.path / 'cluster.yaml'}: was there before this workspace began, and was not shown yet. It "
            f"{'; '.join(map(printable.clean_to_one_line, unshown))}. Run first: provision, which shows it; or allow it "
            "with --trust."
        )


def is_allowed(workspace: Workspace, other_files: Iterable[Path] = ()) -> bool:
    """Whether this user may act in the workspace: it is own, it is about to begin here, or the user consented to its files.

    other_files: as in `must_be_allowed`.
    """
    other_files = list(other_files)
    if is_own(workspace):
        return not any(_others_can_change(path) for path in other_files)
    if _may_begin(workspace):
        return True
    proof = _read_proof(workspace)
    if proof is None or proof.began:
        return False
    _remove_bytecode(workspace)
    return not _list_files_without_consent(workspace, other_files)


def _is_allowed_now(workspace: Workspace, other_files: Iterable[Path]) -> bool:
    """As `is_allowed`, but after any other command has begun the workspace: its mark is there before its proof is."""
    if not _find_proofs_folder().is_dir():
        return False
    with contextlib.suppress(WorkspaceError), _hold_beginning_lock():  # without a writable folder, nothing begins
        return is_allowed(workspace, other_files)
    return False


def is_own(workspace: Workspace) -> bool:
    """Whether the workspace began on this account, its files belong to this user, and no other user may write there."""
    proof = _read_proof(workspace)
    return (
        proof is not None
        and proof.began
        and not workspace.explain_exposed_folders()
        and not any(map(_others_can_change, steering_files(workspace)))
    )


def steering_files(workspace: Workspace) -> list[Path]:
    """The files that steer what commands do, sorted: code, templates, the cluster file, inventory, away.json, submissions."""
    steering_folders = [
        *(workspace.path / folder_name for folder_name in plugin_source.CODE_FOLDERS),
        *(workspace.shardlab_folder / name for name in STEERING_NAMES),
    ]
    steering_folders += filter(None, [workspace.own_templates])
    file_paths = {workspace.path / "cluster.yaml", *steering_folders}
    for folder in steering_folders:
        if folder.is_symlink():  # it may lead to /, which would take minutes to list
            continue
        for folder_path, subfolders, file_names in os.walk(folder):
            subfolders[:] = [name for name in subfolders if name != BYTECODE_FOLDER]
            file_paths |= {Path(folder_path, name) for name in file_names}
    return sorted(path for path in file_paths if path.is_symlink() or (path.exists() and not path.is_dir()))


def extend_consent(workspace: Workspace, *paths: Path) -> None:
    """Extend the consent to files that this process has just written into the workspace. Does nothing in an own workspace."""
    proof = _read_proof(workspace)
    if proof is not None and not proof.began:
        proof.files |= _compute_file_digests(workspace, paths)
        files.write_json(_find_proof_path(workspace), proof)


def find_copies_folder(workspace: Workspace, folder_name: str) -> Path:
    """The folder in .shardlab for copies and answers that commands execute or believe. folder_name: SOURCE or ANSWERS.

    In a workspace that is not own, the folder has another name, because another person may have made the folder `folder_name`.
    """
    proof = _read_proof(workspace)
    return workspace.shardlab_folder / (
        folder_name if proof is None or proof.began else f"{folder_name}-{_find_proof_path(workspace).stem[:8]}"
    )


def list_powers(cluster: Cluster) -> list[str]:
    """What a cluster file makes commands do that its user should see once, as in `it ...`."""
    powers = []
    if cluster.cloudlab is not None:
        powers.append(f"uses your token of the CloudLab portal{f' at {url}' if (url := cluster.cloudlab.portal_url) else ''}")
    if cluster.login is not None:
        powers.append(f"logs in to {f'{cluster.login.user}@' if cluster.login.user else ''}{cluster.login.host}")
    powers += [f"logs in to {node.host}" for node in cluster.nodes if cluster.provider == "ssh"]
    for environment in cluster.map_environments().values():
        named_paths = (environment.python, environment.use, environment.container)
        powers += [f"runs the interpreter of {path}" for path in named_paths if path]
        powers += [f"installs packages from {environment.wheelhouse}"] if environment.wheelhouse else []
        powers += [f"installs the package {package}" for package in environment.packages]
    return powers + [f"runs `{line}` in every job" for line in (cluster.slurm.setup if cluster.slurm is not None else [])]


def list_unshown_powers(workspace: Workspace, named_cluster: Cluster | None = None) -> list[str]:
    """What the workspace's cluster file does, as in `list_powers`, if the file was there before the workspace began and was
    not shown to the user yet. What the user added afterwards is the user's own and is left out.

    named_cluster: the cluster of another file in the workspace, which the command names.
    """
    proof = _read_proof(workspace)
    if proof is None:
        powers = _list_cluster_file_powers(workspace) + (list_powers(named_cluster) if named_cluster is not None else [])
        return list(dict.fromkeys(powers)) if _may_begin(workspace) else []
    return [power for power in _list_cluster_file_powers(workspace) if power in proof.unshown] if proof.unshown else []


def mark_powers_shown(workspace: Workspace) -> None:
    """Record that the user has seen what the cluster file does. Raises WorkspaceError."""
    begin_workspace(workspace)
    proof = _read_proof(workspace)
    if proof is not None and proof.unshown:
        proof.unshown = []
        files.write_json(_find_proof_path(workspace), proof)


def store_consent(workspace: Workspace, print_line: Callable[[str], object], other_files: Iterable[Path] = ()) -> None:
    """Store that the user said --trust: print the files that steer commands with their digests, and allow them from now on.

    print_line: prints a line. other_files: as in `must_be_allowed`. Raises InputError for a file that cannot be read, and
    WorkspaceError if the consent cannot be stored."""
    other_files = list(other_files)
    if is_allowed(workspace, other_files):
        mark_powers_shown(workspace)
        return
    earlier_proof = _read_proof(workspace)
    digests = _compute_file_digests(workspace, [*steering_files(workspace), *other_files])
    for name, file_digest in digests.items():
        if file_digest == UNREADABLE_DIGEST:
            raise InputError(f"{workspace.path / name}: cannot be allowed, because it is no regular file that can be read.")
    _remove_bytecode(workspace)
    allowed_digests = earlier_proof.files if earlier_proof is not None and not earlier_proof.began else {}
    _write_proof(workspace, began_here=False, digest_by_name=allowed_digests | digests)
    print_line(f"{workspace.path}: allowed from now on, as long as these {len(digests)} file(s) do not change (SHA-256, path):")
    for name, file_digest in digests.items():
        print_line(f"  {file_digest[:16]}  {printable.clean_to_one_line(name)}")


def _write_proof(
    workspace: Workspace, *, began_here: bool, unshown: Iterable[str] = (), digest_by_name: dict[str, str] | None = None
) -> None:
    """Write the proof, and the mark in the workspace. Raises WorkspaceError and InputError; the workspace is then unchanged."""
    proofs_folder = _make_proofs_folder()
    files.make_folder(workspace.shardlab_folder)
    mark_file, inodes, ctime_ns = make_mark_path(workspace), [workspace.real_path.stat().st_ino], None
    if not workspace.explain_exposed_folders():
        proof_name = secrets.token_hex(16)
        files.write_atomic(mark_file, f"{proof_name}\n".encode(), mode=0o600)
        with files.as_workspace_error("read"):
            mark_status = mark_file.stat()
            inodes, ctime_ns = [*inodes, workspace.shardlab_folder.stat().st_ino, mark_status.st_ino], mark_status.st_ctime_ns
    else:
        proof_name = _make_proof_name(workspace)
    path, file_digests = str(workspace.real_path), digest_by_name or {}
    proof = Proof(workspace=path, inodes=inodes, ctime_ns=ctime_ns, began=began_here, unshown=list(unshown), files=file_digests)
    try:
        files.write_json(proofs_folder / f"{proof_name}.json", proof)
    except WorkspaceError:
        with contextlib.suppress(OSError):  # a folder .shardlab that is left would make the workspace foreign
            mark_file.unlink(missing_ok=True)
            workspace.shardlab_folder.rmdir()
        raise


def _read_proof(workspace: Workspace) -> Proof | None:
    """The valid proof of this user for the workspace; None if there is none."""
    try:
        proof_path = _find_proof_path(workspace)
        proof = msgspec.json.decode(files.read(proof_path), type=Proof)
        inodes, ctime_ns = [workspace.real_path.stat().st_ino], None
        if proof_path.stem != _make_proof_name(workspace):
            mark_status = make_mark_path(workspace).lstat()
            inodes, ctime_ns = [*inodes, workspace.shardlab_folder.stat().st_ino, mark_status.st_ino], mark_status.st_ctime_ns
        return proof if (proof.inodes, proof.ctime_ns) == (inodes, ctime_ns) else None
    except (OSError, InputError, WorkspaceError, *DECODE_FAULTS):
        return None


def _find_proof_path(workspace: Workspace) -> Path:
    """The file of this user's proof, which need not exist. Raises InputError if the user has no home folder."""
    proof_name = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if not workspace.explain_exposed_folders():  # else another user may have written the mark
            proof_name = files.read(make_mark_path(workspace)).decode().strip()
    return _find_proofs_folder() / f"{proof_name if _PROOF_NAME.fullmatch(proof_name) else _make_proof_name(workspace)}.json"


def _make_proof_name(workspace: Workspace) -> str:
    return hashlib.sha256(os.fsencode(workspace.real_path)).hexdigest()[:32]


def _find_proofs_folder() -> Path:
    """The folder of the user's proofs. Raises InputError if the user has no home folder."""
    try:
        state_folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise InputError(f"{error} Allowed: XDG_STATE_HOME, the path of a folder of your own.") from None
    return state_folder / "shardlab" / "workspaces"


def _make_proofs_folder() -> Path:
    """Make the folder of the user's proofs. Raises WorkspaceError, and InputError if the user has no home folder."""
    folder = _find_proofs_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WorkspaceError(
            f"{folder}: cannot be created ({error.strerror}), and shows which workspaces are yours; set XDG_STATE_HOME to a "
            "folder of your own."
        ) from None
    return folder


def _hold_beginning_lock() -> AbstractContextManager[int]:
    """The lock under which a workspace begins. Raises WorkspaceError if it cannot be opened."""
    return files.hold_lock(_find_proofs_folder() / "begin.lock")


def _may_begin(workspace: Workspace) -> bool:
    """Whether the workspace is new: it holds nothing that shardlab stores or executes, only perhaps a cluster file."""
    cluster_file = workspace.path / "cluster.yaml"
    is_used = workspace.shardlab_folder.is_dir() or workspace.runs.exists() or {*steering_files(workspace)} - {cluster_file}
    return not (is_used or workspace.explain_exposed_folders() or _others_can_change(cluster_file))


def _list_cluster_file_powers(workspace: Workspace) -> list[str]:
    """What the cluster file in the workspace does, as in `list_powers`; empty if there is no cluster file."""
    from shardlab.cluster import cluster  # not at the top: `cluster` imports this module

    cluster_path = workspace.path / "cluster.yaml"
    is_written = cluster_path.exists() and cluster_path.stat().st_size > 0  # it is empty during `provision init > cluster.yaml`
    return list_powers(cluster.find_cluster(None, workspace.path)) if is_written else []


def _list_files_without_consent(workspace: Workspace, other_files: Iterable[Path]) -> set[str]:
    """The files to which the user has not consented, by their paths in the workspace."""
    proof = _read_proof(workspace)
    allowed_digests = proof.files if proof is not None and not proof.began else {}
    digests = _compute_file_digests(workspace, [*steering_files(workspace), *other_files])
    return {name for name, digest in digests.items() if allowed_digests.get(name) != digest or digest == UNREADABLE_DIGEST}


def _compute_file_digests(workspace: Workspace, paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by its path in the workspace; UNREADABLE_DIGEST if it is no regular file that can be read."""
    digest_by_name = {}
    for path in paths:
        file_name = os.path.relpath(path, workspace.path)
        try:
            digest_by_name[file_name] = hashlib.sha256(files.read(path, follow_links=True)).hexdigest()
        except OSError:
            digest_by_name[file_name] = UNREADABLE_DIGEST
    return digest_by_name


def _others_can_change(path: Path) -> bool:
    """Whether a file belongs to another user, or another user may write to it."""
    return path.exists() and explain_write_access(path) is not None


def explain_write_access(path: Path) -> str | None:
    """Why other users of this machine may write to a file or folder, as a sentence; None if they may not.

    This user, root and, under sudo, the user who called sudo do not count as other users. A group counts if it may have another
    member than this user. Raises OSError if the path does not exist.
    """
    sudo_uid = os.environ.get("SUDO_UID", "")
    path_status = path.stat()
    if path_status.st_uid not in {0, os.geteuid(), int(sudo_uid) if sudo_uid.isdecimal() else 0}:
        return f"{path}: it belongs to another user (uid {path_status.st_uid}), who can change its content."
    for write_bit, chmod_class, writers in (
        (stat.S_IWOTH, "o", "every user of this machine"),
        (stat.S_IWGRP, "g", f"the group {path_status.st_gid}"),
    ):
        is_private = chmod_class == "g" and _is_private_group(path_status.st_gid)
        if path_status.st_mode & write_bit and not is_private and not path_status.st_mode & stat.S_ISVTX:
            return (
                f"{path}: {writers} can write to it; if you alone use it, run: chmod {chmod_class}-w {shlex.quote(str(path))}"
            )
    return None


def _is_private_group(gid: int) -> bool:
    """Whether a group has only this user: it has the user's name, as Debian makes it, and lists no other member."""
    try:
        group_entry, user_entry = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group_entry.gr_name == user_entry.pw_name and set(group_entry.gr_mem) <= {user_entry.pw_name}


def _remove_bytecode(workspace: Workspace) -> None:
    """Remove bytecode beside the workspace's code, because Python may execute it in place of the source."""
    for name in plugin_source.CODE_FOLDERS:
        for bytecode_folder in (workspace.path / name).glob(f"**/{BYTECODE_FOLDER}"):
            shutil.rmtree(bytecode_folder, ignore_errors=True)
