"""Each strategy, launcher, data set, export format, workload and metric has a row in a table of a page in docs/.

The rows of workloads and metrics on docs/menus.md are generated; all other rows are written by hand.
"""

import re
from pathlib import Path

import pytest
from support_golden import same_as_golden

from collect import metric
from collect.export import load_export_formats
from jobs.launcher import load_launchers
from trainers import menu
from trainers.data import data_sets

DOCS = Path(__file__).parents[2] / "docs"
BY_HAND = {
    "strategies.md": menu.load_strategies(),
    "launchers.md": load_launchers(),
    "data.md": {*data_sets.IMAGE_DATA_SETS, *data_sets.TOKEN_DATA_SETS},
    "exports.md": load_export_formats(),
}
MENUS = """# Workloads and metrics

`make golden` writes this page from the menus (`jobs workloads`, `collect metrics`).

| workload | what it is | parameters | unit |
|---|---|---|---|
{workloads}

| metric | unit | direction | definition |
|---|---|---|---|
{metrics}
"""


@pytest.mark.parametrize("page", BY_HAND)
def test_each_name_is_in_a_row_of_its_page(page):
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    missing = set(BY_HAND[page]) - {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert not missing, f"docs/{page} has no row for {', '.join(sorted(missing))}"


def test_workloads_and_metrics_are_on_a_page_of_their_own():
    workloads = [f"| `{w.name}` | {w.summary} | {w.parameters:,} | {w.unit} |" for w in menu.load_workloads().values()]
    of_metrics = [f"| `{m.name}` | {m.unit} | {m.direction} | {m.definition} |" for m in metric.load_metrics()]
    same_as_golden("../../docs/menus.md", MENUS.format(workloads="\n".join(workloads), metrics="\n".join(of_metrics)))
