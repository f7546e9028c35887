"""The report recommends a strategy: the best one, or several if the data show no difference. Different work is never ranked."""

import copy
import random

import msgspec
import pytest
import support_collect as support
from hypothesis import given, settings
from hypothesis import strategies as st

from collect import figure, summary
from collect.choices import contest as contests
from collect.choices import standing
from collect.choices.family import choose_strategies
from collect.cli import main
from collect.figures import head_to_head
from collect.findings.statistics import Estimate
from collect.reading import load
from collect.report import choice_text, report_start
from collect.verdicts.selection import Measurements
from shardlab.matrix.cell import Instruments, Optimizer, Profile
from shardlab.runs.record import SameWork
from shardlab.workspace.workspace import Workspace

PROVEN = SameWork(verdict="proven", why="against one process")
SPEED, MEMORY, SENT, ACCURACY = "throughput_per_s", "peak_memory_bytes", "sent_counted_bytes", "final_accuracy_pct"
OOM = "CUDA out of memory: tried to allocate 2.00 GiB"


def prepare(path, runs, *, failures=(), proofs=None, found=None, rehearsal=False):
    """Make a workspace with completed and failed runs.

    runs: pairs (cell, numbers of its repeats that completed).
    failures: tuples (cell, error message of its only run, fields of the last event of this run).
    proofs: maps a strategy to its same-work proof. found: maps a strategy to further fields of its results.
    """
    workspace = Workspace(path)
    support.keep(workspace, [entry[0] for entry in (*runs, *failures)], repeats=0)
    for what, repeats in runs:
        more = {"same_work": (proofs or {}).get(what.strategy, PROVEN)} | (found or {}).get(what.strategy, {})
        for repeat in repeats:
            support.completed(workspace, what, repeat, rehearsal=rehearsal, found=more)
    for what, said, ended in failures:
        support.failed(workspace, what, 1, said, steps=2, **ended)
    return workspace


def summarized(*arguments, **more):
    return summary.summarize(load.load_matrix(prepare(*arguments, **more), None), "single")


def only(found):
    """The contests (comparisons of strategies on equal ranks and batch) of a summary with a single family of equal work.

    Maps (ranks, batch) to a pair: {strategy: outcome} and {criterion: (word for the result, best strategies)}.
    """
    (family,) = found.choices
    told = {}
    for contest in family.contests:
        names = {one.cell: one.name for one in contest.contenders}
        ranked = {one.criterion: (one.word, sorted(names[cell] for cell in one.best)) for one in contest.standings}
        told[contest.ranks, contest.batch] = ({one.name: one.outcome for one in contest.contenders}, ranked)
    return told


DDP, FSDP, ZERO1, ZERO2 = (support.cell(name, 2) for name in ("ddp", "fsdp2", "zero1", "zero2"))
THRICE = (1, 2, 3)


def test_cells_that_reduce_gradients_in_other_passes_are_ranked_with_a_remark(tmp_path):
    """The option sync belongs to the strategy, also if all cells have it. The remark needs several passes and results that say
    which passes reduced gradients."""
    once, each = (
        support.cell("fsdp2", 2, options={"sync": sync}, micro_batch_size=2, gradient_accumulation_steps=2)
        for sync in ("last_pass", "every_pass")
    )
    zero2 = support.cell("zero2", 2, micro_batch_size=2, gradient_accumulation_steps=2)

    def remarks(folder, syncs):
        workspace = Workspace(tmp_path / folder)
        cells = [cell for cell, _ in syncs]
        support.keep(workspace, cells, repeats=0)
        for cell, sync in syncs:
            knobs = {"effective": {"sync": sync}}
            for repeat in THRICE:
                support.completed(workspace, cell, repeat, rehearsal=False, found={"same_work": PROVEN, "knobs": knobs})
        found = summary.summarize(load.load_matrix(workspace, None), "fsdp2")
        return found, [text for text in found.remarks if text.startswith("gradients are exchanged")]

    found, texts = remarks("mixed", [(once, "last_pass"), (each, "every_pass"), (zero2, "every_pass")])
    assert texts == ["gradients are exchanged in each pass: fsdp2, zero2; once a step: fsdp2; so sent bytes and memory differ"]
    assert set(only(found)[2, 8][0]) == {"fsdp2, sync last_pass", "fsdp2, sync every_pass", "zero2"}
    assert {row.id: row.baseline for row in found.rows if row.cell["strategy"] == "fsdp2"} == {
        once.name(): once.name(),
        each.name(): each.name(),
    }
    assert remarks("alike", [(each, "every_pass"), (zero2, "every_pass")])[1] == []
    assert remarks("unknown", [(once, None), (zero2, ["every_pass"])])[1] == []
    of_one_pass = [(support.cell("fsdp2", 2, options={"sync": "last_pass"}), "last_pass"), (ZERO2, "every_pass")]
    assert remarks("one", of_one_pass)[1] == []


