"""The first part of a report: one line per claim of the study, one figure, and the recommended strategy.

This part comes before any table and is readable without JavaScript.
"""

import re
import shlex
from html.parser import HTMLParser

import msgspec
import pytest
import support_collect as support
import support_ranks
import support_report

from collect import summary
from collect.cli import main
from collect.reading import load
from collect.report import report_start
from collect.verdicts import claims
from jobs.status import select
from shardlab.matrix.expansion import Expansion
from shardlab.runs.record import SameWork
from shardlab.workspace.workspace import Workspace

PROVEN = SameWork(verdict="proven", why="against one process")
SINGLE, DDP, FSDP = support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2)
T1, T2, TF = (f"train_time_s(strategy='{name}')" for name in ("single", "ddp", "fsdp2"))
TIMES = {"single": [100.0, 101.0, 102.0], "ddp": [50.0, 50.5, 51.0], "fsdp2": [49.0, 51.0, 54.0]}
CLAIMS = {
    "twice": f"1.9 <= {T1} / {T2} <= 2.1",
    "faster": f"{T2} < {T1}",
    "slow": f"{T2} >= 60",
    "close": f"{TF} < {T2}",
    "energy": "energy_j(strategy='ddp') > 1",
    "both": f"{T1} > 90 and {T2} > 60",
}
REPORTED = [
    {"where": "table 1", "metric": "train_time_s", "cell": {"strategy": "ddp"}, "printed": "48.1 s"},
    {"where": "table 2", "metric": "train_time_s", "cell": {"strategy": "ddp"}, "printed": "99 s"},
]


def study(path, stated=CLAIMS, repeats=3, rehearsal=False, **more):
    workspace = Workspace(path)
    entries = [{"id": name, "says": f"It is {name}.", "test": test, "where": "table 1"} for name, test in stated.items()]
    support.keep(workspace, [SINGLE, DDP, FSDP], repeats=repeats, title="A study", claims=entries, reported=REPORTED, **more)
    for cell in (SINGLE, DDP, FSDP):
        for repeat in range(1, repeats + 1):
            found = {"train_time_s": TIMES[cell.strategy][repeat - 1], "same_work": PROVEN}
            support.completed(workspace, cell, repeat, rehearsal=rehearsal, found=found)
    return workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def summarized(workspace):
    return summary.summarize(load.load_matrix(workspace, None), "single")


@pytest.fixture(scope="module")
def drawn(workspace):
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    text = (workspace.report / "index.html").read_text()
    return text.replace(support_report.packed_plotly(), "")


def line(summarized, name):
    return next(report_start.write_claim_line(verdict, summarized) for verdict in summarized.verdicts if verdict.id == name)


def test_a_ratio_is_shown_with_its_interval_beside_the_bound_of_the_test(summarized):
    """The ratio is 101 s / 50.5 s = 2. By Student's t with 2 degrees of freedom, the interval is about 2 ± 0.08."""
    found = line(summarized, "twice")
    assert (found.symbol, found.measured, found.bounds, found.other_number) == ("✓", "2.00 ×", "1.9 to 2.1 ×", "")
    low, high = (float(number) for number in found.interval.split(" to "))
    assert 1.90 < low < 1.97
    assert 2.03 < high < 2.10
    assert found.reason.endswith("% of draws")


def test_two_measured_numbers_of_a_claim_are_shown_side_by_side(summarized):
    found = line(summarized, "faster")
    assert (found.symbol, found.measured, found.bounds) == ("✓", "50.5 s", "")
    assert found.other_number.startswith("101 s (98.")
    assert found.interval.startswith("49.")


@pytest.mark.parametrize("test", [f"{T2} < 0.8 * {T1}", f"{T1} * 0.8 > {T2}"])
def test_a_number_that_a_claim_multiplies_is_shown_with_its_factor(tmp_path, test):
    (verdict,) = summary.summarize(load.load_matrix(study(tmp_path, {"part": test}), None), "single").verdicts
    found = report_start.write_claim_line(verdict, summary.summarize(load.load_matrix(Workspace(tmp_path), None), "single"))
    assert verdict.verdict == "reproduced"
    assert {found.measured, found.other_number.partition(" (")[0]} == {"50.5 s", "0.8 × 101 s"}


def test_a_failed_claim_is_shown_with_its_test(summarized):
    found = line(summarized, "slow")
    assert (found.symbol, found.measured, found.bounds, found.reason) == ("✗", "50.5 s", "at least 60 s", "does not hold")
    found = line(summarized, "both")
    assert (found.measured, found.bounds, found.reason) == ("50.5 s", "more than 60 s", "does not hold in 1 of 2 parts")


def test_overlapping_intervals_and_missing_numbers_are_reasons(summarized):
    found = line(summarized, "close")
    assert (found.symbol, found.measured) == ("?", "51.3 s")
    assert found.reason.startswith("intervals overlap: holds in ")
    found = line(summarized, "energy")
    assert (found.symbol, found.measured, found.reason) == ("–", "", "ddp ×2: energy_j was not measured")


