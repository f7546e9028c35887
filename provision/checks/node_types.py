"""Checks the compute nodes of a Slurm site: one job for each type of nodes proves that its nodes can train.

A job may wait in the queue for hours. The check waits for a while, then says which job it waits for; the next `provision`
or `provision verify` reads the result of the same job.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import NamedTuple

import templates
from provision import software
from provision.check import Check, Outcome
from provision.checks import all_reduce, gpus, torch
from provision.checks.node_proof import MEET_S, NodeProof
from provision.checks.trial import PRODUCT_S
from provision.fact import Unanswered, decode
from provision.facts.node_types import MOST_FEATURES, NODE_TYPES, NodeType
from provision.interruption import STOPPING
from provision.node import last_line
from provision.operation import Site, Target
from provision.site import requests
from provision.slurm_text import is_name
from shardlab import container
from shardlab.cluster import Cluster
from shardlab.remote import CommandOutput

WAIT_S = 900.0
POLL_S = 5.0
VISIBLE_S = 60.0  # how long NFS may show an old list of a folder
MINUTES = 20
MOST_TYPES = 8
MOST_CLOCK_S = 1.0  # that clocks of nodes may differ before times of one run cannot be compared
LEAST_FREE_BYTES = 10 << 30
LEAST_INODES = 20_000
# Prints the proofs that are there, each as a line, and then the words and the state of the job.
LOOK = """\
cd "$1" 2>/dev/null || exit 0
for proof in *.json; do test -f "$proof" && cat "$proof" && echo; done
test -f job || exit 0
job=$(cat job)
if ! state=$(env -u SQUEUE_STATES -u SQUEUE_PARTITION squeue -h -j "$job" -o '%T %r' 2>&1); then
    case $state in *'nvalid job id'*) state= ;; *) printf '%s\\n' "$state" >&2; exit 1 ;; esac
fi
printf 'job=%s %s\\n' "$job" "${state:-ENDED}"
"""
SUBMIT = f"""\
set -e
{requests.WITHOUT_VARIABLES}
cd "$1"
rm -f -- *.json word.* endpoint
said=$(sbatch --parsable prove.sh)
printf '%s\\n' "$said" | tail -n 1 | cut -d ';' -f 1 > job.new
mv job.new job
"""


# After a failed proof: its results are kept for people to read, and the next check submits a new job.
SET_ASIDE = """\
cd "$1" || exit 0
mkdir -p failed
for proof in *.json; do test -f "$proof" && mv -f -- "$proof" failed/; done
rm -f job
"""


class Proofs(NamedTuple):
    """What lies in the folder of a node type's proof."""

    nodes: list[NodeProof]
    job: str | None  # its number; None: no job was submitted
    state: str  # Slurm's words for it, such as `PENDING Resources`; ENDED: Slurm does not have it any more


def run(site: Site, target: Target) -> Outcome:
    """Submit a job for each type that has no proof for this environment, wait, and judge."""
    folders: dict[str, tuple[Cluster, NodeType, str]] = {}
    for cluster in _clusters(site.cluster):
        types = _types(cluster, target.facts[NODE_TYPES])
        if not types:
            partition = cluster.slurm.partition if cluster.slurm is not None else None
            return Outcome(False, f"Slurm shows no fitting node in the partition {partition}", "sinfo; then correct slurm")
        folders |= {_folder(cluster, target, kind): (cluster, kind, others) for kind, others in types.items()}
    for folder, (cluster, kind, others) in folders.items():
        seen = _look(target, folder)
        if seen.nodes or seen.job is not None:  # also of a job that failed since the last check, which is reported first
            continue
        if (refused := _submit(cluster, target, folder, kind, others)) is not None:
            says = f"{_says(kind)}: Slurm rejects the job: {refused}"
            return Outcome(False, says, "correct the key slurm of the cluster file")
    ends, ended = time.monotonic() + WAIT_S, dict[str, float]()
    while True:
        seen_by = {folder: _look(target, folder) for folder in folders}
        now = time.monotonic()
        ended = {folder: ended.get(folder, now) for folder, seen in seen_by.items() if seen.state == "ENDED"}
        settled = [_has_all(seen) or now - ended.get(folder, now) > VISIBLE_S for folder, seen in seen_by.items()]
        if all(settled) or now > ends:
            break
        STOPPING.wait(POLL_S)
    outcomes = []
    for folder, (cluster, kind, _) in folders.items():
        wanted = cluster.gpus.per_node if cluster.gpus is not None else 0
        outcomes.append(_judge(kind, seen_by[folder], folder, wanted))
        if not outcomes[-1].passed and seen_by[folder].state == "ENDED":
            target.node.run(["sh", "-c", SET_ASIDE, "set-aside", folder], timeout_s=60)
    failed = next((outcome for outcome in outcomes if not outcome.passed), None)
    says = "; ".join(outcome.says for outcome in outcomes)
    return Outcome(failed is None, says, failed.advice if failed else None, transcript=failed.transcript if failed else "")


