"""The same-work proof: compares a strategy's first steps with those of one process on the same weights and data.

Losses, gradient norms and the parameters after the last step must agree. The steps use SGD, also if the cell has another
optimizer: Adam divides by the size of the gradient and so hides a gradient of the wrong scale. The reference, the steps of one
process, uses no activation checkpointing and no compilation, but the precision and the gradient clipping of the cell.
Differences that are not errors are switched off for the strategy and the reference: dropout is off, and BatchNorm is frozen
(`trainers.model.frozen_statistics`).
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import torch

from shardlab.files import files
from shardlab.hardware import host
from shardlab.matrix.cell import Cell, Optimizer, Role, Schedule, find_role_keys
from shardlab.runs.record import SameWork
from trainers import communication, menu
from trainers.data.order import PROOF, DataOrder
from trainers.engine import Server
from trainers.instruments.timing import make_clock
from trainers.model import frozen_statistics
from trainers.proof import proof_seeds
from trainers.ranks.out_of_memory import is_out_of_memory
from trainers.strategy import Strategy

if TYPE_CHECKING:
    from trainers.engine import Engine
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task

# Number of steps, for a strategy with the same communication in every step. The bytes of the last step are counted.
LEAST_STEPS = 3
# If the communication of a strategy repeats only after more steps than this, its bytes are not counted.
MOST_COUNTED_STEPS = 64
# Keys of a cell that have no effect on the numbers of the proof.
KEYS_WITHOUT_EFFECT = find_role_keys(Role.NODES, Role.START, Role.LENGTH, Role.OPTIMIZER, Role.INSTRUMENTS, Role.BOOKKEEPING)
LIBRARIES = ("torch", "torchvision", "transformers", "deepspeed")  # the libraries whose versions can change the numbers
# The first loss scale for fp16. Torch's default of 65536 is not used, because with many models the first steps overflow; the
# strategy and the reference then skip these steps, and nothing is compared. With this scale, gradients overflow above
# 64 (65504 / scale) and vanish below 6e-11 (2^-24 / scale).
LOSS_SCALE = 2.0**10
SGD = Optimizer(name="sgd", lr=0.01, momentum=0.9)
# BatchNorm is frozen with the statistics of this many micro-batches, in one forward pass. Without gradients, they fit in
# memory. One micro-batch is not enough: with two items, some variances are almost 0, and they amplify rounding until equal work
# looks different (resnet50-tiny on 8 ranks: gradient norms differed by 8e-4 on some processors; with 8 micro-batches by 1e-7).
STATISTICS_BATCHES = 8


ONE_PROCESS: dict[str, Any] = {
    "strategy": "single", "strategy_code": None, "gpus": 1, "dp": 1, "tp": 1, "pp": 1, "servers": 0,
    "activation_checkpointing": "none", "compile": False,
}  # fmt: skip
"""The keys of the cell of the reference that differ from those of the run."""


class Tolerance(msgspec.Struct, frozen=True):
    """The allowed relative differences between a strategy and the reference."""

    loss: float
    """Relative to the loss of the reference."""
    gradient_norm: float
    """Relative to the gradient norm of the reference."""
    parameters: float
    """L2 distance, relative to the L2 distance that the reference's parameters moved."""


# The same numbers summed in another order give a result that differs by rounding. The relative rounding error is 2^-24 in fp32,
# 2^-11 in tf32 and fp16, and 2^-9 in bf16. A loss is a mean, in which many rounding errors cancel; the parameters add up the
# errors of all steps, so they get a larger tolerance. A wrong gradient scale, a missing rank or a wrong slice of data changes
# the numbers by tens of percent.
# With bf16-pure, the update of a weight is rounded too: the weight moves by a whole unit in the last place, or it stays. If two
# gradients differ by a relative error e, then about a share e of the moving weights end a whole unit apart. In the L2 norm, the
# movements then differ by sqrt(e) and not by e. sqrt(2^-9) is 4 %; where several such errors add up, it may be twice as much.
# The largest measured differences in loss, norm and parameters, in proofs as in tests/trainers/model/test_precision.py (each
# family, gpt2-tiny and vit-tiny, 2 to 8 ranks on a CPU): fp16 9e-5, 2.3e-4, 1.2e-3; bf16-pure 2.7e-4, 2.9e-3, 3.0e-2.
TOLERANCES = {
    "fp32": Tolerance(loss=2e-5, gradient_norm=1e-4, parameters=1e-3),
    "tf32": Tolerance(loss=1e-3, gradient_norm=5e-3, parameters=2e-2),
    "fp16": Tolerance(loss=1e-3, gradient_norm=5e-3, parameters=2e-2),
    "fp16-autocast": Tolerance(loss=1e-3, gradient_norm=5e-3, parameters=2e-2),
    "bf16": Tolerance(loss=2e-3, gradient_norm=1e-2, parameters=5e-2),
    "bf16-autocast": Tolerance(loss=2e-3, gradient_norm=1e-2, parameters=5e-2),
    "bf16-pure": Tolerance(loss=4e-3, gradient_norm=2e-2, parameters=1e-1),
}


