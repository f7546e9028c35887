"""Limits of the package collect: what is exactly at the limit is shown, counts or is accepted, and the next is not."""

from types import SimpleNamespace

import msgspec
import polars as pl
import pytest
import support_collect
import support_tables
from support_bounds import check_limit, refusal
from support_tables import analysis

from collect import summary
from collect.archiving import secret_scan
from collect.choices import standing
from collect.comparison import command as comparison
from collect.explain import command as explain
from collect.explain.read_file import EventPlace
from collect.exports import latex
from collect.findings import comparability, prediction_scores, statistics
from collect.history import command as history
from collect.history.periods import HistoryChange
from collect.reading import load
from collect.report import truncation
from collect.sampler import loop
from collect.timeline import straggler
from collect.traces import answer_columns, answer_tables
from collect.traces.breakdown import EventTally
from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.layers import LayerTime
from collect.traces.run_answers import RunAnswers
from shardlab.runs.prediction import PredictedRange
from shardlab.terminal.table import Column, Table


def titles(show, *arguments):
    """For each table that a function prints: its title and its number of rows."""
    output = support_tables.PrintedTables()
    show(output, *arguments)
    return {title: len(rows) for title, rows in output.rows_of.items()}


@pytest.mark.parametrize(("count", "more"), [(12, ""), (13, "; 1 more in --json")])
def test_a_table_of_traces_shows_twelve_rows_and_counts_the_rest(count, more):
    groups = [ProcessGroup(str(number), (0, 1), 2) for number in range(count)]
    calls = [CollectiveCall("all_reduce", number, 0, 1000 + number, 8, 0, []) for number in range(count)]
    answers = RunAnswers([analysis(0, (), groups=groups, calls=calls, idle=None, idle_ns=0)])
    assert titles(answer_tables.print_answer_tables, answers) == {f"collectives by process group, all ranks together{more}": 12}
    tallies = [EventTally(f"kernel{number}", 1, 1000) for number in range(count)]
    kernels = answer_tables.make_tally_table("kernels", "Kernel", tallies)
    assert (kernels.title_with_rest, len(kernels.texts)) == (f"kernels, all ranks together{more}", 12)


@pytest.mark.parametrize(("count", "more"), [(40, ""), (41, "; 1 more in --json")])
def test_the_table_of_modules_shows_forty_rows_and_counts_the_rest(count, more):
    layers = [
        LayerTime(
            name=f"m{number}", parent="m0" if number else "", depth=min(number, 1), calls=1, forward_host_ns=1,
            backward_host_ns=1, forward_ns=1, backward_ns=1, communication_ns=0,
        )
        for number in range(count)
    ]  # fmt: skip
    shown = answer_tables.make_layers_table([analysis(0, (), layers=layers)])
    assert shown.title_with_rest == f"modules with all that they call, all ranks together{more}"
    assert len(shown.texts) == 40


def test_a_name_of_the_largest_length_is_shown_whole_and_a_longer_one_is_cut():
    column = answer_columns.make_name_column("Name", lambda name: name)
    assert str(column.text("k" * 72)) == "k" * 72
    assert str(column.text("k" * 73)) == "k" * 71 + "…"
    assert explain._format_event(EventPlace("k" * 40, 0, 1)).startswith("k" * 40 + " at")
    assert explain._format_event(EventPlace("k" * 41, 0, 1)).startswith("k" * 37 + "... at")


def test_a_sentence_names_up_to_its_most_and_counts_the_rest():
    ids = [f"r{number}" for number in range(21)]
    assert summary._join_ids(ids[:20]) == ", ".join(ids[:20])
    assert summary._join_ids(ids) == ", ".join(ids[:20]) + ", and 1 more"
    changes = [HistoryChange(str(number), ["a"], ["b"]) for number in range(5)]
    assert history._format_changes(changes[:4]) == "0: a -> b; 1: a -> b; 2: a -> b; 3: a -> b"
    assert history._format_changes(changes).endswith("3: a -> b; 1 more (--json)")

    def why_none(values):
        apart = [SimpleNamespace(key="steps", a=values, b=[9])]
        return comparison._explain_no_pairs(SimpleNamespace(apart=apart, only_a=[], only_b=[]))

    assert why_none([1, 2, 3, 4, 5, 6]) == ": steps is 1, 2, 3, 4, 5, 6 in A and 9 in B"
    assert why_none([1, 2, 3, 4, 5, 6, 7]) == ": steps is 1, 2, 3, 4, 5, 6, ... in A and 9 in B"