def _clusters(cluster: Cluster) -> list[Cluster]:
    """The cluster as cells without a GPU type use it, and as cells of each type of `slurm.partitions` use it."""
    partitions = cluster.slurm.partitions if cluster.slurm is not None else []
    return [cluster, *(cluster.for_gpu_type(partition.gpus.type) for partition in partitions)]


def _has_all(seen: Proofs) -> bool:
    """Whether every node of the job wrote its result."""
    return bool(seen.nodes) and len(seen.nodes) >= seen.nodes[0].tasks


def _types(cluster: Cluster, found: tuple[NodeType, ...]) -> dict[NodeType, str]:
    """The node types on which runs can land, each with the names of the partition's other nodes."""
    asked = cluster.slurm.partition if cluster.slurm is not None else None
    inside = [kind for kind in found if asked is None or kind.partition in asked.split(",")]
    constraint = cluster.slurm.constraint if cluster.slurm is not None else None
    plain = constraint is not None and not set(constraint) & set("|()[]*")  # sbatch itself evaluates these signs
    features = [word for word in constraint.split("&") if is_name(word)] if constraint is not None and plain else []
    groups: dict[tuple[object, ...], list[NodeType]] = {}
    for kind in inside:
        if len(kind.features) < MOST_FEATURES and any(feature not in kind.features for feature in features):
            continue
        if cluster.gpus is None or not cluster.gpus.per_node or _has(kind, cluster):
            groups.setdefault((kind.cpus, kind.gpus), []).append(kind)
    largest = [max(alike, key=lambda kind: kind.count) for alike in groups.values()][:MOST_TYPES]
    return {
        kind: ",".join(other.names for other in inside if (other.cpus, other.gpus) != (kind.cpus, kind.gpus) and other.names)
        for kind in largest
    }


def _has(kind: NodeType, cluster: Cluster) -> bool:
    wanted = cluster.gpus
    assert wanted is not None
    return any(gpu.count >= wanted.per_node and wanted.type in (None, gpu.type) for gpu in kind.gpus)


def _folder(cluster: Cluster, target: Target, kind: NodeType) -> str:
    gpus_ = cluster.gpus.per_node if cluster.gpus is not None else 0
    asked = requests.options(cluster, nodes=2, minutes=MINUTES, gpus=gpus_)
    key = json.dumps([target.node.python, software.source_digest(), kind.cpus, [str(gpu) for gpu in kind.gpus], asked])
    return f"{cluster.storage.shared}/proofs/{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _look(target: Target, folder: str) -> Proofs:
    """Raises Unanswered."""
    answer = target.node.run(["sh", "-c", LOOK, "look", folder], timeout_s=60)
    if answer.code != 0:
        raise Unanswered(f"{target.node.name}: {folder}: {last_line(answer)}")
    nodes, job, state = [], None, "ENDED"
    for line in answer.stdout.splitlines():
        if line.startswith("{"):
            nodes.append(decode(line, NodeProof))
        elif line.startswith("job="):
            job, _, state = line.removeprefix("job=").partition(" ")
    return Proofs(nodes, job, state)


def _submit(cluster: Cluster, target: Target, folder: str, kind: NodeType, others: str) -> str | None:
    """Submit the proof job of a node type. Returns why Slurm rejects it, or None."""
    count = min(2, kind.count, cluster.slurm.max_nodes or 2 if cluster.slurm is not None else 2)
    excluded = ",".join([*(cluster.slurm.exclude if cluster.slurm is not None else []), *([others] if others else [])])
    options = [
        "--job-name=shardlab-prove",
        f"--output={folder}/prove.log",
        *requests.options(cluster, nodes=count, minutes=MINUTES, gpus=cluster.gpus.per_node if cluster.gpus is not None else 0),
        "--no-requeue",  # a second start would find the files of the first
        *([f"--exclude={excluded}"] if excluded else []),  # sbatch reads only the last of two --exclude
    ]
    script = templates.render(
        "site/prove.sh.j2",
        options=options,
        kind=_says(kind),
        folder=folder,
        container=container.srun_options(cluster, folder),
        python=container.rank_python(cluster, target.node.python),
    ).encode()
    written = target.node.put(script, f"{folder}/prove.sh", mode=0o755, owner="")
    if written.code != 0:
        raise Unanswered(f"{target.node.name}: {folder}/prove.sh: {last_line(written)}")
    answer = target.node.run(["sh", "-c", SUBMIT, "submit", folder], timeout_s=120)
    if answer.code is None:
        raise Unanswered(f"{target.node.name}: sbatch did not answer within 120 s; the job may exist: squeue --me")
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    return None if answer.code == 0 else "; ".join(lines)[:500] or last_line(answer)  # a submit plugin writes several lines


