"""The planner's estimate of time, compared with calculations by hand: collectives, pipeline schedules, and the bytes that
strategies exchange."""

import math
from itertools import pairwise

import msgspec
import pytest
from support_planner import cell, make_question

from jobs.planner import advise, calibration, exchanges, gpu, link, predict, rules, scale_out, step_time
from jobs.planner.calibration import MeasuredRatio
from jobs.planner.machine import NO_GPU_MACHINE, PlannedMachine
from jobs.planner.pipeline_schedule import draw_timeline, simulate_pipeline
from shardlab.matrix.cell import Optimizer
from shardlab.runs.prediction import make_exact_range
from trainers import menu
from trainers.theory.term import Term

# The table of study 4 about pipelines. The columns of each entry: stages, micro-batches, bubble in percent, total time, ideal
# time, throughput.
STUDY_4 = """
2 4 20.0 15 12 0.267 | 2 8 11.1 27 24 0.296 | 2 16 5.9 51 48 0.314 | 2 32 3.0 99 96 0.323 | 2 64 1.5 195 192 0.328
4 4 42.9 21 12 0.190 | 4 8 27.3 33 24 0.242 | 4 16 15.8 57 48 0.281 | 4 32 8.6 105 96 0.305 | 4 64 4.5 201 192 0.318
8 4 63.6 33 12 0.121 | 8 8 46.7 45 24 0.178 | 8 16 30.4 69 48 0.232 | 8 32 17.9 117 96 0.274 | 8 64 9.9 213 192 0.300
"""
ROWS = [tuple(map(float, row.split())) for line in STUDY_4.strip().splitlines() for row in line.split("|")]
PSI = 882_176  # bytes of the 220,544 parameters of gpt2-tiny in fp32
BLOCKS, REST = 799_744, 82_432
HIDDEN = 131_072  # bytes of the hidden state (the input of a block) for a batch of 8 sequences


MEASURED = (  # on an H100, by docs/results: workload, micro-batch, other keys, milliseconds of a step
    ("gpt2-large", 8, {"precision": "bf16"}, 131.5),
    ("gpt2-large", 8, {"precision": "bf16", "compile": True}, 131.1),
    ("gpt2-large", 8, {"precision": "bf16-autocast"}, 143.6),
    ("gpt2-large", 32, {"precision": "bf16"}, 462.4),
    ("gpt2-large", 32, {"precision": "bf16", "options": {"pad_vocabulary": 64}}, 387.5),
    ("gpt2-large", 8, {"precision": "fp32"}, 935.7),
)


@pytest.mark.parametrize(("workload", "micro", "keys", "step_ms"), MEASURED)
def test_times_measured_on_an_h100_are_predicted(workload, micro, keys, step_ms):
    """Without calibration, within 15 %, and within the range."""
    fused = Optimizer("adamw", 3e-4, fused=True)
    found = step_time.predict_step_time(
        cell(workload, "single", micro=micro, optimizer=fused, **keys), machine("h100-80gb-hbm3")
    )
    assert found.step_s.likely == pytest.approx(step_ms / 1000, rel=0.15)
    assert found.step_s.low <= step_ms / 1000 <= found.step_s.high


def test_an_odd_vocabulary_is_slow_in_16_bits_only():
    def seconds(precision, multiple):
        one = cell("gpt2", "single", micro=8, precision=precision, options={"pad_vocabulary": multiple})
        return step_time.predict_step_time(one, machine("h100-80gb-hbm3")).parts_s["compute"].likely

    assert seconds("bf16", 1) > 1.4 * seconds("bf16", 8)
    assert seconds("fp32", 1) == pytest.approx(seconds("fp32", 8), rel=1e-3)


def machine(name="a100-80gb", **links):
    found = gpu.must_find_gpu_model(name)
    return PlannedMachine(
        True, name, found, gpu.find_gpu_memory(found, None), link.make_data_sheet_link(found), links.get("between"), 2.0
    )


