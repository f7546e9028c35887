"""A trace that lacks something ranks no cell by the figures that it spoils, and the summary and the page say so."""

import gzip
import json

import pytest
import support_traces
from support_recordings import ALL_REDUCE, Recording, collective

from collect.cli import main
from collect.explain import read_files
from collect.metric import compute_quantities, load_metrics
from collect.reading import load
from shardlab.workspace.workspace import Workspace
from tests.collect.traces.test_collect_traces import DDP, PROVEN, profiled, summarized, support


class Written(Recording):
    """A recording of two steps that is written as the trace file of its rank."""

    def __init__(self, rank=0, world_size=1, backend="nccl", us=100):
        super().__init__(rank, world_size, backend)
        for step in range(2):
            self.step(step + 3, 1000 + 1000 * step, 900)
            self.launch(1010 + 1000 * step, dur=us)
            self.launch(1200 + 1000 * step, dur=us, name=ALL_REDUCE, **collective("allreduce", 1000, range(world_size)))

    def write(self, folder, gz=True):
        content = json.dumps({"distributedInfo": self.info, "traceEvents": self.events}).encode()
        (folder / f"rank-{self.info['rank']:05d}.json.gz").write_bytes(gzip.compress(content))


def lose_launch(recording):
    recording.launch(1600, lost=True)


def overlap(recording):
    recording.launch(1500, dur=100_000)
    recording.launch(1520)


def lose_copy(recording):
    recording.launch(1600, call="cudaMemcpyAsync", lost=True)


def use_two_gpus(recording):
    recording.launch(1600, device=1)


def lose_everything(recording):
    recording.events = [event for event in recording.events if event["cat"] != "kernel"]


def find_metrics(tmp_path, *spoil, world_size=1, ranks=1):
    recordings = [Written(rank, world_size) for rank in range(ranks)]
    for change in spoil:
        change(recordings[0])
    found = summarized(profiled(tmp_path, {"ddp": [recordings]}, traces="exact"))
    return found.rows[0].metrics, found.remarks


TRACE_METRICS = {"compute_ms", "idle_ms", "idle_pct", "memory_operations_ms", "communication_ms", "kernel_ms"}


@pytest.mark.parametrize(
    ("spoil", "blank", "remark"),
    [
        (lose_launch, TRACE_METRICS, "launches have no event of the GPU: "),
        (lose_everything, TRACE_METRICS, "launches have no event of the GPU: "),
        (overlap, TRACE_METRICS, "kernels or copies overlap the next one of their stream: "),
        (lose_copy, {"idle_ms", "idle_pct", "memory_operations_ms"}, "copies or sets of memory have no event of the GPU"),
        (use_two_gpus, {"idle_ms", "idle_pct"}, "several devices in one row"),
    ],
)
def test_a_spoiled_figure_is_no_metric_and_a_remark_says_so(tmp_path, spoil, blank, remark):
    metrics, remarks = find_metrics(tmp_path, spoil)
    assert TRACE_METRICS - metrics.keys() == blank
    (said,) = [one for one in remarks if remark in one]
    assert "/trace/rank-00000.json.gz (" in said


def test_a_whole_trace_has_all_metrics_and_no_remark(tmp_path):
    metrics, remarks = find_metrics(tmp_path)
    assert metrics.keys() >= TRACE_METRICS
    assert not [one for one in remarks if "trace" in one or "ranks" in one]


def test_the_page_and_the_summary_say_what_traces_lack(tmp_path, capsys):
    recording = Written()
    lose_launch(recording)
    workspace = profiled(tmp_path, {"ddp": [[recording]]}, traces="exact")
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    said = "traces are not used, because launches have no event of the GPU: "
    assert said in " ".join(capsys.readouterr().out.split())
    for name in ("index.html", "summary.json"):
        assert said in (workspace.report / name).read_text()