def _judge(kind: NodeType, seen: Proofs, folder: str, wanted: int) -> Outcome:
    """Passed if every node of the job says that torch, its GPUs, the all-reduces and the shared folder work. wanted: the GPUs
    of each node that the cluster file requests."""
    what = _says(kind)
    if seen.state != "ENDED" and not _has_all(seen):
        return Outcome(
            False, f"{what}: not proven yet, job {seen.job} is {seen.state}", "when the job has ended: provision verify"
        )
    if not seen.nodes:
        return Outcome(False, f"{what}: job {seen.job} ended without a result", f"read {folder}/prove.log")
    if len(seen.nodes) < seen.nodes[0].tasks:
        missing = seen.nodes[0].tasks - len(seen.nodes)
        return Outcome(False, f"{what}: {missing} of {seen.nodes[0].tasks} nodes gave no result", f"read {folder}/prove.log")
    for proof in seen.nodes:
        if (fault := _fault(proof, wanted)) is not None:
            return Outcome(False, f"{what}: {proof.host.host}: {fault.says}", fault.advice, transcript=fault.transcript)
    reports = [proof for proof in seen.nodes if proof.together is not None and '"clock_spread_s"' in proof.together.stdout]
    first = reports[0] if reports else seen.nodes[0]
    summed = f"; {_together(first.together)}" if reports and first.together is not None else ""
    found = first.host.gpus
    names = f"{len(found)} x {found[0].name}" if found else "no GPU"
    return Outcome(True, f"{what}: torch {first.trial.torch.version} works on {len(seen.nodes)} nodes ({names}){summed}")


def _fault(proof: NodeProof, wanted: int) -> Outcome | None:
    """The first check that a node did not pass."""
    judged = [torch.judge(proof.trial.torch), gpus.judge(proof.host, proof.trial.torch), _count(proof, wanted)]
    if proof.trial.product is not None and proof.trial.product.code != 0:
        why = all_reduce.why_not(proof.trial.product, PRODUCT_S)
        judged.append(Outcome(False, f"a matrix product on the GPUs failed: {why}", "do not train here"))
    if proof.trial.all_reduce is not None:
        judged.append(all_reduce.judge(proof.trial.all_reduce, cores=proof.host.cpus_allowed))
    if proof.tasks > 1:
        judged.append(_shared(proof))
        if proof.together is not None and '"clock_spread_s"' in proof.together.stdout:  # of rank 0; NCCL may print as well
            judged.append(_between(proof.together))
        elif proof.together is None or proof.together.code != 0:
            why = all_reduce.why_not(proof.together, MEET_S) if proof.together is not None else "the nodes did not meet"
            judged.append(
                Outcome(False, f"the all-reduce between nodes failed: {why}", "can the nodes reach each other over TCP?")
            )
    if proof.free_bytes < LEAST_FREE_BYTES:
        judged.append(Outcome(False, f"the shared folder has {proof.free_bytes / 2**30:.1f} GiB free", "free some space there"))
    if proof.free_inodes is not None and proof.free_inodes < LEAST_INODES:
        judged.append(Outcome(False, f"the shared folder has {proof.free_inodes:,} inodes free", "remove files there"))
    return next((outcome for outcome in judged if outcome.passed is False), None)


def _count(proof: NodeProof, wanted: int) -> Outcome:
    """Whether the node shows the GPUs that its job requested. A build of torch for CPUs alone needs none."""
    count = len(proof.host.gpus or ())
    if count >= wanted or (count == 0 and proof.trial.torch.cuda is None):
        return Outcome(True, "")
    why = f" ({proof.host.gpu_why_absent})" if proof.host.gpu_why_absent else ""
    return Outcome(
        False, f"the job requested {wanted} GPUs, NVML sees {count}{why}", "are these NVIDIA GPUs, and does the driver work?"
    )


def _shared(proof: NodeProof) -> Outcome:
    if len(proof.words) == proof.tasks:
        return Outcome(True, "")
    return Outcome(
        False,
        f"it sees only the files of {', '.join(proof.words) or 'no node'} in the shared folder",
        "is storage.shared the same folder on all nodes?",
    )


def _between(answer: CommandOutput) -> Outcome:
    """The sums of all nodes are exact and their clocks agree."""
    report = _report(answer)
    if report.wrong:
        return Outcome(False, f"the all-reduce between nodes gave {report.wrong} wrong sums", "do not train here")
    if report.clock_spread_s is not None and report.clock_spread_s > MOST_CLOCK_S:
        return Outcome(False, f"the clocks of the nodes differ by {report.clock_spread_s:.1f} s", "tell the administrators")
    return Outcome(True, "")


def _report(answer: CommandOutput) -> all_reduce.AllReduceReport:
    """The report among the lines of rank 0."""
    return decode(next(line for line in answer.stdout.splitlines() if '"clock_spread_s"' in line), all_reduce.AllReduceReport)


def _together(answer: CommandOutput) -> str:
    report = _report(answer)
    rate = all_reduce.bus_bandwidth(report.ranks, report.bytes, report.time_s) / 1e9
    return f"all-reduce between {report.ranks} nodes ({report.backend}) is exact, bus bandwidth {rate:.2f} GB/s"


def _says(kind: NodeType) -> str:
    gpus_ = " + ".join(f"{gpu.count} GPUs {gpu.type or ''}".rstrip() for gpu in kind.gpus)
    return f"nodes with {kind.cpus} CPUs{f' and {gpus_}' if gpus_ else ''}"


SITE_NODES = Check("node_types", run, once=True)
