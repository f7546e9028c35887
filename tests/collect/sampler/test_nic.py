"""Counters of network drivers, which the sampler reads by ioctl, and of RDMA devices, which it reads from files of /sys."""

import subprocess
import sys

import pytest

from collect.sampler.ethtool import COUNTER_NAMES_BY_FIELD, find_counters
from collect.sampler.nic import NicSource, RdmaSource
from shardlab.runs.record import NicSample, RdmaSample, Sample

# A Python script that runs in its own network namespace and makes a veth, which is a pair of virtual interfaces. By the ethtool
# ioctl, each interface of the pair reports the index of the other. The test checks this counter, because its value is known.
VETH = """
import subprocess
from pathlib import Path
from collect.sampler import ethtool
subprocess.run("ip link add v0 type veth peer name v1", shell=True, check=True)
numbers = {name: int(line.split(":")[0]) for line in subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
           .splitlines() for name in [line.split(":")[1].split("@")[0].strip()]}
assert ethtool.DriverCounters("v0").read() == {}
ethtool.COUNTER_NAMES_BY_FIELD["peer"] = ("no such name", "peer_ifindex")
first = ethtool.DriverCounters("v0")
print(first.read() == {"peer": numbers["v1"]}, ethtool.DriverCounters("v1").read() == {"peer": numbers["v0"]})
before = first._counter_count
subprocess.run("ip link del v0; ip link add v0 numrxqueues 4 numtxqueues 4 type veth peer name v1", shell=True, check=True)
print(first._read_counter_count() > before, first.read() == ethtool.DriverCounters("v0").read())
subprocess.run("ip link del v0", shell=True, check=True)
for again in (first.read, lambda: ethtool.DriverCounters("lo")):
    try:
        again()
    except OSError as error:
        print(error.strerror)
"""


def blank():
    return Sample(schema=1, t_s=0, wall_s=0, host="h", boot_id="b")


def filled(source):
    sample = blank()
    source.fill(sample)
    return sample


