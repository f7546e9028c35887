"""Plans the searches of a matrix for the largest or fastest batch size: the size of the first try, and the bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from jobs.planning import plan_predictions
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.cluster.cluster import Cluster
from shardlab.matrix import batch_search
from shardlab.matrix.batch_search import BatchSearch
from shardlab.matrix.cell import AnyCell, Cell, select_trainings
from shardlab.matrix.matrix import Matrix
from shardlab.runs.prediction import Prediction
from shardlab.workspace.workspace import Workspace

BOUND_FACTOR = 16  # without `at_most`, a search goes up to this many times the size that the planner predicts to fit
FIRST_TRY_NOTE = "of a search, a run, its time and its predictions are those of the first try; GPU hours count the most tries."
LARGEST_TINY_BATCH = 8  # of a pass with `--scale tiny`: a tiny twin runs out of memory at no size


class PlannedSearches(msgspec.Struct, frozen=True):
    """The searches of a matrix."""

    first_try_cells: list[AnyCell]
    """The cell of the first try of each search, in the order of the matrix."""
    search_by_family: dict[str, BatchSearch]
    """Each search by the text that `batch_search.compute_search_hash` gives for all cells of the search."""


def plan_searches(
    workspace: Workspace, matrix: Matrix, all_cells: Sequence[AnyCell], cluster: Cluster, stored_name: str, plugins: OwnPlugins
) -> PlannedSearches:
    """Plan a search for each cell of a matrix. If the matrix asks for no search, returns the cells unchanged and no searches.

    all_cells: all cells of the matrix, or their tiny twins. cluster: the cluster. stored_name: the name under which the
    workspace keeps the matrix. A search that was submitted before keeps the size of its first try, so that its tries stay the
    same. Raises InputError if a search has no upper bound, or if shardlab does not train a cell.
    """
    if matrix.file.search is None:
        return PlannedSearches(list(all_cells), {})
    cells = select_trainings(all_cells)
    if len(cells) < len(all_cells):
        raise matrix.document.error(("search",), "the batch size of a command cannot be searched: its arguments decide it.")
    earlier_searches = _read_earlier_searches(workspace, stored_name)
    prediction_by_cell = plan_predictions.predict_cells(workspace, cluster, cells, {})
    searches = {}
    for cell in cells:
        planned_search = _plan_search(matrix, cell, prediction_by_cell[cell.name()], plugins)
        earlier_search = earlier_searches.get(batch_search.compute_search_hash(cell))
        if (
            earlier_search is not None
            and earlier_search.goal == planned_search.goal
            and planned_search.smallest <= earlier_search.start <= planned_search.largest
        ):
            planned_search = msgspec.structs.replace(planned_search, start=earlier_search.start)
        searches[batch_search.compute_search_hash(cell)] = planned_search
    first_tries = [batch_search.try_cell(cell, searches[batch_search.compute_search_hash(cell)].start) for cell in cells]
    return PlannedSearches([_expect_oom(cell) for cell in first_tries], searches)


def describe_searches(
    cells: Sequence[AnyCell], search_by_family: Mapping[str, BatchSearch], prediction_by_cell: Mapping[str, Prediction]
) -> list[str]:
    """A sentence for each search: its start, why it starts there, its bound, and how many tries it needs at most. The last
    sentence says that the other numbers of the plan are about the first tries only. Returns no sentences without a search.

    cells: the first cells of the searches. prediction_by_cell: the predictions for these cells, by name.
    """
    search_sentences = []
    for cell in select_trainings(cells):
        if (search := search_by_family.get(batch_search.compute_search_hash(cell))) is None:
            continue
        likely_micro_batch = prediction_by_cell[cell.name()].largest_micro_batch if cell.name() in prediction_by_cell else None
        start_reason = (
            "the planner predicts nothing"
            if likely_micro_batch is None
            else f"{likely_micro_batch * search.unit} is likely to fit"
        )
        search_sentences.append(
            f"search of {search.description}: {cell.name()}: starts at {search.start} ({start_reason}), up to "
            f"{search.largest}, at most {search.most_tries} tries, one after another in one job."
        )
    return [*search_sentences, FIRST_TRY_NOTE] if search_sentences else []


def _read_earlier_searches(workspace: Workspace, stored_name: str) -> dict[str, BatchSearch]:
    """The searches of this matrix when it was last rendered, by the text that `batch_search.compute_search_hash` gives."""
    if stored_name not in workspace.list_matrix_names():
        return {}
    expanded_cells = workspace.read_expansion(stored_name).cells
    return {
        batch_search.compute_search_hash(expanded_cell.cell.require_training()): expanded_cell.search
        for expanded_cell in expanded_cells
        if expanded_cell.search is not None
    }


def _plan_search(matrix: Matrix, cell: Cell, cell_prediction: Prediction, plugins: OwnPlugins) -> BatchSearch:
    """Plan the search for one cell, as if no search had been submitted before. Raises InputError."""
    search_request = matrix.file.search
    assert search_request is not None
    pass_count = cell.gradient_accumulation_steps
    smallest_micro_batch = batch_search.PLACEHOLDER_SIZE if _is_refused(batch_search.try_cell(cell, pass_count), plugins) else 1
    likely_micro_batch = cell_prediction.largest_micro_batch
    if cell.rehearses is not None:
        largest_micro_batch = LARGEST_TINY_BATCH
    elif search_request.at_most is not None:
        largest_micro_batch = search_request.at_most // pass_count
    elif likely_micro_batch:
        largest_micro_batch = BOUND_FACTOR * likely_micro_batch
    else:
        problem_sentence = (
            f"found no at_most, and the planner does not know which batch fits {cell.strategy} on "
            f"{cell.gpus} rank(s) ({cell_prediction.how}). Allowed: at_most, the largest value that is tried."
        )
        raise matrix.document.error(("search",), problem_sentence)
    if largest_micro_batch < smallest_micro_batch:
        smallest_size = smallest_micro_batch * pass_count
        problem_sentence = (
            f"found {search_request.at_most}. Allowed for {cell.strategy} with {pass_count} pass(es): {smallest_size} or more."
        )
        raise matrix.document.error(("search", "at_most"), problem_sentence)
    power_of_two = 1 << (max(likely_micro_batch or 1, 1).bit_length() - 1)  # the largest power of two that is likely to fit
    start_micro_batch = min(max(power_of_two, smallest_micro_batch), largest_micro_batch)
    return BatchSearch(
        search_request.key,
        search_request.goal,
        start_micro_batch * pass_count,
        smallest_micro_batch * pass_count,
        largest_micro_batch * pass_count,
        pass_count,
    )


def _is_refused(cell: Cell, plugins: OwnPlugins) -> bool:
    workload, strategy = plugins.make_workload_menu()[cell.workload], plugins.make_strategy_menu()[cell.strategy]
    return workload.refuse(cell) is not None or strategy.refuse(cell) is not None


def _expect_oom(cell: Cell) -> Cell:
    """The cell, with `oom` added to its expected ends: a try that runs out of memory shows a search where the limit is."""
    return cell if "oom" in cell.expect else msgspec.structs.replace(cell, expect=[*cell.expect, "oom"])
