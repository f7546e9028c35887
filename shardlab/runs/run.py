"""run.json: the description of a run, which is one attempt at a cell. It contains everything that the nodes need to know.

Every value is resolved, so that nothing depends on a default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardlab.errors import InputError
from shardlab.files import json_file
from shardlab.matrix.batch_search import BatchSearch
from shardlab.matrix.cell import AnyCell, Cell, convert_to_training_cell
from shardlab.matrix.retry import Retry
from shardlab.plugins.plugin_kind import OwnStrategy, OwnWorkload
from shardlab.record_types import RUN_ID_PATTERN, Count, HostName, MatrixName, Positive, Ranks, RunId, Sha256, WholeSeconds
from shardlab.runs.trace_part import TracePart

# An environment variable that the supervisor sets for the ranks of a run with checkpoints. It contains the time, in seconds
# since the epoch, at which the ranks save a checkpoint and end.
SAVE_AT = "SHARDLAB_SAVE_AT"
REHEARSAL_NOTE = "rehearsal: it tests that everything works, not the speed"
STEP_UNIT = "steps"  # the unit of the throughput of a run whose logs, or whose command, do not say how much data a step has
RUN_ID = re.compile(RUN_ID_PATTERN)
_RUN_ID_PATTERN = re.compile(r"(?P<first>(?P<cell>.+)-r(?P<repeat>\d+))(?:-a(?P<attempt>\d+))?")


class World(msgspec.Struct, frozen=True):
    """The number of processes of a run: world_size = nnodes x nproc_per_node."""

    nnodes: Ranks
    """Number of nodes."""
    nproc_per_node: Ranks
    """Ranks on each node."""
    world_size: Ranks
    """Ranks of the run, parameter servers included."""


class ImportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A log of another program from which `collect import` made a run, or a part of one."""

    name: str
    """The name of the file, without its folder."""
    format: str
    """The format in which the file was read, such as nvidia-smi."""
    sha256: Sha256
    """Of the content."""
    unread_lines: Count = 0
    """Number of lines that could not be read in this format."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json."""

    schema: Annotated[int, msgspec.Meta(ge=1, le=1)]
    run_id: RunId
    matrix: MatrixName
    cell: AnyCell
    """The resolved cell."""
    cell_hash: str
    """Digest of the cell; runs of equal cells have equal digests."""
    repeat: Positive
    """The number of this run among the equal runs of the cell, from 1."""
    attempt: Positive
    """The number of this attempt among the retries of the run, from 1."""
    launcher: str
    """What starts the ranks."""
    rehearsal: bool
    """Planned as a rehearsal (docs/design/rehearsal.md); the same key of its result says what the run was."""
    world: World
    cluster: dict[str, str]
    """Name and provider of the cluster; with the key `slurm`, also the cluster of Slurm to which the run is submitted."""
    data_path: str
    """The folder of data sets."""
    data_stage: Literal["node"] | None = None
    """Node: the data set is copied to each node's own disk at the start of the run."""
    versions: dict[str, str]
    git_commit: str | None
    """Commit of the checkout, with -dirty if tracked files were changed; null: not a checkout."""
    templates: dict[str, str]
    """Template name -> SHA-256."""
    created: str
    """ISO 8601, UTC."""
    scale: Literal["full", "tiny"] = "full"
    """Tiny: the cell is a tiny twin, and its `rehearses` is the original cell."""
    proofs_path: str | None = None
    """The folder of same-work proofs, so that each computation is proven only once."""
    resume: list[RunId] = []
    """Ids of earlier attempts that have checkpoints, beginning with the latest step. The run resumes from the latest intact
    checkpoint. The step records up to this step are copied from the earlier attempt, so that the records of this run are
    complete. The list may instead name a run of another cell with another number of ranks (`jobs submit --resume-from`); the
    records of this run then begin after the step of the checkpoint."""
    scheduler: str = "local"
    """What queues the run: local, slurm, ssh or allocation."""
    source: str | None = None
    """The folder with the copy of our source that the run uses; named after the digest of this copy."""
    packages: str | None = None
    """Digest of the installed packages at submission: shardlab.files.source_digest."""
    python: str | None = None
    """The path of the interpreter of the environment that the cell names; null: the interpreter that `jobs` used."""
    environment: str | None = None
    """Only in runs that older versions rendered: one digest of packages and source."""
    limit_s: WholeSeconds | None = None
    """Seconds after which the supervisor ends the run: the cell's or the scheduler's limit."""
    requeues: Count = 0
    """How often the run may be started again after a state for which `retry` has no number."""
    retry: Retry = Retry()
    """How often the run may be started again automatically, for each state in which it may end."""
    retried: list[str] = []
    """For each earlier attempt after which this attempt was submitted automatically: its state."""
    avoid: list[HostName] = []
    """Nodes that failed during earlier attempts and are not used."""
    shares_nodes: bool = False
    """Other jobs may run on the same nodes at the same time, which may change the speed of the run."""
    separate_folders: bool = False
    """The nodes share no folder: each node has its own part of the run's folder (docs/ssh.md)."""
    track: str | None = None
    """The experiment tracker to which the run is logged while it is running: shardlab.runs.trackers."""
    wait_gpus_s: WholeSeconds = 0
    """Seconds that the run waits for its GPUs before its ranks start, if other processes use them."""
    own_workload: OwnWorkload | None = None
    """The workload that a file of the workspace defines; the run folder has a copy."""
    own_strategy: OwnStrategy | None = None
    """The strategy that a file of the workspace defines; the run folder has a copy."""
    traces: TracePart | None = None
    """The traces that the run analyses instead of training (`jobs trace`)."""
    imported: list[ImportedFile] = []
    """The logs of another program from which the run was made (`collect import`); empty: shardlab trained."""
    search: BatchSearch | None = None
    """The search to which the run belongs; its supervisor starts the next try."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "cell", convert_to_training_cell(self.cell))

    @property
    def training_cell(self) -> Cell:
        """The cell of a run that shardlab trains. Raises TypeError for any other run."""
        return self.cell.require_training()

    @property
    def may_be_retried(self) -> bool:
        """Whether there is a state after which the run may be started again automatically."""
        return any(self.find_retry_limit(state) for state in Retry.__struct_fields__)

    @property
    def slurm_cluster(self) -> str | None:
        """The cluster of Slurm to which the run is submitted; None: the default cluster."""
        return self.cluster.get("slurm")

    def find_retry_limit(self, state: str) -> int:
        """How often the run may be started again automatically after it ended in this state."""
        return self.retry.find_retry_limit(state, self.requeues, on_slurm=self.scheduler == "slurm")


def is_rehearsal(cell: AnyCell, cluster: Mapping[str, str], *, on_cpu: bool) -> bool:
    """Whether a run is a rehearsal: its numbers say nothing about the speed that they stand for, because its ranks compute on a
    CPU, its cell is a tiny twin, or its nodes are practice nodes.

    cluster: as in `Run`. on_cpu: whether a rank that trains computes on a CPU.
    """
    return on_cpu or cell.rehearses is not None or cluster.get("provider") == "virtual"


def make_run_id(cell: AnyCell, repeat: int, attempt: int = 1) -> str:
    """The id of a run, which is also the name of its folder: the cell's name, the repeat, and the attempt if it is not 1."""
    first_attempt_id = f"{cell.name()}-r{repeat}"
    return first_attempt_id if attempt == 1 else f"{first_attempt_id}-a{attempt}"


class RunIdParts(msgspec.Struct, frozen=True):
    """The parts of a run id."""

    cell_name: str
    """The name of the cell."""
    repeat: int
    attempt: int
    first_attempt_id: str
    """The run id of the first attempt."""


def parse_run_id(run_name: str) -> RunIdParts | None:
    """The parts of a run id; None if the name does not have the form of an id that `run_id` makes."""
    match = _RUN_ID_PATTERN.fullmatch(run_name)
    return RunIdParts(match["cell"], int(match["repeat"]), int(match["attempt"] or 1), match["first"]) if match else None


def split_attempt(run_name: str) -> tuple[str, int]:
    """Split a run id into (the run id of the first attempt, the number of this attempt). For any other name: (name, 1)."""
    id_parts = parse_run_id(run_name)
    return (id_parts.first_attempt_id, id_parts.attempt) if id_parts else (run_name, 1)


def read_run(run_json_path: Path) -> Run:
    """Read a run.json. Raises InputError if the file is missing or damaged."""
    run = json_file.read_json(run_json_path, Run, "is not a run of this version: {}.")
    if run is None:
        raise InputError(f"{run_json_path}: no such run.")
    return run
