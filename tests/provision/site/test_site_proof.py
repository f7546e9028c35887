"""Proof jobs, which test the nodes of a site: which types of nodes get a job, how its result is judged, and what is kept."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from provision.check import Outcome
from provision.checks import judged_proof, node_types
from provision.checks.node_proof import NodeProof, ProofResults
from provision.checks.trial import Trial
from provision.fact import FactAnswers, Unanswered
from provision.facts.node_types import NODE_TYPES, parse
from provision.facts.partitions import PARTITIONS
from provision.facts.partitions import parse as parse_partitions
from provision.facts.rdma import RdmaLink
from provision.facts.torch import Torch
from provision.nodes.login_node import LocalLoginNode
from provision.operation import Site, Target
from shardlab.cluster import cluster
from shardlab.hardware.host import Host
from shardlab.hardware.nvml import Gpu
from shardlab.remote.remote import CommandOutput
from shardlab.workspace.workspace import Workspace

GPU = Gpu(uuid="GPU-1", name="NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30)
TORCH = Torch(version="2.13.0", cuda="12.8", gpus=2, backends=["gloo", "nccl"])
REPORT = (
    '{{"backend":"nccl","ranks":2,"bytes":1000000,"wrong":{wrong},"iterations":5,"time_s":0.001,"clock_spread_s":{spread}}}\n'
)


def summed(wrong: int = 0, spread: float = 0.01) -> CommandOutput:
    """Returns the output of a command that measures an all-reduce: a line that NCCL prints, and then the line of rank 0."""
    return CommandOutput(0, "NCCL version 2.27\n" + REPORT.format(wrong=wrong, spread=spread), "")


def host(name: str, **changes: object) -> Host:
    known = {
        "schema": 1, "host": name, "boot_id": "b", "kernel": "6.1", "system": "Linux", "cpu_model": None, "cpus": 64,
        "cpus_allowed": 64, "memory_bytes": 2**38, "gpu_driver": "550.54", "gpus": [GPU, GPU], "nics": [], "python": "3.11.2",
        "packages": {},
    }  # fmt: skip
    return Host(**(known | changes))


def proof(name: str = "g1", **changes: object) -> NodeProof:
    """Returns the result of a node with two GPUs on which every test passed, in a job of two nodes."""
    known = {
        "host": host(name),
        "trial": Trial(TORCH, all_reduce=summed(), product=CommandOutput(0, "", "")),
        "words": ["g1", "g2"],
        "tasks": 2,
        "free_bytes": 2**40,
        "free_inodes": 10**6,
        "together": summed() if name == "g1" else CommandOutput(0, "", ""),
        "rdma": [RdmaLink("mlx5_0", 1, "ACTIVE", "InfiniBand", "ib0", [])],
    }
    return NodeProof(**(known | changes))


(KIND,) = parse("gpu|2|64|512000|gpu:a100:2(S:0-1)|a100|g[1-2]\n")


def judged(*nodes: NodeProof, state: str = "ENDED", wanted: int = 2) -> Outcome:
    return judged_proof.judge_proofs(KIND, ProofResults(list(nodes), "7", state), "/s/proofs/0", wanted)


def test_nodes_with_successful_checks_pass():
    outcome = judged(proof("g1"), proof("g2"))
    assert outcome.passed
    assert (
        "torch 2.13.0 works on 2 nodes (2 x NVIDIA A100-SXM4-40GB); all-reduce between 2 nodes (nccl) is exact" in outcome.says
    )
    assert judged(proof(tasks=1, words=["g1"], together=None)).passed, "a job of one node"


SOCKET_LOG = """g1:4:5 [0] NCCL INFO NET/Socket : Using [0]ens1f0:10.0.0.1<0>
g1:4:6 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
RDMA_LOG = """g1:4:5 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>
g1:4:6 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""
FELL_BACK = "WARNING: NCCL fell back to TCP (NET/Socket on ens1f0), although there are RDMA devices"


@pytest.mark.parametrize(
    ("log", "devices", "says"),
    [
        (RDMA_LOG, {}, "NCCL took NET/IB on mlx5_0 (IB), with GPUDirect RDMA"),
        (SOCKET_LOG, {}, f"{FELL_BACK} (mlx5_0/1)"),
        (SOCKET_LOG, {"rdma": [], "slingshot": ["cxi0", "cxi1"]}, f"{FELL_BACK} (cxi0, cxi1)"),
        (SOCKET_LOG, {"rdma": []}, "NCCL took NET/Socket on ens1f0"),
        (SOCKET_LOG, {"rdma": [RdmaLink("mlx5_0", 1, "DOWN", "InfiniBand", "ib0", [])]}, "NCCL took NET/Socket on ens1f0"),
        ("", {}, "its transport is not known, because NCCL's log names none"),
    ],
    ids=["rdma", "fell back", "fell back on slingshot", "no rdma", "rdma is down", "no log"],
)
def test_a_proof_says_which_transport_nccl_took_and_warns_of_tcp(log, devices, says):
    """The log is recorded: no such hardware was there. NCCL may print lines before and after the report."""
    answer = CommandOutput(
        0, log + REPORT.format(wrong=0, spread=0.01) + "g1:4:6 [0] NCCL INFO comm 0x1 - Destroy COMPLETE\n", ""
    )
    outcome = judged(proof("g1", together=answer, **devices), proof("g2", **devices))
    assert outcome.passed
    assert says in outcome.says
    assert (outcome.advice is not None) is ("WARNING" in says)


def test_the_all_reduces_of_a_job_that_passed_are_kept_for_the_inventory():
    times = [{"bytes": 16384, "seconds": 2e-5, "fastest_s": 1e-5, "slowest_s": 3e-5, "bus_bandwidth_gb_per_s": 0.8}]
    report = json.loads(REPORT.format(wrong=0, spread=0.01)) | {"times": times}
    answer = CommandOutput(0, f"NCCL version 2.27\n{json.dumps(report)}\n", "")
    trial = Trial(TORCH, all_reduce=answer, product=CommandOutput(0, "", ""))
    outcome = judged(proof("g1", trial=trial, together=answer), proof("g2", trial=trial))
    assert outcome.passed
    found = {one.nodes: (one.backend, one.gpu, one.ranks, one.times[0].seconds) for one in outcome.all_reduces}
    assert found == dict.fromkeys([("g1",), ("g2",), ("g1", "g2")], ("nccl", GPU.name, 2, 2e-5))
    assert judged(proof("g1"), proof("g2")).all_reduces == ()  # no report has times


FAILED = CommandOutput(1, "", "RuntimeError: no kernel image is available\n")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"trial": Trial(Torch(why_absent="ImportError: libcudart.so.12"))},
            "torch cannot be imported (ImportError: libcudart",
        ),
        (
            {"trial": Trial(Torch(version="2.13.0", cuda="13.0", why_no_gpus="driver too old", backends=["gloo"]))},
            "NVML sees 2 GPUs, torch none (driver too old)",
        ),
        ({"host": host("g2", gpus=[GPU])}, "NVML sees 1 GPUs, torch 2"),
        (
            {
                "host": host("g2", gpus=[GPU]),
                "trial": Trial(msgspec.structs.replace(TORCH, gpus=1), all_reduce=summed(), product=CommandOutput(0, "", "")),
            },
            "the job requested 2 GPUs, NVML sees 1",
        ),
        ({"trial": Trial(TORCH, all_reduce=summed(), product=FAILED)}, "a matrix product on the GPUs failed: RuntimeError"),
        (
            {"trial": Trial(TORCH, all_reduce=FAILED, product=CommandOutput(0, "", ""))},
            "2-rank all-reduce failed: RuntimeError",
        ),
        ({"trial": Trial(TORCH, all_reduce=summed(wrong=3), product=CommandOutput(0, "", ""))}, "gave 3 wrong sums"),
        ({"words": ["g2"]}, "it sees only the files of g2 in the shared folder"),
        ({"together": None}, "the all-reduce between nodes failed: the nodes did not reach each other"),
        ({"together": CommandOutput(None, "", "")}, "the all-reduce between nodes failed: it did not end within 120 s"),
        ({"together": summed(wrong=1)}, "the all-reduce between nodes gave 1 wrong sums"),
        ({"together": summed(spread=2.5)}, "the clocks of the nodes differ by 2.5 s"),
        ({"free_bytes": 2**30}, "the shared folder has 1.0 GiB free"),
        ({"free_inodes": 12}, "the shared folder has 12 inodes free"),
    ],
)
def test_each_fault_of_a_node_fails_its_type_and_names_the_node(changes, says):
    outcome = judged(proof("g1"), proof("g2", **changes))
    assert outcome.passed is False
    assert outcome.says.startswith("nodes with 64 CPUs and 2 GPUs a100: g2: ")
    assert says in outcome.says
    assert outcome.advice


@pytest.mark.parametrize(
    ("nodes", "state", "says"),
    [
        ([], "PENDING Priority", "not proven yet, job 7 is PENDING Priority"),
        ([proof("g1")], "RUNNING None", "not proven yet, job 7 is RUNNING None"),
        ([], "ENDED", "job 7 ended without a result"),
        ([proof("g1")], "ENDED", "1 of 2 nodes gave no result"),
    ],
)
def test_a_job_that_has_not_ended_or_gave_too_few_results_proves_nothing(nodes, state, says):
    outcome = judged(*nodes, state=state)
    assert outcome.passed is False
    assert says in outcome.says


FILE = """\
schema: 1
name: site
provider: slurm
slurm: {partition: PARTITION, constraint: CONSTRAINT}
gpus: {per_node: 2, type: a100}
storage: {shared: SHARED}
"""
SINFO = """\
cpu|90|128|512000|(null)|(null)|c[1-90]
gpu|1|64|512000|gpu:a100:2(S:0-1)|a100,ib|g3
gpu|2|64|512000|gpu:a100:2(S:0-1)|a100|g[1-2]
gpu|4|96|512000|gpu:a100:4(S:0-3),gpu:a100_1g.5gb:7|a100,ib|h[1-4]
gpu|9|64|512000|gpu:v100:4(S:0-1)|v100,ib|v[1-9]
gpu|7|64|512000|gpu:a100:1|a100,ib|s[1-7]
other|1|64|512000|gpu:a100:2|a100|o1
"""
DEFAULT = "PartitionName=cpu Default={} State=UP\nPartitionName=gpu Default={} State=UP\n"


class LoginHere(LocalLoginNode, eq=False):
    """The login node. Commands on it run as the user of this process."""


def at(tmp_path, sinfo: str = SINFO, partition: str = "gpu", constraint: str = "null", default: str = "cpu"):
    """Returns a site and its login node, whose answers of Slurm are given by the arguments."""
    text = FILE.replace("PARTITION", partition).replace("CONSTRAINT", constraint).replace("SHARED", str(tmp_path / "shared"))
    (tmp_path / "cluster.yaml").write_text(text)
    described = cluster.load_cluster(tmp_path / "cluster.yaml")
    node = LoginHere(name="login", python=str(tmp_path / "shared/python-0/bin/python"))
    target = Target(node, FactAnswers(node))
    target.facts.answers[NODE_TYPES.name] = parse(sinfo)
    is_default = ["YES" if name == default else "NO" for name in ("cpu", "gpu")]
    target.facts.answers[PARTITIONS.name] = parse_partitions(DEFAULT.format(*is_default))
    return Site(described, Workspace(tmp_path), [target]), target


def types(site: Site, target: Target) -> dict[str, str]:
    """Maps the nodes of each type that gets a proof job to the nodes that this job must avoid."""
    partition = node_types._choose_partition(site.cluster, target)
    known = node_types._select_types(site.cluster, target.facts[NODE_TYPES], partition)
    return {kind.names: others for kind, others in known.items()}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, {"g[1-2]": "h[1-4],v[1-9],s[1-7]", "h[1-4]": "g3,g[1-2],v[1-9],s[1-7]"}),
        ({"constraint": "a100&ib"}, {"g3": "h[1-4],v[1-9],s[1-7]", "h[1-4]": "g3,g[1-2],v[1-9],s[1-7]"}),
        ({"partition": "other"}, {"o1": ""}),
        ({"partition": "null", "default": "gpu"}, {"g[1-2]": "h[1-4],v[1-9],s[1-7]", "h[1-4]": "g3,g[1-2],v[1-9],s[1-7]"}),
        # Runs may not choose a partition, and the default partition has no such GPUs: a submit plugin of the site chooses one.
        ({"partition": "null"}, {"g[1-2]": "c[1-90],h[1-4],v[1-9],s[1-7]", "h[1-4]": "c[1-90],g3,g[1-2],v[1-9],s[1-7],o1"}),
    ],
)
def test_each_type_of_nodes_on_which_runs_can_land_gets_one_job(tmp_path, how, expected):
    found = types(*at(tmp_path, **how))
    assert set(found) == set(expected)
    assert {name: set(others.split(",")) for name, others in found.items()} == {
        name: set(others.split(",")) for name, others in expected.items()
    }


SBATCH = """\
#!/bin/sh
test ! -f REFUSES || { cat REFUSES >&2; exit 1; }
echo "$(pwd) $SBATCH_PARTITION" >> SUBMITTED
cp RESULTS/*.json . 2> /dev/null
echo "a line of the site"
echo "7;cluster"
"""
SQUEUE = (
    "#!/bin/sh\ntest ! -f STATE || { cat STATE; exit; }\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands. sbatch writes the files of `results` into the folder of the job. squeue knows no job,
    or prints the file `state` if it exists."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    (folder / "results").mkdir()
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        for word in ("REFUSES", "SUBMITTED", "RESULTS", "STATE"):
            script = script.replace(word, str(folder / word.lower()))
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=os.pathsep)
    monkeypatch.setenv("SBATCH_PARTITION", "of-the-user")
    monkeypatch.setattr(node_types, "WAIT_S", 0)
    return folder


def results(commands, *nodes: NodeProof) -> None:
    for path in (commands / "results").iterdir():
        path.unlink()
    for node in nodes:
        (commands / "results" / f"{node.host.host}.json").write_bytes(msgspec.json.encode(node))


def submitted(commands) -> list[str]:
    """Returns the folders of the jobs in the order of submission. Checks that no job got the partition of the user's
    environment."""
    lines = (commands / "submitted").read_text().splitlines() if (commands / "submitted").exists() else []
    assert not any(line.endswith("of-the-user") for line in lines)
    return [line.strip() for line in lines]


def inventory(tmp_path) -> dict:
    return json.loads((tmp_path / ".shardlab/inventory.json").read_text())


def test_a_type_is_proven_once_and_the_inventory_keeps_gpus_and_interconnect(tmp_path, commands):
    site, target = at(tmp_path, partition="other")
    (tmp_path / "shared").mkdir()
    (tmp_path / ".shardlab").mkdir()
    (tmp_path / ".shardlab/inventory.json").write_text('{"schema": 1, "cluster": "site", "nodes": []}')
    results(commands, proof("o1", tasks=1, words=["o1"], together=None))
    for _ in range(2):
        outcome = node_types.run(site, target)
        assert outcome.passed, outcome.says
    assert len(submitted(commands)) == 1
    (kind,) = inventory(tmp_path)["node_types"]
    assert (kind["partition"], kind["cpus"], kind["gpus"]) == ("other", 64, [{"type": "a100", "count": 2}])
    (node,) = kind["nodes"]
    assert [(gpu["name"], gpu["memory_bytes"]) for gpu in node["facts"]["gpus"]] == [(GPU.name, 40 << 30)] * 2
    assert [(link["device"], link["layer"]) for link in node["rdma"]] == [("mlx5_0", "InfiniBand")]
    (job,) = (tmp_path / "shared/proofs").glob("*/job")
    assert job.read_text() == "7\n"


