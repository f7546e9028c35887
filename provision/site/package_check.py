"""Checks the packages of an environment that we did not make, such as a container image, before runs use them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from provision import software
from provision.fact import Unanswered
from provision.node import Node, last_line
from provision.operation import reason


class PackageCheck:
    """A change that lists the packages and records how they differ from the tested ones.

    what: the key and the value in the cluster file. argv: the command that prints the output of software.LISTING. folder: the
    folder of the environment, where the differences are recorded. limit_s: for the command, which may wait in the queue.
    advice: what to do if the packages cannot be listed.
    """

    script = ""

    def __init__(self, what: str, argv: Sequence[str], folder: PurePosixPath, limit_s: float, advice: str) -> None:
        self.what, self.argv, self.folder, self.limit_s, self.advice = what, argv, folder, limit_s, advice
        self._differences: str | None = None

    @property
    def says(self) -> str:
        """See Change. With what was found, after it was carried out."""
        found = "" if self._differences is None else f": {self._differences}"
        return f"check the packages of {self.what}{found}"

    @property
    def command(self) -> str:
        """See Change."""
        return shlex.join(self.argv)

    def make(self, node: Node) -> None:
        """Raises Unanswered if the packages cannot be listed, or if one is missing."""
        answer = node.run(self.argv, timeout_s=self.limit_s)
        if answer.code is None:
            raise Unanswered(f"{node.name}: {self.what}: its packages were not listed within {self.limit_s:g} s")
        if answer.code != 0:
            raise Unanswered(f"{node.name}: {self.what}: its packages cannot be listed: {reason(answer)}. {self.advice}")
        found = software.differences(answer.stdout)
        if found.missing:
            raise Unanswered(f"{node.name}: {self.what} lacks {', '.join(found.missing)}. Install what is missing there.")
        self._differences = summary(found.other)
        written = node.put(f"{self._differences}\n".encode(), f"{self.folder}/differences.made", mode=0o644, owner="")
        if written.code != 0:
            raise Unanswered(f"{node.name}: {self.folder}: {last_line(written)}")


def summary(other: Sequence[str]) -> str:
    """The differences as one line."""
    return f"other versions than tested: {', '.join(other)}" if other else "the tested versions"
