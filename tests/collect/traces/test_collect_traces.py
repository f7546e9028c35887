"""Traces of runs in the report: exact values or values like HolisticTraceAnalysis (HTA), kernels by name, two cells."""

import json

import msgspec
import pytest
import support_collect as support
import support_hta
import support_traces
from hypothesis import given
from hypothesis import strategies as st

from collect import summary
from collect.cli import main
from collect.metric import MeanPair, load_metrics
from collect.metrics import operators
from collect.reading import load
from collect.traces import trace
from collect.traces.breakdown import Breakdown, EventTally
from jobs.cli import main as jobs
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.runs.record import SameWork
from shardlab.workspace.workspace import Workspace
from tests.collect.traces.test_hta import CASES, GOLDEN, HTA, said_by_hta

PROVEN = SameWork(verdict="proven", why="against one process")
SINGLE, DDP = support.cell(), support.cell("ddp", 2)
CELLS = {cell.strategy: cell for cell in (SINGLE, DDP)}
METRICS = {metric.name: metric for metric in load_metrics()}
SHOWN = ("idle_pct", "overlap_pct", "exposed_communication_ms")


def profiled(path, ranks_of, *, traces="like-hta", proofs=None, **study):
    """Make a workspace with completed runs that have traces.

    ranks_of: maps a strategy to a list with one item per repeat: the traces of the ranks.
    """
    workspace = Workspace(path)
    repeats = max(map(len, ranks_of.values()))
    support.keep(workspace, [CELLS[name] for name in ranks_of], repeats=repeats, traces=traces, **study)
    for name, runs in ranks_of.items():
        for repeat, ranks in enumerate(runs, 1):
            found = {"same_work": (proofs or {}).get(name, PROVEN)}
            folder = support.completed(workspace, CELLS[name], repeat, rehearsal=False, found=found)
            (folder.path / "trace").mkdir()
            for rank in ranks:
                rank.write(folder.path / "trace", gz=True)
    return workspace


def summarized(workspace):
    return summary.summarize(load.load_matrix(workspace, None), "single")


class Steps(support_traces.Rank):
    """The trace of a rank with the kernels that a test states.

    kernels: pairs (name, duration in µs). Every step launches these kernels one after the other.
    """

    def __init__(self, rank, kernels, steps=3, category="kernel"):
        super().__init__(rank, steps=0)
        for step in range(steps):
            at = begin = support_traces.NEW + step * 10_000_000
            for name, us in kernels:
                if category == "kernel":
                    self._launch("gpu_memcpy" if name.startswith("Memcpy") else "kernel", name, 7, at, 0)
                    kernel = next(event for event in reversed(self.events) if event["ph"] == "X")
                    kernel["ts"], kernel["dur"] = at + 3000, us * 1000
                else:
                    self._add(category, name, at, us * 1000)
                at += us * 1000 + 1000
            self._add("user_annotation", f"ProfilerStep#{step}", begin, at - begin + 9000)


def by_truth(ranks, steps):
    """The true means over the ranks: (idle %, overlap %, exposed communication in ms per step).

    They are computed from the generated events, with a resolution of 1 ns.
    """
    truths = [support_traces.truth(rank.events) for rank in ranks]
    idle = [100 * one["idle_ns"] / one["span_ns"] for one in truths]
    overlap = [100 * one["overlap_ns"] / one["communication_ns"] for one in truths]
    exposed = [(one["communication_ns"] - one["overlap_ns"]) / steps / 1e6 for one in truths]
    return [sum(each) / len(each) for each in (idle, overlap, exposed)]


def by_hta(ranks):
    """The means over the ranks of the values that HTA computed: (idle %, overlap %)."""
    idle = [100 * one["idle_us"] / one["span_us"] for one in ranks.values()]
    overlap = [one["overlap_pct"] for one in ranks.values()]
    return [sum(each) / len(each) for each in (idle, overlap)]


