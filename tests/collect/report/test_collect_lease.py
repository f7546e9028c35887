"""The report on runs of leased machines: if a run was cut off when the lease ended, the report does not call it running."""

import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import support_collect as support

from collect import cli
from collect.reading.load import load_matrix
from shardlab.cluster.lease import Lease
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    """A workspace with a completed run, a started run whose records end at step 3, and a run that was only submitted."""
    made = Workspace(tmp_path)
    cells = [support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2)]
    support.completed(made, cells[0], 1)
    running, waiting = (support.prepare(made, one) for one in cells[1:])
    support.event(running, "submitted", -9)
    support.event(running, "started", 0)
    support.train(running, 3)
    support.event(waiting, "submitted", -9)
    support.keep(made, cells, 1)
    return made


def lend(workspace, ends):
    nodes = [{"name": "work1", "host": "w", "roles": ["worker"]}]
    lease = Lease(ends, ends - timedelta(hours=1), "manifest")
    path = inventory.inventory_path(workspace)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode({"schema": 1, "cluster": "c", "nodes": nodes, "lease": lease}))


def states(workspace):
    return {cell.cell.strategy: run.verdict.state for cell in load_matrix(workspace, None).cells for run in cell.runs}


def after_start(seconds):
    return datetime.fromtimestamp(support.START_S + seconds, UTC)


def test_runs_that_the_end_of_the_lease_cut_off_are_node_fail_in_the_report(workspace, capsys):
    assert states(workspace) == {"single": "completed", "ddp": "running", "fsdp2": "pending"}
    lend(workspace, after_start(60))
    assert states(workspace) == {"single": "completed", "ddp": "node_fail", "fsdp2": "node_fail"}
    assert cli.main(["summarize", "--json", "--workspace", str(workspace.path)]) == 0
    said = json.loads(capsys.readouterr().out)
    whys = {run["state"]: run["why"] for row in said["rows"] for run in row["runs"] if run["state"] != "completed"}
    assert set(whys) == {"node_fail"}
    assert whys["node_fail"].startswith("the lease of the nodes ended 20")


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (datetime(2131, 1, 1, tzinfo=UTC), "running"),  # the lease has not ended
        (after_start(0), "running"),  # the run has later records, so the lease was extended
        (after_start(3600), "unknown"),  # the records of the run end long before the lease
    ],
)
def test_a_run_is_not_called_cut_off_without_evidence(ends, state, workspace):
    lend(workspace, ends)
    assert states(workspace)["ddp"] == state
