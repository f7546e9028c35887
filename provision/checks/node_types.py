"""Checks the compute nodes of a Slurm site: one job for each type of nodes proves that its nodes can train.

A job may wait in the queue for hours. The check waits for a while, then reports the job that has not ended; the next
`provision` or `provision verify` reads the result of the same job.
"""

from __future__ import annotations

import hashlib
import json
import time

import templates
from provision import software
from provision.check import Check, Outcome
from provision.checks import judged_proof, proven_nodes
from provision.checks.node_proof import NodeProof, ProofResults
from provision.fact import Unanswered, decode_last_line
from provision.facts.node_types import MOST_FEATURES, NODE_TYPES, NodeType
from provision.facts.partitions import PARTITIONS
from provision.facts.slurm_text import is_name
from provision.interruption import IS_STOPPING
from provision.node import find_error_line
from provision.operation import Site, Target
from provision.site import requests
from shardlab.cluster import container
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.sbatch_request import advise_on_rejection

WAIT_S = 900.0
POLL_S = 5.0
VISIBLE_S = 60.0  # the most seconds for which an NFS client may show an old listing of a folder
PROOF_MINUTES = 20  # time limit of a proof job
CPUS_PER_GPU = 4  # CPU cores that a proof job requests per GPU; its ranks only sum and multiply, so few are enough
MOST_TYPES = 8  # the most node types of a partition that are tested, each by one job
# Prints each proof in the folder as one line, then the id, the state and the reason of the job.
READ_PROOFS = f"""\
{requests.WITHOUT_VARIABLES}
cd "$1" 2>/dev/null || exit 0
for proof in *.json; do test -f "$proof" && cat "$proof" && echo; done
test -f job || exit 0
job=$(cat job)
if ! state=$(squeue -h -j "$job" -o '%T %r' 2>&1); then
    case $state in *'nvalid job id'*) state= ;; *) printf '%s\\n' "$state" >&2; exit 1 ;; esac
fi
state=$(printf '%s\\n' "$state" | sed '/^CLUSTER: /d')
printf 'job=%s %s\\n' "$job" "${{state:-ENDED}}"
"""
SUBMIT_PROOF = f"""\
set -e
{requests.WITHOUT_VARIABLES}
cd "$1"
rm -f -- *.json word.* endpoint
said=$(sbatch --parsable prove.sh)
printf '%s\\n' "$said" | tail -n 1 | cut -d ';' -f 1 > job.new
mv job.new job
"""


# Runs after a failed proof: moves its results into the folder failed/, so that the next check submits a new job.
SET_ASIDE = """\
cd "$1" || exit 0
mkdir -p failed
for proof in *.json; do test -f "$proof" && mv -f -- "$proof" failed/; done
rm -f job
"""


