"""Known numbers go through every column of the tables of `collect trace`.

The numbers differ in their digits, so that a factor of 1000 or 1024, a swapped column or a lost digit changes the printed text.
The expected texts are written by hand: 1 ms is 1,000,000 ns, 1 MiB is 1,048,576 bytes.
"""

import pytest
import support_tables
from support_tables import KNOWN_WORK, MIB, analysis

from collect.traces import answer_tables, calls, change_tables, command
from collect.traces.advice import Saving
from collect.traces.attention import AttentionUse
from collect.traces.breakdown import Breakdown, EventTally
from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.difference import PartDifference, StepDifference
from collect.traces.layers import LayerTime
from collect.traces.matrix_products import MatrixProduct
from collect.traces.memory_use import MemoryUse
from collect.traces.operators import OperatorDifference
from collect.traces.phases import PhaseTime
from collect.traces.run_answers import RunAnswers


def test_the_answers_of_collect_trace_show_the_known_number_in_every_column():
    """Rank 0 waits 601,000 ns in its second call, rank 1 waits 1,008,000 ns in its first; 500,000 ns of each are exposed."""
    phases = [
        PhaseTime(phase="forward", host_ns=7_001_000, device_ns=6_007_000, compute_ns=4_013_000, communication_ns=2_003_000)
    ]
    ranks = [analysis(0, (2_004_000, 3_611_000), phases=phases), analysis(1, (3_012_000, 3_010_000))]
    output = support_tables.PrintedTables()
    answer_tables.print_answer_tables(output, RunAnswers(ranks))
    idle = {
        "Idle (ms)": "9.973", "Host launched nothing (ms)": "5.003", "In launching calls (ms)": "0.7010",
        "Waiting for communication (ms)": "3.011",
        "Other (ms)": "1.959", "Launch delay, median (us)": "17.00", "Launch delay, longest (us)": "29.00",
    }  # fmt: skip
    assert output.rows_of == {
        # The 4 calls take 11,637,000 ns with the time of waiting and 10,028,000 ns without. They send 4 x 103 MiB, which are
        # 432,013,312 bytes, and n is 2.
        "collectives by process group, all ranks together": [
            {
                "Collective": "all_reduce", "Process group": "3 shards (2 ranks)", "Profiled": "2 of 2", "Calls": "4",
                "Message (MiB)": "103.0", "Sent (MiB)": "412.0", "Total (ms)": "11.64", "Mean (us)": "2,909",
                "Transfer (us)": "2,507",
                "Hidden (%)": "7.253", "Algorithm bandwidth (GB/s)": "43.08", "Bus bandwidth (GB/s)": "43.08",
                "Link (GB/s)": "450.0", "Of link (%)": "9.573",
            }
        ],
        "waiting for slow ranks: 1.000 % of the time is lost; rank 0 lets the others wait the longest": [
            {
                "Rank": "0", "Calls": "2", "Started last": "1", "Waited (ms)": "0.6010", "Lost (ms)": "0.5000",
                "Lost (%)": "1.000", "Others waited for it (ms)": "1.008",
            },
            {
                "Rank": "1", "Calls": "2", "Started last": "1", "Waited (ms)": "1.008", "Lost (ms)": "0.5000",
                "Lost (%)": "1.000", "Others waited for it (ms)": "0.6010",
            },
        ],
        "idle time by cause": [{"Rank": "0"} | idle, {"Rank": "1"} | idle],
        "phases of the steps, by what launched the work": [
            {
                "Rank": "0", "Phase": "forward", "Host (ms)": "7.001", "GPU (ms)": "6.007", "Compute (ms)": "4.013",
                "Communication (ms)": "2.003",
            }
        ],
    }  # fmt: skip


def test_a_group_of_four_ranks_has_the_factors_of_nccl_tests():
    """An all-reduce of 4 ranks sends 1.5 times its message: twice (4 - 1) / 4. An all-gather sends 3/4 of it."""
    group = [ProcessGroup("3", (0, 1, 2, 3), 4)]
    names = ("all_reduce", "all_gather")
    sent = [calls.compute_sent_bytes(name, 64_000_000, 4) for name in names]
    timed_calls = [
        CollectiveCall(name, 0, 5, 2_000_000, 64_000_000, 0, [], size) for name, size in zip(names, sent, strict=True)
    ]
    output = support_tables.PrintedTables()
    answer_tables.print_answer_tables(
        output, RunAnswers([analysis(0, (), groups=group, calls=timed_calls, idle=None, idle_ns=0)])
    )
    rows = output.rows_of["collectives by process group, all ranks together"]
    columns = ("Collective", "Message (MiB)", "Sent (MiB)", "Algorithm bandwidth (GB/s)", "Bus bandwidth (GB/s)")
    assert sorted(tuple(row[name] for name in columns) for row in rows) == [
        ("all_gather", "61.04", "45.78", "32.00", "24.00"),
        ("all_reduce", "61.04", "91.55", "32.00", "48.00"),
    ]


