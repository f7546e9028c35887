"""What to change: the time by category and operator, launching calls and streams, and the advice that follows from them.

The traces are written here, and their numbers are computed by hand.
"""

import json

import pytest
import support_ranks as support
from support_tables import analysis

from collect.traces import answer_tables, trace
from collect.traces.advice import find_advice
from collect.traces.attention import AttentionUse
from collect.traces.idle_causes import IdleCauses
from collect.traces.kernel_categories import classify_kernel, classify_operator
from collect.traces.layers import LayerTime
from collect.traces.operator_times import OperatorTime, sum_operators
from collect.traces.operator_work import compute_least_ns, count_work
from collect.traces.phases import PhaseTime
from collect.traces.rank_analysis import analyse_rank
from collect.traces.rank_work import RankWork
from collect.traces.run_answers import RunAnswers
from collect.traces.stream_use import LaunchCalls, RunningTogether
from collect.traces.trace import InputTexts

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>"
HALF = "c10::Half"
HUGE = json.dumps([[1 << 47] * 40]).encode()  # no float holds the number of its elements


def shapes(*inputs, of=HALF):
    return {"Input Dims": list(inputs), "Input type": [of if size else "Scalar" for size in inputs]}


def texts(inputs, *, of=HALF, values=()):
    types = [of if size else "Scalar" for size in inputs]
    return InputTexts(*(json.dumps(entry).encode() for entry in (inputs, types, list(values))))


def analysed(rank, path, **said):
    return analyse_rank(trace.read_trace(rank.write(path, **said)))


def operator(
    name, *, kernel_ns, category="element-wise", of=HALF, flops=None, moved=None, least_ns=None, kernels=("kernel",), inputs=()
):
    """The row of an operator that launched kernels and no copies, once."""
    return OperatorTime(
        operator=name, category=category, shapes=json.dumps(inputs), types=[of], kernels=list(kernels), calls=1,
        kernel_ns=kernel_ns, copy_ns=0, with_children_ns=kernel_ns, self_host_ns=0, host_ns=0, flops=flops, bytes=moved,
        least_ns=least_ns,
    )  # fmt: skip


@pytest.fixture
def layered(tmp_path):
    """A step with an operator that calls two others: a product with a kernel and a copy, and an addition."""
    rank = support.RankOfRun(0)
    rank.annotate("ProfilerStep#3", 0, 1000)
    rank.annotate("aten::linear", 10, 110, cat="cpu_op", **shapes([8, 16], [4, 16], [4]))
    rank.annotate("aten::addmm", 20, 60, cat="cpu_op", **shapes([4], [8, 16], [16, 4]))
    rank.launch("kernel", "ampere_h16816gemm", 7, 25, 200, 250)
    rank.launch("gpu_memcpy", support.COPY, 7, 30, 260, 270)
    rank.annotate("aten::add", 70, 100, cat="cpu_op", **shapes([8, 4], [4]))
    rank.launch("kernel", ELEMENTWISE, 7, 75, 300, 330)
    rank.annotate("aten::add", 400, 420, cat="cpu_op", **shapes([8, 4], [4], of="float"))
    rank.launch("kernel", ELEMENTWISE, 7, 405, 430, 437)
    rank.annotate("aten::empty", 500, 540, cat="cpu_op", **shapes([8, 4]))
    rank.launch("kernel", support.NCCL, 20, 600, 640, 700)
    return analysed(rank, tmp_path)


def test_an_operator_has_its_own_kernels_and_those_of_all_that_it_calls(layered):
    found = {
        (row.operator, *row.types[:1]): (row.calls, row.kernel_ns, row.copy_ns, row.with_children_ns, row.self_host_ns)
        for row in layered.work.operators
    }
    assert found == {
        ("aten::linear",): (1, 0, 0, 90, 100 - 40 - 30),
        ("aten::addmm", HALF): (1, 50, 10, 60, 40),
        ("aten::add", HALF): (1, 30, 0, 30, 30),
        ("aten::add", "float"): (1, 7, 0, 7, 20),
        ("aten::empty",): (1, 0, 0, 0, 40),
        ("",): (1, 60, 0, 60, 0),
    }
    assert layered.work.operators[0].own_ns == 60, "the longest own time is first"
    assert {row.operator: row.shapes for row in layered.work.operators}["aten::addmm"] == "[[4],[8,16],[16,4]]"


