"""shardlab identifies a collective by the arguments that Kineto records, and if there are none by the name of the kernel. This
also works for kernels that are not NCCL's."""

import json

import pytest

from collect.traces import trace
from collect.traces.breakdown import EventTally, compute_breakdown
from collect.traces.collective import CollectiveOperation, find_kernel_collective, find_torch_name
from collect.traces.communication import find_communication

RCCL = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
ARGUMENTS = {
    "Collective name": "_allgather_base",
    "In msg nelems": 25136,
    "Out msg nelems": 201088,
    "Group size": 8,
    "dtype": "BFloat16",
    "In split size": "[]",
    "Process Group Name": "3",
    "Process Group Description": 'tensor "parallel"',
    "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    "Seq": 17,
}
MEANT = CollectiveOperation(
    name="all_gather",
    group="3",
    description='tensor "parallel"',
    group_size=8,
    ranks=tuple(range(8)),
    in_elements=25136,
    out_elements=201088,
    dtype="BFloat16",
)


def kernel(name: str, at: int, dur: int, arguments: dict | None = None) -> dict:
    args = {"stream": 7, "correlation": at, **(arguments or {})}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": at, "dur": dur, "args": args}


def read(folder, events: list[dict], damage: str = "") -> trace.Trace:
    """Reads a trace of these events. damage: text that is added as the last event and is not valid JSON; then the reader has to
    read the events one by one."""
    path = folder / "rank-0.json"
    path.write_text('{"traceEvents": [' + ", ".join([*map(json.dumps, events), *([damage] if damage else [])]) + "]}")
    return trace.read_trace(path)


@pytest.mark.parametrize("damage", ["", '{"ph": "X" "name"}'], ids=["whole", "read one by one"])
def test_the_arguments_of_an_event_decide_the_collective(tmp_path, damage):
    events = [kernel(RCCL, 10, 5, ARGUMENTS), kernel(RCCL, 20, 7, ARGUMENTS | {"Seq": 18}), kernel("gemm", 40, 1)]
    found = read(tmp_path, events, damage)
    assert found.collectives == [MEANT]
    assert found.collective.tolist() == [0, 0, -1]
    assert found.sequence.tolist() == [17, 18, -1]
    assert (MEANT.input_bytes, MEANT.output_bytes) == (2 * 25136, 2 * 201088)
    assert compute_breakdown(found).collectives == [EventTally("all_gather", 2, 12_000)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"Process Group Ranks": [*range(8)]}, {}),  # a list of ranks instead of the text that Kineto writes
        # Kineto abbreviates the list of a large group, so the ranks are unknown
        ({"Process Group Ranks": "[0, 1, ..., 7]"}, {"ranks": None, "first_ranks": (0, 1)}),
        ({"Process Group Name": None, "Process Group ID": 3}, {}),  # the form that PyTorch wrote until version 2.3
        ({"In msg nelems": "25136", "Out msg nelems": -1}, {"in_elements": None, "out_elements": None}),
        ({"In msg nelems": 10**30, "dtype": {"a": 1}}, {"in_elements": None, "dtype": None}),
        ({"dtype": "Float4_of_tomorrow"}, {"dtype": "Float4_of_tomorrow"}),
        ({"Collective name": "reduce_scatter_tensor_coalesced"}, {"name": "reduce_scatter"}),
        ({"Collective name": "of_tomorrow"}, {"name": "of_tomorrow"}),
    ],
)
def test_an_argument_of_another_type_is_not_known(tmp_path, changed, expected):
    arguments = {key: value for key, value in (ARGUMENTS | changed).items() if value is not None}
    found = read(tmp_path, [kernel(RCCL, 10, 5, arguments)])
    assert (found.lost_counts, found.collectives) == ({}, [MEANT._replace(**expected)])
    assert found.collectives[0].input_bytes == (None if {"in_elements", "dtype"} & expected.keys() else 2 * 25136)


@pytest.mark.parametrize("name", [7, "", None, ["allreduce"]])
def test_without_a_name_among_the_arguments_the_kernel_names_the_collective(tmp_path, name):
    found = read(
        tmp_path, [kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 10, 5, ARGUMENTS | {"Collective name": name})]
    )
    assert found.collective.tolist() == [-1]
    assert compute_breakdown(found).collectives == [EventTally("all_reduce", 1, 5000)]


def test_an_rccl_kernel_is_named_by_its_arguments_and_otherwise_generic(tmp_path):
    """RCCL has one kernel for all collectives. Without arguments, its collective counts as `generic`."""
    events = [
        kernel(RCCL, 10 * index, 5, ARGUMENTS | {"Collective name": name}) for index, name in enumerate(("allreduce",) * 2)
    ]
    found = read(tmp_path, [*events, kernel(RCCL, 50, 3), kernel("gemm", 60, 40)])
    told = compute_breakdown(found)
    assert {one.name: one.count for one in told.collectives} == {"all_reduce": 2, "generic": 1}
    assert (told.communication_ns, told.compute_ns) == (13_000, 40_000)
    communication = find_communication(found, found.has_category("kernel"))
    assert communication.is_communication.tolist() == [True, True, True, False]
    assert [communication.operations[index].group for index in communication.operation_index[:3]] == ["3", "3", None]


NAMES = {
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclSymkDevKernel_ReduceScatter_LD_sum_bf16(ncclSymkDevWorkArgs4K)": "reduce_scatter",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    RCCL: "generic",
    "mscclKernel_Sum_half_Simple_false(ncclDevComm*)": "generic",
    "ncclKernelOfTomorrow": "ncclKernelOfTomorrow",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)": "all_reduce",
    "void c10d::symmetric_memory::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)": "all_reduce",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<half>>(half const*)": "all_reduce",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)": "dispatch",
    "nccl without the word": None,
    "void cutlass::dispatch<float>(float*)": None,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)": None,
    "void at::native::elementwise_kernel<128, 4, my::all_reduce_functor>(int)": None,
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_3": None,
    "": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_name_says_whether_the_kernel_communicates(name):
    assert find_kernel_collective(name) == NAMES[name]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("allreduce_coalesced", "all_reduce"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("_broadcast_oop", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("recv_any_source", "recv"),
        ("wait", "wait"),
    ],
)
def test_names_of_c10d_mean_those_of_torch_distributed(said, meant):
    assert find_torch_name(said) == meant
