"""What a recording lacks is counted and said, and the figures that it spoils are bounds or blank."""

import json

import pytest
from support_recordings import ALL_REDUCE, Recording, collective

from collect.cli import main
from collect.traces import trace
from collect.traces.breakdown import compute_breakdown
from collect.traces.file_figures import compute_file_figures


def show(capsys, path, *options):
    """Runs `collect trace` with and without --json: (exit code, JSON document, tables, remarks)."""
    code = main(["trace", str(path), "--json", *options])
    document = json.loads(capsys.readouterr().out)
    assert main(["trace", str(path), *options]) == code
    printed = capsys.readouterr()
    return code, document, " ".join(printed.out.split()), " ".join(printed.err.split())


def lacks(recording, tmp_path):
    """{kind: (count, total)} of what the recording lacks."""
    figures = compute_file_figures(trace.read_trace(recording.write(tmp_path / "t.json")))
    return {lack.kind: (lack.count, lack.total) for lack in figures.lacks}


def healthy():
    """Two steps with three kernels and a copy each."""
    recording = Recording()
    for step in range(2):
        recording.step(step + 3, 1000 + 1000 * step, 900)
        for index in range(3):
            recording.launch(1010 + 1000 * step + 100 * index)
        recording.launch(1400 + 1000 * step, call="cudaMemcpyAsync", stream=20, dur=30)
    return recording


def test_a_whole_recording_lacks_nothing(tmp_path, capsys):
    assert lacks(healthy(), tmp_path) == {}
    code, document, tables, remarks = show(capsys, tmp_path / "t.json")
    assert (code, document["lacks"], document["ranks"][0]["bounds"]) == (0, [], {})
    assert "≥" not in tables
    assert "≤" not in tables
    assert "GPU" not in remarks


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "hipExtModuleLaunchKernel",
                                  "hipLaunchKernel", "cudaGraphLaunch", "cudaLaunchCooperativeKernel"])  # fmt: skip
def test_launches_without_work_are_counted_by_step(tmp_path, capsys, call):
    recording = healthy()
    for at in (1500, 2500, 2600):
        recording.launch(at, call=call, lost=True)
    code, document, tables, remarks = show(capsys, recording.write(tmp_path / "t.json"))
    (lack,) = document["lacks"]
    assert (code, lack["kind"], lack["count"], lack["total"], lack["file"]) == (0, "launches", 3, 9, "t.json")
    assert (lack["by_step"], lack["by_stream"]) == ({"3": 1, "4": 2}, {"-1": 3})
    assert document["ranks"][0]["bounds"]["compute_ns"] == "at least"
    assert "t.json: 3 of 9 launches have no event of the GPU (1 in step 3, 2 in step 4)" in remarks
    assert "≥ 0.3000" in tables  # compute of 6 x 50 us
    assert "≤ " in tables  # idle time
    assert not compute_file_figures(trace.read_trace(tmp_path / "t.json")).is_usable


def test_a_spoiled_recording_has_no_operations_per_second(tmp_path):
    recording = healthy()
    shapes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    recording.add("cpu_op", "aten::mm", 1005, 20, **shapes)
    for is_lost in (False, True):
        if is_lost:
            recording.launch(1500, lost=True)
        figures = compute_file_figures(trace.read_trace(recording.write(tmp_path / "t.json")))
        assert (figures.analysis.products == [], figures.analysis.is_bound) == (is_lost, is_lost)


def test_launches_of_a_stream_are_counted_if_the_call_says_the_stream(tmp_path):
    recording = healthy()
    recording.add("cuda_runtime", "hipLaunchKernel", 1500, 5, correlation=99, stream=4)
    (lack,) = compute_file_figures(trace.read_trace(recording.write(tmp_path / "t.json"))).lacks
    assert (lack.by_stream, "1 on stream 4" in lack.text) == ({4: 1}, True)


def test_a_recording_that_lost_all_work_has_no_figures(tmp_path, capsys):
    recording = Recording()
    recording.step(3, 1000, 900)
    for index in range(4):
        recording.add("cpu_op", "aten::mm", 1005 + 100 * index, 50)
        recording.launch(1010 + 100 * index, lost=True)
    recording.launch(1500, call="cudaMemcpyAsync", lost=True)
    code, document, _, remarks = show(capsys, recording.write(tmp_path / "t.json"))
    assert (code, document["ranks"]) == (1, [])
    assert [(lack["kind"], lack["count"], lack["total"]) for lack in document["lacks"]] == [
        ("launches", 4, 4),
        ("copies", 1, 1),
    ]
    assert "4 of 4 launches have no event of the GPU" in remarks
    assert "the work of the GPU was not recorded" in document["without_figures"][0]


