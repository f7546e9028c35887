"""The container in which ranks run at a Slurm site: the Python that starts the ranks, and the folders visible inside.

shardlab's commands and the supervisor of a run stay outside the container, because Slurm's commands are installed only outside.
The container starts with each task of a job step. With pyxis, a plugin of srun, options of srun start the container. With the
other runtimes, the script `rank-python`, which is in the same folder as the environment's `python`, starts the container.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from shardlab.cluster import node_folder
from shardlab.cluster.cluster import Cluster

RANK_PYTHON = "rank-python"
# A placeholder for $TMPDIR of the node in an srun command. Only a job knows $TMPDIR, so the supervisor, which runs in the job,
# replaces the placeholder.
NODE_DISK = "$SHARDLAB_NODE_DISK"


def find_rank_python(cluster: Cluster, python_path: str) -> str:
    """The Python that starts ranks. python_path: the Python of shardlab's commands, which also starts ranks if there is no
    container."""
    if cluster.environment.container is None:
        return python_path
    return str(PurePosixPath(python_path).with_name(RANK_PYTHON))


def list_srun_options(cluster: Cluster, working_folder: str, *, copies_to_node_disk: bool = False) -> list[str]:
    """The options of srun that start each task in the container; empty if srun does not start the container.

    working_folder: the working directory of the task.
    copies_to_node_disk: whether the task copies data to the disk of its node. The options then contain NODE_DISK, which
    `replace_node_disk` replaces later."""
    environment_keys = cluster.environment
    if environment_keys.runtime != "pyxis":
        return []
    # without this mount, /tmp of the container is in memory
    mount_words = [*list_mounts(cluster), *([NODE_DISK] if copies_to_node_disk else [])]
    return [
        f"--container-image={environment_keys.container}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in mount_words)}",
        f"--container-workdir={working_folder}",
        # Without this option, every user is root (number 0) in the container. The folder with a copy of a data set has the
        # user's number in its name, so the folders of all users would have the same name.
        *(["--no-container-remap-root"] if copies_to_node_disk else []),
    ]


def replace_node_disk(srun_words: Sequence[str]) -> list[str]:
    """An srun command in which NODE_DISK is replaced by this node's $TMPDIR, or by /tmp if $TMPDIR is not a folder.

    srun_words: the words of the command, which may contain NODE_DISK.
    """
    return [word.replace(NODE_DISK, str(node_folder.choose_parent_folder()[0])) for word in srun_words]


def list_mounts(cluster: Cluster) -> list[str]:
    """The folders that have the same path inside the container: the shared folder (environment, runs) and the data sets."""
    assert cluster.storage.shared is not None
    shared_folder = PurePosixPath(cluster.storage.shared)
    # A relative path is in the workspace, which is in the shared folder
    data_folder = PurePosixPath(cluster.data.path or shared_folder)
    return [
        str(shared_folder),
        *([str(data_folder)] if data_folder.is_absolute() and not data_folder.is_relative_to(shared_folder) else []),
    ]
