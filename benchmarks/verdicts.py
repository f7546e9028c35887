"""Measures how often two equal cells are wrongly judged to be different, by two methods.

    python benchmarks/verdicts.py

The methods are draws of Student's t, which `collect verdicts` uses, and the percentile bootstrap. The repeats of both cells are
drawn from the same normal distribution. A method judges two cells to be different if the mean of one cell is smaller than the
mean of the other cell in more than 97.5 % of the draws.
"""

from __future__ import annotations

import random
import statistics

from collect.findings.statistics import compute_standard_error, pool_noise
from collect.verdicts import draws
from shardlab.matrix.expression import Expression

PAIRS = 1000
RESAMPLES = 400
TEST = Expression("a() < b()").syntax_tree


def by_student(pair: list[list[float]], name: str) -> bool:
    values = {}
    for call, repeats in zip(("a()", "b()"), pair, strict=True):
        known = compute_standard_error(repeats, pool_noise([repeats]))
        assert known is not None
        values[call] = draws.draw_mean(statistics.fmean(repeats), *known, f"{call} {name}")
    return not 0.025 < draws.compute_share(TEST, values) < 0.975


def by_bootstrap(pair: list[list[float]], luck: random.Random) -> bool:
    smaller = 0
    for _ in range(RESAMPLES):
        one, other = (statistics.fmean(luck.choices(repeats, k=len(repeats))) for repeats in pair)
        smaller += one < other
    return not 0.025 < smaller / RESAMPLES < 0.975


def main() -> None:
    print("repeats  told apart by draws of t (%)  by the percentile bootstrap (%)")
    for repeats in (2, 3, 5, 10):
        luck = random.Random(3)
        pairs = [[[luck.gauss(100, 1) for _ in range(repeats)] for _ in range(2)] for _ in range(PAIRS)]
        student = sum(by_student(pair, str(number)) for number, pair in enumerate(pairs))
        bootstrap = sum(by_bootstrap(pair, luck) for pair in pairs)
        print(f"{repeats:7}  {100 * student / PAIRS:28.1f}  {100 * bootstrap / PAIRS:31.1f}")


if __name__ == "__main__":
    main()
