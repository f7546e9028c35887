"""Limits of what reports and messages show: exactly as many as allowed are shown, and of one more the rest is cut."""

from types import SimpleNamespace

import pytest

from collect.findings.injected_faults import StragglerEffect
from collect.report import page, provenance, report_start, study_tables, summary_tables
from collect.report.verdict_text import ReportedLine
from collect.verdicts.reported import ReportedResult
from jobs.node import hang_detection
from shardlab.matrix import claim_check
from shardlab.runs.rundir import RunDir
from shardlab.terminal.table import Column


def waiting(count):
    """The cell with the waiting of `count` ranks, 0 to count - 1 ms."""
    effect = StragglerEffect(
        cell="cell", rank=1, delay_ms=1.0, n=1, found=None, waiting_ms=[10.0 + rank for rank in range(count)], ordinary=None,
        throughput_per_s=None, ordinary_throughput_per_s=None, rank_throughput_per_s=None, ordinary_rank_throughput_per_s=None,
        staleness_mean=None, ordinary_staleness_mean=None,
    )  # fmt: skip
    return summary_tables._describe_waiting(effect)


def facets(count):
    """The headings of the facets of a table whose cells have `count` different seeds."""
    column = Column("Seed", str, is_number=True)
    return [facet.heading for facet in page.make_facets([column], range(count))]


def reason(length):
    """The reason at the start of a report for a claim that was not judged for a reason of `length` characters."""
    verdict = SimpleNamespace(verdict="not run", why="w" * length + "; more", helps=False, parts=[])
    return report_start._shorten_reason(verdict, None)


def redrawn(count):
    """The numbers of tables and of single numbers, if a study prints `count` numbers in one place."""
    entries = [
        ReportedResult(where="Table 2", metric="train_time_s", cell={"gpus": gpus}, printed="1", kind="measured")
        for gpus in range(1, count + 1)
    ]
    lines = [ReportedLine(entry, "", "1", "", "", "", "", "", "") for entry in entries]
    names = [table.name for table, _ in study_tables.redraw_tables(lines)]
    return names.count("study-1"), names.count("study-text") * count


def test_a_table_of_faults_shows_the_waiting_of_eight_ranks():
    assert waiting(8) == "10, 11, 12, 13, 14, 15, 16, 17"
    assert waiting(9) == "10, 11, 12, 13, 14, 15, 16, 17, ..."


def test_a_key_of_up_to_24_values_gets_check_boxes():
    assert [facets(count) for count in (1, 2, 24, 25)] == [[], ["Seed"], ["Seed"], []]


def test_a_reason_of_up_to_ninety_characters_is_shown_whole():
    assert reason(90) == "w" * 90
    assert reason(91) == "w" * 89 + "…"


def test_a_table_of_a_study_is_redrawn_from_three_numbers_on():
    assert [redrawn(2), redrawn(3)] == [(0, 2), (1, 0)]


def test_the_table_of_traffic_shows_a_hundred_runs():
    entries = [SimpleNamespace(run=f"r{number}", rdma=None, hosts=[], why="") for number in range(101)]
    assert [len(provenance._make_traffic_table(SimpleNamespace(traffic=entries[:count])).rows) for count in (100, 101)] == [
        100,
        100,
    ]


def test_a_refused_claim_lists_twelve_values_and_says_that_there_are_more():
    cells = [{"seed": number} for number in range(10, 23)]
    assert claim_check._explain_no_cell(cells[:12], {"seed": 99}).endswith(" 18, 19, 20, 21.")
    assert claim_check._explain_no_cell(cells, {"seed": 99}).endswith(" 18, 19, 20, 21, ....")


@pytest.mark.parametrize(("limit_s", "every_s"), [(30, 1.0), (60, 1.0), (61, 61 / 60), (1800, 30.0), (1801, 30.0)])
def test_files_of_a_run_are_looked_at_every_second_to_every_half_minute(tmp_path, limit_s, every_s):
    assert hang_detection.HangWatch(RunDir(tmp_path), limit_s)._interval_s == pytest.approx(every_s)
