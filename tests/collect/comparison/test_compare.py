"""`collect compare` of two workspaces or matrices A and B: which differences count, and which cells are not compared.

If A and B are swapped, the answer is inverted.
"""

import json
import random
import re
import shutil
import statistics

import msgspec
import pytest
import support_collect as support
from hypothesis import given
from hypothesis import strategies as st

from collect.cli import main
from collect.comparison import ratio
from collect.comparison.match import match_cells
from collect.comparison.ratio import Mean
from collect.findings import comparability
from collect.reading.load import LoadedCell
from shardlab.files import files
from shardlab.runs.record import SameWork
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.workspace.workspace import Workspace

SINGLE, DDP = support.cell(), support.cell("ddp", 2)
OPPOSITE = {"faster": "slower", "slower": "faster", "higher": "lower", "lower": "higher"}


def workspace(path, cells=(SINGLE, DDP), repeats=3, name="quickstart", **options) -> Workspace:
    made = Workspace(path)
    earlier = made.read_expansion("quickstart") if name != "quickstart" else None
    support.keep(made, list(cells), repeats=repeats)
    if earlier:
        made.store_expansion(msgspec.structs.replace(made.read_expansion("quickstart"), name=name))
        made.store_expansion(earlier)
    for what in cells:
        for repeat in range(1, repeats + 1):
            support.completed(made, what, repeat, **options)
    return made


def slow_down(made: Workspace, what, factor: float) -> None:
    """Make every step of a cell take `factor` times as long."""
    for run in made.list_run_dirs():
        if run.read_run().cell != what:
            continue
        for rank in range(what.gpus):
            path = run.steps_file(rank)
            records = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(one | {"step_ms": one["step_ms"] * factor}) + "\n" for one in records))


def compared(capsys, here: Workspace, a, b, *options):
    assert main(["compare", str(a), str(b), "--json", "--workspace", str(here.path), *options]) == 0
    return json.loads(capsys.readouterr().out)


def figures(found, cell) -> dict:
    (pair,) = (pair for pair in found["pairs"] if pair["a"] == cell.name())
    return {figure["metric"]: figure for figure in pair["metrics"]}


@pytest.fixture
def before(tmp_path):
    return workspace(tmp_path / "before")


@pytest.fixture
def after(before, tmp_path):
    """A copy of the workspace `before`, in which each step of ddp takes 1.5 times as long."""
    shutil.copytree(before.path, tmp_path / "after")
    made = Workspace(tmp_path / "after")
    slow_down(made, DDP, 1.5)
    return made


def test_a_workspace_compared_with_itself_differs_in_nothing(before, capsys):
    """A workspace compared with itself: all ratios are 1 and no difference is reported."""
    found = compared(capsys, before, before.path, before.path)
    assert len(found["pairs"]) == 2
    for pair in found["pairs"]:
        assert "the same runs in both" in pair["remarks"]
        assert {figure["verdict"] for figure in pair["metrics"]} <= {"equal", "not to be told apart"}
        assert {figure["ratio"] for figure in pair["metrics"] if "ratio" in figure} == {1.0}
    assert found["environment"] == found["differs"] == found["only_a"] == found["only_b"] == []


def test_a_slower_cell_is_reported_with_its_interval(before, after, capsys):
    found = compared(capsys, before, before.path, after.path)
    slower, same = figures(found, DDP), figures(found, SINGLE)
    step, rate = slower["step_time_ms"], slower["throughput_per_s"]
    assert (step["verdict"], rate["verdict"]) == ("slower", "slower")
    assert step["ratio"] == pytest.approx(1.5)
    assert step["low"] < 1.5 < step["high"]
    assert rate["ratio"] == pytest.approx(1 / 1.5)
    assert step["n_a"] == step["n_b"] == 3
    assert same["step_time_ms"]["verdict"] == "not to be told apart"
    assert main(["compare", str(before.path), str(after.path), "--workspace", str(before.path)]) == 0
    said = capsys.readouterr().out
    assert any(line.split()[-1] == "slower" and "step_time_ms" in line for line in said.splitlines())
    assert REHEARSAL_NOTE in said
    assert "differ at the 95 % level" in said


