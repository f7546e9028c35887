"""`collect explain` names a place in a file for every metric; these tests open the file and look at the place."""

import gzip
import json
import re

import msgspec
import pytest
import support_collect as support
import support_noted_run
import support_ranks
import support_traces

from collect import cli
from collect.explain import read_files
from collect.metric import WORK_KINDS, load_metrics
from collect.reading import load
from shardlab.files import files
from shardlab.hardware.nvml import Gpu
from shardlab.matrix.batch_search import BatchSearch, try_cell
from shardlab.record_types import Spread
from shardlab.runs.prediction import Prediction, make_exact_range
from shardlab.runs.record import NicSample, RdmaSample, SameWork
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

GIB = 2.0**30
MEASURED = {
    "final_accuracy": 0.75,
    "throughput_per_s": 9000.0,
    "step_time_ms": Spread(median=60.0, mean=60.0, p5=55.0, p95=70.0, n=10),
    "train_time_s": 0.6,
    "epoch_time_s": [0.3, 0.2, 0.1],
    "peak_memory_bytes": {"allocated": 4 * 2**30},
    "parameters": 1_000_000,
    "flops_per_unit": 6e9,
    "same_work": SameWork(verdict="proven", why="against one process"),
    "communication_bytes": {"theory": 4000.0, "counted": 4100.0, "textbook": 3900.0, "wire": 1.0},
    "instruments": {
        "memory": {
            "cost_s": 0.1,
            "largest_bytes": dict.fromkeys(
                (
                    "parameter",
                    "gathered",
                    "gradient",
                    "optimizer_state",
                    "master_parameter",
                    "activation",
                    "buffer",
                    "temporary",
                ),
                1024,
            ),
            "peak_bytes": {"parameter": 900, "gradient": 800},
            "estimate_bytes": {"parameters": 500, "gradients": 600},
        },
        "checkpoints": {"cost_s": 0.1, "save_s": 1.5, "load_s": 0.5, "bytes": 4096},
    },
    "knobs": {"effective": {"staleness_counts": {"0": 6, "1": 3}}},
    "gpus": ["GPU-0"],
}
PREDICTED = Prediction(
    step_s=make_exact_range(0.05),
    time_s=make_exact_range(1.0),
    tensor_bytes=make_exact_range(3 * GIB),
    memory_from="rehearsal",
    energy_kwh=make_exact_range(1e-5),
    sent_bytes=2000.0,
)
# Field of the figures of a rank -> the kinds of events from which the field is computed. Another field, such as the number of
# the rank, is no figure.
KINDS = {
    "compute_ns": ("compute",),
    "communication_ns": ("collectives",),
    "overlap_ns": ("compute", "collectives"),
    "memory_ns": ("memory operations",),
    **dict.fromkeys(("non_compute_ns", "idle_ns", "span_ns", "idle"), WORK_KINDS),
    "collectives": ("collectives",),
    "calls": ("collectives",),
    "launches": ("launched work",),
    "memory": ("allocations",),
    "products": ("matrix products",),
    "steps": ("profiler steps",),
}
NOT_DECLARED = {"instruments"}  # of wire_difference_pct: two instruments must be absent, and no value of one is read
GUARDS = {"gpus", "instruments", "same_work.verdict"}  # keys that decide only whether there is a value, not which


