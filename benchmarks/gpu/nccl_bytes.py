"""Counts the bytes of the collectives that NCCL itself logs (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=COLL).

NCCL writes a line for each call, with the number of elements, their type and the number of ranks. A rank of shardlab writes a
line before its first and after its last timed step, so the lines between them are of these steps. NCCL logs what it was asked
to do. The bytes that a rank then sends are those of the ring algorithm; their sum over the ranks is the same for trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from collect.traces.calls import bytes_sent_for_message
from shardlab.files import files
from shardlab.hardware.nccl_log import TIMED_STEPS_BEGIN, TIMED_STEPS_END

MOST_BYTES = 2**28  # a longer log is not read: NCCL writes 200 bytes for each call
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


def count_step_bytes(logs: Iterable[Path], steps: int) -> float | None:
    """The bytes that all ranks together send in a timed step, from the logs of all ranks.

    steps: the number of timed steps. None if a log cannot be read, has no line of NCCL's collectives between its two lines of
    shardlab, or has a call whose bytes are not known.
    """
    total_bytes = 0.0
    for log in logs:
        try:
            with files.open_regular(log) as file:
                content = file.read(MOST_BYTES)
        except OSError:
            return None
        rank_bytes = _count_bytes(content)
        if rank_bytes is None:
            return None
        total_bytes += rank_bytes
    return total_bytes / steps if total_bytes and steps else None


def _count_bytes(log: bytes) -> float | None:
    _, begins, after = log.rpartition(TIMED_STEPS_BEGIN.encode())
    timed, ends, _ = after.partition(TIMED_STEPS_END.encode())
    calls = _CALL.findall(timed)
    if not begins or not ends or not calls:
        return None
    sent = 0.0
    for name, count, kind, ranks in calls:
        operation, is_part = _OPERATIONS.get(name, ("", False))
        if int(kind) >= len(ELEMENT_BYTES):
            return None
        message_bytes = int(count) * ELEMENT_BYTES[int(kind)] * (int(ranks) if is_part else 1)
        call_bytes = bytes_sent_for_message(operation, message_bytes, int(ranks))
        if call_bytes is None:
            return None
        sent += call_bytes
    return sent
