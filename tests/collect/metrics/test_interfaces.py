"""Byte counters of real network interfaces that are renamed, or removed and created again, during a run."""

import shutil
import subprocess
import sys

import msgspec
import pytest
import support_collect as support

from collect.metrics import network
from shardlab.runs.record import Sample, StepRecord

# A Python script that runs in its own network namespace, where /sys shows only the interfaces of the namespace. Two virtual
# interfaces are the ends of one cable. The script sends frames through the first interface, and prints the sampler's samples
# of 9 s, 15 s and 21 s. The argument of the script is Python code, which it runs after the sample of 9 s.
IN_A_NAMESPACE = """
import socket, subprocess, sys
from pathlib import Path
import msgspec
from collect.sampler.nic import NicSource
from shardlab.runs.record import Sample

def do(command):
    subprocess.run(command, shell=True, check=True)

def make(name):
    do(f"ip link add {name} type veth peer name {name}-peer && ip link set {name}-peer up && ip link set {name} up")

def send(name, frames):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind((name, 0))
        for _ in range(frames):
            raw.send(bytes(12) + bytes.fromhex("88b5") + bytes(986))  # 1000 bytes, of the type for local experiments

do("mount -t sysfs none /sys")
for name in ("all", "default"):
    Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")  # the kernel itself is to send nothing
make("v0")
source = NicSource(Path("/sys/class/net"))

def look(at):
    sample = Sample(schema=1, t_s=at, wall_s=at, host="h", boot_id="b")
    source.fill(sample)
    print(msgspec.json.encode(sample).decode())

send("v0", 5)
look(9.0)
exec(sys.argv[1])
look(15.0)
send(name, 12)
look(21.0)
"""
RENAMED = """
send("v0", 6)
do("ip link set v0 down && ip link set v0 name ens3 && ip link set ens3 up")
name = "ens3"
"""
MADE_AGAIN = """
do("ip link del v0")
make("v0")
send("v0", 6)
name = "v0"
"""


def looked(happens):
    """The three samples that the script IN_A_NAMESPACE prints. Skips the test if a network namespace is not possible here.

    happens: Python code that the script runs after the first sample.
    """
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed here")
    namespace = ["unshare", "--map-root-user", "--net", "--mount"]
    if subprocess.run([*namespace, "mount", "-t", "sysfs", "none", "/sys"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a test have a network of its own")
    command = [*namespace, sys.executable, "-c", IN_A_NAMESPACE, happens]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [msgspec.json.decode(line, type=Sample) for line in done.stdout.splitlines()]


def network_bytes(seen):
    """The metric of the bytes that were sent from 10 s to 20 s, computed from these samples. None if it is unknown."""
    ranks = {0: [StepRecord(schema=1, step=n, t_s=at, wall_s=at, units=1, step_ms=1) for n, at in ((1, 10.0), (2, 20.0))]}
    return network.measure_network_bytes(support.loaded(support.cell(), step_records=ranks, sample_records={"h": seen}))


def test_an_interface_that_is_renamed_keeps_its_count():
    seen = looked(RENAMED)
    assert ["v0" in [nic.name for nic in sample.nics] for sample in seen] == [True, False, False]
    # The interface sent 6000 bytes from 9 s to 15 s and 12,000 bytes from 15 s to 21 s. The metric counts 5 of each 6 seconds:
    # those from 10 s to 20 s.
    assert network_bytes(seen).value == pytest.approx(6000 * 5 / 6 + 12000 * 5 / 6)


def test_an_interface_that_is_made_again_gives_no_number():
    seen = looked(MADE_AGAIN)
    counts = [next((nic.tx_bytes for nic in sample.nics if nic.name == "v0"), None) for sample in seen]
    # The new interface has the same name and a larger count, so the counts alone do not show that the interface was replaced.
    assert counts == [5000, None, 18000]
    assert network_bytes(seen) is None