def test_swapping_a_and_b_inverts_each_ratio_and_verdict(before, after, capsys):
    """If A and B are swapped, each ratio becomes its inverse, and `faster` becomes `slower`."""
    there, back = compared(capsys, before, before.path, after.path), compared(capsys, before, after.path, before.path)
    for cell in (SINGLE, DDP):
        one, other = figures(there, cell), figures(back, cell)
        assert one.keys() == other.keys()
        for name, figure in one.items():
            assert other[name]["verdict"] == OPPOSITE.get(figure["verdict"], figure["verdict"])
            if "low" in figure:
                ends = [other[name][key] for key in ("ratio", "low", "high")]
                assert ends == pytest.approx([1 / figure[key] for key in ("ratio", "high", "low")])


def test_a_single_repeat_uses_the_pooled_noise_or_has_no_verdict(tmp_path, capsys):
    a, b = (workspace(tmp_path / name, [SINGLE], repeats=1) for name in "ab")
    found = figures(compared(capsys, a, a.path, b.path), SINGLE)
    assert found["step_time_ms"]["verdict"] == "undecided"
    assert "low" not in found["step_time_ms"]
    assert "n = 1 in A and B" in found["step_time_ms"]["why"]
    for made in (a, b):
        support.keep(made, [SINGLE, DDP], repeats=3)
        for repeat in (1, 2, 3):
            support.completed(made, DDP, repeat)
    found = figures(compared(capsys, a, a.path, b.path), SINGLE)
    assert found["step_time_ms"]["verdict"] == "not to be told apart"
    assert found["step_time_ms"]["low"] < 1 < found["step_time_ms"]["high"]


def test_a_cell_of_different_work_does_not_stop_the_comparison_of_later_cells(tmp_path, capsys):
    """A cell whose same-work proof failed does not stop the comparison of the cells after it."""
    places = tmp_path / "a", tmp_path / "b"
    for place, verdict in zip(places, ("proven", "different"), strict=True):
        made = workspace(place, [SINGLE], found={"same_work": SameWork(verdict=verdict, why="because")})
        support.keep(made, [SINGLE, DDP], repeats=1)
        support.completed(made, DDP, found={"same_work": SameWork(verdict="proven", why="")})
    assert main(["compare", *map(str, places)]) == 0
    table = capsys.readouterr().out
    assert "different work" in table
    assert re.search(r"ddp ×2 +throughput_per_s", table)


def test_other_work_is_never_compared(tmp_path, capsys):
    def proof(verdict):
        return {"same_work": SameWork(verdict=verdict, why="because")}

    proven = workspace(tmp_path / "a", [SINGLE], found=proof("proven"))
    for name, options, why in (
        ("different", {"found": proof("different")}, "B: different (because)"),
        ("other-proof", {"found": proof("not provable")}, "B: not provable (because)"),
        ("data", {"found": proof("proven") | {"data": {"name": "x", "sha256": "cd" * 32}}}, "different data"),
        ("real", {"found": proof("proven"), "rehearsal": False}, "A is a rehearsal"),
    ):
        other = workspace(tmp_path / name, [SINGLE], **options)
        (pair,) = compared(capsys, proven, proven.path, other.path)["pairs"]
        assert why in pair["different_work"]
        assert "metrics" not in pair
        assert main(["compare", str(proven.path), str(other.path)]) == 0
        assert "different work" in capsys.readouterr().out


def test_a_cell_with_a_failed_proof_is_different_even_from_itself(tmp_path, capsys):
    """A cell whose same-work proof failed is marked as different work even if it is compared with itself."""
    made = workspace(tmp_path, [SINGLE], found={"same_work": SameWork(verdict="different", why="because")})
    (pair,) = compared(capsys, made, made.path, made.path)["pairs"]
    assert "different" in pair["different_work"]


def test_other_work_by_design_is_compared_only_with_itself_and_with_a_remark(tmp_path, capsys):
    """A strategy that does other work by design is compared with itself, with a remark, but not with proven work."""
    by_design = {"same_work": SameWork(verdict="other work", why="parameters are averaged every 8 steps")}
    made = workspace(tmp_path / "a", [SINGLE], found=by_design)
    (pair,) = compared(capsys, made, made.path, made.path)["pairs"]
    assert pair["metrics"]
    assert "by design, not the same work as one process (parameters are averaged every 8 steps)" in pair["remarks"]
    proven = workspace(tmp_path / "b", [SINGLE], found={"same_work": SameWork(verdict="proven", why="because")})
    (pair,) = compared(capsys, made, made.path, proven.path)["pairs"]
    assert ("A: other work" in pair["different_work"], "metrics" in pair) == (True, False)


