"""Known numbers go through every column of the tables of `collect` and of the report, except `collect trace`, which has a file
of its own. The expected texts are written by hand: 1 MiB is 1,048,576 bytes, 1 GB is 1,000,000,000 bytes."""

import csv

import pytest
import support_collect
import support_tables

from collect import flat_tables, metric, summary
from collect.comparison import command as comparison
from collect.comparison.compare import ComparedCell, ComparedSide, Comparison, MetricComparison
from collect.explain import command as explain
from collect.explain.explanation import ExplainedRun
from collect.explain.read_file import EventPlace
from collect.exports import xlsx
from collect.fetching import fetch_command
from collect.fetching.fetched_run import FetchedRun
from collect.findings import columns
from collect.findings.injected_faults import LostWorkerEffect, StragglerEffect
from collect.findings.prediction_scores import PredictionScore
from collect.findings.row import CellRow
from collect.findings.statistics import Estimate
from collect.history import command as history
from collect.history.periods import CellHistory, HistoryMetric, HistoryPeriod
from collect.reading import load
from collect.report import provenance, summary_tables, terminal
from collect.timeline import command as timeline
from collect.timeline.clocks import ComparedClock
from collect.verdicts.reported import ReportedResult
from shardlab.runs.instrument_span import InstrumentAct, InstrumentSpan
from shardlab.workspace.workspace import Workspace

MIB, GIB = 1_048_576, 1_073_741_824
# The heading of each metric that the report shows, with its unit. MiB: the sizes of this test are hundreds of MiB.
HEADINGS = {
    "final_accuracy_pct": "Accuracy (%)",
    "bubble_theory_pct": "Bubble, theory (%)",
    "bubble_pct": "Bubble (%)",
    "checkpoint_save_s": "Save a checkpoint (s)",
    "checkpoint_load_s": "Load a checkpoint (s)",
    "checkpoint_bytes": "Checkpoint (MiB)",
    "sent_theory_bytes": "Per step, theory (MiB)",
    "sent_counted_bytes": "Per step, counted (MiB)",
    "sent_textbook_bytes": "Per step, textbook (MiB)",
    "energy_j": "Energy (J)",
    "energy_per_unit_j": "Energy per unit (J/unit)",
    "nvlink_bytes": "All timed steps, NVLink (MiB)",
    "pcie_bytes": "All timed steps, PCIe (MiB)",
    "largest_batch": "Largest batch that fits (items)",
    "final_loss": "Final loss (nats)",
    "peak_memory_bytes": "Peak memory (MiB)",
    "reserved_memory_bytes": "Reserved (MiB)",
    "oom_allocated_bytes": "Allocated at OOM (MiB)",
    "oom_reserved_bytes": "Reserved at OOM (MiB)",
    "oom_requested_bytes": "Requested at OOM (MiB)",
    "memory_parameter_bytes": "Parameters (MiB)",
    "memory_gathered_bytes": "Gathered (MiB)",
    "memory_gradient_bytes": "Gradients (MiB)",
    "memory_optimizer_state_bytes": "Optimizer (MiB)",
    "memory_master_parameter_bytes": "Master copy (MiB)",
    "memory_activation_bytes": "Activations (MiB)",
    "memory_buffer_bytes": "Buffers (MiB)",
    "memory_temporary_bytes": "Temporary (MiB)",
    "memory_over_estimate": "Peak / estimate (x)",
    "mfu_pct": "MFU (%)",
    "network_bytes": "All timed steps, network (MiB)",
    "network_received_bytes": "All timed steps, network, received (MiB)",
    "rdma_bytes": "All timed steps, RDMA (MiB)",
    "loopback_bytes": "All timed steps, loopback (MiB)",
    "step_time_over_prediction": "Step / predicted (x)",
    "memory_over_prediction": "Peak / predicted (x)",
    "sent_over_prediction": "Counted / predicted (x)",
    "energy_over_prediction": "Energy / predicted (x)",
    "speed_up": "Speed-up (x)",
    "scaling_efficiency_pct": "Efficiency (%)",
    "staleness_mean": "Staleness, mean (updates)",
    "staleness_max": "Staleness, max (updates)",
    "step_time_ms": "Step, median (ms)",
    "throughput_per_s": "Throughput (units/s)",
    "sent_traced_bytes": "Per step, traced (MiB)",
    "traced_difference_pct": "Traces against theory (%)",
    "train_time_s": "Training (s)",
    "epoch_time_s": "Epoch, mean (s)",
    "epoch_time_median_s": "Epoch, median (s)",
    "cpu_pct": "CPU (%)",
    "gpu_pct": "GPU (%)",
    "gpu_memory_pct": "GPU memory (%)",
    "wire_difference_pct": "Counters against collectives (%)",
}


