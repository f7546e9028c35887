"""Terminates an experiment that this workspace created. Any other experiment is only forgotten, not terminated."""

from __future__ import annotations

import subprocess
import time

import msgspec

from provision.cloudlab import creation, waiting
from provision.cloudlab.portal import NoExperiment, OutcomeUnknown, Portal, refusal_as_input_error
from shardlab.cloudlab import cloudlab_experiment
from shardlab.cloudlab.cloudlab_experiment import ExperimentNote
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.errors import ShardlabError
from shardlab.files import files, json_file
from shardlab.remote import remote_workspace
from shardlab.runs.run import RUN_ID
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

POLL_S = 5.0
MOST_WAIT_S = 900.0
MOST_RUNS = 20  # the most runs that the warning names


class ClusterRun(msgspec.Struct, frozen=True):
    """A run on the cluster, as `jobs status --json` prints it."""

    id: str
    state: str

    @property
    def may_have_results(self) -> bool:
        """Whether the run may have results on the cluster. False for an invalid id, because a node states the id."""
        return self.state != "planned" and RUN_ID.fullmatch(self.id) is not None


class ClusterRuns(msgspec.Struct, frozen=True):
    """The part of the output of `jobs status --json` that this module reads."""

    runs: list[ClusterRun]


class FetchedManifest(msgspec.Struct, frozen=True):
    """The part of a run's manifest.json that says whether all files of the run are on this machine."""

    complete: bool


def terminate_experiment(cluster: Cluster, workspace: Workspace, portal: Portal, output: Output) -> str:
    """Terminate the experiment, wait until it no longer exists at the portal, and rename its note and manifests.

    Returns a sentence for the user. Raises ShardlabError.
    """
    note = cloudlab_experiment.read_note(workspace.shardlab_folder)
    assert note is not None  # the caller has read the note and asked the user for a confirmation
    assert note.created_by_us
    with refusal_as_input_error():
        experiment = creation.find_created(note, workspace, portal) if note.uuid is None else portal.find_experiment(note.uuid)
    if experiment is None:
        _forget_experiment(cluster, workspace)
        return (
            f"the experiment {note.name} no longer exists at the portal; its note was put away in {workspace.shardlab_folder}."
        )
    experiment_uuid = note.uuid or experiment.id
    try:
        with refusal_as_input_error():
            portal.request_termination(experiment_uuid)
    except NoExperiment:
        pass
    except OutcomeUnknown as error:
        output.print_remark(f"{error} Looking whether the experiment still exists.")
    deadline = time.monotonic() + MOST_WAIT_S
    with waiting.show_waiting(output, f"waiting for the end of the experiment {note.name}") as show_text:
        while (experiment := portal.find_experiment(experiment_uuid)) is not None:
            if time.monotonic() > deadline:
                raise ShardlabError(
                    f"the experiment {note.name} still exists {MOST_WAIT_S / 60:.0f} min after it was told to end, with the "
                    "status " + f"{experiment.status}. Run the same command again."
                )
            show_text(f"experiment {experiment.status or 'unknown'}")
            portal.pause(POLL_S)
    _forget_experiment(cluster, workspace)
    return (
        f"terminated the experiment {note.name} ({experiment_uuid}); its note and its manifests were put away in "
        f"{workspace.shardlab_folder}."
    )


def leave_experiment(cluster: Cluster, workspace: Workspace, note: ExperimentNote) -> str:
    """Rename the note and the manifests of an experiment that `provision` did not create. Raises WorkspaceError.

    Returns a sentence for the user.
    """
    _forget_experiment(cluster, workspace)
    return (
        f"provision did not create the experiment {note.name}, so it was not terminated: do this on its page at the portal. "
        f"Its note and its manifests were put away in {workspace.shardlab_folder}."
    )


def describe_unfetched_runs(workspace: Workspace) -> str:
    """A warning about runs on the cluster whose files are not completely on this machine; empty if there are no such runs."""
    remote_note = remote_workspace.read_remote_workspace(workspace)
    if remote_note is None:
        return ""
    try:
        cluster_runs = remote_note.ask_command("jobs", ["status"], ClusterRuns).runs
    except (ShardlabError, OSError, subprocess.SubprocessError) as error:
        return f"The cluster does not say which runs it has ({error}). Runs that were not fetched are lost."
    run_ids = sorted(run.id for run in cluster_runs if run.may_have_results and not _is_fetched(workspace, run.id))
    if not run_ids:
        return ""
    runs_text = ", ".join(run_ids[:MOST_RUNS]) + (f" and {len(run_ids) - MOST_RUNS} more" if len(run_ids) > MOST_RUNS else "")
    return f"{len(run_ids)} run(s) were not fetched and would be lost: {runs_text}. To fetch them, run: collect fetch"


def _is_fetched(workspace: Workspace, run_id: str) -> bool:
    fetched_manifest = json_file.read_json_if_valid(workspace.runs / run_id / "manifest.json", FetchedManifest)
    return fetched_manifest is not None and fetched_manifest.complete


def _forget_experiment(cluster: Cluster, workspace: Workspace) -> None:
    """Rename the note and the manifests of the experiment, and remove the nodes' host keys from known_hosts.

    When CloudLab lends these machines again, the machines have new host keys.
    """
    known_hosts = workspace.shardlab_folder / "known_hosts"
    if known_hosts.exists():
        removed_hosts = {_format_known_hosts_name(node) for node in cluster.nodes}
        known_hosts_lines = files.read(known_hosts).decode(errors="replace").splitlines(keepends=True)
        kept_lines = [host_line for host_line in known_hosts_lines if host_line.split(" ")[0] not in removed_hosts]
        files.write_atomic(known_hosts, "".join(kept_lines).encode())
    cloudlab_experiment.put_experiment_aside(workspace.shardlab_folder)


def _format_known_hosts_name(node: NodeEntry) -> str:
    return f"[{node.host}]:{node.port}" if node.port not in (None, 22) else str(node.host)