def test_one_repeat_has_no_interval_and_says_why(tmp_path, capsys):
    once, thrice = workspace(tmp_path / "a", repeats=1), workspace(tmp_path / "b")
    found = figures(compared(capsys, once, once.path, thrice.path), DDP)["step_time_ms"]
    assert (found["verdict"], "low" in found) == ("undecided", False)
    assert found["why"] == "n = 1 in A, and no cell of that matrix was repeated, so the scatter is not known"
    assert main(["compare", str(once.path), str(thrice.path)]) == 0
    said = capsys.readouterr().out
    assert any("step_time_ms" in line and "none: n = 1" in line for line in said.splitlines())
    assert f"no interval: {found['why']}" in said.replace("\n", " ")


def test_without_a_cell_in_both_the_keys_that_differ_are_named(tmp_path, capsys):
    short = workspace(tmp_path / "a", [SINGLE, DDP], repeats=1)
    long = workspace(tmp_path / "b", [msgspec.structs.replace(cell, steps=5) for cell in (SINGLE, DDP)], repeats=1)
    assert compared(capsys, short, short.path, long.path)["apart"] == [{"key": "steps", "a": [10], "b": [5]}]
    assert main(["compare", str(short.path), str(long.path)]) == 0
    assert "no cell is in both A and B: steps is 10 in A and 5 in B." in capsys.readouterr().out
    single, ddp = (msgspec.structs.replace(cell, seed=1) for cell in (SINGLE, DDP))
    third = msgspec.structs.replace(DDP, seed=3)
    other = workspace(tmp_path / "c", [ddp, single], repeats=1)
    mixed = workspace(tmp_path / "d", [msgspec.structs.replace(DDP, seed=2), SINGLE], repeats=1)
    assert main(["compare", str(other.path), str(mixed.path)]) == 0
    assert "no cell is in both A and B: seed is 1 in A and 2, 42 in B." in capsys.readouterr().out.replace("\n", " ")
    one, two = workspace(tmp_path / "e", [single, DDP], repeats=1), workspace(tmp_path / "f", [SINGLE, third], repeats=1)
    assert compared(capsys, one, one.path, two.path)["apart"] == []
    assert main(["compare", str(one.path), str(two.path)]) == 0
    assert "no cell is in both A and B: no single key explains the difference." in capsys.readouterr().out


def test_cells_without_a_twin_are_named(before, tmp_path, capsys):
    other = workspace(tmp_path / "other", [SINGLE, support.cell("fsdp2", 2)])
    found = compared(capsys, before, before.path, other.path)
    assert [pair["label"] for pair in found["pairs"]] == ["single ×1"]
    assert (found["only_a"], found["only_b"]) == (["ddp ×2"], ["fsdp2 ×2"])


def test_differences_of_machines_and_versions_are_listed(before, after, capsys):
    run = after.list_run_dirs()[0]
    host = json.loads(run.environment_file(support.HOST).read_text())
    files.write_json(run.environment_file(support.HOST), host | {"cpu_model": "Another", "gpu_driver": "570.0"})
    written = json.loads(run.run_json.read_text())
    files.write_json(run.run_json, written | {"git_commit": "0" * 40})
    found = {one["what"]: one for one in compared(capsys, before, before.path, after.path)["environment"]}
    assert found.keys() == {"processor", "git commit"}  # the GPU driver is not listed, because workspace A did not record it
    assert (found["processor"]["a"], found["processor"]["b"]) == (["AMD EPYC 7B13"], ["AMD EPYC 7B13", "Another"])


def test_two_matrices_of_one_workspace_are_compared(tmp_path, capsys):
    eager, compiled = ([support.cell(compile=how), support.cell("ddp", 2, compile=how)] for how in (False, True))
    made = workspace(tmp_path, eager)
    workspace(tmp_path, compiled, name="compiled")
    found = compared(capsys, made, "quickstart", "compiled")
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [
        (one.name(), other.name()) for one, other in zip(eager, compiled, strict=True)
    ]
    assert found["differs"] == [{"key": "compile", "a": False, "b": True}]
    assert main(["compare", "quickstart", "compiled", "--workspace", str(tmp_path)]) == 0
    assert "cells were matched although compile differs: false in A, true in B" in capsys.readouterr().out


def test_an_unknown_name_and_a_matrix_option_for_a_matrix_are_refused(before, capsys):
    """An argument that is neither a matrix nor a folder is refused, and so is --matrix if the arguments are matrices."""
    for arguments, said in (
        (["nothing", "quickstart"], "nothing: is neither a matrix of this workspace nor a folder"),
        (["quickstart", "quickstart", "--matrix", "quickstart"], "quickstart is itself a matrix"),
    ):
        assert main(["compare", *arguments, "--workspace", str(before.path)]) == 2
        assert said in capsys.readouterr().err


