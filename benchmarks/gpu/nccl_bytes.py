"""Counts the bytes of the collectives that NCCL itself logs (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=COLL).

NCCL writes a line for each call, with the number of elements, their type and the number of ranks. A rank of shardlab writes a
line before its first and after its last timed step, so the lines between them are of these steps. NCCL logs what it was asked
to do. The bytes that a rank then sends are those of the ring algorithm; their sum over the ranks is the same for trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from collect.traces.calls import compute_sent_bytes
from shardlab.files import files
from shardlab.hardware.nccl_log import TIMED_STEPS_BEGIN, TIMED_STEPS_END

MOST_BYTES = 2**28  # a longer log is not read: NCCL writes 200 bytes for each call
_CALL_BEGIN = re.compile(rb"NCCL INFO \w{1,40}: opCount ")
_CALL = re.compile(
    rb"NCCL INFO (\w{1,20}): opCount [0-9a-f]{1,16} sendbuff \S{1,20} recvbuff \S{1,20} count (\d{1,15}) datatype (\d{1,2}) "
    rb"op \d{1,12} root -?\d{1,9} comm \S{1,20} \[nranks=(\d{1,6})\]"
)
ELEMENT_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)  # by the number of the type in nccl.h: int8, uint8, int32, ...
# NCCL's name -> our name, and whether the message is as many times larger than `count` as there are ranks (nccl.h)
_OPERATIONS = {
    b"AllReduce": ("all_reduce", False),
    b"AllGather": ("all_gather", True),
    b"ReduceScatter": ("reduce_scatter", True),
    b"AlltoAll": ("all_to_all", True),
    b"Broadcast": ("broadcast", False),
    b"Reduce": ("reduce", False),
    b"Send": ("send", False),
    b"Recv": ("recv", False),
}


class LoggedBytes(NamedTuple):
    """What NCCL's logs say about the bytes of its collectives."""

    sent_bytes: float | None
    """By all ranks together in a timed step; None: not known."""
    unread_lines: int = 0
    """The lines about calls that this program cannot read, or whose bytes are not known; if any, the bytes are None."""


def count_step_bytes(logs: Iterable[Path], steps: int) -> LoggedBytes:
    """Count the bytes of a timed step in the logs of all ranks.

    steps: the number of timed steps. The bytes are not known if a log cannot be read, has no line of NCCL's collectives between
    its two lines of shardlab, or has unread lines.
    """
    total_bytes, unread_lines, are_complete = 0.0, 0, steps > 0
    for log in logs:
        try:
            with files.open_regular(log) as file:
                content = file.read(MOST_BYTES)
        except OSError:
            return LoggedBytes(None)
        sent_bytes, unread_lines_of_rank = _count_bytes(content)
        unread_lines += unread_lines_of_rank
        total_bytes += sent_bytes or 0.0
        are_complete = are_complete and sent_bytes is not None
    return LoggedBytes(total_bytes / steps if total_bytes and are_complete and not unread_lines else None, unread_lines)


def _count_bytes(log: bytes) -> LoggedBytes:
    """Count the bytes of all timed steps of a rank."""
    _, begins, after = log.rpartition(TIMED_STEPS_BEGIN.encode())
    timed, ends, _ = after.partition(TIMED_STEPS_END.encode())
    calls = _CALL.findall(timed)
    unread_lines = len(_CALL_BEGIN.findall(timed)) - len(calls)
    if not begins or not ends or not calls:
        return LoggedBytes(None, unread_lines)
    sent_bytes = 0.0
    for name, count, kind, ranks in calls:
        operation, is_part = _OPERATIONS.get(name, ("", False))
        element_bytes = ELEMENT_BYTES[int(kind)] if int(kind) < len(ELEMENT_BYTES) else None
        message_bytes = int(count) * (element_bytes or 0) * (int(ranks) if is_part else 1)
        call_bytes = compute_sent_bytes(operation, message_bytes, int(ranks)) if element_bytes else None
        sent_bytes += call_bytes or 0.0
        unread_lines += call_bytes is None
    return LoggedBytes(sent_bytes, unread_lines)
