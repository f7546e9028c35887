"""Tests of time, users and keys, as data: answers of nodes lead to commands; a second plan has no changes."""

import hashlib
import time

import msgspec
import pytest

from provision import clock, order
from provision.fact import Unanswered
from provision.facts import keys
from provision.facts.keys import KEYS, Keys
from provision.facts.services import SERVICES, Service
from provision.facts.users import USERS, User, Users
from provision.facts.users import parse as parse_users
from provision.nodes.local_node import LocalNode
from provision.operation import Nothing, Site, Target
from provision.operations import keys as keys_operation
from provision.operations import time as time_operation
from provision.operations import users as users_operation
from shardlab.cluster.cluster_keys import Ssh
from shardlab.remote.remote import CommandOutput
from tests.provision.operations.test_operations import A_MACHINE, RUNNING, commands, site

A_CONTAINER = msgspec.structs.replace(A_MACHINE, virt="systemd-nspawn")

# Tests of the time.


def test_chrony_alone_sets_the_clock():
    one = site(services=RUNNING)
    w1, w2 = one.targets[1:]
    w1.facts.answers[SERVICES.name] = {
        "systemd-timesyncd": Service("active", True, 1.0),
        "ntpsec": Service("inactive", False, None),
    }
    assert commands(time_operation.plan_chrony(one, w1)) == [
        "systemctl disable --quiet --now systemd-timesyncd",
        "systemctl enable --quiet chrony",
        "systemctl restart chrony",
    ]
    assert time_operation.plan_chrony(one, w2) == Nothing("only chrony sets its clock")


class Skewed(LocalNode):
    """A machine whose clock is ahead by `ahead` seconds. `helped` says whether chronyc can correct the clock."""

    ahead: float = 0.0
    helped: bool = True

    def run(self, argv, **keys_) -> CommandOutput:
        if argv[0] == "date":
            return CommandOutput(0, f"{time.time() + self.ahead:.9f}\n", "")
        if "chronyc makestep" in argv[-1] and self.helped:
            self.ahead = 0.0
        return CommandOutput(0, "", "")


def test_a_container_shares_the_clock_of_its_host_which_alone_can_set_it():
    one = site(system=A_CONTAINER)
    facts = one.targets[2].facts
    assert time_operation.plan_chrony(one, one.targets[2]) == Nothing("it is a container, which uses the clock of its host")
    assert isinstance(time_operation.plan_clock_offset(one, Target(Skewed(ahead=0.1, helped=False), facts)), Nothing)
    with pytest.raises(Unanswered, match=r"its clock is \+3\.00.*uses the clock of its host: set that clock"):
        time_operation.plan_clock_offset(one, Target(Skewed(ahead=3.0, helped=False), facts))


@pytest.mark.parametrize("ahead", [-0.4, 0.0, 0.4])
def test_a_clock_within_a_second_is_left_as_it_is(ahead):
    one = site()
    target = Target(Skewed(ahead=ahead, helped=False), one.targets[0].facts)
    assert isinstance(time_operation.plan_clock_offset(one, target), Nothing)


@pytest.mark.parametrize("ahead", [-3600.0, -1.5, 1.5, 86400.0])
def test_a_wrong_clock_is_stepped_once_and_stops_its_node_if_still_wrong(ahead):
    one = site()
    for helped in (True, False):
        node = Skewed(ahead=ahead, helped=helped)
        target = Target(node, one.targets[0].facts)
        step, again = time_operation.plan_clock_offset(one, target)
        assert step.command.count("chronyc makestep") == 1
        step.make(node)
        if helped:
            again.make(node)
            assert isinstance(time_operation.plan_clock_offset(one, target), Nothing)
        else:
            with pytest.raises(Unanswered, match="also after chronyc makestep, so munge and Slurm would refuse it"):
                again.make(node)


def test_the_way_there_and_back_counts_against_a_clock():
    """A clock agrees if its offset plus the uncertainty of the measurement is at most 1 s."""
    assert clock.NodeClockOffset(0.7, 0.2).agrees
    assert not clock.NodeClockOffset(0.7, 0.4).agrees


def test_a_slow_answer_is_measured_again_because_it_says_nothing_about_the_clock(monkeypatch):
    takes_s = iter([6.0, 4.0, 0.5, 9.0])
    now = 1000.0

    class Busy(Skewed):
        def run(self, argv, **options):
            nonlocal now
            if argv[0] != "date":
                return CommandOutput(0, "", "")
            took = next(takes_s)
            now += took
            return CommandOutput(0, f"{now - took / 2 + 0.25}", "")

    monkeypatch.setattr(clock.time, "time", lambda: now)
    offset = clock.measure_clock_offset(Busy(ahead=0.0, helped=False))
    assert (offset.ahead_s, offset.uncertainty_s) == (0.25, 0.25)


