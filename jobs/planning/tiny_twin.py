"""Makes a small version of every cell of a matrix, its tiny twin, so that the whole matrix can be rehearsed in minutes.

The rules of `--scale tiny` are the same for every cell of a matrix:

- workload: NAME becomes NAME-tiny with the sizes of NAME-tiny, but with at least as many blocks and heads as pp and tp need.
  The data is synthetic. Sequences have at most 32 tokens. A workload that is tiny already is kept.
- ranks: strategy, gpus, dp, tp, pp, servers and the options of the strategy are kept. nnodes is 1: all ranks share this
  machine.
- buckets of DeepSpeed, which takes their memory whether the model fills them or not: their sizes are as much smaller as the
  model, and at most the model's, so that a step has as many buckets.
- batch: the number of passes per step (gradient accumulation, micro-batches of a pipeline) is kept. The micro-batch sizes of
  all cells with the same workload are divided by the same number: the largest number that divides all these sizes and, if
  possible, leaves no size below 2. So a study of strong or weak scaling, or a sweep over batch sizes, keeps its form.
- length: at most 6 steps or 2 epochs, with one warm-up step. An epoch has 4 batches of the largest global batch size of the
  workload's cells, so that the epochs of all cells have the same images. If the data has no epochs, the twin has steps
  instead.
- launcher: fork. One cell uses torchrun: the last of the cells with the fewest ranks above one.
- precision, optimizer, schedule, activation checkpointing, gradient clipping, seed and expected ends are kept. The time limit
  of a run is 5 minutes.
- faults on purpose: kept; a worker is lost at step 3 or earlier. A cell with a lost worker does not use torchrun, which ends
  all ranks.
- instruments: kept, but their windows are made to fit the few steps. A validation reads one batch of the largest global batch
  size, or 64 items if that is more, but never more items than an epoch has. A validation of the usual size would take many
  times as long as the training.
- settings that need a GPU, or that take longer than everything else together, are dropped (see `describe_dropped_settings`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from shardlab.errors import InputError
from shardlab.matrix.cell import AnyCell, Cell, Instruments, Schedule, select_trainings
from trainers import menu
from trainers.workload import Workload

MOST_STEPS, MOST_EPOCHS, BATCHES_PER_EPOCH, MOST_WARMUP_STEPS = 6, 2, 4, 1
MOST_SEQ_LEN = 32
LEAST_MICRO_BATCH = 2  # a rehearsal with micro-batches of one item would not test the mean over a batch
BUCKET_OPTIONS = ("reduce_bucket_size", "allgather_bucket_size")  # sizes in elements
TIME_LIMIT_S = 300  # time limit of a twin, in seconds
LATEST_LOSS_STEP = 3  # the latest step at which a twin loses a worker, so that steps before and after the loss are left
VALIDATED_ITEMS = 64  # the number of items that a validation reads, unless a batch has more items or an epoch has fewer
FORK_LAUNCHER, TORCHRUN_LAUNCHER = "fork", "torchrun"


def make_twins(all_cells: Sequence[AnyCell], workload_by_name: Mapping[str, Workload]) -> list[Cell]:
    """The tiny twin of each cell, in the order of the cells; no two twins are equal.

    workload_by_name: all workloads by name. Raises InputError if a workload has no tiny version, as the program of a user.
    """
    cells = select_trainings(all_cells)
    if len(cells) < len(all_cells):
        raise InputError("--scale tiny: a command has no tiny twin. Allowed: a matrix whose workloads shardlab trains.")
    cells_by_workload: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        cells_by_workload[cell.workload].append(cell)
    divisor_by_workload = {
        workload_name: _find_largest_divisor([cell.micro_batch_size for cell in workload_cells])
        for workload_name, workload_cells in cells_by_workload.items()
    }
    images_by_workload = {
        workload_name: BATCHES_PER_EPOCH
        * max(cell.global_batch_size for cell in workload_cells)
        // divisor_by_workload[workload_name]
        for workload_name, workload_cells in cells_by_workload.items()
    }
    torchrun_index = min(
        (index for index, cell in enumerate(cells) if cell.world_size > 1 and cell.instruments.lost_worker is None),
        key=lambda index: (cells[index].world_size, -index),
        default=None,
    )
    return [
        _make_twin(
            cell,
            _find_tiny_workload(cell.workload, workload_by_name),
            parameters=workload_by_name[cell.workload].parameters,
            divisor=divisor_by_workload[cell.workload],
            image_count=images_by_workload[cell.workload],
            launcher=TORCHRUN_LAUNCHER if index == torchrun_index else FORK_LAUNCHER,
        )
        for index, cell in enumerate(cells)
    ]


def must_train(twins: Sequence[Cell]) -> None:
    """Raises InputError if a twin cannot be trained. This can happen although the original cell can be trained, because the
    twin has other sizes."""
    for twin in twins:
        if (why := menu.refuse(twin)) is not None:
            cell_name = twin.rehearses.name() if twin.rehearses else twin.name()
            raise InputError(f"--scale tiny: the twin of {cell_name} cannot be trained: {why}")


def describe_dropped_settings(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each setting that the tiny twins of these cells do not have, with the reason and the number of cells that
    have the setting."""
    setting_reasons = (
        (
            "memory: snapshot",
            "it records the CUDA allocator, which a CPU lacks",
            lambda cell: cell.instruments.memory == "snapshot",
        ),
        ("compile", "compiling a model takes longer on two processors than all its tiny steps", lambda cell: cell.compile),
        ("memory_limit_gib", "the limit is meant for the model at full size", lambda cell: cell.memory_limit_gib is not None),
        ("gpu_type", "no rank uses a GPU", lambda cell: cell.gpu_type is not None),
        ("nnodes", "all ranks share this machine", lambda cell: cell.nnodes > 1),
    )
    counted_reasons = [(setting, why, sum(map(has_setting, cells))) for setting, why, has_setting in setting_reasons]
    return [f"scale tiny leaves out {setting} of {count} cell(s): {why}." for setting, why, count in counted_reasons if count]


