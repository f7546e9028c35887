"""Whether a machine has CloudLab's program that makes a file system in the unused space of its boot disk."""

from __future__ import annotations

from provision.fact import Fact

PATH = "/usr/local/etc/emulab/mkextrafs.pl"
PROGRAM = f"if test -x {PATH}; then echo yes; else echo no; fi"


def command(python: str) -> list[str]:
    """The command that prints whether the machine has the program: yes or no. It needs only a shell."""
    return ["sh", "-c", PROGRAM]


def parse(stdout: str) -> bool:
    """True for the output yes, False for no. Raises ValueError for any other output."""
    answers = {"yes": True, "no": False}
    if (word := stdout.strip()) not in answers:
        raise ValueError(f"found {word[:40]!r}, not yes or no.")
    return answers[word]


MKEXTRAFS = Fact("mkextrafs", command, parse, timeout_s=30)
