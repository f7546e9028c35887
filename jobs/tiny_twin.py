"""Makes of every cell of a matrix a small version, its tiny twin, so that the whole matrix can be rehearsed in minutes.

The rule (`--scale tiny`), the same for every cell of a matrix:

- workload: NAME becomes NAME-tiny at the twin's own sizes, with at least as many blocks and heads as pp and tp need; data
  is synthetic; sequences have at most 32 tokens. A workload that is tiny already stays.
- ranks: strategy, gpus, dp, tp, pp, servers and the strategy's options stay. nnodes is 1: all ranks share this machine.
- batch: passes a step (accumulation, a pipeline's microbatches) stay. The micro-batches of all cells with one workload are
  divided by one number, the largest that leaves them whole and, if possible, not below 2. So a strong or weak scaling, or
  a sweep, stays one.
- length: steps are at most 6, epochs at most 2. An epoch is 4 batches of the largest global batch of the workload's cells,
  so that every cell has epochs of the same images; if the data has no epochs, the twin has steps instead. One warm-up step.
- launcher: fork. One cell uses torchrun: the last of the cells with the fewest ranks above one.
- precision, optimizer, schedule, checkpointing, clipping, seed and expected ends stay. A run may take 5 minutes.
- instruments stay, on windows that fit; a validation looks at as many items as an epoch has, at most 64 where that
  is a batch of every cell: on small batches it would take many times as long as the training.
- settings that need a GPU, and those that take longer than all the rest, are dropped (see `dropped`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from shardlab.cell import Cell, Instruments, Schedule
from shardlab.errors import InputError
from trainers import menu
from trainers.workload import Workload

STEPS, EPOCHS, BATCHES_AN_EPOCH, WARMUP_STEPS = 6, 2, 4, 1
SEQ_LEN = 32
LEAST_MICRO_BATCH = 2  # a mean over one image shows little
LIMIT_S = 300
VALIDATED = 64  # items
FORK, TORCHRUN = "fork", "torchrun"


def twins(cells: Sequence[Cell], workloads: Mapping[str, Workload]) -> list[Cell]:
    """The tiny twin of each cell, in their order, all of them different. Raises InputError for a workload without one."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.workload].append(cell)
    divisors = {name: _divisor([cell.micro_batch_size for cell in group]) for name, group in groups.items()}
    images = {
        name: BATCHES_AN_EPOCH * max(cell.global_batch_size for cell in group) // divisors[name]
        for name, group in groups.items()
    }
    launched = min(
        (number for number, cell in enumerate(cells) if cell.world_size > 1),
        key=lambda number: (cells[number].world_size, -number),
        default=None,
    )
    return [
        _twin(
            cell,
            _workload(cell.workload, workloads),
            divisor=divisors[cell.workload],
            images=images[cell.workload],
            launcher=TORCHRUN if number == launched else FORK,
        )
        for number, cell in enumerate(cells)
    ]


def must_train(twins: Sequence[Cell]) -> None:
    """Raises InputError for a twin that cannot be trained although its cell can: the sizes of a twin are its own."""
    for twin in twins:
        if (why := menu.refuse(twin)) is not None:
            of = twin.rehearses.name() if twin.rehearses else twin.name()
            raise InputError(f"--scale tiny: the twin of {of} cannot be trained: {why}")


def dropped(cells: Sequence[Cell]) -> list[str]:
    """What the twins of these cells leave out, with the reason and how many cells had it."""
    reasons = (
        ("memory: snapshot", "it records the CUDA allocator, which a CPU lacks", lambda c: c.instruments.memory == "snapshot"),
        ("compile", "compiling a model takes longer on two processors than all its tiny steps", lambda c: c.compile),
        ("memory_limit_gib", "the limit is meant for the model at full size", lambda c: c.memory_limit_gib is not None),
        ("gpu_type", "no rank uses a GPU", lambda c: c.gpu_type is not None),
        ("nnodes", "all ranks share this machine", lambda c: c.nnodes > 1),
    )
    counted = [(what, why, sum(map(had, cells))) for what, why, had in reasons]
    return [f"scale tiny leaves out {what} of {count} cell(s): {why}." for what, why, count in counted if count]


