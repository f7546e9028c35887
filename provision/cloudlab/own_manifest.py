"""Reads the manifest of the experiment on one of its nodes, where the command `geni-get manifest` prints it."""

from __future__ import annotations

import shutil
import subprocess

from shardlab.cloudlab import cloudlab_experiment, cloudlab_manifest
from shardlab.cloudlab.cloudlab_experiment import ExperimentNote
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.workspace.workspace import Workspace

MANIFEST_COMMAND = ("geni-get", "manifest")
TIMEOUT_S = 60.0


def is_experiment_node() -> bool:
    """Whether this machine is a node of an experiment."""
    return shutil.which(MANIFEST_COMMAND[0]) is not None


def read_own_manifest() -> bytes:
    """The manifest of this node's experiment. Raises InputError if the command fails."""
    command_text, file_advice = " ".join(MANIFEST_COMMAND), "Set cloudlab.manifest to a file instead."
    try:
        # Its path, because a folder in PATH that this user may not read would hide the reason why it cannot be executed.
        command = [shutil.which(MANIFEST_COMMAND[0]) or MANIFEST_COMMAND[0], *MANIFEST_COMMAND[1:]]
        geni_process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{command_text}: did not end within {TIMEOUT_S:g} s. {file_advice}") from None
    except OSError as error:  # the command cannot be started, for example because its interpreter is missing
        raise InputError(f"{command_text}: cannot be executed ({error.strerror}). {file_advice}") from None
    if geni_process.returncode != 0:
        error_text = geni_process.stderr.decode("utf-8", "replace").strip()[-500:]
        raise InputError(f"{command_text}: exit code {geni_process.returncode}: {error_text}. {file_advice}")
    return geni_process.stdout


def store_own_manifest(cluster: Cluster, workspace: Workspace) -> None:
    """Store this node's manifest in the workspace, for other commands. Raises InputError.

    The note about the experiment in the workspace says that `provision` did not create the experiment.
    """
    manifest_bytes = read_own_manifest()
    experiment = cloudlab_manifest.parse_manifests([(" ".join(MANIFEST_COMMAND), manifest_bytes)])
    cloudlab_experiment.write_note(
        workspace.shardlab_folder, ExperimentNote(schema=cloudlab_experiment.SCHEMA, name=cluster.name, created_by_us=False)
    )
    cloudlab_experiment.store_manifests(workspace.shardlab_folder, {experiment.nodes[0].site: manifest_bytes})
