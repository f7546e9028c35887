"""Which network interface a run used, and whether it used RDMA, as counters of interfaces and lines of NCCL in logs show."""

import os

import pytest
import support_collect as support

from collect import summary
from collect.reading import load
from shardlab.hardware import nccl_log
from shardlab.workspace.workspace import Workspace

# Lines of a log, in the formats that NCCL's source files net.cc, p2p.cc, shm.cc and net_ib.cc print.
RDMA = b"""gpu0:41:52 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_2:1/IB [RO]; OOB eno1:10.0.0.1<0>
gpu0:41:52 [0] NCCL INFO Using network IB
gpu0:41:61 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [send] via NET/IB/0/GDRDMA
gpu0:41:61 [0] NCCL INFO Channel 01/0 : 3[3] -> 4[0] [send] via NET/IB/1
gpu0:41:61 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
SOCKET = b"""gpu0:41:52 [0] NCCL INFO NET/IB : No device found.
gpu0:41:52 [0] NCCL INFO NET/Socket : Using [0]ens1f0:10.0.0.1<0> [1]bond0.7:10.1.0.1<0>
gpu0:41:61 [0] NCCL INFO Channel 00/0 : 1[c1000] -> 0[41000] [receive] via NET/Socket/0
gpu0:41:61 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
"""
# Lines of the plug-in aws-ofi-nccl, in the formats that its releases 1.6 to 1.17 print.
SLINGSHOT = b"""nid1:7:9 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
nid1:7:9 [0] NCCL INFO Using network AWS Libfabric
nid1:7:9 [0] NCCL INFO Channel 00/0 : 3[c1000] -> 4[3000] [send] via NET/AWS Libfabric/2/GDRDMA
"""
EFA = b"""ip-10-0-0-1:7:9 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
ip-10-0-0-1:7:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/Libfabric/0/GDRDMA
"""
LIBFABRIC_TCP = SLINGSHOT.replace(b"cxi", b"tcp").replace(b"/GDRDMA", b"")
INSIDE = b"gpu0:41:61 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
PLUGIN = b"gpu0:41:61 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS\n"


def told(*logs):
    found = nccl_log.NcclTransports()
    for log in logs:
        nccl_log.add_log(found, log)
    return found


def test_nccls_lines_say_the_transports():
    found = told(RDMA, RDMA)
    assert (found.channels, found.gpudirect) == ({"NET/IB": 4, "P2P": 2}, 2)
    assert found.devices == ["mlx5_0 (RoCE)", "mlx5_2 (IB)"]
    assert found.rdma is True
    plugin = told(RDMA.replace(b"NET/IB/", b"NET/IBext_v8/"))
    assert (plugin.channels["NET/IBext_v8"], plugin.rdma) == (2, True)
    found = told(SOCKET)
    assert (found.channels, found.interfaces) == ({"NET/Socket": 1, "SHM": 1}, ["ens1f0", "bond0.7"])
    assert found.rdma is False
    assert told(INSIDE).rdma is False
    assert told(PLUGIN).rdma is None
    assert told(b"").rdma is None
    assert (told(SLINGSHOT).rdma, told(EFA).rdma, told(LIBFABRIC_TCP).rdma) == (True, True, False)
    assert told(SLINGSHOT.replace(b"cxi", b"other")).rdma is None
    assert told(RDMA.splitlines()[1]).rdma is None  # a line "Using network IB" shows no connection


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (RDMA, "NET/IB on mlx5_0 (RoCE), mlx5_2 (IB), with GPUDirect RDMA"),
        (SOCKET, "NET/Socket on ens1f0, bond0.7"),
        (SLINGSHOT, "NET/AWS Libfabric on cxi, with GPUDirect RDMA"),
        (EFA, "NET/Libfabric on efa, with GPUDirect RDMA"),
        (LIBFABRIC_TCP, "NET/AWS Libfabric on tcp"),
        (INSIDE, None),
    ],
    ids=["rdma", "tcp", "slingshot", "efa", "libfabric over tcp", "one node"],
)
def test_the_transports_between_nodes_are_told_in_words(log, text):
    assert told(log).describe() == text


@pytest.mark.parametrize(
    "hostile",
    [
        b"NCCL INFO Channel 00/0 : 0[0] -> 1[1] via \x1b[31mNET/IB\n",
        b"NCCL INFO Channel 00/0 : 0[0] -> 1[1] via NET/../../etc\n",
        b"NCCL INFO Channel " + b"9" * 10**6 + b" : 0[0] -> 1[1] via P2P\n",
        b"NCCL INFO NET/IB : Using " + b"[0]" * 10**6 + b"\n",
        b"NCCL INFO NET/IB : Using [0]<script>:1/RoCE [1]" + b"x" * 99 + b":1/IB\n",
        b"NCCL INFO NET/IB : Using \xff\xfe[0]\xff:1/IB\n",
    ],
    ids=["escape", "path", "long number", "long line", "markup", "bytes"],
)
def test_a_hostile_log_says_nothing(hostile):
    found = told(hostile)
    assert (found.channels, found.devices, found.interfaces, found.rdma) == ({}, [], [], None)


def test_a_log_with_devices_without_end_names_some():
    lines = b"".join(b"NCCL INFO NET/IB : Using [0]mlx5_%d:1/IB\n" % number for number in range(1000))
    assert len(told(lines).devices) == nccl_log.MOST_DEVICES


def summarized(path, backend, logs):
    workspace = Workspace(path)
    what = support.cell("ddp", 2)
    support.keep(workspace, [what], repeats=1)
    folder = support.completed(workspace, what)
    support.event(folder, "met", -1, world_size=2, hosts=1, backend=backend, interface="eth0")
    folder.log.mkdir(exist_ok=True)
    for rank, log in enumerate(logs):
        folder.rank_log(rank).write_bytes(log)
    return folder, summary.summarize(load.load_matrix(workspace, None), "ddp")


def test_a_run_says_its_interface_and_its_rdma(tmp_path):
    _, found = summarized(tmp_path, "nccl", [RDMA, INSIDE])
    (entry,) = found.traffic
    assert (entry.rdma, entry.why) == (True, "NCCL's log: NET/IB (2 connections), P2P (2 connections)")
    (host,) = entry.hosts
    assert (host.host, host.interface, host.kind) == (support.HOST, "lo", "loopback")  # lo: 8 MiB/s; eth0: 1 MiB/s
    assert host.share_pct == pytest.approx(100 * 8 / 9, rel=1e-3)


def test_gloo_uses_no_rdma_and_a_log_that_is_no_file_says_nothing(tmp_path):
    _, found = summarized(tmp_path / "gloo", "gloo", [RDMA])
    assert (found.traffic[0].rdma, found.traffic[0].why) == (False, "gloo sends over TCP")
    folder, _ = summarized(tmp_path / "nccl", "nccl", [])
    os.mkfifo(folder.rank_log(0))
    found = summary.summarize(load.load_matrix(Workspace(tmp_path / "nccl"), None), "ddp")
    assert found.traffic[0].rdma is None
    assert "NCCL_DEBUG=INFO" in found.traffic[0].why