def test_the_time_of_each_kernel_and_copy_counts_in_exactly_one_category(layered):
    assert {time.category: (time.count, time.total_ns) for time in layered.work.categories} == {
        "communication": (1, 60), "matrix products": (1, 50), "element-wise": (2, 37), "copies": (1, 10),
    }  # fmt: skip
    assert sum(row.own_ns for row in layered.work.operators) == sum(time.total_ns for time in layered.work.categories)


def test_an_operator_that_calls_itself_counts_its_kernels_once(tmp_path):
    rank = support.RankOfRun(0)
    for begin, end in ((0, 100), (10, 90), (20, 80)):
        rank.annotate("aten::to", begin, end, cat="cpu_op")
    rank.launch("kernel", "copy_kernel", 7, 30, 110, 160)
    (row,) = analysed(rank, tmp_path).work.operators
    assert (row.calls, row.kernel_ns, row.with_children_ns, row.self_host_ns, row.host_ns) == (1, 50, 50, 100, 100 + 80 + 60)


def test_operators_of_a_cpu_are_ordered_by_the_time_that_is_theirs(tmp_path):
    """evaluate_function contains AddmmBackward0, which contains mm: the time is that of mm."""
    rank = support.RankOfRun(0)
    for name, begin, end in (("autograd::engine::evaluate_function: X", 0, 100), ("X", 2, 99), ("aten::mm", 4, 96)):
        rank.annotate(name, begin, end, cat="cpu_op")
    work = analysed(rank, tmp_path).work
    assert [(row.operator, row.own_ns, row.inclusive_ns) for row in work.operators] == [
        ("aten::mm", 92, 92), ("X", 5, 97), ("autograd::engine::evaluate_function: X", 3, 100),
    ]  # fmt: skip
    assert [(time.category, time.total_ns) for time in work.categories] == [("matrix products", 92), ("other", 8)]


def test_the_copies_inside_a_product_are_no_time_of_the_product(tmp_path):
    rank = support.RankOfRun(0)
    rank.annotate("aten::baddbmm", 0, 100, cat="cpu_op", **shapes([2, 3, 5], [2, 3, 4], [2, 4, 5]))
    rank.annotate("aten::copy_", 10, 30, cat="cpu_op")
    rank.launch("gpu_memcpy", support.COPY, 7, 15, 200, 240)
    rank.launch("kernel", "gemm", 7, 50, 300, 360)
    (product,) = analysed(rank, tmp_path).products
    assert (product.total_ns, product.copy_ns, product.dtype) == (60, 40, HALF)
    assert product.flops_per_s == pytest.approx(2 * 2 * 3 * 5 * 4 / 60e-9)