# The tests below check which cell of workspace A is the same cell as which cell of workspace B.


def loaded(*cells) -> list[LoadedCell]:
    return [LoadedCell(what.name(), what, [], []) for what in cells]


def paired(found):
    return [(one.id, other.id) for one, other in found.pairs]


def test_cells_that_differ_in_time_limit_or_proof_are_matched():
    """Two cells that differ only in time limit, proof and expected ends are paired."""
    other = support.cell(time_limit_s=60, prove="auto", expect=["oom"])
    assert paired(match_cells(loaded(SINGLE), loaded(other))) == [(SINGLE.name(), other.name())]


def test_cells_that_differ_in_the_trained_work_are_never_matched():
    for changed in ({"seq_len": 128}, {"global_batch_size": 16}, {"seed": 7}, {"steps": 11}):
        found = match_cells(loaded(SINGLE), loaded(support.cell(**changed)))
        assert (found.pairs, found.differs, len(found.only_a), len(found.only_b)) == ([], [], 1, 1)


def test_a_precision_that_differs_throughout_is_another_computation():
    cast, autocast = support.cell(precision="bf16"), support.cell(precision="bf16-autocast")
    found = match_cells(loaded(cast), loaded(autocast))
    assert paired(found) == [(cast.name(), autocast.name())]
    assert [(one.key, one.a, one.b) for one in found.differs] == [("precision", "bf16", "bf16-autocast")]
    assert (
        comparability.describe_precision_difference([cast, autocast])
        == "different computation: precision bf16 and bf16-autocast"
    )
    assert comparability.describe_precision_difference([cast, support.cell("ddp", 2, precision="bf16")]) is None


def test_cells_of_a_version_without_the_option_sync_are_matched():
    """All strategies of older versions reduce gradients in the last pass."""
    older, newer, other = (
        support.cell("fsdp2", 2, nnodes=nodes, options=options)
        for nodes, options in ((1, {}), (2, {"sync": "last_pass"}), (2, {"sync": "every_pass"}))
    )
    assert paired(match_cells(loaded(older), loaded(newer))) == [(older.name(), newer.name())]
    assert not match_cells(loaded(older), loaded(other)).pairs


@pytest.mark.parametrize("key", ["gpu_type", "environment"])
def test_cells_on_two_gpu_types_or_in_two_environments_are_compared_and_never_merged(key):
    a, b = (support.cell("ddp", 2, **{key: name}) for name in ("a100", "h100"))
    assert "-a100-" in a.name()
    assert a.hash() != b.hash() != support.cell("ddp", 2).hash()
    matches = match_cells(loaded(a), loaded(b))
    assert [(one.key, one.a, one.b) for one in matches.differs] == [(key, "a100", "h100")]
    assert len(matches.pairs) == 1
    assert not comparability.is_same_work_expected(a, b)


def test_a_key_that_differs_in_opposite_directions_matches_no_cells():
    """`compile` differs between A and B, but in opposite directions for the two cells. So no cell is paired."""
    one, other = support.cell(compile=True), support.cell("ddp", 2, compile=False)
    there = support.cell(compile=False), support.cell("ddp", 2, compile=True)
    assert match_cells(loaded(one, other), loaded(*there)).pairs == []


def test_a_cell_with_two_possible_matches_is_not_matched():
    """If two cells of B match the same cell of A, no cell is matched.

    The cell of A uses the launcher fork, and the two cells of B use torchrun. If the launcher and the number of nodes are
    ignored, both cells of B match the cell of A.
    """
    a = support.cell("ddp", 2, "fork")
    b = support.cell("ddp", 2, nnodes=2), support.cell("ddp", 2, nnodes=2, time_limit_s=60)
    assert match_cells(loaded(a), loaded(*b)).pairs == []
    assert paired(match_cells(loaded(a), loaded(b[0]))) == [(a.name(), b[0].name())]


