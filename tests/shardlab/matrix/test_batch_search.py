"""The order in which a search tries batch sizes, and its answer, compared with the answer of trying every size."""

import math
import random

import pytest

from shardlab.matrix.batch_search import BatchSearch, TryOutcome, choose_next_size, find_best_size


def search(goal="largest_that_fits", start=16, smallest=1, largest=1024, unit=1):
    return BatchSearch("gpu_batch_size", goal, start, smallest, largest, unit)


def path(asked, outcome):
    """Run a search. Returns (the batch sizes that it tries, in order; the size that it finds best).

    outcome: a function that takes a size and returns how the try of this size ends.
    """
    tried: dict[int, TryOutcome] = {}
    while (size := choose_next_size(asked, tried)) is not None:
        assert size not in tried
        assert asked.smallest <= size <= asked.largest
        tried[size] = outcome(size)
    return list(tried), find_best_size(asked, tried)


def up_to(limit):
    return lambda size: TryOutcome(size <= limit, float(size))


def test_a_search_tries_powers_of_two_and_then_bisects():
    assert path(search(), up_to(41)) == ([16, 32, 64, 48, 40, 44, 42, 41], 41)
    assert path(search(), up_to(3)) == ([16, 8, 4, 2, 3], 3)


def test_a_search_without_a_fitting_size_tries_every_smaller_size_and_returns_none():
    assert path(search(), up_to(0)) == ([16, 8, 4, 2, 1], None)
    assert path(search(smallest=2), up_to(1)) == ([16, 8, 4, 2], None)


def test_the_search_stays_below_its_bound():
    assert path(search(largest=100), up_to(10**6)) == ([16, 32, 64, 100], 100)
    assert path(search(start=8, largest=8), up_to(8)) == ([8], 8)


@pytest.mark.parametrize("start", [1, 2, 16, 256])
@pytest.mark.parametrize("largest", [256, 300, 1024])
def test_a_search_finds_each_possible_largest_size(start, largest):
    asked = search(start=start, largest=largest)
    counts = []
    for limit in range(largest + 2):
        sizes, found = path(asked, up_to(limit))
        assert found == (min(limit, largest) or None)
        counts.append(len(sizes))
    assert max(counts) == asked.most_tries


def test_every_size_is_a_multiple_of_the_number_of_passes():
    sizes, found = path(search(start=32, smallest=4, largest=4096, unit=4), up_to(101))
    assert found == 100
    assert all(size % 4 == 0 for size in sizes)


@pytest.mark.parametrize("peak", [1, 3, 16, 24, 70, 500, 1024])
@pytest.mark.parametrize("limit", [10, 100, 4096])
def test_a_search_for_the_fastest_size_ends_near_the_peak(peak, limit):
    def outcome(size):
        return TryOutcome(size <= limit, 1000 - 100 * abs(math.log2(size / peak)))

    _, found = path(search("fastest"), outcome)
    best = min(peak, limit)
    assert abs(found - best) <= max(1, best / 6)


def test_a_search_for_the_fastest_size_needs_at_most_the_announced_tries():
    chance = random.Random(7)
    for _ in range(3000):
        start = 2 ** chance.randrange(9)
        asked = search("fastest", start=start, largest=start * 2 ** chance.randrange(6))
        limit = chance.choice([asked.largest, chance.randrange(1, asked.largest + 1)])
        sizes, _ = path(asked, lambda size, limit=limit: TryOutcome(size <= limit, chance.random()))
        assert len(sizes) <= asked.most_tries, (asked, sizes)


def test_the_smaller_of_two_equally_fast_sizes_is_chosen():
    _, found = path(search("fastest"), lambda size: TryOutcome(True, 5.0))
    assert found == 1
