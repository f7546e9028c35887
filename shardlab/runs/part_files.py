"""Rules for merging the files of a run whose nodes share no folder, so that each node has its own folder for the run.

The rules say which files only the first node of the run may write, and whether a copy of a file is the beginning of another
copy of the same file.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardlab.files import files

HOST_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
EVENT_FILES = rf"events\.(?:ranks|rank-\d{{5,}}|(?:node|gpus|data)-{HOST_NAME})\.jsonl"  # the event files that nodes write
STEP_FILES = r"rank-\d{5,}\.jsonl"  # the files of step records, in the folder steps
# The names of the files that only the first node writes. The first node derives the state of the run from these files, so
# another node must not be able to change them.
_FIRST_NODE_FILES = re.compile(
    rf"claim(?:/.*)?|run\.json|job\.[^/]*|log/job\.log|log/ssh\.[^/]*|(?!{EVENT_FILES}$)events\..*", re.DOTALL
)
# Suffixes of files to which processes append. A copy of a file with such a suffix may contain only the beginning of the file.
GROWING_SUFFIXES = (".jsonl", ".log")
BLOCK_BYTES = 1 << 20  # bytes that are compared at a time


def is_of_first_node(file_name: str) -> bool:
    """Whether only the first node writes the file of this name in a run's folder."""
    return _FIRST_NODE_FILES.fullmatch(file_name) is not None


def is_growing(file_name: str) -> bool:
    """Whether processes append to the file of this name, so that an older copy is the beginning of a newer copy."""
    return file_name.endswith(GROWING_SUFFIXES)


def is_beginning(short_path: Path, long_path: Path) -> bool:
    """Whether the file `short_path` is the beginning of the file `long_path`, or equal to it. Raises OSError, NotRegular."""
    with files.open_regular(short_path) as short_file, files.open_regular(long_path) as long_file:
        while short_block := short_file.read(BLOCK_BYTES):
            if long_file.read(len(short_block)) != short_block:
                return False
    return True