def sort_may_change(traces):
    """How far HTA's means over the ranks may differ from the means of `collect`, because HTA's sort is not stable.

    Returns the largest difference of (idle %, overlap %, span in ms).
    """
    idle = overlap = span = 0.0
    for bounds in support_hta.bounds_of(traces):
        idle += 100 * (bounds.idle_ns[1] / bounds.span_ns[0] - bounds.idle_ns[0] / bounds.span_ns[1])
        overlap += bounds.overlap_pct[1] - bounds.overlap_pct[0]
        span += (bounds.span_ns[1] - bounds.span_ns[0]) / 1e6
    return [each / len(traces) for each in (idle, overlap, span)]


def check_like_hta(path, keys, said):
    """Check that the metrics of a run agree with HTA's values, and that a table has both these values and the exact values.

    keys: arguments of the two generated traces. said: maps each rank to the values that HTA computed for its trace.
    """
    ranks = [support_traces.Rank(rank, **keys) for rank in range(2)]
    found = summarized(profiled(path, {"ddp": [ranks]}))
    (row,) = found.rows
    hta = by_hta(said)
    (run,) = load.load_matrix(Workspace(path), None).runs
    files = sorted((path / "runs" / run.run_id / "trace").glob("rank-*"))
    of_idle, of_overlap, of_span = sort_may_change([trace.read_trace(file) for file in files])
    assert of_idle < 1  # the allowed difference is small enough for a useful check
    assert row.metrics["idle_pct"].value == pytest.approx(hta[0], abs=of_idle + 1e-12)
    # HTA rounds the overlap to two decimals, which adds up to 0.005 to the difference.
    assert row.metrics["overlap_pct"].value == pytest.approx(hta[1], abs=of_overlap + 0.005)
    step_ms = sum(one["span_us"] for one in said.values()) / 2 / 1000 / 3  # mean of 2 ranks, 3 steps: HTA ignores step 4
    assert row.metrics["kernel_ms"].value == pytest.approx(step_ms, abs=of_span + 1e-12)
    assert row.metrics["idle_pct"].kind == "gpu, like HTA"
    table = {one.metric: one for one in found.rounding}
    assert tuple(table) == SHOWN
    for name, exact in zip(SHOWN, by_truth(ranks, 4), strict=True):
        assert table[name].exact == pytest.approx(exact, rel=1e-12)
        assert table[name].like_hta == row.metrics[name].value
        assert table[name].difference == pytest.approx(table[name].like_hta - exact)
    assert not any("HolisticTraceAnalysis" in remark for remark in found.remarks)


@pytest.mark.parametrize("case", ["since a base", "since the epoch"])
def test_a_study_of_hta_is_compared_with_the_recorded_figures_of_hta(tmp_path, case):
    keys = {key: value for key, value in CASES[case].items() if key != "ranks"}
    check_like_hta(tmp_path, keys, json.loads(GOLDEN.read_text())[case]["ranks"])


@pytest.mark.skipif(not HTA, reason="no Python with HolisticTraceAnalysis is named in SHARDLAB_HTA")
def test_a_study_of_hta_is_compared_with_the_installed_hta(tmp_path):
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        support_traces.Rank(rank, seed=300, kernels=150).write(tmp_path / "traces")
    check_like_hta(tmp_path, {"seed": 300, "kernels": 150}, said_by_hta(tmp_path / "traces")[0]["ranks"])


def test_figures_are_exact_without_a_table_of_rounding_by_default(tmp_path):
    ranks = [support_traces.Rank(rank, seed=11) for rank in range(2)]
    found = summarized(profiled(tmp_path, {"ddp": [ranks]}, traces="exact"))
    assert [found.rows[0].metrics[name].value for name in SHOWN] == pytest.approx(by_truth(ranks, 4), rel=1e-12)
    assert (found.rounding, found.rows[0].metrics["idle_pct"].kind) == ([], "gpu")