class Trajectory(msgspec.Struct):
    """The results of the proof's steps on one rank."""

    losses: list[float]
    """The global loss of each step."""
    gradient_norms: list[float]
    """The global gradient norm of each step."""
    start_parameters: dict[str, torch.Tensor]
    """The whole parameters by name before the first step."""
    end_parameters: dict[str, torch.Tensor]
    """The whole parameters by name after the last step."""
    sent_bytes: float | None
    """Counted bytes that this rank sent per step (mean over the counted steps); None if no step was counted."""
    theory_bytes: float
    """Bytes that this rank sends per step by the strategy's theory."""
    wire_bytes: float
    """Bytes that the backend sends per step for the counted collectives; for those of the theory if none were counted."""
    textbook_bytes: float | None
    """Bytes that this rank sends per step according to textbooks; None if they give no number."""
    has_batch_norm: bool = False
    """Whether the model has BatchNorm."""


def prove_same_work(cell: Cell, task: Task, data_path: Path, ranks: Ranks, folder: Path | None) -> SameWork:
    """Compare the strategy of a cell with one process and return the verdict, the same on every rank.

    A collective, called before the engine of the run is built. When it returns, all memory of the proof is free again.

    folder: verdicts are stored here under a digest of the computation, and reused; None: the verdict is not stored.
    """
    strategy = menu.find_strategy_of_cell(cell)
    if cell.prove == "off":
        return SameWork(verdict="not proven", why="the cell says prove: off")
    if (why := strategy.unprovable(cell)) is not None:
        return SameWork(verdict="not provable", why=why)
    stored_path = folder / f"{digest_computation(cell, ranks.trains_on)}.json" if folder is not None else None
    # Only rank 0 reads the stored file, and all ranks use what it read. If each rank read the file, some ranks might find it
    # and others not: another run may write the file at this moment, and other nodes may not have it.
    stored_content = files.read(stored_path) if stored_path is not None and ranks.rank == 0 and stored_path.exists() else b""
    if stored_path is not None and (content := ranks.broadcast_from_first(stored_content)):
        return msgspec.json.decode(content, type=SameWork)
    start_s = time.perf_counter()
    same_work = proof_seeds.prove_with_seeds(
        lambda seed: _prove_once(msgspec.structs.replace(cell, seed=seed), task, data_path, ranks, strategy), cell.seed
    )
    same_work.proof_s = round(time.perf_counter() - start_s, 3)
    if stored_path is not None and ranks.rank == 0:
        files.make_folder(stored_path.parent)
        files.write_json(stored_path, same_work)
    ranks.barrier()
    return same_work


def digest_computation(cell: Cell, device: str) -> str:
    """The digest of a computation: of everything that can change its numbers in the cell, the software and the device.

    device: the name of the device that the ranks train on.
    """
    cell_values = {name: value for name, value in msgspec.to_builtins(cell).items() if name not in KEYS_WITHOUT_EFFECT}
    version_by_package = {name: version for name, version in host.read_package_versions().items() if name in LIBRARIES}
    digested_content = msgspec.json.encode([cell_values, device, version_by_package, _digest_source()], order="deterministic")
    return hashlib.sha256(digested_content).hexdigest()[:16]


def _digest_source() -> str:
    """The digest of the trainers' source: a proof is only valid for the code that made it."""
    source_digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source_digest.update(path.read_bytes())
    return source_digest.hexdigest()


