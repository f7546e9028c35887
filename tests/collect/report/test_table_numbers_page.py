"""Known numbers go through every column of the tables of traces, instruments and telemetry on the page of a report.

The numbers of two ranks with two profiled steps each become numbers per rank and step, so they are divided by 4. The expected
texts are written by hand.
"""

from types import SimpleNamespace

import pytest
import support_collect
from support_tables import KNOWN_WORK, MIB, TablesOfPage, analysis

from collect import summary
from collect.findings import trace_answers, trace_changes, trace_details, trace_tables
from collect.findings.equal_losses import LossComparison
from collect.findings.instrument_cost import InstrumentCost
from collect.findings.trace_answers import CellDifference
from collect.findings.trace_changes import CellAdvice
from collect.findings.trace_tables import OperatorDifferences, Rounding
from collect.findings.traffic import HostTraffic, RunTraffic
from collect.reading import load
from collect.report import page
from collect.traces.attention import AttentionUse
from collect.traces.breakdown import Breakdown, EventTally
from collect.traces.difference import PartDifference, StepDifference
from collect.traces.layers import LayerTime
from collect.traces.matrix_products import MatrixProduct
from collect.traces.memory_use import MemoryUse
from collect.traces.operators import OperatorDifference
from collect.traces.phases import PhaseTime
from collect.traces.run_answers import RunAnswers


def profiled(cell):
    """A cell with one completed run, whose two ranks have traces with known numbers."""
    both = {
        "phases": [
            PhaseTime(phase="forward", host_ns=7_004_000, device_ns=6_006_000, compute_ns=4_014_000, communication_ns=2_006_000)
        ],
        "layers": [
            LayerTime(
                name="Linear_0", parent="Net_0", depth=1, calls=13, forward_host_ns=1, backward_host_ns=1, forward_ns=3_002_000,
                backward_ns=5_010_000, communication_ns=1_014_000,
            )
        ],
        "products": [
            MatrixProduct(operator="aten::bmm", batch=2, m=3000, n=5000, k=7, dtype="c10::Half", calls=17, total_ns=5_004_000,
                copy_ns=1_006_000, untimed=0)
        ],
        "attention": [
            AttentionUse(
                backend="flash", backward=True, name="aten::_flash", by="operator", calls=19, total_ns=2_014_000, kernels=[]
            )
        ],
    }  # fmt: skip
    memory = [
        MemoryUse(
            device=f"cuda:{rank}", start_bytes=(101 + 2 * rank) * MIB, end_bytes=1, peak_bytes=(107 + 6 * rank) * MIB,
            peak_reserved_bytes=(109 + 18 * rank) * MIB, points=[],
        )
        for rank in (0, 1)
    ]  # fmt: skip
    ranks = [
        analysis(0, (2_004_000, 3_611_000), memory=memory[:1], work=KNOWN_WORK, **both),
        analysis(1, (3_012_000, 3_010_000), memory=memory[1:], **both),
    ]
    exact = Breakdown(
        rank=0, source="gpu", steps=2, span_ns=1, compute_ns=1, communication_ns=1, memory_ns=1, non_compute_ns=1, idle_ns=1,
        overlap_ns=1, kernels=[], collectives=[EventTally("all_reduce", 3, 7_002_000)],
    )  # fmt: skip
    traces = SimpleNamespace(answers=RunAnswers(ranks), analyses=ranks, exact=[exact])
    return SimpleNamespace(id=cell, completed_runs=[SimpleNamespace(traces=traces)])