def test_operations_come_in_the_order_of_their_dependencies():
    names = [operation.name for operation in order.ALL_OPERATIONS]
    for first, then in (
        ("space", "munge-user"), ("munge-user", "packages"), ("packages", "users"), ("users", "munge"), ("time", "clock"),
        ("clock", "munge-key"), ("disks", "nfs-server"), ("nfs-server", "nfs"), ("nfs", "environment"), ("keys", "trust"),
    ):  # fmt: skip
        assert names.index(first) < names.index(then), (first, then)
    assert names[0] == "space"


# Tests of users.

THERE = Users("alice", {"slurm": User(64030, 64030), "munge": User(499, 499), "alice": User(1000, 1000)})


def with_users(one: Site, last: Users | None = None, others: Users = THERE) -> Target:
    for target in one.targets:
        target.facts.answers[USERS.name] = others
    one.targets[-1].facts.answers[USERS.name] = last or others
    return one.targets[-1]


def test_the_users_of_a_machine_are_read():
    said = "login=alice\nmunge:x:499:499::/nonexistent:/usr/sbin/nologin\nalice:x:1000:1000:A:/home/alice:/bin/bash\n"
    assert parse_users(said) == Users("alice", {"munge": User(499, 499), "alice": User(1000, 1000)})
    with pytest.raises(ValueError, match="it begins with"):
        parse_users("")


def test_munge_gets_the_numbers_that_another_node_gave_it():
    one = site()
    w2 = with_users(one, Users("alice", {}))
    (make,) = users_operation.plan_munge_user(one, w2)
    assert make.description == "make the user munge, 499:499 on all nodes"
    one = site()
    w2 = with_users(one, Users("alice", {}), Users("alice", {"munge": User(113, 120)}))
    (make,) = users_operation.plan_munge_user(one, w2)
    assert "--gid 120 munge" in make.command
    assert "--uid 113" in make.command
    with_users(one)
    assert users_operation.plan_munge_user(one, w2) == Nothing("the user munge exists")
    assert users_operation.plan_munge_user(site(slurm_=False), w2) == Nothing("the cluster has no Slurm")


def test_equal_users_on_all_nodes_need_no_change():
    one = site()
    with_users(one)
    for target in one.targets:
        assert isinstance(users_operation.plan_same_users(one, target), Nothing)


@pytest.mark.parametrize(("name", "other"), [("slurm", User(64031, 64030)), ("slurm", User(64030, 1)), ("munge", User(1, 499))])
def test_users_of_slurm_that_differ_stop_the_node_and_are_not_changed(name, other):
    one = site()
    w2 = with_users(one, Users("alice", {**THERE.known, name: other}))
    with pytest.raises(Unanswered, match=rf"w2: the user {name} is {other.uid}:{other.gid} there and .* on head") as caught:
        users_operation.plan_same_users(one, w2)
    assert f"usermod -u {THERE.known[name].uid} -g {THERE.known[name].gid} {name}" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Users("alice", {**THERE.known, "alice": User(1001, 1001)}), "the user alice has uid 1001 here and 1000 on head"),
        (Users("bob", {"slurm": User(64030, 64030)}), "the user alice, who logs in to head, does not exist here"),
    ],
)
def test_the_login_user_may_differ_between_nodes_without_shared_storage(found, says):
    one = site()
    w2 = with_users(one, found)
    assert users_operation.plan_same_users(one, w2) == Nothing(f"{says}; this is no problem without shared storage")
    shared = site(shared="/mydata")
    w2 = with_users(shared, found)
    with pytest.raises(Unanswered, match=f"w2: {says}; on shared storage"):
        users_operation.plan_same_users(shared, w2)


# Tests of keys.


def with_keys_between() -> Site:
    one = site()
    return Site(msgspec.structs.replace(one.cluster, ssh=Ssh(between_nodes=True)), None, one.targets)


def a_key(name: str) -> str:
    return f"ssh-ed25519 {hashlib.sha256(name.encode()).hexdigest()}"


def with_keys(one: Site, **of_node: Keys) -> None:
    for target in one.targets:
        name = target.node.name
        own = Keys("alice", "/home/alice", a_key(name), (a_key(f"{name} host"),))
        target.facts.answers[KEYS.name] = of_node.get(name, own)