def on_cpu(us=100):
    return [Steps(0, [("aten::mm", us), ("aten::add", 50)], category="cpu_op")]


def test_figures_are_exact_with_a_remark_if_hta_finds_no_kernels(tmp_path):
    found = summarized(profiled(tmp_path / "a", {"single": [on_cpu(), on_cpu()]}))
    (said,) = [remark for remark in found.remarks if "HolisticTraceAnalysis" in remark]
    assert "finds no GPU kernels in any profiled run" in said
    assert found.rows[0].metrics["compute_ms"].value == pytest.approx(0.15)
    assert found.rounding == []
    gpu = [[support_traces.Rank(rank, seed=1) for rank in range(2)]]
    found = summarized(profiled(tmp_path / "b", {"single": [on_cpu()], "ddp": gpu}))
    (said,) = [remark for remark in found.remarks if "HolisticTraceAnalysis" in remark]
    assert found.rows[0].runs[0].run_id in said
    # The trace of one cell has GPU kernels, and the trace of the other cell has CPU operators, so the cells are not compared.
    assert "additional_idle_ms" not in found.rows[1].metrics


def test_repeats_of_two_kinds_have_no_common_figure(tmp_path):
    """If one repeat ran on a CPU and another on a GPU, their cell has no figure of idle time."""
    found = summarized(profiled(tmp_path, {"single": [on_cpu(), [support_traces.Rank(0, seed=1)]]}))
    assert "idle_ms" not in found.rows[0].metrics


def test_a_damaged_rank_is_left_out_of_exact_and_of_hta_figures(tmp_path):
    """If the trace of rank 1 is damaged, neither the exact figures nor the figures like HTA use it."""
    workspace = profiled(tmp_path, {"ddp": [[support_traces.Rank(rank, seed=2) for rank in range(2)]]})
    (path,) = workspace.runs.glob("*/trace/rank-00001.json.gz")
    path.write_bytes(path.read_bytes()[:-200])
    (run,) = load.load_matrix(workspace, None).runs
    assert ([one.rank for one in run.traces.exact], [one.rank for one in run.traces.like_hta]) == ([0], [0])


# The tests below look up kernels and operators by name.


