"""Sends files of this node's workspace to the first node, or stores files that the first node sends. The first node starts this
program over SSH if the nodes share no folder.

    python -m shardlab.transfer.node_files --workspace DIR

Standard input and standard output: the messages of shardlab.transfer.messages.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO

from shardlab.errors import InputError
from shardlab.files import files
from shardlab.files.files import NotRegular
from shardlab.terminal import console
from shardlab.transfer.arrival import RunReceiver, StandardInputReceiver
from shardlab.transfer.file_sender import FileSender
from shardlab.transfer.messages import NODE_REQUEST, AskedFiles, OfferedFile, OfferedFiles, RunEnd
from shardlab.workspace.workspace import Workspace


def send_asked_files(runs_folder: Path, asked_files: AskedFiles, sender: FileSender) -> None:
    """Send the files that the first node wants. runs_folder: the folder of all runs."""
    problems = []
    for name, most_bytes in asked_files.most_bytes.items():
        try:
            file_status = os.lstat(runs_folder / name)
            file_bytes = file_status.st_size if most_bytes is None else min(file_status.st_size, most_bytes)
            sender.send_file(f"{runs_folder}/{name}", name, file_bytes, file_status.st_mtime_ns, asked_files.held.get(name))
        except BrokenPipeError:
            raise
        except (FileNotFoundError, NotRegular):  # the first node notices that the file did not come
            continue
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    sender.send_message(RunEnd(None, problems))


def store_offered_files(workspace: Path, offer: OfferedFiles, connection: StandardInputReceiver, sender: FileSender) -> None:
    """Store the offered files that this node needs. They are moved to their places after all of them have arrived, so a broken
    connection leaves no file incomplete. Raises InputError, and OSError if a file cannot be written."""
    wanted_names = [name for name, offered_file in offer.files.items() if _is_wanted(workspace / name, offered_file)]
    sender.send_message(wanted_names)
    sender.flush_output()
    (workspace / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".arriving-", dir=workspace / "runs") as arriving_folder:
        staging_folder = Path(arriving_folder) / "files"
        arrived_run = RunReceiver(connection, asked_names=set(wanted_names)).receive_run("", staging_folder, {})
        for name, arrived_file in arrived_run.files.items():
            if arrived_file.bytes < offer.files[name].bytes:
                raise InputError(f"{name}: became shorter while it was sent.")
        for name in wanted_names:
            offered_file, path = offer.files[name], workspace / name
            if stat.S_ISDIR(offered_file.mode):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            (staging_folder / name).parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISLNK(offered_file.mode):
                (staging_folder / name).symlink_to(offered_file.link)
            else:
                (staging_folder / name).chmod(stat.S_IMODE(offered_file.mode))
            if path.is_symlink():
                path.unlink()  # else the file would be moved into the folder to which it leads
            elif path.is_dir():
                raise InputError(f"{path}: is a folder. Allowed: a file or nothing, because the first node sends a file.")
            shutil.move(staging_folder / name, path)  # also if `runs` leads to another disk
    for name in wanted_names:
        if stat.S_ISDIR(offer.files[name].mode):
            (workspace / name).chmod(stat.S_IMODE(offer.files[name].mode))


def _is_wanted(own_path: Path, file: OfferedFile) -> bool:
    try:
        file_status = os.lstat(own_path)
    except FileNotFoundError:
        return True
    if file.wanted_if == "longer" and stat.S_ISREG(file.mode):
        return file_status.st_size < file.bytes
    if stat.S_ISLNK(file.mode) and stat.S_ISLNK(file_status.st_mode):
        return file.wanted_if == "different" and str(own_path.readlink()) != file.link
    is_same = (file_status.st_mode, file_status.st_size, file_status.st_mtime_ns) == (file.mode, file.bytes, file.mtime_ns)
    return file.wanted_if == "different" and not is_same


def serve_first_node(workspace: Workspace, input_stream: BufferedIOBase, output_stream: BinaryIO) -> None:
    """Answer the one request of the first node. input_stream, output_stream: the streams from and to the first node. Raises
    InputError, and WorkspaceError if a file cannot be written."""
    sender = FileSender(lambda content: (output_stream.write(content), output_stream.flush()))
    connection = StandardInputReceiver(input_stream)
    node_request = connection.receive(NODE_REQUEST)
    if isinstance(node_request, AskedFiles):
        send_asked_files(workspace.runs, node_request, sender)
    else:
        with files.as_workspace_error("write"):
            store_offered_files(workspace.path, node_request, connection, sender)
        sender.send_message(True)
    sender.flush_output()


def main() -> int:
    """Serve the first node, and return the exit code."""
    parser = console.Parser(prog="python -m shardlab.transfer.node_files", parents=[console.common_options()])
    workspace = Workspace.find(getattr(parser.parse_args(), "workspace", None))
    with open(0, "rb", closefd=False) as source, open(1, "wb", closefd=False) as target:
        serve_first_node(workspace, source, target)
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
