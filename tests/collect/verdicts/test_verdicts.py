"""Verdicts on claims of studies: an example of each verdict, and measured numbers compared with the numbers of a study."""

import json
import re

import msgspec
import pytest
import support_collect as support
from support_golden import same_as_golden

from collect import summary
from collect.cli import main
from collect.reading import load
from collect.report import verdict_text
from collect.verdicts import reasons
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.hardware.nvml import Gpu
from shardlab.matrix import matrix
from shardlab.matrix.cell import Instruments, Profile
from shardlab.runs.record import SameWork
from shardlab.workspace.workspace import Workspace

PROVEN = SameWork(verdict="proven", why="against one process")
SINGLE, DDP, DDP4, FSDP, PS = "single", "ddp", "ddp4", "fsdp2", "ps-async"
CELLS = {
    SINGLE: support.cell(),
    DDP: support.cell("ddp", 2),
    DDP4: support.cell("ddp", 4),
    FSDP: support.cell("fsdp2", 2),
    PS: support.cell("ps-async", 2),
}


def study(path, times, *, claims=(), proofs=None, rehearsal=False, repeats=3, states=None, gpus=None, versions=None, **more):
    """Make a workspace with completed and failed runs.

    times: maps the name of a cell to the training times of its repeats in seconds. states: maps the name of a cell that failed
    to its error messages.
    """
    workspace = Workspace(path)
    cells = [CELLS[name] for name in CELLS if name in {**times, **(states or {})}]
    stated = [
        claim if isinstance(claim, dict) else {"id": f"c{number}", "says": "It is so.", "test": claim, "where": "table 1"}
        for number, claim in enumerate(claims)
    ]
    support.keep(workspace, cells, repeats=repeats, title="A study", claims=stated, **more)
    for name, seconds in times.items():
        for repeat, one in enumerate(seconds, 1):
            found = {"train_time_s": one, "parameters": 1000, "same_work": (proofs or {}).get(name, PROVEN)}
            found |= {"versions": versions} if versions else {}
            support.completed(workspace, CELLS[name], repeat, rehearsal=rehearsal, found=found, gpus=gpus, gpu=bool(gpus))
    for name, said in (states or {}).items():
        for repeat in range(1, repeats + 1):
            support.failed(workspace, CELLS[name], repeat, said)
    return workspace


def judged(tmp_path, times, claim, **more):
    """The verdict on a claim about cells with these training times. times: as in `study`."""
    workspace = study(tmp_path, times, claims=[claim], **more)
    return summary.summarize(load.load_matrix(workspace, None), "single").verdicts[0]


T1, T2, TF = (f"train_time_s(strategy='{name}')" for name in ("single", "ddp", "fsdp2"))
CLOSE = {SINGLE: [100.0, 101.0, 102.0], DDP: [50.0, 50.5, 51.0]}
OVERLAP = {SINGLE: [100.0, 101.0, 102.0], DDP: [99.0, 101.0, 104.0]}