@pytest.mark.parametrize(
    ("of", "name", "fits"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_AllGather_RING_LL128(ncclDevKernelArgsStorage<4096ul>)", False),
        ("CatArrayBatchedCopy", "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4, 64>(float*)", True),
        ("CatArrayBatchedCopy", "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<float>(float*)", False),
        ("CatArrayBatchedCopy*", "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<float>(float*)", True),
        ("elementwise_kernel<128, 2", "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<x>>(int)", True),
        ("elementwise_kernel<128, 2", "void at::native::elementwise_kernel<128, 20, at::native::x>(int)", False),
        ("elementwise_kernel<128, 2", "void at::native::unrolled_elementwise_kernel<128, 2>(int)", False),
        ("sm80_xmma_gemm_f32f32_tn_n_tilesize1*", "sm80_xmma_gemm_f32f32_tn_n_tilesize128x64x8_stage3", True),
        ("memory copies", "Memcpy DtoD (Device -> Device)", True),
        ("memory copies", "Memset (Device)", False),
        ("vectorized kernels", "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", True),
        ("vectorized kernels", "void at::native::elementwise_kernel<4, x>(int)", False),
        ("GEMM", support_traces.GEMM, True),
        ("GEMM", "ampere_sgemm_128x64_tn", True),
        ("GEMM", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", True),
        ("GEMM", "void at::native::vectorized_elementwise_kernel<4, x>(int)", False),
    ],
)  # fmt: skip
def test_a_name_means_whole_words_and_a_class_its_patterns(of, name, fits):
    assert bool(operators.find_name_pattern(of, "gpu").search(name)) == fits


def test_classes_of_a_cpu_are_operators():
    assert operators.find_name_pattern("GEMM", "gloo").search("aten::addmm")
    assert not operators.find_name_pattern("GEMM", "cpu").search("aten::addmm_out")
    assert operators.find_name_pattern("vectorized kernels", "gloo") is None


def told(rank, tallies, *, steps=2, source="gpu"):
    """The breakdown of a rank's trace, with these kernels. Fields that the tests do not use have arbitrary values.

    tallies: maps the name of a kernel to (number of calls, time in ns).
    """
    return Breakdown(
        rank=rank, source=source, steps=steps, span_ns=1, compute_ns=0, communication_ns=0, memory_ns=None, non_compute_ns=0,
        idle_ns=0, overlap_ns=0, collectives=[], kernels=[EventTally(name, count, ns) for name, (count, ns) in tallies.items()],
    )  # fmt: skip


def seen(*ranks):
    run = support.loaded(DDP)
    run.breakdowns = list(ranks)
    return run


def test_a_named_kernel_is_counted_and_timed_a_step_and_rank():
    ranks = [told(0, {"a_gemm<1>": (4, 8_000_000), "a_gemm<2>": (2, 1_000_000)}), told(1, {"b": (1, 1)})]
    assert operators.count_operator_calls(seen(*ranks), "GEMM").value == (4 + 2) / 2 / 2
    assert operators.sum_operator_time(seen(*ranks), "GEMM").value == pytest.approx(9 / 2 / 2)
    assert operators.count_operator_calls(seen(*ranks), "a_gemm").value == 1.5
    assert (
        operators.count_operator_calls(seen(*ranks), "absent").value,
        operators.count_operator_calls(seen(*ranks), "absent").unit,
    ) == (0, "calls")


def test_a_name_that_the_trace_lacks_has_no_count_and_no_time():
    mm = told(0, {"aten::mm": (4, 8)}, source="gloo")
    assert operators.count_operator_calls(seen(mm), "aten::mm").value == 2
    # This trace of a CPU has operators only, so the name of a kernel has no number of calls.
    assert operators.count_operator_calls(seen(mm), "ncclDevKernel_AllGather_RING_LL") is None
    assert operators.sum_operator_time(seen(mm), "vectorized kernels") is None
    assert operators.sum_operator_time(seen(told(0, {"a": (1, 1)}, steps=0)), "a") is None
    assert operators.sum_operator_time(seen(), "a") is None


TALLIES = st.dictionaries(
    st.sampled_from(["x_gemm", "nvjet_y", "Memcpy DtoD", "other"]), st.tuples(st.integers(1, 99), st.integers(0, 10**9))
)


@given(st.lists(TALLIES, min_size=1, max_size=4), st.integers(1, 5), st.randoms())
def test_the_order_of_ranks_and_kernels_changes_nothing_and_time_scales(ranks, scale, random):
    before = [told(rank, tallies) for rank, tallies in enumerate(ranks)]
    shuffled = [msgspec.structs.replace(one, kernels=random.sample(one.kernels, len(one.kernels))) for one in before]
    random.shuffle(shuffled)
    longer = [told(rank, {name: (n, scale * ns) for name, (n, ns) in each.items()}) for rank, each in enumerate(ranks)]
    for of in ("GEMM", "memory copies", "other"):
        found = operators.sum_operator_time(seen(*before), of)
        assert operators.sum_operator_time(seen(*shuffled), of).value == pytest.approx(found.value)
        assert operators.sum_operator_time(seen(*longer), of).value == pytest.approx(scale * found.value)
        assert (
            operators.count_operator_calls(seen(*longer), of).value == operators.count_operator_calls(seen(*before), of).value
        )
    one_less = [told(rank, tallies, steps=0) for rank, tallies in enumerate(ranks)]
    assert operators.sum_operator_time(seen(*one_less, *before), "GEMM") == operators.sum_operator_time(seen(*before), "GEMM")


# The tests below compare the traces of two cells.

RATIOS = ("scaling_efficiency_pct", "memory_share_pct", "memory_efficiency_pct")  # 100 if both cells are the same
OF_CELLS = [metric for metric in load_metrics() if metric.of_cells]
POSITIVE = st.floats(1e-3, 1e6)


@given(POSITIVE, POSITIVE, st.floats(0.01, 100))
def test_metrics_of_two_cells_scale_and_invert_as_their_unit_says(value, against, scale):
    for metric in OF_CELLS:
        found = metric.of_cells(MeanPair(DDP, value, SINGLE, against))
        scaled = metric.of_cells(MeanPair(DDP, scale * value, SINGLE, scale * against))
        same = metric.of_cells(MeanPair(SINGLE, value, SINGLE, value))
        linear = metric.unit == "ms" or metric.name in ("compute_loss_pct", "accuracy_gain_pct")
        assert (found.unit, found.kind) == (metric.unit, "strong")
        assert scaled.value == pytest.approx(found.value * (scale if linear else 1), rel=1e-6, abs=1e-6 * max(1, scale))
        assert same.value == {"x": 1, "ms": 0}.get(metric.unit, 100 if metric.name in RATIOS else 0)
        if linear:
            assert metric.of_cells(MeanPair(SINGLE, against, DDP, value)).value == pytest.approx(-found.value)
        other = support.cell("ddp", 2, global_batch_size=12, micro_batch_size=3, gradient_accumulation_steps=2)
        assert metric.of_cells(MeanPair(other, value, SINGLE, against)) is None


def test_gain_saving_and_loss_equal_values_computed_by_hand():
    """The metrics of two cells equal percentages and differences that were computed by hand."""

    def one(name, value, against):
        return METRICS[name].of_cells(MeanPair(DDP, value, SINGLE, against)).value

    assert one("speed_gain_pct", 113.0, 100.0) == pytest.approx(13)
    assert one("memory_change_pct", 7e9, 10e9) == pytest.approx(-30)
    assert one("memory_share_pct", 8e9, 12e9) == pytest.approx(66.67, abs=0.01)
    assert one("memory_efficiency_pct", 4e9, 12e9) == pytest.approx(300)
    assert METRICS["memory_efficiency_pct"].of_cells(MeanPair(DDP, 0, SINGLE, 1)) is None
    assert one("compute_loss_pct", 97.36, 97.87) == pytest.approx(0.51)
    assert one("additional_idle_ms", 79.9, 67.4) == pytest.approx(12.5)
    assert one("additional_non_compute_ms", 105.3, 80.0) == pytest.approx(25.3)
    assert one("overhead_ms", 7010.3, 6915.4) == pytest.approx(94.9)
    assert METRICS["speed_gain_pct"].of_cells(MeanPair(DDP, 1, SINGLE, 0)) is None


def gemms(*us, other=0):
    """The traces of several runs of one rank each.

    us: the duration of the GEMM kernel of each run in µs. other: the duration of a second kernel in µs; 0: no second kernel.
    """
    kernels = ((support_traces.ALL_REDUCE, other),) if other else ()
    return [[Steps(0, [(support_traces.GEMM, one), *kernels])] for one in us]


MORE = "operator_difference_ms(strategy='ddp', of='GEMM')"


def test_the_interval_of_a_difference_contains_the_errors_of_both_cells(tmp_path):
    """The interval of a difference of two cells is wider than the interval of each cell alone."""
    claim = {"id": "c", "says": "s", "test": f"{MORE} > 0.04", "where": "w"}
    ranks = {"single": gemms(100, 104, 102), "ddp": gemms(150, 154, 152)}
    found = summarized(profiled(tmp_path, ranks, traces="exact", claims=[claim]))
    (verdict,) = found.verdicts
    (number,) = verdict.numbers
    assert (verdict.verdict, number.against, len(number.runs)) == ("reproduced", SINGLE.name(), 6)
    assert number.value == pytest.approx(0.05)
    alone = 4.303 * 0.002 / 3**0.5  # half the interval of each cell alone, in ms, by Student's t
    half = (number.high - number.low) / 2
    assert 1.2 * alone < half < 1.8 * alone  # half the interval of the difference
    assert number.low < 0.05 < number.high


def test_a_claim_on_two_cells_needs_the_proof_of_both(tmp_path):
    claim = {"id": "c", "says": "s", "test": f"{MORE} > 0.04", "where": "w"}
    ranks = {"single": gemms(100, 104, 102), "ddp": gemms(150, 156, 153)}
    unproven = profiled(tmp_path / "a", ranks, claims=[claim], proofs={"single": SameWork(verdict="not proven", why="off")})
    (verdict,) = summarized(unproven).verdicts
    assert (verdict.verdict, "single ×1: not proven" in verdict.why) == ("undecided", True)
    entry = {"where": "t", "metric": "operator_difference_ms", "cell": {"strategy": "ddp"}, "printed": "+50μs", "of": "GEMM"}
    support.keep(unproven, [SINGLE, DDP], reported=[entry])
    (printed,) = summarized(unproven).reported
    assert (printed.comparable, printed.agrees, "single ×1" in printed.why) == (False, None, True)
    for other in CELLS:
        different = profiled(tmp_path / other, ranks, claims=[claim], proofs={other: SameWork(verdict="different", why="loss")})
        found = summarized(different)
        assert found.verdicts[0].verdict in ("undecided", "not run")
        row = found.rows[1]
        assert (row.baseline, {metric.name for metric in OF_CELLS} & row.metrics.keys()) == (None, set())
        assert found.operators == []


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("operator_ms(strategy='ddp') > 1", "operator_ms needs of, such as of='ncclDevKernel"),
        ("operator_ms(strategy='ddp', of=3) > 1", "operator_ms needs of"),
        (f"{MORE.replace(', of=', ', gpus=2, of=').replace('GEMM', 'vectorized kernels')} == 0", ""),
        ("time_to_accuracy_s(strategy='ddp', accuracy_pct='75') > 1", "needs accuracy_pct, such as accuracy_pct=75"),
        ("operator_count(strategy='ddp', of='ncclDevKernel_AllReduce*') == 1", ""),
    ],
)
def test_a_claim_names_a_kernel(tmp_path, test, why):
    claim = {"id": "c", "says": "s", "test": test, "where": "w"}
    ranks = {"single": gemms(100, 101), "ddp": gemms(150, 151, other=5)}
    (verdict,) = summarized(profiled(tmp_path, ranks, claims=[claim])).verdicts
    assert (verdict.verdict, why in verdict.why) == ("not run" if why else "reproduced", True), verdict.why