def coverage(host, samples, share_pct, gap_s, incomplete):
    """What the report uses of the telemetry of a host in one run."""
    return SimpleNamespace(host=host, samples=samples, coverage_pct=share_pct, largest_gap_s=gap_s, incomplete=incomplete)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The tables of the page: maps the headings of a table, joined by |, to its rows."""
    workspace = support_collect.matrix(tmp_path_factory.mktemp("page"))
    loaded = load.load_matrix(workspace, None)
    found = summary.summarize(loaded, "single")
    cell, baseline = found.rows[1].id, found.rows[0].id
    one = SimpleNamespace(cells=[profiled(cell)])
    found.collectives, found.groups = trace_tables.list_collectives(one), trace_answers.list_group_traffic(one)
    found.work = trace_changes.list_cell_work(one)
    found.advice = [
        CellAdvice(cell=cell, n=3, subject="fusion", text="Fuse them.", saves_at_most_ns=3_007_000, share_pct=12.34)
    ]
    found.waiting, found.phases = trace_answers.list_rank_waiting(one), trace_details.list_phase_times(one)
    found.layers, found.device_memory = trace_details.list_layer_times(one), trace_details.list_device_memories(one)
    found.matrix_products, found.attention = trace_details.list_matrix_products(one), trace_details.list_attention_uses(one)
    idle = {
        "idle_host_ms": 5.003,
        "idle_launching_ms": 0.7013,
        "idle_communication_ms": 3.011,
        "idle_other_ms": 1.959,
        "launch_delay_us": 17.03,
    }
    metrics = {name: SimpleNamespace(value=value, n=3) for name, value in idle.items()}
    found.idle = trace_details.list_idle_times([SimpleNamespace(id=cell, metrics=metrics)])
    found.rounding = [Rounding(cell, "idle_pct", "%", 3, 2.203, 3.907, 1.704)]
    part = PartDifference(part="compute", label="compute", time_ns=11_003_000, against_ns=5_002_000, difference_ns=6_001_000)
    step = StepDifference(per="step", time_ns=13_006_000, against_ns=9_007_000, difference_ns=3_999_000, parts=[part])
    found.steps = [CellDifference(cell, baseline, step)]
    differ = [OperatorDifference("aten::mm", "cpu_op", "changed", 1.5, 0.25, 7_001_000, 2_003_000)]
    found.operators = [OperatorDifferences(cell, baseline, "operators", {"changed": 1}, differ)]
    found.instruments = [InstrumentCost(cell=cell, instrument="profile", n=3, cost_s=0.53, watched_steps=2, step_ratio=1.073)]
    found.losses = [
        LossComparison(
            differ="strategy", one=baseline, other=cell, runs=[], steps=31, max_difference=0.00053, relative=0.00017, at_step=7
        )
    ]
    host = HostTraffic("node1", "eth1", "physical", 1.0, 1.0, 73.2)
    found.traffic = [RunTraffic("RUN", "nccl", [host], True, "NCCL's log")]
    found.telemetry = [coverage("node1", 1_013, 97.3, 2.5, ""), coverage("node1", 2_003, 99.1, 1.5, "ends early")]
    drawn = TablesOfPage(page.draw_page(loaded, found, workspace.report, workspace.runs)).tables
    return {"|".join(rows[0]): rows for rows in drawn if rows}


# For each table, its cells by heading, without the first column, which names the cell.
GROUPS = {
    "Collective": "all_reduce", "Process group": "3 shards (2 ranks)", "Profiled": "2 of 2", "Calls": "1.000",
    "Message MiB": "103.0",
    "Sent MiB": "103.0", "Mean of a call us": "2,909", "Transfer us": "2,507", "Hidden %": "7.253",
    "Algorithm bandwidth GB/s": "43.08", "Bus bandwidth GB/s": "43.08", "Link GB/s": "450.0",
    "Name of the link": "NVLink 4", "n": "1",
}  # fmt: skip
TABLES = [
    {"Saves at most ms": "3.007", "Of the time %": "12.34", "What to change": "Fuse them.", "n": "3"},
    {"Count": "6.500", "Time ms": "1.501", "Share %": "74.94", "With those above %": "74.94"},
    {
        "Category": "matrix products", "Shapes": "[[2,3],[3,5]]", "Types": "c10::Half, c10::Half", "Calls": "8.500",
        "Own ms": "1.252", "Share %": "100.0", "Of it copies ms": "0.2510", "With all it calls ms": "1.753",
        "Achieved TFLOP/s": "5.500", "Moved TB/s": "0.001250", "Of the bound %": "25.00", "Host, self ms": "0.7535",
    },
    {
        "Calls": "1,013", "Median us": "5.011", "Longest us": "707.0", "All ms": "8.017",
        "Most idle during": "cudaLaunchKernel", "Which launches": "gemm", "Step": "6", "Lasts us": "503.0",
        "GPU idle during it us": "401.0",
    },
    {
        "Stream": "7", "Operations": "211", "Busy ms": "6.011", "Idle ms": "2.017", "Queue, mean": "3.507",
        "Queue, longest": "19",
    },
    {"Time ms": "1.006"},
    {"Collective": "all_reduce", "Calls": "1.500", "Total ms": "3.501", "Mean of a call ms": "2.334", "n": "1"},
    GROUPS,
    {
        "Rank": "0", "Started last %": "50.00", "Waited ms": "0.3005", "Lost ms": "0.2500", "Lost %": "1.000",
        "Others waited for it ms": "0.5040", "n": "1",
    },
    {
        "Idle ms": "10.67", "Host launched nothing ms": "5.003", "In launching calls ms": "0.7013",
        "Waiting for communication ms": "3.011", "Other ms": "1.959", "Launch delay us": "17.03", "n": "3",
    },
    {"Phase": "forward", "Host ms": "3.502", "GPU ms": "3.003", "Compute ms": "2.007", "Communication ms": "1.003", "n": "1"},
    {"Called by": "Net_0", "Calls": "6.500", "Forward ms": "1.501", "Backward ms": "2.505", "Communication ms": "0.5070"},
    {"Device": "cuda", "At the start MiB": "102.0", "Peak MiB": "113.0", "Peak reserved MiB": "127.0", "n": "1"},
    {
        "Operator": "aten::bmm", "Batch": "2", "M": "3,000", "N": "5,000", "K": "7", "Types": "c10::Half", "Calls": "8.500",
        "Time ms": "2.502", "Copies ms": "0.5030", "Achieved TFLOP/s": "1.427", "n": "1",
    },
    {
        "Implementation": "flash", "Pass": "backward", "Operator or kernel": "aten::_flash", "Its kernels": "",
        "Calls": "9.500", "Time ms": "1.007", "n": "1",
    },
    {"Metric": "idle_pct", "Exact": "2.203", "Like HTA": "3.907", "Difference": "+1.7", "Unit": "%", "n": "3"},
    {"Time ms": "11.00", "Time of the baseline ms": "5.002", "Difference ms": "+6.001", "Share %": "150"},
    {
        "Kind": "cpu_op", "Name": "aten::mm", "Calls": "1.500", "Calls of the baseline": "0.2500", "Time ms": "7.001",
        "Time of the baseline ms": "2.003", "Difference ms": "+4.998",
    },
    {
        "Cell": "ddp ×2", "n": "3", "Between steps s": "0.53", "Observed steps": "2",
        "Their time divided by that of other steps": "1.07",
    },
    {
        "Cells": "single ×1 and ddp ×2", "Compared steps": "31", "Largest difference of the losses": "0.00053",
        "Relative to the loss %": "0.017", "At step": "7",
    },
    {
        "Runs": "2", "Samples": "3,016", "Lowest coverage of a timed window %": "97.3", "Largest gap s": "2.5",
        "Incomplete runs": "1",
    },
    {
        "Host": "node1", "Interface with the most": "eth1 (physical)", "Share of all interfaces %": "73",
        "RDMA": "yes", "Known from": "NCCL's log",
    },
]  # fmt: skip


@pytest.mark.parametrize("expected", TABLES, ids=lambda expected: next(iter(expected)))
def test_a_table_of_the_page_shows_the_known_number_in_every_column(tables, expected):
    (name,) = (name for name in tables if name.split("|")[1:] == list(expected))
    shown = tables[name][0]
    assert {heading: shown[heading] for heading in expected} == expected