@pytest.mark.parametrize(("stages", "micro_batches", "bubble", "total", "ideal", "throughput"), ROWS)
def test_the_simulation_reproduces_study_4s_table(stages, micro_batches, bubble, total, ideal, throughput):
    step = simulate_pipeline("gpipe", int(stages), int(micro_batches))
    assert (step.total_time, step.ideal_time) == (total, ideal)
    assert round(100 * step.bubble_share, 1) == bubble
    assert round(step.micro_batches_per_time, 3) == throughput


@pytest.mark.parametrize("per_rank", [2, 4])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 32)])
def test_the_interleaved_bubble_is_smaller_by_the_number_of_stages_of_a_rank(ranks, micro_batches, per_rank):
    step = simulate_pipeline("interleaved", ranks, micro_batches, rank_stages=per_rank)
    # The expected value is the formula of Narayanan et al., 2021, section 2.2.
    assert step.total_time - step.ideal_time == pytest.approx(3 * (ranks - 1) / per_rank)


@pytest.mark.parametrize(("ranks", "micro_batches", "per_round"), [(8, 12, 12), (4, 6, 6), (4, 10, 5), (4, 8, 4), (8, 3, 3)])
def test_an_interleaved_schedule_divides_micro_batches_into_rounds_as_torch_does(ranks, micro_batches, per_round):
    """A rank passes a round through its first stage, then through its second stage. Torch makes micro_batches // ranks rounds,
    one at least, so a round may have more micro-batches than there are ranks."""
    step = simulate_pipeline("interleaved", ranks, micro_batches, rank_stages=2)
    for rank, slots in enumerate(step.slots):
        forwards = [(slot.stage, slot.micro_batch) for slot in slots if slot.kind == "F"]
        rounds = [range(first, first + per_round) for first in range(0, micro_batches, per_round)]
        assert forwards == [(stage, micro) for each in rounds for stage in (rank, rank + ranks) for micro in each]
        assert len(slots) == 4 * micro_batches


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_no_pass_overlaps_another_or_begins_before_its_input(schedule):
    per_rank = 2 if schedule == "interleaved" else 1
    step = simulate_pipeline(schedule, 4, 8, hop_time=0.25, rank_stages=per_rank)
    ends = {(slot.kind, slot.stage, slot.micro_batch): slot.end_time for slots in step.slots for slot in slots}
    assert len(ends) == 2 * 4 * 8 * per_rank
    for slots in step.slots:
        assert all(later.start_time >= earlier.end_time for earlier, later in pairwise(slots))
    for slots in step.slots:
        for slot in slots:
            before = ("F", slot.stage - 1, slot.micro_batch) if slot.kind == "F" else ("B", slot.stage + 1, slot.micro_batch)
            assert slot.start_time >= ends.get(before, -1.0) + (0.25 if before in ends else 0)


def test_the_timeline_has_a_line_per_rank_and_dots_where_it_waits():
    lines = draw_timeline(simulate_pipeline("gpipe", 2, 2), character_count=18)
    # A forward pass takes 1 unit of time and a backward pass 2. Rank 0 waits between its last forward pass and the first
    # gradient from rank 1.
    assert [line.split()[2] for line in lines] == ["0011......aaaabbbb"[:18], "..0011aaaabbbb...."]


@pytest.mark.parametrize(
    ("op", "size", "expected_s"),
    [  # computed by hand for 4 ranks, a latency (alpha) of 1 ms and 1e9 bytes/s
        ("all_reduce", 1e9, 6e-3 + 1.5),  # a ring makes 6 hops and sends 2 * 3/4 of 1e9 bytes, and 1e9 bytes take 1 s
        ("all_reduce", 0, 4e-3),  # a tree makes 2 * log2(4) = 4 hops
        ("all_gather", 1e9, 3e-3 + 0.75),
        ("reduce_scatter", 1e9, 3e-3 + 0.75),
        ("send", 1e9, 1e-3 + 1.0),
    ],
)
def test_the_time_of_a_collective_equals_a_computation_by_hand(op, size, expected_s):
    assert step_time.predict_faster_s(op, size, 4, 1e-3, 1e9) == pytest.approx(expected_s)
    assert step_time.predict_faster_s(op, size, 1, 1e-3, 1e9) == 0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_takes_longer_over_slower_links_and_more_ranks(op):
    names = ["ethernet-1", "ethernet-10", "ethernet-100", "infiniband-ndr"]
    one = Term("", op, 1e8, 8)
    times = [step_time.predict_exchange_time(one, link.find_link(name, None)).likely for name in names]
    assert times == sorted(times, reverse=True)
    ring = [step_time.predict_ring_s(op, 1e6, ranks, 1e-5, 1e9) for ranks in (2, 4, 8, 64, 512)]
    assert ring == sorted(ring)


