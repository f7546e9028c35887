"""The metric `largest_batch`: the largest batch that fits into memory, as a search over batch sizes found it."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from shardlab.runs import search_path


def find_largest_batch(run: LoadedRun) -> Quantity | None:
    """The gpu_batch_size of a run, if a search found that this size is the largest that fits into memory.

    None for all other runs, and for all runs while the search goes on. None also if even the upper bound of the search fits
    into memory, because the largest batch is then not known.
    """
    search = run.run.search if run.run is not None else None
    cell = run.training_cell
    if search is None or search.goal != "largest_that_fits" or cell is None:
        return None
    followed_search = search_path.follow_search(run.folder.path.parent, cell, search, run.repeat)
    if followed_search.best is None or followed_search.best != cell.gpu_batch_size or followed_search.best == search.largest:
        return None
    return Quantity(followed_search.best, "items")


METRICS = (
    Metric(
        name="largest_batch",
        column=MetricColumn("summary", 25, "Largest batch that fits", 1),
        unit="items",
        direction="higher is better",
        definition="Largest gpu_batch_size at which the cell is not out of memory: the next larger size that was tried is, and "
        "no size lies between them. It is found by a search (docs/how-to/search-a-batch-size.md) and stands at the cell with "
        "this batch.",
        of_run=find_largest_batch,
        reads=Reads(run=("search", "cell.micro_batch_size", "cell.gradient_accumulation_steps", "cell.dp")),
        exact=True,
    ),
)
