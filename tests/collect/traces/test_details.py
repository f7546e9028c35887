"""Modules, memory, matrix products and attention: from a trace of torch's profiler, and from generated traces of a GPU.

The expected values are counted from the JSON text: with Kineto's own arrows from forward to backward, with a running sum over
the sizes of the allocations, from the sizes of the model, and for generated traces nanosecond by nanosecond.
"""

import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import pytest
import support_detailed_torch as model
import support_ranks as support
from support_e2e import HANG_S

from collect.traces import trace
from collect.traces.layers import sum_layers
from collect.traces.matrix_products import parse_product_sizes
from collect.traces.memory_use import MOST_CURVE_POINTS
from collect.traces.nesting import MOST_LEVELS
from collect.traces.rank_analysis import analyse_rank

SUPPORT = Path(__file__).parents[2] / "support"
MODULE = "nn.Module: "
WRAPPER = "autograd::engine::evaluate_function"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(the analysis of a real trace, its events as the JSON file has them)."""
    path = tmp_path_factory.mktemp("torch") / "rank-0.json.gz"
    command = [sys.executable, "-W", "ignore", SUPPORT / "support_detailed_torch.py", path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=HANG_S, env=environment, capture_output=True)
    found = trace.read_trace(path)
    assert (found.lost_counts, found.cut_reason) == ({}, "")
    return analyse_rank(found), json.loads(gzip.decompress(path.read_bytes()), parse_float=Fraction)["traceEvents"]


def span(event) -> tuple[int, int]:
    return int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000)


def union(spans) -> int:
    """How many ns lie in at least one of the spans (begin, end)."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def complete(events, start: str = ""):
    return [event for event in events if event["ph"] == "X" and event["name"].startswith(start)]


def window(events) -> tuple[int, int]:
    steps = [span(event) for event in complete(events, "ProfilerStep#")]
    return min(begin for begin, _ in steps), max(end for _, end in steps)


def test_modules_of_a_real_training_agree_with_the_arrows_of_kineto(recorded):
    """Kineto draws an arrow (`fwdbwd`) from each operator of forward to its node of backward."""
    analysis, events = recorded
    modules = complete(events, MODULE)
    wrappers = [span(event) for event in complete(events, WRAPPER)]
    arrows = defaultdict(dict)
    for event in events:
        if event.get("cat") == "fwdbwd":
            arrows[event["id"]][event["ph"]] = int(event["ts"] * 1000)
    pairs = [(ends["s"], ends["f"]) for ends in arrows.values()]
    assert len(pairs) > 20
    forward, backward, calls = defaultdict(list), defaultdict(list), Counter()
    for event in modules:
        begin, end = span(event)
        name = event["name"].removeprefix(MODULE)
        again = any(first <= begin < last for first, last in wrappers)
        (backward if again else forward)[name].append((begin, end))
        calls[name] += not again
        for made, node in pairs:
            if begin <= made < end and not again:
                backward[name] += [wrapper for wrapper in wrappers if wrapper[0] <= node < wrapper[1]]
    assert {one.name for one in analysis.layers} == {event["name"].removeprefix(MODULE) for event in modules}
    for one in analysis.layers:
        assert (one.name, one.calls, one.forward_host_ns) == (one.name, calls[one.name], union(forward[one.name]))
        assert (one.name, one.backward_host_ns) == (one.name, union(backward[one.name]))
        assert (one.forward_ns, one.backward_ns, one.communication_ns) == (None, None, None)
        assert (one.forward, one.backward) == (one.forward_host_ns, one.backward_host_ns)
    by_name = {one.name: one for one in analysis.layers}
    assert calls["Block_1"] == model.STEPS  # its second call in each step computes activations again
    assert len([event for event in modules if event["name"] == f"{MODULE}Block_1"]) == 2 * model.STEPS
    tree = {name: (one.parent, one.depth) for name, one in by_name.items()}
    assert tree["Sequential_0"] == ("", 0)
    assert tree["Checkpointed_0"] == ("Sequential_0", 1)
    assert tree["Block_1"] == ("Checkpointed_0", 2)
    assert tree["Linear_4"] == ("Sequential_0", 1)
    assert [one.name for one in analysis.layers][:3] == ["Sequential_0", "Block_0", "Linear_0"]