@pytest.mark.parametrize(
    ("kernel", "called_by", "category"),
    [
        ("sm90_xmma_gemm_bf16", "aten::cudnn_convolution", "convolution"),
        ("void at::native::reduce_kernel<512>", "aten::addmm", "matrix products"),
        ("void at::native::reduce_kernel<512>", "aten::sum", "reduction"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "", "normalisation"),
        ("Cijk_Ailk_Bljk_BBS_BH", "", "matrix products"),
        ("flash_fwd_kernel", "FlashAttnFunc", "attention"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", "aten::copy_", "copies"),
        ("triton_poi_fused_addmm_gelu_view_15", "triton_poi_fused_addmm_gelu_view_15", "element-wise"),
        ("triton_poi_fused_convolution_relu_1", "triton_poi_fused_convolution_relu_1", "element-wise"),
        ("triton_red_fused_native_layer_norm_1", "triton_red_fused_native_layer_norm_1", "normalisation"),
        ("unknown_kernel", "aten::embedding", "other"),
    ],
)
def test_a_kernel_is_sorted_by_its_operator_and_then_by_its_name(kernel, called_by, category):
    assert classify_kernel(kernel, called_by) == category


def test_a_norm_of_a_vector_is_a_reduction_and_a_conversion_is_no_convolution():
    assert classify_operator("aten::linalg_vector_norm") == "reduction"
    assert classify_operator("aten::_convert_indices_from_coo_to_csr") == "other"
    assert classify_operator("aten::native_batch_norm_backward") == "normalisation"
    assert classify_operator("c10d::allreduce_") == "communication"


CONVOLUTION = [[2, 3, 9, 9], [8, 3, 3, 3]]  # with stride 2 and padding 1, the output is 2 x 8 x 5 x 5
CONVOLUTION_FLOPS = 2 * (2 * 8 * 5 * 5) * (3 * 3 * 3)
PAIRS = 2 * 4 * 16 * 16  # batch, heads, queries, keys


@pytest.mark.parametrize(
    ("name", "category", "inputs", "values", "flops", "elements"),
    [
        ("aten::mm", "matrix products", [[3, 4], [4, 5]], (), 2 * 3 * 4 * 5, 12 + 20 + 15),
        ("aten::addmm", "matrix products", [[5], [3, 4], [4, 5]], (), 2 * 3 * 4 * 5, 5 + 12 + 20 + 15),
        (
            "aten::cudnn_convolution", "convolution", [*CONVOLUTION, [], [], []], ("", "", "[1, 1]", "[2, 2]", "[1, 1]"),
            CONVOLUTION_FLOPS, 2 * 3 * 81 + 8 * 27 + 2 * 8 * 25,
        ),
        ("aten::cudnn_convolution", "convolution", CONVOLUTION, (), None, None),  # the stride is not recorded
        (
            "aten::convolution_backward", "convolution", [[2, 8, 5, 5], *CONVOLUTION],
            ("", "", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"),
            2 * CONVOLUTION_FLOPS, 2 * 8 * 25 + 2 * (2 * 3 * 81 + 8 * 27),
        ),
        (
            "aten::convolution_backward", "convolution", [[2, 8, 5, 5], *CONVOLUTION],
            ("", "", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[False, True, False]"),
            CONVOLUTION_FLOPS, 2 * 8 * 25 + 2 * 3 * 81 + 2 * 8 * 27,
        ),
        (
            "aten::_scaled_dot_product_flash_attention", "attention", [[2, 4, 16, 8]] * 3, ("", "", "", "0.", "False"),
            2 * PAIRS * (8 + 8), 4 * 2 * 4 * 16 * 8,
        ),
        (
            "aten::_scaled_dot_product_flash_attention", "attention", [[2, 4, 16, 8]] * 3, ("", "", "", "0.", "True"),
            PAIRS * (8 + 8), 4 * 2 * 4 * 16 * 8,
        ),
        (
            "aten::_flash_attention_backward", "attention", [[2, 16, 4, 8]] * 4, (*[""] * 11, "False"),
            5 * PAIRS * (8 + 8), 8 * 2 * 4 * 16 * 8,
        ),
        ("aten::add", "element-wise", [[6, 1, 4], [5, 4]], (), None, 24 + 20 + 6 * 5 * 4),
        ("aten::copy_", "copies", [[6, 4], [4]], (), None, 24 + 4),
        ("aten::native_layer_norm", "normalisation", [[6, 4], [], [4], [4], []], (), None, 24 + 4 + 4 + 24),
        ("aten::sum", "reduction", [[6, 4], [], []], (), None, 24),
        ("aten::_softmax", "reduction", [[6, 4], [], []], (), None, 24 + 24),
        ("aten::index", "other", [[6, 4]], (), None, None),
        ("aten::gather", "element-wise", [[6, 4], [5, 3]], (), None, None),  # these shapes do not fit together
    ],
)  # fmt: skip
def test_the_work_of_an_operator_follows_from_the_shapes_of_its_inputs(name, category, inputs, values, flops, elements):
    found = count_work(name, category, texts(inputs, values=values))
    assert found == (flops, None if elements is None else 2 * elements)


def test_work_is_not_known_without_types_and_with_lists_of_tensors():
    assert count_work("aten::add", "element-wise", texts([[2, 3]], of="QuantizedType")) == (None, None)
    assert count_work("aten::cat", "copies", InputTexts(b"[[[2, 3], [2, 3]], []]", b'["TensorList", "Scalar"]')) == (None, None)
    assert count_work("aten::lerp", "element-wise", InputTexts(b"[[], [4]]", b'["TensorList", "float"]')) == (None, None)
    assert count_work("aten::mm", "matrix products", InputTexts(b"[[2, 3], [3, 5]]")) == (None, None)
    assert count_work("aten::sum", "reduction", texts([[6, 4]], of="c10::Float8_e4m3fn")).bytes == 24


def test_copies_decide_the_category_only_of_an_operator_without_kernels(tmp_path):
    rank = support.RankOfRun(0)
    for place, category in enumerate(("kernel", "")):
        rank.annotate(f"own::op{place}", 500 * place, 500 * place + 100, cat="cpu_op")
        rank.launch("gpu_memcpy", support.COPY, 7, 500 * place + 10, 500 * place + 100, 500 * place + 400)
        if category:
            rank.launch(category, "gemm", 7, 20, 410, 420)
    found = {row.operator: row.category for row in analysed(rank, tmp_path).work.operators}
    assert found == {"own::op0": "matrix products", "own::op1": "copies"}


@pytest.mark.parametrize(
    "damaged", [b"", b"7", b"[[1e400]]", b"[" * 3000, b"[[18446744073709551616, 2]]", b"[[-1, 2]]", b"[null]", HUGE]
)
def test_damaged_shapes_of_any_operator_are_survived(tmp_path, damaged):
    rank = support.RankOfRun(0)
    names = ("aten::add", "aten::mm", "aten::cudnn_convolution", "aten::_flash_attention_forward", "aten::sum")
    for place, name in enumerate(names):
        rank.annotate(name, 100 * place, 100 * place + 50, cat="cpu_op", **{"Input Dims": ["HERE"], "Input type": ["float"]})
        rank.launch("kernel", "k", 7, 100 * place + 10, 1000 + 100 * place, 1000 + 100 * place + 50)
    path = rank.write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'["HERE"]', damaged or b"null"))
    found = analyse_rank(trace.read_trace(path))
    assert json.loads(json.dumps(found.work.make_document())) == found.work.make_document()
    assert [row.bytes for row in found.work.operators if row.shapes == HUGE.decode().replace(" ", "")] in ([], [None] * 5)
    assert all(row.flops is None for row in found.work.operators)


def test_the_bound_of_an_operator_is_that_of_its_flops_or_of_its_bytes():
    """An H100 does 989.5e12 FLOP/s in fp16 and moves 3,350e9 bytes/s: 1 us is 989,500,000 FLOPs or 3,350,000 bytes."""
    gpu = "NVIDIA H100 80GB HBM3"
    assert compute_least_ns(2 * 989_500_000, 3_350_000, gpu, "fp16") == 2000
    assert compute_least_ns(989_500_000, 3 * 3_350_000, gpu, "fp16") == 3000
    assert compute_least_ns(None, 3_350_000, gpu, "") == 1000
    assert compute_least_ns(5, 3_350_000, gpu, "") is None, "no peak of fp64 is listed"
    assert compute_least_ns(5, 5, "unknown model", "fp16") is None
    product = operator("aten::mm", kernel_ns=4000, category="matrix products", flops=989_500_000, moved=10, least_ns=1000)
    assert (product.roofline_pct, product.flops_per_s, product.bytes_per_s) == (25, 989_500_000 / 4e-6, 10 / 4e-6)
    assert operator("aten::mm", kernel_ns=9, of="float", kernels=["cutlass_80_tensorop_s1688gemm"]).precision == "tf32"
    assert operator("aten::mm", kernel_ns=9, of="float", kernels=["ampere_sgemm_128x64"]).precision == "fp32"


def test_the_call_during_which_the_gpu_is_idle_is_named(tmp_path):
    rank = support.RankOfRun(0)
    rank.annotate("ProfilerStep#8", 0, 1000)
    rank.launch("kernel", "first", 7, 5, 10, 20)
    rank.annotate("cudaLaunchKernel", 30, 630, cat="cuda_runtime", correlation=99)
    rank.annotate("loaded_late", 640, 700, tid=7, cat="kernel", stream=7, correlation=99)
    rank.launch("kernel", "last", 7, 690, 710, 720)
    found = analysed(rank, tmp_path)
    assert found.work.launch_calls == [
        LaunchCalls(
            rank=0, count=3, total_ns=606, median_ns=3, longest_ns=600, call="cudaLaunchKernel", call_ns=600, idle_ns=600,
            launched="loaded_late", step=8,
        )
    ]  # fmt: skip
    assert found.idle == IdleCauses(host_ns=10, launching_ns=600, communication_ns=0, other_ns=20)
    advice = find_advice([RunAnswers([found])], 1)[0]
    assert (advice.subject, advice.saves_at_most_ns, advice.share_pct) == (
        "launching calls",
        600,
        pytest.approx(100 * 600 / 710),
    )
    for part in ("cudaLaunchKernel of loaded_late in step 8", "CUDA_MODULE_LOADING=EAGER", "CUDA graphs", "warm up"):
        assert part in advice.text


def test_a_blocking_copy_has_a_remedy_of_its_own(tmp_path):
    rank = support.RankOfRun(0)
    rank.launch("kernel", "first", 7, 5, 10, 20)
    rank.annotate("hipMemcpyWithStream", 30, 630, cat="cuda_runtime", correlation=99)
    rank.annotate("CopyHostToDevice", 640, 700, tid=7, cat="gpu_memcpy", stream=7, correlation=99)
    text = find_advice([RunAnswers([analysed(rank, tmp_path)])], 1)[0].text
    assert "non_blocking=True" in text
    assert "CUDA_MODULE_LOADING" not in text


def test_each_stream_has_its_idle_time_and_its_queue(tmp_path):
    rank = support.RankOfRun(0)
    for launched, begin, end in ((0, 100, 150), (10, 150, 170), (20, 190, 200)):
        rank.launch("kernel", "k", 7, launched, begin, end)
    rank.launch("gpu_memcpy", support.COPY, 9, 30, 140, 160)
    busy, copying = analysed(rank, tmp_path).work.streams
    assert (busy.stream, busy.count, busy.busy_ns, busy.idle_ns, busy.longest_queue) == (7, 3, 80, 20, 3)
    assert busy.mean_queue == pytest.approx((97 + 137 + 167) / 100)
    assert (copying.stream, copying.busy_ns, copying.idle_ns, copying.longest_queue) == (9, 20, 80, 1)


def test_kinds_of_work_that_run_together_and_alone_add_up_to_the_busy_time(tmp_path):
    (rank,) = support.run(11, size=1)
    found = analysed(rank, tmp_path)
    kinds = {"compute": [], "communication": [], "memory": []}
    for event in support.kernels(rank):
        kind = "memory" if event["cat"] == "gpu_memcpy" else "communication" if support.is_collective(event) else "compute"
        kinds[kind].append(event)
    running = {kind: support.moments(events) for kind, events in kinds.items()}
    combinations = [" + ".join(kind for kind in kinds if ns in running[kind]) for ns in set.union(*running.values())]
    counts = [RunningTogether(kind, combinations.count(kind)) for kind in set(combinations)]
    assert sorted(found.work.together, key=str) == sorted(counts, key=str)
    assert sum(entry.total_ns for entry in found.work.together) == found.span_ns - found.idle_ns


def test_at_most_three_changes_are_named_and_none_below_one_percent():
    idle = IdleCauses(host_ns=4_000_000, launching_ns=0, communication_ns=0, other_ns=0)
    rows = [
        operator("aten::add", kernel_ns=3_000_000),
        operator("aten::copy_", kernel_ns=2_000_000, category="copies"),
        operator("aten::mm", kernel_ns=1_000_000, category="matrix products", flops=989_500_000, least_ns=1000),
    ]
    work = RankWork(categories=[], operators=rows, launch_calls=[], streams=[], together=[])
    rank = analysis(0, (), idle=idle, idle_ns=4_000_000, compute_ns=30_000_000, work=work, span_ns=50_000_000, calls=[])
    found = find_advice([RunAnswers([rank])], 2)
    assert [(advice.subject, advice.saves_at_most_ns, advice.share_pct) for advice in found] == [
        ("late launches", 2_000_000, 8), ("fusion", 1_500_000, 6), ("copies", 1_000_000, 4),
    ]  # fmt: skip
    assert "aten::add, 3.000 ms" in found[1].text
    long = analysis(0, (), idle=idle, idle_ns=4_000_000, span_ns=1_000_000_000, compute_ns=1, calls=[])
    assert find_advice([RunAnswers([long])], 1) == []


def advise(rows, **more):
    """The texts of the advice on a rank of 10 ms with these operators, by subject."""
    work = RankWork(categories=[], operators=rows, launch_calls=[], streams=[], together=[])
    found = {"idle": None, "idle_ns": 0, "compute_ns": 8_000_000, **more}
    advice = find_advice([RunAnswers([analysis(0, (), span_ns=10_000_000, work=work, calls=[], **found)])], 1)
    return {entry.subject: (entry.saves_at_most_ns, entry.text) for entry in advice}


@pytest.mark.parametrize(
    ("second", "saves_ns"), [([[24, 77, 77], [24, 77, 64]], 6_000_000), ([[24, 77, 64], [24, 64, 50]], None)]
)
def test_a_softmax_between_two_products_is_named_as_attention(second, saves_ns):
    rows = [
        operator("aten::bmm", kernel_ns=3_000_000, category="matrix products", inputs=[[24, 77, 64], [24, 64, 77]]),
        operator("aten::_softmax", kernel_ns=1_000_000, category="reduction", inputs=[[2, 12, 77, 77], [], []]),
        operator("aten::bmm", kernel_ns=2_000_000, category="matrix products", inputs=second),
    ]
    assert advise(rows).get("attention", (None,))[0] == saves_ns


def test_a_compiled_model_is_not_advised_to_be_compiled():
    idle = IdleCauses(host_ns=2_000_000, launching_ns=0, communication_ns=0, other_ns=0)
    rows = [operator("triton_poi_fused_add_0", kernel_ns=2_000_000, kernels=("triton_poi_fused_add_0",))]
    found = advise(rows, idle=idle, idle_ns=2_000_000)
    assert list(found) == ["late launches"]
    assert "reduce-overhead" in found["late launches"][1]


def test_the_operator_that_loses_most_over_all_its_shapes_is_named():
    rows = [
        operator("aten::native_batch_norm", kernel_ns=3_000_000, category="normalisation", least_ns=1_000_000),
        operator("aten::convolution", kernel_ns=2_000_000, category="convolution", flops=1, least_ns=400_000),
        operator("aten::convolution", kernel_ns=2_000_000, category="convolution", flops=1, least_ns=600_000),
    ]
    work = RankWork(categories=[], operators=rows, launch_calls=[], streams=[], together=[])
    rank = analysis(0, (), idle=None, idle_ns=0, compute_ns=9_000_000, span_ns=10_000_000, work=work, calls=[])
    (found,) = find_advice([RunAnswers([rank])], 1)
    assert (found.subject, found.saves_at_most_ns) == ("slow kernels", 5_000_000)
    assert "aten::convolution, which reaches 25 % of its bound" in found.text


@pytest.mark.parametrize(
    ("data_ns", "shown"), [(300_000, ()), (1_000_000, ("1.000 ms", "torch.compile")), (9_000_000, ("4.000 ms",))]
)
def test_reading_data_and_queued_work_have_remedies_of_their_own(data_ns, shown):
    idle = IdleCauses(host_ns=4_000_000, launching_ns=0, communication_ns=0, other_ns=5_000_000)
    data = PhaseTime(phase="data", host_ns=data_ns, device_ns=0, compute_ns=0, communication_ns=0)
    rank = analysis(0, (), idle=idle, idle_ns=9_000_000, compute_ns=1_000_000, span_ns=10_000_000, phases=[data], calls=[])
    queued, late = find_advice([RunAnswers([rank])], 1)
    assert (queued.subject, queued.saves_at_most_ns, late.subject) == ("queued work", 5_000_000, "late launches")
    assert ".item()" in queued.text
    assert ("reading data" in late.text) == bool(shown)
    assert all(part in late.text for part in shown)
    assert ("torch.compile" in late.text) == (data_ns < 2_000_000)


def test_a_product_in_fp32_could_use_tf32_and_attention_by_formula_could_use_flash():
    """67 TFLOP/s in fp32 against 494.5 in TF32: a product of 67e9 FLOPs takes 1 ms at least, with TF32 0.1355 ms."""
    row = operator("aten::mm", kernel_ns=2_000_000, category="matrix products", of="float", flops=67_000_000_000,
                   moved=10, least_ns=1_000_000,
                   kernels=["ampere_sgemm_128x64"])  # fmt: skip
    use = AttentionUse(backend="math", backward=False, name="sdpa", by="operator", calls=1, total_ns=900_000, kernels=[])
    work = RankWork(categories=[], operators=[row], launch_calls=[], streams=[], together=[])
    rank = analysis(0, (), idle=None, idle_ns=0, compute_ns=9_000_000, span_ns=10_000_000, work=work, attention=[use])
    found = {advice.subject: advice for advice in find_advice([RunAnswers([rank])], 1)}
    assert found["TF32"].saves_at_most_ns == pytest.approx(2_000_000 - 67e9 / 494.5e12 * 1e9, abs=1)
    assert "set_float32_matmul_precision" in found["TF32"].text
    assert found["attention"].saves_at_most_ns == 900_000


def test_waiting_names_the_slow_rank_and_exposed_transfer_the_collective():
    ranks = [analysis(0, (2_004_000, 3_611_000), idle=None), analysis(1, (3_012_000, 3_010_000), idle=None)]
    found = find_advice([RunAnswers(ranks)], 2)
    text = {advice.subject: advice.text for advice in found}
    assert "rank 0" in text["slow ranks"]
    slow = next(advice for advice in found if advice.subject == "slow ranks")
    assert slow.saves_at_most_ns == 500_000


def module(name, parent, ns):
    return LayerTime(
        name=name, parent=parent, depth=0, calls=1, forward_host_ns=0, backward_host_ns=0, forward_ns=ns, backward_ns=0,
        communication_ns=0,
    )  # fmt: skip


def test_the_longest_module_is_shown_although_forty_short_ones_are_called_first():
    layers = [module("Encoder_0", "", 90), *(module(f"Block_{number}", "Encoder_0", 2) for number in range(45))]
    layers += [module("Transformer_0", "", 900), module("Inner_0", "Transformer_0", 300), module("Deep_0", "Inner_0", 200)]
    layers += [module("Tiny_0", "", 1)]
    shown = answer_tables.make_layers_table([analysis(0, (), layers=layers)])
    names = [row.name for row in shown.shown_rows]
    assert names[:5] == ["Transformer_0", "Inner_0", "Deep_0", "Encoder_0", "Block_0"]
    assert names[-1] == "Tiny_0", "a module that no other calls is always shown"
    assert len(names) == 40
    assert shown.left_out == len(layers) - 40


def test_fifty_modules_that_no_other_calls_are_all_shown():
    layers = [module(f"Root_{number}", "", number) for number in range(50)]
    shown = answer_tables.make_layers_table([analysis(0, (), layers=layers)])
    assert [row.name for row in shown.shown_rows] == [f"Root_{number}" for number in reversed(range(50))]


def test_long_names_of_kernels_keep_what_tells_them_apart():
    start = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    names = [f"{start}{tail}{'(int)' * 30}" for tail in ("direct_copy", "add", "CUDAFunctor_add", "CUDAFunctor_mul")]
    tallies = [answer_tables.EventTally(name, 1, 1000) for name in names]
    shown = [row[0] for row in answer_tables.make_tally_table("kernels", "Kernel", tallies).texts]
    assert len(set(shown)) == 4
    assert all(len(text) <= 72 for text in shown)
    assert [tail in text for tail, text in zip(("direct_copy", "add", "r_add", "r_mul"), shown, strict=True)] == [True] * 4


def test_operators_of_two_ranks_are_added_up_by_name_and_inputs():
    rows = [operator("aten::add", kernel_ns=3, moved=10), operator("aten::add", kernel_ns=4, moved=20)]
    (found,) = sum_operators(rows)
    assert (found.calls, found.kernel_ns, found.bytes) == (2, 7, 30)
    assert len(sum_operators([*rows, operator("aten::add", kernel_ns=1, of="float")])) == 2
