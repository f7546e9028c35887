"""Batch arithmetic, the hash of a cell, and run ids."""

from typing import get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_cells import CELL

from shardlab.matrix import cell as cells
from shardlab.matrix import cell_sizes
from shardlab.matrix.cell import Cell, CheckpointSettings, Draft, Instruments, Optimizer, Role
from shardlab.runs.checkpoint import explain_refused_resume
from shardlab.runs.run import RUN_ID, make_run_id, split_attempt


def draft(**keys: object) -> Draft:
    return Draft(workload="gpt2-tiny", strategy="ddp", **keys)


def test_each_key_of_a_cell_has_one_role():
    """Each field of Cell has exactly one annotation of the type Role."""
    hints = get_type_hints(Cell, include_extras=True)
    roles = {
        name: [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Role)] for name, hint in hints.items()
    }
    assert {name: found for name, found in roles.items() if len(found) != 1} == {}
    assert cells.find_role_keys(*Role) == set(roles)


@given(ranks=st.integers(1, 64), micro=st.integers(1, 32), passes=st.integers(1, 8))
def test_both_spellings_of_a_batch_size_give_the_same_cell(ranks, micro, passes):
    strong = cell_sizes.compute_batch_sizes(
        draft(gpus=ranks, global_batch_size=ranks * micro * passes, micro_batch_size=micro), ranks
    )
    weak = cell_sizes.compute_batch_sizes(draft(gpus=ranks, gpu_batch_size=micro * passes, microbatches=passes), ranks)
    assert strong == weak == (ranks * micro * passes, micro, passes)


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({}, "global_batch_size", "found neither"),
        ({"global_batch_size": 8, "gpu_batch_size": 4}, "global_batch_size", "found both"),
        ({"gpus": 3, "global_batch_size": 16}, "global_batch_size", "Allowed: a multiple of 3."),
        ({"gpus": 2, "global_batch_size": 16, "micro_batch_size": 3}, "micro_batch_size", "Allowed: a divisor of 8."),
        ({"gpu_batch_size": 4, "micro_batch_size": 8}, "micro_batch_size", "Allowed: a divisor of 4."),
        ({"gpu_batch_size": 4, "microbatches": 3}, "microbatches", "Allowed: a divisor of 4."),
        # These two keys do not contradict each other, but one of them would be ignored.
        ({"gpu_batch_size": 8, "microbatches": 2, "micro_batch_size": 4}, "microbatches", "found micro_batch_size as well"),
    ],
)
def test_a_batch_size_that_does_not_divide_is_refused(keys, key, words):
    with pytest.raises(cell_sizes.BatchError) as caught:
        cell_sizes.compute_batch_sizes(draft(**keys), keys.get("gpus", 1))
    assert caught.value.key == key
    assert words in str(caught.value)


def test_the_hash_depends_on_the_work_alone():
    assert CELL.hash() == "f16f07379441"
    same = msgspec.structs.replace(CELL, time_limit_s=60, expect=["oom"])
    assert same.hash() == CELL.hash()
    plain = msgspec.to_builtins(CELL)
    assert cells.compute_cell_hash(dict(reversed(plain.items()))) == CELL.hash()


def test_a_cell_with_checkpoints_of_an_older_version_has_the_same_hash():
    saved = msgspec.structs.replace(CELL, instruments=Instruments(checkpoints=CheckpointSettings(every_steps=2)))
    older = msgspec.to_builtins(saved)
    del older["instruments"]["checkpoints"]["time_loading"]
    assert cells.compute_cell_hash(older) == saved.hash()
    timed = Instruments(checkpoints=CheckpointSettings(every_steps=2, time_loading=True))
    assert msgspec.structs.replace(CELL, instruments=timed).hash() != saved.hash()


def test_a_cell_of_a_version_without_the_option_sync_has_the_same_hash():
    """Cells of older versions reduce gradients as `last_pass` does."""
    older = msgspec.structs.replace(CELL, options={"replicas": 2})
    hashes = [
        msgspec.structs.replace(CELL, options={"replicas": 2, "sync": sync}).hash()
        for sync in ("last_pass", "every_pass", "shard_every_pass")
    ]
    assert older.hash() == hashes[0]
    assert len(set(hashes)) == 3
    assert (older.sync, CELL.sync) == ("last_pass", "last_pass")


def test_a_cell_of_a_version_without_the_option_dropout_has_the_same_hash():
    older, newer, dropping = (
        msgspec.structs.replace(CELL, options={"replicas": 2, **options})
        for options in ({}, {"dropout": None}, {"dropout": True})
    )
    assert older.hash() == newer.hash() != dropping.hash()
    assert explain_refused_resume(older, newer, "sharded", ()) is None
    assert explain_refused_resume(older, dropping, "sharded", ()) == "its cell differs in options"


def test_a_checkpoint_contains_the_same_for_each_value_of_the_option_sync():
    older, newer, other = (
        msgspec.structs.replace(CELL, options=options)
        for options in ({"replicas": 2}, {"replicas": 2, "sync": "every_pass"}, {"replicas": 4})
    )
    assert explain_refused_resume(older, newer, "sharded", ()) is None
    assert explain_refused_resume(older, other, "sharded", ()) == "its cell differs in options"


def test_computing_the_hash_of_a_cell_does_not_change_its_json():
    """`hash` stores its result in the cell. The stored result does not get into the cell's JSON."""
    fresh = msgspec.structs.replace(CELL)
    written = msgspec.json.encode(fresh)
    assert fresh.hash() == fresh.hash() == CELL.hash()
    assert msgspec.json.encode(fresh) == written
    assert fresh == msgspec.json.decode(written, type=cells.Cell)


@pytest.mark.parametrize(
    "change",
    [
        *({"gpus": 4}, {"seed": 1}, {"precision": "bf16"}, {"options": {"a": 1}}, {"optimizer": Optimizer("sgd", 0.2)}),
        {"instruments": Instruments(telemetry_hz=10)},
    ],
)
def test_any_change_of_the_work_changes_the_hash(change):
    assert msgspec.structs.replace(CELL, **change).hash() != CELL.hash()


@given(strategy=st.text(max_size=80), workload=st.text(max_size=80), repeat=st.integers(1, 1000), attempt=st.integers(1, 99))
def test_run_ids_are_safe_folder_names_whatever_the_names(strategy, workload, repeat, attempt):
    cell = msgspec.structs.replace(CELL, strategy="s" + strategy, workload=workload)
    name = make_run_id(cell, repeat, attempt)
    assert RUN_ID.match(name)
    assert split_attempt(name) == (make_run_id(cell, repeat), attempt)


@pytest.mark.parametrize(("text", "value"), [("00:05:00", 300), ("1-00:00:01", 86401), ("9:00:00", 32400)])
def test_times_of_the_form_d_hh_mm_ss_are_parsed(text, value):
    assert cell_sizes.parse_seconds(text) == value


@pytest.mark.parametrize("text", ["5", "05:00", "00:60:00", "1:2:3", "-00:05:00", "00:00:00", "", "00:05:00\n"])
def test_a_text_that_is_no_positive_time_is_refused(text):
    """Texts that are not a time of the form [D-]H:MM:SS, or that mean 0 s, are refused."""
    with pytest.raises(ValueError, match="Allowed"):
        cell_sizes.parse_seconds(text)