@pytest.mark.parametrize(
    ("name", "family", "line_gb_per_s"),
    [
        ("a100-sxm4-80gb", "nvlink", 300),
        ("a100-pcie-40gb", "pcie-4", 32),
        ("rtx-2080-ti", "pcie-3-host", 16),
        ("rtx-5090", "pcie-5-host", 64),
        ("mi300x", "infinity-fabric", 448),
    ],
)
def test_the_data_sheet_of_a_gpu_says_how_the_gpus_of_a_node_exchange_data(name, family, line_gb_per_s):
    """GeForce cards have no peer-to-peer access, so their data goes through the memory of the host."""
    found = link.make_data_sheet_link(gpu.must_find_gpu_model(name))
    entry = link.read_link_entries()[family]
    assert found.bytes_per_s.likely == pytest.approx(line_gb_per_s * 1e9 * entry.achieved[1])
    assert found.alpha_s.likely == pytest.approx(1e-6 * entry.alpha_us[1])


@pytest.mark.parametrize(
    ("strategy", "keys", "sent"),
    [  # the bytes that rank 0 of 4 ranks (or of 2, if the keys say so) sends; test_bytes.py explains the numbers
        ("ddp", {}, 1.5 * PSI),
        ("fsdp2", {}, 0.75 * (2 * BLOCKS + REST + PSI)),
        ("fsdp2-zero2", {}, 0.75 * (PSI + PSI)),
        ("fsdp1-no-shard", {}, 1.5 * PSI),
        ("fsdp1-shard-grad-op", {"passes": 2}, 0.75 * (PSI + PSI)),
        ("zero1", {}, 1.5 * PSI + 0.75 * PSI),
        ("tp", {"tp": 4}, 1.5 * (HIDDEN * ((2 + 2) * 4 + 2) + 3 * 4 * 512)),
        ("single", {}, 0),
    ],
)
def test_a_rank_sends_the_bytes_that_were_computed_by_hand(strategy, keys, sent):
    one = cell("gpt2-tiny", strategy, 1 if strategy == "single" else 4, micro=8, **keys)
    assert exchanges.sum_sent_bytes(one) == pytest.approx(sent)


@pytest.mark.parametrize(("window", "share"), [("last_backward", 2 / 3 / 4), ("backward", 2 / 3), ("step", 1), (None, 0)])
def test_communication_hides_only_in_its_part_of_the_computing(monkeypatch, window, share):
    """Of 4 passes, two thirds of each are backward, and 85 % of the computing can hide communication. The exchanges of a step
    as a whole cannot hide in more than its computing."""
    late, early = Term("", "send", 1e12, 2, hides_in=window), Term("", "send", 1e12, 2, hides_in="step")
    one = cell("gpt2", "fsdp2", 2, micro=64, passes=4, precision="bf16")

    def exposed_and_hideable(*sent):
        monkeypatch.setattr(exchanges, "list_exchanges", lambda _: sent)
        found = step_time.predict_step_time(one, machine())
        busy = found.parts_s["compute"].likely + found.parts_s["launches"].likely
        return found.parts_s["communication"].likely, found.communication_s.likely, 0.85 * busy

    # Of what is hidden, 15 % makes the step longer nevertheless.
    exposed, seconds, hideable = exposed_and_hideable(late)
    assert exposed == pytest.approx(seconds - 0.85 * share * hideable)
    exposed, seconds, hideable = exposed_and_hideable(late, early)
    assert exposed == pytest.approx(seconds - 0.85 * hideable)


