"""Makes a control group for each practice node, in which its systemd makes the groups of its services.

nspawn makes a node's group below its own, always by the same name: two nodes started from one group would share theirs, and
each systemd remove the group of a service that has ended while the other puts a process of its own into it, which then fails
with 219/CGROUP.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from provision.practice.base import NoBase

NAME = "shardlab-practice"
LIMIT_S = 20.0


def make(cluster: str, node: str) -> Sequence[Path]:
    """Its folder in each hierarchy that systemd keeps its services in. Raises NoBase."""
    folders = [root / NAME / cluster / node for root in _roots()]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NoBase(f"{folder}: cannot make the control group of a practice node: {error.strerror}.") from None
    return folders


def remove(cluster: str, node: str) -> None:
    """What make made and the node below it, once no process is left in it. Raises NoBase."""
    ends = time.monotonic() + LIMIT_S
    for root in _roots():
        top = root / NAME / cluster / node
        while top.exists():
            for place, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # the kernel may still be at the end of a process
                    Path(place).rmdir()
            if time.monotonic() > ends:
                raise NoBase(f"{top}: some processes in this control group do not end.")
            time.sleep(0.01)
        for folder in (top.parent, top.parent.parent):
            with contextlib.suppress(OSError):  # there are other nodes, or it was never made
                folder.rmdir()


def _roots() -> Sequence[Path]:
    """Where version 2 is mounted, and what systemd has of version 1 for itself beside it or instead."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, target, kind, options, *_ = line.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.setdefault(kind, Path(target))
    return list(found.values())