def test_a_job_that_failed_is_reported_first_and_submitted_again_by_the_next_command(tmp_path, commands):
    site, target = at(tmp_path, partition="other")
    (tmp_path / "shared").mkdir()
    bad = proof("o1", tasks=1, words=["o1"], together=None, free_bytes=1)
    results(commands, bad)
    assert node_types.run(site, target).passed is False
    (folder,) = submitted(commands)
    assert [path.name for path in Path(f"{folder}/failed").iterdir()] == ["o1.json"]
    results(commands, msgspec.structs.replace(bad, free_bytes=2**40))
    assert node_types.run(site, target).passed
    assert submitted(commands) == [folder, folder]


def test_a_job_that_waits_in_the_queue_is_not_submitted_twice(tmp_path, commands):
    site, target = at(tmp_path, partition="other")
    (tmp_path / "shared").mkdir()
    (commands / "state").write_text("PENDING ReqNodeNotAvail, UnavailableNodes:o1\n")
    for _ in range(2):
        outcome = node_types.run(site, target)
        assert outcome.passed is False
        assert "not proven yet, job 7 is PENDING: nodes that it needs are down, drained or reserved" in outcome.says
        assert "(ReqNodeNotAvail, UnavailableNodes:o1)" in outcome.says
    assert len(submitted(commands)) == 1