def _prove_once(cell: Cell, task: Task, data_path: Path, ranks: Ranks, strategy: Strategy) -> tuple[SameWork, bool]:
    """Compare once. Returns (the verdict, whether the model has BatchNorm), the same on every rank."""
    plain_cell = msgspec.structs.replace(cell, optimizer=SGD, schedule=Schedule())
    remarks = []
    if plain_cell.options.get("dropout"):
        plain_cell = msgspec.structs.replace(plain_cell, options={**plain_cell.options, "dropout": False})
        remarks.append("dropout is off here, but on in the run")
    other_work = strategy.other_work(cell)
    if smaller_options := {} if other_work else _choose_smaller_options(cell, ranks):
        plain_cell = msgspec.structs.replace(plain_cell, options={**plain_cell.options, **smaller_options})
        remarks.append("at reduced depth (" + ", ".join(f"{name}: {size}" for name, size in smaller_options.items()) + ")")
    if plain_cell.options != cell.options:
        task = menu.find_workload_of_cell(plain_cell).build(plain_cell, data_path)
    data_order = DataOrder(task.source.items, cell.global_batch_size, cell.seed)
    statistics_items = data_order.list_batch_items(PROOF, 0)[: STATISTICS_BATCHES * cell.micro_batch_size]
    frozen_task = frozen_statistics.freeze_statistics(task, statistics_items, ranks.device)
    steps = _count_steps(cell, strategy)
    if other_work is not None:  # the strategy cannot be compared with one process; only its bytes are counted
        sent_bytes = None
        if _count_counted_steps(cell, strategy) > 0:
            sent_bytes = _sum_sent_bytes(cell, ranks, _make_steps(plain_cell, frozen_task, ranks, strategy, steps))
        return SameWork(verdict="other work", why=other_work, communication_bytes=sent_bytes), False
    single_cell = msgspec.structs.replace(plain_cell, **ONE_PROCESS)
    reference = _run_reference(single_cell, frozen_task, ranks, steps) if ranks.rank == 0 else None
    strategy_result = _make_steps(plain_cell, frozen_task, ranks, strategy, steps)
    if strategy_result.has_batch_norm and (cell.dp > 1 or cell.gradient_accumulation_steps > 1):
        share_text = f"its own {cell.micro_batch_size} of {cell.global_batch_size} items"
        remarks.append(f"BatchNorm is frozen here; in the run each rank and pass normalises by {share_text}")
    differences, comparable = (0.0, 0.0, 0.0), True
    if reference is not None:
        comparable = _can_be_compared(reference) and (_is_finite(strategy_result) or not cell.precision.startswith("fp16"))
        if comparable:
            differences = _measure_differences(strategy_result, reference)
    numbers_by_rank = ranks.all_gather_numbers(
        [*differences, float(reference is not None), float(comparable), float(strategy_result.has_batch_norm)]
    )
    loss, norm, parameters, has_reference, is_comparable = map(float, numbers_by_rank[0, :-1])
    has_jumps = bool(numbers_by_rank[:, -1].any())
    # The bytes of a smaller model are not those of the cell.
    sent_bytes = None if smaller_options else _sum_sent_bytes(cell, ranks, strategy_result)
    if not (has_reference and is_comparable):
        why = "one process does not have enough memory for the reference"
        if has_reference:
            why = (
                "the gradients of one process, or in fp16 those of the strategy, are not finite in the first "
                f"{steps} steps, or move no parameter in {cell.precision}, so a comparison would show nothing"
            )
        return SameWork(verdict="not provable", why=why, communication_bytes=sent_bytes), has_jumps
    tolerance = TOLERANCES[cell.precision]
    return SameWork(
        verdict="proven" if _is_within(tolerance, loss, norm, parameters) else "different",
        why=f"compared to one process, {steps} steps with SGD, {cell.precision}: loss differs by {loss:.1e}, gradient norm by "
        f"{norm:.1e}, parameters by {parameters:.1e} of their movement (allowed {tolerance.loss:.0e}, "
        f"{tolerance.gradient_norm:.0e}, {tolerance.parameters:.0e}){''.join(f'; {remark}' for remark in remarks)}",
        loss_difference=loss,
        gradient_norm_difference=norm,
        parameter_difference=parameters,
        communication_bytes=sent_bytes,
    ), has_jumps


def _choose_smaller_options(cell: Cell, ranks: Ranks) -> dict[str, int]:
    """The options of a smaller model, if the cell's model does not fit into the memory of one process; else an empty dict.

    A collective, with the same result on all ranks.
    """
    workload = menu.find_workload_of_cell(cell)
    smaller_options = {name: size for name, size in workload.proof_options.items() if _is_above(cell.options[name], size)}
    if cell.pp > 1 and workload.blocks in smaller_options:
        smaller_options[workload.blocks] = max(smaller_options[workload.blocks], cell.pp * cell.stages_per_rank)
    fits_in_memory = float(ranks.rank > 0 or not smaller_options or _fits_in_memory(workload.parameters, ranks.device))
    return {} if ranks.all_gather_numbers([fits_in_memory])[0, 0] else smaller_options