def test_cells_that_all_have_the_option_sync_are_ranked_and_have_a_baseline(tmp_path):
    def cell(strategy, gpus, sync):
        return support.cell(strategy, gpus, options={"sync": sync}, micro_batch_size=4 // gpus, gradient_accumulation_steps=2)

    once, each, more_ranks = cell("fsdp2", 2, "last_pass"), cell("fsdp2", 2, "every_pass"), cell("fsdp2", 4, "every_pass")
    workspace = prepare(tmp_path / "a", [(once, THRICE), (each, THRICE), (more_ranks, (1,))])
    found = summary.summarize(load.load_matrix(workspace, None), "fsdp2")
    assert set(only(found)[2, 8][0]) == {"fsdp2, sync last_pass", "fsdp2, sync every_pass"}
    assert {row.id: row.baseline for row in found.rows}[more_ranks.name()] == each.name()
    of_fsdp1 = cell("fsdp1-full-shard", 2, "every_pass")
    workspace = prepare(tmp_path / "b", [(once, THRICE), (of_fsdp1, THRICE)])
    found = summary.summarize(load.load_matrix(workspace, None), "fsdp2")
    assert {row.id: row.baseline for row in found.rows}[of_fsdp1.name()] == once.name()


def test_a_clear_winner_is_named_with_its_margin(tmp_path):
    found = summarized(tmp_path, [(DDP, THRICE), (FSDP, THRICE)])
    outcomes, ranked = only(found)[2, 8]
    assert outcomes == {"ddp": "measured", "fsdp2": "measured"}
    assert ranked[SPEED] == ("best", ["ddp"])
    (contest,) = found.choices[0].contests
    speed = contest.standings[0]
    rows = {row.cell["strategy"]: row.metrics[SPEED] for row in found.rows}
    assert speed.margin_pct == pytest.approx(100 * (rows["ddp"].value / rows["fsdp2"].value - 1))
    assert [(one.low, one.high) for one in speed.placed] == [
        (pytest.approx(rows[name].low), pytest.approx(rows[name].high)) for name in ("ddp", "fsdp2")
    ]


def test_a_difference_within_the_noise_names_no_winner(tmp_path):
    found = summarized(tmp_path, [(ZERO1, THRICE), (ZERO2, (1, 2, 3, 4)), (FSDP, THRICE)])
    assert only(found)[2, 8][1][SPEED] == ("not told apart", ["zero1", "zero2"])
    assert found.choices[0].contests[0].standings[0].margin_pct is None


@pytest.mark.parametrize(("late", "word"), [((4, 5, 6), "not told apart"), ((5, 6, 7), "best")])
def test_a_choice_agrees_with_the_verdict_on_the_same_pair(tmp_path, late, word):
    """The confidence intervals of two cells overlap, so random draws decide. A claim about these cells uses the same draws."""
    workspace = prepare(tmp_path, [(ZERO1, THRICE), (ZERO2, late)])
    claim = {"id": "c", "says": "So.", "where": "here", "test": f"{SPEED}(strategy='zero1') > {SPEED}(strategy='zero2')"}
    support.keep(workspace, [ZERO1, ZERO2], repeats=0, claims=[claim])
    found = summary.summarize(load.load_matrix(workspace, None), "single")
    one, other = found.choices[0].contests[0].standings[0].placed
    assert max(one.value - one.low, other.value - other.low) < one.value - other.value < one.high - other.low
    assert only(found)[2, 8][1][SPEED][0] == word
    assert found.verdicts[0].verdict == ("reproduced" if word == "best" else "undecided")


def test_single_repeats_are_ranked_as_measured_unless_other_cells_show_the_noise(tmp_path):
    """With one repeat per cell, the order is only `as measured`. If some cell has repeats, their noise decides."""
    found = summarized(tmp_path / "a", [(DDP, (1,)), (FSDP, (1,))])
    assert only(found)[2, 8][1][SPEED] == ("as measured", ["ddp"])
    assert choice_text.NOT_REPEATED_CAUTION in choice_text.list_choice_cautions(found)
    found = summarized(tmp_path / "b", [(DDP, (1,)), (FSDP, (1,)), (support.cell(), THRICE)])
    assert only(found)[2, 8][1][SPEED] == ("best", ["ddp"])
    assert choice_text.list_choice_cautions(found) == []


def test_out_of_memory_and_timeout_count_as_results_and_other_ends_are_named(tmp_path):
    """Out of memory and timeout are outcomes of a strategy. A failed or missing run leaves the answer open."""
    ended = {"reason": "timeout", "why": "ended at its time limit of 600 s"}
    never, broken = support.cell("zero3", 2), support.cell("tp", 2)
    failures = [(FSDP, OOM, {}), (ZERO1, "stopped", ended), (broken, "ValueError: shapes", {})]
    workspace = prepare(tmp_path, [(DDP, THRICE)], failures=failures)
    support.keep(workspace, [DDP, FSDP, ZERO1, broken, never], repeats=1)
    found = summary.summarize(load.load_matrix(workspace, None), "single")
    outcomes, ranked = only(found)[2, 8]
    assert outcomes == {
        "ddp": "measured", "fsdp2": "does not fit", "zero1": "over the limit", "tp": "failed", "zero3": "not measured",
    }  # fmt: skip
    assert ranked == {}
    (family,) = found.choices
    assert family.has_choice
    (fit,) = family.more_ranks
    assert (fit.fits, fit.does_not_fit, fit.over_the_limit, fit.unknown) == (["ddp"], ["fsdp2"], ["zero1"], ["tp", "zero3"])
    first, second = choice_text.make_decision_tree(family)[:2]
    assert (first.question, str(first.answers[0][1])) == ("Does it fit on one rank?", "not measured on one rank")
    assert "fsdp2: out of memory; zero1: over the time limit" in str(second.answers[0][1])


def test_a_question_without_a_fitting_strategy_is_answered_with_none_fits(tmp_path):
    """If no strategy fits on two ranks, the answer for two ranks is `none fits`."""
    found = summarized(tmp_path, [(support.cell("ddp", 4), THRICE), (support.cell("fsdp2", 4), THRICE)],
                       failures=[(DDP, OOM, {}), (FSDP, OOM, {})])  # fmt: skip
    answers = found.choices[0].questions[0].answers
    assert [(answer.contests, answer.word, answer.best) for answer in answers][-1] == ([0], "none fits", [])


def test_the_only_fitting_strategy_is_called_the_only_one(tmp_path):
    runs = [(DDP, THRICE), (FSDP, THRICE), (support.cell("fsdp2", 4), THRICE)]
    found = summarized(tmp_path, runs, failures=[(support.cell("ddp", 4), OOM, {})])
    question = found.choices[0].questions[0]
    assert [(answer.contests, answer.word, answer.best) for answer in question.answers] == [
        ([0], "best", ["ddp"]), ([1], "only one fits", ["fsdp2"]),
    ]  # fmt: skip
    assert [(when, str(said)) for when, said, _ in choice_text.make_decision_tree(found.choices[0])[2].answers] == [
        ("2 ranks", "ddp"), ("4 ranks", "fsdp2 (the only one that fits)"),
    ]  # fmt: skip


def test_the_decision_tree_asks_for_the_batch_if_one_rank_fits_only_one_batch(tmp_path):
    """The model fits on one rank with batch 8 but not with batch 64, so the decision tree asks for the batch."""
    big = support.cell(global_batch_size=64, micro_batch_size=64)
    found = summarized(tmp_path, [(support.cell(), THRICE)], failures=[(big, OOM, {})])
    answers = choice_text.make_decision_tree(found.choices[0])[0].answers
    assert [(when, said.value, [link.text for link in cites]) for when, said, cites in answers] == [
        ("batch 8", "yes", ["single ×1, batch 8"]), ("batch 64", "no", ["single ×1, batch 64"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"precision": "bf16"}, {"seq_len": 128}, {"steps": 12}, {"workload": "vit-tiny"}, {"launcher": "fork"},
        {"global_batch_size": 16}, {"gpus": 4, "dp": 4}, {"nnodes": 2},
        {"rehearses": support.cell("fsdp2", 2, workload="gpt2")},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_cells_of_different_work_are_never_ranked_together(tmp_path, other):
    found = summarized(tmp_path, [(DDP, THRICE), (msgspec.structs.replace(FSDP, **other), THRICE)])
    contests = [contest for family in found.choices for contest in family.contests]
    assert [len(contest.contenders) for contest in contests] == [1, 1]
    assert not any(family.has_choice or family.questions for family in found.choices)
    assert len({choice_text.make_family_title(family) for family in found.choices}) == len(found.choices)


@pytest.mark.parametrize(("verdict", "ranked"), [("different", False), ("not proven", False), ("not provable", True)])
def test_only_proven_work_is_ranked(tmp_path, verdict, ranked):
    proofs = {"fsdp2": SameWork(verdict=verdict, why="loss differs by 1")}
    found = summarized(tmp_path, [(DDP, THRICE), (FSDP, THRICE)], proofs=proofs)
    outcomes, standings = only(found)[2, 8]
    assert outcomes["fsdp2"] == ("measured" if ranked else "not ranked")
    assert (SPEED in standings) == ranked
    assert "loss differs by 1" in [one.why for one in found.choices[0].contests[0].contenders] or ranked


def test_other_work_by_design_is_not_ranked_and_always_named_with_its_reason(tmp_path):
    why = "parameters are averaged every 8 steps"
    proofs = {"fsdp2": SameWork(verdict="other work", why=why)}
    cells = [support.cell(), DDP, FSDP, ZERO1]
    found = summarized(tmp_path, [(cell, THRICE) for cell in cells], proofs=proofs)
    outcomes, standings = only(found)[2, 8]
    assert outcomes == {"ddp": "measured", "fsdp2": "other work", "zero1": "measured"}
    assert standings[SPEED] == ("best", ["zero1"])
    assert all("fsdp2" not in best for _, best in standings.values())
    (family,) = found.choices
    assert family.more_ranks[0].fits == ["ddp", "fsdp2", "zero1"]  # fsdp2 is listed: its memory fits, although it is not ranked
    table = choice_text.make_choice_table([family], [SPEED])
    pieces = [(piece.text, piece.link) for piece in table.columns[-1].pieces(table.rows[-1])]
    assert pieces == [("fsdp2", found.rows[2].id), (f"other work by design ({why})", "")]
    rows = {row.cell["strategy"]: row for row in found.rows}
    assert ("speed_up" in rows["ddp"].metrics, "speed_up" in rows["fsdp2"].metrics) == (True, False)
    assert f"not compared, because they do other work by design ({why}): {rows['fsdp2'].id}" in found.remarks
    column = next(one for one in found.table.summary_table.columns if one.name == "same_work")
    assert [str(column.text(row)) for row in found.rows] == ["proven", "proven", "other work", "proven"]


LOOKED_INTO = Instruments(memory="categories", profile=Profile())
PROFILED = {"profile": {"cost_s": 1.5, "watched_steps": [3, 4]}, "memory": {"cost_s": 0.5, "watched_steps": [2]}}


def test_cells_that_differ_only_in_instruments_are_compared_with_a_remark(tmp_path):
    profiled = msgspec.structs.replace(FSDP, instruments=LOOKED_INTO)
    found = summarized(
        tmp_path, [(support.cell(), THRICE), (DDP, THRICE), (profiled, THRICE)], found={"fsdp2": {"instruments": PROFILED}}
    )
    assert [len(contest.contenders) for contest in found.choices[0].contests] == [1, 2]
    assert only(found)[2, 8][0] == {"ddp": "measured", "fsdp2": "measured"}
    rows = {row.cell["strategy"]: row for row in found.rows}
    assert rows["fsdp2"].baseline == rows["single"].id
    (remark,) = [one for one in found.remarks if one.startswith("compared cells have different instruments")]
    assert f"{rows['fsdp2'].id} (profile: steps 3 and 4; memory: step 2)" in remark
    assert rows["ddp"].id not in remark


def test_a_metric_over_profiled_steps_does_not_rank_cells_with_other_instruments(tmp_path):
    """Energy also covers the steps that a profiler slows down, and speed excludes them.

    So a profiled and an unprofiled cell are ranked by speed, but not by energy.
    """
    profiled = msgspec.structs.replace(FSDP, instruments=LOOKED_INTO)
    workspace = prepare(tmp_path, [(DDP, THRICE), (ZERO1, THRICE), (profiled, THRICE)])
    found = summary.summarize(load.load_matrix(workspace, None), "single")
    for row in found.rows:
        row.metrics["energy_per_unit_j"] = Estimate(1.0, "J/token", 3, 1.0)
        for run in row.runs:
            run.metrics["energy_per_unit_j"] = 1.0
    rows = {row.cell["strategy"]: row for row in found.rows}
    measurements = Measurements(load.load_matrix(workspace, None), found.rows)

    def ranked(*names):
        return {one.criterion for one in standing.rank_cells(measurements, [rows[name] for name in names])}

    assert {SPEED, "energy_per_unit_j"} <= ranked("ddp", "zero1")
    assert SPEED in ranked("ddp", "fsdp2")
    assert "energy_per_unit_j" not in ranked("ddp", "fsdp2")


def test_a_cell_without_a_profiler_is_ranked_before_its_profiled_twin(tmp_path):
    """If a cell ran with and without a profiler, the cell without a profiler is ranked."""
    profiled = [msgspec.structs.replace(cell, instruments=LOOKED_INTO) for cell in (support.cell(), DDP, FSDP)]
    found = summarized(tmp_path, [(cell, THRICE) for cell in (support.cell(), DDP, FSDP, *profiled)])
    outcomes, ranked = only(found)[2, 8]
    assert sorted(outcomes.values()) == ["looked into", "looked into", "measured", "measured"]
    measured = {name for name, outcome in outcomes.items() if outcome == "measured"}
    assert {name.partition(",")[0] for name in measured} == {"ddp", "fsdp2"}
    rows = {row.id: row for row in found.rows}
    plain = [one for one in found.choices[0].contests[1].contenders if one.outcome == "measured"]
    assert all(rows[one.cell].cell["instruments"]["profile"] is None for one in plain)
    assert set(ranked[SPEED][1]) <= measured
    for row in found.rows:  # the baseline of each cell has the same instruments as the cell
        assert rows[row.baseline].cell["instruments"] == row.cell["instruments"]


def test_headings_name_their_key_whole(tmp_path):
    other = Optimizer(name="sgd", lr=0.5)
    found = summarized(tmp_path, [(DDP, (1,)), (msgspec.structs.replace(DDP, optimizer=other), (1,))])
    assert [choice_text.make_family_title(family) for family in found.choices] == [
        "gpt2-tiny, optimizer adamw",
        "gpt2-tiny, optimizer sgd",
    ]
    said = {
        ("optimizer.lr", 0.5): "optimizer.lr 0.5",
        ("instruments.memory", "categories"): "instruments.memory categories",
        ("schedule.name", "cosine"): "schedule cosine",
        ("options.bucket_cap_mb", 1): "bucket cap mb 1",
        ("rehearses.seq_len", 64): "seq len 64",
        ("compile", True): "compile",
        ("compile", False): "",
    }
    assert {key: contests._describe_value(*key) for key in said} == said


def test_sent_bytes_that_differ_by_a_few_bytes_count_as_equal(tmp_path):
    """Numbers of sent bytes that differ by only 16 bytes count as equal."""
    sent = {"ddp": 1e5, "zero1": 1e5 + 16, "fsdp2": 1.5e5, "single": 0.0}
    found = {name: {"communication_bytes": {"counted": value}} for name, value in sent.items()}
    told = summarized(tmp_path, [(DDP, (1,)), (ZERO1, (1,)), (FSDP, (1,)), (support.cell(), (1,))], found=found)
    assert only(told)[2, 8][1][SENT] == ("equal", ["ddp", "zero1"])
    table = choice_text.make_choice_table(told.choices, [SENT])
    assert table.texts == [["2 ranks, batch 8", "ddp, zero1 97.7 KiB (equal)"]]
    assert table.columns[1].pieces(table.rows[0])[-2].text == "equal; 33\u00a0% less than fsdp2"
    (question,) = [one for one in told.choices[0].questions if one.criterion == SENT]
    # One rank sends no bytes, so the contest on one rank has no answer.
    assert [answer.contests for answer in question.answers] == [[1]]


def test_accuracy_does_not_choose_among_cells_of_proven_same_work(tmp_path):
    """Cells with a same-work proof have equal weights at the start and equal batches. Accuracies differ only by rounding."""
    found = {"ddp": {"final_accuracy": 0.515}, "fsdp2": {"final_accuracy": 0.5}, "ps-async": {"final_accuracy": 0.4}}
    told = summarized(tmp_path / "a", [(DDP, THRICE), (FSDP, THRICE)], found=found)
    assert only(told)[2, 8][1][ACCURACY] == ("same work", ["ddp", "fsdp2"])
    free = support.cell("ps-async", 2)
    proofs = {"ps-async": SameWork(verdict="not provable", why="workers do not wait")}
    told = summarized(tmp_path / "b", [(DDP, THRICE), (free, THRICE)], found=found, proofs=proofs)
    assert only(told)[2, 8][1][ACCURACY] == ("best", ["ddp"])


def test_equal_values_of_one_repeat_are_as_measured_and_not_equal(tmp_path):
    """Equal accuracies of one repeat each give the result `as measured`; of three repeats each, `equal`."""
    found = {name: {"final_accuracy": 0.5} for name in ("ps-sync", "ps-async", "ps-ssp")}
    cells = [support.cell(name, 2) for name in found]
    proofs = dict.fromkeys(found, SameWork(verdict="not provable", why="workers do not wait"))
    told = summarized(tmp_path / "a", [(cell, (1,)) for cell in cells], found=found, proofs=proofs)
    assert only(told)[2, 8][1][ACCURACY] == ("as measured", ["ps-async", "ps-ssp", "ps-sync"])
    told = summarized(tmp_path / "b", [(cell, THRICE) for cell in cells], found=found, proofs=proofs)
    assert only(told)[2, 8][1][ACCURACY] == ("equal", ["ps-async", "ps-ssp", "ps-sync"])


def test_variants_of_a_strategy_are_named_by_what_differs(tmp_path):
    full = support.cell("fsdp2", 2, activation_checkpointing="full")
    pipes = [support.cell("pp-gpipe", 2, pp=2, dp=1, gradient_accumulation_steps=n, micro_batch_size=8 // n) for n in (2, 8)]
    found = summarized(tmp_path, [(DDP, (1,)), (FSDP, (1,)), (full, (1,)), *((pipe, (1,)) for pipe in pipes)])
    (contest,) = found.choices[0].contests
    assert [one.name for one in contest.contenders] == [
        "ddp", "fsdp2, activation checkpointing full", "fsdp2, activation checkpointing none",
        "pp-gpipe, 2 micro-batches", "pp-gpipe, 8 micro-batches",
    ]  # fmt: skip
    (_, what_fits, *_) = choice_text.make_decision_tree(found.choices[0])
    assert str(what_fits.answers[0][1]) == (
        "ddp, fsdp2 (activation checkpointing full; activation checkpointing none) and pp-gpipe (2 and 8 micro-batches)"
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A loaded workspace with several strategies on two and four ranks and with two batch sizes. One cell ran out of memory."""
    cells = [support.cell(name, ranks) for name in ("ddp", "fsdp2", "zero1") for ranks in (2, 4)]
    cells += [support.cell(), *(support.cell(name, 2, global_batch_size=16, micro_batch_size=8) for name in ("ddp", "zero1"))]
    failures = [(support.cell("fsdp2", 2, global_batch_size=16, micro_batch_size=8), OOM, {})]
    return load.load_matrix(
        prepare(tmp_path_factory.mktemp("several"), [(one, THRICE) for one in cells], failures=failures), None
    )


@pytest.fixture(scope="module")
def rows(several):
    return summary.summarize(several, "single").rows


@settings(deadline=None, max_examples=25)
@given(st.randoms(use_true_random=False))
def test_the_order_of_cells_does_not_matter(several, rows, chance):
    shuffled = chance.sample(rows, len(rows))
    assert choose_strategies(Measurements(several, shuffled)) == choose_strategies(Measurements(several, rows))


@settings(deadline=None, max_examples=25)
@given(st.floats(1e-6, 1e9), st.sampled_from([SPEED, MEMORY]))
def test_another_unit_changes_no_choice_and_no_margin(several, rows, scale, metric):
    scaled = copy.deepcopy(rows)
    for row in scaled:
        for run in row.runs:
            run.metrics |= {metric: run.metrics[metric] * scale} if metric in run.metrics else {}

    def told(found):
        standings = [one for family in found for contest in family.contests for one in contest.standings]
        return [(one.criterion, one.word, one.best, one.margin_pct and pytest.approx(one.margin_pct)) for one in standings]

    assert told(choose_strategies(Measurements(several, scaled))) == told(choose_strategies(Measurements(several, rows)))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_cell_without_a_metric_is_not_ranked_by_the_metric(several, rows, data):
    """If a cell lacks a metric, it is not ranked by this metric. Each contest still has exactly one answer to each question."""
    kept = copy.deepcopy(rows)
    dropped = set()
    for row in kept:
        for metric in (SPEED, MEMORY):
            if metric in row.metrics and data.draw(st.booleans()):
                del row.metrics[metric]
                dropped.add((row.id, metric))
    for family in choose_strategies(Measurements(several, kept)):
        for contest in family.contests:
            for one in contest.standings:
                assert not {(placed.cell, one.criterion) for placed in one.placed} & dropped
                assert {placed.cell for placed in one.placed} >= set(one.best)
                assert len(one.placed) > 1
        for question in family.questions:
            asked = sorted(place for answer in question.answers for place in answer.contests)
            assert asked == list(range(len(family.contests)))


def test_equal_cells_are_rarely_distinguished(several, rows):
    """The repeats of two cells are drawn from the same distribution, so neither cell is faster.

    A 95 % interval is wrong in 5 % of cases, so at most about 5 % of the rounds may call one of the two cells the best.
    """
    chance = random.Random(5)
    pair = [row for row in copy.deepcopy(rows) if (row.cell["gpus"], row.cell["strategy"]) in ((4, "ddp"), (4, "zero1"))]
    wrong, rounds = 0, 300
    for number in range(rounds):
        for row in pair:
            row.id = f"{row.cell['strategy']} {number}"
            for run in row.runs:
                run.metrics = {SPEED: chance.gauss(100, 1)}
            row.metrics = {SPEED: row.metrics[SPEED]}
        (ranked,) = standing.rank_cells(Measurements(several, pair), pair)
        wrong += ranked.word == "best"
    assert 0 < wrong / rounds < 0.07


def test_the_pareto_front_has_the_points_that_no_point_dominates():
    """`find_pareto_front` gives the Pareto front of points (cost, gain), where a lower cost and a higher gain are better."""
    points = [(4.0, 10.0), (2.0, 5.0), (3.0, 4.0), (2.0, 3.0), (5.0, 10.0), (1.0, 1.0)]
    assert [points[place] for place in head_to_head.find_pareto_front(points)] == [(1.0, 1.0), (2.0, 5.0), (4.0, 10.0)]


def test_head_to_head_shows_the_contest_with_most_cells(several):
    """The figure `Head to head` shows the ranks and the batch for which most cells were measured."""
    found = summary.summarize(several, "single")
    (group,) = figure.group_by_workload(several, found)
    drawn = head_to_head.draw(group)
    assert "4 ranks with batch 8" in drawn.caption
    assert [trace["name"] for trace in drawn.data] == ["front", "ddp", "fsdp2", "zero1"]
    assert all(trace["error_y"]["array"][0] > 0 for trace in drawn.data[1:])


def test_the_first_figure_and_the_first_choice_show_the_same_numbers_of_nodes(tmp_path):
    cells = [support.cell(name, 2, nnodes=nodes) for nodes in (2, 1) for name in ("ddp", "fsdp2")]
    loaded = load.load_matrix(prepare(tmp_path, [(one, THRICE) for one in cells]), None)
    found = summary.summarize(loaded, "ddp")
    (group,) = figure.group_by_workload(loaded, found)
    drawn = head_to_head.draw(group)
    assert "on 2 ranks of 2 nodes with batch 8" in drawn.caption
    (choice,) = report_start.list_best_choices(found)
    assert choice.where == "2 ranks, 2 nodes, batch 8"
    fits, fastest = (choice_text.make_decision_tree(found.choices[0])[place].answers for place in (1, 2))
    assert {link.text for _, _, cites in fits for link in cites} == {
        f"{name} ×2 on {nodes}" for name in ("ddp", "fsdp2") for nodes in ("1 node", "2 nodes")
    }
    assert {link.text.partition(":")[0] for _, _, cites in fastest for link in cites} == {
        "ddp ×2 on 1 node",
        "ddp ×2 on 2 nodes",
    }


def test_the_page_and_the_terminal_name_the_choice_and_link_its_runs(tmp_path, capsys):
    workspace = prepare(tmp_path, [(DDP, THRICE), (FSDP, THRICE)], failures=[(ZERO1, OOM, {})], rehearsal=True)
    assert main(["summarize", "-v", "--workspace", str(workspace.path)]) == 0
    shown = capsys.readouterr().out
    assert "which strategy to choose" in shown
    assert choice_text.REHEARSAL_CAUTION in shown
    text = (workspace.report / "index.html").read_text()
    section = text.partition('<section id="choices">')[2].partition("</section>")[0]
    for said in ("Fastest", "% faster than fsdp2", "out of memory", "Decision tree", "Which is the fastest?"):
        assert said in section
    assert "Head to head" in text.partition('<section id="choices">')[0]  # a figure before the section
    assert '<a class="quiet sure" href="#runs-0">ddp</a>' in section


def test_of_very_many_choices_the_first_are_shown_and_the_others_counted(several, rows):
    found = summary.summarize(several, "single")
    (family,) = found.choices
    assert choice_text.write_hidden_note(found) == ""
    found.choices = [family] * (choice_text.MOST_SHOWN + 2)
    assert len(choice_text.select_shown_families(found)) == choice_text.MOST_SHOWN
    # The page hides two families with three contests each: on two ranks, on four ranks, and with a second batch size.
    assert choice_text.write_hidden_note(found) == "6 more comparisons are in summary.json"


def test_a_study_without_alternatives_has_no_choices(tmp_path, capsys):
    workspace = prepare(tmp_path, [(support.cell(), THRICE), (DDP, THRICE)])
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    assert "which strategy to choose" not in capsys.readouterr().out
    assert 'id="choices"' not in (workspace.report / "index.html").read_text()