def rewrite(path, change):
    """Change every record of a file. change: takes the number of the record, from 0, and the record, which it changes."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    for number, record in enumerate(records):
        change(number, record)
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))


def on_gpus(workspace, cell):
    """A run with all that a GPU, its links, the network and storage can record, a prediction, and the traces of both ranks."""
    gpu = Gpu("GPU-0", "NVIDIA A100-SXM4-40GB", 40 * 2**30)
    used = {"power_w": 200.0, "memory_used_bytes": 2**30, "memory_total_bytes": 40 * 2**30}
    folder = support.completed(workspace, cell, rehearsal=False, gpus=[gpu], found=MEASURED, gpu=used)

    def sampled(number, record):
        counters = {"energy_j": 10.0 * number, "nvlink_tx_bytes": 1000 * number, "pcie_tx_bytes": 100 * number}
        record["gpus"][0] |= {**counters, "processes": int(number >= 10)}
        kernel = dict.fromkeys(("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"), 0)
        card = NicSample(
            name="eth1",
            kind="physical",
            tx_bytes=500 * number,
            rx_bytes=400 * number,
            rx_pauses=number,
            packet_rate_limited=number,
            **kernel,
        )
        record["nics"] = [nic | kernel for nic in record["nics"]] + [msgspec.to_builtins(card)]
        port = RdmaSample(
            device="mlx5_0",
            port=1,
            link_layer="InfiniBand",
            tx_bytes=7 * number,
            rx_errors=0,
            tx_discards=0,
            retransmitted_packets=number,
        )
        record["rdma"] = [msgspec.to_builtins(port) | {"link_downed": 0}]

    def stepped(number, record):
        record |= {
            "cpu_s": 0.05 * number,
            "disk_read_bytes": 10 * number,
            "disk_write_bytes": 5 * number,
            "reserved_bytes": 2**31,
            "forward_ms": 10.0 + number % 3,
            "backward_ms": 20.0,
            "optimizer_ms": 5.0,
        }

    rewrite(folder.samples_file(support.HOST), sampled)
    for rank in range(2):
        rewrite(folder.steps_file(rank), stepped)
    files.write_json(folder.path / "prediction.json", PREDICTED, sync=False)
    support_ranks.write_traces(folder, support_ranks.run(5, size=2))
    return folder


def on_a_pipeline(workspace, cell):
    folder = support.completed(workspace, cell)

    def stepped(number, record):
        record |= {"forward_ms": 40.0, "backward_ms": 90.0 + 10 * number}

    for rank in range(2):
        rewrite(folder.steps_file(rank), stepped)


def over_gloo(workspace, cell):
    counts = {"communication_bytes": {"theory": 1.0, "wire": 600_000.0}}
    folder = support.completed(workspace, cell, found=counts)
    support.event(folder, "met", -1, backend="gloo")
    support.event(folder, "clock", -1)
    folder.samples_file(support.HOST).unlink()
    support.sample(folder, ended=2.5, hz=500)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    made = Workspace(tmp_path_factory.mktemp("places"))
    full, details = support.cell("ddp", 2, gpu_type=None), support.cell("fsdp2", 2)
    piped = support.cell("pipeline", 2, pp=2, dp=1, gradient_accumulation_steps=4)
    gloo, cpu = support.cell("ddp", 2, "fork"), support.cell("zero3", 2)
    search = BatchSearch("gpu_batch_size", "largest_that_fits", 1, 1, 8)
    tries = [try_cell(support.cell("zero2", 2, steps=2), size) for size in (1, 2, 3)]
    support.keep(made, [full, details, piped, gloo, cpu, *tries], repeats=1)
    on_gpus(made, full)
    support_ranks.write_traces(support.completed(made, details), [support_ranks.rank_with_layers(rank, 3) for rank in range(2)])
    on_a_pipeline(made, piped)
    over_gloo(made, gloo)
    support_ranks.write_traces(support.completed(made, cpu), [OnCpu(rank) for rank in range(2)])
    for what in (*tries, try_cell(tries[0], 4)):
        size = what.gpu_batch_size
        folder = support.completed(made, what) if size < 3 else support.failed(made, what, 1, "CUDA")
        if size == 3:
            sizes = {f"{kind}_bytes": 1000 * number for number, kind in enumerate(("requested", "allocated", "reserved"), 1)}
            support.event(folder, "oom", 8, why="CUDA out of memory", **sizes)
        files.write_json(folder.run_json, msgspec.structs.replace(support.run_file(what), search=search), sync=False)
    return made


class OnCpu(support_traces.Rank):
    """The trace of a rank without a GPU: two operators and a collective of gloo in each of three steps."""

    def __init__(self, rank):
        super().__init__(rank, steps=0)
        for step in range(3):
            at = support_traces.NEW + step * 1_000_000
            self._add("cpu_op", "aten::mm", at + 1000, 200_000)
            self._add("cpu_op", "aten::add", at + 300_000, 100_000)
            self._add("cpu_op", "c10d::allreduce_", at + 450_000, 10_000)
            self._add("user_annotation", "gloo:all_reduce", at + 460_000, 50_000, tid=2)
            self._add("user_annotation", f"ProfilerStep#{step}", at, 900_000)


@pytest.fixture(scope="module")
def runs(workspace):
    return [
        run
        for cell in load.load_matrix(workspace, None).cells
        for run in cell.runs
        if run.verdict.state in ("completed", "oom")
    ]


def known_runs(metric, runs):
    """The runs for which a metric has a value."""
    return [run for run in runs if metric.applies_to(run) and metric.of_run(run) is not None]


def value_at(document, key):
    """The value of a key as the command writes it, such as `gpus[0].name` or `tally["a b"]`."""
    for name, place, quoted in re.findall(r'([\w-]+)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]', key):
        document = document[int(place)] if place else document[json.loads(quoted) if quoted else name]
    return document


def events_of(path):
    """The events of a trace, with the times in ns: {(name, start, duration): number of events}."""
    found = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event["ph"] in "Xi":
            place = (event["name"], round(event["ts"] * 1000), round(event.get("dur", 0) * 1000))
            found[place] = found.get(place, 0) + 1
    return found


def check(workspace, file):
    """Open a file that is behind a value, and check that each place that is named is in it."""
    path = workspace.path / file.file
    assert bool(file.lines) + bool(file.keys) + bool(file.events) == 1, file
    if file.lines:
        lines = path.read_bytes().split(b"\n")
        edges = [part.split("-") for part in file.lines.split(", ")]
        assert all(json.loads(lines[int(edge) - 1])["schema"] == 1 for pair in edges for edge in pair), file
    for key in file.keys:
        assert value_at(json.loads(path.read_bytes()), key) is not None, key
    for group in file.events:
        there = events_of(path)
        for event in (group.first, group.last):
            assert there.get((event.name, event.start_ns, event.duration_ns)), event
        assert 0 < group.count <= sum(there.values())
        assert group.first.start_ns <= group.last.start_ns


def test_every_metric_of_a_run_ends_in_a_file_with_a_place(workspace, runs):
    nowhere = []
    for metric in (metric for metric in load_metrics() if metric.of_run):
        known = known_runs(metric, runs)
        for run in known[:2]:
            files_read = read_files.read_files(run, metric.reads)
            assert files_read, metric.name
            for file in files_read:
                check(workspace, file)
        if not known:
            nowhere.append(metric.name)
    assert nowhere == []


def declared_keys(reads):
    """What a metric declares to read, in the form of `read_keys`, with the keys that explain adds."""
    places = read_files.list_read_parts(reads)
    files_of_keys = {"run": "run.json", "result": "result.json", "hosts": "env/*.json", "prediction": "prediction.json"}
    return {name: set(places[pattern]) for name, pattern in files_of_keys.items()} | {
        "breakdown": set(reads.breakdown),
        "trace": set(reads.trace),
        "steps": {reads.steps},
        "samples": {reads.samples},
        "other": {name for name in ("events", "validation") if getattr(reads, name)},
    }


def read_keys(notes):
    """What a metric read of a run: for each part of its folder the keys, the kinds of events, or which records."""
    keys = {name: notes.innermost(name) for name in ("run", "result", "hosts", "prediction")}
    for name in ("breakdown", "trace"):
        keys[name] = {kind for path in notes.keys.get(name, ()) if path for kind in KINDS.get(path[0], ())}
    all_steps = notes.direct & {"steps", "step_records", "recorded_steps"}
    timed = notes.direct & {"timed_steps", "world_steps"}
    steps = "all" if all_steps else "timed" if timed else "undisturbed" if "undisturbed_steps" in notes.direct else None
    samples = ("window" if "timed_window" in notes.all_read else "before the training") if "samples" in notes.all_read else None
    other = {"events": {"events", "clock_offsets", "backend", "was_suspended"}, "validation": {"validation"}}
    read_others = {name for name, attributes in other.items() if attributes & notes.all_read}
    return {**keys, "steps": {steps}, "samples": {samples}, "other": read_others}


def lies_within(key, outer_keys):
    """Whether a key is one of the outer keys, or lies below one of them."""
    return key in outer_keys or any(str(key).startswith(f"{outer}.") for outer in outer_keys)


def test_every_metric_reads_what_it_declares_and_nothing_else(runs):
    for metric in (metric for metric in load_metrics() if metric.of_run):
        declared = declared_keys(metric.reads)
        read_by_any_run = {}
        for run in known_runs(metric, runs):
            value, notes = support_noted_run.compute_noted(metric, run)
            assert value == metric.of_run(run), metric.name
            for part, keys in read_keys(notes).items():
                not_declared = {key for key in keys - NOT_DECLARED if not lies_within(key, declared[part])}
                assert not_declared == set(), (metric.name, part)
                read_by_any_run.setdefault(part, set()).update(keys)
        for part, keys in declared.items():
            not_read = {key for key in keys if not any(lies_within(read, {key}) for read in read_by_any_run[part])}
            assert not_read == set(), (metric.name, part)


def test_changing_a_named_key_of_the_result_changes_the_value(workspace, runs):
    checked = set()
    for metric in (metric for metric in load_metrics() if metric.of_run):
        for run in known_runs(metric, runs)[:1]:
            files_read = read_files.read_files(run, metric.reads)
            keys = [key for file in files_read if file.file.endswith("/result.json") for key in file.keys]
            for key in set(keys) - GUARDS:
                assert without(run, key, metric) != metric.of_run(run), (metric.name, key)
                checked.add(key)
    assert {"train_time_s", "instruments.memory.peak_bytes", "communication_bytes.counted", "unit"} <= checked


def without(run, key, metric):
    """The value of a metric of a run without a key of its result.json."""
    before = run.folder.result.read_bytes()
    document = json.loads(before)
    outer, _, name = key.rpartition(".")
    del (value_at(document, outer) if outer else document)[name]
    try:
        run.folder.result.write_bytes(json.dumps(document).encode())
        return metric.of_run(type(run).read(RunDir(run.folder.path)))
    finally:
        run.folder.result.write_bytes(before)


def explained(capsys, workspace, row, metric):
    assert cli.main(["explain", row, metric, "--workspace", str(workspace.path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"][0]


def test_a_sum_over_events_names_their_number_and_the_first_and_the_last(workspace, capsys):
    run = explained(capsys, workspace, "ddp x2", "compute_ms")
    result, *traces = run["files"]
    assert (result["file"].rpartition("/")[2], result["keys"]) == ("result.json", ["gpus"])
    assert [file["file"].rpartition("/")[2] for file in traces] == ["rank-00000.json.gz", "rank-00001.json.gz"]
    for file, rank in zip(traces, support_ranks.run(5, size=2), strict=True):
        kernels = [event for event in rank.events if event.get("cat") == "kernel" and event["name"] == support_ranks.GEMM]
        steps = [event for event in rank.events if event["name"].startswith("ProfilerStep")]
        compute, profiled = file["events"]
        assert (compute["kind"], compute["count"]) == ("compute", len(kernels))
        assert compute["first"]["start_ns"] == min(event["ts"] for event in kernels)
        assert compute["last"]["start_ns"] == max(event["ts"] for event in kernels)
        assert (profiled["kind"], profiled["count"], profiled["last"]["name"]) == ("profiler steps", 2, "ProfilerStep#6")
        assert profiled["first"]["start_ns"] == steps[0]["ts"]


def test_the_events_of_a_rank_without_a_gpu_are_operators_and_spans_of_gloo(workspace, capsys):
    groups = {}
    for metric in ("compute_ms", "communication_ms"):
        for group in explained(capsys, workspace, "zero3 x2", metric)["files"][0]["events"]:
            groups[group["kind"]] = (group["count"], group["first"]["name"], group["last"]["name"])
    assert groups["compute"] == (6, "aten::mm", "aten::add")
    assert groups["collectives"] == (3, "gloo:all_reduce", "gloo:all_reduce")


def test_samples_of_the_power_before_the_training_are_named(workspace, runs):
    (metric,) = [metric for metric in load_metrics() if metric.name == "idle_power_w"]
    (run,) = known_runs(metric, runs)
    (samples,) = [file for file in read_files.read_files(run, metric.reads) if "/samples/" in file.file]
    assert samples.lines == "1-10"  # a process uses the GPU from the eleventh sample on


def test_the_terminal_names_keys_events_and_the_window(workspace, capsys):
    texts = {}
    for metric in ("train_time_s", "compute_ms", "gpu_pct"):
        assert cli.main(["explain", "ddp x2", metric, "--workspace", str(workspace.path)]) == 0
        texts[metric] = capsys.readouterr().out
    assert any(line.split()[-2:] == ["result.json", "train_time_s"] for line in texts["train_time_s"].splitlines())
    assert "2 profiler steps: ProfilerStep#5 at ts " in texts["compute_ms"]
    assert "samples count from 2025-10-09 08:53:" in texts["gpu_pct"]