@pytest.mark.parametrize(
    ("times", "test", "verdict", "why"),
    [
        (CLOSE, f"{T1} / {T2} >= 1.9", "reproduced", "% of draws"),
        (CLOSE, f"{T1} / {T2} >= 3", "contradicted", "2.000 is not >= 3.000"),
        (CLOSE, f"{T1} / {T2} >= 2", "undecided", "intervals overlap"),
        (OVERLAP, f"{T1} < {T2}", "undecided", "intervals overlap"),
        (CLOSE, f"40 < {T2} < {T1}", "reproduced", ""),
        (CLOSE, f"{T2} < {T1} < 90", "contradicted", "101.0 s is not < 90.00 s"),
        (OVERLAP, f"{T1} < {T2} and {T1} > 200", "contradicted", "101.0 s is not > 200.0 s"),
        (CLOSE, f"{T1} < 50 or {T2} < 60", "reproduced", ""),
        (CLOSE, f"not {T1} < 50", "reproduced", ""),
        ({SINGLE: [100.0], DDP: [50.0]}, f"{T1} > {T2}", "undecided", "n = 1, and no cell of this matrix was repeated"),
        ({SINGLE: [100.0], DDP: [50.0, 50.5, 51.0]}, f"{T1} > {T2}", "reproduced", ""),
        ({SINGLE: [100.0], DDP: [50.0]}, "parameters(strategy='single') == 1000", "reproduced", "do not scatter"),
        ({SINGLE: [100.0]}, "parameters(strategy='single') == 1001", "contradicted", "1,000 parameters is not == 1,001"),
        (CLOSE, f"{T1} > {TF}", "not run", "strategy fsdp2: no such cell in this matrix"),
        (CLOSE, "compute_share(strategy='ddp') > 1", "not run", "compute_share is not a metric"),
        (CLOSE, "energy_j(strategy='ddp') > 1", "not run", "energy_j was not measured"),
        (CLOSE, "train_time_s(seq_len=64) > 1", "ambiguous", "seq_len 64: matches 2 cells: single ×1; ddp ×2"),
        (CLOSE, f"{TF} > 1 and train_time_s(seq_len=64) > 1", "ambiguous", "2 cells"),
        (CLOSE, "time_to_accuracy_s(strategy='ddp') > 1", "not run", "needs accuracy_pct"),
        (CLOSE, f"{T1} / ({T1} - {T1}) > 1", "undecided", "a side is not finite"),
        (CLOSE, f"{T1} + 1", "undecided", "is not a test"),
        (CLOSE, "train_time_s(strategy='ddp', gpus=1 + 1) > 1", "reproduced", ""),
        (CLOSE, f"train_time_s(gpus={T1}) > 1", "not run", "unknown function 'train_time_s'"),
        (CLOSE, "parameters > 1", "undecided", "parameters is not a number"),
        (CLOSE, "1 +", "not run", "is not an expression"),
        (CLOSE, f"{T1} == 'fast'", "undecided", "compares a number with a text"),
        (CLOSE, "state(strategy='ddp') == 'completed'", "reproduced", ""),
        (CLOSE, "state(strategy='ddp') in ['oom', 'timeout']", "contradicted", "does not hold"),
    ],
)  # fmt: skip
def test_the_verdict_on_a_claim_follows_from_its_numbers(tmp_path, times, test, verdict, why):
    found = judged(tmp_path, times, test)
    assert (found.verdict, why in found.why) == (verdict, True), (found.verdict, found.why)


# A training time that the true mean of the cell SINGLE exceeds with a probability of 2 %. The times of SINGLE in CLOSE are 100,
# 101 and 102 s, so their mean is 101 s, with a standard error of 1 / sqrt(3) s. Student's t with 2 degrees of freedom is above
# 4.849 in 2 % of cases. A claim with one part is contradicted below 2.5 %, and a claim with two parts below 1.25 %.
LIMIT = round(101 + 4.849 / 3**0.5, 4)


def test_each_part_of_a_claim_gets_its_share_of_the_error(tmp_path):
    """A part that is contradicted alone may be undecided in a claim of two parts, because each part gets half of the error."""
    alone = judged(tmp_path, CLOSE, f"{T1} > {LIMIT}")
    assert alone.verdict == "contradicted"
    assert alone.parts[0].holds_pct == pytest.approx(2, abs=0.4)
    for other_part in (f"{T2} < 90", "parameters(strategy='single') == 1000"):
        both = judged(tmp_path / other_part[:8], CLOSE, f"{T1} > {LIMIT} and {other_part}")
        assert (both.verdict, both.parts[0].holds_pct) == ("undecided", alone.parts[0].holds_pct)


def test_a_verdict_names_the_numbers_that_it_rests_on(tmp_path):
    found = judged(tmp_path, CLOSE, f"{T1} / {T2} >= 1.9")
    assert [(number.call, number.value, number.n, len(number.runs)) for number in found.numbers] == [
        (T1, pytest.approx(101.0), 3, 3), (T2, pytest.approx(50.5), 3, 3),
    ]  # fmt: skip
    assert found.numbers[0].low == pytest.approx(101 - 4.303 / 3**0.5, abs=1e-3)
    (part,) = found.parts
    assert (part.left, part.right) == (pytest.approx(2.0), 1.9)
    assert part.holds_pct > 97.5
    assert not found.rehearsal


