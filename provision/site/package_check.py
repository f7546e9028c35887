"""Checks the packages of an environment that `provision` did not make, such as a container image, before runs use it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from provision import software
from provision.fact import Unanswered
from provision.node import Node, find_error_line
from provision.operation import failure_reason
from provision.site import jobs


class PackageCheck:
    """A change that lists the packages of an environment and records how they differ from the tested packages.

    setting: the key and the value in the cluster file that name the environment, for messages.
    argv: the command that runs the program software.LISTING_PROGRAM in the environment.
    folder: the folder of the environment, in which the differences are recorded.
    limit_s: the time limit of the command, which may wait in the queue.
    advice: what to do if the packages cannot be listed.
    job_script: the script of the job that the command submits and waits for; None: the command submits no job.
    """

    script = ""

    def __init__(
        self,
        setting: str,
        argv: Sequence[str],
        folder: PurePosixPath,
        limit_s: float,
        advice: str,
        job_script: str | None = None,
    ) -> None:
        self.setting, self.argv, self.folder, self.limit_s, self.advice = setting, argv, folder, limit_s, advice
        self.job_script = job_script
        self._differences: str | None = None

    @property
    def description(self) -> str:
        """The sentence for this change, as `Change.description`. After the check, it contains the result."""
        result_text = "" if self._differences is None else f": {self._differences}"
        return f"check the packages of {self.setting}{result_text}"

    @property
    def command(self) -> str:
        """The command that checks the packages, as text; see `Change.command`."""
        return shlex.join(self.argv)

    def make(self, node: Node) -> None:
        """Check the packages. Raises Unanswered if they cannot be listed, or if a needed package is missing."""
        with contextlib.ExitStack() as during_job:
            if self.job_script is not None:
                during_job.enter_context(jobs.say_why_job_waits(node, self.job_script, self.description))
            listing_output = node.run(self.argv, timeout_s=self.limit_s)
        if listing_output.code is None:
            raise Unanswered(f"{node.name}: {self.setting}: its packages were not listed within {self.limit_s:g} s")
        if listing_output.code != 0:
            raise Unanswered(
                f"{node.name}: {self.setting}: its packages cannot be listed: {failure_reason(listing_output)}. {self.advice}"
            )
        differences = software.compare_packages(listing_output.stdout)
        if differences.missing_clauses:
            raise Unanswered(
                f"{node.name}: {self.setting} lacks {', '.join(differences.missing_clauses)}. Install what is missing there."
            )
        self._differences = summarize_versions(differences.other_version_clauses)
        write_output = node.put(f"{self._differences}\n".encode(), f"{self.folder}/differences.made", mode=0o644, owner="")
        if write_output.code != 0:
            raise Unanswered(f"{node.name}: {self.folder}: {find_error_line(write_output)}")


def summarize_versions(version_clauses: Sequence[str]) -> str:
    """The differences from the tested packages as one line. version_clauses: a clause for each package with another version."""
    return f"other versions than tested: {', '.join(version_clauses)}" if version_clauses else "the tested versions"
