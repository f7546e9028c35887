"""The container in which the ranks of a site run: which Python starts there, and which folders are visible in it.

Our commands and the supervisor of a run stay outside of the container, because only outside are Slurm's commands. The container
starts with each task of a job step: pyxis is a plugin of srun, so srun needs its options; for the other runtimes, the script
`rank-python` beside the environment's `python` starts the container.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from shardlab import node_folder
from shardlab.cluster import Cluster

RANK_PYTHON = "rank-python"
NODE_DISK = "$SHARDLAB_NODE_DISK"  # in a word of srun's command; only a job knows $TMPDIR, so the supervisor replaces it


def rank_python(cluster: Cluster, python: str) -> str:
    """The Python of ranks. python: the Python of our commands, which is also that of ranks if there is no container."""
    if cluster.environment.container is None:
        return python
    return str(PurePosixPath(python).with_name(RANK_PYTHON))


def srun_options(cluster: Cluster, folder: str, *, node_disk: bool = False) -> list[str]:
    """The options of srun that start each task in the container, [] if srun does not start the container.

    folder: the working directory of the task. node_disk: whether the task copies data to the disk of its node; `with_node_disk`
    then has to complete the options.
    """
    environment = cluster.environment
    if environment.runtime != "pyxis":
        return []
    mounts = [*folders(cluster), *([NODE_DISK] if node_disk else [])]  # without it, /tmp is in memory
    return [
        f"--container-image={environment.container}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
        f"--container-workdir={folder}",
        # The copy of a user named root in the container would have the name that all users' copies have.
        *(["--no-container-remap-root"] if node_disk else []),
    ]


def with_node_disk(command: Sequence[str]) -> list[str]:
    """A command of srun with this node's $TMPDIR or /tmp in the place of NODE_DISK."""
    return [word.replace(NODE_DISK, str(node_folder.parent()[0])) for word in command]


def folders(cluster: Cluster) -> list[str]:
    """The folders of the site that are visible in the container under the same path: of the environment, runs and data sets."""
    assert cluster.storage.shared is not None
    shared = PurePosixPath(cluster.storage.shared)
    data = PurePosixPath(cluster.data.path or shared)  # a relative path is in the workspace, which is in the shared folder
    return [str(shared), *([str(data)] if data.is_absolute() and not data.is_relative_to(shared) else [])]
