"""The three pictures of a snapshot of the CUDA allocator show the history and the blocks that the snapshot has."""

import gzip
import json

import pytest
import support_collect as support
import support_report

from collect import figure, summary
from collect.figures import allocator
from collect.reading import load
from collect.sources import snapshot
from shardlab.matrix.cell import Instruments
from shardlab.workspace.workspace import Workspace

MIB = 2**20
FIGURES = (allocator.draw_active_blocks, allocator.draw_reserved_memory, allocator.draw_segment_blocks)


def entry(action, addr, mib):
    return {
        "action": action,
        "addr": addr,
        "size": mib * MIB,
        "stream": 0,
        "frames": [{"name": "f", "filename": "<x>", "line": 1}],
    }


# Before the step: one segment of 100 MiB, with a block of 60 MiB (address 1) and a block of 4 MiB (address 2). During the step,
# block 2 is freed, blocks of 40 and 300 MiB are allocated, the latter in a new segment, and the block of 40 MiB is freed.
HISTORY = [
    entry("free_requested", 2, 4),
    entry("free_completed", 2, 4),
    entry("alloc", 3, 40),
    entry("segment_alloc", 900, 320),
    entry("alloc", 900, 300),
    entry("free_completed", 3, 40),
    entry("snapshot", 0, 0),
]
BLOCKS = [[(60, "active_allocated"), (40, "inactive")], [(300, "active_awaiting_free"), (20, "inactive")]]
DOCUMENT = {
    "schema": 1,
    "rank": 0,
    "step": 5,
    "device_traces": [[], HISTORY],
    "segments": [
        {"total_size": sum(size for size, _ in blocks) * MIB, "blocks": [{"size": n * MIB, "state": s} for n, s in blocks]}
        for blocks in BLOCKS
    ],
}


@pytest.fixture
def run_folder(tmp_path):
    workspace = Workspace(tmp_path)
    what = support.cell(instruments=Instruments(memory="snapshot"))
    support.keep(workspace, [what], repeats=1)
    return support.completed(workspace, what)


def write(run_folder, content):
    path = run_folder.snapshot_file(0)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def drawn(workspace):
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, "single"))
    return [draw(group) for draw in FIGURES]


def test_the_history_leads_from_the_state_before_the_step_to_that_of_the_segments(run_folder):
    seen = snapshot.read_snapshot(write(run_folder, gzip.compress(json.dumps(DOCUMENT).encode())))
    found = snapshot.replay_history(seen)
    in_mib = {name: [size / MIB for size in sizes] for name, sizes in found.active_bytes_by_class.items()}
    assert in_mib == {
        "from before the step": [64, 64, 60, 60, 60, 60, 60, 60],
        "256 MiB or more": [0, 0, 0, 0, 0, 300, 300, 300],
        "32 to 256 MiB": [0, 0, 0, 40, 40, 40, 0, 0],
        "1 to 32 MiB": [0] * 8,
        "below 1 MiB": [0] * 8,
    }
    assert [size / MIB for size in found.reserved_bytes] == [100, 100, 100, 100, 420, 420, 420, 420]


def test_the_pictures_have_the_bytes_of_the_snapshot(run_folder, tmp_path):
    write(run_folder, gzip.compress(json.dumps(DOCUMENT).encode()))
    active, segments, state = drawn(Workspace(tmp_path))
    assert {line["name"]: max(line["y"]) for line in active.data} == {
        "from before the step": 64,
        "256 MiB or more": 300,
        "32 to 256 MiB": 40,
    }
    assert {line["name"]: max(line["y"]) for line in segments.data} == {"reserved": 420, "in use": 400}
    bars = {
        bar["name"]: [(row, start, length) for row, start, length in zip(bar["y"], bar["base"], bar["x"], strict=True)]
        for bar in state.data
    }
    assert bars == {"in use": [(1, 0, 60)], "waiting to be freed": [(0, 0, 300)], "free": [(0, 300, 20), (1, 60, 40)]}
    assert "step 5, rank 0" in active.caption
    assert set(FIGURES) <= set(support_report.page_figures())


def test_a_long_history_keeps_its_peak(run_folder, tmp_path):
    history = [step for n in range(5000) for step in (entry("alloc", 10 + n, 1), entry("free_completed", 10 + n, 1))]
    history[7777:7777] = [entry("alloc", 5, 700), entry("free_completed", 5, 700)]
    write(run_folder, gzip.compress(json.dumps(DOCUMENT | {"device_traces": [history]}).encode()))
    _, segments, _ = drawn(Workspace(tmp_path))
    line = next(line for line in segments.data if line["name"] == "in use")
    assert len(line["y"]) < 500
    assert max(line["y"]) >= 360 + 700


def test_without_a_sound_snapshot_there_is_no_picture(run_folder, tmp_path):
    assert drawn(Workspace(tmp_path)) == [None] * 3
    whole = gzip.compress(json.dumps(DOCUMENT).encode())
    for content in (whole[: len(whole) // 2], b"no gzip", gzip.compress(b'{"rank": "x"}')):
        write(run_folder, content)
        assert drawn(Workspace(tmp_path)) == [None] * 3