def test_memory_of_a_real_training_is_the_running_sum_of_its_allocations(recorded):
    analysis, events = recorded
    begin, end = window(events)
    memory = sorted((int(event["ts"] * 1000), event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held, start, curve = 0, None, []
    for at, size in memory:
        if at >= begin and start is None:
            start = held
        held += size
        if begin <= at < end:
            curve.append((at - begin, held))
    assert start >= 4000  # the 1,000 numbers that were allocated before the first step
    (use,) = analysis.memory
    assert (use.device, use.start_bytes, use.end_bytes) == ("cpu", start, curve[-1][1])
    assert use.peak_bytes == max(start, *(size for _, size in curve)) > start
    assert use.peak_reserved_bytes is None
    assert len(use.points) == min(MOST_CURVE_POINTS, len(curve) + 1)
    assert {(point.at_ns, point.allocated) for point in use.points[1:]} <= set(curve)
    assert max(point.allocated for point in use.points) == use.peak_bytes
    assert [point.at_ns for point in use.points] == sorted(point.at_ns for point in use.points)


def test_matrix_products_of_a_real_training_are_those_of_the_model(recorded):
    """Forward multiplies a B x K by a K x N matrix. Backward has one product for the gradient of the weight and one for the
    gradient of the input. The first layer has no gradient of its input, which is the data."""
    analysis, events = recorded
    batch, width = model.BATCH, model.WIDTH
    layers = [(width, 2 * width), (2 * width, width)] * 2 + [(width, width)]
    again = layers[2:4]  # activation checkpointing computes the second block again
    calls = Counter()
    for k, n in [*layers, *again]:
        calls["aten::addmm", 1, batch, n, k] += model.STEPS
    for place, (k, n) in enumerate(layers):
        calls["aten::mm", 1, n, k, batch] += model.STEPS
        calls["aten::mm", 1, batch, k, n] += model.STEPS if place else 0
    calls["aten::baddbmm", 3, 4, 6, 5] += model.STEPS
    found = {(one.operator, one.batch, one.m, one.n, one.k): one for one in analysis.products}
    counted = {key: one.calls for key, one in found.items()}
    # Checkpointing may leave out the last product of the block that it computes again, if no result of it is needed.
    least = counted["aten::addmm", 1, batch, width, 2 * width]
    assert least in (calls["aten::addmm", 1, batch, width, 2 * width], 2 * model.STEPS)
    calls["aten::addmm", 1, batch, width, 2 * width] = least
    assert counted == calls
    for name in ("aten::addmm", "aten::mm", "aten::baddbmm"):
        time = sum(end - begin for begin, end in map(span, complete(events, name)) if begin >= window(events)[0])
        assert sum(one.total_ns for one in analysis.products if one.operator == name) == time
    one = found["aten::baddbmm", 3, 4, 6, 5]
    assert one.flops == 2 * 3 * 4 * 6 * 5 * model.STEPS
    assert one.flops_per_s == pytest.approx(one.flops / one.total_ns * 1e9)
    assert sum(one.untimed for one in analysis.products) == 0


def test_attention_of_a_real_training_is_the_operator_that_ran(recorded):
    analysis, events = recorded
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    expected = {}
    for each in (name, f"{name}_backward"):
        spans = [span(event) for event in complete(events, each) if event["name"] == each]
        expected[each] = ("flash", each.endswith("backward"), len(spans), sum(end - begin for begin, end in spans))
    assert expected[name][2] == model.STEPS
    assert {one.name: (one.backend, one.backward, one.calls, one.total_ns) for one in analysis.attention} == expected


def gpu_rank(seed: int) -> tuple[support.RankOfRun, dict]:
    """A random trace of a rank with modules, autograd and kernels, and the expected values: for each module the
    nanoseconds in which it is active on the GPU and on the host."""
    pick, rank = random.Random(seed), support.RankOfRun(seed)
    truth = {"forward": defaultdict(set), "backward": defaultdict(set), "communication": defaultdict(set),
             "host": defaultdict(set), "host backward": defaultdict(set), "calls": Counter()}  # fmt: skip
    now, sequence, free = 100, 7, 0

    def work(thread: int, names: list[str], passes: str) -> None:
        nonlocal free, now
        kind = pick.choice(["kernel", "kernel", "collective", "gpu_memcpy"])
        begin = max(free, now + pick.randint(4, 30)) if pick.random() < 0.8 else now + pick.randint(4, 30)
        end = begin + pick.randint(1, 40)
        free = end
        if kind == "collective":
            rank.launch(
                "kernel", support.NCCL, 20, now, begin, end, tid=thread, **support.arguments("allreduce", 4, 2, "[0, 1]")
            )
        else:
            rank.launch(kind, support.GEMM if kind == "kernel" else support.COPY, 7, now, begin, end, tid=thread)
        for name in names:
            truth["communication" if kind == "collective" else passes][name] |= set(range(begin, end))
        now += pick.randint(4, 12)

    def module(name: str, inside: list[str], depth: int, made: list) -> None:
        nonlocal now, sequence
        begin, names = now, list(dict.fromkeys([*inside, name]))
        now += 1
        for _ in range(pick.randint(0, 3)):
            if depth < 3 and pick.random() < 0.5:
                module(f"{'ABC'[depth]}_{pick.randint(0, 2)}", names, depth + 1, made)
            else:
                at = now
                work(1, names, "forward")
                number = {"Sequence number": sequence, "Fwd thread id": 0}
                # of two operators with the same sequence number, only the last one made the node of autograd
                rank.annotate("aten::view", at, at + 1, cat="cpu_op", **number)
                rank.annotate("aten::mul", at + 1, now - 1, cat="cpu_op", **number)
                made.append((sequence, names))
                sequence += 1
        now += pick.randint(1, 5)
        rank.annotate(f"{MODULE}{name}", begin, now, cat="python_function")
        truth["calls"][name] += 1
        truth["host"][name] |= set(range(begin, now))
        now += pick.randint(0, 3)

    for step in range(2):
        first, made = now, []
        module("Model_0", [], 0, made)
        for number, names in reversed(made):
            begin = now
            now += 1
            work(2, names, "backward")
            if pick.random() < 0.3:  # activation checkpointing: the module is called again on the thread of autograd
                rank.annotate(f"{MODULE}{names[-1]}", now, now + 6, tid=2, cat="python_function")
                now += 6
            rank.annotate(f"{WRAPPER}: N", begin, now, tid=2, cat="cpu_op", **{"Sequence number": number, "Fwd thread id": 1})
            rank.annotate("N", begin, now, tid=2, cat="cpu_op", **{"Sequence number": number, "Fwd thread id": 1})
            for name in names:
                truth["host backward"][name] |= set(range(begin, now))
            now += pick.randint(0, 4)
        work(1, [], "forward")
        rank.annotate(f"ProfilerStep#{step}", first - 5, now + 5)
        now += 20
    # what is outside of the steps, or after the last of them, belongs to no module
    rank.annotate(f"{MODULE}Model_0", now, now + 30, cat="python_function")
    pick.shuffle(rank.events)
    return rank, truth


@pytest.mark.parametrize("seed", range(40))
def test_modules_on_a_gpu_are_counted_nanosecond_by_nanosecond(tmp_path, seed):
    rank, truth = gpu_rank(seed)
    analysis = analyse_rank(trace.read_trace(rank.write(tmp_path)))
    assert analysis.source == "gpu"
    found = {one.name: one for one in analysis.layers}
    assert found.keys() == truth["calls"].keys()
    for name, one in found.items():
        assert one.calls == truth["calls"][name]
        assert one.forward_host_ns == len(truth["host"][name])
        assert one.forward_ns == len(truth["forward"][name])
        assert one.communication_ns == len(truth["communication"][name])
        some = any(truth["host backward"].values())
        assert one.backward_ns == (len(truth["backward"][name]) if some else None) or not some
        assert one.backward_host_ns == len(truth["host backward"][name]) or not some


def test_without_numbers_of_autograd_backward_is_not_known(tmp_path):
    rank = support.RankOfRun(0)
    rank.annotate("ProfilerStep#0", 0, 100)
    rank.annotate(f"{MODULE}Linear_0", 10, 40, cat="python_function")
    rank.launch("kernel", support.GEMM, 7, 12, 20, 50)
    (one,) = analyse_rank(trace.read_trace(rank.write(tmp_path))).layers
    assert (one.forward_ns, one.backward_ns, one.backward_host_ns) == (30, None, None)
    assert sum_layers(analyse_rank(trace.read_trace(rank.write(tmp_path))).layers * 2)[0].forward_ns == 60


def test_modules_that_are_nested_too_deep_are_left_out(tmp_path):
    rank = support.RankOfRun(0)
    for depth in range(MOST_LEVELS + 10):
        rank.annotate(f"{MODULE}M_{depth}", depth, 1000 - depth, cat="python_function")
    rank.launch("kernel", support.GEMM, 7, 500, 510, 520)
    layers = analyse_rank(trace.read_trace(rank.write(tmp_path))).layers
    assert [one.depth for one in layers[:MOST_LEVELS]] == list(range(MOST_LEVELS))
    assert {one.forward_ns for one in layers[:MOST_LEVELS]} == {10}


def test_the_memory_of_a_gpu_is_read_from_its_events(tmp_path):
    rank = support.RankOfRun(0)
    rank.launch("kernel", support.GEMM, 7, 100, 110, 150)
    for at, device, size, held, reserved in (
        (50, 0, 10, 110, 200),
        (120, 0, 50, 160, 200),
        (130, 0, -30, 130, 300),
        (140, 1, 7, 1007, 2000),
        (500, 0, 900, 1030, 2000),
    ):
        args = {"Bytes": size, "Total Allocated": held, "Total Reserved": reserved, "Device Id": device, "Device Type": 1}
        rank.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "dur": 0, "args": args}
        )
    rank.annotate("ProfilerStep#0", 100, 200)
    one, other = analyse_rank(trace.read_trace(rank.write(tmp_path))).memory
    assert (one.device, one.start_bytes, one.end_bytes, one.peak_bytes, one.peak_reserved_bytes) == (
        "cuda:0",
        110,
        130,
        160,
        300,
    )
    assert [(point.at_ns, point.allocated, point.reserved) for point in one.points] == [
        (0, 110, 200),
        (20, 160, 200),
        (30, 130, 300),
    ]
    assert (other.device, other.start_bytes, other.peak_bytes, other.peak_reserved_bytes) == ("cuda:1", 1000, 1007, 2000)


