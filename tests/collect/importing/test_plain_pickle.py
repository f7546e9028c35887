"""Pickles of torch's allocator are read without executing anything, and snapshots are exported for the page memory_viz."""

import json
import pickle
import pickletools
import struct
from pathlib import Path

import pytest
import support_collect as support

from collect.cli import main
from collect.sources import plain_pickle, snapshot
from shardlab.errors import InputError
from shardlab.matrix.cell import Instruments
from shardlab.workspace.workspace import Workspace

MIB = 2**20
FRAMES = [{"name": "forward", "filename": "model.py", "line": 7}]
SNAPSHOT = {
    "segments": [
        {
            "device": 0, "address": 140_000_000_000_000, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
            "allocated_size": 5 * MIB, "active_size": 5 * MIB, "requested_size": 5 * MIB - 12, "is_expandable": False,
            "frames": FRAMES,
            "blocks": [
                {"address": 140_000_000_000_000, "size": 5 * MIB, "requested_size": 5 * MIB - 12,
                 "state": "active_allocated", "frames": FRAMES},
                {"address": 140_000_005_242_880, "size": 15 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [[
        {"action": "segment_alloc", "addr": 140_000_000_000_000, "size": 20 * MIB, "stream": 0, "time_us": 1, "frames": FRAMES},
        {"action": "alloc", "addr": 140_000_000_000_000, "size": 5 * MIB, "stream": 0, "time_us": 2.5, "frames": FRAMES},
    ]],
    "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "garbage_collection_threshold": -0.5, "expandable": True, "x": None},
}  # fmt: skip
# What `unpickle` of MemoryViz.js knows, with the protocols 2 to 4: names of Python's pickletools.
KNOWN_TO_THE_PAGE = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET", "MARK",
    "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT", "BINUNICODE",
    "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST", "DICT", "SETITEM",
}  # fmt: skip


class Touch:
    """An object that makes a file when its pickle is read by Python's own reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_of_plain_values_is_read_as_python_reads_it(protocol):
    value = [
        SNAPSHOT,
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        -1,
        2**40,
        -(2**40),
        2**200,
        "x" * 300,
        "é",
        1.5,
        [[]],
        {1: 2},
    ]
    value += [list(range(2500)), {str(number): number for number in range(2500)}, value[0]]
    assert plain_pickle.read_plain_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_hostile_pickle_executes_nothing(tmp_path, protocol, capsys):
    canary, file = tmp_path / "was executed", tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({**SNAPSHOT, "more": Touch(canary)}, protocol))
    assert main(["trace", str(file)]) == 2
    assert not canary.exists()
    assert "could execute code" in capsys.readouterr().err
    pickle.loads(file.read_bytes())
    assert canary.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",  # the function os.system by its name
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # the same by values of the stack
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02\x82\x01.",  # a function of the registry of extensions
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent id
        b"\x80\x02}}b.",  # a state that is set
        b"\x80\x02Nr\xff\xff\xff\x7f" + b"\x8b\xff\xff\xff\x7f.",  # a large place in the memo, and an integer without its bytes
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04]e.",
        b"\x80\x04h\x05.",
        b"\x80\x04(]]u.",
        b"\x80\x04.",
        b"\x80\x04",
        b"\x80\x04}]Ns.",
    ],
)
def test_a_pickle_with_more_than_plain_values_is_refused(content):
    with pytest.raises(ValueError, match=r"could execute code|damaged or cut short"):
        plain_pickle.read_plain_pickle(content)


def test_a_list_that_contains_itself_many_times_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "MOST_PICKLE_VALUES", 10_000)
    blocks = [{"size": 1, "state": "inactive"}] * 1000
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"segments": [{"total_size": 1, "blocks": blocks}] * 1000}))
    endless: list[object] = []
    endless.append(endless)
    (tmp_path / "b.pickle").write_bytes(pickle.dumps({"segments": endless}))
    for name in ("a.pickle", "b.pickle"):
        with pytest.raises(InputError, match="more than 10,000 values"):
            snapshot.read_snapshot_document(tmp_path / name)


@pytest.mark.parametrize("value", [[1], {"segments": 3}, {"other": []}, {"segments": [{"total_size": -1, "blocks": []}]}])
def test_a_pickle_that_is_no_snapshot_is_named_for_what_it_is(tmp_path, value, capsys):
    (tmp_path / "weights.pickle").write_bytes(pickle.dumps(value))
    assert main(["trace", str(tmp_path / "weights.pickle")]) == 2
    assert "weights.pickle: is no snapshot of the CUDA allocator" in capsys.readouterr().err


def test_a_snapshot_of_another_program_is_shown(tmp_path, capsys):
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(SNAPSHOT, protocol=5))
    assert main(["trace", str(tmp_path / "snapshot.pickle")]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["reserved", "20.0"]
    assert main(["trace", str(tmp_path / "snapshot.pickle"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == {"reserved": 20 * MIB, "in_use": 5 * MIB, "peak_reserved": 20 * MIB, "peak_in_use": 5 * MIB}
    assert document["at_peak"] == {"1 to 32 MiB": 5 * MIB}
    assert (document["segments"], document["entries"]) == (1, 2)


def test_the_export_for_memory_viz_has_only_what_the_page_reads(tmp_path):
    workspace, cell = Workspace(tmp_path / "w"), support.cell(instruments=Instruments(memory="snapshot"))
    support.keep(workspace, [cell], repeats=1)
    run = support.completed(workspace, cell)
    support.save_snapshot(run, {name: SNAPSHOT[name] for name in ("segments", "device_traces")})
    out = tmp_path / "out"
    assert main(["export", "--to", "memory-viz", "--workspace", str(workspace.path), "--out", str(out)]) == 0
    content = (out / "snapshots" / run.run_id / "rank-00000.pickle").read_bytes()
    assert {code.name for code, _, _ in pickletools.genops(content)} <= KNOWN_TO_THE_PAGE
    assert struct.unpack("BB", content[:2]) in {(0x80, number) for number in (2, 3, 4)}
    assert plain_pickle.read_plain_pickle(content) == {name: SNAPSHOT[name] for name in ("segments", "device_traces")}


def test_an_export_for_memory_viz_without_a_snapshot_says_what_is_needed(tmp_path, capsys):
    workspace = support.matrix(tmp_path / "w")
    assert main(["export", "--to", "memory-viz", "--workspace", str(workspace.path)]) == 2
    assert "instruments: {memory: snapshot}" in capsys.readouterr().err
    assert not (workspace.path / "export" / "memory-viz").exists()
