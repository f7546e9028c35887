"""The order in which a file system lists the names of a folder changes no result: lists, digests, archives and drawn subsets.

Each file system has an order of its own. A digest that depended on it would differ between the login node and the nodes.
"""

import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import pytest
import support_collect
import support_folder_order

from collect.archiving import contents
from collect.archiving.command import build_index
from collect.reading import load
from collect.sampler import nic
from collect.traces import command as traces
from collect.traces import run_traces
from jobs import run_queue
from jobs.slurm import submission
from jobs.verbs import trace_runs
from provision import software
from provision.datasets import formats
from shardlab import registry
from shardlab.cloudlab import cloudlab_experiment
from shardlab.files import files, plugin_source, source_digest
from shardlab.hardware import host
from shardlab.matrix import matrix
from shardlab.plugins import command_copies
from shardlab.runs import checkpoint, trace_part
from shardlab.runs.rundir import RunDir
from shardlab.transfer import manifest
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from trainers.data import image_list, token_sets
from trainers.forking import address

CLASSES = ("n00000003", "n00000001", "n00000002")
RUN_FILES = ("run.json", "job.sh", "steps/b.jsonl", "steps/a.jsonl", "workloads/b.py", "workloads/a.py")
FILES = [
    *(f"imagenet/{split}/{name}/{number}.JPEG" for split in ("train", "val") for name in CLASSES for number in (7, 2, 5)),
    *(f"runs/RUN/trace/rank-0000{rank}.json.gz" for rank in (2, 0, 1)),
    *(f"runs/RUN/checkpoints/step-0000000{step}/manifest.json" for step in (3, 1, 2)),
    *(f"runs/RUN/{name}" for name in RUN_FILES),
    *(f"workloads/{name}.py" for name in ("rings", "circles", "squares")),
    *(f".shardlab/{name}" for name in ("inventory.json", "submissions/b.json", "submissions/a.json")),
    *(f"runs/ddp-gpt2-tiny-g2-b8-2255b0937cfb-r{repeat}/run.json" for repeat in (2, 1, 3)),
    *(f".shardlab/matrices/{name}.json" for name in ("second", "first")),
    *(f"templates/{name}.j2" for name in ("second", "first")),
    *(f".shardlab/cloudlab/{name}.xml" for name in ("second", "first")),
    *(f"sys/net/eth{number}/statistics/rx_bytes" for number in (2, 0, 1)),
    *(f"sys/node/node{number}/cpulist" for number in (10, 0, 2)),
    *(f"sys/infiniband/mlx5_{number}/ports/1/link_layer" for number in (1, 0)),
    "cluster.yaml",
]  # fmt: skip
# What is listed or computed: a function of the workspace of the fixture, whose result must not depend on the order of folders.
LISTINGS = {
    "the digest of shardlab's source": lambda _: source_digest.digest_source(),
    "the digest of the installed packages": lambda _: source_digest.digest_installed_packages(),
    "shardlab's source as a tar file": lambda _: members(software.make_source_archive.__wrapped__()),
    "the shipped matrices": lambda _: list(matrix.find_shipped_matrices()),
    "the plug-ins of a folder": lambda _: registry.list_plugin_names.__wrapped__("jobs.launchers"),
    "the runs": lambda workspace: workspace.list_run_ids(),
    "the matrices of a workspace": lambda workspace: workspace.list_matrix_names(),
    "the names in a folder": lambda workspace: files.list_names(workspace.path),
    "the files that steer commands": lambda workspace: workspace_trust.steering_files(workspace),
    "the texts of own code": lambda workspace: list(plugin_source.read_carried_files(workspace.path).items()),
    "the code of a run": lambda workspace: run_queue.list_code_files(run(workspace)),
    "the files of a manifest": lambda workspace: list(manifest.list_files(run(workspace).path).status_by_file),
    "the checkpoints": lambda workspace: checkpoint.list_checkpoints(run(workspace).path),
    "the traces of a run": lambda workspace: run_traces.select_regular_files((run(workspace).path / "trace").glob("*")),
    "the traces of a folder": lambda workspace: traces.find_trace_files(workspace, f"{run(workspace).path}/trace"),
    "the traces for jobs": lambda workspace: trace_runs._find_traces(run(workspace).path / "trace"),
    "the numbers of ImageNet's classes": lambda workspace: image_list.list_class_names(workspace.path / "imagenet"),
    "a list of images": lambda workspace: image_digest(workspace, None),
    "a drawn subset of images": lambda workspace: image_digest(workspace, 4),
    "the classes of a data set": lambda workspace: formats.FORMATS["imagenet"].summarize_folder(workspace.path / "imagenet"),
    "the sizes of a data set": lambda workspace: list(
        formats.FORMATS["mnist"].summarize_folder(workspace.path / "workloads").items()
    ),
    "the name of the socket of the warm parent": lambda _: address.compute_warm_parent_key(),
    "the digest of the code that reads traces": lambda _: run_traces._compute_code_digest.__wrapped__(),
    "the user's templates": lambda workspace: workspace.list_template_files(),
    "the manifests of CloudLab": lambda workspace: cloudlab_experiment.list_stored_manifests(workspace.shardlab_folder),
    "the submissions": lambda workspace: submission._list_submission_files(workspace),
    "a frozen copy of a command's folder": lambda workspace: command_copies.list_copy(run(workspace).path),
    "the index of an archive": lambda workspace: list(build_index(workspace.path, "m", [], [], anonymous=False).files),
    "the traces of a part": lambda workspace: trace_part.find_trace_paths(run(workspace).path / "trace"),
    "the network interfaces": lambda workspace: [nic.name for nic in host.list_nics(workspace.path / "sys/net")],
    "the NUMA nodes": lambda workspace: [node.node for node in host.list_numa_nodes(workspace.path / "sys/node")],
    "the RDMA ports": lambda workspace: [port.device for port in nic.RdmaSource(workspace.path / "sys/infiniband")._ports],
    "the texts of the standard library": lambda workspace: token_sets.list_source_files(workspace.path),
}  # fmt: skip


def run(workspace):
    return RunDir(workspace.runs / "RUN")


def members(tar):
    with tarfile.open(fileobj=BytesIO(tar)) as archive:
        return archive.getnames()


def image_digest(workspace, subset):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "images.list")
        image_list._write_list(workspace.path / "imagenet", "train", subset, 7, path)
        return image_list.read_list(path, "train", subset).sha256


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    made = Workspace(tmp_path_factory.mktemp("order"))
    for name in FILES:
        (made.path / name).parent.mkdir(parents=True, exist_ok=True)
        (made.path / name).write_text(name)
    return made


@pytest.mark.parametrize("what", LISTINGS)
def test_a_result_is_the_same_in_whatever_order_folders_are_listed(workspace, monkeypatch, what):
    results = []
    for descending in (False, True):
        with monkeypatch.context() as patched:
            support_folder_order.reverse(patched, descending=descending)
            results.append(LISTINGS[what](workspace))
    assert results[0] == results[1]
    assert results[0]


def test_an_archive_has_the_same_files_in_the_same_order(tmp_path, monkeypatch):
    made = support_collect.matrix(tmp_path)
    chosen = []
    for descending in (False, True):
        with monkeypatch.context() as patched:
            support_folder_order.reverse(patched, descending=descending)
            sources, left_out = contents.choose_files(made, load.load_matrix(made, None), 1 << 30)
        chosen.append([one.archive_path for one in sources] + [one.archive_path for one in left_out])
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) > 20