def test_only_work_that_was_launched_to_run_in_the_steps_is_missed(tmp_path):
    recording = healthy()
    recording.launch(3000, lost=True)  # after the last step
    recording.launch(1500, call="cudaLaunchHostFunc", lost=True)  # runs on the host
    recording.add("cuda_runtime", "cudaLaunchKernel", 1510, 5)  # without a correlation, its event cannot be found
    recording.add("cuda_runtime", "hipStreamBeginCapture", 1600, 1)
    recording.launch(1610, lost=True)  # is recorded into a graph and does not run
    recording.add("cuda_runtime", "hipStreamEndCapture", 1620, 1)
    recording.launch(1700, call="cudaMemsetAsync", call_us=0.2, lost=True)  # sets 0 bytes
    assert lacks(recording, tmp_path) == {}


def test_a_call_of_the_driver_in_a_call_of_the_runtime_is_one_launch(tmp_path):
    recording = healthy()
    recording.add("cuda_runtime", "cudaLaunchKernel", 1500, 9, correlation=50)
    recording.add("cuda_driver", "cuLaunchKernel", 1502, 5, correlation=51)
    assert lacks(recording, tmp_path) == {"launches": (1, 7)}
    recording.add("kernel", "gemm", 1600, 50, tid=7, device=0, stream=7, correlation=51)
    assert lacks(recording, tmp_path) == {}


def test_lost_copies_leave_the_time_of_compute_exact(tmp_path, capsys):
    recording = healthy()
    recording.launch(1600, call="cudaMemcpyAsync", lost=True)
    code, document, tables, remarks = show(capsys, recording.write(tmp_path / "t.json"))
    assert (code, document["lacks"][0]["kind"], document["lacks"][0]["count"]) == (0, "copies", 1)
    assert set(document["ranks"][0]["bounds"]) == {"memory_ns", "non_compute_ns", "idle_ns"}
    assert document["ranks"][0]["idle"] is None
    assert "1 of 3 copies and sets of memory" in remarks
    assert "≥ 0.06000" in tables
    assert compute_file_figures(trace.read_trace(tmp_path / "t.json")).is_usable


def test_kernels_that_overlap_the_next_of_their_stream_are_counted(tmp_path, capsys):
    recording = healthy()
    recording.launch(1700, at=1710, dur=160_000)
    recording.launch(1705, at=1760, dur=50)
    code, document, tables, remarks = show(capsys, recording.write(tmp_path / "t.json"))
    assert (code, document["lacks"][0]["kind"], document["lacks"][0]["count"]) == (0, "overlaps", 1)
    assert "1 of 10 kernels and copies overlap the next one of the same stream, which cannot be, by up to 159.950 ms" in remarks
    assert document["ranks"][0]["bounds"]["compute_ns"] == "at most"
    assert "≤ " in tables


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"at": 1752}, {}),  # programmatic dependent launch: 8 us before the end of the first
        ({"at": 1720, "stream": 8}, {}),  # another stream
        ({"at": 1720, "device": 1}, {"devices": (2, 2)}),  # the stream of the same number on another GPU
        ({"at": 1720}, {"overlaps": (1, 10)}),
    ],
)
def test_work_that_may_overlap_is_no_lack(tmp_path, second, expected):
    recording = healthy()
    recording.launch(1700, at=1710, dur=50)
    recording.launch(1705, **second)
    assert lacks(recording, tmp_path) == expected


def test_the_kernels_of_a_graph_may_overlap(tmp_path):
    recording = healthy()
    recording.launch(1700, call="cudaGraphLaunch", at=1710, dur=50)
    recording.add("kernel", "other branch", 1720, 50, tid=7, device=0, stream=7, correlation=recording._correlation)
    assert lacks(recording, tmp_path) == {}


def test_each_of_several_devices_has_its_own_idle_time(tmp_path, capsys):
    """Two GPUs work in turn: together they are never idle, but each is idle half of the time."""
    recording = Recording()
    for index in range(10):
        recording.launch(1000 + 100 * index, at=1100 + 100 * index, dur=100, device=index % 2)
    code, document, tables, remarks = show(capsys, recording.write(tmp_path / "t.json"))
    (rank,) = document["ranks"]
    assert (code, rank["idle_ns"], rank["compute_ns"], rank["bounds"]) == (0, 0, 1_000_000, {"idle_ns": "at least"})
    assert [(one["device"], one["compute_ns"], one["idle_ns"]) for one in rank["devices"]] == [
        (0, 500_000, 500_000),
        (1, 500_000, 500_000),
    ]
    assert "GPU 1" in tables
    assert "2 devices in one row (GPU 0, GPU 1)" in remarks
    assert "≥ 0" in tables