def test_the_ioctl_reads_a_driver_that_the_kernel_has():
    namespace = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a test have a network of its own")
    done = subprocess.run([*namespace, sys.executable, "-c", VETH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True", "True True", "No such device", "Operation not supported"]


def test_the_counters_of_a_driver_are_found_by_its_names():
    mlx5 = [
        "rx_packets", "rx_bytes", "tx_bytes_phy", "rx_bytes_phy", "rx_vport_unicast_bytes", "rx_vport_rdma_unicast_bytes",
        "tx_vport_rdma_unicast_bytes", "rx_prio3_pause", "rx_prio3_pause_duration", "rx_discards_phy", "rx_pause_ctrl_phy",
        "rx_prio4_pause",
    ]  # fmt: skip
    assert find_counters(mlx5) == {
        "wire_rx_bytes": [3], "wire_tx_bytes": [2], "rdma_rx_bytes": [5], "rdma_tx_bytes": [6],
        "rx_pauses": [10], "rx_discards": [9], "rx_priority_pauses": [7, 11],
    }  # fmt: skip
    bnxt_en = ["rx_total_discard_pkts", "rx_pause_frames", "tx_pause_frames"]
    assert find_counters(bnxt_en) == {
        "rx_pauses": [1], "tx_pauses": [2], "rx_discards": [0],
    }  # fmt: skip
    assert find_counters(["\x1b[2J", "", "rx_bytes"]) == {}
    newer_bnxt_en = ["rx_pfc_ena_frames_pri0", "tx_pfc_ena_frames_pri7", "rx_pfc_xon2xoff_frames_pri0"]
    assert find_counters(newer_bnxt_en) == {
        "rx_priority_pauses": [0], "tx_priority_pauses": [1],
    }  # fmt: skip
    older_i40e = ["rx_bytes", "port.rx_bytes", "port.link_xoff_rx", "port.rx_priority_3_xoff", "port.rx_priority_3_xon"]
    assert find_counters(older_i40e) == {"wire_rx_bytes": [1], "rx_pauses": [2], "rx_priority_pauses": [3]}
    newer_i40e = ["port.rx_priority_3_xoff_rx", "port.tx_priority_3_xoff_tx", "port.rx_priority_3_xon_2_xoff"]
    assert find_counters(newer_i40e) == {"rx_priority_pauses": [0], "tx_priority_pauses": [1]}
    ice = ["rx_bytes", "rx_bytes.nic", "tx_bytes.nic", "link_xoff_tx.nic", "rx_dropped.nic", "rx_crc_errors.nic"]
    assert find_counters([*ice, "tx_priority_0_xoff.nic", "tx_priority_0_xon.nic"]) == {
        "wire_rx_bytes": [1], "wire_tx_bytes": [2], "tx_pauses": [3], "rx_discards": [4], "rx_crc_errors": [5],
        "tx_priority_pauses": [6],
    }  # fmt: skip
    ena = ["queue_0_tx_bytes", "bw_in_allowance_exceeded", "bw_out_allowance_exceeded", "pps_allowance_exceeded"]
    assert find_counters([*ena, "conntrack_allowance_exceeded"]) == {
        "rx_bandwidth_limited": [1], "tx_bandwidth_limited": [2], "packet_rate_limited": [3], "connections_limited": [4],
    }  # fmt: skip
    kept = {*COUNTER_NAMES_BY_FIELD, "rx_priority_pauses", "tx_priority_pauses"}
    assert kept <= set(NicSample.__struct_fields__)


def test_every_counter_of_an_interface_is_read_and_one_that_is_missing_is_unknown(tmp_path):
    folder = tmp_path / "eth0" / "statistics"
    folder.mkdir(parents=True)
    (tmp_path / "eth0" / "type").write_text("1\n")
    for number, name in enumerate(("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_dropped")):
        (folder / name).write_text(f"{number}\n")
    (nic,) = filled(NicSource(tmp_path)).nics
    assert (nic.rx_bytes, nic.tx_bytes, nic.rx_packets, nic.tx_packets) == (0, 1, 2, 3)
    assert (nic.rx_errors, nic.tx_errors, nic.rx_dropped, nic.tx_dropped, nic.rdma_tx_bytes) == (4, 5, 6, None, None)


def test_rdma_counters_are_in_bytes_and_one_that_stopped_is_unknown(tmp_path):
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters.parent / "link_layer").write_text("Ethernet\n")
    for name, value in (("port_xmit_data", 1000), ("port_rcv_data", 0xFFFFFFFF), ("port_xmit_wait", 7), ("link_downed", 0)):
        (counters / name).write_text(f"{value}\n")
    (tmp_path / "mlx5_1" / "ports" / "1").mkdir(parents=True)  # a second device, whose port has no counters
    source = RdmaSource(tmp_path)
    port, unknown_port = filled(source).rdma
    assert unknown_port == RdmaSample(device="mlx5_1", port=1)
    assert source.remarks == ["the RDMA port mlx5_1/1 has no counter that shardlab knows, so its traffic is not measured"]
    assert (port.device, port.port, port.link_layer, port.pci) == ("mlx5_0", 1, "Ethernet", None)
    assert (port.tx_bytes, port.rx_bytes, port.wait, port.link_downed, port.rx_errors) == (4000, None, 7, 0, None)
    (counters / "port_xmit_data").write_text("no number")
    port = filled(source).rdma[0]
    assert (port.tx_bytes, source.failures) == (None, {"mlx5_0 port_xmit_data": 1})


def test_the_counters_of_efa_are_bytes_in_the_folder_of_the_driver(tmp_path):
    counters = tmp_path / "rdmap0s31" / "ports" / "1" / "hw_counters"
    counters.mkdir(parents=True)
    values = {"tx_bytes": 1000, "rx_bytes": 2000, "rdma_read_bytes": 30, "rdma_write_bytes": 40, "retrans_pkts": 5}
    values |= {"retrans_bytes": 60, "retrans_timeout_events": 7, "rx_drops": 8, "lifespan": 12, "tx_pkts": 9}
    for name, value in values.items():
        (counters / name).write_text(f"{value}\n")
    source = RdmaSource(tmp_path)
    assert filled(source).rdma == [
        RdmaSample(
            device="rdmap0s31", port=1, tx_bytes=1000, rx_bytes=2000, read_bytes=30, write_bytes=40, retransmitted_packets=5,
            retransmitted_bytes=60, retransmission_timeouts=7, rx_drops=8,
        )
    ]  # fmt: skip
    assert source.remarks == []


def test_a_machine_without_rdma_has_no_such_field(tmp_path):
    assert filled(RdmaSource(tmp_path / "none")).rdma is None
