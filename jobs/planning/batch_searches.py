"""Plans the searches of a matrix for the largest or fastest batch size: the size of the first try, and the bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from jobs.planning import plan_predictions
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.cluster.cluster import Cluster
from shardlab.matrix import batch_search
from shardlab.matrix.batch_search import BatchSearch
from shardlab.matrix.cell import Cell
from shardlab.matrix.matrix import Matrix
from shardlab.runs.prediction import Prediction
from shardlab.workspace.workspace import Workspace

BOUND_FACTOR = 16  # without `at_most`, a search goes up to this many times the size that the planner predicts to fit
FIRST_TRY_NOTE = "of a search, a run, its time and its predictions are those of the first try; GPU hours count the most tries."
LARGEST_TINY_BATCH = 8  # of a pass with `--scale tiny`: a tiny twin runs out of memory at no size


class PlannedSearches(msgspec.Struct, frozen=True):
    """The searches of a matrix."""

    cells: list[Cell]
    """The cell of the first try of each search, in the order of the matrix."""
    searches: dict[str, BatchSearch]
    """Each search by the text that `batch_search.search_family_hash` gives for all cells of the search."""


def plan_searches(
    workspace: Workspace, matrix: Matrix, cells: Sequence[Cell], cluster: Cluster, runs_as: str, plugins: OwnPlugins
) -> PlannedSearches:
    """Plan a search for each cell of a matrix. If the matrix asks for no search, returns the cells unchanged and no searches.

    cells: all cells of the matrix, or their tiny twins. cluster: the cluster. runs_as: the name under which the workspace keeps
    the matrix. A search that was submitted before keeps the size of its first try, so that its tries stay the same. Raises
    InputError if a search has no upper bound.
    """
    if matrix.file.search is None:
        return PlannedSearches(list(cells), {})
    earlier_searches = _read_earlier_searches(workspace, runs_as)
    predictions = plan_predictions.predict_cells(workspace, cluster, cells, {})
    searches = {}
    for cell in cells:
        search = _plan_search(matrix, cell, predictions[cell.name()], plugins)
        earlier = earlier_searches.get(batch_search.search_family_hash(cell))
        if earlier is not None and earlier.goal == search.goal and search.smallest <= earlier.start <= search.largest:
            search = msgspec.structs.replace(search, start=earlier.start)
        searches[batch_search.search_family_hash(cell)] = search
    first_tries = [batch_search.try_cell(cell, searches[batch_search.search_family_hash(cell)].start) for cell in cells]
    return PlannedSearches([_expect_oom(cell) for cell in first_tries], searches)


def describe_searches(
    cells: Sequence[Cell], searches: Mapping[str, BatchSearch], predictions: Mapping[str, Prediction]
) -> list[str]:
    """A sentence for each search: its start, why it starts there, its bound, and how many tries it needs at most. The last
    sentence says that the other numbers of the plan are about the first tries only. Returns no sentences without a search.

    cells: the first cells of the searches. predictions: the predictions for these cells, by name.
    """
    search_sentences = []
    for cell in cells:
        if (search := searches.get(batch_search.search_family_hash(cell))) is None:
            continue
        likely = predictions[cell.name()].largest_micro_batch if cell.name() in predictions else None
        why = "the planner predicts nothing" if likely is None else f"{likely * search.unit} is likely to fit"
        search_sentences.append(
            f"search of {search.description}: {cell.name()}: starts at {search.start} ({why}), up to {search.largest}, at most "
            f"{search.most_tries} tries, one after another in one job."
        )
    return [*search_sentences, FIRST_TRY_NOTE] if search_sentences else []


def _read_earlier_searches(workspace: Workspace, runs_as: str) -> dict[str, BatchSearch]:
    """The searches of this matrix when it was last rendered, by the text that `batch_search.search_family_hash` gives."""
    if runs_as not in workspace.matrix_names():
        return {}
    cells = workspace.read_expansion(runs_as).cells
    return {batch_search.search_family_hash(entry.cell): entry.search for entry in cells if entry.search is not None}


def _plan_search(matrix: Matrix, cell: Cell, cell_prediction: Prediction, plugins: OwnPlugins) -> BatchSearch:
    """Plan the search for one cell, as if no search had been submitted before. Raises InputError."""
    request = matrix.file.search
    assert request is not None
    unit = cell.gradient_accumulation_steps
    smallest = batch_search.PLACEHOLDER_SIZE if _is_refused(batch_search.try_cell(cell, unit), plugins) else 1
    likely = cell_prediction.largest_micro_batch
    if cell.rehearses is not None:
        largest = LARGEST_TINY_BATCH
    elif request.at_most is not None:
        largest = request.at_most // unit
    elif likely:
        largest = BOUND_FACTOR * likely
    else:
        sentence = (
            f"found no at_most, and the planner does not know which batch fits {cell.strategy} on {cell.gpus} rank(s) "
            f"({cell_prediction.how}). Allowed: at_most, the largest value that is tried."
        )
        raise matrix.document.error(("search",), sentence)
    if largest < smallest:
        sentence = f"found {request.at_most}. Allowed for {cell.strategy} with {unit} pass(es): {smallest * unit} or more."
        raise matrix.document.error(("search", "at_most"), sentence)
    power_of_two = 1 << (max(likely or 1, 1).bit_length() - 1)  # the largest power of two that is likely to fit
    start = min(max(power_of_two, smallest), largest)
    return BatchSearch(request.key, request.goal, start * unit, smallest * unit, largest * unit, unit)


def _is_refused(cell: Cell, plugins: OwnPlugins) -> bool:
    refusals = plugins.workload_menu()[cell.workload].refuse(cell), plugins.strategy_menu()[cell.strategy].refuse(cell)
    return any(why is not None for why in refusals)


def _expect_oom(cell: Cell) -> Cell:
    """The cell, with `oom` added to its expected ends: a try that runs out of memory shows a search where the limit is."""
    return cell if "oom" in cell.expect else msgspec.structs.replace(cell, expect=[*cell.expect, "oom"])
