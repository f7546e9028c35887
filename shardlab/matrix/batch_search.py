"""A search for a batch size, which makes one try after another: what is searched, and which batch size is tried next.

A try is an ordinary run of a cell. The next batch size depends only on how the earlier tries ended. So every command that reads
the runs of a workspace finds the same next try, and a search that was interrupted continues where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from shardlab.matrix.cell import Cell

BatchSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Goal = Literal["largest_that_fits", "fastest"]
GOAL_WORDS = {"largest_that_fits": "the largest that fits", "fastest": "the fastest"}
# The batch size of one pass in the cell until the planner chooses the size of the first try. It is not 1, because in a pass
# with one unit of data, BatchNorm may get only one value per channel; a cell with such a pass is refused.
PLACEHOLDER_SIZE = 2
SMALLEST_GAP = 8  # the search ends if both tried sizes next to the fastest size are within 1/SMALLEST_GAP of the fastest size
# The most tries that the search for the fastest size makes after it has stopped doubling and halving. Each of these tries
# halves a gap next to the best size, until the gap is SMALLEST_GAP times smaller than the best size.
MOST_REFINEMENTS = 3 * int(math.log2(SMALLEST_GAP))


class SearchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key `search` of a matrix: the batch size of each cell is searched."""

    key: Literal["gpu_batch_size"]
    """The key whose value is searched."""
    goal: Goal = msgspec.field(name="for")
    """largest_that_fits: the largest batch that is not out of memory. fastest: the batch with the highest throughput."""
    at_most: BatchSize | None = None
    """The largest value that is tried; null: 16 times the largest value that the planner predicts to fit."""


