"""The files of a run if each node has its own part of the folder: what a node may write, and which of two copies is used."""

from __future__ import annotations

import re
from pathlib import Path

from shardlab import files

HOST = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
EVENTS = rf"events\.(?:ranks|rank-\d{{5,}}|(?:node|gpus|data)-{HOST})\.jsonl"  # the event files that nodes write
STEPS = r"rank-\d{5,}\.jsonl"  # in the folder steps
# The first node decides the state of the run by these files: text of another node must not get into them.
_OF_FIRST_NODE = re.compile(
    rf"claim(?:/.*)?|run\.json|job\.[^/]*|log/job\.log|log/ssh\.[^/]*|(?!{EVENTS}$)events\..*", re.DOTALL
)
GROWING = (".jsonl", ".log")  # files that are appended to, so that a copy may have only their beginning
BLOCK = 1 << 20  # bytes that are compared at a time


def is_of_first_node(name: str) -> bool:
    """Whether only the first node writes the file of this name in a run's folder."""
    return _OF_FIRST_NODE.fullmatch(name) is not None


def is_growing(name: str) -> bool:
    """Whether a file is appended to: of two copies, one may be the beginning of the other."""
    return name.endswith(GROWING)


def is_beginning(short: Path, long: Path) -> bool:
    """Whether a file is the beginning of another file, or equal to it. Raises OSError, NotRegular."""
    with files.open_regular(short) as ours, files.open_regular(long) as theirs:
        while block := ours.read(BLOCK):
            if theirs.read(len(block)) != block:
                return False
    return True
