"""Statistics of repeats: confidence intervals, pooled noise, outliers, and how rarely equal cells are found to be different."""

import ast
import random

import pytest

from collect import summary
from collect.findings import statistics
from collect.findings.row import CellRow, RunRow
from collect.verdicts import draws
from shardlab.matrix.expression import Expression, ExpressionError


def test_noise_is_pooled_over_the_cells_that_were_repeated():
    found = statistics.pool_noise([[10.0, 12.0, 14.0], [100.0], [50.0, 50.0]])  # relative variance: (2 (2/12)² + 0) / 3
    assert (found.degrees_of_freedom, found.cell_count) == (3, 2)
    assert found.relative_deviation == pytest.approx((2 * (2 / 12) ** 2 / 3) ** 0.5)
    assert statistics.pool_noise([[1.0], [2.0]]) is None
    assert statistics.compute_standard_error([100.0], found) == (pytest.approx(100 * found.relative_deviation), 3)
    assert statistics.compute_standard_error([10.0, 12.0, 14.0], found) == (pytest.approx(2 / 3**0.5), 2)
    assert statistics.compute_standard_error([100.0], None) is None
    assert statistics.compute_standard_error([0.0], found) is None
    assert statistics.compute_standard_error([1.0, 3.0], None) == (pytest.approx(1.0), 1)
    # The standard deviation of two repeats has only one degree of freedom, so it is very uncertain. The pooled noise of all
    # cells is used instead.
    assert statistics.compute_standard_error([1.0, 3.0], found) == (pytest.approx(2 * found.relative_deviation / 2**0.5), 3)


def test_outliers_are_reported_and_kept():
    assert statistics.find_outlier_indexes([10.0, 10.1, 9.9, 10.05, 13.0]) == [4]
    assert statistics.find_outlier_indexes([10.0, 10.1, 13.0]) == []
    assert statistics.find_outlier_indexes([]) == []
    times = (10.0, 10.1, 9.9, 10.05, 13.0)
    runs = [RunRow(f"r{place}", place, 1, "completed", "", {"train_time_s": time}) for place, time in enumerate(times)]
    values = [run.metrics["train_time_s"] for run in runs]
    row = CellRow("c", {}, 5, {"completed": 5}, True, None, None, {"train_time_s": statistics.estimate_mean(values, "s")}, runs)
    (found,) = summary._find_outliers(row)
    assert (found.run, found.value, found.median) == ("r4", 13.0, 10.05)
    assert row.metrics["train_time_s"].value == pytest.approx(sum(values) / 5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_two_cells_that_are_the_same_are_rarely_distinguished(n):
    """An A/A test: of 400 pairs of equal cells, at most 5 % plus three standard deviations may be found to be different.

    With the percentile bootstrap, far more of the pairs would be found to be different (see benchmarks/verdicts.py).
    """
    luck, wrong = random.Random(7), 0
    test = Expression("a() < b()").syntax_tree
    for trial in range(400):
        values = {}
        for name in ("a()", "b()"):
            drawn = [luck.gauss(100, 1) for _ in range(n)]
            error, degrees = statistics.compute_standard_error(drawn, statistics.pool_noise([drawn]))
            values[name] = draws.draw_mean(sum(drawn) / n, error, degrees, f"{name} {trial}")
        wrong += not 0.025 < draws.compute_share(test, values) < 0.975
    assert wrong <= 400 * 0.05 + 13  # 5 % of 400 pairs, plus three standard deviations of this count


@pytest.mark.parametrize(("n", "least"), [(2, 100), (3, 360), (5, 400)])
def test_two_cells_that_differ_by_ten_standard_deviations_are_distinguished(n, least):
    """Of 400 pairs of cells whose means differ by ten standard deviations, at least `least` are found to be different.

    n: the repeats of each cell. With two repeats, Student's t has one degree of freedom, and its heavy tails leave most pairs
    undecided. Code that calls every pair equal would pass the test above, but not this test.
    """
    luck, right = random.Random(7), 0
    test = Expression("a() < b()").syntax_tree
    for trial in range(400):
        values = {}
        for name, mean in (("a()", 100), ("b()", 110)):
            drawn = [luck.gauss(mean, 1) for _ in range(n)]
            error, degrees = statistics.compute_standard_error(drawn, statistics.pool_noise([drawn]))
            values[name] = draws.draw_mean(sum(drawn) / n, error, degrees, f"{name} {trial}")
        right += draws.compute_share(test, values) > 0.975
    assert right >= least


def test_draws_of_one_name_are_the_same_and_of_two_independent():
    """Random draws depend on a name only: one name gives the same draws each time, two names independent draws."""
    one, again, other = (draws.draw_mean(1.0, 1.0, 5, name) for name in ("a", "a", "b"))
    assert (one == again).all()
    joint = sum(abs(a - 1) < 1 and abs(b - 1) < 1 for a, b in zip(one, other)) / draws.DRAW_COUNT
    alone = sum(abs(a - 1) < 1 for a in one) / draws.DRAW_COUNT
    assert joint == pytest.approx(alone**2, abs=0.02)


def test_a_claim_is_split_at_its_ands():
    """A claim is split into its parts at `and` and at chained comparisons."""
    tree = Expression("1 < a() < 2 and (b() > 1 and c() > 1) and (a() > 3 or b() > 3)").syntax_tree
    assert [ast.unparse(part) for part in draws.split_test(tree)] == [
        "1 < a()", "a() < 2", "b() > 1", "c() > 1", "a() > 3 or b() > 3",
    ]  # fmt: skip
    assert list(draws.find_calls(tree)) == ["a()", "b()", "c()"]
    with pytest.raises(ExpressionError, match="neither true nor false"):
        draws.compute_share(Expression("a()").syntax_tree, {"a()": 1.0})