def test_a_measured_number_is_shown_beside_the_printed_number_of_its_cell(summarized):
    assert line(summarized, "slow").printed == "48.1 s"
    assert line(summarized, "energy").printed == ""


def test_a_claim_on_single_runs_is_undecided_and_names_the_next_command(tmp_path):
    workspace = study(tmp_path, {"faster": CLAIMS["faster"]}, repeats=1)
    (verdict,) = (found := summary.summarize(load.load_matrix(workspace, None), "single")).verdicts
    command = "jobs submit --matrix quickstart --repeats 3"
    assert (verdict.verdict, verdict.helps.partition(" --where ")[0]) == ("undecided", command)
    *_, where = shlex.split(verdict.helps)
    known = {cell.id: cell.cell for cell in load.load_matrix(workspace, None).cells}
    assert {name for name, cell in known.items() if select.is_true_for_cell(select.parse_condition(where), cell)} == {
        entered.cell for entered in verdict.numbers
    }
    assert line(found, "faster").reason == "n = 1, so no interval; as measured it holds"
    assert report_start.list_repeat_commands(found) == [verdict.helps]


def test_a_claim_with_exact_parts_is_undecided_because_of_its_single_runs(tmp_path):
    mixed = f"state(strategy='ddp') == 'completed' and {CLAIMS['faster']}"
    workspace = study(tmp_path, {"mixed": mixed}, repeats=1)
    found = summary.summarize(load.load_matrix(workspace, None), "single")
    assert line(found, "mixed").reason == "n = 1, so no interval; as measured it holds"


@pytest.mark.parametrize(
    ("parts", "verdict", "test", "reason"),
    [
        ([(True, None), (True, 99.9)], "undecided", "0 < 9", "n = 1, so no interval; as measured it holds"),
        ([(True, None), (False, 40.0)], "undecided", "0 < 9", "n = 1, so no interval; as measured it does not hold"),
        (
            [(True, 60.0), (True, 99.9)],
            "undecided",
            "0 < 9",
            "intervals overlap: the weakest of 2 parts holds in 60 % of draws",
        ),
        ([(False, None), (False, 0.1)], "contradicted", "1 < 9", "does not hold in 2 of 2 parts"),
    ],
)
def test_a_reason_names_the_part_that_decided(parts, verdict, test, reason):
    claim_parts = [
        claims.ClaimPart(test=f"{index} < 9", holds=holds, holds_pct=share) for index, (holds, share) in enumerate(parts)
    ]
    judged = claims.Verdict(
        id="c", says="s", where="w", test="t", verdict=verdict, why="w", parts=claim_parts, helps="jobs submit"
    )
    part = report_start._find_deciding_part(judged)
    assert (part.test, report_start._shorten_reason(judged, part)) == (test, reason)


@pytest.mark.parametrize(
    ("name", "path", "scale", "n", "command"),
    [
        ("paper1-tiny", "/lib/matrices/paper1.yaml", "tiny", 1, "jobs submit --matrix paper1 --scale tiny --repeats 3"),
        ("mine", "/home/me/my study.yaml", "full", 3, "jobs submit --matrix '/home/me/my study.yaml' --repeats 6"),
    ],
)
def test_the_suggested_command_spells_the_matrix_as_the_user_did(name, path, scale, n, command):
    expansion = Expansion(schema=1, name=name, title="", path=path, cells=[], excluded=[], scale=scale)
    assert claims.make_repeat_command(expansion, n, []) == command


def test_the_start_of_the_report_describes_the_comparison_in_words(summarized):
    assert (
        report_start.describe_comparison(summarized)
        == "single, ddp and fsdp2 on gpt2-tiny; 1 and 2 ranks; 3 completed runs of each cell"
    )
    assert report_start.describe_same_work(summarized) == "3 of 3 cells are proven to do the same work as one process"


def test_the_choice_is_that_of_the_contest_of_most_cells(summarized):
    """The recommendation is for the ranks and the batch with which most cells were measured."""
    (choice,) = report_start.list_best_choices(summarized)
    assert (choice.workload, choice.where) == ("gpt2-tiny", "2 ranks, batch 8")
    best = {criterion: ([link.text for link in said.names], said.is_sure) for criterion, said in choice.best}
    assert best["Fastest"] == (["ddp"], True)


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([(10.0, 9.5, 10.5), (5.0, 4.5, 5.5)], "mine: fastest: single (label) ×1, 10.00 steps/s, 100 % faster than the next."),
        ([(10.0, 5.0, 15.0), (5.0, 4.5, 5.5)], "mine: the fastest cell cannot be told: single (label) ×1 has the highest mean"),
        ([(10.0, None, None), (5.0, 4.5, 5.5)], "mine: the fastest cell cannot be told"),
        ([(10.0, 9.5, 10.5)], None),
    ],
)
def test_cells_of_a_command_are_compared_without_a_choice(summarized, speeds, said):
    rows = []
    for (value, low, high), row in zip(speeds, summarized.rows, strict=False):
        speed = msgspec.structs.replace(row.metrics["throughput_per_s"], value=value, low=low, high=high, unit="steps/s")
        cell = row.cell | {"command": {"words": ["t.py"]}, "workload": "mine"}
        work = SameWork(verdict="not proven", why="of a command")
        rows.append(msgspec.structs.replace(row, cell=cell, same_work=work, metrics={"throughput_per_s": speed}))
    sentences = report_start.describe_fastest_commands(msgspec.structs.replace(summarized, rows=rows))
    assert [sentence.startswith(said) for sentence in sentences] == [True] * bool(said), sentences
    assert all("It is not proven that the cells do the same work" in sentence for sentence in sentences)