@pytest.mark.parametrize("state", ["CUDA out of memory: tried", "stopped"])
def test_the_state_of_a_cell_can_decide_a_claim(tmp_path, state):
    """A claim about `state` is tested although the cell failed; a claim about its time is `not run`."""
    ended = "oom" if state.startswith("CUDA") else "failed"
    found = judged(tmp_path, CLOSE, "state(strategy='fsdp2') == 'oom'", states={FSDP: state})
    assert found.verdict == ("reproduced" if ended == "oom" else "contradicted")
    found = judged(tmp_path / "b", CLOSE, f"{TF} > 1", states={FSDP: state})
    assert (found.verdict, found.why) == ("not run", f"fsdp2 ×2: {ended}")


def test_how_a_tiny_twin_ended_decides_no_claim(tmp_path, monkeypatch):
    twin = msgspec.structs.replace(CELLS[DDP], rehearses=CELLS[DDP4])
    monkeypatch.setitem(CELLS, DDP, twin)
    found = judged(tmp_path, {DDP: [50.0, 50.5, 51.0]}, "state(strategy='ddp') == 'oom'", rehearsal=True)
    assert (found.verdict, "does not say how the cell itself ends" in found.why) == ("not run", True)


def test_a_claim_on_planned_or_excluded_cells_was_not_run(tmp_path):
    excluded = [{"cell": {"strategy": "fsdp2", "gpus": 8}, "why": "there are two GPUs"}]
    found = judged(tmp_path, CLOSE, "train_time_s(strategy='fsdp2', gpus=8) > 1", excluded=excluded)
    assert (found.verdict, "excluded: there are two GPUs" in found.why) == ("not run", True)
    found = judged(tmp_path / "b", CLOSE | {FSDP: []}, f"{TF} > 1")
    assert (found.verdict, found.why) == ("not run", "fsdp2 ×2: planned")
    found = judged(tmp_path / "c", {SINGLE: [1.0]}, "state(strategy='single') == 'completed'")
    assert (found.verdict, found.why) == ("not run", "single ×1: 2 planned, 1 completed")


@pytest.mark.parametrize(
    ("proof", "verdict"),
    [
        (SameWork(verdict="different", why="loss differs"), "undecided"),
        (SameWork(verdict="other work", why="parameters are averaged every 8 steps"), "undecided"),
        (SameWork(verdict="not proven", why="the cell says prove: off"), "undecided"),
        (None, "undecided"),
        (SameWork(verdict="not provable", why="workers do not wait"), "reproduced"),
    ],
)
def test_cells_that_are_not_proven_to_do_the_same_work_are_not_ranked(tmp_path, proof, verdict):
    found = judged(tmp_path, CLOSE, f"{T1} > {T2}", proofs={DDP: proof})
    assert found.verdict == verdict
    assert "ddp ×2" in (found.why if verdict == "undecided" else " ".join(found.remarks))
    alone = judged(tmp_path / "b", CLOSE, f"{T2} > 1", proofs={DDP: proof})
    assert alone.verdict == "reproduced"


@pytest.mark.parametrize(
    ("verdict", "test", "expected"),
    [
        ("other work", "final_loss(strategy='ddp') >= final_loss(strategy='single')", "reproduced"),
        ("different", "final_loss(strategy='ddp') >= final_loss(strategy='single')", "undecided"),
        ("other work", f"final_loss(strategy='ddp') >= final_loss(strategy='single') and {T1} > {T2}", "undecided"),
        ("other work", f"{T2} > 1 and {T1} > 1", "reproduced"),
        ("other work", f"{T2} > 1 or {T1} > 1", "undecided"),
    ],
)
def test_other_work_by_design_is_compared_by_its_loss_with_a_remark(tmp_path, verdict, test, expected):
    found = judged(tmp_path, CLOSE, test, proofs={DDP: SameWork(verdict=verdict, why="parameters are averaged every 8 steps")})
    assert found.verdict == expected
    remark = "compares cells that are not proven to do the same work: ddp ×2: other work (parameters are averaged"
    assert any(said.startswith(remark) for said in found.remarks) == ("loss" in test and expected == "reproduced")


@pytest.mark.parametrize("verdict", ["different", "other work"])
def test_a_metric_of_two_cells_says_why_they_cannot_be_compared(tmp_path, verdict):
    proofs = {DDP: SameWork(verdict=verdict, why="parameters are averaged every 8 steps")}
    found = judged(tmp_path, CLOSE, "speed_up(strategy='ddp') > 1.5", proofs=proofs)
    assert found.verdict == "undecided"
    assert f"ddp ×2: {verdict} (parameters are averaged every 8 steps)" in found.why


