"""The task of a proof job on each node: inspects the node, runs the checks of torch, and runs an all-reduce with other nodes.

``python -m provision.checks._prove_node FOLDER HEAD`` writes a NodeProof to FOLDER/HOST.json. FOLDER: in the shared folder.
HEAD: the host name of the first node, which writes the address of the rendezvous into FOLDER. Each node writes a file into
FOLDER and records the files of the other nodes that it sees there: this shows whether all nodes see the same folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from provision.checks import _trial
from provision.checks.node_proof import MEET_S, NodeProof
from provision.checks.trial import Trial
from provision.facts import rdma
from shardlab.files import files
from shardlab.hardware import host
from shardlab.hardware.nccl_log import NCCL_LOG
from shardlab.hardware.socket_interfaces import choose_socket_interfaces
from shardlab.remote.remote import CommandOutput


def main(argv: list[str]) -> int:
    folder, head_node = Path(argv[0]), argv[1]
    node_name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    rank_index = int(os.environ.get("SLURM_PROCID", "0"))
    (folder / f"word.{node_name}").write_text(node_name)
    torch_trial = _trial.try_torch()
    word_paths = _wait_for_files(folder, "word.*", tasks)
    all_reduce = (
        _run_all_reduce(folder, rank_index, tasks, torch_trial, head_node) if tasks > 1 and len(word_paths) == tasks else None
    )
    disk_usage = shutil.disk_usage(folder)
    free_inodes = os.statvfs(folder).f_favail
    node_proof = NodeProof(
        host=host.read_host(),
        trial=torch_trial,
        words=sorted(path.name.partition(".")[2] for path in word_paths),
        tasks=tasks,
        together=all_reduce,
        free_bytes=disk_usage.free,
        free_inodes=free_inodes or None,
        rdma=_read_rdma_links(),
        slingshot=sorted(path.name for path in Path("/sys/class/cxi").glob("cxi*")),
    )
    files.write_atomic(folder / f"{node_name}.json", msgspec.json.encode(node_proof))
    return 0


def _read_rdma_links() -> list[rdma.RdmaLink]:
    """The RDMA links of this node; empty if the kernel's files about them cannot be read."""
    try:
        return rdma.parse(subprocess.run(rdma.build_command(""), capture_output=True, text=True, timeout=30, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _wait_for_files(folder: Path, name_pattern: str, file_count: int) -> list[Path]:
    """Wait until `file_count` files match the pattern, or until MEET_S has passed. Returns the files that match."""
    deadline = time.monotonic() + MEET_S
    while len(matching_paths := list(folder.glob(name_pattern))) < file_count and time.monotonic() < deadline:
        time.sleep(0.5)
    return matching_paths


def _run_all_reduce(folder: Path, rank_index: int, task_count: int, torch_trial: Trial, head: str) -> CommandOutput | None:
    """Run an all-reduce with one rank on each node of the job. Returns the output of the rank of this node.

    None if torch does not work on this node, or if the first node does not write the address of the rendezvous into the folder.
    folder: the folder of the job in the shared folder. rank_index: the rank of this node. task_count: the number of nodes.
    head: the host name of the first node."""
    if not torch_trial.torch.backends:
        return None
    backend = "nccl" if torch_trial.torch.gpus and "nccl" in torch_trial.torch.backends else "gloo"
    endpoint_path = folder / "endpoint"
    if rank_index == 0:
        with socket.socket() as port_probe:
            port_probe.bind(("", 0))
            port = port_probe.getsockname()[1]
        files.write_atomic(endpoint_path, f"{head}:{port}".encode())
    if not _wait_for_files(folder, "endpoint", 1):
        return None
    endpoint = endpoint_path.read_text()

    other_node = (
        head
        if rank_index
        else next((path.name.partition(".")[2] for path in folder.glob("word.*") if path.name != f"word.{head}"), head)
    )
    interface = find_route_interface(other_node)

    def run_own_rank() -> None:
        from provision.checks import _all_reduce_ranks

        os.environ |= {**NCCL_LOG, **os.environ}
        if interface is not None:
            os.environ |= choose_socket_interfaces(os.environ, interface)
        _all_reduce_ranks.run_node_rank(backend, str(task_count), str(rank_index), endpoint)

    return _trial.run_in_children([run_own_rank], MEET_S)


def find_route_interface(other_node: str) -> str | None:
    """The network interface through which this node reaches the node `other_node`; None if it cannot be determined."""
    try:
        node_address = socket.getaddrinfo(other_node, 9, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return None
    with socket.socket(node_address[0], socket.SOCK_DGRAM) as probe_socket:
        probe_socket.connect(node_address[4])  # connect on a UDP socket sends nothing: the kernel only looks up the route
        own_address = probe_socket.getsockname()[0]
    nics = psutil.net_if_addrs()
    return next(
        (name for name, entries in nics.items() if any(entry.address.partition("%")[0] == own_address for entry in entries)),
        None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
