"""A cell: one combination of the values in a matrix. `Draft`: as the matrix file states it. `AnyCell`, `Cell`: resolved."""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from shardlab.files.decoders import get_decoder
from shardlab.matrix.command import Command, mark_label
from shardlab.matrix.faults import LostWorker, SlowedRank
from shardlab.matrix.gradient_sync import LAST_PASS
from shardlab.record_types import Count, Integer, Measured, PlainWord, Positive, Ranks, ShortName, WholeSeconds, limit_text

FASTEST_HZ = 50.0  # largest rate of telemetry; at 100 Hz, the sampler made the ranks on its node slower by a fifth
SLOWEST_HZ = 0.5  # smallest rate of telemetry: 1 sample in 2 s, because a node without samples for 10 s may be treated as lost
TELEMETRY_HZ = 2.0  # default rate of telemetry
ServerCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Checkpointing = Annotated[
    str,
    limit_text(
        r"^(none|full|every-[1-9][0-9]{0,3}|segments-[1-9][0-9]{0,3})\Z",
        "none, full, every-N or segments-N with a number from 1 to 9999",
    ),
]
EnvironmentName = ShortName  # as in the cluster file
GpuType = PlainWord
# Options that belong to strategies, also if all cells of a matrix have them. With this value, an option is not in the hash of a
# cell, because cells of older versions lack the option.
STRATEGY_OPTIONS = {"sync": LAST_PASS}
# All options that are not in the hash of a cell if they have these values, because cells of older versions lack them.
NEWER_OPTIONS: dict[str, object] = {**STRATEGY_OPTIONS, "dropout": None}
Scalar = bool | Integer | Measured | str
IMPORTED_PREFIX = "imported-"  # the beginning of the names of cells that `collect import` makes
Precision = Literal["fp32", "tf32", "bf16", "bf16-autocast", "fp16", "fp16-autocast", "bf16-pure"]
# states in which a run can end
State = Literal["completed", "oom", "timeout", "failed", "cancelled", "node_fail", "preempted", "hung"]


class Role(enum.Enum):
    """What a key of a cell decides. Each key of `AnyCell` has one role; `find_role_keys` finds the keys that have a role."""

    MODEL = enum.auto()  # which model, and the shape of its inputs
    PRECISION = enum.auto()
    OPTIMIZER = enum.auto()
    CLIPPING = enum.auto()  # how gradients are changed before the optimizer uses them
    DATA = enum.auto()  # which items of the data set are trained in which step
    LENGTH = enum.auto()  # how long a run trains, and the learning rate over this time
    STRATEGY = enum.auto()  # how ranks share the work
    EXECUTION = enum.auto()  # how a rank computes its part of the model
    RANKS = enum.auto()  # the number of ranks of each kind
    PASSES = enum.auto()  # how a rank divides its part of a batch into passes
    NODES = enum.auto()
    PLATFORM = enum.auto()  # the accelerators and packages with which a run trains; results on two platforms are never averaged
    START = enum.auto()  # what starts a rank, and what the rank may use
    INSTRUMENTS = enum.auto()
    BOOKKEEPING = enum.auto()  # keys that cannot change what is measured


class Optimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """The update rule. sgd has momentum; adam and adamw have beta1, beta2, eps and fused."""

    name: Literal["sgd", "adam", "adamw"]
    """The update rule."""
    lr: Annotated[float, msgspec.Meta(gt=0, le=1e150)]
    """The learning rate after the warm-up, before `schedule` scales or reduces it."""
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    """The momentum of sgd."""
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1e150)] = 0.0
    """The coefficient of the weight decay; 0: no weight decay."""
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    """The decay rate of the running mean of gradients (adam, adamw)."""
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.999
    """The decay rate of the running mean of squared gradients (adam, adamw)."""
    eps: Annotated[float, msgspec.Meta(gt=0, le=1e150)] = 1e-8
    """The number that is added to the denominator of the update (adam, adamw)."""
    fused: bool = True
    """true: one operator updates all parameters. false: torch uses foreach operators on a GPU and a loop on a CPU. sgd ignores
    this key, because torch has no fused sgd for sharded parameters."""

    @property
    def state_tensor_count(self) -> int:
        """The number of tensors that the optimizer keeps for each parameter, each of the size of the parameter."""
        match self.name:
            case "sgd":
                return 1 if self.momentum else 0
            case "adam" | "adamw":
                return 2


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """The learning rate over the run: a linear warm-up, then constant, or a cosine or linear decay to 0."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate changes after the warm-up."""
    lr_warmup_steps: Count = 0
    """Number of steps of the linear warm-up."""
    lr_scaling: Literal["none", "linear"] = "none"
    """linear: the optimizer's lr is multiplied by the number of data-parallel ranks (Goyal et al., 2017, section 2.1)."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Profiles timed steps with torch.profiler and writes traces in Chrome's format."""

    first_step: Positive = 3
    """The first timed step that is profiled; timed steps count from 1."""
    steps: Positive = 2
    """Number of steps that are profiled."""
    ranks: list[Count] = msgspec.field(default_factory=lambda: [0])
    """The ranks that are profiled."""
    shapes: bool = False
    """Whether the shapes of inputs are recorded for each operator."""
    stacks: bool = False
    """Whether the call stack is recorded for each operator."""
    memory: bool = False
    """Whether allocations are recorded for each operator."""