def test_the_details_of_collect_trace_show_the_known_number_in_every_column():
    layer = LayerTime(
        name="Linear_0", parent="", depth=1, calls=13, forward_host_ns=11_003_000, backward_host_ns=12_007_000,
        forward_ns=3_001_000, backward_ns=5_009_000, communication_ns=1_013_000,
    )  # fmt: skip
    use = MemoryUse(
        device="cuda:0",
        start_bytes=101 * MIB,
        end_bytes=103 * MIB,
        peak_bytes=107 * MIB,
        peak_reserved_bytes=109 * MIB,
        points=[],
    )
    # 17 calls of 2 x 2 x 3 x 5 x 7 x 1,000,000 operations in 5,003,000 ns are 1.427 x 10^12 a second.
    product = MatrixProduct(
        operator="aten::bmm",
        batch=2,
        m=3000,
        n=5000,
        k=7,
        dtype="c10::Half",
        calls=17,
        total_ns=5_003_000,
        copy_ns=1_007_000,
        untimed=0,
    )
    attention = AttentionUse(
        backend="flash", backward=True, name="aten::_flash", by="operator", calls=19, total_ns=2_011_000, kernels=["bwd"]
    )
    output = support_tables.PrintedTables()
    rank = analysis(3, (), layers=[layer], memory=[use], products=[product], attention=[attention], idle=None)
    answer_tables.print_answer_tables(output, RunAnswers([rank]))
    assert output.rows_of == {
        "modules with all that they call, all ranks together": [
            {
                "Module": "  Linear_0", "Calls": "13", "Forward (ms)": "3.001", "Backward (ms)": "5.009",
                "Communication (ms)": "1.013", "Host, forward (ms)": "11.00", "Host, backward (ms)": "12.01",
            }
        ],
        "memory of the allocators in the profiled steps": [
            {
                "Rank": "3", "Device": "cuda:0", "At the start (MiB)": "101.0", "At the end (MiB)": "103.0",
                "Peak (MiB)": "107.0", "Peak reserved (MiB)": "109.0",
            }
        ],
        "matrix products, all ranks together: 1.427 TFLOP/s": [
            {
                "Operator": "aten::bmm", "Batch": "2", "M": "3,000", "N": "5,000", "K": "7",
                "Types": "c10::Half", "Calls": "17", "Time (ms)": "5.003", "Copies (ms)": "1.007",
                "Achieved (TFLOP/s)": "1.427",
            }
        ],
        "attention, all ranks together": [
            {
                "Implementation": "flash", "Pass": "backward", "Operator or kernel": "aten::_flash", "Its kernels": "bwd",
                "Calls": "19", "Time (ms)": "2.011",
            }
        ],
    }  # fmt: skip


def test_the_breakdown_of_collect_trace_shows_the_known_number_in_every_column():
    told = Breakdown(
        rank=2, source="gpu", steps=3, span_ns=31_013_000, compute_ns=17_011_000, communication_ns=7_013_000,
        memory_ns=2_003_000, non_compute_ns=5_023_000, idle_ns=8_979_000, overlap_ns=3_019_000, kernels=[], collectives=[],
        file="rank-00002.json",
    )  # fmt: skip
    tallies = [EventTally("gemm", 7, 5_011_000), EventTally("gemm", 6, 2_006_000), EventTally("copy", 3, 1_009_000)]
    output = support_tables.PrintedTables()
    command._print_breakdowns(output, "RUN", [told], like_hta=False)
    output.show_table(answer_tables.make_tally_table("kernels", "Kernel", tallies))
    changed = OperatorDifference("aten::mm", "cpu_op", "changed", 1.5, 0.25, 7_001_000, 2_003_000)
    output.show_table(answer_tables.make_operators_table("RUN", "OTHER", [changed]))
    assert output.rows_of == {
        "RUN (exact)": [
            {
                "Rank": "2", "File": "rank-00002.json", "Source": "gpu", "Steps": "3", "Span (ms)": "31.01",
                "Compute (ms)": "17.01",
                "Communication (ms)": "7.013", "Memory (ms)": "2.003", "Non-compute (ms)": "5.023", "Idle (ms)": "8.979",
                "Idle (%)": "28.95", "Overlap (%)": "43.05", "Exposed communication (ms)": "3.994",
            }
        ],
        "kernels, all ranks together": [
            {"Kernel": "gemm", "Calls": "13", "Total (ms)": "7.017", "Mean (us)": "539.8"},
            {"Kernel": "copy", "Calls": "3", "Total (ms)": "1.009", "Mean (us)": "336.3"},
        ],
        "RUN against OTHER, per step and rank: 0 new, 0 gone, 1 changed, 0 same": [
            {
                "Change": "changed", "Kind": "cpu_op", "Name": "aten::mm", "Calls": "1.500", "Calls against": "0.2500",
                "Time (ms)": "7.001", "Time against (ms)": "2.003", "Difference (ms)": "+4.998",
            }
        ],
    }  # fmt: skip