def _is_above(value: bool | int | float | str | None, size: int) -> bool:
    return isinstance(value, int) and value > size


def _fits_in_memory(parameter_count: int, device: torch.device) -> bool:
    """Whether one process has enough memory for a proof with this number of parameters.

    The estimate counts weights, gradients and momentum in fp32 on the device, and four copies of the weights on the host for
    the comparison. It does not count activations: only the steps themselves show whether there is memory for activations.
    """
    host_bytes = psutil.virtual_memory().available
    device_need_bytes, host_need_bytes = 12 * parameter_count, 16 * parameter_count
    if device.type == "cpu":
        return device_need_bytes + host_need_bytes < host_bytes
    device_bytes, _ = torch.cuda.mem_get_info(device)
    return device_need_bytes < device_bytes and host_need_bytes < host_bytes


def _count_steps(cell: Cell, strategy: Strategy) -> int:
    """The number of steps that the proof makes: the first two steps, whose communication may differ from all later steps, and
    then one whole period of the strategy's communication, or one step if the period is not counted."""
    return LEAST_STEPS - 1 + (_count_counted_steps(cell, strategy) or 1)


def _count_counted_steps(cell: Cell, strategy: Strategy) -> int:
    """The number of steps at the end of the proof in which bytes are counted: one period of the strategy's communication, or 0
    if the period is unknown or longer than MOST_COUNTED_STEPS."""
    period = strategy.communication_period(cell) or 0
    return period if period <= MOST_COUNTED_STEPS else 0


def _run_reference(single_cell: Cell, task: Task, ranks: Ranks, step_count: int) -> Trajectory | None:
    """The results of the steps in one process, or None if this process runs out of memory. single_cell: the cell for one
    process."""
    trajectory = None
    try:
        trajectory = _make_steps(single_cell, task, ranks.as_single_process(), menu.find_strategy("single"), step_count)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    if trajectory is None:  # after the except clause, in which the traceback keeps the model in memory
        gc.collect()
        torch.cuda.empty_cache()
    return trajectory


def _sum_sent_bytes(cell: Cell, ranks: Ranks, strategy_result: Trajectory) -> dict[str, float]:
    """The bytes that all ranks, including parameter servers, send in one step: `theory`, `wire`, `counted` and `textbook`.

    `counted` is absent if no step was counted, `textbook` if textbooks give no number. A collective.
    """
    not_counted = float(strategy_result.sent_bytes is None)
    rank_bytes = [strategy_result.sent_bytes or 0.0, strategy_result.theory_bytes, strategy_result.wire_bytes, not_counted]
    counted, theory, wire, uncounted_ranks = ranks.all_gather_numbers(rank_bytes).sum(axis=0)
    sent = {"theory": float(theory), "wire": float(wire)}
    if not uncounted_ranks:
        sent["counted"] = float(counted)
    return sent if strategy_result.textbook_bytes is None else {**sent, "textbook": strategy_result.textbook_bytes * cell.gpus}


def _can_be_compared(reference: Trajectory) -> bool:
    """Whether a strategy can be compared with the reference: its gradients must be finite, and its parameters have changed."""
    return _is_finite(reference) and _measure_squared_movement(reference) > 0


def _is_finite(result: Trajectory) -> bool:
    """Whether all gradient norms are finite. In fp16, the gradients of a rank's part of the batch can overflow although
    the gradients of the whole batch do not."""
    return all(map(math.isfinite, result.gradient_norms))


def _measure_differences(result: Trajectory, reference: Trajectory) -> tuple[float, float, float]:
    """The largest differences of losses and of gradient norms, and the distance of the parameters."""
    loss_difference, norm_difference = (
        _find_largest_difference(result.losses, reference.losses),
        _find_largest_difference(result.gradient_norms, reference.gradient_norms),
    )
    return loss_difference, norm_difference, _measure_parameter_distance(result, reference)