def test_the_state_of_a_job_is_read_below_the_name_of_its_cluster(tmp_path, commands):
    site, target = at(tmp_path, partition="other")
    (tmp_path / "shared").mkdir()
    (commands / "state").write_text("CLUSTER: cm4\nPENDING Resources\n")
    assert "not proven yet, job 7 is PENDING Resources" in node_types.run(site, target).says
    (commands / "state").write_text("CLUSTER: cm4\n")  # Slurm does not list the job any more
    assert "job 7 is" not in node_types.run(site, target).says


def test_the_words_with_which_slurm_rejects_a_job_are_repeated(tmp_path, commands):
    site, target = at(tmp_path, partition="other")
    (tmp_path / "shared").mkdir()
    (commands / "refuses").write_text(
        "sbatch: error: use an account\nsbatch: error: Batch job submission failed: Unspecified error\n"
    )
    outcome = node_types.run(site, target)
    assert outcome.passed is False
    assert "Slurm rejects the job: sbatch: error: use an account" in outcome.says
    assert not list((tmp_path / "shared/proofs").glob("*/job"))


def test_an_unreadable_result_is_reported(tmp_path, commands):
    site, target = at(tmp_path, partition="other")
    (tmp_path / "shared").mkdir()
    (commands / "results/o1.json").write_text('{"host": 7}')
    with pytest.raises(Unanswered, match=r"proofs/\w+: a result of a node cannot be read: "):
        node_types.run(site, target)
