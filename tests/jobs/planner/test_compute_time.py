"""The time of computing, compared with calculations by hand, and the parts of the network that a group of ranks uses."""

import msgspec
import pytest
from support_planner import cell

from jobs.planner import compute_time, gpu, link, machine, model_facts, step_time
from jobs.planner.machine import PlannedMachine
from jobs.planner.model_facts import ModelFacts, SavedBytes
from shardlab.cluster.cluster_keys import CardBandwidth, Network

H100, A100 = gpu.must_find_gpu_model("h100-80gb-hbm3"), gpu.must_find_gpu_model("a100-sxm4-80gb")
# A model with round numbers: 2 blocks; of 60 TFLOP per item, 12 are in attention and 6 in the head.
SAVED = SavedBytes(block_whole=2e9, block_split=4e9, block_input=1e9, head=1e9, logits=1e9)
FACTS = ModelFacts(
    parameters=1000, block_count=2, block_parameters=400, largest_block_parameters=400, front_parameters=100,
    back_parameters=100, tied_parameters=0, flops_per_item=60e12, saved_bytes=SAVED, model_kind="transformer",
    saved_bytes_source="", attention_flops_per_item=12e12, head_flops_per_item=6e12, is_causal=True,
)  # fmt: skip
ROWS = 312_000  # the tokens of an item: so many that matrix products take only a thousandth longer than with any number
PRODUCTS, ATTENTION = 0.72 * 312e12 / 1.001, 0.40 * 312e12  # FLOP/s that an A100 reaches, by achieved.yaml
MOVING = 7.5 / (0.85 * 2039e9)  # seconds for a saved byte


def computed(facts=FACTS, gpus=1, model=A100, **keys):
    """The likely seconds of the blocks and of the head."""
    strategy = keys.pop("strategy", "single" if gpus == 1 else "tp")
    keys = {"precision": "bf16", "seq_len": ROWS, **keys}
    time = compute_time.predict_compute_time(cell("gpt2-tiny", strategy, gpus, **keys), facts, model)
    return time.blocks_s.likely, time.head_s.likely


def test_blocks_take_the_time_of_products_attention_and_moved_bytes():
    # Attention with a causal mask: forward 4 TFLOP, of which the kernel makes half; backward 2.5 times as much.
    blocks = 42e12 / PRODUCTS + 2e12 * 3.5 / ATTENTION + 2 * 6e9 * MOVING
    head = 6e12 / PRODUCTS + 2e9 * MOVING
    assert computed() == (pytest.approx(blocks), pytest.approx(head))
    assert computed(micro=3) == (pytest.approx(3 * blocks, rel=1e-3), pytest.approx(3 * head, rel=1e-3))


def test_products_of_as_many_rows_as_the_gpu_has_tflops_take_twice_as_long():
    assert computed(seq_len=312)[0] - computed()[0] == pytest.approx(42e12 / 0.72 / 312e12, rel=0.01)


def test_attention_without_a_mask_makes_all_products():
    without_mask = msgspec.structs.replace(FACTS, is_causal=False)
    assert computed(without_mask)[0] - computed()[0] == pytest.approx(2e12 * 3.5 / ATTENTION)


def test_activation_checkpointing_repeats_the_forward_pass_of_blocks_only():
    blocks = 56e12 / PRODUCTS + 2e12 * 4.5 / ATTENTION + 8 / 3 * 6e9 * MOVING
    assert computed(activation_checkpointing="full") == (pytest.approx(blocks), computed()[1])
    halves = (computed()[0] + blocks) / 2
    assert computed(activation_checkpointing="every-2")[0] == pytest.approx(halves)


def test_tensor_parallelism_splits_a_block_but_not_the_head():
    blocks = 42e12 / 2 / PRODUCTS + 2e12 * 3.5 / 2 / ATTENTION + 2 * (2e9 + 4e9 / 2) * MOVING
    assert computed(gpus=2, tp=2) == (pytest.approx(blocks), computed()[1])
    sequence = computed(gpus=2, tp=2, options={"sequence_parallel": True})
    assert sequence == (pytest.approx(blocks - 2 * 1e9 * MOVING), computed()[1])