@pytest.mark.parametrize(
    ("strategy", "options", "windows"),
    [
        ("ddp", {}, {"last_backward"}),
        ("zero2", {}, {"backward", None}),  # the updated parameters are gathered after the step
        ("zero3", {}, {"step", "backward"}),
        ("fsdp2", {}, {"step", "last_backward"}),
        ("fsdp2", {"sync": "every_pass"}, {"step", "backward"}),
        ("fsdp2-hsdp", {"sync": "shard_every_pass"}, {"step", "backward", "last_backward"}),
    ],
)
def test_gradients_that_each_pass_exchanges_hide_in_each_backward(strategy, options, windows):
    one = cell("gpt2", strategy, 4, passes=4, options=options)
    assert {exchange.hides_in for exchange in exchanges.list_exchanges(one)} == windows


def test_a_strategy_whose_exchanges_are_not_known_gets_no_time():
    one = cell("gpt2-tiny", "ddp-powersgd", 4)
    assert exchanges.list_exchanges(one) is None
    found = predict.predict_run(one, machine())
    assert found.step_s is None
    assert found.time_s is None
    assert "not known" in found.how
    assert found.memory_bytes is not None
    assert found.exchanges is None


def test_without_a_gpu_only_the_memory_of_tensors_is_predicted():
    found = predict.predict_run(cell("gpt2-tiny", "ddp", 2), NO_GPU_MACHINE)
    assert found.exchanges is not None
    assert [(one.op, one.ranks) for one in found.exchanges] == [("all_reduce", 2)]
    assert sum(one.sent_bytes for one in found.exchanges) == found.sent_bytes
    assert (found.fits, found.capacity_bytes, found.step_s, found.gpu_hours, found.cost) == (None,) * 5
    assert "cuda_context" not in found.memory_by_category


def test_the_network_between_nodes_must_be_known():
    several = cell("gpt2-large", "ddp", 16, nnodes=2, precision="bf16")
    assert step_time.predict_step_time(several, machine()) is None
    assert step_time.predict_step_time(several, machine(between=link.find_link("infiniband-hdr", None))) is not None


def test_a_range_contains_published_throughputs():
    """MosaicML published the throughput of a model of 760M parameters on 8 GPUs with PyTorch: 78,581 tokens/s per GPU on H100
    and 29,765 on A100. The predictions are for GPT-2 Large, which has 774M parameters."""
    for name, published in (("NVIDIA H100 80GB HBM3", 78_581), ("a100-80gb", 29_765)):
        one = cell("gpt2-large", "ddp", 8, micro=16, precision="bf16")
        step = step_time.predict_step_time(one, machine(name)).step_s
        assert 16 * 1024 / step.high < published < 16 * 1024 / step.low


def test_a_measured_run_calibrates_cells_of_the_same_kind():
    one = cell("gpt2-large", "ddp", 8, micro=8, precision="bf16")
    plain = predict.predict_run(one, machine())
    earlier = calibration.build_calibration([MeasuredRatio(one, "a100-80gb", 1.2, 0.9)])
    corrected = predict.predict_run(one, machine(), calibration=earlier)
    assert corrected.step_s.likely == pytest.approx(1.2 * plain.step_s.likely)
    assert corrected.tensor_bytes.likely == pytest.approx(0.9 * plain.tensor_bytes.likely)
    assert corrected.step_s.high / corrected.step_s.low == pytest.approx(1.05 / 0.95)
    # The next calibration compares with the uncorrected formula; otherwise it would correct the prediction twice.
    assert corrected.formula_step_s == plain.formula_step_s
    other = msgspec.structs.replace(one, precision="fp32")
    assert predict.predict_run(other, machine(), calibration=earlier).step_s == predict.predict_run(other, machine()).step_s