def run(site: Site, target: Target) -> Outcome:
    """Submit a proof job for each node type without a result for this environment, wait for the jobs, and judge the results."""
    proof_request_by_folder: dict[str, tuple[Cluster, NodeType, str]] = {}
    unproven_sentences: list[str] = []
    for cluster in _list_cluster_variants(site.cluster):
        unsuitable_by_type = _select_types(cluster, target.facts[NODE_TYPES], _choose_partition(cluster, target))
        if not unsuitable_by_type:
            partition = cluster.slurm.partition if cluster.slurm is not None else None
            partition_text = f"the partition {partition}" if partition is not None else "any partition"
            sentence = f"Slurm shows no node in {partition_text} that has what the cluster file requests"
            return Outcome(False, sentence, "compare the keys gpus and slurm of the cluster file with what `sinfo` shows")
        tested_types = dict(list(unsuitable_by_type.items())[:MOST_TYPES])
        unproven_sentences += [
            f"{node_type!s}: not proven, as only the {MOST_TYPES} first types are"
            for node_type in unsuitable_by_type
            if node_type not in tested_types
        ]
        proof_request_by_folder |= {
            _choose_proof_folder(cluster, target, node_type): (cluster, node_type, unsuitable_nodes)
            for node_type, unsuitable_nodes in tested_types.items()
        }
    for folder, (cluster, node_type, unsuitable_nodes) in proof_request_by_folder.items():
        proofs = _read_proofs(target, folder)
        # If the job of an earlier command failed, its failure is reported before a new job is submitted.
        if proofs.proofs or proofs.job_id is not None:
            continue
        if (rejection := _submit_proof_job(cluster, target, folder, node_type, unsuitable_nodes)) is not None:
            sentence = f"{node_type!s}: Slurm rejects the job: {rejection}"
            advice = advise_on_rejection(rejection) or "change the keys under slurm in the cluster file as Slurm's words say"
            return Outcome(False, sentence, advice)
    deadline, end_times = time.monotonic() + WAIT_S, dict[str, float]()
    while True:
        results = {folder: _read_proofs(target, folder) for folder in proof_request_by_folder}
        now_s = time.monotonic()
        end_times = {folder: end_times.get(folder, now_s) for folder, proofs in results.items() if proofs.job_state == "ENDED"}
        settled = [proofs.has_all() or now_s - end_times.get(folder, now_s) > VISIBLE_S for folder, proofs in results.items()]
        if all(settled) or now_s > deadline:
            break
        IS_STOPPING.wait(POLL_S)
    outcomes, proofs_by_type = [], []
    for folder, (cluster, node_type, _) in proof_request_by_folder.items():
        requested_gpus = cluster.gpus.per_node if cluster.gpus is not None else 0
        outcomes.append(judged_proof.judge_proofs(node_type, results[folder], folder, requested_gpus))
        if outcomes[-1].passed:
            proofs_by_type.append((node_type, results[folder].proofs))
        elif results[folder].job_state == "ENDED":
            target.node.run(["sh", "-c", SET_ASIDE, "set-aside", folder], timeout_s=60)
    if site.environment_name is None:  # the nodes are the same in every environment
        proven_nodes.record_proven_nodes(site, proofs_by_type)
    failed_outcome = next((outcome for outcome in outcomes if not outcome.passed), None)
    sentence = "; ".join([*(outcome.says for outcome in outcomes), *unproven_sentences])
    advised_outcome = failed_outcome or next((outcome for outcome in outcomes if outcome.advice), None)
    return Outcome(
        failed_outcome is None,
        sentence,
        advised_outcome.advice if advised_outcome else None,
        transcript=failed_outcome.transcript if failed_outcome else "",
    )


def _list_cluster_variants(cluster: Cluster) -> list[Cluster]:
    """The variants of the cluster file: one for cells without a GPU type, and one for each GPU type of `slurm.partitions`."""
    partitions = cluster.slurm.partitions if cluster.slurm is not None else []
    return [cluster, *(cluster.select_gpu_type(partition.gpus.type) for partition in partitions)]


def _choose_partition(cluster: Cluster, target: Target) -> str | None:
    """The partition of the runs: `slurm.partition`, otherwise a default partition with the GPUs that the cluster file requests.

    None: there is no such partition, and a submit plugin of the site may choose any partition.
    """
    partition = cluster.slurm.partition if cluster.slurm is not None else None
    if partition is not None:
        return partition
    default_partitions = [entry.name for entry in target.facts[PARTITIONS] if entry.is_default]
    return next((name for name in default_partitions if _select_types(cluster, target.facts[NODE_TYPES], name)), None)


def _select_types(cluster: Cluster, node_types: tuple[NodeType, ...], partition: str | None) -> dict[NodeType, str]:
    """The node types on which Slurm may start runs. Maps each type to the nodes that its proof job must not get.

    The job must not get nodes with other CPUs or GPUs than the type. Of types with the same CPUs and GPUs, only the type with
    the most nodes is included.
    node_types: all node types of the site. partition: the partition of the runs; None: any partition.
    """
    eligible = [kind for kind in node_types if partition is None or kind.partition in partition.split(",")]
    constraint = cluster.slurm.constraint if cluster.slurm is not None else None
    is_plain = constraint is not None and not set(constraint) & set("|()[]*")  # otherwise only sbatch can evaluate it
    required_features = [word for word in constraint.split("&") if is_name(word)] if constraint is not None and is_plain else []
    similar_groups: dict[tuple[object, ...], list[NodeType]] = {}
    for kind in eligible:
        if len(kind.features) < MOST_FEATURES and any(feature not in kind.features for feature in required_features):
            continue
        if cluster.gpus is None or not cluster.gpus.per_node or _has_requested_gpus(kind, cluster):
            similar_groups.setdefault((kind.cpus, kind.gpus), []).append(kind)
    largest_types = [max(similar_types, key=lambda node_type: node_type.count) for similar_types in similar_groups.values()]
    return {
        kind: ",".join(other.names for other in eligible if (other.cpus, other.gpus) != (kind.cpus, kind.gpus) and other.names)
        for kind in largest_types
    }


def _has_requested_gpus(node_type: NodeType, cluster: Cluster) -> bool:
    requested_gpus = cluster.gpus
    assert requested_gpus is not None
    if cluster.slurm is not None and cluster.slurm.gpu_request == "none":  # Slurm counts no GPUs
        return True
    return any(gpu.count >= requested_gpus.per_node and requested_gpus.type in (None, gpu.type) for gpu in node_type.gpus)


