"""Waits until all nodes of an experiment are ready, and shows the states of the nodes while it waits."""

from __future__ import annotations

import time

from provision.cloudlab import waiting
from provision.cloudlab.portal import Portal
from provision.cloudlab.portal_answers import ENDED_STATES, PortalExperiment
from shardlab.cloudlab.cloudlab_experiment import ExperimentNote
from shardlab.cluster import lease
from shardlab.errors import ShardlabError
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

POLL_S = 15.0
MOST_WAIT_S = 3600.0
DOWN_COMMAND = "provision CLUSTER.yaml down"


def wait_until_ready(note: ExperimentNote, workspace: Workspace, portal: Portal, output: Output) -> PortalExperiment:
    """Wait until all nodes of the experiment are ready, and return the experiment.

    Raises ShardlabError if the experiment fails, ends, or is not ready after MOST_WAIT_S.
    """
    deadline = time.monotonic() + MOST_WAIT_S
    with waiting.show_waiting(output, f"waiting for the nodes of the experiment {note.name}") as show_text:
        while True:
            experiment = fetch_experiment(note, workspace, portal)
            unready = {node.client_id or "a node without a name": node.missing for node in experiment.nodes if node.missing}
            failed_names = [node.client_id or "a node without a name" for node in experiment.nodes if node.has_failed]
            if experiment.status in ENDED_STATES or failed_names:
                raise ShardlabError(
                    f"the experiment {note.name} has failed: its status is {experiment.status}"
                    + (f", and these nodes failed: {', '.join(failed_names)}" if failed_names else "")
                    + f". The portal says why{f' at {experiment.url}' if experiment.url else ''}, such as too few free nodes, "
                    f"or no such image. To end it: {DOWN_COMMAND}"
                )
            if experiment.status == "ready" and experiment.nodes and not unready:
                return experiment
            if time.monotonic() > deadline:
                state = _describe_state(experiment, unready)
                raise ShardlabError(
                    f"the experiment {note.name} is not ready after {MOST_WAIT_S / 60:.0f} min: {state}. It still exists. "
                    f" To wait on, run the same command again; to end it: {DOWN_COMMAND}"
                )
            show_text(_describe_state(experiment, unready))
            portal.pause(POLL_S)


def fetch_experiment(note: ExperimentNote, workspace: Workspace, portal: Portal) -> PortalExperiment:
    """Ask the portal for the experiment of the note. Raises PortalError, and ShardlabError if the experiment is gone."""
    assert note.uuid is not None
    experiment = portal.find_experiment(note.uuid)
    if experiment is None:
        last_lease = lease.read_newest_lease(workspace.shardlab_folder, [])
        end = f" It was to end at {moments.format_time(last_lease.expires)}." if last_lease is not None else ""
        raise ShardlabError(
            f"the experiment {note.name} ({note.uuid}) no longer exists at the portal.{end} To remove its note and its "
            f"manifests from this workspace: {DOWN_COMMAND}"
        )
    return experiment


def _describe_state(experiment: PortalExperiment, unready: dict[str, str]) -> str:
    """The state of the experiment in a line, such as `experiment provisioning, 1 of 2 nodes ready; gpu1: rawstate BOOTING`.

    unready: for each node that is not ready, by name, the states that are not ready yet.
    """
    node_texts = [f"{name}: {lacks}" for name, lacks in list(unready.items())[:3]] + (["..."] if len(unready) > 3 else [])
    nodes = len(experiment.nodes)
    ready_text = f"{nodes - len(unready)} of {nodes} nodes ready" if nodes else "no nodes yet"
    return "; ".join([f"experiment {experiment.status or 'unknown'}, {ready_text}", *node_texts])
