"""The order in which parts are given changes no result: keys of records, rows of a summary, events of a run, lines of logs.

JSON files, dictionaries and answers of several machines come in any order. test_folder_order holds the order of folders, and
test_order_of_sets that of sets.
"""

import json
import types
from pathlib import Path

import msgspec
import pytest
import support_collect as support

from collect import summary
from collect.choices import contest
from collect.comparison import environment
from collect.reading import load
from collect.traces import file_figures
from jobs.status import reconcile
from provision.facts import nvidia
from shardlab.files.plugin_source import PluginSource
from shardlab.hardware.nccl_log import NcclTransports
from shardlab.runs.record import Event

TRANSPORTS = {"NET/Socket": 2, "SHM": 1, "NET/IB": 3}
CONTENTS = {"squares.py": b"a", "_helper.py": b"b", "_circle.py": b"c"}
EVENTS = [("started", 10.0), ("exited", 20.0), ("started", 30.0), ("exited", 40.0)]
VERSIONS = ("580.65.06", "570.86.10", "575.57.08")


def describe_driver_versions(versions):
    """The refusal of GPUs with several driver versions."""
    rows = "".join(f"gpu={version}, Enabled, Disabled, Enabled, NVIDIA X, GPU-{version}\n" for version in versions)
    with pytest.raises(ValueError, match="several driver versions") as refused:
        nvidia.parse(rows)
    return str(refused.value)


def find_span(events):
    made = [Event(schema=1, event=name, writer="attempt", wall_s=wall_s, host="n") for name, wall_s in events]
    return reconcile.find_run_span(made, "completed")


def sort_figures(ranks):
    figures = [types.SimpleNamespace(rank=rank, path=f"rank-{rank}.json") for rank in ranks]
    return [one.path for one in file_figures.sort_by_rank(figures)]


# What is computed: a function, and the parts that it is given in one order and in the reverse order.
RESULTS = {
    "the digest of a plug-in": (lambda items: PluginSource(Path("x.py"), dict(items)).digest, CONTENTS.items()),
    "the transports of NCCL": (lambda items: NcclTransports(dict(items)).describe(), TRANSPORTS.items()),
    "the span of a run": (find_span, EVENTS),
    "the files of traces": (sort_figures, [10, None, 2, 1]),
    "versions of a driver": (describe_driver_versions, VERSIONS),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_the_same_in_whatever_order_parts_are_given(name):
    compute, parts = RESULTS[name]
    assert compute(list(parts)) == compute(list(parts)[::-1])


def test_contests_do_not_depend_on_the_order_of_rows(tmp_path):
    rows = summary.summarize(load.load_matrix(support.matrix(tmp_path), None), "single").rows
    assert contest.list_contenders(rows) == contest.list_contenders(rows[::-1])
    grouped = [
        [(group.workload, group.values_text, {size: {row.id for row in of_size} for size, of_size in group.contests.items()})
         for group in contest.group_comparable_cells(order)] for order in (rows, rows[::-1])
    ]  # fmt: skip
    assert grouped[0] == grouped[1]


def reverse_keys(value):
    """A JSON document with the keys of each object in the reverse order."""
    if isinstance(value, dict):
        return {key: reverse_keys(value[key]) for key in reversed(value)}
    return [reverse_keys(entry) for entry in value] if isinstance(value, list) else value


def test_the_order_of_keys_in_records_changes_no_summary(tmp_path):
    workspace = support.matrix(tmp_path)
    results = []
    for _ in range(2):
        loaded = load.load_matrix(workspace, None)
        properties = environment.collect_properties(run for cell in loaded.cells for run in cell.runs)
        summarized = msgspec.to_builtins(summary.summarize(loaded, "single")) | {"created_s": 0.0}
        results.append((list(properties.items()), json.dumps(summarized, sort_keys=True)))
        for path in [*workspace.runs.glob("*/*.json"), *workspace.runs.glob("*/env/*.json")]:
            path.write_text(json.dumps(reverse_keys(json.loads(path.read_text()))))
    assert results[0] == results[1]