def test_damaged_traces_are_named(tmp_path):
    workspace = profiled(tmp_path, {"ddp": [[Written()]]}, traces="exact")
    (path,) = workspace.path.glob("runs/*/trace/*.gz")
    path.write_bytes(path.read_bytes()[:-8])
    (said,) = [remark for remark in summarized(workspace).remarks if "damaged" in remark]
    assert "rank-00000.json.gz (cut short: its gzip stream ends too early)" in said


@pytest.mark.parametrize(("ranks", "is_blank"), [(1, True), (2, True), (3, False)])
def test_bandwidth_and_waiting_need_all_ranks_of_the_group(tmp_path, ranks, is_blank):
    names = {"waiting_ms", "waiting_pct", "collective_skew_us"}
    recordings = [Written(rank, 3, us=100 + rank) for rank in range(ranks)]
    workspace = profiled(tmp_path, {"ddp": [recordings]}, traces="exact")
    found = summarized(workspace)
    assert (names & found.rows[0].metrics.keys() == set()) == is_blank
    (run,) = load.load_matrix(workspace, None).runs
    bandwidth = next(metric for metric in load_metrics() if metric.name == "bus_bandwidth_gb_per_s").of_run_at(
        run, "all_reduce"
    )
    assert (bandwidth is None) == is_blank
    remarks = [remark for remark in found.remarks if "not all ranks were profiled" in remark]
    assert [f"({ranks} of 3 ranks)" in remark for remark in remarks] == [True] * is_blank
    (group,) = found.groups
    assert (group.profiled, group.size) == (ranks, 3)


@pytest.mark.parametrize(
    ("gpus", "backend", "is_used"),
    [(["GPU-1"], "gloo", False), ([], "nccl", True), (None, "nccl", True)],
)
def test_a_trace_without_gpu_is_used_only_if_the_run_used_none(tmp_path, capsys, gpus, backend, is_used):
    recording = Written(backend=backend)
    recording.events = [event for event in recording.events if event["cat"] == "user_annotation"]
    recording.add("cpu_op", "aten::mm", 1100, 100)
    workspace = Workspace(tmp_path)
    support.keep(workspace, [DDP], repeats=1, traces="exact")
    folder = support.completed(workspace, DDP, rehearsal=False, found={"same_work": PROVEN, "gpus": gpus})
    (folder.path / "trace").mkdir()
    recording.write(folder.path / "trace")
    found = summarized(workspace)
    assert ("compute_ms" in found.rows[0].metrics) == is_used
    assert any("no event of a GPU" in remark for remark in found.remarks) != is_used
    assert main(["trace", folder.run_id, "--json", "--workspace", str(tmp_path)]) == 0
    assert (json.loads(capsys.readouterr().out)["lacks"] == []) == is_used


def test_an_explanation_names_only_traces_that_were_used(tmp_path):
    recordings = [Written(rank, 2) for rank in range(2)]
    lose_launch(recordings[0])
    workspace = profiled(tmp_path, {"ddp": [recordings]}, traces="exact")
    (run,) = load.load_matrix(workspace, None).runs
    assert "compute_ms" in compute_quantities(run)
    reads = next(metric.reads for metric in load_metrics() if metric.name == "compute_ms")
    assert [one.file.rpartition("/")[2] for one in read_files.read_files(run, reads)] == ["rank-00001.json.gz"]


def test_a_spoiled_trace_has_no_figures_like_hta(tmp_path):
    lacking = support_traces.Rank(0, seed=3)
    lacking._add("cuda_runtime", "cudaLaunchKernel", lacking.events[-1]["ts"] + 100, 2500, args={"correlation": 9})
    found = summarized(profiled(tmp_path, {"ddp": [[lacking, support_traces.Rank(1, seed=3)]]}))
    alone = summarized(profiled(tmp_path / "b", {"ddp": [[support_traces.Rank(1, seed=3)]]}))
    assert found.rows[0].metrics["kernel_ms"].value == alone.rows[0].metrics["kernel_ms"].value
