"""Work between nodes (the network check, the munge key), and how commands and downloads of this machine fail."""

import base64
import http.server
import json
import threading

import pytest

from provision.checks import network
from provision.datasets import download
from provision.fact import FactAnswers, Unanswered
from provision.facts.addresses import ADDRESSES
from provision.facts.files import FILES, NodeFile
from provision.facts.services import SERVICES, Service
from provision.facts.slurm_here import SLURM_HERE, SlurmHere
from provision.facts.torch import TORCH, Torch
from provision.operation import Site, Target
from provision.operations import munge
from provision.practice import base
from provision.practice.base import PracticeNodeError
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.cluster.slurm_keys import Slurm
from shardlab.errors import InputError, ShardlabError
from shardlab.remote.remote import CommandOutput

REPORT = {"backend": "gloo", "ranks": 2, "bytes": 1_000_000, "wrong": 0, "iterations": 10, "time_s": 0.001}
SENT = 10_000_000  # bytes that each of two nodes sends in theory: 2 * (2 - 1) / 2 * bytes * iterations


class Node:
    """A fake node that returns the given answers one after another."""

    port, user, python, wheelhouse, may_sudo = None, None, "python", None, True

    def __init__(self, name, host, *answers):
        self.name, self.host, self.address = name, host, host
        self.answers, self.asked, self.given = list(answers), [], []

    def run(self, argv, *, timeout_s, env=None, stdin=b"", root=False, secret=False):
        self.asked.append(list(argv))
        self.given.append(stdin)
        return self.answers.pop(0)


def site(*nodes, roles=("worker", "worker"), **of_nodes):
    targets = []
    for node, role in zip(nodes, roles, strict=True):
        target = Target(node, FactAnswers(node), NodeEntry(name=node.name, roles=[role]))
        addresses = {"eth0": [node.host], "eth1": ["10.0.0.9"]}
        target.facts.answers = {
            ADDRESSES.name: addresses,
            SLURM_HERE.name: SlurmHere(),
            TORCH.name: Torch("2.13.0"),
            **of_nodes,
        }
        targets.append(target)
    return Site(Cluster(schema=1, name="bench", provider="ssh", slurm=Slurm()), None, targets)


def two(before="eth0 5\n", after=f"eth0 {SENT + 5}\n", *, ranks=CommandOutput(0, json.dumps(REPORT), "")):  # noqa: B008
    """Returns two nodes. `before` and `after` are their counters of sent bytes before and after the all-reduce of their
    ranks."""
    return [
        Node(name, f"10.0.0.{at}", CommandOutput(0, before, ""), ranks, CommandOutput(0, after, ""))
        for at, name in enumerate("ab", 1)
    ]


def check(nodes):
    found = site(*nodes)
    return network.run(found, found.targets[0])


def test_nodes_that_sum_over_their_own_interface_pass():
    nodes = two()
    outcome = check(nodes)
    assert outcome.passed is True
    assert outcome.says.startswith("all-reduce of 2 nodes over eth0 is exact")
    assert [node.asked[1][2:] for node in nodes] == [
        ["provision.checks._all_reduce_ranks", "gloo", "2", place, "10.0.0.1:29411"] for place in "01"
    ]


def test_the_times_of_ranks_are_stored_in_the_inventory_with_their_nodes():
    times = [{"bytes": 4096, "seconds": 2e-4, "fastest_s": 1e-4, "slowest_s": 3e-4, "bus_bandwidth_gb_per_s": 0.02}]
    (kept,) = check(two(ranks=CommandOutput(0, json.dumps(REPORT | {"times": times}), ""))).all_reduces
    assert (kept.nodes, kept.ranks, kept.backend, kept.gpu) == (("a", "b"), 2, "gloo", None)
    assert kept.times[0].slowest_s == 3e-4
    assert check(two()).all_reduces == ()  # the report of the ranks has no times
    assert check(two(after="eth0 5\n", ranks=CommandOutput(0, json.dumps(REPORT | {"times": times}), ""))).all_reduces == ()


