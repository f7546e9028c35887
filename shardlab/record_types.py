"""The types of values that come from a file of somebody else: texts with a pattern, numbers with bounds.

A record may have been written on a hostile node, or by the author of an archive. Its texts become parts of paths, of scripts
and of commands, and its numbers become times and columns of 64 bits. So each value has one of these types where it is decoded,
and no reader has to check it again. A pattern of msgspec is a search, so each pattern here begins with ^ and ends with \\Z; `$`
would also match before a line break at the end.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from shardlab.files.decoders import get_decoder

LARGEST_INTEGER = 2**63 - 1  # the largest number that a column of 64 bits can contain
RUN_ID_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}\Z"
HOST_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._:-]{0,252}\Z"
SLURM_CLUSTER_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,62}\Z"
TOKEN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}\.[0-9a-f]{10}\Z"


def limit_text(pattern: str, allowed_words: str) -> msgspec.Meta:
    """The rule for a text in a file of the user. allowed_words: what the pattern allows, in words that complete the sentence
    "Allowed: ..."."""
    return msgspec.Meta(pattern=pattern, extra={"allowed": allowed_words})


ShortName = Annotated[
    str, limit_text(r"^[a-z0-9][a-z0-9-]{0,30}\Z", "up to 31 small letters, digits and hyphens, not first a hyphen")
]
PLAIN_WORD_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z"
PlainWord = Annotated[
    str, limit_text(PLAIN_WORD_PATTERN, "up to 63 letters, digits and the signs _ . -, beginning with a letter or digit")
]
AbsolutePath = Annotated[
    str, limit_text(r"^/[A-Za-z0-9._/-]+\Z", "a path that begins with / and has only letters, digits and the signs . _ / -")
]
RunId = Annotated[str, msgspec.Meta(pattern=RUN_ID_PATTERN)]
MatrixName = (
    RunId  # the name of a matrix or of analysed traces, in records; what users may write: MatrixFile.name in matrix/matrix.py
)
# a host name, an address, a node of Slurm
HostName = Annotated[
    str, limit_text(HOST_PATTERN, "letters, digits and the signs . _ : -, beginning with a letter, digit or _")
]
Token = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]  # the name of a job that jobs.slurm.submission chose
# A job of Slurm, or a task of an array; "": none.
JobNumber = Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,18}(_[0-9]{1,9})?)?\Z")]
SlurmClusterName = Annotated[  # a cluster of Slurm, for its option --clusters
    str,
    limit_text(SLURM_CLUSTER_PATTERN, "up to 63 letters, digits and the signs _ . + -, beginning with a letter, digit or _"),
]
Sha256 = Annotated[str, limit_text(r"^[0-9a-f]{64}\Z", "the 64 hexadecimal digits of a SHA-256, in small letters")]
BootId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9-]{1,64}\Z")]

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=LARGEST_INTEGER)]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]  # a number of things, such as bytes
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_INTEGER)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]  # of processes or nodes: readers open a file for each of them
ProcessId = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Measured = Annotated[float, msgspec.Meta(ge=-1e150, le=1e150)]  # its square is a finite number, too
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e150)]
WallTime = Annotated[float, msgspec.Meta(ge=0, le=2.5e11)]  # seconds since the epoch, before the last year of a datetime
WholeSeconds = Annotated[int, msgspec.Meta(ge=0, le=3_000_000_000)]  # a duration of at most 95 years
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3e9)]  # a duration of at most 95 years
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3e12)]  # a duration of at most 95 years


class EventData(msgspec.Struct):
    """The keys of an event's data that identify something or are calculated with, whatever the event is. A reader of an event
    relies on these types; the data may have more keys."""

    job: JobNumber | None = None
    """The job of Slurm that executes the run."""
    cluster: SlurmClusterName | None = None
    """The cluster of Slurm that has the job; null: the default cluster of the machine that submitted the job."""
    token: Token | None = None
    pid: ProcessId | msgspec.UnsetType = msgspec.UNSET
    """If the key is there, it has a value."""
    created: WallTime | msgspec.UnsetType = msgspec.UNSET
    """When the process started."""
    boot_id: BootId | msgspec.UnsetType = msgspec.UNSET
    node: HostName | None = None
    nodes: list[HostName] = []
    step: Count | None = None
    steps: Count | None = None
    seconds: Seconds | None = None
    ended_s: WallTime | msgspec.UnsetType = msgspec.UNSET
    reason: str | None = None


class ClockOffset(msgspec.Struct, frozen=True):
    """The difference between the clocks of two hosts."""

    offset_s: Measured
    """The clock of a host minus the clock of rank 0's host."""
    within_s: Measured
    """The largest possible error of offset_s."""


class Spread(msgspec.Struct, frozen=True, omit_defaults=True):
    """The distribution of n measurements."""

    median: Measured
    """50th percentile."""
    mean: Measured
    """Arithmetic mean."""
    p5: Measured
    """5th percentile, linearly interpolated between measurements."""
    p95: Measured
    """95th percentile, linearly interpolated between measurements."""
    n: Count
    """Number of measurements."""


# msgspec prepares the types here, before several threads convert the data of events
get_decoder(EventData)
get_decoder(ClockOffset)


def check_numbers(value: Any) -> None:
    """Raises ValueError if a number in a value of dicts and lists does not fit into 64 bits, or is too large to be squared."""
    for contained_value in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        check_numbers(contained_value)
    if isinstance(value, int | float) and not abs(value) <= (LARGEST_INTEGER if isinstance(value, int) else 1e150):
        raise ValueError("a number is too large")
