"""Whether a machine has CloudLab's program that makes a file system in the unused space of its boot disk."""

from __future__ import annotations

from provision.fact import FactQuery

MKEXTRAFS_PATH = "/usr/local/etc/emulab/mkextrafs.pl"
TEST_MKEXTRAFS = f"if test -x {MKEXTRAFS_PATH}; then echo yes; else echo no; fi"


def build_command(python: str) -> list[str]:
    """The command that prints whether the machine has the program: yes or no. It needs only a shell."""
    return ["sh", "-c", TEST_MKEXTRAFS]


def parse(stdout: str) -> bool:
    """True for the output yes, False for no. Raises ValueError for any other output."""
    is_present_by_word = {"yes": True, "no": False}
    if (answer_word := stdout.strip()) not in is_present_by_word:
        raise ValueError(f"found {answer_word[:40]!r}, not yes or no.")
    return is_present_by_word[answer_word]


MKEXTRAFS = FactQuery("mkextrafs", build_command, parse, timeout_s=30)
