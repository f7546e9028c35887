"""Data files are checked before training. A file that many processes need is created once. Items are read in one fixed
order."""

import hashlib
import multiprocessing
import struct

import numpy as np
import pytest

from shardlab.errors import InputError, WorkspaceError
from trainers.data import token_sets, tokens
from trainers.data.made_once import create_file_once
from trainers.data.order import TIMED, WARMUP, DataOrder


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "some.tokens"
    tokens.write_token_file(path, [np.arange(60), np.arange(60, 100)], 100)
    return path


def test_tokens_come_back_as_samples_that_share_one_token(token_file):
    text = tokens.TokenFile(token_file)
    assert text.count_sequences(11) == 9
    assert text.read_sequences(np.array([0, 8]), 11).tolist() == [list(range(12)), list(range(88, 100))]
    assert text.sha256 == hashlib.sha256(np.arange(100, dtype="<u2").tobytes()).hexdigest()
    assert tokens.TokenFile(token_file).count_sequences(100) == 0


def test_wide_tokens_keep_their_width(tmp_path):
    tokens.write_token_file(tmp_path / "wide", [np.array([0, 70_000])], 70_001)
    assert tokens.TokenFile(tmp_path / "wide").tokens.tolist() == [0, 70_000]


def header(**other):
    fields = {"magic": b"SHLTOKEN", "version": 1, "width": 2, "count": 100, "vocabulary": 100, "digest": b"\0" * 32, **other}
    return struct.pack("<8sIIQQ32s", *fields.values())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "found 0 bytes. Allowed: a token file, whose header alone has 64 bytes."),
        (b"\x80\x04\x95 a pickle" * 8, "is not a token file: it starts with"),
        (header(version=2), "found version 2 of the token file format. Allowed: 1."),
        (header(width=8), "found 8 bytes per token. Allowed: 2, 4."),
        (header(count=0), "found no tokens."),
        (header(), "found 64 bytes. Allowed: 264, because its header announces 100 tokens of 2 bytes."),
        (header(count=2**63), f"found 64 bytes. Allowed: {64 + 2**64}"),
        (header() + b"\0" * 201, "found 265 bytes. Allowed: 264"),
        (header() + b"\0" * 200, "(SHA-256 differs)"),
        (
            header(vocabulary=7, digest=hashlib.sha256(b"\7\0" * 100).digest()) + b"\7\0" * 100,
            "found the token 7. Allowed: below its vocabulary size 7.",
        ),
    ],
)
def test_a_hostile_token_file_is_refused_in_a_sentence(tmp_path, content, why):
    path = tmp_path / "hostile; rm -rf $HOME"
    path.write_bytes(content)
    with pytest.raises(InputError) as refusal:
        tokens.TokenFile(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert why in str(refusal.value)


def test_a_token_file_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(WorkspaceError, match="cannot read the data set"):
        tokens.TokenFile(tmp_path)


def test_the_stdlib_is_the_same_text_each_time_and_without_tests(tmp_path):
    one, two = (tokens.TokenFile(token_sets.ensure_stdlib_text(tmp_path / name)) for name in ("one", "two"))
    assert one.sha256 == two.sha256
    assert len(one.tokens) == token_sets.MOST_BYTES
    start = bytes(one.tokens[:2000].astype(np.uint8))
    assert start in token_sets.list_source_files(token_sets.Path(token_sets.sysconfig.get_path("stdlib")))[0].read_bytes()


def test_the_stdlib_text_has_only_its_own_modules_in_order(tmp_path):
    for name in (
        "b.py",
        "a/z.py",
        "a.py",
        "test/x.py",
        "a/tests/y.py",
        "site-packages/s.py",
        "idlelib/idle_test/t.py",
        "c.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in token_sets.list_source_files(tmp_path)] == ["a.py", "a/z.py", "b.py"]


def _make_slowly(path, made):
    def make(temporary):
        with made.get_lock():
            made.value += 1
        temporary.write_text("whole")

    create_file_once(path, make)
    assert path.read_text() == "whole"


def test_one_of_many_racing_processes_makes_the_file(tmp_path):
    """Of eight processes that need the same file at once, exactly one makes it."""
    fork = multiprocessing.get_context("fork")
    made = fork.Value("i", 0)
    racers = [fork.Process(target=_make_slowly, args=(tmp_path / "data" / "set", made)) for _ in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0] * 8
    assert made.value == 1
    assert sorted(entry.name for entry in (tmp_path / "data").iterdir()) == [".set.lock", "set"]


def test_a_file_whose_making_fails_leaves_nothing_and_is_made_again(tmp_path):
    """If making a file fails, no partial file remains, and the next call makes the file."""

    def fail(temporary):
        temporary.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        create_file_once(tmp_path / "set", fail)
    assert not (tmp_path / "set").exists()
    create_file_once(tmp_path / "set", lambda temporary: temporary.write_text("whole") and None)
    assert (tmp_path / "set").read_text() == "whole"


def test_an_epoch_takes_each_item_once_and_the_next_one_in_another_order():
    order = DataOrder(item_count=103, global_batch_size=10, seed=1)
    assert order.steps_per_epoch == 10
    epochs = [np.concatenate([order.list_batch_items(TIMED, 10 * epoch + step) for step in range(10)]) for epoch in range(2)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 100
        assert set(epoch.tolist()) <= set(range(103))
    assert epochs[0].tolist() != epochs[1].tolist()
    assert order.list_batch_items(WARMUP, 0).tolist() != order.list_batch_items(TIMED, 0).tolist()
    assert DataOrder(103, 10, seed=2).list_batch_items(TIMED, 0).tolist() != order.list_batch_items(TIMED, 0).tolist()


@pytest.mark.parametrize(("parts", "size"), [(1, 12), (1, 3), (2, 6), (2, 2), (3, 4), (6, 1)])
def test_the_global_batch_does_not_depend_on_ranks_and_micro_batches(parts, size):
    """For every number of ranks and size of micro-batches, the micro-batches together are the same global batch."""
    order = DataOrder(item_count=50, global_batch_size=12, seed=7)
    cut = [
        order.list_micro_batches(TIMED, 5, slice_index=part, slice_count=parts, micro_batch_size=size) for part in range(parts)
    ]
    assert np.concatenate([micro for part in cut for micro in part]).tolist() == order.list_batch_items(TIMED, 5).tolist()
    assert {len(micro) for part in cut for micro in part} == {size}


def test_a_batch_that_does_not_divide_or_exceeds_the_data_is_refused():
    with pytest.raises(InputError, match=r"found 9, but the data has 8 items\. Allowed: at most 8\."):
        DataOrder(item_count=8, global_batch_size=9, seed=0)
    for parts, size in ((3, 1), (2, 3)):
        with pytest.raises(InputError, match="cannot be divided"):
            DataOrder(item_count=8, global_batch_size=8, seed=0).list_micro_batches(
                TIMED, 0, slice_index=0, slice_count=parts, micro_batch_size=size
            )