REASON = "less time in compute, 91 %; idle: host, 9 % of the difference between profiled steps"


@pytest.mark.parametrize(("fast_ns", "reason"), [(100, REASON), (700, "")], ids=["as measured", "profiled steps are slower"])
def test_the_reason_is_beside_the_fastest_cell_if_profiles_say_it(tmp_path, capsys, fast_ns, reason):
    """A step of ddp computes 2 x 100 ns and is idle for 40 + 3 ns; a step of fsdp2 computes 2 x 300 ns, idle for 80 + 3 ns."""
    workspace = Workspace(tmp_path)
    support.keep(workspace, [DDP, FSDP], repeats=2)
    for cell, compute_ns, idle_ns in ((DDP, fast_ns, 40), (FSDP, 300, 80)):
        for repeat in (1, 2):
            rank = support_ranks.RankOfRun(0)
            rank.annotate("ProfilerStep#1", 0, 3000)
            rank.launch("kernel", "gemm", 7, 0, 10, 10 + compute_ns)
            launched = 10 + compute_ns + idle_ns
            rank.launch("kernel", "gemm", 7, launched, launched + 3, launched + 3 + compute_ns)
            folder = support.completed(workspace, cell, repeat, rehearsal=False, found={"same_work": PROVEN})
            support_ranks.write_traces(folder, [rank])
    found = summary.summarize(load.load_matrix(workspace, None), "ddp")
    ((_, said), *_) = report_start.list_best_choices(found)[0].best
    assert ([link.text for link in said.names], said.reason) == (["ddp"], reason)
    assert main(["summarize", "-v", "--workspace", str(workspace.path)]) == 0
    assert (f"fastest, 2 ranks, batch 8: ddp, because of {reason}." in capsys.readouterr().out) == bool(reason)
    text = (workspace.report / "index.html").read_text().replace(support_report.packed_plotly(), "")
    parsed = Text(text)
    answered = re.sub(r"\s+", " ", parsed.text[parsed.ids["answer"] : parsed.ids["choices"]])
    assert (f"why: {REASON}" in answered) == bool(reason)


class Text(HTMLParser):
    """The text of a page as a browser without JavaScript shows it, without scripts and styles.

    ids: maps the id of an HTML element to its position in the text.
    """

    def __init__(self, page_text):
        super().__init__()
        self.text, self.ids, self._hidden = "", {}, False
        self.feed(page_text)

    def handle_starttag(self, tag, attrs):
        self._hidden = self._hidden or tag in ("script", "style")
        if name := dict(attrs).get("id"):
            self.ids[name] = len(self.text)

    def handle_endtag(self, tag):
        self._hidden = self._hidden and tag not in ("script", "style")

    def handle_data(self, data):
        if not self._hidden:
            self.text += data


def test_the_report_starts_with_the_verdicts_the_figure_and_the_choice(drawn):
    found = Text(drawn)
    answered = found.text[found.ids["answer"] : found.ids["choices"]]
    assert "6 claims: 2 reproduced, 2 contradicted, 1 undecided, 1 not run" in answered
    order = [
        found.ids[name] for name in ("verdicts", "claim-0", "claim-5", "figure-head-to-head", "summary", "choices", "runs")
    ]
    assert order == sorted(order)
    assert drawn.index("<table") > drawn.index('id="summary"')
    told = re.sub(r"\s+", " ", answered)
    for part in ("It is twice.", "2.00 ×", "the claim requires 1.9 to 2.1 ×", "printed 48.1 s", "What to choose for gpt2-tiny"):
        assert part in told
    assert drawn.count("<figure") == drawn.count('class="plot"')


def test_the_report_of_a_matrix_without_claims_starts_with_the_comparison(tmp_path):
    workspace = study(tmp_path, {}, repeats=1, rehearsal=True)
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    text = (workspace.report / "index.html").read_text().replace(support_report.packed_plotly(), "")
    found = Text(text)
    answered = found.text[found.ids["answer"] : found.ids["choices"]]
    assert "Compared: single, ddp and fsdp2 on gpt2-tiny; 1 and 2 ranks; 1 completed run of each cell." in answered
    assert "verdicts" not in found.ids
    assert "What to choose for gpt2-tiny" in answered