def _find_tiny_workload(workload_name: str, workload_by_name: Mapping[str, Workload]) -> Workload:
    tiny_name = workload_name if workload_name.endswith("-tiny") else f"{workload_name}-tiny"
    if tiny_name not in workload_by_name:
        allowed_names = ", ".join(menu_name for menu_name in workload_by_name if f"{menu_name}-tiny" in workload_by_name)
        raise InputError(f"--scale tiny: {workload_name} has no tiny twin. Allowed workloads: {allowed_names}.")
    return workload_by_name[tiny_name]


def _find_largest_divisor(micro_batch_sizes: Sequence[int]) -> int:
    """The largest number that divides all sizes so that no quotient is below LEAST_MICRO_BATCH; 1 if there is no such
    number."""
    common_divisor = math.gcd(*micro_batch_sizes)
    common_divisors = [
        divisor
        for divisor in range(1, common_divisor + 1)
        if common_divisor % divisor == 0 and min(micro_batch_sizes) // divisor >= LEAST_MICRO_BATCH
    ]
    return max(common_divisors, default=1)


def _shrink_bucket(elements: int, parameters: int, tiny_parameters: int) -> int:
    """The size of a bucket for the tiny twin of a model; DeepSpeed refuses odd sizes."""
    return 2 * max(1, min(round(elements * tiny_parameters / parameters), tiny_parameters + 1) // 2)


def _make_twin(cell: Cell, workload: Workload, *, parameters: int, divisor: int, image_count: int, launcher: str) -> Cell:
    """The tiny twin of a cell. workload: the tiny workload. parameters: of the model of the cell."""
    option_defaults = {option.name: option.default for option in workload.options}
    options = {name: value for name, value in cell.options.items() if name not in option_defaults}
    for bucket_option in BUCKET_OPTIONS:
        if isinstance(elements := options.get(bucket_option), int):
            options[bucket_option] = _shrink_bucket(elements, parameters, workload.parameters)
    kept_options = {
        name: cell.options[name] for name in ("dropout", "subset_seed") if name in option_defaults and name in cell.options
    }
    options |= option_defaults | kept_options | ({"data": "synthetic"} if "data" in option_defaults else {})
    for name, least_size in ((workload.blocks, cell.pp * cell.stages_per_rank), (workload.heads, cell.tp)):
        if name is not None:
            value = options[name]
            assert isinstance(value, int)
            options[name] = max(value, least_size)
    steps, epochs = cell.steps, cell.epochs
    if epochs is not None and "subset" in option_defaults:
        epochs = min(epochs, MOST_EPOCHS)
        options["subset"] = image_count
    else:
        steps, epochs = min(steps or MOST_STEPS, MOST_STEPS), None
    return msgspec.structs.replace(
        cell,
        workload=workload.name,
        nnodes=1,
        gpu_type=None,
        launcher=launcher,
        global_batch_size=cell.global_batch_size // divisor,
        micro_batch_size=cell.micro_batch_size // divisor,
        seq_len=min(cell.seq_len, MOST_SEQ_LEN) if cell.seq_len is not None else None,
        steps=steps,
        epochs=epochs,
        warmup_steps=min(cell.warmup_steps, MOST_WARMUP_STEPS),
        compile=False,
        schedule=_shorten_schedule(cell.schedule),
        instruments=_shorten_instruments(
            cell.instruments, min(image_count, max(VALIDATED_ITEMS, image_count // BATCHES_PER_EPOCH))
        ),
        memory_limit_gib=None,
        time_limit_s=TIME_LIMIT_S,
        options=options,
        workload_code=workload.code,
        rehearses=cell,
    )


def _shorten_schedule(schedule: Schedule) -> Schedule:
    return msgspec.structs.replace(schedule, lr_warmup_steps=min(schedule.lr_warmup_steps, MOST_WARMUP_STEPS))


def _shorten_instruments(instruments: Instruments, validated_items: int) -> Instruments:
    """The instruments of a twin: the same instruments, with windows that fit into the twin's steps.

    Checkpoints and validations happen every 2 steps or every epoch. validated_items: the number of items that a validation
    reads."""
    profile, validation, checkpoints = instruments.profile, instruments.validation, instruments.checkpoints
    if profile is not None:
        profile = msgspec.structs.replace(profile, first_step=min(profile.first_step, 3), steps=min(profile.steps, 2))
    if validation is not None:
        validation = msgspec.structs.replace(
            validation,
            items=validated_items,
            every_steps=validation.every_steps and 2,
            every_epochs=validation.every_epochs and 1,
        )
    if checkpoints is not None:
        checkpoints = msgspec.structs.replace(
            checkpoints, every_steps=checkpoints.every_steps and 2, every_epochs=checkpoints.every_epochs and 1
        )
    lost_worker_fault = instruments.lost_worker
    if lost_worker_fault is not None:
        lost_worker_fault = msgspec.structs.replace(lost_worker_fault, step=min(lost_worker_fault.step, LATEST_LOSS_STEP))
    memory = "peak" if instruments.memory == "snapshot" else instruments.memory
    memory_steps = min(instruments.memory_steps, 1 if profile else 3)
    return msgspec.structs.replace(
        instruments, memory=memory, memory_steps=memory_steps, profile=profile, validation=validation, checkpoints=checkpoints,
        lost_worker=lost_worker_fault,
    )  # fmt: skip