def test_products_on_a_gpu_take_the_time_of_the_kernels_that_they_launched(tmp_path):
    rank = support.RankOfRun(0)
    rank.annotate("ProfilerStep#0", 0, 1000)
    dims = {"Input Dims": [[2, 3, 8], [4, 8], [4]]}
    for begin in (10, 200):
        rank.annotate("aten::linear", begin, begin + 100, cat="cpu_op", **dims)
        rank.annotate("aten::addmm", begin + 5, begin + 90, cat="cpu_op", **{"Input Dims": [[4], [6, 8], [8, 4], [], []]})
        rank.launch("kernel", "gemm", 7, begin + 10, begin + 20, begin + 50)
        rank.launch("kernel", "reduce", 7, begin + 20, begin + 60, begin + 65)
        rank.launch("kernel", "elsewhere", 7, begin + 10, begin + 70, begin + 80, tid=2)  # of another thread: not counted
    rank.annotate("aten::linear", 400, 450, cat="cpu_op", **dims)  # has no inner addmm
    rank.launch("kernel", "gemm", 7, 410, 420, 430)
    rank.annotate("aten::mm", 500, 510, cat="cpu_op", **{"Input Dims": [[2, 3], [3, 5]]})  # no recorded kernel
    rank.annotate("aten::mm", 1500, 1510, cat="cpu_op", **{"Input Dims": [[2, 3], [3, 5]]})  # after the step
    products = analyse_rank(trace.read_trace(rank.write(tmp_path))).products
    found = {one.operator: (one.m, one.n, one.k, one.calls, one.total_ns, one.untimed, one.flops) for one in products}
    assert found == {
        "aten::addmm": (6, 4, 8, 2, 70, 0, 2 * 2 * 6 * 4 * 8),
        "aten::linear": (6, 4, 8, 1, 10, 0, 2 * 6 * 4 * 8),
        "aten::mm": (2, 5, 3, 0, 0, 1, 0),
    }
    assert {one.operator: one.flops_per_s for one in products}["aten::mm"] is None


