"""The Python environment in which a run trains: its interpreter, and the packages that it has when the run is submitted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

ANSWER_S = 120.0  # importing shardlab from a cold network disk takes long
ENVIRONMENT_PROGRAM = """\
import json, sys
from shardlab.files import source_digest
from shardlab.hardware import host
versions = {**host.read_package_versions(), "python": sys.version.split()[0]}
print(json.dumps({"packages": source_digest.digest_installed_packages(), "versions": versions}))
"""


class PythonEnvironment(msgspec.Struct, frozen=True):
    """A Python environment, as runs record it."""

    packages: str
    """The digest of the installed packages."""
    versions: dict[str, str]
    """The versions of packages by name."""
    python: str | None = None
    """The path of the interpreter; None: the default environment, in which this process runs."""


def read_environment(workspace: Workspace, cluster: Cluster, name: str) -> PythonEnvironment:
    """The environment with this name under `environments` of the cluster file, for runs that this machine starts. Raises
    InputError if `provision` has not made it as the cluster file says, or if its interpreter is gone or does not start."""
    python = inventory.find_environment(workspace, cluster, name).python
    try:
        result = subprocess.run([python, "-P", "-c", ENVIRONMENT_PROGRAM], capture_output=True, timeout=ANSWER_S, check=True)
        return msgspec.structs.replace(msgspec.json.decode(result.stdout, type=PythonEnvironment), python=python)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        output = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip() or getattr(error, "strerror", None)
        why = (output or str(error)).splitlines()[-1]
        raise InputError(f"the environment {name}: {python} does not start: {why}. Run: provision CLUSTER.yaml") from None


def find_interpreter(workspace: Workspace, cluster: Cluster, name: str | None) -> str | None:
    """The interpreter of an environment if this machine has it; else None. name: as in a cell."""
    try:
        python = None if name is None else inventory.find_environment(workspace, cluster, name).python
    except InputError:  # `explain_missing` says why
        return None
    return python if python is not None and Path(python).exists() else None


def explain_missing(workspace: Workspace, cluster: Cluster, needed_names: set[str]) -> list[str]:
    """A sentence for each environment of the cluster file that `provision` has not made as the file says. needed_names: the
    environments that are needed."""
    sentences = []
    for name in sorted(needed_names.intersection(cluster.environments)):
        try:
            inventory.find_environment(workspace, cluster, name)
        except InputError as error:
            sentences.append(str(error))
    return sentences
