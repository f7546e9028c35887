"""The keys `slurm` and `gpus` of a cluster file: the partition, the GPUs, and the options with which jobs are submitted."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

import msgspec

from shardlab.cluster.slurm_time import parse_time_limit
from shardlab.files import document
from shardlab.matrix.cell import GpuType
from shardlab.record_types import SlurmClusterName, limit_text

MOST_GPUS = 64  # the largest allowed number of GPUs of a node
MOST_NODES = 100_000  # the largest allowed number of nodes of a job
MOST_CPUS_PER_RANK = 1024
# A value in a line #SBATCH, where quotes, a backslash and # have a meaning of their own, and a line break begins a command.
# $ and ` have a meaning only in a shell; they are not allowed, because own templates may use options in a command.
SbatchText = Annotated[
    str,
    limit_text(
        r"^[!%&(-\[\]-_a-~](?:[ !%&(-\[\]-_a-~]{0,398}[!%&(-\[\]-_a-~])?\Z",
        "up to 400 printable ASCII characters without quotes and the signs \\ # $ `, spaces only inside",
    ),
]
SbatchWord = Annotated[
    str,
    limit_text(
        r"^[!%&(-\[\]-_a-~]{1,400}\Z", "up to 400 printable ASCII characters without spaces, quotes and the signs \\ # $ `"
    ),
]
SbatchOption = Annotated[  # -M is refused by its name, see below
    str, limit_text(r"^([a-z][a-z0-9-]{1,40}|M)\Z", "the long name of an option of sbatch, such as reservation")
]
PartitionName = Annotated[
    str,
    limit_text(
        r"^[A-Za-z0-9_][A-Za-z0-9_.:@+,-]{0,200}\Z",
        "letters, digits and the signs _ . : @ + -, and commas between several partitions",
    ),
]
MemorySize = Annotated[
    str,
    limit_text(
        r"^[0-9]{1,9}[KMGTkmgt]?\Z",
        "a whole number of MiB, or of the unit K, M, G or T that follows it, such as 1536G (Slurm reads no 1.5T)",
    ),
]
NodeNames = Annotated[
    str,
    limit_text(
        r"^[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]{0,400}\Z",
        "a name of a node or names such as gpu[01-04], with letters, digits and the signs _ . , [ ] -",
    ),
]
ExtraOptions = dict[SbatchOption, SbatchText | int | None]
_INSTALLED_PARTITION = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,60}\Z")
# Options of sbatch that a cluster file must not set: options that `jobs` sets itself, and options with which `jobs` could not
# follow a run.
OWN_OPTIONS = {
    "job-name", "output", "error", "array", "nodes", "ntasks", "ntasks-per-node", "time", "partition", "account", "qos",
    "constraint", "gpus", "gpus-per-node", "gres", "mem", "licenses", "exclusive", "cpus-per-task", "requeue", "no-requeue",
    "open-mode", "export", "wrap", "parsable", "wait", "test-only", "chdir", "exclude", "dependency", "kill-on-invalid-dep",
    "hold", *(CLUSTER_OPTIONS := ("clusters", "cluster", "M")),
}  # fmt: skip
# Options that `slurm.omit` may name: without these options, a run is still placed, ended and found again correctly.
OmittableOption = Literal["exclusive", "mem", "cpus-per-task", "ntasks-per-node", "export", "open-mode", "requeue"]
GpuRequest = Literal["gpus-per-node", "gres", "gpus", "none"]
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node")


_SLICE_PATTERN = re.compile(r"(?:^|[._-])[1-7]g\.\d+gb", re.I)


def is_slice(gpu_type: str) -> bool:
    """Whether a type of GPUs in Slurm is a slice of a GPU (MIG), which ends with its share and memory, such as 1g.5gb."""
    return _SLICE_PATTERN.search(gpu_type) is not None


class Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs of each worker. The GPUs of practice nodes are dummy devices that only Slurm uses: ranks train on the CPU."""

    per_node: Annotated[int, msgspec.Meta(ge=0, le=MOST_GPUS)]
    """The number of GPUs of each worker."""
    type: GpuType | None = None
    """The name of the GPU type in Slurm, such as a100; null: jobs request GPUs of any type."""
    memory_gib: Annotated[float, msgspec.Meta(gt=0, le=4096)] | None = None
    """The memory of one GPU in GiB; null: not known before a run measures it."""

    @property
    def are_slices(self) -> bool:
        """Whether the type names slices of GPUs (MIG), such as a100_1g.5gb."""
        return self.type is not None and is_slice(self.type)


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
        return None if self.max_time is None else parse_time_limit(self.max_time)


class ProvisionJobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the jobs request with which `provision` installs packages, stages data sets and lists packages. Jobs that prove
    nodes have the partition of runs, because they prove its nodes, and the account and QOS below if `partition` is null."""

    partition: PartitionName | None = None
    """The partition, such as one for compilation that costs nothing; null: the partition of runs. If it is given, the QOS, the
    constraint and the limits of runs do not apply to these jobs."""
    account: SbatchWord | None = None
    """The account; null: the account of runs."""
    qos: SbatchWord | None = None
    """The quality of service; null: that of runs, or none if `partition` is given."""
    constraint: SbatchWord | None = None
    """The features that the node needs; null: those of runs, or none if `partition` is given."""
    gpus: Annotated[int, msgspec.Meta(ge=0, le=MOST_GPUS)] | None = None
    """The number of GPUs, 0 for a partition without GPUs; null: 1 if the cluster has GPUs, because some partitions accept no
    job without a GPU."""
    time: str | None = None
    """The longest time limit; null: that of runs, or none if `partition` is given. The jobs ask for 15 minutes to 12 hours."""
    extra: ExtraOptions | None = None
    """Further options of sbatch, in place of those of runs; null: those of runs."""


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
    gpu_request: GpuRequest = "gpus-per-node"
    """The option of sbatch with which jobs request GPUs; some sites reject one or two of these three options. none: no option
    is sent, for sites whose Slurm counts no GPUs; runs use the GPUs of their nodes all the same, `gpus.per_node` on each."""
    time: str = "01:00:00"
    """The time limit of jobs whose cells have no time limit, as sbatch reads it: M, M:SS, HH:MM:SS, D-HH, D-HH:MM or
    D-HH:MM:SS."""
    max_time: str | None = None
    """The largest time limit that the partition allows, which `jobs plan` checks; null or UNLIMITED: not checked."""
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
    mem: MemorySize | None = None
    """Memory on each node, such as 120G; null: all memory of the node if `exclusive` is true, else the default of Slurm. It is
    not sent if `extra` has `mem-per-cpu` or `mem-per-gpu`."""
    licenses: SbatchWord | None = None
    """The licenses that jobs need, passed to sbatch; null: not passed."""
    exclude: list[NodeNames] = []
    """The names of nodes that no run uses."""
    setup: list[str] = []
    """Lines of shell that a job executes before anything else, such as `source /etc/profile.d/modules.sh` (provider slurm)."""
    requeue: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    """How often a run may be started again after a node failed, after a preemption, and after a time limit if the run saved a
    checkpoint. It applies to each of these states for which the key `retry` of the matrix has no number."""
    omit: list[OmittableOption] = []
    """Options of sbatch that jobs do not send, because the site rejects them. `extra` may then set the same option to another
    value, such as `omit: [exclusive]` with `extra: {exclusive: user}`."""
    extra: ExtraOptions = {}
    """Further options of sbatch by their long names; null for an option without a value. An option that shardlab sends itself
    is allowed only if `omit` names it; an option that requests GPUs, only with `gpu_request: none`."""
    provision: ProvisionJobs | None = None
    """What the jobs of `provision` itself request (provider slurm); null: the same as runs."""

    @property
    def time_s(self) -> int:
        """The time limit of jobs in seconds. Raises ValueError for text that is not a time."""
        if (limit_s := parse_time_limit(self.time)) is None:
            raise ValueError(f"found {self.time}. Allowed: a time, because a run needs an end.")
        return limit_s

    @property
    def max_time_s(self) -> int | None:
        """The largest time limit in seconds; None if it is not checked. Raises ValueError for text that is not a time."""
        return None if self.max_time is None else parse_time_limit(self.max_time)


def check_slurm(doc: document.Document, slurm: Slurm) -> None:
    """Check the rules that the types above cannot express. Raises InputError with file:line:column."""
    jobs = slurm.provision
    for path in (("time",), ("max_time",), ("provision", "time")):
        try:
            _ = slurm.time_s if path == ("time",) else slurm.max_time_s
            _ = parse_time_limit(jobs.time) if jobs is not None and jobs.time is not None and path[0] == "provision" else None
        except ValueError as error:
            raise doc.error(("slurm", *path), str(error)) from None
    if slurm.max_time_s is not None and slurm.time_s > slurm.max_time_s:
        raise doc.error(("slurm", "time"), f"found {slurm.time}. Allowed: at most max_time, which is {slurm.max_time}.")
    if slurm.cluster == "all":
        raise doc.error(("slurm", "cluster"), "found all. Allowed: the name of one cluster, because each run has one job.")
    _check_partitions(doc, slurm)
    _check_extra_options(doc, slurm)
    for index, setup_line in enumerate(slurm.setup):
        if not setup_line.strip() or any(not character.isprintable() for character in setup_line):
            raise doc.error(
                ("slurm", "setup", index), f"found {setup_line!r}. Allowed: one line of shell with printable characters."
            )


def check_installed_slurm(text: document.Document, slurm: Slurm, provider: str) -> None:
    """Check the keys of Slurm that `provision` installs, as `check_slurm` does. Raises InputError with file:line:column."""
    if slurm.partition is None:
        raise text.error(("slurm", "partition"), "found null. Allowed: the name of the partition that `provision` makes.")
    if not _INSTALLED_PARTITION.match(slurm.partition):
        allowed_names = "Allowed: one name with letters, digits and the signs _ . + -, at most 61 characters."
        raise text.error(("slurm", "partition"), f"found {slurm.partition!r}. {allowed_names}")
    if slurm.provision is not None:
        raise text.error(("slurm", "provision"), f"not allowed with provider {provider}. Allowed: only with provider slurm.")
    if slurm.partitions:
        raise text.error(("slurm", "partitions"), f"not allowed with provider {provider}, which makes one partition.")
    if slurm.cluster is not None:
        raise text.error(("slurm", "cluster"), f"not allowed with provider {provider}, whose Slurm has one cluster. Remove it.")
    if slurm.setup:
        raise text.error(("slurm", "setup"), f"not allowed with provider {provider}. Allowed: only with provider slurm.")
    check_slurm(text, slurm)


def _check_extra_options(cluster_document: document.Document, slurm: Slurm) -> None:
    """Check that `extra` sets no option with which shardlab itself places, ends or finds a run."""
    omitted_options = {*slurm.omit, *(GPU_OPTIONS if slurm.gpu_request == "none" else ())}
    option_paths: list[document.KeyPath] = [("slurm", "extra", option_name) for option_name in slurm.extra]
    if slurm.provision is not None:
        option_paths += [("slurm", "provision", "extra", option_name) for option_name in slurm.provision.extra or {}]
    for option_path in option_paths:
        option_name = str(option_path[-1])
        if option_name not in OWN_OPTIONS or option_name in omitted_options:
            continue
        allowed_options = "the key slurm.cluster" if option_name in CLUSTER_OPTIONS else "sbatch's other options"
        refusal = f"{option_name} is not allowed, because `jobs` controls it. Allowed: {allowed_options}"
        if option_name in get_args(OmittableOption):
            refusal += f", or this one together with `omit: [{option_name}]`"
        if option_name in GPU_OPTIONS:
            refusal += ", or this one together with `gpu_request: none`"
        raise cluster_document.error(option_path, f"{refusal}.")


def _check_partitions(doc: document.Document, slurm: Slurm) -> None:
    gpu_types: list[str] = []
    for index, partition in enumerate(slurm.partitions):
        path: document.KeyPath = ("slurm", "partitions", index)
        if partition.gpus.type is None:
            raise doc.error((*path, "gpus"), "the key type is missing. Allowed: the name of the GPU type, which cells name.")
        if partition.gpus.type in gpu_types:
            raise doc.error(
                (*path, "gpus", "type"), f"another partition has the type {partition.gpus.type}. Allowed: each type once."
            )
        gpu_types.append(partition.gpus.type)
        try:
            longest_s = partition.max_time_s
        except ValueError as error:
            raise doc.error((*path, "max_time"), str(error)) from None
        if longest_s is not None and slurm.time_s > longest_s:
            raise doc.error((*path, "max_time"), f"found {partition.max_time}. Allowed: slurm.time, {slurm.time}, or more.")