def test_times_of_whole_runs_with_other_instruments_are_compared_with_a_remark(tmp_path, monkeypatch):
    said = "the cells have different instruments, and train_time_s includes the steps that these slowed down"
    assert said not in judged(tmp_path / "a", CLOSE, f"{T1} > {T2}").remarks
    profiled = msgspec.structs.replace(CELLS[DDP], instruments=Instruments(profile=Profile()))
    monkeypatch.setitem(CELLS, DDP, profiled)
    assert said in judged(tmp_path / "b", CLOSE, f"{T1} > {T2}").remarks
    assert said not in judged(tmp_path / "c", CLOSE, "parameters(strategy='single') == parameters(strategy='ddp')").remarks


def test_cells_of_two_precisions_are_compared_as_different_computations(tmp_path, monkeypatch):
    said = "different computation: precision fp32 and bf16"
    assert said not in judged(tmp_path / "a", CLOSE, f"{T1} > {T2}").remarks
    monkeypatch.setitem(CELLS, DDP, msgspec.structs.replace(CELLS[DDP], precision="bf16"))
    assert said in judged(tmp_path / "b", CLOSE, f"{T1} > {T2}").remarks


def test_a_claim_says_if_its_cells_reduce_gradients_in_other_passes(tmp_path, monkeypatch):
    for name in (DDP, FSDP):
        passes = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
        monkeypatch.setitem(CELLS, name, msgspec.structs.replace(CELLS[name], **passes))
    times = {SINGLE: [100.0, 101.0], DDP: [50.0, 50.5], FSDP: [40.0, 40.5]}
    workspace = study(tmp_path, times, claims=[f"{T2} > {TF}", f"{T1} > {TF}"])
    for run in workspace.list_run_dirs():
        sync = {"ddp": "last_pass", "fsdp2": "every_pass"}.get(run.read_run().cell.strategy)
        files.write_json(run.result, msgspec.structs.replace(run.read_result(), knobs={"effective": {"sync": sync}}))
    remarks = [verdict.remarks for verdict in summary.summarize(load.load_matrix(workspace, None), "single").verdicts]
    said = "gradients are exchanged in each pass: fsdp2; once a step: ddp; so sent bytes and memory differ"
    assert [said in texts for texts in remarks] == [True, False]


def test_speed_up_has_the_interval_of_both_throughputs(tmp_path):
    found = judged(tmp_path, CLOSE, "speed_up(strategy='ddp') > 1.5 and speed_up(strategy='single') == 1")
    ddp, single = found.numbers
    assert ddp.low < ddp.value < ddp.high
    assert (single.low, single.high) == (1.0, 1.0)
    assert found.verdict == "reproduced"


@pytest.mark.parametrize(
    ("factors", "claim", "verdict", "why"),
    [
        ((1.0, 1.15, 1.35), "> 0.5", "reproduced", "% of draws"),
        ((1.0, 1.15, 1.35), "> 9", "contradicted", "is not > 9"),
        ((1.0, 3.0, 9.0), "> 9", "undecided", "the baseline's interval reaches to 0, so the result has no interval"),
    ],
)
def test_speed_up_over_a_baseline_that_scatters_much(tmp_path, monkeypatch, factors, claim, verdict, why):
    """With three repeats, a few draws of the baseline's throughput are below 0, where a speed-up is not defined. These few
    draws must not make the claim undecided."""
    step_ms = support.step_ms

    def scattered(what, rank, step, repeat):
        return step_ms(what, rank, step, repeat) * (factors[repeat - 1] if what.strategy == "single" else 1)

    monkeypatch.setattr(support, "step_ms", scattered)
    found = judged(tmp_path, CLOSE, f"speed_up(strategy='ddp') {claim}")
    assert (found.verdict, why in found.why) == (verdict, True), found.why
    assert (found.numbers[0].high is None) == (verdict == "undecided")


