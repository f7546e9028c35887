"""Each key of a cell in a matrix file, and each of its allowed values, reaches the resolved cell, which the ranks read."""

import itertools
import json
from typing import Any, get_args

import msgspec
import pytest

from jobs.planning import resolve
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.matrix.cell import Draft, Precision, Recurring, State
from tests.shardlab.cluster.test_cluster_keys import keys_of

BASE = {"workload": "gpt2-tiny", "strategy": "ddp", "gpus": 4, "gpu_batch_size": 4, "steps": 9}
SGD, PROFILE = {"optimizer.name": "sgd", "optimizer.lr": 0.1}, {"instruments.profile": {}}
VALIDATED, SAVED = {"instruments.validation": {"every_steps": 2}}, {"instruments.checkpoints": {"every_steps": 2}}


class Case(msgspec.Struct):
    """A value of a key of a cell.

    value: the value. also: further keys of the cell, null for a key of BASE that is left out. place, expected: the key of the
    resolved cell that the value reaches, and its value there; None: the same key and the same value.
    """

    value: Any
    also: dict[str, Any] = {}
    place: str | None = None
    expected: Any = None


def each(values: Any, **also: Any) -> list[Case]:
    return [Case(value, also) for value in values]


CASES: dict[str, list[Case]] = {
    "workload": [Case("vgg16-tiny")],
    "strategy": [Case("fsdp2")],
    "gpus": [Case(8)],
    "nnodes": [Case(2)],
    "gpu_type": [Case("h100")],
    "environment": [Case("other")],
    "tp": [Case(2, {"strategy": "tp-fsdp2"})],
    "pp": [Case(2, {"strategy": "pp-1f1b", "gpus": 2, "microbatches": 2})],
    "dp": [Case(2, {"strategy": "tp-fsdp2"}, "tp", 2)],
    "servers": [Case(2, SGD | {"strategy": "ps-sync"})],
    "launcher": each(["fork", "submitit", "deepspeed"]),
    "global_batch_size": [Case(32, {"gpu_batch_size": None})],
    "gpu_batch_size": [Case(8, {}, "global_batch_size", 32)],
    "micro_batch_size": [Case(2)],
    "microbatches": [Case(4, {}, "gradient_accumulation_steps", 4)],
    "seq_len": [Case(32)],
    "steps": [Case(7)],
    "epochs": [Case(2, {"steps": None})],
    "warmup_steps": [Case(3)],
    "precision": each(precision for precision in get_args(Precision) if precision != "fp32"),
    "activation_checkpointing": each(["full", "every-2", "segments-2"]),
    "compile": each([True]),
    "max_grad_norm": each([1.5]),
    "prove": each(["off"]),
    "optimizer.name": [Case(name, SGD) for name in ("sgd", "adam", "adamw")],
    "optimizer.lr": [Case(0.25, SGD)],
    "optimizer.momentum": [Case(0.5, SGD)],
    "optimizer.weight_decay": [Case(0.5, SGD)],
    "optimizer.beta1": [Case(0.5, SGD)],
    "optimizer.beta2": [Case(0.5, SGD)],
    "optimizer.eps": [Case(0.5, SGD)],
    "optimizer.fused": [Case(False, SGD)],
    "schedule.name": each(["cosine", "linear"]),
    "schedule.lr_warmup_steps": [Case(4)],
    "schedule.lr_scaling": each(["linear"]),
    "instruments.memory": each(["categories", "snapshot"]),
    "instruments.memory_steps": [Case(2, {"instruments.memory": "categories"})],
    "instruments.profile.first_step": [Case(4, PROFILE)],
    "instruments.profile.steps": [Case(1, PROFILE)],
    "instruments.profile.ranks": [Case([1, 2], PROFILE)],
    "instruments.profile.shapes": [Case(True, PROFILE)],
    "instruments.profile.stacks": [Case(True, PROFILE)],
    "instruments.profile.memory": [Case(True, PROFILE)],
    "instruments.validation.every_steps": [Case(3, VALIDATED)],
    "instruments.validation.every_epochs": [Case(1, {"instruments.validation": {}})],
    "instruments.validation.items": [Case(8, VALIDATED)],
    "instruments.checkpoints.every_steps": [Case(3, SAVED)],
    "instruments.checkpoints.every_epochs": [Case(1, {"instruments.checkpoints": {}})],
    "instruments.checkpoints.keep": [Case(5, SAVED)],
    "instruments.checkpoints.layout": [Case("whole", SAVED)],
    "instruments.checkpoints.time_loading": [Case(True, SAVED)],
    "instruments.telemetry_hz": [Case(5.0)],
    "instruments.straggler.rank": [Case(1, {"instruments.straggler": {"delay_ms": 5.0}})],
    "instruments.straggler.delay_ms": [Case(7.5, {"instruments.straggler": {"rank": 1}})],
    "instruments.lost_worker.rank": [Case(1, {"instruments.lost_worker": {"step": 3}})],
    "instruments.lost_worker.step": [Case(4, {"instruments.lost_worker": {"rank": 1}})],
    "memory_limit_gib": [Case(2.5)],
    "seed": [Case(7)],
    "time_limit": [Case("00:10:00", {}, "time_limit_s", 600)],
    "hang_limit": [Case("00:20:00", {}, "hang_limit_s", 1200)],
    "expect": [Case([state]) for state in get_args(State)],
    "options": [Case({"n_layer": 3}, {}, "options.n_layer", 3)],
    "env": [Case({"NCCL_ALGO": "Ring"}), Case({"A": 1}, {}, "env.A", "1")],
}