def test_the_reasons_for_a_slower_step_show_the_known_number_in_every_column():
    parts = [
        PartDifference(part="compute", label="compute", time_ns=11_003_000, against_ns=5_002_000, difference_ns=6_001_000),
        PartDifference(part="idle", label="idle", time_ns=2_003_000, against_ns=4_005_000, difference_ns=-2_002_000),
    ]
    whole = StepDifference(per="step", time_ns=13_006_000, against_ns=9_007_000, difference_ns=3_999_000, parts=parts)
    output = support_tables.PrintedTables()
    output.show_table(command._make_step_table("RUN", "OTHER", whole))
    columns = ("Part", "Time (ms)", "Time against (ms)", "Difference (ms)", "Share (%)")
    cells = [
        ("compute", "11.00", "5.002", "+6.001", "150"),
        ("idle", "2.003", "4.005", "-2.002", "-50.1"),
        ("whole step", "13.01", "9.007", "+3.999", "100"),
    ]
    title = "why RUN is slower than OTHER: mean step, parts sum to the difference"
    assert output.rows_of == {title: [dict(zip(columns, row, strict=True)) for row in cells]}


@pytest.mark.parametrize(
    ("steps", "calls", "counts", "times"),
    [
        (None, "34", ("26", "14"), ("6.004", "2.008", "5.010", "1.004", "7.012", "3.014", "4.022")),
        (4, "8.500", ("6.500", "3.500"), ("1.501", "0.5020", "1.252", "0.2510", "1.753", "0.7535", "1.006")),
    ],
)
def test_the_tables_of_work_show_the_known_number_in_every_column(steps, calls, counts, times):
    """Of all steps, and per step of four. 6,004 of 8,012 us are 74.94 %; 22,033 MFLOPs in 4,006 us are 5.500 TFLOP/s."""
    output = support_tables.PrintedTables()
    for table in change_tables.make_work_tables(KNOWN_WORK, steps):
        output.show_table(table)
    shown = list(output.rows_of.values())
    assert shown == [
        [
            {"Category": "matrix products", "Count": counts[0], "Time (ms)": times[0], "Share (%)": "74.94",
             "With those above (%)": "74.94"},
            {"Category": "copies", "Count": counts[1], "Time (ms)": times[1], "Share (%)": "25.06",
             "With those above (%)": "100.0"},
        ],
        [
            {
                "Operator": "aten::mm", "Category": "matrix products", "Shapes": "[[2,3],[3,5]]",
                "Types": "c10::Half, c10::Half", "Calls": calls, "Own (ms)": times[2], "Share (%)": "100.0",
                "Of it copies (ms)": times[3], "With all it calls (ms)": times[4], "Achieved (TFLOP/s)": "5.500",
                "Moved (TB/s)": "0.001250", "Of the bound (%)": "25.00", "Host, self (ms)": times[5],
            }
        ],
        [
            {
                "Rank": "3", "Calls": "1,013", "Median (us)": "5.011", "Longest (us)": "707.0", "All (ms)": "8.017",
                "Most idle during": "cudaLaunchKernel", "Which launches": "gemm", "Step": "6", "Lasts (us)": "503.0",
                "GPU idle during it (us)": "401.0",
            }
        ],
        [
            {
                "Rank": "3", "Stream": "7", "Operations": "211", "Busy (ms)": "6.011", "Idle (ms)": "2.017",
                "Queue, mean": "3.507", "Queue, longest": "19",
            }
        ],
        [{"Running": "compute + communication", "Time (ms)": times[6]}],
    ]  # fmt: skip


def test_advice_shows_the_known_number_in_every_column():
    output = support_tables.PrintedTables()
    output.show_table(change_tables.make_advice_table([Saving("fusion", "Fuse them.", 3_007_000, 12.34)]))
    assert output.rows_of == {
        "what to change first: upper bounds, mean over ranks": [
            {"Saves at most (ms)": "3.007", "Of the time (%)": "12.34", "What to change": "Fuse them."}
        ]
    }
