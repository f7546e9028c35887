"""`collect compare --fail-if`: the exit code, and what is said about cells that the repeats do not decide."""

import json
import math

import pytest
import support_collect as support

from collect.cli import main
from collect.comparison import gate
from collect.comparison.compare import MetricComparison
from collect.comparison.match import match_cells
from collect.comparison.ratio import Mean, compute_mean_ratio, count_deciding_repeats
from collect.reading.load import LoadedCell
from shardlab.errors import InputError
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.command import Command
from shardlab.workspace.workspace import Workspace

DDP = support.cell("ddp", 2)


def workspace(path, factor: float = 1.0, repeats: int = 3, cells=(DDP,)) -> Workspace:
    """A workspace with runs of cells, each step of which takes `factor` times as long."""
    made = Workspace(path)
    support.keep(made, list(cells), repeats=repeats)
    for what in cells:
        for repeat in range(1, repeats + 1):
            support.completed(made, what, repeat)
    for run in made.list_run_dirs():
        for steps in (run.steps_file(rank) for rank in range(run.read_run().cell.gpus)):
            records = [json.loads(line) for line in steps.read_text().splitlines()]
            steps.write_text("".join(json.dumps(one | {"step_ms": one["step_ms"] * factor}) + "\n" for one in records))
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return workspace(tmp_path_factory.mktemp("gate") / "base").path


@pytest.fixture(scope="module")
def slower(base):
    return workspace(base.parent / "slower", 1.5).path


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("throughput < 0.95", 1),
        ("throughput_per_s<=0.95", 1),
        ("step_time > 1.05", 1),
        ("step_time >= 1.05", 1),
        ("throughput < 0.5", 0),
        ("step_time > 2", 0),
        ("peak_memory > 1.01", 0),
    ],
)
def test_a_gate_fails_where_the_repeats_show_it(base, slower, capsys, condition, code):
    assert main(["compare", str(base), str(slower), "--fail-if", condition, "--strict", "--workspace", str(base)]) == code
    printed = capsys.readouterr().out
    assert f"--fail-if {condition!r}" in printed
    assert ("fails: ddp ×2: B / A is " in printed) == bool(code)


def test_an_undecided_gate_passes_unless_strict_and_says_how_many_repeats_decide(base, capsys):
    options = ["compare", str(base), str(base), "--fail-if", "throughput < 0.99", "--workspace", str(base)]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "1 undecided" in printed
    assert main([*options, "--strict", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    rate = next(metric for metric in document["pairs"][0]["metrics"] if metric["metric"] == "throughput_per_s")
    deviation = rate["error_a"] * math.sqrt(3) / rate["a"]
    expected = count_deciding_repeats((deviation, deviation), 1.0, 0.99, 4)
    assert f"about {expected} repeats in A and in B would decide" in printed
    (judged,) = document["gates"]
    assert (judged["metric"], judged["cells"][0]["verdict"]) == ("throughput_per_s", "undecided")


def test_one_failing_condition_of_several_is_enough(base, slower):
    conditions = ["--fail-if", "step_time > 2", "--fail-if", "throughput < 0.95"]
    assert main(["compare", str(base), str(slower), *conditions, "--workspace", str(base)]) == 1


def test_a_gate_without_any_scatter_is_undecided(base, tmp_path, capsys):
    once = str(workspace(tmp_path / "once", repeats=1).path)
    options = ["compare", once, once, "--fail-if", "throughput < 0.95", "--workspace", str(base)]
    assert main(options) == 0
    assert "undecided: ddp ×2: n = 1 in A and B" in (printed := capsys.readouterr().out)
    assert "Three or more repeats of each cell show it" in printed
    assert main([*options, "--strict"]) == 1


def test_a_gate_that_can_judge_no_cell_fails(base, tmp_path, capsys):
    unfinished = Workspace(tmp_path / "unfinished")
    support.keep(unfinished, [DDP], repeats=3)
    assert main(["compare", str(base), str(unfinished.path), "--fail-if", "throughput < 0.95", "--workspace", str(base)]) == 1
    sentence = "not judged: ddp ×2: no value of throughput_per_s in both (A: completed; B: planned)"
    assert sentence in capsys.readouterr().out


def test_a_cell_that_only_the_base_has_is_not_judged(base, tmp_path, capsys):
    both = str(workspace(tmp_path / "both", cells=(DDP, support.cell())).path)
    options = ["compare", both, str(base), "--fail-if", "throughput < 0.5", "--workspace", str(base)]
    assert main(options) == 0
    assert "not judged: single ×1: B does not have this cell" in capsys.readouterr().out
    assert main([*options, "--strict"]) == 1


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        ("throughput is worse", "Allowed: a metric, one of < <= > >=, and a ratio B / A above 0"),
        ("throughput < -1", "Allowed: a metric, one of"),
        ("throughput < 0", "a ratio B / A above 0"),
        ("througput < 0.9", "unknown metric of a run 'througput'. Did you mean 'throughput_per_s'?"),
        ("speed_up < 0.9", "unknown metric of a run 'speed_up'"),
    ],
)
def test_a_condition_that_is_none_is_refused_with_a_sentence(base, capsys, condition, sentence):
    assert main(["compare", str(base), str(base), "--fail-if", condition, "--workspace", str(base)]) == 2
    assert sentence in (refusal := capsys.readouterr().err)
    assert refusal.startswith("error: --fail-if: ")