def test_time_to_an_accuracy_takes_the_accuracy_from_the_claim(tmp_path):
    from shardlab.runs.record import LineWriter, ValidationRecord

    test = "time_to_accuracy_s(strategy='ddp', accuracy_pct=75) > 0.2"
    workspace = study(tmp_path, {DDP: [50.0, 50.5, 51.0]}, claims=[test])
    for folder in workspace.list_run_dirs():
        with LineWriter(folder.validation_file) as lines:
            for step, share in ((5, 0.5), (10, 0.75)):
                lines.write_record(
                    ValidationRecord(schema=1, step=step, t_s=0.0, wall_s=0.0, loss=1.0, accuracy=share, items=8)
                )
    (found,) = summary.summarize(load.load_matrix(workspace, None), "single").verdicts
    seconds = [sum(support.step_ms(CELLS[DDP], 1, step, repeat) for step in range(1, 11)) / 1000 for repeat in (1, 2, 3)]
    assert found.numbers[0].value == pytest.approx(sum(seconds) / 3)
    assert found.verdict == "reproduced"


def test_each_verdict_names_a_rehearsal_whose_numbers_are_not_compared(tmp_path):
    reported = [{"where": "table 1", "metric": "train_time_s", "cell": {"strategy": "ddp"}, "printed": "58.3s", "unit": None}]
    workspace = study(tmp_path, CLOSE, claims=[f"{T1} / {T2} >= 3"], rehearsal=True, reported=reported)
    found = summary.summarize(load.load_matrix(workspace, None), "single")
    assert (found.verdicts[0].verdict, found.verdicts[0].rehearsal) == ("contradicted", True)
    (beside,) = found.reported
    assert (beside.measured, beside.comparable, beside.ratio, beside.agrees) == (pytest.approx(50.5), False, None, None)
    assert "absolute numbers are not comparable" in beside.reasons[0]
    assert verdict_text.label_verdict(found.verdicts[0]) == "contradicted (rehearsal)"


def beside(tmp_path, entry, times=CLOSE, **more):
    entry = {"where": "table 1", "cell": {"strategy": "ddp"}, "unit": None, "kind": "measured"} | entry
    workspace = study(tmp_path, times, reported=[entry], **more)
    return summary.summarize(load.load_matrix(workspace, None), "single").reported[0]


@pytest.mark.parametrize(
    ("entry", "agrees", "ratio"),
    [
        ({"metric": "train_time_s", "printed": "50.6s"}, True, 50.5 / 50.6),
        ({"metric": "train_time_s", "printed": "101 s"}, False, 0.5),
        ({"metric": "train_time_s", "printed": "49–50 s"}, True, 50.5 / 49.5),
        ({"metric": "train_time_s", "printed": ">3000", "unit": "s"}, False, None),
        ({"metric": "train_time_s", "printed": ">20", "unit": "s"}, True, None),
        ({"metric": "train_time_s", "printed": "up to 1 min"}, True, None),
        ({"metric": "parameters", "printed": "1,000"}, True, 1.0),
        ({"metric": "state", "printed": "OOM"}, False, None),
    ],
)
def test_a_printed_number_is_compared_with_the_measured_number(tmp_path, entry, agrees, ratio):
    found = beside(tmp_path, entry)
    assert (found.agrees, found.comparable) == (agrees, True)
    assert found.ratio == (None if ratio is None else pytest.approx(ratio))
    assert (found.delta is None) == (ratio is None)


def test_a_printed_rate_is_compared_in_the_unit_of_the_metric(tmp_path):
    found = beside(tmp_path, {"metric": "throughput_per_s", "printed": "5 tok/ms"})
    assert (found.unit, found.comparable) == ("tokens/s", True)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"metric": "train_time_s", "printed": "a while"}, "is not a number"),
        ({"metric": "train_time_s", "printed": "12 GB"}, "but the metric is in s"),
        ({"metric": "throughput_per_s", "printed": "12 img/s"}, "printed in images/s, measured in tokens/s"),
        ({"metric": "gpu_shine", "printed": "12"}, "gpu_shine is not a metric"),
        ({"metric": "train_time_s", "printed": "12s", "cell": {"strategy": "fsdp2"}}, "no such cell"),
        ({"metric": "train_time_s", "printed": "12s", "cell": {}}, "2 cells"),
    ],
)
def test_a_printed_number_that_cannot_be_compared_has_a_reason(tmp_path, entry, why):
    found = beside(tmp_path, entry)
    assert (found.comparable, found.ratio, why in found.why) == (False, None, True), found.why