def test_a_pipeline_splits_blocks_and_its_last_stage_sets_the_pace():
    one = cell("gpt2-large", "pp-1f1b", 4, pp=4, micro=1, passes=8, precision="bf16")
    facts = model_facts.find_model_facts(one)
    parts = compute_time.predict_compute_time(one, facts, A100)
    planned = PlannedMachine(True, "a100", A100, None, link.make_data_sheet_link(A100))
    step = step_time.predict_step_time(one, planned)
    assert step.parts_s["compute"].likely == pytest.approx(8 * (parts.blocks_s.likely + parts.head_s.likely))
    # 1F1B with p stages and m micro-batches: the ranks wait (p - 1) / m of the time of their blocks.
    assert step.parts_s["bubble"].likely == pytest.approx(3 * parts.blocks_s.likely, rel=0.02)


@pytest.mark.parametrize(("kind", "share"), [("convolution", 0.36), ("unknown", 0.25)])
def test_other_models_reach_another_share_of_the_peak(kind, share):
    facts = msgspec.structs.replace(
        FACTS, model_kind=kind, attention_flops_per_item=None, head_flops_per_item=None, saved_bytes=None
    )
    blocks, head = computed(facts)
    assert head == 0.0
    assert blocks == pytest.approx(1.3 * 60e12 / (share * 312e12))  # other operators: 0.3 of the time, assumed


def test_a_model_of_which_only_operations_are_known_gets_a_wide_range():
    def width(facts):
        time = compute_time.predict_compute_time(cell("gpt2-tiny", "single", precision="bf16"), facts, A100).blocks_s
        return time.high / time.low

    assert width(msgspec.structs.replace(FACTS, saved_bytes=None, model_kind="unknown")) > 5 * width(FACTS)


def test_compilation_moves_fewer_bytes():
    assert computed()[0] - computed(compile=True)[0] == pytest.approx(0.35 * 2 * 6e9 * MOVING)


@pytest.mark.parametrize(
    ("network", "gb_per_s"),
    [  # InfiniBand HDR: 25 GB/s, of which 88 % are reached
        (Network(between_nodes="infiniband-hdr"), 22),
        (Network(between_nodes="infiniband-hdr", cards_per_node=4), 88),
        (Network(between_nodes=CardBandwidth(10), cards_per_node=2), 13),  # like Ethernet: 65 % of it
    ],
)
def test_the_network_of_a_node_is_that_of_its_cards_together(network, gb_per_s):
    assert link.find_network_link(network, None).bytes_per_s.likely == pytest.approx(gb_per_s * 1e9)


def bandwidths(between, strategy="fsdp2", gpus=16, nodes=2, axis="dp", **keys):
    """The likely bandwidth in GB/s of a group of ranks along an axis. Within a node, a link has 240 GB/s."""
    one = cell("gpt2-large", strategy, gpus, precision="bf16", nnodes=nodes, **keys)
    network = link.find_network_link(between, None)
    planned = machine.PlannedMachine(True, "a100", A100, None, link.make_data_sheet_link(A100), network)
    return step_time.find_group_link(one, axis, planned).bytes_per_s.likely / 1e9


def test_groups_of_ranks_share_the_network_of_their_node():
    hdr = Network(between_nodes="infiniband-hdr", cards_per_node=4)
    assert bandwidths(hdr) == pytest.approx(88 * 0.98)
    assert bandwidths(hdr, gpus=32, nodes=4) == pytest.approx(88 * 0.98**2)
    assert bandwidths(hdr, "tp-fsdp2", tp=4) == pytest.approx(88 * 0.98 / 4)
    assert bandwidths(hdr, "tp-fsdp2", axis="tp", tp=4) == pytest.approx(240)


def test_a_group_uses_no_more_of_the_network_than_its_gpus_bring_to_it():
    fast = Network(between_nodes="infiniband-ndr", cards_per_node=8)
    assert bandwidths(fast) == pytest.approx(240)
    assert bandwidths(fast, "tp-fsdp2", tp=4) == pytest.approx(352 * 0.98 / 4)
