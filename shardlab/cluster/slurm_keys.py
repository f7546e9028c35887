"""The keys `slurm` and `gpus` of a cluster file: the partition, the GPUs, and the options with which jobs are submitted."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shardlab.files import document
from shardlab.matrix.cell import GpuType
from shardlab.matrix.cell_sizes import parse_seconds
from shardlab.record_types import SlurmClusterName

MOST_GPUS = 64  # the largest allowed number of GPUs of a node
MOST_NODES = 100_000  # the largest allowed number of nodes of a job
MOST_CPUS_PER_RANK = 1024
# A value that needs no quotes in a line #SBATCH. sbatch has its own rules for quotes, so quotes are not allowed.
SbatchWord = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:,@%+/=&|()*\[\]-]{0,200}\Z")]
SbatchOption = Annotated[str, msgspec.Meta(pattern=r"^([a-z][a-z0-9-]{1,40}|M)\Z")]  # -M is refused by its name, see below
PartitionName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,60}\Z")]
NodeName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
# Options of sbatch that a cluster file must not set: options that `jobs` sets itself, and options with which `jobs` could not
# follow a run.
OWN_OPTIONS = {
    "job-name", "output", "error", "array", "nodes", "ntasks", "ntasks-per-node", "time", "partition", "account", "qos",
    "constraint", "gpus", "gpus-per-node", "gres", "mem", "licenses", "exclusive", "cpus-per-task", "requeue", "no-requeue",
    "open-mode", "export", "wrap", "parsable", "wait", "test-only", "chdir", "exclude", "dependency", "kill-on-invalid-dep",
    "hold", *(CLUSTER_OPTIONS := ("clusters", "cluster", "M")),
}  # fmt: skip


class Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs of each worker. The GPUs of practice nodes are dummy devices that only Slurm uses: ranks train on the CPU."""

    per_node: Annotated[int, msgspec.Meta(ge=0, le=MOST_GPUS)]
    """The number of GPUs of each worker."""
    type: GpuType | None = None
    """The name of the GPU type in Slurm, such as a100; null: jobs request GPUs of any type."""
    memory_gib: Annotated[float, msgspec.Meta(gt=0, le=4096)] | None = None
    """The memory of one GPU in GiB; null: not known before a run measures it."""


class Partition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A partition with GPUs of one type, for cells that name this type in `gpu_type`."""

    name: PartitionName
    """The name of the partition in Slurm."""
    gpus: Gpus
    """The GPUs of each node; `type` is required, and no other partition may have the same type."""
    max_time: str | None = None
    """The largest time limit of a job; null: not checked."""
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=MOST_NODES)] | None = None
    """The largest number of nodes of a job; null: not checked."""

    @property
    def max_time_s(self) -> int | None:
        """The largest time limit in seconds; None if it is not checked. Raises ValueError for text that is not a time."""
        return None if self.max_time is None else parse_seconds(self.max_time)


class Slurm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slurm: what `provision` installs (slurmctld and slurmdbd on the one controller, slurmd on the workers), and the options
    with which `jobs` submits. With provider slurm, nothing is installed."""

    partition: PartitionName | None = "batch"
    """The partition of the jobs, passed to sbatch. null (only with provider slurm): not passed, so that Slurm uses its default
    partition."""
    cluster: SlurmClusterName | None = None
    """The cluster of the jobs if the site's Slurm has several clusters (provider slurm), as in `sbatch --clusters`. null: the
    cluster in the environment variable SLURM_CLUSTERS, or else the default cluster of the login node."""
    account: SbatchWord | None = None
    """The account that pays for the jobs, passed to sbatch; null: not passed."""
    qos: SbatchWord | None = None
    """The quality of service, passed to sbatch; null: not passed."""
    constraint: SbatchWord | None = None
    """The features that nodes need, passed to sbatch; null: not passed."""
    gpu_request: Literal["gpus-per-node", "gres", "gpus"] = "gpus-per-node"
    """The option of sbatch with which jobs request GPUs; some sites reject one or two of these three options."""
    time: str = "01:00:00"
    """The time limit of jobs whose cells have no time limit, as HH:MM:SS or D-HH:MM:SS."""
    max_time: str | None = None
    """The largest time limit that the partition allows, which `jobs plan` checks; null: not checked."""
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=MOST_NODES)] | None = None
    """The largest number of nodes of a job that the partition allows, which `jobs plan` checks; null: not checked."""
    partitions: list[Partition] = []
    """Partitions with different types of GPUs (provider slurm). A cell with `gpu_type` goes to the partition of this type; a
    cell without `gpu_type` goes to `partition`, whose GPUs the key `gpus` of the cluster file describes."""
    exclusive: bool = True
    """true: a job gets whole nodes, so that no other job disturbs the measurement. false: other jobs may use the same nodes,
    and each rank gets `cpus_per_rank` CPUs."""
    cpus_per_rank: Annotated[int, msgspec.Meta(ge=1, le=MOST_CPUS_PER_RANK)] | None = None
    """CPUs of each rank if `exclusive` is false; null: 8 for a rank with a GPU, because its threads (autograd, NCCL, data)
    should not share one CPU, and 1 for other ranks."""
    mem: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}[KMGT]?\Z")] | None = None
    """Memory on each node, such as 120G; null: all memory of the node if `exclusive` is true, else the default of Slurm."""
    licenses: SbatchWord | None = None
    """The licenses that jobs need, passed to sbatch; null: not passed."""
    exclude: list[NodeName] = []
    """The names of nodes that no run uses."""
    setup: list[str] = []
    """Lines of shell that a job executes before anything else, such as `source /etc/profile.d/modules.sh` (provider slurm)."""
    requeue: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    """How often a run may be started again after a node failed, after a preemption, and after a time limit if the run saved a
    checkpoint. It applies to each of these states for which the key `retry` of the matrix has no number."""
    extra: dict[SbatchOption, SbatchWord | None] = {}
    """Further options of sbatch by their long names; null for an option without a value."""

    @property
    def time_s(self) -> int:
        """The time limit of jobs in seconds. Raises ValueError for text that is not a time."""
        return parse_seconds(self.time)

    @property
    def max_time_s(self) -> int | None:
        """The largest time limit in seconds; None if it is not checked. Raises ValueError for text that is not a time."""
        return None if self.max_time is None else parse_seconds(self.max_time)


