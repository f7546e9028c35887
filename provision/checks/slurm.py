"""Checks Slurm: a job runs on all workers, gets the number of GPUs that it requests, and sacct reports its exit code."""

from __future__ import annotations

from provision.check import Check, Outcome, absent_nodes_note
from provision.node import Node, find_error_line
from provision.operation import Site, Target
from shardlab.remote.remote import CommandOutput

CANARY_CODE = 7  # the exit code of the test job; no other error of a job is likely to have this exit code
LIMIT_S = 180.0
# Submits a job that exits with CANARY_CODE, and prints what sacct reports. sacct reports the end of a job some seconds late.
# If slurmctld has just connected to slurmdbd, it reports start and end at once: the state first, the exit code afterwards.
CANARY_SCRIPT = f"""\
cd "${{TMPDIR:-/tmp}}"
worker=$1; shift
id=$(sbatch --parsable -w "$worker" "$@" --job-name=shardlab-canary --output=/dev/null --time=2 --wrap='exit {CANARY_CODE}')
id=${{id%%;*}}
for n in $(seq 240); do
    said=$(sacct -X -n -P -j "$id" -o State,ExitCode)
    case "$said" in ''|PENDING*|RUNNING*|COMPLETING*|FAILED'|'0:0) sleep 0.5 ;; *) echo "$said"; exit 0 ;; esac
done
echo "${{said:-nothing}}"
"""


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if Slurm runs a job on all workers, hands out one GPU, and reports an exit code."""
    if site.cluster.slurm is None:
        return Outcome(None, "cluster.yaml has no key slurm")
    (controller,) = site.list_with_role("controller")
    workers = sorted(worker.node.name for worker in site.list_with_role("worker") if worker.node.name not in site.skipped)
    node = controller.node
    if node.name in site.skipped or not workers:
        return Outcome(None, f"the controller or all workers do not answer{absent_nodes_note(site)}")
    slurm_options = _make_slurm_options(site)
    srun_words = ["srun", *slurm_options, "-N", str(len(workers)), "-w", ",".join(workers), "--ntasks-per-node=1", "--time=2"]
    spread_output = node.run([*srun_words, "hostname"], timeout_s=LIMIT_S)
    if (fault := _describe_fault(spread_output)) or sorted(spread_output.stdout.split()) != workers:
        text = f"a job on all {len(workers)} workers ran on {', '.join(sorted(spread_output.stdout.split())) or 'none'}{fault}"
        return Outcome(False, text, f"on {node.name}: sinfo -R; journalctl -u slurmctld", transcript=spread_output.stderr)
    if (gpu_failure := _check_gpu_job(site, node, workers[0])) is not None:
        return gpu_failure
    canary = node.run(["sh", "-c", CANARY_SCRIPT, "canary", workers[0], *slurm_options], timeout_s=LIMIT_S)
    if (fault := _describe_fault(canary)) or canary.stdout.strip() != f"FAILED|{CANARY_CODE}:0":
        text = f"for a job that ends with exit code {CANARY_CODE}, sacct reports: {canary.stdout.strip() or 'nothing'}{fault}"
        return Outcome(False, text, f"on {node.name}: sacctmgr show cluster; journalctl -u slurmdbd", transcript=canary.stderr)
    gpu_clause = "; a job that requests one GPU sees one" if site.cluster.gpus and site.cluster.gpus.per_node else ""
    text = f"a job ran on {', '.join(workers)}{gpu_clause}; sacct reports exit codes{absent_nodes_note(site)}"
    return Outcome(True, text)


def _check_gpu_job(site: Site, controller_node: Node, worker: str) -> Outcome | None:
    """A failed Outcome if a job that requests one GPU does not see exactly one GPU; otherwise None. None also if the cluster
    file requests no GPUs.

    worker: the node on which the job runs. The job names this node because Slurm may not know yet which nodes are down.
    """
    if not (site.cluster.gpus and site.cluster.gpus.per_node):
        return None
    srun_words = [
        "srun",
        *_make_slurm_options(site),
        "-n1",
        "-w",
        worker,
        "--gpus-per-node=1",
        "--time=2",
        "sh",
        "-c",
        "echo $CUDA_VISIBLE_DEVICES",
    ]
    job_output = controller_node.run(srun_words, timeout_s=LIMIT_S)
    gpu_numbers = [gpu_number for gpu_number in job_output.stdout.strip().split(",") if gpu_number]
    if (fault_clause := _describe_fault(job_output)) or len(gpu_numbers) != 1:
        failure_text = f"a job that requests one GPU sees {len(gpu_numbers)}{fault_clause}"
        return Outcome(
            False,
            failure_text,
            f"on {controller_node.name}: scontrol show node; see gres in the slurmd logs of workers",
            transcript=job_output.stderr,
        )
    return None


def _make_slurm_options(site: Site) -> list[str]:
    """The options of the cluster file for srun and sbatch.

    A Slurm that provision did not install may have another default partition, or may require an account.
    """
    assert site.cluster.slurm is not None
    slurm_keys = site.cluster.slurm
    option_values = {"partition": slurm_keys.partition, "account": slurm_keys.account, "qos": slurm_keys.qos}
    return [f"--{name}={value}" for name, value in option_values.items() if value is not None]


def _describe_fault(job_output: CommandOutput) -> str:
    if job_output.code is None:
        return f"; it did not end within {LIMIT_S:g} s"
    return f"; {find_error_line(job_output)}" if job_output.code else ""


SLURM = Check("slurm", run, once=True)
