"""Parsers for pairs, lists and limits in the output of Slurm's commands, which several facts use."""

from __future__ import annotations

import re

_PAIR_PATTERN = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/]*)=(\S*)")
_NAME_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,60}\Z")


def parse_pairs(line: str) -> dict[str, str]:
    """The values in a line of `scontrol --oneliner`, which contains words KEY=VALUE, by their keys."""
    return dict(_PAIR_PATTERN.findall(line))


def is_name(name_text: str) -> bool:
    """Whether the text can be the name of a partition, an account, a QOS, a GPU type or a feature in a cluster file."""
    return _NAME_PATTERN.match(name_text) is not None


def parse_names(names_text: str) -> tuple[str, ...] | None:
    """The names in a comma-separated list of Slurm; None if the list is ALL or empty. Texts that are no names are left out."""
    if names_text in ("ALL", "(null)", ""):
        return None
    return tuple(name for name in names_text.split(",") if is_name(name))


def parse_limit(limit_text: str) -> int | None:
    """A limit that Slurm prints, as a number; None for UNLIMITED and for a text that is no number."""
    return int(limit_text) if limit_text.isascii() and limit_text.isdigit() and len(limit_text) < 16 else None
