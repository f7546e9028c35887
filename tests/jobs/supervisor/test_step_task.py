"""A task of a Slurm job step: its command line, the nodes of its job, and the address at which other nodes reach this node."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from jobs.node import rendezvous as rendezvous_module
from jobs.node.rendezvous import (
    RENDEZVOUS_VARIABLE,
    RendezvousError,
    RendezvousInterface,
    choose_rendezvous,
    find_rendezvous_interface,
)
from jobs.supervisor import step_task
from shardlab.errors import InputError

SCONTROL = """#!/bin/sh
test "$*" = "show hostnames gpu[0-1]" && printf 'gpu0\\ngpu1\\n'
"""


@pytest.mark.parametrize(("rendezvous", "address"), [("127.0.0.1:29500", "127.0.0.1"), ("[::1]:29500", "::1")])
def test_ranks_of_one_machine_meet_over_its_loopback(rendezvous, address):
    assert find_rendezvous_interface(rendezvous, []) == RendezvousInterface("lo", address)


def test_the_first_node_gives_an_address_that_other_nodes_can_reach(monkeypatch):
    """The address is not 127.0.1.1, to which /etc/hosts on Debian maps the host's own name."""
    own = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name != "lo" and entry.family == socket.AF_INET
    ]
    if not own:
        pytest.skip("this machine has no address but those of its loopback")
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.1.1", own[0])]
    monkeypatch.setattr(rendezvous_module.socket, "getaddrinfo", lambda *words, **options: entries)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu0")
    assert choose_rendezvous(2)[RENDEZVOUS_VARIABLE].rpartition(":")[0] == own[0]


IPV4, IPV6 = socket.AF_INET, socket.AF_INET6


def addresses_of_first_node(monkeypatch, *addresses):
    """Let the name of the first node resolve to these addresses, in this order."""
    entries = [(IPV6 if ":" in text else IPV4, socket.SOCK_STREAM, 6, "", (text, 0)) for text in addresses]
    monkeypatch.setattr(rendezvous_module.socket, "getaddrinfo", lambda *words, **options: entries)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu0")


@pytest.mark.parametrize(
    "other", ["169.254.7.7", "fe80::1%eth0", "172.17.0.1", "10.88.0.1", "127.0.1.1"], ids=["v4", "v6", "docker", "podman", "lo"]
)
def test_an_address_that_other_nodes_cannot_reach_is_no_rendezvous(other, tmp_path, monkeypatch):
    """The name of a node may resolve to all its addresses, link-local ones and those of bridges for containers too."""
    bridge = SimpleNamespace(address="10.88.0.1")
    monkeypatch.setattr(rendezvous_module.psutil, "net_if_addrs", lambda: {"cni-podman0": [bridge]})
    addresses_of_first_node(monkeypatch, other, "192.0.2.7")
    assert choose_rendezvous(2)[RENDEZVOUS_VARIABLE].rpartition(":")[0] == "192.0.2.7"
    addresses_of_first_node(monkeypatch, other)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeAddr=gpu0\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RendezvousError, match=f"gpu0: its name resolves to {other}, an? .*, so other nodes cannot reach it"):
        choose_rendezvous(2)


def test_a_network_card_may_have_the_address_that_docker_uses_elsewhere(monkeypatch):
    card = SimpleNamespace(address="172.17.0.1")
    monkeypatch.setattr(rendezvous_module.psutil, "net_if_addrs", lambda: {"eno1": [card]})
    addresses_of_first_node(monkeypatch, "172.17.0.1")
    assert choose_rendezvous(2)[RENDEZVOUS_VARIABLE].rpartition(":")[0] == "172.17.0.1"


@pytest.mark.parametrize("words", [[], ["--"], ["sleep", "1"], ["sleep", "--"], ["!", "true"]])
def test_a_wrong_command_line_is_refused(words, tmp_path):
    with pytest.raises(InputError, match="usage: python -m jobs"):
        step_task.main([str(tmp_path), *words])


def test_a_right_command_line_is_accepted(tmp_path, monkeypatch):
    monkeypatch.delenv(RENDEZVOUS_VARIABLE, raising=False)
    with pytest.raises(InputError, match=RENDEZVOUS_VARIABLE):
        step_task.main([str(tmp_path), "--", "true"])


@pytest.mark.parametrize(
    ("listed", "names"), [("gpu[0-1]", ["gpu0", "gpu1"]), ("gpu7", ["gpu7"]), ("", [])], ids=["several", "one", "no job"]
)
def test_a_node_looks_for_its_way_to_the_nodes_of_its_job(listed, names, tmp_path, monkeypatch):
    """A task gets the names of its job's nodes from the supervisor, which calls `scontrol` to expand the list of nodes.

    The task cannot call `scontrol`, because it may run in a container that does not have this command.
    """
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", listed)
    for name, value in choose_rendezvous(1).items():
        monkeypatch.setenv(name, value)
    scontrol.unlink()
    asked = []

    def no_way(rendezvous, others):
        asked.append(list(others))
        raise RendezvousError("no way")

    monkeypatch.setattr(step_task, "find_rendezvous_interface", no_way)
    with pytest.raises(RendezvousError, match="no way"):
        step_task.main([str(tmp_path), "--", "true"])
    assert asked == [names]


@pytest.mark.parametrize("own", [None, "hsn"], ids=["nothing", "the user's"])
def test_ranks_get_the_interfaces_that_the_user_named_else_ours(own, tmp_path, monkeypatch):
    """The last word of the command writes what a rank would see."""
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, "127.0.0.1:29501")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        if own is not None:
            monkeypatch.setenv(name, own)
    monkeypatch.setenv("SLURM_LOCALID", "1")  # no sampler
    seen = tmp_path / "seen"
    monkeypatch.setattr(step_task, "_read_cell_variables", lambda _run_dir: {})  # there is no run.json
    step_task.main([str(tmp_path), "--", "sh", "-c", f'echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME" > {seen}'])
    assert seen.read_text().split() == (["=lo", "lo"] if own is None else [own, own])