def test_failed_ranks_are_named_with_their_error_output():
    outcome = check(two(ranks=CommandOutput(1, "", "Connection refused\n")))
    assert outcome.passed is False
    assert outcome.says.startswith("an all-reduce of 2 nodes failed; a: ")
    assert "Connection refused" in outcome.says


def test_an_interface_that_came_meanwhile_counts_from_zero():
    """The node sends 10 MB. Up to 1 MB on another interface is accepted as other traffic; 1 byte more fails the check."""
    most = SENT // 10
    assert check(two(after=f"eth0 {SENT + 5}\neth1 {most}\n")).passed is True
    outcome = check(two(after=f"eth0 {SENT + 5}\neth1 {most + 1}\n"))
    assert outcome.passed is False
    assert "elsewhere: eth1 1 MB, eth1 1 MB" in outcome.says


def shared_key(controller_answer, worker_answer):
    """Returns the change that copies the munge key of the controller to a worker, then both nodes."""
    head, worker = Node("head", "10.0.0.1", controller_answer), Node("w1", "10.0.0.2", worker_answer)
    running = {"munge": Service("active", True, 200.0)}
    found = site(head, worker, roles=("controller", "worker"), **{FILES.name: {}, SERVICES.name: running})
    found.targets[0].facts.answers[FILES.name] = {munge.MUNGE_KEY_PATH: NodeFile(0o400, "munge:munge", 100.0, "a" * 64)}
    return munge.plan_munge_key_copy(found, found.targets[1])[0], head, worker


def test_the_munge_key_crosses_as_standard_input_and_in_no_command_line():
    key = base64.b64encode(b"secret").decode()
    change, _, worker = shared_key(CommandOutput(0, key, ""), CommandOutput(0, "", ""))
    change.make(worker)
    assert worker.given == [key.encode()]
    assert key not in " ".join(worker.asked[0])


@pytest.mark.parametrize("code", [1, 255, -9, None])
def test_a_munge_key_that_cannot_be_written_names_the_node(code):
    change, _, worker = shared_key(CommandOutput(0, "", ""), CommandOutput(code, "", "No space left on device\n"))
    with pytest.raises(Unanswered, match="w1: the munge key cannot be written: No space left on device"):
        change.make(worker)


@pytest.mark.parametrize("code", [1, -9, None])
def test_a_munge_key_that_cannot_be_read_names_the_controller(code):
    change, _, worker = shared_key(CommandOutput(code, "", "Permission denied\n"), CommandOutput(0, "", ""))
    with pytest.raises(Unanswered, match="head: the munge key cannot be read: Permission denied"):
        change.make(worker)
    assert worker.asked == []


def test_a_failed_command_on_this_machine_is_named_with_its_last_words():
    with pytest.raises(PracticeNodeError, match=r"^sh failed: no space$"):
        base.run_here(["sh", "-c", "echo first >&2; echo no space >&2; echo >&2; exit 3"])
    with pytest.raises(PracticeNodeError, match=r"^sh failed: exit status 3$"):
        base.run_here(["sh", "-c", "exit 3"])
    assert base.run_here(["sh", "-c", "echo fine"]) == "fine\n"


class Failing:
    """A server that answers every request with the given status, and counts the requests."""

    def __init__(self, status):
        self.requests = 0
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                server.requests += 1
                self.send_error(status)

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/set.tar.gz"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def pauses(monkeypatch):
    """A list of the seconds that the download would wait before each attempt. The test does not really wait."""
    seconds = []
    monkeypatch.setattr(download.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_a_server_that_has_no_such_file_is_asked_once(status, tmp_path, pauses):
    with Failing(status) as server, pytest.raises(InputError, match=f"the server says {status} "):
        download.fetch_file(server.url, tmp_path / "part", "0" * 64, 1000)
    assert (server.requests, pauses) == (1, [])


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_is_busy_is_asked_again_after_longer_and_longer_pauses(status, tmp_path, pauses):
    with Failing(status) as server, pytest.raises(ShardlabError, match=f"the server says {status} .*, after 0 bytes"):
        download.fetch_file(server.url, tmp_path / "part", "0" * 64, 1000)
    assert (server.requests, pauses) == (5, [1.0, 2.0, 4.0, 8.0])