class BatchSearch(msgspec.Struct, frozen=True):
    """The search to which a run belongs. All sizes are values of `key`, in units of data per data-parallel rank and step."""

    key: str
    """The key whose value is searched."""
    goal: Goal
    """`largest_that_fits` or `fastest`."""
    start: BatchSize
    """The size of the first try."""
    smallest: BatchSize
    """The smallest size of the search."""
    largest: BatchSize
    """The largest size of the search."""
    unit: BatchSize = 1
    """The number of passes of a step; every size is a multiple of it, so that all tries have the same number of passes."""

    @property
    def description(self) -> str:
        """A text that says what is searched, such as `gpu_batch_size, the largest that fits`."""
        return f"{self.key}, {GOAL_WORDS[self.goal]}"

    def to_json_fields(self) -> dict[str, Any]:
        """The search as a dictionary for JSON: its fields, and the largest number of tries that it can need."""
        return {**msgspec.to_builtins(self), "most_tries": self.most_tries}

    @property
    def sizes_per_pass(self) -> tuple[int, int, int]:
        """The sizes (start, smallest, largest), each divided by the number of passes of a step, which gives the batch size of
        one pass."""
        start, smallest, largest = (max(size // self.unit, 1) for size in (self.start, self.smallest, self.largest))
        return start, smallest, largest

    @property
    def most_tries(self) -> int:
        """The largest number of tries that the search can need, in the worst case."""
        start, smallest, largest = self.sizes_per_pass
        max_doublings, max_halvings = math.ceil(math.log2(largest / start)), math.ceil(math.log2(start / smallest))
        if self.goal == "fastest":
            return 1 + max(max_doublings, 1 + max_halvings) + MOST_REFINEMENTS
        # The search doubles (or halves) the size until one size fits and its double does not. After that, each try halves the
        # number of sizes that can still be the largest size that fits.
        gaps_up = [(start << step, min(start << (step + 1), largest)) for step in range(max_doublings)]
        tries_up = [2 + step + _count_halvings(high - low) for step, (low, high) in enumerate(gaps_up)]
        gaps_down = [(max(start >> (step + 1), smallest), start >> step) for step in range(max_halvings)]
        tries_down = [2 + step + _count_halvings(high - low) for step, (low, high) in enumerate(gaps_down)]
        return max([1, *tries_up, *tries_down])


class TryOutcome(msgspec.Struct, frozen=True):
    """How a try ended."""

    fits: bool
    """Whether the try completed; False: it ran out of memory."""
    throughput: float = 0.0
    """Units of data per second."""


def try_cell(cell: Cell, batch_size: int) -> Cell:
    """The cell of a try: `cell` with another batch size and the same number of passes in a step.

    batch_size: units of data per data-parallel rank and step; it must be a multiple of the number of passes.
    """
    micro_batch = batch_size // cell.gradient_accumulation_steps
    return msgspec.structs.replace(cell, micro_batch_size=micro_batch, global_batch_size=batch_size * cell.dp)


def compute_search_hash(cell: Cell) -> str:
    """A hash that is the same for the cells of all tries of a search, because the batch size does not influence it."""
    return try_cell(cell, PLACEHOLDER_SIZE * cell.gradient_accumulation_steps).hash()


def choose_next_size(search: BatchSearch, outcome_by_size: Mapping[int, TryOutcome]) -> int | None:
    """The batch size of the next try; None if the search has ended, with the best size or because no size fits.

    outcome_by_size: for each try so far, its batch size -> how it ended.
    """
    if not outcome_by_size:
        return search.start
    _, smallest, largest = search.sizes_per_pass
    pass_outcomes = {size // search.unit: outcome for size, outcome in outcome_by_size.items()}
    choose_pass_size = _choose_next_for_largest if search.goal == "largest_that_fits" else _choose_next_for_fastest
    size = choose_pass_size(pass_outcomes, smallest, largest)
    return None if size is None else size * search.unit


def find_best_size(search: BatchSearch, outcome_by_size: Mapping[int, TryOutcome]) -> int | None:
    """The best batch size among the tries so far; None if no try has completed. outcome_by_size: as in `choose_next_size`."""
    fitting_sizes = [size for size, outcome in outcome_by_size.items() if outcome.fits]
    if search.goal == "largest_that_fits":
        return max(fitting_sizes, default=None)
    return max(fitting_sizes, key=lambda size: (outcome_by_size[size].throughput, -size), default=None)


def _count_halvings(size_gap: int) -> int:
    """The number of tries that the search needs to find the largest size that fits by halving.

    size_gap: the difference between a size that does not fit and a smaller size that fits.
    """
    return math.ceil(math.log2(size_gap))


def _choose_next_for_largest(outcome_by_size: Mapping[int, TryOutcome], smallest: int, largest: int) -> int | None:
    """The next size in the search for the largest size that fits; None if it was found, or if even `smallest` does not fit.

    The size is doubled or halved until one size fits and a larger size does not. Then the size in the middle of these two
    sizes is tried, until the two sizes differ by 1. outcome_by_size: for each size of a pass that was tried, how the try ended.
    """
    largest_fitting = max((size for size, outcome in outcome_by_size.items() if outcome.fits), default=None)
    smallest_failing = min(
        (size for size, outcome in outcome_by_size.items() if not outcome.fits and size > (largest_fitting or 0)), default=None
    )
    if largest_fitting is None:
        smallest_tried = min(outcome_by_size)
        return max(smallest_tried // 2, smallest) if smallest_tried > smallest else None
    if smallest_failing is None:
        return min(2 * largest_fitting, largest) if largest_fitting < largest else None
    return (largest_fitting + smallest_failing) // 2 if smallest_failing - largest_fitting > 1 else None


def _choose_next_for_fastest(outcome_by_size: Mapping[int, TryOutcome], smallest: int, largest: int) -> int | None:
    """The next size in the search for the fastest size; None if it was found, or if even `smallest` does not fit.

    The size is doubled and halved until a larger and a smaller size than the fastest size have been tried. Then the search has
    two gaps: from the fastest size to the next larger tried size, and to the next smaller tried size. The middle of the larger
    gap is tried, until both gaps are small. outcome_by_size: as in `_choose_next_for_largest`.
    """
    throughput_by_size = {size: outcome.throughput for size, outcome in outcome_by_size.items() if outcome.fits}
    if not throughput_by_size:
        smallest_tried = min(outcome_by_size)
        return max(smallest_tried // 2, smallest) if smallest_tried > smallest else None
    fastest_size = max(throughput_by_size, key=lambda size: (throughput_by_size[size], -size))
    next_larger = min((size for size in outcome_by_size if size > fastest_size), default=None)
    next_smaller = max((size for size in outcome_by_size if size < fastest_size), default=None)
    if next_larger is None and fastest_size < largest:
        return min(2 * fastest_size, largest)
    if next_smaller is None and fastest_size > smallest:
        return max(fastest_size // 2, smallest)
    gap_by_middle = {
        (fastest_size + neighbour_size) // 2: abs(neighbour_size - fastest_size)
        for neighbour_size in (next_larger, next_smaller)
        if neighbour_size is not None
    }
    middle_size = max(gap_by_middle, key=lambda size: (gap_by_middle[size], size), default=None)
    if middle_size is None or gap_by_middle[middle_size] <= max(1, fastest_size // SMALLEST_GAP):
        return None
    return middle_size
