"""run.json: one attempt at a cell, with every value resolved. It contains all that the nodes need to know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardlab import files
from shardlab.cell import Cell
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import InputError, WorkspaceError
from shardlab.own_strategy import OwnStrategy
from shardlab.own_workload import OwnWorkload

SAVE_AT = "SHARDLAB_SAVE_AT"  # set by the supervisor: when ranks that keep checkpoints save and end, seconds since the epoch
RUN_ID = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
_PARTS = re.compile(r"(?P<first>(?P<cell>.+)-r(?P<repeat>\d+))(?:-a(?P<attempt>\d+))?")


class World(msgspec.Struct, frozen=True):
    """The number of processes of a run: world_size = nnodes x nproc_per_node."""

    nnodes: int
    nproc_per_node: int
    world_size: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json. `repeat` counts the equal runs of a cell from 1; `attempt` counts the retries of one run from 1.

    resume: earlier attempts that have checkpoints, those with the latest step first. The run resumes from the latest intact
    checkpoint; the step records up to that step are copied from the earlier attempt, so that its records are complete. Or a
    run of another cell, with another number of ranks (`jobs submit --resume-from`): then its records begin after that step.
    """

    schema: Annotated[int, msgspec.Meta(ge=1, le=1)]
    run_id: Annotated[str, msgspec.Meta(pattern=RUN_ID.pattern)]
    matrix: str
    cell: Cell
    cell_hash: str
    repeat: int
    attempt: int
    launcher: str
    rehearsal: bool  # ranks forked on a CPU, practice nodes, or a tiny twin: its speed must not be judged
    world: World
    cluster: dict[str, str]
    data_path: str
    data_stage: Literal["node"] | None = None  # node: the data set is copied to each node's own disk at the start of the run
    versions: dict[str, str]
    git_commit: str | None
    templates: dict[str, str]  # template name -> SHA-256
    created: str  # ISO 8601, UTC
    scale: Literal["full", "tiny"] = "full"  # tiny: the cell's `rehearses` is the original cell
    proofs_path: str | None = None  # where same-work proofs are kept, so that a computation is proven once
    resume: list[str] = []
    scheduler: str = "local"
    source: str | None = None  # folder of the frozen copy of our source that the run uses; its name is the digest of the copy
    packages: str | None = None  # digest of the installed packages at submission: shardlab.source_digest
    environment: str | None = None  # only in runs that earlier versions rendered: one digest of packages and source
    limit_s: int | None = None  # time after which its supervisor ends it: the limit of the cell or of the scheduler
    requeues: int = 0  # how often the scheduler may start it again
    avoid: list[str] = []  # nodes that failed under earlier attempts
    shares_nodes: bool = False  # other jobs may run on its nodes at the same time, which may change its speed
    separate_folders: bool = False  # its nodes share no folder: each node has its own part of the run's folder (docs/ssh.md)
    track: str | None = None  # the experiment tracker to which it is logged while it goes on: shardlab.trackers
    wait_gpus_s: int = 0  # how long the run waits before its ranks start, if other processes use its GPUs
    own_workload: OwnWorkload | None = None  # if a file of the workspace defines the workload; its code is in this folder
    own_strategy: OwnStrategy | None = None  # the same for the strategy


def run_id(cell: Cell, repeat: int, attempt: int = 1) -> str:
    """The folder name of a run: readable head, hash of the cell, repeat, and the attempt from the second on."""
    name = f"{cell.name()}-r{repeat}"
    return name if attempt == 1 else f"{name}-a{attempt}"


class RunIdParts(msgspec.Struct, frozen=True):
    """What a run id says."""

    cell: str  # the name of the cell
    repeat: int
    attempt: int
    first: str  # the run id of the first attempt


def parts_of(name: str) -> RunIdParts | None:
    """The parts of a run id; None for a name that `run_id` does not make."""
    match = _PARTS.fullmatch(name)
    return RunIdParts(match["cell"], int(match["repeat"]), int(match["attempt"] or 1), match["first"]) if match else None


def attempt_of(name: str) -> tuple[str, int]:
    """(the run id of the first attempt, the number of this attempt). Any other name is its own first attempt."""
    parts = parts_of(name)
    return (parts.first, parts.attempt) if parts else (name, 1)


def read(path: Path) -> Run:
    """Read a run.json. Raises InputError if the file is missing or damaged."""
    try:
        return decoder(Run).decode(files.read(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such run.") from None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
    except DECODE_FAULTS as error:
        raise InputError(f"{path}: is not a run of this version: {error}.") from None