def estimates():
    """An estimate of every metric of the menu; the value of the n-th metric is 100 + n, or 100 + n MiB of bytes."""
    known = {}
    for number, one in enumerate(metric.load_metrics(), 100):
        value = float(number * MIB if one.unit == "bytes" else number)
        known[one.name] = Estimate(value, one.unit, 3, value, value - value / 50, value + value / 50)
    return known


@pytest.fixture(scope="module")
def summarized(tmp_path_factory):
    """The summary of a workspace with runs in many states, whose first row has every metric of the menu."""
    found = summary.summarize(load.load_matrix(support_collect.matrix(tmp_path_factory.mktemp("numbers")), None), "single")
    found.rows[0].metrics = estimates()
    return found


def test_the_summary_shows_the_known_number_of_each_metric_with_heading_and_unit():
    row = CellRow("cell", {"strategy": "ddp", "gpus": 2}, 3, {"completed": 3}, True, None, None, estimates(), [])
    table = columns.make_cell_tables([row])
    shown = {column.name: column for further in table.further_tables for column in further.columns[1:]}
    shown |= {column.name: column for column in table.summary_table.columns if column.name in estimates()}
    assert {name: column.heading_with_unit for name, column in shown.items()} == HEADINGS
    for number, one in enumerate(metric.load_metrics(), 100):
        if one.name in shown:
            assert str(shown[one.name].text(row)).split()[0] in (str(number), f"{number}.0"), one.name
    interval = str(shown["throughput_per_s"].text(row)).split(" ± ")[1]
    number = [one.name for one in metric.load_metrics()].index("throughput_per_s") + 100
    assert float(interval) == pytest.approx(number / 50, rel=0.05)  # two digits


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_flat_table_holds_the_known_number_of_each_metric_in_its_column(summarized, tmp_path, suffix):
    frame, path = flat_tables.make_summary_frame(summarized), tmp_path / f"summary.{suffix}"
    if suffix == "csv":
        flat_tables.write_csv(frame, path)
        with path.open(newline="") as lines:
            row = next(csv.DictReader(lines))
    else:
        import polars as pl

        flat_tables.write_parquet(frame, path)
        row = pl.read_parquet(path).row(0, named=True)
    for number, one in enumerate(metric.load_metrics(), 100):
        value = number * MIB if one.unit == "bytes" else number
        found = [float(row[f"{one.name}{end}"]) for end in ("", "_low", "_high")]
        assert found == pytest.approx([value, value * 0.98, value * 1.02]), one.name
        assert row[f"{one.name}_unit"] == one.unit
    cell = {key: row[key] for key in ("strategy", "gpus", "steps", "seq_len", "seed")}
    expected = summarized.rows[0].cell
    assert {key: str(value) for key, value in cell.items()} == {key: str(expected[key]) for key in cell}


def test_the_workbook_holds_the_known_number_of_each_metric_with_its_unit(summarized):
    of_cells = xlsx.make_sheets(summarized)[1]
    row = dict(zip(of_cells.headings, of_cells.rows[0], strict=True))
    for number, one in enumerate(metric.load_metrics(), 100):
        units = {estimate.unit for each in summarized.rows if (estimate := each.metrics.get(one.name))}
        name = f"{one.name} ({one.unit})" if len(units) == 1 and one.unit else one.name
        value = number * MIB if one.unit == "bytes" else number
        assert [row[name], row[f"{name}, low"], row[f"{name}, high"]] == pytest.approx([value, value * 0.98, value * 1.02]), (
            name
        )
        assert row.get(f"{one.name}, unit", one.unit) == one.unit


def test_collect_fetch_shows_the_known_number_in_every_column(tmp_path, monkeypatch, capsys):
    fetched = FetchedRun(
        run="RUN", state="completed", complete=True, files=1_013, bytes=7_000_000, hashed=17, truncated=5, corrupt=3
    )
    monkeypatch.setattr(fetch_command, "_fetch_runs", lambda *_: [fetched])
    output = support_tables.PrintedTables()
    fetch_command.fetch_and_print(Workspace(tmp_path), [], output, must_prune=False, is_confirmed=False)
    assert output.rows_of[""] == [
        {
            "#": "", "Run": "RUN", "State": "completed", "Files (n)": "1,013", "Size (KiB)": "6,835", "Hashed (n)": "17",
            "Truncated files (n)": "5", "Corrupt lines (n)": "3",
        }
    ]  # fmt: skip


