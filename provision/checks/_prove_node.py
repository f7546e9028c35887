"""Runs on each node of a proof job, as one task: looks at the node, tries torch, and meets the other nodes in an all-reduce.

``python -m provision.checks._prove_node FOLDER HEAD`` writes a NodeProof to FOLDER/HOST.json. The shared folder itself carries
the address of the rendezvous and a file of each node, so that a node that does not see the folder of the others is detected.
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
from shardlab import files, host
from shardlab.remote import CommandOutput


def main(argv: list[str]) -> int:
    folder, head = Path(argv[0]), argv[1]
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    place = int(os.environ.get("SLURM_PROCID", "0"))
    (folder / f"word.{name}").write_text(name)
    trial = _trial.attempt()
    seen = _wait_for(folder, "word.*", tasks)
    together = _together(folder, place, tasks, trial, head) if tasks > 1 and len(seen) == tasks else None
    disk = shutil.disk_usage(folder)
    inodes = os.statvfs(folder).f_favail
    proof = NodeProof(
        host=host.observe(),
        trial=trial,
        words=sorted(path.name.partition(".")[2] for path in seen),
        tasks=tasks,
        together=together,
        free_bytes=disk.free,
        free_inodes=inodes or None,
        rdma=_rdma(),
    )
    files.write_atomic(folder / f"{name}.json", msgspec.json.encode(proof))
    return 0


def _rdma() -> list[rdma.RdmaLink]:
    """The RDMA links of this node; none if the kernel's files cannot be read."""
    try:
        return rdma.parse(subprocess.run(rdma.command(""), capture_output=True, text=True, timeout=30, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _wait_for(folder: Path, pattern: str, count: int) -> list[Path]:
    """The files of this pattern, once there are `count` or MEET_S has passed."""
    ends = time.monotonic() + MEET_S
    while len(seen := list(folder.glob(pattern))) < count and time.monotonic() < ends:
        time.sleep(0.5)
    return seen


def _together(folder: Path, place: int, tasks: int, trial: Trial, head: str) -> CommandOutput | None:
    """One rank on each node sums with the others; None if torch does not work here or the first node does not name its port."""
    if not trial.torch.backends:
        return None
    backend = "nccl" if trial.torch.gpus and "nccl" in trial.torch.backends else "gloo"
    address = folder / "endpoint"
    if place == 0:
        with socket.socket() as listening:
            listening.bind(("", 0))
            port = listening.getsockname()[1]
        files.write_atomic(address, f"{head}:{port}".encode())
    if not _wait_for(folder, "endpoint", 1):
        return None
    endpoint = address.read_text()

    other = (
        head
        if place
        else next((path.name.partition(".")[2] for path in folder.glob("word.*") if path.name != f"word.{head}"), head)
    )
    interface = _interface(other)

    def rank() -> None:
        from provision.checks import _all_reduce_ranks

        if interface is not None:
            os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        _all_reduce_ranks.meet(backend, str(tasks), str(place), endpoint, gpu=0)

    return _trial.together([rank], MEET_S)


def _interface(other: str) -> str | None:
    """The network interface on the way to another node; None if its name is not known here."""
    try:
        address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return None
    with socket.socket(address[0], socket.SOCK_DGRAM) as looking:
        looking.connect(address[4])  # sends nothing: it asks the kernel for the route
        own = looking.getsockname()[0]
    nics = psutil.net_if_addrs()
    return next(
        (name for name, entries in nics.items() if any(entry.address.partition("%")[0] == own for entry in entries)), None
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