def test_a_printed_number_names_its_kernel_and_the_cell_of_comparison(tmp_path):
    reported = [
        {"where": "t", "metric": "operator_ms", "cell": {"strategy": "ddp"}, "printed": "150", "unit": "μs", "of": "GEMM"},
        {"where": "t", "metric": "operator_difference_ms", "cell": {"strategy": "ddp"}, "printed": "+50μs", "of": "GEMM"},
        {"where": "t", "metric": "speed_gain_pct", "cell": {"strategy": "single"}, "printed": "-40%", "against": {"gpus": 2}},
        {"where": "t", "metric": "speed_gain_pct", "cell": {"strategy": "ddp"}, "printed": "+40%", "against": {"gpus": 9}},
    ]  # fmt: skip
    ranks = {"single": gemms(100, 101, 102), "ddp": gemms(150, 151, 152)}
    workspace = profiled(tmp_path, ranks, traces="exact", reported=reported)
    time, more, gain, none = summarized(workspace).reported
    assert (time.measured, time.reported.value, time.of) == (pytest.approx(0.151), 0.15, "GEMM")
    assert (more.measured, more.agrees, more.against) == (pytest.approx(0.05), True, SINGLE.name())
    row = {row.id: row.metrics["throughput_per_s"].value for row in summarized(workspace).rows}
    assert gain.measured == pytest.approx(100 * (row[SINGLE.name()] / row[DDP.name()] - 1))
    assert (gain.against, gain.comparable) == (DDP.name(), True)
    assert none.why == "gpus 9: no such cell in this matrix"


