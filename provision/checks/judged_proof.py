"""Judges the results of a proof job (a Slurm job that tests compute nodes): whether every node of the job can train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from provision.check import Outcome
from provision.checks import all_reduce, gpus, torch
from provision.checks.node_proof import MEET_S, NodeProof, Proofs
from provision.checks.trial import PRODUCT_S
from provision.fact import decode
from provision.facts.node_types import NodeType
from shardlab.cluster.all_reduce import MeasuredAllReduce, bus_bandwidth
from shardlab.remote.remote import CommandOutput

MOST_CLOCK_S = 1.0  # allowed difference of the nodes' clocks; with a larger difference, the times of one run cannot be compared
LEAST_FREE_BYTES = 10 << 30
LEAST_INODES = 20_000


def judge(kind: NodeType, seen: Proofs, folder: str, wanted: int) -> Outcome:
    """Returns a passed Outcome if torch, the GPUs, the all-reduces and the shared folder work on every node of the job.

    seen: the results of the job. folder: the path of these results. wanted: the number of GPUs per node that the cluster file
    requests.
    """
    what = str(kind)
    if seen.state != "ENDED" and not seen.has_all():
        return Outcome(
            False, f"{what}: not proven yet, job {seen.job} is {seen.state}", "run `provision verify` when the job has ended"
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
    version = first.trial.torch.version or ""
    says = f"{what}: torch {version} works on {len(seen.nodes)} nodes ({names}){summed}{torch.remark(version)}"
    return Outcome(True, says, all_reduces=tuple(_measured(seen.nodes)))


def _measured(proofs: Sequence[NodeProof]) -> Iterator[MeasuredAllReduce]:
    """The all-reduces of a job that passed: within each node, and between its nodes."""
    for proof in proofs:
        gpu = all_reduce.gpu_of(proof.host)
        several = [one.host.host for one in proofs]
        for answer, nodes in ((proof.trial.all_reduce, [proof.host.host]), (proof.together, several)):
            if answer is not None and (found := all_reduce.measured_by(answer, nodes, gpu)) is not None:
                yield found


def _fault(proof: NodeProof, wanted: int) -> Outcome | None:
    """The Outcome of the first check that a node did not pass; None if the node passed all checks."""
    judged = [torch.judge(proof.trial.torch), gpus.judge(proof.host, proof.trial.torch), _count(proof, wanted)]
    if proof.trial.product is not None and proof.trial.product.code != 0:
        why = all_reduce.why_not(proof.trial.product, PRODUCT_S)
        judged.append(Outcome(False, f"a matrix product on the GPUs failed: {why}", "do not train here"))
    if proof.trial.all_reduce is not None:
        judged.append(all_reduce.judge(proof.trial.all_reduce, cores=proof.host.cpus_allowed))
    if proof.tasks > 1:
        judged.append(_shared(proof))
        if (
            proof.together is not None and '"clock_spread_s"' in proof.together.stdout
        ):  # the report of rank 0 is one line of its output; NCCL may print other lines
            judged.append(_between(proof.together))
        elif proof.together is None or proof.together.code != 0:
            why = (
                all_reduce.why_not(proof.together, MEET_S)
                if proof.together is not None
                else "the nodes did not reach each other"
            )
            judged.append(
                Outcome(False, f"the all-reduce between nodes failed: {why}", "can the nodes reach each other over TCP?")
            )
    if proof.free_bytes < LEAST_FREE_BYTES:
        judged.append(Outcome(False, f"the shared folder has {proof.free_bytes / 2**30:.1f} GiB free", "free some space there"))
    if proof.free_inodes is not None and proof.free_inodes < LEAST_INODES:
        judged.append(Outcome(False, f"the shared folder has {proof.free_inodes:,} inodes free", "remove files there"))
    return next((outcome for outcome in judged if outcome.passed is False), None)


def _count(proof: NodeProof, wanted: int) -> Outcome:
    """Returns a passed Outcome if NVML sees the GPUs that the job requested. If torch is built for CPUs only, no GPU is
    needed."""
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
    """Returns a passed Outcome if the sums of all nodes are exact and their clocks agree."""
    report = _report(answer)
    if report.wrong:
        return Outcome(False, f"the all-reduce between nodes gave {report.wrong} wrong sums", "do not train here")
    if report.clock_spread_s is not None and report.clock_spread_s > MOST_CLOCK_S:
        return Outcome(
            False, f"the clocks of the nodes differ by {report.clock_spread_s:.1f} s", "tell the administrators of the site"
        )
    return Outcome(True, "")


def _report(answer: CommandOutput) -> all_reduce.AllReduceReport:
    """The report of the all-reduce, found among the lines that rank 0 printed."""
    return decode(next(line for line in answer.stdout.splitlines() if '"clock_spread_s"' in line), all_reduce.AllReduceReport)


def _together(answer: CommandOutput) -> str:
    report = _report(answer)
    rate = bus_bandwidth(report.ranks, report.bytes, report.time_s) / 1e9
    return f"all-reduce between {report.ranks} nodes ({report.backend}) is exact, bus bandwidth {rate:.2f} GB/s"