def test_a_page_shows_two_hundred_cells_and_says_how_many_there_are(tmp_path):
    found = summary.summarize(load.load_matrix(support_collect.matrix(tmp_path), None), "single")
    rows = [msgspec.structs.replace(found.rows[0], id=f"cell{number}") for number in range(201)]
    for count, remarks in ((200, 0), (201, 1)):
        cut = truncation.truncate_summary(
            msgspec.structs.replace(found, rows=rows[:count], verdicts=[], reported=[], remarks=[])
        )
        assert (len(cut.rows), len(cut.remarks)) == (200, remarks)
    assert cut.remarks[0].startswith("shown here: 200 of 201 cells;")


@pytest.mark.parametrize(("count", "environment"), [(40, "table"), (41, "longtable")])
def test_a_table_of_latex_with_more_rows_than_a_page_is_a_long_one(tmp_path, monkeypatch, count, environment):
    table = Table("Summary", [Column("Cell", lambda text: text)], ["x"] * count, "summary")
    monkeypatch.setattr(latex.summary_tables, "make_text_tables", lambda _: [table])
    monkeypatch.setattr(latex.summary_tables, "make_report_title", lambda _: "m")
    monkeypatch.setattr(latex.summary_tables, "list_general_remarks", lambda _: [])
    latex.write_tables(None, SimpleNamespace(matrix="m"), tmp_path, tmp_path)
    assert f"\\begin{{{environment}}}" in (tmp_path / "summary.tex").read_text()


@pytest.mark.parametrize(("hz", "allowed"), [(50.0, True), (50.1, False), (0.0, False), (-1.0, False)])
def test_the_sampler_takes_up_to_fifty_samples_a_second(tmp_path, monkeypatch, hz, allowed):
    def start(_):
        raise NotImplementedError("sampling begins")

    monkeypatch.setattr(loop, "GpuSource", start)
    message = refusal(loop.record_samples, tmp_path / "out", hz, None, None, None)
    assert message == ("sampling begins" if allowed else f"--hz: found {hz:g}. Allowed: more than 0, at most 50.")


def samples(troubled, every=100):
    uuids = ["GPU-0"] * every
    return pl.DataFrame({"uuid": uuids[:troubled]}, {"uuid": pl.String}), pl.DataFrame({"uuid": uuids})


def timed(late_ms, steps=3):
    """The timed steps of three ranks with phases of 100 ms, of which rank 2 needs more; the step takes 1,000 ms."""
    rows = [
        {"rank": rank, "step": step, "step_ms": 1000.0, "data_ms": 100.0 + late_ms * (rank == 2), "forward_ms": 300.0,
         "backward_ms": 500.0, "optimizer_ms": 100.0}
        for step in range(1, steps + 1)
        for rank in range(3)
    ]  # fmt: skip
    return pl.DataFrame(rows)


def counted(value):
    metric = SimpleNamespace(name="sent_counted_bytes", exact=True)
    return SimpleNamespace(selected=SimpleNamespace(metric=metric), value=value, error_and_degrees=(0.0, 1))


def is_secret(length):
    """Whether a value of so many letters and digits counts as the secret of a variable with the name of a token."""
    return bool(list(secret_scan._find_secrets([f"API_TOKEN={('a1' * 20)[:length]}\n".encode()], "file")))


# What is limited: (whether a value counts, values that just count, values that just do not).
LIMITS = {
    "samples of 100 with trouble that name a GPU": (lambda n: bool(comparability._list_affected_gpus(*samples(n))), (5,), (4,)),
    "delay of a straggler in a 1,000 ms step": (
        lambda ms: straggler.find_straggler_by_phases(timed(ms)) is not None,
        (50.0,),
        (49.9,)
    ),
    "steps from which a straggler is found": (
        lambda n: straggler.find_straggler_by_phases(timed(500.0, n)) is not None, (3,), (2,)
    ),
    "values with an outlier": (lambda n: bool(statistics.find_outlier_indexes([1, 2, 3, 2, 99][5 - n :])), (5,), (4,)),
    # The distances from the median 10 are 0, 1, 1, 1 and x, whose median is 1: the score is 0.6745 x.
    "distance of an outlier": (lambda x: bool(statistics.find_outlier_indexes([9, 9, 10, 11, 10 + x])), (5.19,), (5.18,)),
    "share of a measurement outside of its prediction": (
        lambda measured: prediction_scores._is_within_range(
            SimpleNamespace(predicted=PredictedRange(1e6, 1.5e6, 2e6), measured=measured)
        ),
        (999_000.0, 2_001_999.0), (998_999.0, 2_002_001.0),
    ),
    "characters of a secret": (is_secret, (16,), (15,)),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
def test_the_values_at_a_limit_count_and_the_next_do_not(what):
    check_limit(*LIMITS[what])


@pytest.mark.parametrize(("other", "differs"), [(1_001_000.0, False), (1_001_001.0, True)])
def test_counts_that_differ_by_a_thousandth_are_equal(other, differs):
    assert bool(standing._is_ahead(counted(1_000_000.0), counted(other), 0.025)) is differs