def test_a_single_measurement_has_no_interval_and_a_remark(tmp_path):
    found = beside(tmp_path, {"metric": "train_time_s", "printed": "50s"}, {DDP: [50.0]}, repeats=1)
    assert (found.n, found.low, found.agrees, found.ratio) == (1, None, None, 1.0)
    assert found.how == "n = 1, and no cell of this matrix was repeated: no interval"


def gpu(name, **more):
    return Gpu(uuid="GPU-0", name=name, memory_bytes=80 * 2**30, **more)


@pytest.mark.parametrize(
    ("setting", "gpus", "said"),
    [
        ({"gpu": "H100"}, [gpu("NVIDIA A100-SXM4-40GB")], "another GPU: NVIDIA A100-SXM4-40GB here, H100 in the study"),
        ({"gpu": "H100"}, None, "no GPU here, H100 in the study"),
        ({"gpu": "A100"}, [gpu("NVIDIA A100-SXM4-40GB")], ""),
        ({"link": "NVLink"}, [gpu("NVIDIA A100-PCIE-40GB")], "no NVLink here, NVLink in the study"),
        ({"link": "NVLink"}, [gpu("NVIDIA A100-SXM4-40GB", nvlinks={"0": 12})], ""),
        ({"software": {"torch": "2.4.0"}}, None, "other software: torch 2.13.0 here, 2.4.0 in the study"),
        ({"software": {"torch": "2."}}, None, ""),
        ({"gpu": "H100", "cell": {"strategy": "single"}}, None, ""),
    ],
)
def test_reasons_for_a_difference_come_from_the_records_of_hosts(tmp_path, setting, gpus, said):
    entry = {"metric": "train_time_s", "printed": "12s"}
    found = beside(tmp_path, entry, settings=[{"where": "section 3"} | setting], gpus=gpus)
    assert ("; ".join(found.reasons) == said) if not said else any(said in reason for reason in found.reasons)


def test_a_number_of_a_tiny_twin_names_the_cell_of_the_study(tmp_path):
    """A number from a tiny twin has a reason that says how the twin differs from the study's cell."""
    what = msgspec.structs.replace(CELLS[DDP], rehearses=support.cell("ddp", 2, workload="gpt2-large", steps=20))
    workspace = Workspace(tmp_path)
    entry = {"where": "t", "metric": "train_time_s", "cell": {"workload": "gpt2-large", "strategy": "ddp"}, "printed": "58.3s"}
    support.keep(workspace, [what], repeats=1, reported=[entry], scale="tiny")
    support.completed(workspace, what, found={"train_time_s": 1.0})
    (found,) = summary.summarize(load.load_matrix(workspace, None), "single").reported
    changed = "workload gpt2-tiny instead of gpt2-large, steps 10 instead of 20"
    assert found.reasons == [f"rehearsal: a tiny twin on CPU ({changed}): absolute numbers are not comparable"]
    assert found.measured == 1.0


def test_a_claim_about_a_network_is_not_judged_by_ranks_on_one_host(tmp_path):
    twins = {}
    for name in (SINGLE, DDP):
        rehearsed = msgspec.structs.replace(CELLS[name], nnodes=2)
        twins[name] = msgspec.structs.replace(CELLS[name], rehearses=rehearsed)
    workspace = Workspace(tmp_path)
    claim = {"id": "c", "says": "It is so.", "test": "network_bytes(strategy='ddp') > 5", "where": "section 4"}
    support.keep(workspace, [*twins.values()], repeats=1, claims=[claim], scale="tiny")
    for twin in twins.values():
        support.completed(workspace, twin)
    (found,) = summary.summarize(load.load_matrix(workspace, None), "single").verdicts
    assert (found.verdict, found.helps) == ("undecided", "")
    assert found.why == "all ranks ran on one host here (2 nodes in the study), so no bytes crossed a network"


