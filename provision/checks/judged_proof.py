"""Judges the results of a proof job (a Slurm job that tests compute nodes): whether every node of the job can train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from provision import clock
from provision.check import Outcome
from provision.checks import all_reduce, gpus, torch, transport
from provision.checks.node_proof import MEET_S, NodeProof, ProofResults
from provision.checks.trial import PRODUCT_S
from provision.facts.node_types import NodeType
from shardlab.cluster import slurm_waiting
from shardlab.cluster.all_reduce import MeasuredAllReduce, compute_bus_bandwidth
from shardlab.remote.remote import CommandOutput

LEAST_FREE_BYTES = 10 << 30
LEAST_INODES = 20_000


def judge_proofs(node_type: NodeType, results: ProofResults, folder: str, requested_gpus: int) -> Outcome:
    """Returns a passed Outcome if torch, the GPUs, the all-reduces and the shared folder work on every node of the job.

    results: the results of the job. folder: the path of these results. requested_gpus: the number of GPUs per node that the
    cluster file requests."""
    type_text = str(node_type)
    if results.job_state != "ENDED" and not results.has_all():
        job_state, _, pending_reason = results.job_state.partition(" ")
        clause = slurm_waiting.explain_waiting(pending_reason, slurm_waiting.FOR_PROVISION)
        return Outcome(
            False,
            f"{type_text}: not proven yet, job {results.job_id} is {f'{job_state}: {clause}' if clause else results.job_state}",
            "run `provision verify` when the job has ended",
        )
    if not results.proofs:
        return Outcome(False, f"{type_text}: job {results.job_id} ended without a result", f"read {folder}/prove.log")
    if len(results.proofs) < results.proofs[0].tasks:
        missing_count = results.proofs[0].tasks - len(results.proofs)
        return Outcome(
            False, f"{type_text}: {missing_count} of {results.proofs[0].tasks} nodes gave no result", f"read {folder}/prove.log"
        )
    for proof in results.proofs:
        if (failed_outcome := _find_failed_check(proof, requested_gpus)) is not None:
            return Outcome(
                False,
                f"{type_text}: {proof.host.host}: {failed_outcome.says}",
                failed_outcome.advice,
                transcript=failed_outcome.transcript,
            )
    all_reduce_outputs = [proof.together for proof in results.proofs if proof.together is not None]
    complete_outputs = [output for output in all_reduce_outputs if '"clock_spread_s"' in output.stdout]
    first_proof = results.proofs[0]
    all_reduce_text, advice = _describe_all_reduce(complete_outputs[0], results.proofs) if complete_outputs else ("", None)
    all_reduce_clause = f"; {all_reduce_text}" if complete_outputs else ""
    first_gpus = first_proof.host.gpus
    gpu_text = f"{len(first_gpus)} x {first_gpus[0].name}" if first_gpus else "no GPU"
    torch_version = first_proof.trial.torch.version or ""
    remark = torch.describe_untried_release(torch_version)
    sentence = (
        f"{type_text}: torch {torch_version} works on {len(results.proofs)} nodes ({gpu_text}){all_reduce_clause}{remark}"
    )
    return Outcome(True, sentence, advice, all_reduces=tuple(_read_measurements(results.proofs)))


def _read_measurements(proofs: Sequence[NodeProof]) -> Iterator[MeasuredAllReduce]:
    """The all-reduces of a job that passed: within each node, and between its nodes."""
    for proof in proofs:
        gpu_name = all_reduce.find_first_gpu_name(proof.host)
        node_names = [other.host.host for other in proofs]
        for output, rank_nodes in ((proof.trial.all_reduce, [proof.host.host]), (proof.together, node_names)):
            if output is not None and (measurement := all_reduce.read_measurement(output, rank_nodes, gpu_name)) is not None:
                yield measurement


def _find_failed_check(proof: NodeProof, requested_gpus: int) -> Outcome | None:
    """The Outcome of the first check that a node did not pass; None if the node passed all checks."""
    torch_state = proof.trial.torch
    checks = [torch.judge_torch(torch_state), gpus.judge_gpus(proof.host, torch_state), _check_gpu_count(proof, requested_gpus)]
    if proof.trial.product is not None and proof.trial.product.code != 0:
        reason = all_reduce.explain_failure(proof.trial.product, PRODUCT_S)
        checks.append(Outcome(False, f"a matrix product on the GPUs failed: {reason}", "do not train here"))
    if proof.trial.all_reduce is not None:
        checks.append(all_reduce.judge_all_reduce(proof.trial.all_reduce, cores=proof.host.cpus_allowed))
    if proof.tasks > 1:
        checks.append(_check_shared_folder(proof))
        # The report of rank 0 is one line of its output; NCCL may print other lines
        if proof.together is not None and '"clock_spread_s"' in proof.together.stdout:
            checks.append(_check_all_reduce(proof.together))
        elif proof.together is None or proof.together.code != 0:
            reason = (
                all_reduce.explain_failure(proof.together, MEET_S)
                if proof.together is not None
                else "the nodes did not reach each other"
            )
            checks.append(
                Outcome(False, f"the all-reduce between nodes failed: {reason}", "can the nodes reach each other over TCP?")
            )
    if proof.free_bytes < LEAST_FREE_BYTES:
        checks.append(Outcome(False, f"the shared folder has {proof.free_bytes / 2**30:.1f} GiB free", "free some space there"))
    if proof.free_inodes is not None and proof.free_inodes < LEAST_INODES:
        checks.append(Outcome(False, f"the shared folder has {proof.free_inodes:,} inodes free", "remove files there"))
    return next((check_outcome for check_outcome in checks if check_outcome.passed is False), None)


def _check_gpu_count(proof: NodeProof, requested_count: int) -> Outcome:
    """Returns a passed Outcome if NVML sees the GPUs that the job requested. If torch is built for CPUs only, no GPU is
    needed."""
    gpu_count = len(proof.host.gpus or ())
    if gpu_count >= requested_count or (gpu_count == 0 and proof.trial.torch.cuda is None):
        return Outcome(True, "")
    absent_clause = f" ({proof.host.gpu_why_absent})" if proof.host.gpu_why_absent else ""
    return Outcome(
        False,
        f"the job requested {requested_count} GPUs, NVML sees {gpu_count}{absent_clause}",
        "are these NVIDIA GPUs, and does the driver work?",
    )


def _check_shared_folder(proof: NodeProof) -> Outcome:
    if len(proof.words) == proof.tasks:
        return Outcome(True, "")
    return Outcome(
        False,
        f"it sees only the files of {', '.join(proof.words) or 'no node'} in the shared folder",
        "is storage.shared the same folder on all nodes?",
    )


def _check_all_reduce(rank_output: CommandOutput) -> Outcome:
    """Returns a passed Outcome if the sums of all nodes are exact and their clocks agree."""
    report = all_reduce.read_report(rank_output)
    if report.wrong:
        return Outcome(False, f"the all-reduce between nodes gave {report.wrong} wrong sums", "do not train here")
    if report.clock_spread_s is not None and report.clock_spread_s > clock.MOST_OFFSET_S:
        return Outcome(
            False, f"the clocks of the nodes differ by {report.clock_spread_s:.1f} s", "tell the administrators of the site"
        )
    return Outcome(True, "")


def _describe_all_reduce(rank_output: CommandOutput, proofs: Sequence[NodeProof]) -> tuple[str, str | None]:
    """Returns (a clause about the all-reduce between nodes and its transport, advice if the transport is not the fast one)."""
    report = all_reduce.read_report(rank_output)
    bandwidth_gb_per_s = compute_bus_bandwidth(report.ranks, report.bytes, report.time_s) / 1e9
    clause = f"all-reduce between {report.ranks} nodes ({report.backend}) is exact, bus bandwidth {bandwidth_gb_per_s:.2f} GB/s"
    if report.backend != "nccl":
        return clause, None
    active_links = [link.name for proof in proofs for link in proof.rdma if link.state == "ACTIVE"]
    devices = [*active_links, *(slingshot_name for proof in proofs for slingshot_name in proof.slingshot)]
    transports = transport.read_transports([proof.together for proof in proofs if proof.together is not None])
    transport_clause, advice = transport.judge_transport(transports, devices)
    return clause + transport_clause, advice
