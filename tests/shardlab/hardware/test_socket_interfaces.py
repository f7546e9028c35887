"""The interfaces that NCCL and Gloo get: the user's and the site's choice wins, else all interfaces of the fast network."""

import json
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from support_network_namespace import apart

from shardlab.hardware import socket_interfaces
from shardlab.hardware.socket_interfaces import choose_socket_interfaces, list_network_interfaces

# Four interfaces of one network, one that is down, one of the control network, and a container's bridge.
LINKS = """
add() {
    ip link add "$1" type veth peer name "peer-$1"; ip address add "$2/16" dev "$1"
    ip link set "$1" up; ip link set "peer-$1" up
}
for n in 0 1 2 3 4; do add hsn$n 10.253.0.1$n; done
ip link set hsn4 down
add eno1 10.1.0.10
add docker0 172.17.0.1
exec "$@"
"""
ASK = """
import json, sys
from shardlab.hardware.socket_interfaces import choose_socket_interfaces
json.dump([choose_socket_interfaces({}, name) for name in ("hsn1", "eno1")], sys.stdout)
"""


def test_nccl_gets_all_interfaces_of_the_fast_network_and_gloo_one():
    words = [*apart(), "sh", "-ec", LINKS, "sh", sys.executable, "-c", ASK]
    fast, control = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    names = "hsn0,hsn1,hsn2,hsn3"
    assert fast == {"GLOO_SOCKET_IFNAME": "hsn1", "NCCL_SOCKET_IFNAME": f"={names}"}
    assert control == {"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "=eno1"}


def test_a_slower_interface_of_the_same_network_is_not_named(monkeypatch):
    def address(text):
        return [SimpleNamespace(address=text, netmask="255.255.0.0")]

    speeds = {"fast0": 100_000, "fast1": 100_000, "slow": 1000}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: address(f"10.0.0.{n}") for n, name in enumerate(speeds, 1)})
    states = {name: SimpleNamespace(isup=True, speed=speed) for name, speed in speeds.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert list_network_interfaces("fast1") == ["fast0", "fast1"]


def test_the_loopback_is_named_alone():
    assert list_network_interfaces("lo") == ["lo"]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}),
        ({"NCCL_SOCKET_IFNAME": "hsn"}, {"GLOO_SOCKET_IFNAME"}),
        ({"GLOO_SOCKET_IFNAME": "hsn0,hsn1"}, {"NCCL_SOCKET_IFNAME"}),
        ({"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": ""}, {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}),
    ],
    ids=["nothing", "nccl", "gloo", "empty"],
)
def test_a_variable_of_the_user_is_left_alone(variables, named, monkeypatch, tmp_path):
    monkeypatch.setattr(socket_interfaces, "SITE_FILE", tmp_path / "none")
    assert choose_socket_interfaces(variables, "lo").keys() == named


@pytest.mark.parametrize("place", ["site", "home", "named"])
def test_a_file_of_nccl_counts_as_the_choice_of_its_owner(place, tmp_path, monkeypatch):
    paths = {"site": tmp_path / "nccl.conf", "home": tmp_path / ".nccl.conf", "named": tmp_path / "mine"}
    monkeypatch.setattr(socket_interfaces, "SITE_FILE", paths["site"])
    variables = {"HOME": str(tmp_path)} | ({"NCCL_CONF_FILE": str(paths["named"])} if place == "named" else {})
    paths[place].write_text("# NCCL_SOCKET_IFNAME=no\n")
    assert "NCCL_SOCKET_IFNAME" in choose_socket_interfaces(variables, "lo")
    paths[place].write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=hsn\n")
    assert choose_socket_interfaces(variables, "lo") == {"GLOO_SOCKET_IFNAME": "lo"}