def _find_largest_difference(values: list[float], reference_values: list[float]) -> float:
    """The largest difference in any step, relative to the reference. It is infinite if a difference is NaN or infinite; `max`
    alone could ignore a NaN."""
    differences = [abs(value - expected) / abs(expected) for value, expected in zip(values, reference_values, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _is_within(tolerance: Tolerance, loss: float, norm: float, parameters: float) -> bool:
    # The comparisons are written such that they are false for NaN.
    return loss <= tolerance.loss and norm <= tolerance.gradient_norm and parameters <= tolerance.parameters


def _make_steps(cell: Cell, task: Task, ranks: Ranks, strategy: Strategy, step_count: int) -> Trajectory:
    """Make the steps of the proof with a new engine, then free the engine. A parameter server serves the workers' steps."""
    torch.manual_seed(cell.seed)
    if strategy.servers and ranks.rank >= cell.gpus:
        return _serve_steps(strategy.build_server(cell, task, ranks), step_count, ranks.backend)
    counted_steps = _count_counted_steps(cell, strategy)
    engine = strategy.build(cell, task, ranks)
    engine.start_loss_scale(LOSS_SCALE)
    peers = engine.select_training_peers(ranks)
    data_order, clock = DataOrder(task.source.items, cell.global_batch_size, cell.seed), make_clock(ranks.device)
    start_parameters = engine.whole_parameters()
    losses, gradient_norms, calls = [], [], list[communication.CountedCall]()
    for step in range(step_count):
        micro_batches = data_order.list_micro_batches(
            PROOF, step, slice_index=engine.data_rank, slice_count=engine.data_ranks, micro_batch_size=cell.micro_batch_size
        )
        batches = [task.fetch(indices, ranks.device) for indices in micro_batches]
        clock.start()
        # Counting disables torch.compile, so bytes are counted only in the last period, which is usually only the last step.
        counts_bytes = step >= step_count - counted_steps
        with _count_collectives_if(counts_bytes) as calls_while_computing:
            loss = engine.forward_backward(batches, clock)
        gradient_norms.append(engine.gradient_norm())
        with _count_collectives_if(counts_bytes) as calls_while_updating:
            engine.update()
        calls += [*calls_while_computing, *calls_while_updating]
        losses.append(float(peers.all_gather_numbers([float(loss)]).mean()))
    engine.finish()
    terms = engine.theory()
    result = Trajectory(
        losses=losses,
        gradient_norms=gradient_norms,
        start_parameters=start_parameters,
        end_parameters=engine.whole_parameters(),
        sent_bytes=sum(call.sent_bytes for call in calls) / counted_steps if counted_steps else None,
        theory_bytes=sum(term.sent_bytes for term in terms),
        wire_bytes=sum(entry.wire_bytes(ranks.backend) for entry in (calls if counted_steps else terms)) / (counted_steps or 1),
        textbook_bytes=engine.compute_textbook_bytes(),
        has_batch_norm=bool(frozen_statistics.list_batch_norm_layers(engine.model)),
    )
    engine.close()
    _free_engine(engine, ranks)
    return result


def _serve_steps(server: Server, step_count: int, backend: str) -> Trajectory:
    """Serve the workers' steps as a parameter server. The server's bytes per step are the mean over all steps, because a server
    does not know where a step begins."""
    with communication.count_collectives() as calls:
        server.serve()
    return Trajectory(
        [], [], {}, {},
        sent_bytes=sum(call.sent_bytes for call in calls) / step_count,
        theory_bytes=sum(term.sent_bytes for term in server.theory()),
        wire_bytes=sum(call.wire_bytes(backend) for call in calls) / step_count,
        textbook_bytes=None,
    )  # fmt: skip


def _count_collectives_if(counts_bytes: bool) -> AbstractContextManager[list[communication.CountedCall]]:
    return communication.count_collectives() if counts_bytes else nullcontext([])


def _free_engine(engine: Engine, ranks: Ranks) -> None:
    engine.__dict__.clear()  # frees parameters and buffers, even if a hook of torch still has a reference to the engine
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def _measure_parameter_distance(result: Trajectory, reference: Trajectory) -> float:
    """The L2 distance between the final parameters of the strategy and of the reference, relative to the L2 distance that the
    reference's parameters moved. Infinite if the names differ, or if the parameters differed before the first step."""
    if result.end_parameters.keys() != reference.end_parameters.keys():
        return float("inf")
    squared_distance = sum(
        float((result.end_parameters[name] - parameter).square().sum()) for name, parameter in reference.end_parameters.items()
    )
    squared_movement = _measure_squared_movement(reference)
    start_distance = sum(
        float((result.start_parameters[name] - start).square().sum()) for name, start in reference.start_parameters.items()
    )
    return float("inf") if start_distance > 1e-6 * squared_movement else (squared_distance / squared_movement) ** 0.5


def _measure_squared_movement(result: Trajectory) -> float:
    """The square of the L2 distance that the parameters moved."""
    return sum(
        float((parameter - result.start_parameters[name]).square().sum()) for name, parameter in result.end_parameters.items()
    )