def check_slurm(text: document.Document, slurm: Slurm) -> None:
    """Check the rules that the types above cannot express. Raises InputError with file:line:column."""
    for key in ("time", "max_time"):
        try:
            _ = slurm.time_s if key == "time" else slurm.max_time_s
        except ValueError as error:
            raise text.error(("slurm", key), str(error)) from None
    if slurm.max_time_s is not None and slurm.time_s > slurm.max_time_s:
        raise text.error(("slurm", "time"), f"found {slurm.time}. Allowed: at most max_time, which is {slurm.max_time}.")
    if slurm.cluster == "all":
        raise text.error(("slurm", "cluster"), "found all. Allowed: the name of one cluster, because each run has one job.")
    _check_partitions(text, slurm)
    for name in slurm.extra:
        if name in OWN_OPTIONS:
            allowed = "the key slurm.cluster" if name in CLUSTER_OPTIONS else "sbatch's other options"
            raise text.error(
                ("slurm", "extra", name), f"{name} is not allowed, because `jobs` controls it. Allowed: {allowed}."
            )
    for index, line in enumerate(slurm.setup):
        if not line.strip() or any(not char.isprintable() for char in line):
            raise text.error(
                ("slurm", "setup", index), f"found {line!r}. Allowed: one line of shell with printable characters."
            )


def check_installed_slurm(text: document.Document, slurm: Slurm, provider: str) -> None:
    """Check the keys of Slurm that `provision` installs, as `check_slurm` does. Raises InputError with file:line:column."""
    if slurm.partition is None:
        raise text.error(("slurm", "partition"), "found null. Allowed: the name of the partition that `provision` makes.")
    if slurm.partitions:
        raise text.error(("slurm", "partitions"), f"not allowed with provider {provider}, which makes one partition.")
    if slurm.cluster is not None:
        raise text.error(("slurm", "cluster"), f"not allowed with provider {provider}, whose Slurm has one cluster. Remove it.")
    if slurm.setup:
        raise text.error(("slurm", "setup"), f"not allowed with provider {provider}. Allowed: only with provider slurm.")
    check_slurm(text, slurm)


def _check_partitions(text: document.Document, slurm: Slurm) -> None:
    types: list[str] = []
    for index, partition in enumerate(slurm.partitions):
        path: document.KeyPath = ("slurm", "partitions", index)
        if partition.gpus.type is None:
            raise text.error((*path, "gpus"), "the key type is missing. Allowed: the name of the GPU type, which cells name.")
        if partition.gpus.type in types:
            raise text.error(
                (*path, "gpus", "type"), f"another partition has the type {partition.gpus.type}. Allowed: each type once."
            )
        types.append(partition.gpus.type)
        try:
            longest_s = partition.max_time_s
        except ValueError as error:
            raise text.error((*path, "max_time"), str(error)) from None
        if longest_s is not None and slurm.time_s > longest_s:
            raise text.error((*path, "max_time"), f"found {partition.max_time}. Allowed: slurm.time, {slurm.time}, or more.")