# The tests below check the report.


def test_the_summary_lists_all_operators_and_the_page_the_largest_differences(tmp_path, capsys):
    many = [(f"kernel_{number}", 10 + number) for number in range(12)]
    ranks = {
        "single": [[Steps(0, [(support_traces.GEMM, 100), ("gone_kernel", 7), *many[:1]])]],
        "ddp": [[Steps(rank, [(support_traces.GEMM, 150), (support_traces.ALL_REDUCE, 40), *many]) for rank in range(2)]],
    }
    workspace = profiled(tmp_path, ranks, traces="exact")
    found = summarized(workspace)
    (collective,) = found.collectives
    assert (collective.cell, collective.collective, collective.calls) == (DDP.name(), "all_reduce", 1)
    assert (collective.total_ms, collective.mean_ms) == (pytest.approx(0.04), pytest.approx(0.04))
    (differ,) = found.operators
    assert (differ.cell, differ.baseline, differ.of) == (DDP.name(), SINGLE.name(), "kernels")
    assert differ.changes == {"new": 12, "gone": 1, "changed": 0, "same": 2}
    first, second = differ.differences[:2]
    assert (first.name, first.change, first.time_difference_ns) == (support_traces.GEMM, "same", pytest.approx(50_000))
    assert (second.name, second.change, second.calls, second.against_calls) == (support_traces.ALL_REDUCE, "new", 1, 0)
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    capsys.readouterr()
    page = (workspace.report / "index.html").read_text()
    assert "Operators compared with the baseline" in page
    assert '3 more rows are in <a href="summary.json">summary.json</a>.' in page
    compared = page.partition("Operators compared with the baseline")[2].partition("</table>")[0]
    assert "kernel_11" in compared
    assert "gone_kernel" not in compared  # the page shows the largest differences only
    assert 'id="rounding"' not in page
    assert "gone_kernel" in (workspace.report / "summary.json").read_text()


