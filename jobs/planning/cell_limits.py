"""Reads the keys `time_limit` and `hang_limit` of a cell, and checks how its ranks are divided among nodes.

The time limit of a cell without the key, and Slurm's margin: jobs/rendering/sbatch_options.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jobs.launcher import Launcher
from shardlab.matrix import cell_sizes
from shardlab.matrix.cell import AnyCell, Draft

AddProblem = Callable[[str, str], None]  # adds a problem of a cell; arguments: the key of the matrix, and a sentence


def parse_limits(draft: Draft, add_problem: AddProblem) -> tuple[int | None, int]:
    """The time limit (None if the draft has none) and the hang limit, in seconds."""
    limit_s_by_key: dict[str, int] = {}
    for limit_key, limit_text in (("time_limit", draft.time_limit), ("hang_limit", draft.hang_limit)):
        try:
            limit_s_by_key |= {} if limit_text is None else {limit_key: cell_sizes.parse_seconds(limit_text)}
        except ValueError as error:
            add_problem(limit_key, str(error))
    # The hang limit is 0 only if a problem was added; then no cell is made.
    return limit_s_by_key.get("time_limit"), limit_s_by_key.get("hang_limit", 0)


def count_fewest_nodes(draft: Draft, launcher: Launcher, gpus_per_node: int | None) -> int:
    return math.ceil(draft.gpus / gpus_per_node) if gpus_per_node and launcher.several_nodes else 1


def explain_uneven_ranks(cell: AnyCell, launcher: Launcher) -> str | None:
    if cell.nnodes > 1 and not launcher.several_nodes:
        return f"{launcher.name} starts ranks on one node only. Allowed: nnodes: 1, or another launcher."
    if cell.world_size % cell.nnodes:
        servers_clause = f" and {cell.servers} parameter server(s)" if cell.servers else ""
        return f"{cell.gpus} ranks{servers_clause} cannot be divided evenly among {cell.nnodes} nodes."
    return None