def with_key(keys: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """These keys with one more key; a key with three parts, such as instruments.profile.steps, goes into the mapping of its
    first two parts."""
    parent, _, last = name.rpartition(".")
    if name.count(".") == 2:
        return keys | {parent: keys.get(parent, {}) | {last: value}}
    return keys | {name: value}


def at(cell: dict[str, Any], place: str) -> Any:
    """The value at a dotted key of a cell; None if a mapping above it is null."""
    found: Any = cell
    for name in place.split("."):
        found = None if found is None else found.get(name)
    return found


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    """Returns a function that resolves the only cell of a matrix with these keys, as its run.json has it."""
    path = tmp_path_factory.mktemp("matrix") / "m.yaml"

    def cell_of(keys):
        defaults = {key: value for key, value in keys.items() if value is not None}
        path.write_text(
            json.dumps({"schema": 1, "name": "m", "defaults": defaults, "axes": {"seed": [defaults.pop("seed", 42)]}})
        )
        (cell,) = resolve.resolve_cells(matrix.load_matrix(path))
        return msgspec.to_builtins(cell)

    return cell_of


@pytest.mark.parametrize("key", CASES)
def test_a_key_of_a_matrix_reaches_the_cell(resolved, key):
    cells = set()
    for case in CASES[key]:
        expected = case.value if case.expected is None else case.expected
        cell = resolved(with_key(BASE | case.also, key, case.value))
        assert at(cell, case.place or key) == expected
        cells.add(json.dumps(cell))
    assert len(cells - {json.dumps(resolved(BASE))}) == len(CASES[key])  # no two values, and no default, lead to the same cell


def test_each_key_and_each_allowed_value_of_a_cell_is_in_the_table():
    keys = keys_of(Draft)
    assert set(CASES) | {"set"} == set(keys)  # `set` is for commands: tests/jobs/planning/test_command_cells.py
    values = {key: [*itertools.chain.from_iterable(values_of(case) for case in CASES.get(key, []))] for key in keys}
    lacking = {key: [value for value in allowed if value not in values[key]] for key, allowed in keys.items()}
    # These are values of the keys of mappings that have any keys.
    assert {key: left for key, left in lacking.items() if left} == {key: [False, True] for key in ("options", "set", "env")}


def values_of(case: Case) -> list[Any]:
    return case.value if isinstance(case.value, list) else [case.value]


@pytest.mark.parametrize("given", [{}, {"every_steps": 2, "every_epochs": 1}])
@pytest.mark.parametrize("key", ["validation", "checkpoints"])
def test_an_interval_is_either_in_steps_or_in_epochs(resolved, key, given):
    with pytest.raises(InputError, match=f"instruments.{key}.*exactly one of every_steps and every_epochs is needed"):
        resolved(BASE | {f"instruments.{key}": given})


def test_an_interval_in_epochs_depends_on_the_steps_of_an_epoch():
    assert Recurring(every_steps=7).interval_steps(100) == 7
    assert [Recurring(every_epochs=epochs).interval_steps(100) for epochs in (1, 3)] == [100, 300]
