"""A search for a batch size on nodes without Slurm: all tries run on the nodes of the first try; no other run gets them."""

from pathlib import Path

import pytest
from support_search import SearchedWorkspace
from support_ssh_nodes import SshNodes, wait_for

from jobs.planning import plan
from jobs.rendering import frozen_source, render
from shardlab.cluster import cluster

FILE = """\
schema: 1
name: c
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1}, {name: gpu1, host: 10.9.9.2}]
storage: {shared: SHARED}
ssh: {between_nodes: true}
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    made = SshNodes(tmp_path, monkeypatch)
    yield made
    made.end()


def test_all_tries_of_a_search_run_on_the_nodes_of_the_first_try(nodes, tmp_path):
    searched = SearchedWorkspace(tmp_path, "ssh.sh")
    (tmp_path / "c.yaml").write_text(FILE.replace("SHARED", str(tmp_path)))
    planned = plan.plan_matrix(
        searched.workspace, str(searched.matrix), cluster.load_cluster(tmp_path / "c.yaml"), where=None, repeats=None
    )
    frozen_source.freeze_source(Path(planned.context.source))
    first = render.write_run_folder(
        render.make_run(planned.cells[0], 1, 1, planned.context), searched.workspace.runs, planned.context
    )
    held = searched.flag("holds-4")
    nodes.submit(first)
    at_work = searched.when_started(4)
    both = nodes.run(7, 2, "true")
    nodes.submit(both)
    wait_for(both, "queued")  # this run needs both nodes, and the search still uses one of them
    held.unlink()
    wait_for(both, "exited")
    tries = [folder for folder in searched.folders() if folder.read_run().search is not None]
    ends = [(folder.read_run().cell.micro_batch_size, folder.judge().state) for folder in tries]
    assert ends == [(1, "completed"), (2, "completed"), (4, "oom"), (3, "oom")]
    assert {(folder.path / "ranks").read_text() for folder in tries} == {(at_work.path / "ranks").read_text()} != {""}
    started = next(event for event in both.read_events() if event.event == "started")
    assert all(event.wall_s < started.wall_s for folder in tries for event in folder.read_events() if event.event == "exited")