@pytest.mark.parametrize(
    ("transport", "why"),
    [
        ("NET/IB/0", "the ranks sent by RDMA, whose bytes network_bytes does not count"),
        ("NET/AWS", "network_bytes does not count bytes sent by RDMA, and whether it was used is not known: "),
        ("NET/Socket/0", ""),
    ],
)
def test_a_claim_about_a_network_is_undecided_if_rdma_may_have_been_used(tmp_path, transport, why):
    cell = support.cell("ddp", 2, nnodes=2)
    workspace = Workspace(tmp_path)
    claim = {"id": "c", "says": "It is so.", "test": "network_bytes(strategy='ddp') >= 0", "where": "section 4"}
    support.keep(workspace, [cell], repeats=1, claims=[claim])
    folder = support.completed(workspace, cell)
    support.event(folder, "met", -1, world_size=2, hosts=2, backend="nccl", interface="eth0")
    folder.log.mkdir(exist_ok=True)
    folder.rank_log(0).write_text(f"gpu0:41:61 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via {transport}\n")
    (verdict,) = summary.summarize(load.load_matrix(workspace, None), "single").verdicts
    assert (verdict.verdict == "undecided" and verdict.why.startswith(why)) if why else "RDMA" not in verdict.why


def test_memory_of_a_process_is_not_taken_for_that_of_a_gpu(tmp_path):
    assert (
        "measured here: resident set of the process"
        in beside(tmp_path, {"metric": "peak_memory_bytes", "printed": "12 GB"}).reasons
    )


def test_reasons_about_the_printed_number_precede_reasons_about_ours(tmp_path):
    """The reasons about the study's own number come before the reasons about our measurement."""
    entry = {"metric": "peak_memory_bytes", "printed": "3,076 MB", "kind": "assumed"}
    found = beside(tmp_path, entry, assumed=[{"key": "precision", "value": "fp32", "why": "not stated"}])
    assert found.reasons == [
        "the study assumed its number: nobody measured it",
        "MB read as a power of 1,000 bytes (of 1,024: 4.9 % more)",
        "measured here: resident set of the process",
        "assumed, because the study does not state it: precision fp32",
    ]


def test_every_deviation_of_an_adapted_matrix_is_in_the_report(tmp_path, capsys):
    how = "gpus 2 instead of 4"
    claim = {"id": "c", "says": "It is so.", "where": "table 1", "test": "train_time_s(strategy='ddp') > 0", "adapted": how}
    entry = {"where": "table 1", "metric": "train_time_s", "cell": {"strategy": "ddp"}, "printed": "58 s", "adapted": how}
    deviations = [
        {"key": "gpus", "study": 4, "here": 2, "why": "a run can have <b>2</b> GPUs", "cells": 3},
        {"key": "claims.gone", "study": "speed_up(gpus=4) > 3", "here": None, "why": "left out: no network"},
    ]
    workspace = study(tmp_path, CLOSE, claims=[claim], reported=[entry], deviations=deviations)
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    assert "changed matrix: 2 changes by --adapt, to fit the cluster, or by --set" in capsys.readouterr().out
    document = json.loads((workspace.report / "summary.json").read_text())
    assert document["deviations"] == [deviations[0], {**deviations[1], "cells": None}]
    assert document["verdicts"][0]["remarks"] == [f"adapted to the cluster: {how}"]
    assert document["reported"][0]["reasons"][0] == f"adapted to the cluster: {how}"
    text = (workspace.report / "index.html").read_text()
    section = text.partition('<section id="deviations">')[2].partition("</section>")[0]
    assert "a run can have &lt;b&gt;2&lt;/b&gt; GPUs." in section
    assert section.count("left out") == 2
    assert f"adapted to the cluster: {how}" in text.lower()


def test_a_study_that_measured_nothing_is_marked(tmp_path):
    entry = {"where": "t", "metric": "train_time_s", "cell": {"strategy": "ddp"}, "printed": "9s", "kind": "assumed"}
    assert judged(tmp_path, CLOSE, f"{T1} > 1", reported=[entry]).illustrative
    assert not judged(tmp_path / "b", CLOSE, f"{T1} > 1").illustrative


def test_notes_are_found_by_their_place():
    assert reasons.find_named_places("sections 3.1 and 4.1.2") == {"section 3.1", "section 4.1.2"}
    assert reasons.find_named_places("table 4.1.2, effective throughput") == {"table 4.1.2", "effective throughput"}
    assert reasons.find_named_places("section 5.1.3 and table 1") == {"section 5.1.3", "table 1"}
    assert not reasons.find_named_places("table 4") & reasons.find_named_places("section 4")


