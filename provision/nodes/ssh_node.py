"""A machine that is reached by SSH."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from provision.interruption import IS_STOPPING
from provision.node import Node, RunOptions
from shardlab.files import files
from shardlab.remote.remote import CommandOutput, Remote, Unreachable

MOST_LOGGED = 2000  # the most characters of stdout and of stderr of a command that the log of a node keeps


class SshNode(Node, kw_only=True, eq=False):
    """A machine that is reached by SSH."""

    remote: Remote
    log_path: Path | None = None
    """The file that records every command on the machine and its result, but never the input of a command; None: no log."""
    why_no_root: str = "cluster.yaml says ssh.sudo: false"
    """The reason if `may_sudo` is false, as a clause."""

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> CommandOutput:
        """Run a command on the node, as `Node.run` describes, and log it. Raises Unreachable."""
        is_root, is_secret = options.get("root", False), options.pop("secret", False)
        if is_root and not self.may_sudo:
            return self._refuse_root()
        options["env"] = self.variables | dict(options.get("env") or {})
        with self._add_name_to_unreachable():
            command_output = self.remote.run(argv, **options)  # type: ignore[misc]  # `secret` was taken out above
        self._log_command(
            ("sudo " if is_root else "") + shlex.join(argv),
            CommandOutput(command_output.code, "", "") if is_secret else command_output,
        )
        return command_output

    @property
    def running(self) -> tuple[str, ...]:
        """The beginnings of the commands that this program runs on the node now."""
        return self.remote.running

    def end_commands(self, limit_s: float) -> None:
        """End the running commands on the node, as `Node.end_commands` describes."""
        self.remote.end_commands(limit_s)

    def put(self, content: bytes, path: str, *, mode: int, owner: str) -> CommandOutput:
        """Write a file on the node, as `Node.put` describes, and log it. Raises Unreachable."""
        if owner and not self.may_sudo:
            return self._refuse_root()
        with self._add_name_to_unreachable():
            command_output = self.remote.put(content, path, mode=mode, owner=owner)
        self._log_command(f"put {path} ({len(content)} bytes, {mode:o}, {owner})", command_output)
        return command_output

    @contextlib.contextmanager
    def _add_name_to_unreachable(self) -> Iterator[None]:
        """The context of a command: adds the node's name to Unreachable. Raises Unreachable if this process was interrupted."""
        try:
            if IS_STOPPING.is_set():
                raise Unreachable(f"{self.name}: this program was interrupted.")
            yield
        except Unreachable as error:
            error.node = self.name
            raise

    def _refuse_root(self) -> CommandOutput:
        return CommandOutput(1, "", f"this needs root, and {self.why_no_root}")

    def _log_command(self, action: str, answer: CommandOutput) -> None:
        if self.log_path is None:
            return
        files.make_folder(self.log_path.parent)
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        log_lines = [f"{time_text} $ {action}", *(answer.stdout[-MOST_LOGGED:] + answer.stderr[-MOST_LOGGED:]).splitlines()]
        with files.as_workspace_error("write"):
            log_text = "\n  ".join(log_lines) + f"\n  -> {'ended at its limit' if answer.code is None else answer.code}\n"
            files.append(self.log_path, log_text.encode(errors="replace"))