def test_collect_history_shows_the_known_number_in_every_column():
    def period(day, step_ms, ratio):
        known = {
            "step_time_ms": HistoryMetric(step_ms, "ms", 2, ratio),
            "throughput_per_s": HistoryMetric(7013.0, "tokens/s", 2, 1.0),
            "train_time_s": HistoryMetric(13.03, "s", 2, 1.0),
        }
        return HistoryPeriod("place", "m", f"2031-05-{day}T01:00:00", f"2031-05-{day}T23:00:00", ["a", "b", "c"], known, [])

    cell = CellHistory("ddp", 0, [period("01", 20.5, 1.0), period("03", 22.55, 1.1)])
    output = support_tables.PrintedTables()
    history._print_history(output, history.History(1, [cell], []))
    same = {"Workspace": "place", "n": "3", "Throughput": "7,013 tokens/s", "Train time": "13.03 s", "What changed": ""}
    assert output.rows_of[""] == [
        same | {"Cell": "ddp", "Date (UTC)": "2031-05-01", "Step time": "20.50 ms", "Step / first": ""},
        same | {"Cell": "", "Date (UTC)": "2031-05-03", "Step time": "22.55 ms", "Step / first": "1.100"},
    ]


def test_collect_compare_shows_the_known_number_in_every_column():
    figures = [
        MetricComparison(
            metric="step_time_ms", unit="ms", a=20.5, b=22.55, n_a=3, n_b=5, verdict="slower", ratio=1.1, low=1.03, high=1.17
        ),
        MetricComparison(metric="peak_memory_bytes", unit="bytes", a=7e9, b=5e6, n_a=1, n_b=5, verdict="undecided"),
    ]
    pair = ComparedCell(a="x", b="y", label="ddp ×2", state_a="completed", state_b="completed", metrics=figures)
    side = ComparedSide("A", "/a", "m", "", False, [])
    output = support_tables.PrintedTables()
    comparison._print_pairs(output, Comparison(1, side, side, [pair], [], [], [], [], [], 0.0))
    headings = ("Cell", "Metric", "A", "B", "B / A", "95 % interval", "n", "B is")
    assert output.rows_of[""] == [
        dict(zip(headings, row, strict=True))
        for row in (
            ("ddp ×2", "step_time_ms", "20.50 ms", "22.55 ms", "1.100", "1.030 to 1.170", "3, 5", "slower"),
            ("ddp ×2", "peak_memory_bytes", "7.000 GB", "5.000 MB", "", "none: n = 1", "1, 5", "undecided"),
        )
    ]


def test_collect_timeline_shows_the_known_number_in_every_column():
    row = {
        "rank": 3, "host": "node1", "steps": 1_013, "step_ms": 20.5, "data_ms": 1.03, "forward_ms": 5.07, "backward_ms": 11.09,
        "optimizer_ms": 3.01,
    }  # fmt: skip
    assert [str(column.text(row)) for column in timeline.RANK_COLUMNS] == [
        "3",
        "node1",
        "1,013",
        "20.5",
        "1.03",
        "5.07",
        "11.09",
        "3.01",
    ]
    clock = ComparedClock(host="node1", first_rank=2, at_s=[1.0, 9.0], offset_s=[0.0503, 0.0576], within_s=0.00017)
    assert [str(column.text(clock)) for column in timeline.CLOCK_COLUMNS] == ["node1", "2", "50.300", "0.170", "7.300"]
    spans = [
        InstrumentSpan(rank, "node0", 9.0, InstrumentAct("checkpoints", "after", step, seconds))
        for rank, step, seconds in ((0, 3, 0.0103), (1, 5, 0.0509), (0, 7, 0.0207))
    ]
    (rows,) = timeline._group_by_instrument(spans)
    name, count, median, longest, where, when = (str(column.text(rows)) for column in timeline.INSTRUMENT_COLUMNS)
    assert (name, count, median, longest, where) == ("checkpoints", "3", "20.7", "50.9", "rank 1, node0")
    assert "5" in when


def test_collect_explain_shows_the_known_numbers():
    run = ExplainedRun(
        "RUN", "cell", 1, 1, "completed", 7_013.0, "tokens/s", "", "", {"steps": 31.0, "step_ms": 1_013.0, "units": 5_120.0},
        None, [],
    )  # fmt: skip
    assert explain._format_run_value(run) == "7,013 tokens/s"
    assert explain._format_inputs(run) == "31 steps, 1,013 ms, 5,120 units"
    assert explain._format_event(EventPlace("gemm", 1_234_007, 17)) == "gemm at ts 1234.007"