def test_strict_alone_is_refused(base, capsys):
    assert main(["compare", str(base), str(base), "--strict", "--workspace", str(base)]) == 2
    assert "--strict: allowed only together with --fail-if." in capsys.readouterr().err


def test_a_short_name_means_one_metric_or_is_refused():
    assert gate.parse_condition("collective > 1.1").metric == "collective_ms"
    assert gate.parse_condition("final_loss > 1.1").metric == "final_loss"
    assert {gate.parse_condition(f"{name} > 1").metric for name in ("peak_memory", "energy")} == {
        "peak_memory_bytes",
        "energy_j",
    }
    with pytest.raises(InputError, match="may be each of communication_ms, communication_pct"):
        gate.parse_condition("communication > 1.1")


@pytest.mark.parametrize(("deviations", "measured", "threshold"), [((0.02, 0.03), 0.97, 0.95), ((0.1, 0.0), 1.0, 1.05)])
def test_the_deciding_repeats_are_the_fewest_whose_interval_excludes_the_bound(deviations, measured, threshold):
    def excludes(n):
        means = [Mean(value, value * d / math.sqrt(n), n - 1) for value, d in zip((1.0, measured), deviations, strict=True)]
        _, low, high = compute_mean_ratio(*means)
        return not low <= threshold <= high

    n = count_deciding_repeats(deviations, measured, threshold, 2)
    assert excludes(n)
    assert not excludes(n - 1)
    assert count_deciding_repeats(deviations, threshold, threshold, 2) is None


def test_an_end_of_the_interval_at_the_bound_counts_by_the_sign():
    figure = MetricComparison(
        metric="step_time_ms",
        unit="ms",
        a=1,
        b=1,
        n_a=3,
        n_b=3,
        verdict="equal",
        ratio=1,
        low=1,
        high=1.1,
        error_a=0,
        error_b=0,
    )
    pair = gate.ComparedCell(a="x", b="x", label="x", state_a="", state_b="", metrics=[figure])
    verdicts = {
        text: gate._judge_cell(gate.parse_condition(text), pair).verdict
        for text in ("step_time < 1", "step_time >= 1", "step_time > 1", "step_time <= 1.1")
    }
    assert verdicts == {
        "step_time < 1": "passes", "step_time >= 1": "fails", "step_time > 1": "undecided", "step_time <= 1.1": "fails",
    }  # fmt: skip


def command_cell(word: str = "train.py", code: str = "0" * 12) -> LoadedCell:
    what = AnyCell(workload="mine", strategy="ddp", gpus=2, command=Command(["python", word]), workload_code=code)
    return LoadedCell(what.name(), what, [], [])


def test_two_versions_of_a_script_are_compared_and_the_difference_is_named():
    matches = match_cells([command_cell()], [command_cell(code="1" * 12)])
    assert [(a.id, b.id) for a, b in matches.pairs] == [(command_cell().id, command_cell(code="1" * 12).id)]
    assert [difference.key for difference in matches.differs] == ["workload_code"]


def test_two_command_lines_are_not_the_same_cell():
    assert match_cells([command_cell()], [command_cell("other.py")]).pairs == []


def test_two_versions_of_a_workload_that_shardlab_trains_are_not_compared():
    cells = [support.cell(workload_code=code * 12) for code in "01"]
    assert match_cells(*([LoadedCell(what.name(), what, [], [])] for what in cells)).pairs == []