def test_keys_between_nodes_are_made_only_if_the_cluster_file_asks():
    """Keys between nodes are made only if the cluster file has `ssh.between_nodes`."""
    one = site()
    for plan in (keys_operation.plan_ssh_key, keys_operation.plan_ssh_trust):
        assert plan(one, one.targets[0]) == Nothing("ssh.between_nodes is not set in cluster.yaml")


def test_each_node_makes_its_own_key_and_no_private_one_is_read():
    one = with_keys_between()
    with_keys(one, w1=Keys("alice", "/home/alice", None, ()))
    (make,) = commands(keys_operation.plan_ssh_key(one, one.targets[1]))
    assert make.startswith("runuser -u alice -- env HOME=/home/alice")
    assert make.endswith(" make alice@w1")
    assert keys_operation.plan_ssh_key(one, one.targets[0]) == Nothing("alice has a key")
    assert "cat" not in keys.PRINT_KEYS
    (later,) = keys_operation.plan_ssh_trust(one, one.targets[0])
    with pytest.raises(Unanswered, match="w1: the user who logs in has no SSH key"):
        later.make(one.targets[0].node)


def test_every_node_knows_the_keys_of_all_nodes_and_then_nothing_changes():
    one = with_keys_between()
    with_keys(one)
    w1 = one.targets[1]
    own = w1.facts[KEYS]
    changes = keys_operation.plan_ssh_trust(one, w1)
    authorized, known = (tuple(change.stdin.decode().splitlines()) for change in changes)
    assert authorized[0] == "# begin shardlab bench"
    assert authorized[1:4] == tuple(f"{a_key(name)} alice@{name}" for name in ("head", "w1", "w2"))
    assert f"w2,10.0.0.3 {a_key('w2 host')}" in known
    assert changes[0].argv[-2:] == ["alice:", "600"]
    w1.facts.answers[KEYS.name] = msgspec.structs.replace(own, authorized=("theirs", *authorized), known=(*known, "theirs"))
    assert keys_operation.plan_ssh_trust(one, w1) == Nothing("3 nodes know one another")
    one.skipped["w2"] = "machine failed"  # the keys of w2 are kept while w2 is unreachable
    assert keys_operation.plan_ssh_trust(one, w1) == Nothing("not changed: w2 cannot be asked")


def test_a_nonstandard_ssh_port_is_part_of_the_known_host():
    one = with_keys_between()
    with_keys(one)
    one.targets[2].node.port = 2222
    lines = keys_operation.make_known_hosts_lines([(target, target.facts[KEYS]) for target in one.targets])
    assert lines[2].startswith("w2,10.0.0.3,[w2]:2222,[10.0.0.3]:2222 ssh-ed25519 ")


@pytest.mark.parametrize("key", ["ssh-ed25519 AAAA\ncommand=x", 'command="x" ssh-ed25519 AAAA', "AAAA"])
def test_a_text_that_is_no_ssh_key_is_refused(key):
    one = with_keys_between()
    with_keys(one, w2=Keys("alice", "/home/alice", key, ()))
    with pytest.raises(Unanswered, match="is not a public key"):
        keys_operation.plan_ssh_trust(one, one.targets[0])


def test_the_keys_of_a_machine_are_read():
    said = "login alice\nhome /home/alice\nkey ssh-ed25519 AAAA\nhost ssh-rsa BB\nauthorized x y\nauthorized \nknown z\n"
    assert keys.parse(said) == Keys("alice", "/home/alice", "ssh-ed25519 AAAA", ("ssh-rsa BB",), ("x y", ""), ("z",))
    assert keys.parse("login alice\nhome /home/alice\nkey \n").key == ""
    for bad in ("", "login alice\nhome \n", "Welcome!\n"):
        with pytest.raises(ValueError, match=r".+"):
            keys.parse(bad)


def test_a_node_that_vanishes_stops_itself_alone():
    one = with_keys_between()
    with_keys(one)
    with_users(one)
    for fact in (USERS, KEYS):
        one.targets[0].facts.answers[fact.name] = Unanswered("head: it is gone")
    w1 = one.targets[1]
    assert users_operation.plan_same_users(one, w1) == Nothing("the other nodes are compared with this node")
    assert "10.0.0.1" not in keys_operation.plan_ssh_trust(one, w1)[1].stdin.decode()
    with pytest.raises(Unanswered, match="head: it is gone"):
        users_operation.plan_same_users(one, one.targets[0])