def test_the_scores_of_predictions_show_the_known_number_in_every_column():
    score = PredictionScore(
        strategy="ddp", category="memory", unit="bytes", n=7, predicted=13.7 * GIB, measured=101 * MIB, ratio=1.07,
        ratio_low=0.93, ratio_high=1.19, error_pct=5.3, within=3,
    )  # fmt: skip
    table = summary_tables.make_score_table([score])
    assert dict(zip(table.headings, table.texts[0], strict=True)) == {
        "Strategy": "ddp", "Category": "memory", "n": "7", "Predicted": "13.7 GiB", "Measured": "101 MiB", "Ratio": "1.07",
        "Ratio from": "0.930", "Ratio to": "1.19", "Error (%)": "5.3", "In range": "3 of 7",
    }  # fmt: skip


def test_the_tables_of_faults_show_the_known_number_in_every_column(summarized):
    cell = summarized.rows[0].id
    summarized.slowed = [
        StragglerEffect(
            cell=cell, rank=1, delay_ms=53.0, n=3, found=1, waiting_ms=[41.0, 0.0], ordinary=None, throughput_per_s=7_013.0,
            ordinary_throughput_per_s=9_007.0, rank_throughput_per_s=8_011.0, ordinary_rank_throughput_per_s=9_109.0,
            staleness_mean=1.5, ordinary_staleness_mean=0.5,
        )
    ]  # fmt: skip
    summarized.lost = [
        LostWorkerEffect(
            cell=cell, rank=1, step=5, state="failed 2", n=2, before_per_s=7_013.0, after_per_s=5_003.0, unseen_units=1_009.0,
            unseen_pct=12.3, last_step=17, last_loss=2.503, ordinary=None, ordinary_loss=2.207,
        )
    ]  # fmt: skip
    slowed, lost = summary_tables.make_fault_tables(summarized, summarized.labels_by_cell)
    label = summarized.labels_by_cell[cell]
    assert dict(zip(slowed.headings, slowed.texts[0], strict=True)) == {
        "Cell": label, "n": "3", "Delay of a step (ms)": "53.0", "Found": "rank 1",
        "Throughput by the slowest rank (units/s)": "7,013 (9,007)", "By each rank's own time (units/s)": "8,011 (9,109)",
        "Waiting of ranks 0, 1, ... (ms)": "41, 0", "Staleness, mean": "1.500 (0.5000)",
    }  # fmt: skip
    assert dict(zip(lost.headings, lost.texts[0], strict=True)) == {
        "Cell": label, "State": "failed 2", "n": "2", "Before (units/s)": "7,013", "After (units/s)": "5,003",
        "Not seen (units)": "1,009", "Not seen (%)": "12.3", "Last step": "17", "Loss (nats)": "2.503 (2.207)",
    }  # fmt: skip


def test_the_reported_numbers_of_a_study_show_the_known_number_in_every_column(summarized):
    printed = ReportedResult(
        where="Table 2", metric="train_time_s", cell={}, row=summarized.rows[0].id, printed="55.9", head="s", unit="s",
        kind="measured", measured=58.03, low=57.01, high=59.07, n=3, ratio=1.038, agrees=False, comparable=True,
    )  # fmt: skip
    summarized.verdicts, summarized.reported = [], [printed]
    output = support_tables.PrintedTables()
    terminal.print_verdicts(output, summarized)
    title = "reported numbers: 1 printed, 1 measured here, 1 to compare: 1 differ"
    assert output.rows_of[title] == [
        {
            "Where": "Table 2", "Cell": summarized.labels_by_cell[summarized.rows[0].id], "Metric": "train_time_s",
            "Reported": "55.9 s", "Measured": "58.03 s", "95 % interval": "57.01 to 59.07 s", "n": "3", "Ratio": "1.04",
            "": "differs", "Why": "",
        }
    ]  # fmt: skip


def test_the_hosts_of_a_report_show_the_known_numbers(tmp_path):
    (host,) = provenance.describe_hosts(load.load_matrix(support_collect.matrix(tmp_path), None))
    assert dict(host[1])["Memory"] == "16.0 GiB"
    assert dict(host[1])["Network"] == "lo (loopback), eth0 (virtual, 10000 Mbit/s)"