def _workload(name: str, workloads: Mapping[str, Workload]) -> Workload:
    tiny = name if name.endswith("-tiny") else f"{name}-tiny"
    if tiny not in workloads:
        allowed = ", ".join(other for other in workloads if f"{other}-tiny" in workloads)
        raise InputError(f"--scale tiny: {name} has no tiny twin. Allowed workloads: {allowed}.")
    return workloads[tiny]


def _divisor(sizes: Sequence[int]) -> int:
    """The largest number that divides all sizes and leaves none below LEAST_MICRO_BATCH, or below 1 where that cannot be."""
    common = math.gcd(*sizes)
    able = [d for d in range(1, common + 1) if common % d == 0 and min(sizes) // d >= LEAST_MICRO_BATCH]
    return max(able, default=1)


def _twin(cell: Cell, workload: Workload, *, divisor: int, images: int, launcher: str) -> Cell:
    own = {option.name: option.default for option in workload.options}
    options = {name: value for name, value in cell.options.items() if name not in own}
    kept = {name: cell.options[name] for name in ("dropout", "subset_seed") if name in own and name in cell.options}
    options |= own | kept | ({"data": "synthetic"} if "data" in own else {})
    stages_a_rank = cell.options.get("stages_per_rank", 1)
    assert isinstance(stages_a_rank, int)
    for name, least in ((workload.blocks, cell.pp * stages_a_rank), (workload.heads, cell.tp)):
        if name is not None:
            size = options[name]
            assert isinstance(size, int)
            options[name] = max(size, least)
    steps, epochs = cell.steps, cell.epochs
    if epochs is not None and "subset" in own:
        epochs = min(epochs, EPOCHS)
        options["subset"] = images
    else:
        steps, epochs = min(steps or STEPS, STEPS), None
    return msgspec.structs.replace(
        cell,
        workload=workload.name,
        nnodes=1,
        gpu_type=None,
        launcher=launcher,
        global_batch_size=cell.global_batch_size // divisor,
        micro_batch_size=cell.micro_batch_size // divisor,
        seq_len=min(cell.seq_len, SEQ_LEN) if cell.seq_len is not None else None,
        steps=steps,
        epochs=epochs,
        warmup_steps=min(cell.warmup_steps, WARMUP_STEPS),
        compile=False,
        schedule=_schedule(cell.schedule),
        instruments=_instruments(cell.instruments, min(images, max(VALIDATED, images // BATCHES_AN_EPOCH))),
        memory_limit_gib=None,
        time_limit_s=LIMIT_S,
        options=options,
        workload_code=workload.code,
        rehearses=cell,
    )


def _schedule(schedule: Schedule) -> Schedule:
    return msgspec.structs.replace(schedule, lr_warmup_steps=min(schedule.lr_warmup_steps, WARMUP_STEPS))


def _instruments(asked: Instruments, validated: int) -> Instruments:
    """The same on windows that fit into a twin's steps; a checkpoint or a validation, of `validated` items, every 2 steps or
    each epoch."""
    profile, validation, checkpoints = asked.profile, asked.validation, asked.checkpoints
    if profile is not None:
        profile = msgspec.structs.replace(profile, first_step=min(profile.first_step, 3), steps=min(profile.steps, 2))
    if validation is not None:
        validation = msgspec.structs.replace(
            validation, items=validated, every_steps=validation.every_steps and 2, every_epochs=validation.every_epochs and 1
        )
    if checkpoints is not None:
        checkpoints = msgspec.structs.replace(
            checkpoints, every_steps=checkpoints.every_steps and 2, every_epochs=checkpoints.every_epochs and 1
        )
    memory = "peak" if asked.memory == "snapshot" else asked.memory
    return msgspec.structs.replace(asked, memory=memory, profile=profile, validation=validation, checkpoints=checkpoints)