@given(st.permutations([SINGLE, DDP, support.cell("fsdp2", 2), support.cell("zero3", 2)]), st.integers(0, 4), st.integers(0, 4))
def test_each_cell_is_matched_or_listed_once_for_every_order(cells, cut_a, cut_b):
    a, b = cells[:cut_a], cells[cut_b:]
    there, back = match_cells(loaded(*a), loaded(*b)), match_cells(loaded(*b), loaded(*a))
    assert sorted(paired(there)) == sorted((other, one) for one, other in paired(back))
    assert sorted([one for one, _ in paired(there)] + [cell.id for cell in there.only_a]) == sorted(cell.name() for cell in a)
    assert {cell.name() for cell in a} & {cell.name() for cell in b} <= {one for one, _ in paired(there)}


# The tests below check the ratio of two means and its confidence interval.

MEANS = st.builds(
    Mean, st.floats(1e-3, 1e9), st.one_of(st.just(0.0), st.floats(1e-6, 1e3), st.none()), st.integers(1, 40)
)  # fmt: skip


@given(MEANS, MEANS)
def test_a_ratio_turned_round_is_its_inverse(a, b):
    there, back = ratio.compute_mean_ratio(a, b), ratio.compute_mean_ratio(b, a)
    assert there[0] * back[0] == pytest.approx(1)
    assert (there[1] is None) == (back[1] is None)
    if there[1] is not None:
        assert back[1:] == pytest.approx((1 / there[2], 1 / there[1]))
    for unit in ("ms", "s", "tokens/s", "bytes"):
        word = ratio.choose_difference_word(a, b, unit)
        assert ratio.choose_difference_word(b, a, unit) == OPPOSITE.get(word, word)


@given(MEANS, MEANS, st.floats(1e-3, 1e3))
def test_another_unit_changes_no_verdict(a, b, factor):
    scaled = [
        Mean(one.value * factor, None if one.error is None else one.error * factor, one.degrees_of_freedom) for one in (a, b)
    ]
    assert ratio.compute_mean_ratio(*scaled)[0] == pytest.approx(ratio.compute_mean_ratio(a, b)[0])
    ends = ratio.compute_mean_ratio(a, b)[1:]
    if None not in ends and 1 not in [pytest.approx(end) for end in ends]:
        assert ratio.choose_difference_word(*scaled, "bytes") == ratio.choose_difference_word(a, b, "bytes")


def test_the_interval_is_that_of_welch_by_hand():
    a, b = [100.0, 102.0, 104.0], [110.0, 111.0, 112.0]
    means = [Mean(statistics.fmean(x), statistics.stdev(x) / 3**0.5, 2) for x in (a, b)]
    parts = [(mean.error / mean.value) ** 2 for mean in means]
    # Welch's formula gives 2.80 degrees of freedom, which are rounded down to 2. Student's t then has the quantile 4.303.
    assert sum(parts) ** 2 / sum(part**2 / 2 for part in parts) == pytest.approx(2.80, abs=0.01)
    value, low, high = ratio.compute_mean_ratio(*means)
    assert value == pytest.approx(111 / 102)
    assert (low, high) == pytest.approx((1.0314, 1.1482), abs=1e-4)
    assert ratio.choose_difference_word(*means, "ms") == "slower"


def test_exact_numbers_are_equal_or_distinguished():
    seven, eight = Mean(7, 0, 1), Mean(8, 0, 1)
    assert ratio.choose_difference_word(seven, seven, "bytes") == "equal"
    assert ratio.choose_difference_word(seven, eight, "bytes") == "higher"
    zero = Mean(0, 0, 1)
    assert ratio.compute_mean_ratio(zero, seven) == (None, None, None)
    assert ratio.choose_difference_word(zero, seven, "bytes") == "higher"
    assert ratio.choose_difference_word(zero, zero, "bytes") == "equal"
    assert ratio.compute_mean_ratio(Mean(1, 2, 5), seven) == (7, None, None)  # no interval: the denominator may be 0
    assert ratio.choose_difference_word(Mean(1, 2, 5), seven, "x") == "higher"
    assert ratio.choose_difference_word(Mean(-1, 0.1, 5), Mean(1, 0.1, 5), "x") == "higher"


@pytest.mark.parametrize("n", [2, 3, 5])
def test_equal_cells_differ_at_most_as_often_as_a_95_percent_interval_allows(n):
    chance, apart = random.Random(5), 0
    for _ in range(2000):
        sides = [[chance.gauss(100, 2) for _ in range(n)] for _ in "ab"]
        a, b = (Mean(statistics.fmean(x), statistics.stdev(x) / n**0.5, n - 1) for x in sides)
        apart += ratio.choose_difference_word(a, b, "ms") != "not to be told apart"
    assert 0 < apart / 2000 < 0.05