NO_SHAPES = [
    *(b"", b"7", b"[]", b"[[2, 3]]", b"[[2, 3], [4, 5]]", b"[[2, -3], [-3, 5]]", b"[[2, 3.5], [3.5, 5]]", b'["a", "b"]'),
    *(b"[[2, 0], [0, 5]]", b"[[2, true], [1, 5]]", b"[[[2], 3], [3, 5]]", b"[null, null]", b"[[1e400, 2], [2, 3]]"),
    *(b"[[99999999999999, 9], [9, 99999999999999]]", b"[" * 3000, b"[[18446744073709551616, 2], [2, 3]]"),
    b"[[1, 2, 3, 4], [1, 2, 4, 5]]",
]


@pytest.mark.parametrize("shapes", NO_SHAPES)
def test_invalid_shapes_of_a_matrix_product_give_no_size(shapes):
    for operator in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"):
        assert parse_product_sizes(operator, shapes) is None


def test_attention_by_operators_and_kernels(tmp_path):
    rank = support.RankOfRun(0)
    rank.annotate("ProfilerStep#0", 0, 2000)
    flash = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)"
    cudnn = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3"
    at = 10
    for outer, inner, kernels in (
        ("aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward", [flash]),
        ("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention_forward", [cudnn]),
        (
            "aten::_scaled_dot_product_efficient_attention_backward",
            "aten::_efficient_attention_backward",
            ["fmha_cutlassB_f16"],
        ),
        ("aten::_scaled_dot_product_attention_math", "aten::matmul", ["gemm", "softmax", "gemm"]),
        ("aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward", []),
        ("aten::other", "aten::another", [flash, "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>()", cudnn]),
        ("aten::other", "aten::another", ["triton_tem_fused_flex_attention_0", "gemm", "flashy_layer_norm"]),
    ):
        rank.annotate(outer, at, at + 90, cat="cpu_op")
        rank.annotate(inner, at + 5, at + 80, cat="cpu_op")
        for place, kernel in enumerate(kernels, 1):
            rank.launch("kernel", kernel, 7, at + 10 * place, at + 20 * place, at + 20 * place + 3 * place)
        at += 100
    found = {(one.backend, one.backward, one.by): (one.name, one.calls, one.total_ns) for one in analyse_rank(
        trace.read_trace(rank.write(tmp_path))
    ).attention}  # fmt: skip
    assert found == {
        ("flash", False, "operator"): ("aten::_scaled_dot_product_flash_attention", 2, 3),
        ("cudnn", False, "operator"): ("aten::_scaled_dot_product_cudnn_attention", 1, 3),
        ("efficient", True, "operator"): ("aten::_scaled_dot_product_efficient_attention_backward", 1, 3),
        ("math", False, "operator"): ("aten::_scaled_dot_product_attention_math", 1, 3 + 6 + 9),
        ("flash", False, "kernel"): (flash, 1, 3),
        ("flash", True, "kernel"): ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>()", 1, 6),
        ("cudnn", False, "kernel"): (cudnn, 1, 9),
        ("flex", False, "kernel"): ("triton_tem_fused_flex_attention_0", 1, 3),
    }