def test_the_page_explains_the_effect_of_rounding(tmp_path, capsys):
    workspace = profiled(tmp_path, {"ddp": [[support_traces.Rank(rank, seed=3) for rank in range(2)]]})
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    capsys.readouterr()
    page = (workspace.report / "index.html").read_text()
    table = page[page.index('id="rounding"') :]
    assert [f"<code>{name}</code>" in table[: table.index("</table>")] for name in SHOWN] == [True] * 3


TEXT = """schema: 1
name: m
traces: HOW
defaults: {workload: gpt2-tiny, strategy: single, gpus: 1, global_batch_size: 8, steps: 2, warmup_steps: 0}
reported: [{where: t, metric: speed_gain_pct, printed: 1%, against: {KEY: single}}]
"""


def test_a_matrix_says_how_its_study_read_traces(tmp_path, capsys):
    path = tmp_path / "m.yaml"
    path.write_text(TEXT.replace("HOW", "like-hta").replace("KEY", "strategy"))
    assert jobs(["render", "--matrix", str(path), "--workspace", str(tmp_path)]) == 0
    capsys.readouterr()
    assert Workspace(tmp_path).read_expansion(None).traces == "like-hta"
    for how, key, said in (("hta", "strategy", "like-hta"), ("like-hta", "strategie", "strategie")):
        path.write_text(TEXT.replace("HOW", how).replace("KEY", key))
        with pytest.raises(InputError, match=said):
            matrix.load_matrix(path)
    assert matrix.load_matrix(matrix.find_matrix_file("paper2")).file.traces == "like-hta"
