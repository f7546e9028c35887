"""Waits until all nodes of an experiment are ready, and shows the states of the nodes while it waits."""

from __future__ import annotations

import time

from provision.cloudlab import waiting
from provision.cloudlab.portal import Portal
from provision.cloudlab.portal_answers import ENDED, PortalExperiment
from shardlab.cloudlab.cloudlab_experiment import ExperimentNote
from shardlab.cluster import lease
from shardlab.errors import ShardlabError
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

POLL_S = 15.0
MOST_WAIT_S = 3600.0
DOWN = "provision CLUSTER.yaml down"


def wait(note: ExperimentNote, workspace: Workspace, portal: Portal, output: Output) -> PortalExperiment:
    """Wait until all nodes of the experiment are ready, and return the experiment.

    Raises ShardlabError if the experiment fails, ends, or is not ready after MOST_WAIT_S.
    """
    ends = time.monotonic() + MOST_WAIT_S
    with waiting.shown(output, f"waiting for the nodes of the experiment {note.name}") as show:
        while True:
            found = existing(note, workspace, portal)
            late = {node.client_id or "a node without a name": node.lacks for node in found.nodes if node.lacks}
            failed = [node.client_id or "a node without a name" for node in found.nodes if node.has_failed]
            if found.status in ENDED or failed:
                raise ShardlabError(
                    f"the experiment {note.name} has failed: its status is {found.status}"
                    + (f", and these nodes failed: {', '.join(failed)}" if failed else "")
                    + f". The portal says why{f' at {found.url}' if found.url else ''}, such as too few free nodes, or no such "
                    f"image. To end it: {DOWN}"
                )
            if found.status == "ready" and found.nodes and not late:
                return found
            if time.monotonic() > ends:
                raise ShardlabError(
                    f"the experiment {note.name} is not ready after {MOST_WAIT_S / 60:.0f} min: {_state(found, late)}. It "
                    f"still exists. To wait on, run the same command again; to end it: {DOWN}"
                )
            show(_state(found, late))
            portal.pause(POLL_S)


def existing(note: ExperimentNote, workspace: Workspace, portal: Portal) -> PortalExperiment:
    """Ask the portal for the experiment of the note. Raises PortalError, and ShardlabError if the experiment is gone."""
    assert note.uuid is not None
    found = portal.experiment(note.uuid)
    if found is None:
        known = lease.newest(workspace.own, [])
        end = f" It was to end at {moments.in_words(known.expires)}." if known is not None else ""
        raise ShardlabError(
            f"the experiment {note.name} ({note.uuid}) no longer exists at the portal.{end} To remove its note and its "
            f"manifests from this workspace: {DOWN}"
        )
    return found


def _state(found: PortalExperiment, late: dict[str, str]) -> str:
    """The state of the experiment in a line, such as `experiment provisioning, 1 of 2 nodes ready; gpu1: rawstate BOOTING`.

    late: for each node that is not ready, by name, the states that are not ready yet.
    """
    shown = [f"{name}: {lacks}" for name, lacks in list(late.items())[:3]] + (["..."] if len(late) > 3 else [])
    nodes = len(found.nodes)
    of_nodes = f"{nodes - len(late)} of {nodes} nodes ready" if nodes else "no nodes yet"
    return "; ".join([f"experiment {found.status or 'unknown'}, {of_nodes}", *shown])