@pytest.mark.parametrize("backend", ["nccl", "NCCL"])
def test_a_rank_with_the_library_of_gpus_has_events_of_a_gpu(tmp_path, capsys, backend):
    recording = Recording(rank=0, world_size=1, backend=backend)
    recording.step(3, 1000, 500)
    recording.add("cpu_op", "aten::mm", 1100, 100)
    code, document, _, remarks = show(capsys, recording.write(tmp_path / "t.json"))
    assert (code, document["lacks"][0]["kind"], document["ranks"][0]["source"]) == (0, "no gpu events", "cpu")
    assert "no event of a GPU, although the process group uses nccl" in remarks
    recording.info["backend"] = "gloo"
    recording.info["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100"}]
    assert lacks(recording, tmp_path) == {}
    del recording.info["backend"]
    assert lacks(recording, tmp_path) == {"no gpu events": (0, 0)}


@pytest.mark.parametrize(("first", "lost"), [(1000, 1), (10**9, 1), (1.5, 0)])
def test_events_at_time_zero_are_left_out_unless_the_recording_begins_there(tmp_path, first, lost):
    recording = Recording()
    recording.add("cpu_op", "aten::mm", 0, 1)
    for index in range(20):
        recording.launch(first + 30 * index, at=first + 30 * index + 9, dur=20)
    read = trace.read_trace(recording.write(tmp_path / "t.json"))
    assert read.lost_counts == ({"at time zero or with a negative time": 1} if lost else {})
    assert compute_breakdown(read).compute_ns == 400_000


def test_a_kernel_at_time_zero_or_before_is_left_out_and_said(tmp_path, capsys):
    recording = healthy()
    recording.launch(1500, at=0)
    recording.launch(1510, at=-20)
    recording.add("cpu_op", "aten::mm", 0.5, 1700)
    code, document, _, remarks = show(capsys, recording.write(tmp_path / "t.json"))
    assert (code, document["ranks"][0]["compute_ns"]) == (1, 300_000)
    assert "2 events lost: at time zero or with a negative time" in remarks


def ranks_of(tmp_path, count, world_size, listed):
    for rank in range(count):
        recording = Recording(rank, world_size, "nccl")
        recording.step(3, 1000, 1000)
        recording.launch(1010, dur=100)
        args = collective("allreduce", 1000, range(world_size), **{"Process Group Ranks": listed})
        recording.launch(1030, at=1200, dur=100 + 50 * rank, stream=20, name=ALL_REDUCE, **args)
        recording.write(tmp_path / f"r{rank}.json")


@pytest.mark.parametrize("listed", ["[0, 1, 2, 3]", "[0, 1, ...]"])
def test_missing_ranks_make_transfer_and_bandwidth_bounds(tmp_path, capsys, listed):
    ranks_of(tmp_path, 2, 4, listed)
    code, document, tables, remarks = show(capsys, f"{tmp_path}/")
    (use,) = document["collectives"]
    assert (code, use["profiled"], use["is_partial"]) == (0, 2, True)
    assert "2 of 4 ranks were profiled" in document["missing_ranks"]
    assert "2 of 4 ranks were profiled" in remarks
    assert "2 of 4" in tables
    assert "rank 0 lets the others wait the longest of the profiled ranks" in tables


def test_all_ranks_are_no_remark(tmp_path, capsys):
    ranks_of(tmp_path, 4, 4, "[0, 1, 2, 3]")
    _, document, tables, remarks = show(capsys, f"{tmp_path}/")
    assert (document["missing_ranks"], document["collectives"][0]["is_partial"]) == (None, False)
    assert "profiled:" not in remarks
    assert "of the profiled ranks" not in tables


def test_an_incomplete_recording_is_not_compared(tmp_path, capsys):
    healthy().write(tmp_path / "a" / "t.json")
    recording = healthy()
    recording.launch(1500, lost=True)
    recording.write(tmp_path / "b" / "t.json")
    for run, other in (("a", "b"), ("b", "a")):
        _, document, tables, remarks = show(capsys, f"{tmp_path}/{run}/", "--against", f"{tmp_path}/{other}/")
        assert (document["why"], document["operators"]) == (None, None)
        assert "a recording is incomplete" in document["not_compared"]
        assert "not compared" in remarks
        assert "parts sum to the difference" not in tables
    _, document, _, _ = show(capsys, f"{tmp_path}/a/", "--against", f"{tmp_path}/a/")
    assert (document["not_compared"], document["why"]["difference_ns"]) == (None, 0)