class Recurring(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """An interval in steps or in epochs: exactly one of the two is given, which is checked when the file is read."""

    every_steps: Positive | None = None
    """The interval in steps."""
    every_epochs: Positive | None = None
    """The interval in epochs."""

    def interval_steps(self, steps_per_epoch: int) -> int:
        """The interval in steps, whether it was given in steps or in epochs. steps_per_epoch: the number of steps of an
        epoch."""
        return self.every_steps or (self.every_epochs or 1) * steps_per_epoch


class Validation(Recurring, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Computes loss and accuracy on the validation split, at an interval and after the last step."""

    items: Positive | None = None
    """The validation uses the first `items` items of the split; null: all items."""


class CheckpointSettings(Recurring, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Saves checkpoints, from which training can resume."""

    keep: Positive = 2
    """Number of checkpoints that are kept; older ones are deleted."""
    layout: Literal["sharded", "whole"] = "sharded"
    """sharded: each rank writes its shards. whole: one rank gathers all shards and writes them."""
    time_loading: bool = False
    """Whether the newest checkpoint is loaded again after the last step, to measure how long loading takes."""


class Instruments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """What is measured while a run trains, and what is done to it on purpose. Times, losses and peak memory are always
    measured."""

    memory: Literal["peak", "categories", "snapshot"] = "peak"
    """peak: only peak memory. categories: also what the memory contains. snapshot: also blocks and history of the CUDA
    allocator."""
    memory_steps: Positive = 1
    """The number of consecutive steps that `memory: categories` observes, from timed step 2 on."""
    profile: Profile | None = None
    """Settings of the profiler; null: the profiler is off."""
    validation: Validation | None = None
    """Settings of the validation; null: validation is off."""
    checkpoints: CheckpointSettings | None = None
    """Settings of the checkpoints; null: no checkpoints are saved."""
    telemetry_hz: Annotated[float, msgspec.Meta(ge=SLOWEST_HZ, le=FASTEST_HZ)] = TELEMETRY_HZ
    """Samples of telemetry per second on each node. The sampler costs processor time, so a rate is an instrument."""
    straggler: SlowedRank | None = None
    """A rank that is slowed on purpose; null: none."""
    lost_worker: LostWorker | None = None
    """A rank whose process ends on purpose in the middle of the run; null: none."""


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cell as it is written in a matrix file, with all keys that are allowed there."""

    workload: str
    """The model, its data and its loss (`jobs workloads`)."""
    strategy: str
    """How ranks share the work (`jobs strategies`)."""
    gpus: Ranks = 1
    """The number of ranks that train, each on its own GPU. On a machine without GPUs, each rank is a process on the CPU."""
    nnodes: Ranks | None = None
    """The number of nodes; null: as few as the cluster allows."""
    gpu_type: GpuType | None = None
    """The GPU type, as the cluster file names it; null: the GPUs of the default partition."""
    environment: EnvironmentName | None = None
    """The Python environment, by its name under `environments` of the cluster file; null: the default environment."""
    tp: Ranks | None = None
    """The tensor-parallel degree; null: `gpus` divided by the strategy's other degrees, of which none may then be null."""
    pp: Ranks | None = None
    """The pipeline-parallel degree; null: `gpus` divided by the strategy's other degrees, of which none may then be null."""
    dp: Ranks | None = None
    """The data-parallel degree; null: `gpus` divided by the strategy's other degrees, of which none may then be null."""
    servers: Ranks | None = None
    """The number of parameter servers, which are ranks besides `gpus`; null: 1 if the strategy has parameter servers."""
    launcher: str = "torchrun"
    """The program that starts the ranks (`jobs launchers`)."""
    global_batch_size: Positive | None = None
    """Units of data (images, sequences) in one optimizer step over all ranks. Either this key or gpu_batch_size is required."""
    gpu_batch_size: Positive | None = None
    """Units of data per data-parallel rank and optimizer step; the global batch then grows with the number of ranks."""
    micro_batch_size: Positive | None = None
    """Units of data per data-parallel rank and forward pass; null: a rank's whole share of the batch in one pass."""
    microbatches: Positive | None = None
    """The number of forward passes of a step on each rank. Give this key or micro_batch_size, not both."""
    seq_len: Positive | None = None
    """The number of tokens of a sequence; null: the default of the workload."""
    steps: Positive | None = None
    """The number of timed steps. Either this key or epochs is required."""
    epochs: Positive | None = None
    """The number of timed passes over the data set. Either this key or steps is required."""
    warmup_steps: Count = 0
    """Steps that run before the timed steps and are not timed."""
    precision: Precision = "fp32"
    """The number format of the computation. The same format is the same computation in every strategy (docs/strategies.md)."""
    activation_checkpointing: Checkpointing = "none"
    """none: off. full: every block is recomputed. every-K: each K-th block is recomputed. segments-N: the blocks form N
    segments of nearly equal length; each segment except the last is recomputed as a whole."""
    compile: bool = False
    """Whether torch.compile compiles the blocks of the model."""
    max_grad_norm: Annotated[float, msgspec.Meta(gt=0, le=1e150)] | None = None
    """A gradient with a larger global L2 norm is scaled down to this norm; null: no limit."""
    prove: Literal["auto", "off"] = "auto"
    """auto: the same-work proof runs, once for all cells with the same computation. off: it does not run."""
    optimizer: Optimizer | None = None
    """The update rule; null: the default of the workload."""
    schedule: Schedule = msgspec.field(default_factory=Schedule)
    """How the learning rate changes during the run."""
    instruments: Instruments = msgspec.field(default_factory=Instruments)
    """What is measured while the cell trains."""
    memory_limit_gib: Annotated[float, msgspec.Meta(gt=0, le=1e150)] | None = None
    """The limit in GiB of a rank's memory on its GPU, or on the host if the rank has no GPU; null: no limit."""
    seed: Count = 42
    """The seed of the initial weights, of the order of the data, and of dropout."""
    time_limit: str | None = None
    """The time as HH:MM:SS after which the run is ended as `timeout`; null: no limit."""
    hang_limit: str = "00:30:00"
    """The time as HH:MM:SS after which a run without progress, such as a new step, is ended as `hung`."""
    expect: list[State] = []
    """End states besides `completed` that are expected of the runs of this cell, such as oom."""
    options: dict[str, bool | Integer | Measured | str | None] = {}
    """Options of the strategy and the workload (`jobs strategies`, `jobs workloads`)."""
    set: dict[str, Scalar] = {}
    """Values of a command's own, by their names: the placeholder {set.NAME} stands for a value."""
    env: dict[str, Scalar] = {}
    """Environment variables of the ranks, by their names."""


class AnyCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=False, dict=True):
    """A resolved cell: every value is explicit, and none depends on a default of another program.

    `Cell` is a cell that shardlab trains, so all its values are known. The runs of any other cell execute a program that
    shardlab does not know; what only a training by shardlab has is then null.
    """

    workload: Annotated[str, Role.MODEL]
    """The model, its data and its loss."""
    strategy: Annotated[str, Role.STRATEGY]
    """How ranks share the work."""
    gpus: Annotated[Ranks, Role.RANKS]
    """Ranks that train, one accelerator each (one process each on a machine without GPUs) = dp x tp x pp."""
    nnodes: Annotated[Ranks, Role.NODES] = 1
    """Number of nodes."""
    dp: Annotated[Ranks | None, Role.RANKS] = None
    """The data-parallel degree."""
    tp: Annotated[Ranks | None, Role.STRATEGY] = None
    """The tensor-parallel degree."""
    pp: Annotated[Ranks | None, Role.RANKS] = None
    """The pipeline-parallel degree."""
    servers: Annotated[ServerCount, Role.RANKS] = 0
    """Further ranks, parameter servers."""
    launcher: Annotated[str, Role.START] = "torchrun"
    """What starts the ranks."""
    global_batch_size: Annotated[Positive | None, Role.DATA] = None
    """Units of data (images, sequences) in one optimizer step over all ranks."""
    micro_batch_size: Annotated[Positive | None, Role.PASSES] = None
    """Units per data-parallel rank and forward pass; `gradient_accumulation_steps` passes make a step (under a pipeline these
    are its microbatches). steps or epochs: the timed length, exactly one of them; `warmup_steps` run before it, untimed, on
    top."""
    gradient_accumulation_steps: Annotated[Positive | None, Role.PASSES] = None
    """Passes of a step on each rank."""
    seq_len: Annotated[Positive | None, Role.MODEL] = None
    """Tokens of a sequence; null: no sequences."""
    steps: Annotated[Positive | None, Role.LENGTH] = None
    """Timed steps; null: `epochs` counts."""
    epochs: Annotated[Positive | None, Role.LENGTH] = None
    """Passes over the data set; null: `steps` counts."""
    warmup_steps: Annotated[Count, Role.LENGTH] = 0
    """Untimed steps before the timed steps."""
    precision: Annotated[Precision | None, Role.PRECISION] = None
    """Number format of the computation."""
    activation_checkpointing: Annotated[Checkpointing | None, Role.EXECUTION] = None
    """None; full (every block); every-K (each K-th block); segments-N (the blocks in N segments of nearly equal length; each
    segment but the last is recomputed as a whole)."""
    compile: Annotated[bool | None, Role.EXECUTION] = None
    """Whether torch.compile compiles the blocks."""
    max_grad_norm: Annotated[Measured | None, Role.CLIPPING] = None
    """A gradient with a larger global L2 norm is scaled down to this norm; null: no limit."""
    prove: Annotated[str, Role.BOOKKEEPING] = "auto"
    """Auto runs the same-work proof once per distinct computation."""
    optimizer: Annotated[Optimizer | None, Role.OPTIMIZER] = None
    """The update rule."""
    schedule: Annotated[Schedule | None, Role.LENGTH] = None
    """The learning rate over the run."""
    instruments: Annotated[Instruments, Role.INSTRUMENTS] = msgspec.field(default_factory=Instruments)
    """What is measured while it trains."""
    memory_limit_gib: Annotated[Measured | None, Role.START] = None
    """Limit of a rank's memory on its GPU, or on the host if the rank has no GPU; null: no limit."""
    seed: Annotated[Count | None, Role.DATA] = None
    """Seed of weights, order of data and dropout."""
    time_limit_s: Annotated[WholeSeconds | None, Role.BOOKKEEPING] = None
    """Seconds after which the run is ended as `timeout`; null: no limit."""
    expect: Annotated[list[State], Role.BOOKKEEPING] = []
    """End states that are expected of this cell, besides completed."""
    options: Annotated[dict[str, bool | Integer | Measured | str | None], Role.STRATEGY] = {}
    """Of the strategy and the workload, with their defaults written out."""
    rehearses: Annotated[AnyCell | None, Role.BOOKKEEPING] = None
    """The original cell if this cell is its tiny twin, which is small enough to run anywhere; else null."""
    # A run.json of an older version lacks the fields from here on.
    hang_limit_s: Annotated[WholeSeconds, Role.BOOKKEEPING] = 1800
    """Seconds without a step, or another sign of progress, after which the run is ended as `hung`."""
    gpu_type: Annotated[GpuType | None, Role.PLATFORM] = None
    """The GPU type, as the cluster file names it; null: the GPUs of the default partition.

    The same training on another GPU type is another cell with another hash. So no mean is computed over runs on two GPU types,
    and the baseline of a speed-up has the same GPU type. The role is PLATFORM, because other hardware changes every measured
    time but not the work: `collect compare` pairs cells of one GPU type with cells of another type and names both types, and a
    run may resume from a checkpoint that was saved on another type.
    """
    workload_code: Annotated[str | None, Role.MODEL] = None
    """The digest of the files of the workspace that define the workload (shardlab/files/plugin_source.py); null: shardlab ships
    it.

    So two workloads that have the same name but different files belong to different cells.
    """
    strategy_code: Annotated[str | None, Role.STRATEGY] = None
    """The digest of the files of the workspace that define the strategy; null: shardlab ships the strategy."""
    environment: Annotated[EnvironmentName | None, Role.PLATFORM] = None
    """The Python environment, by its name under `environments` of the cluster file; null: the default environment. As with
    `gpu_type`, the same training in another environment is another cell."""
    command: Annotated[Command | None, Role.MODEL] = None
    """The command line of the user that the runs execute; null: shardlab trains the cell, or analyses traces."""
    set: Annotated[dict[str, Scalar], Role.MODEL] = {}
    """The values of `set` in the matrix, by name, which the command line contains."""
    env: Annotated[dict[str, str], Role.EXECUTION] = {}
    """Environment variables of the ranks, by name."""
    imported: Annotated[str | None, Role.MODEL] = None
    """The labels that a person gave to a run that `collect import` made from logs of another program; null: shardlab trained
    the cell. Only workload, strategy and gpus of such a cell mean something, and they are labels; the logs do not state the
    other keys. The work is not known, so no other cell is compared with it."""

    @property
    def world_size(self) -> int:
        """The number of all processes: the ranks that train and the parameter servers."""
        return self.gpus + self.servers

    @property
    def strategy_text(self) -> str:
        """The strategy as tables show it: that of a command is marked as a label."""
        return self.strategy if self.command is None else mark_label(self.strategy)

    @property
    def recording_ranks(self) -> int:
        """The number of ranks that record each step: all ranks, but only the first rank of a command, which need not tell the
        steps of the others."""
        return self.gpus if self.command is None else 1

    @property
    def data_ranks(self) -> int:
        """The number of ranks that train on data of their own: the data-parallel degree, or all ranks if it is not known."""
        return self.gpus if self.dp is None else self.dp

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages of a rank: the option of this name, or 1 if the strategy has no such option."""
        stages_option = self.options.get("stages_per_rank")
        return stages_option if isinstance(stages_option, int) else 1

    @property
    def sync(self) -> str:
        """Which passes of a step exchange gradients: the option of this name of FSDP, or last_pass if there is none."""
        return str(self.options.get("sync", LAST_PASS))

    def hash(self) -> str:
        """The hash of the cell: 12 hexadecimal digits. It depends on the values of the keys and not on the order of the keys.

        Keys with the role BOOKKEEPING cannot change the measured work and are left out: the time limits, the expected end
        states, and whether the same-work proof runs.
        """
        return self._hash

    @functools.cached_property
    def _hash(self) -> str:
        return compute_cell_hash(msgspec.to_builtins(self))

    def require_training(self) -> Cell:
        """This cell as one that shardlab trains. Raises TypeError for any other cell."""
        if not isinstance(self, Cell):
            raise TypeError(f"{self.name()} is not trained by shardlab")
        return self

    def name(self) -> str:
        """The name of the cell: a readable summary and the hash, at most 52 characters, allowed as the name of a folder."""
        name_summary = IMPORTED_PREFIX if self.imported is not None else ""
        name_summary += f"{self.strategy}-{self.workload}-g{self.gpus}"
        if self.global_batch_size is not None:
            name_summary += f"-b{self.global_batch_size}"
        if self.gradient_accumulation_steps not in (None, 1):
            name_summary += f"-a{self.gradient_accumulation_steps}"
        for degree_name, degree in (("tp", self.tp), ("pp", self.pp)):
            name_summary += f"-{degree_name}{degree}" if degree is not None and 1 < degree < self.gpus else ""
        if self.gpu_type is not None:
            name_summary += f"-{self.gpu_type}"
        if self.environment is not None:
            name_summary += f"-{self.environment}"
        if self.launcher != "torchrun":
            name_summary += f"-{self.launcher}"
        faults = (("slowed", self.instruments.straggler), ("lost", self.instruments.lost_worker))
        name_summary += "".join(f"-{fault_mark}" for fault_mark, fault in faults if fault is not None)
        name_summary = re.sub(r"[^a-z0-9._-]+", "-", name_summary.lower())[:39].strip("-._")
        return f"{name_summary}-{self.hash()}"


class Cell(AnyCell, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=False, dict=True):
    """A cell that shardlab trains: a workload under a strategy. Its fields mean the same as those of `AnyCell`."""

    dp: Annotated[Ranks, Role.RANKS]
    tp: Annotated[Ranks, Role.STRATEGY] = 1
    pp: Annotated[Ranks, Role.RANKS] = 1
    global_batch_size: Annotated[Positive, Role.DATA]
    micro_batch_size: Annotated[Positive, Role.PASSES]
    gradient_accumulation_steps: Annotated[Positive, Role.PASSES] = 1
    precision: Annotated[Precision, Role.PRECISION] = "fp32"
    activation_checkpointing: Annotated[Checkpointing, Role.EXECUTION] = "none"
    compile: Annotated[bool, Role.EXECUTION] = False
    optimizer: Annotated[Optimizer, Role.OPTIMIZER]
    schedule: Annotated[Schedule, Role.LENGTH] = msgspec.field(default_factory=Schedule)
    seed: Annotated[Count, Role.DATA] = 42
    rehearses: Annotated[Cell | None, Role.BOOKKEEPING] = None

    @property
    def gpu_batch_size(self) -> int:
        """Units of data per data-parallel rank and optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def shards(self) -> int:
        """The number of ranks over which a data-parallel strategy shards one copy of the model: all of them, or those of a
        replica if the strategy has the option `replicas`."""
        replicas_option = self.options.get("replicas")
        return self.dp // replicas_option if isinstance(replicas_option, int) and replicas_option else self.dp


def convert_to_training_cell(cell: AnyCell) -> AnyCell:
    """The same cell as a `Cell` if it has an optimizer, which every training by shardlab has; else the cell itself.

    Raises msgspec.ValidationError if a cell with an optimizer lacks another value of a training.
    """
    if cell.optimizer is None or isinstance(cell, Cell):
        return cell
    get_decoder(Cell)  # makes the conversion safe in several threads
    return msgspec.convert(cell, Cell, from_attributes=True)


def select_trainings(cells: Iterable[AnyCell]) -> list[Cell]:
    """The cells that shardlab trains, in their order."""
    return [cell for cell in cells if isinstance(cell, Cell)]


@functools.cache
def find_role_keys(*roles: Role) -> frozenset[str]:
    """The names of the keys of `AnyCell` whose role is one of these roles."""
    key_types = get_type_hints(AnyCell, include_extras=True)
    return frozenset(key for key, key_type in key_types.items() if any(role in key_type.__metadata__ for role in roles))


def compute_cell_hash(cell: dict[str, Any]) -> str:
    """The hash of a resolved cell. cell: its keys and values, as run.json has them. For a tiny twin, the original cell is part
    of the hash."""
    bookkeeping_keys = find_role_keys(Role.BOOKKEEPING)
    # not in the hash if null or empty: cells of older versions lack these keys
    newer_keys = ("gpu_type", "workload_code", "strategy_code", "environment", "command", "set", "env", "imported")
    unhashed_keys = {*bookkeeping_keys, *(key for key in newer_keys if cell.get(key) in (None, {}))}
    hashed_cell = {key: value for key, value in cell.items() if key not in unhashed_keys}
    # These keys of `instruments` are not in the hash if they have these values, for the same reason.
    default_instruments = (("telemetry_hz", TELEMETRY_HZ), ("memory_steps", 1), ("straggler", None), ("lost_worker", None))
    instruments = {key: value for key, value in hashed_cell["instruments"].items() if (key, value) not in default_instruments}
    if (checkpoints := instruments.get("checkpoints")) is not None and not checkpoints.get("time_loading"):
        instruments["checkpoints"] = {key: value for key, value in checkpoints.items() if key != "time_loading"}
    hashed_cell["instruments"] = instruments
    options = hashed_cell["options"].items()
    hashed_cell["options"] = {key: value for key, value in options if (key, value) not in NEWER_OPTIONS.items()}
    if cell.get("rehearses") is not None:
        hashed_cell["rehearses"] = compute_cell_hash(cell["rehearses"])
    return hashlib.sha256(msgspec.json.encode(hashed_cell, order="deterministic")).hexdigest()[:12]