@pytest.mark.parametrize(
    ("keys", "is_scaled"),
    [  # what differs from the measured cell
        ({"gpus": 16, "dp": 16, "nnodes": 2}, True),
        ({"strategy": "fsdp2"}, True),
        ({"micro_batch_size": 16}, True),
        ({"options": {"n_layer": 12}}, False),
        ({"activation_checkpointing": "full"}, False),
        ({"compile": True}, False),
    ],
)
def test_a_run_of_another_step_scales_only_computing_and_narrows_no_range(keys, is_scaled):
    """A step that took 1.5 times as long as predicted, of which 90 % is computing, computes 1.56 times as long."""
    one = cell("gpt2-large", "ddp", 8, micro=8, precision="bf16")
    ratio = calibration.measure_ratio(one, "a100-80gb", (1.0, 0.9), 1.5, None)
    assert (ratio.time_ratio, ratio.computing_ratio) == (1.5, pytest.approx(1.4 / 0.9))
    earlier = calibration.build_calibration([ratio])
    options = {**one.options, **keys.pop("options", {})}
    other = msgspec.structs.replace(one, options=options, **keys)
    between = link.find_link("infiniband-ndr", None)
    plain = step_time.predict_step_time(other, machine(between=between))
    corrected, how = earlier.correct_time(other, "a100-80gb", plain)
    added = (1.4 / 0.9 - 1) * plain.parts_s["compute"].likely if is_scaled else 0.0
    assert corrected.likely - plain.step_s.likely == pytest.approx(added)
    assert corrected.high - corrected.low >= plain.step_s.high - plain.step_s.low
    assert ("computing only" in how) == is_scaled


def test_a_run_that_mostly_communicates_says_nothing_about_computing():
    one = cell("gpt2-large", "ddp", 8, micro=8, precision="bf16")
    assert calibration.measure_ratio(one, "a100-80gb", (1.0, 0.4), 1.5, None).computing_ratio is None
    assert (
        calibration.measure_ratio(one, "a100-80gb", (1.0, 0.9), 0.05, None).computing_ratio is None
    )  # less than the other parts


def test_scale_out_holds_study_2s_table():
    """Table 5.4.1 of study 2 gives the speed-up of DDP on one node: 1.9 on 2 GPUs, 3.6 on 4 and 6.8 on 8. Relative to 2 GPUs,
    these are 1.89 and 3.58."""
    one = cell("gpt2-large", "ddp", 2, micro=8, passes=2, precision="tf32")
    where = machine("NVIDIA H100 80GB HBM3")
    for gpus, printed in ((4, 3.6 / 1.9), (8, 6.8 / 1.9)):
        found = scale_out.extrapolate_to_gpus(one, gpus, 8, where)
        assert found.speedup.low - 0.02 < printed < found.speedup.high
    assert found.trust.startswith("fair")
    assert scale_out.extrapolate_to_gpus(one, 64, 8, where).trust.startswith("little")
    assert scale_out.extrapolate_to_gpus(cell("gpt2", "tp", 4, tp=4), 8, 8, where) is None
    assert scale_out.extrapolate_to_gpus(cell("gpt2", "fsdp2-hsdp", 8), 1, 8, where) is None  # the strategy needs several ranks


@pytest.mark.parametrize(
    ("parameters_b", "link_name", "expected"),
    [  # the output of `recommend_strategy`, a function of study 4, for 8 GPUs of 80 GB
        (0.025, "nvlink", "study4-ddp"),
        (0.125, "nvlink", "study4-ddp"),
        (1.3, "nvlink", "study4-checkpointing"),
        (7.0, "nvlink", "study4-fsdp"),
        (70.0, "nvlink", "study4-tp-fsdp"),
        (70.0, "infiniband", "study4-3d"),
    ],
)
def test_study_4s_decision_tree_gives_what_its_code_prints(parameters_b, link_name, expected):
    fits = dict.fromkeys(("fits_single", "fits_checkpointed", "fits_zero2", "fits_zero3"), False)
    facts = {"parameters_b": parameters_b, "gpu_gb": 80.0, "gpus": 8, "nodes": 1, "link": link_name, **fits}
    applied = [rule.id for rule in rules.read_rules() if rule.where == "decision tree" and rule.applies(facts)]
    assert applied == [expected]