def _choose_proof_folder(cluster: Cluster, target: Target, kind: NodeType) -> str:
    gpu_count = cluster.gpus.per_node if cluster.gpus is not None else 0
    options = requests.list_sbatch_options(
        cluster, node_count=2, minutes=PROOF_MINUTES, gpu_count=gpu_count, cpu_count=_choose_cpu_count(kind)
    )
    folder_key = json.dumps([target.node.python, software.digest_source(), kind.cpus, [str(gpu) for gpu in kind.gpus], options])
    return f"{cluster.storage.shared}/proofs/{hashlib.sha256(folder_key.encode()).hexdigest()[:12]}"


def _choose_cpu_count(node_type: NodeType) -> int:
    """The number of CPU cores that a proof job requests on a node that it may share with other jobs."""
    return min(node_type.cpus, max(2, CPUS_PER_GPU * sum(gpu.count for gpu in node_type.gpus)))


def _read_proofs(target: Target, folder: str) -> ProofResults:
    """Read the results and the state of the proof job in `folder`. Raises Unanswered."""
    shell_output = target.node.run(["sh", "-c", READ_PROOFS, "look", folder], timeout_s=60)
    if shell_output.code != 0:
        raise Unanswered(f"{target.node.name}: {folder}: {find_error_line(shell_output)}")
    node_proofs, job_id, job_state = [], None, "ENDED"
    for output_line in shell_output.stdout.splitlines():
        if output_line.startswith("{"):
            try:
                node_proofs.append(decode_last_line(output_line, NodeProof))
            except ValueError as error:
                raise Unanswered(f"{target.node.name}: {folder}: a result of a node cannot be read: {error}") from None
        elif output_line.startswith("job="):
            job_id, _, job_state = output_line.removeprefix("job=").partition(" ")
    return ProofResults(node_proofs, job_id, job_state)


def _submit_proof_job(cluster: Cluster, target: Target, folder: str, node_type: NodeType, unsuitable_nodes: str) -> str | None:
    """Submit the proof job of a node type. Returns why Slurm rejects the job; None if Slurm accepts it.

    folder: the folder for the job's results. unsuitable_nodes: the names of the nodes that the job must not get.
    """
    gpu_count = cluster.gpus.per_node if cluster.gpus is not None else 0
    node_count = min(2, node_type.count, cluster.slurm.max_nodes or 2 if cluster.slurm is not None else 2)
    excluded = ",".join(
        [*(cluster.slurm.exclude if cluster.slurm is not None else []), *([unsuitable_nodes] if unsuitable_nodes else [])]
    )
    requeue_options = [] if cluster.slurm is not None and "requeue" in cluster.slurm.omit else ["--no-requeue"]
    sbatch_options = [
        "--job-name=shardlab-prove",
        f"--output={folder}/prove.log",
        *requests.list_sbatch_options(
            cluster, node_count=node_count, minutes=PROOF_MINUTES, gpu_count=gpu_count, cpu_count=_choose_cpu_count(node_type)
        ),
        *requeue_options,  # a requeued job would find the files of its first start
        *([f"--exclude={excluded}"] if excluded else []),  # all names in one option: sbatch uses only the last --exclude
    ]
    job_script = templates.render(
        "site/prove.sh.j2",
        options=sbatch_options,
        kind=str(node_type),
        folder=folder,
        container=container.list_srun_options(cluster, folder),
        python=container.find_rank_python(cluster, target.node.python),
    ).encode()
    put_answer = target.node.put(job_script, f"{folder}/prove.sh", mode=0o755, owner="")
    if put_answer.code != 0:
        raise Unanswered(f"{target.node.name}: {folder}/prove.sh: {find_error_line(put_answer)}")
    sbatch_output = target.node.run(["sh", "-c", SUBMIT_PROOF, "submit", folder], timeout_s=120)
    if sbatch_output.code is None:
        raise Unanswered(
            f"{target.node.name}: sbatch did not answer within 120 s; the job may exist, which `squeue --me` shows"
        )
    error_lines = [error_line.strip() for error_line in sbatch_output.stderr.splitlines() if error_line.strip()]
    # All lines are returned, because a submit plugin of the site may explain the rejection in several lines.
    return None if sbatch_output.code == 0 else "; ".join(error_lines)[:500] or find_error_line(sbatch_output)


SITE_NODES = Check("node_types", run, once=True)