def test_a_matrix_may_give_an_accuracy_and_no_other_argument(tmp_path):
    text = """schema: 1
name: m
defaults: {workload: gpt2-tiny, strategy: single, global_batch_size: 8, steps: 2}
settings: [{where: here, gpu: H100, cell: {strategy: single}}]
claims: [{id: a, says: a, where: a, test: "time_to_accuracy_s(strategy='single', ARGUMENT=75) < 1"}]
"""
    path = tmp_path / "m.yaml"
    path.write_text(text.replace("ARGUMENT", "accuracy_pct"))
    assert matrix.load_matrix(path).file.settings[0].gpu == "H100"
    path.write_text(text.replace("ARGUMENT", "accurracy"))
    with pytest.raises(InputError, match="unknown name of a resolved cell 'accurracy'"):
        matrix.load_matrix(path)


REPORTED = [
    {"where": "table 1", "metric": "train_time_s", "cell": {"strategy": "ddp"}, "printed": "58.3s", "unit": None},
    {"where": "table 2", "metric": "peak_memory_bytes", "cell": {"strategy": "ddp"}, "printed": "~12GB", "kind": "estimated"},
    {"where": "table 2", "metric": "train_time_s", "cell": {"strategy": "zero3"}, "printed": "58 s"},
]
WHOLE = {
    "claims": [f"{T1} / {T2} >= 1.9", f"{T1} / {T2} >= 3", f"{T1} < {TF}", "state(strategy='fsdp2') == 'oom'"],
    "reported": REPORTED,
    "settings": [{"where": "section 3", "gpu": "H100", "software": {"torch": "2.4.0"}}],
    "assumed": [{"key": "precision", "value": "fp32", "why": "not stated"}],
    "notes": [{"where": "table 1", "says": "two figures of one thing <b>&"}],
}


def whole(path):
    return study(path, CLOSE, states={FSDP: "CUDA out of memory: tried"}, gpus=[gpu("NVIDIA A100-SXM4-40GB")], **WHOLE)


def test_the_summary_of_recorded_runs_is_the_golden_document(tmp_path):
    found = summary.summarize(load.load_matrix(whole(tmp_path), None), "single")
    found.created_s = 0.0
    text = msgspec.json.format(msgspec.json.encode(support.ten_digits(msgspec.to_builtins(found))), indent=1).decode() + "\n"
    same_as_golden("summary.json", text)


def test_the_command_shows_and_counts(tmp_path, capsys):
    workspace = whole(tmp_path)
    arguments = ["verdicts", "--workspace", str(workspace.path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "4 claims: 2 reproduced, 1 contradicted, 1 not run" in shown
    assert "likely: another GPU: NVIDIA A100-SXM4-40GB here, H100 in the study" in shown
    assert main([*arguments, "--strict"]) == 1
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [verdict["verdict"] for verdict in document["verdicts"]] == ["reproduced", "contradicted", "not run", "reproduced"]
    assert document["reported"][0]["ratio"] == pytest.approx(50.5 / 58.3)
    assert document["notes"] == WHOLE["notes"]


def test_a_matrix_without_claims_says_so(tmp_path, capsys):
    workspace = study(tmp_path, CLOSE)
    assert main(["verdicts", "--strict", "--workspace", str(workspace.path)]) == 0
    assert "states no claims and no reported numbers" in capsys.readouterr().out


def test_the_page_shows_verdicts_printed_numbers_and_open_questions(tmp_path, capsys):
    workspace = whole(tmp_path)
    assert main(["summarize", "-v", "--workspace", str(workspace.path)]) == 0
    shown = capsys.readouterr().out
    assert "4 claims: 2 reproduced, 1 contradicted, 1 not run" in shown
    assert "reported numbers: 3 printed, 2 measured here, 2 to compare: 2 differ" in shown
    text = (workspace.report / "index.html").read_text()
    for said in (
        '<span class="verdict contradicted"><span aria-hidden="true">✗</span> contradicted</span>',
        "58.3s",
        "two figures of one thing &lt;b&gt;&amp;",
    ):
        assert said in text
    for heading in ("In short", "Reported and measured numbers", "What the study leaves open"):
        assert re.search(f"<h[23]>{heading}</h[23]>", text)
    document = json.loads((workspace.report / "summary.json").read_text())
    assert len(document["verdicts"]) == 4
    assert len(document["reported"]) == 3