def test_rules_name_strategies_of_the_menu_and_each_can_apply():
    sizes = ((0.1, True), (1.3, True), (2.0, True), (8.0, False), (200.0, False))
    every = [
        {"parameters_b": size, "gpu_gb": 80.0, "gpus": gpus, "nodes": nodes, "link": name,
         "fits_single": single, "fits_checkpointed": single, "fits_zero2": zero2, "fits_zero3": True}
        for size, single in sizes for gpus, nodes in ((1, 1), (8, 1), (16, 2)) for name in ("nvlink", "pcie", "infiniband")
        for zero2 in (True, False)
    ]  # fmt: skip
    for rule in rules.read_rules():
        assert set(rule.recommends) <= menu.load_strategies().keys(), rule.id
        assert any(rule.applies(facts) for facts in every), rule.id
        assert not all(rule.applies(facts) for facts in every), rule.id


def test_advice_ranks_by_throughput_and_marks_rules_that_disagree():
    question = make_question("llm-7b", machine())
    report = advise.rank_strategies(question)
    rates = [one.items_per_s for one in report.ranked if one.items_per_s is not None]
    assert all(later <= earlier / 0.95 for earlier, later in pairwise(rates))
    by_name = {one.cell.strategy: one for one in report.ranked}
    assert not by_name["ddp"].fits
    assert by_name["fsdp2"].fits
    assert "does not fit" in by_name["ddp"].reasons[0]
    verdicts = {judged.rule.id: judged.agrees for judged in report.rules}
    assert verdicts["study4-fsdp"]
    assert all(math.isfinite(rate) for rate in rates)
    judged = rules.judge_rules(advise.make_rule_values(question), {"tp-fsdp2": 2.0, "fsdp2": 1.0})
    assert {one.rule.id: one.agrees for one in judged}["study4-fsdp"] is False


def test_a_cells_own_limit_of_memory_is_its_capacity():
    one = cell("gpt2", "ddp", 2, memory_limit_gib=2.0)
    assert predict.predict_run(one, machine()).capacity_bytes == make_exact_range(2 * 2**30)
    assert predict.predict_run(one, machine()).fits == "no"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3", "tp", "pp-1f1b"])
def test_each_predicted_time_is_a_range(strategy):
    degrees = {"tp": {"tp": 8}, "pp-1f1b": {"pp": 8, "passes": 16}}.get(strategy, {})
    one = cell("gpt2-large", strategy, 8, micro=4, precision="bf16", **degrees)
    plain, recorded = predict.predict_run(one, machine()), predict.predict_run(one, machine(), recorded_s=100.0)
    for found in (plain, recorded):
        for span in (found.step_s, found.time_s, found.gpu_hours, found.energy_kwh, found.cost):
            assert span.low < span.likely < span.high
    assert (recorded.time_s.likely, recorded.time_s.high) == (100.0, pytest.approx(105.0))
    calibrated = predict.predict_run(
        one, machine(), calibration=calibration.build_calibration([MeasuredRatio(one, "a100-80gb", 1.0, 1.0)])
    )
    assert calibrated.step_s.low < calibrated.step_s.likely < calibrated.step_s.high


def test_a_step_waits_longer_for_the_slowest_of_more_ranks():
    """Of n normally distributed times, the largest is about sqrt(2 ln n) standard deviations above the mean: 2.04 for 8 ranks,
    3.53 for 512."""
    where = machine(between=link.find_link("infiniband-ndr", None))
    steps = {
        gpus: step_time.predict_step_time(cell("gpt2", "ddp", gpus, micro=4, nnodes=gpus // 8 or 1), where)
        for gpus in (1, 8, 512)
    }
    assert steps[1].parts_s["stragglers"] == make_exact_range(0.0)
    shares = {gpus: step.parts_s["stragglers"].likely / (step.step_s.likely - step.parts_s["stragglers"].likely)
              for gpus, step in steps.items()}  # fmt: skip
    assert shares[8] == pytest.approx(0.01 * 2.0393, rel=1e-3)
    assert shares[512] == pytest.approx(0.01 * 3.5322, rel=1e-3)
    assert steps[8].parts_s["stragglers"].high > steps[8].parts_s["stragglers"].likely
