"""Builds a verified Slurm cluster on new practice nodes while nodes fail, and removes the cluster completely."""

import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support_e2e import HANG_S, until
from support_long import only_in_long_form
from support_practice import WHY, states

from provision.checks.clock import CLOCK
from provision.fact import FactAnswers
from provision.facts.services import SERVICES
from provision.facts.system import SYSTEM
from provision.operation import Change, Nothing, Operation, Site, Target, shell_change
from provision.operations.reboot import Reboot, read_boot_id
from provision.plan import converge_site
from provision.practice import base, python
from provision.providers import virtual
from shardlab.cluster.address import Address
from shardlab.remote.remote import Remote, Unreachable
from shardlab.workspace.workspace import Workspace

# A program that starts a practice node and then ends. The node must continue to run without the program.
START = """
import sys
from pathlib import Path

from provision.operations import packages
from provision.practice import base
from provision.providers import virtual
from shardlab.cluster import cluster
from shardlab.workspace.workspace import Workspace

file, workspace = Path(sys.argv[1]), Workspace(Path(sys.argv[2]))
made = cluster.load_cluster(file)
base_folder = base.find_base_folder(packages.ALL_PACKAGES, made.release)
virtual._make_machine(made, workspace, virtual.list_nodes(made, workspace)[2], base_folder).create()
"""

# The beginning of an ssh command that works only if /etc/ssh/ssh_known_hosts on this node has the host key of the other node.
STRICT = "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile=/dev/null"

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(WHY is not None, reason=WHY or "")]


def proven_without(said: dict, name: str, why: str) -> None:
    """Checks that `provision verify` fails for the unreachable node only once, with the reason `why`, and passes the checks of
    all other nodes."""
    assert said["verified"] is False
    told = [one for one in said["checks"] if one["node"] == name or one["passed"] is False]
    assert [(one["node"], one["check"]) for one in told] == [(name, "answers")]
    assert why in told[0]["says"]
    (slurm,) = [one for one in said["checks"] if one["check"] == "slurm"]
    assert slurm["says"].endswith(f"; without {name}")


def test_a_second_time_changes_nothing_and_passes_every_check_that_applies(practice):
    said = practice.provision()
    assert (said["changes"], said["verified"]) == (0, True)
    assert {one["state"] for one in states(said).values()} == {"nothing to do"}
    outcomes = {(one["node"], one["check"]): one for one in said["checks"]}
    without_gpus = {"driver", "rdma", "gpus", "compile"}
    assert {check for (_, check), one in outcomes.items() if one["passed"] is None} == without_gpus
    assert all(one["passed"] for (_, check), one in outcomes.items() if check not in without_gpus)
    assert outcomes["head", "network"]["measured"]["ranks"] == 3
    # The link is limited to 1 Gbit/s, which is 0.125 GB/s. The token bucket of tc lets more through at first.
    assert outcomes["head", "network"]["measured"]["bus_bandwidth_gb_per_s"] < 0.2


def test_ranks_use_the_same_python_on_each_release(practice):
    """Nodes that run another release of Debian than this machine get this machine's Python as an environment module. Programs
    on these nodes still find the libraries of their own release first."""
    inventory = json.loads((practice.folder / ".shardlab/inventory.json").read_text())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    told = [practice.run("work1", f"{node['python']} --version", root=False) for node in inventory["nodes"]]
    assert all(one.startswith(f"Python {version}.") for one in told)
    if base.is_other_release(practice.cluster.release):
        for node in inventory["nodes"]:
            command = f"bash -lc 'module load python/{version} && command -v python3 && python3 --version'"
            said = practice.run(node["name"], command)
            assert said.split() == [python.PYTHON_INTERPRETER, "Python", sys.version.split()[0]]
            linked = [line.split() for line in practice.run(node["name"], "ldconfig -p").splitlines() if " => " in line]
            found = {words[0]: words[-1] for words in reversed(linked)}
            own = {words[0] for words in linked if not words[-1].startswith(python.PYTHON_LIBRARIES)}
            assert len(own) < len(found)
            assert not [name for name in own if found[name].startswith(python.PYTHON_LIBRARIES)]


def test_a_crashed_node_is_booted_again_and_works_again(practice):
    practice.machine("work2").crash()
    said = practice.provision("plan")
    assert states(said)["work2", "machine"]["state"] == "would change"
    assert states(said)["work2", "packages"]["state"] == "not reached"
    proven_without(practice.provision("verify", code=1), "work2", "cannot be reached")
    said = practice.provision()
    assert states(said)["work2", "machine"]["says"] == [f"boot the practice node work2 at {practice.nodes['work2'].host}"]
    assert states(said)["work2", "trust"]["state"] == "nothing to do"  # work2 still knows the host keys of the other nodes
    assert said["verified"] is True


def test_a_node_that_is_still_starting_is_waited_for_and_not_started_twice(practice):
    """`provision` must wait for a node whose SSH server is not up yet. In this test, the SSH server of work2 starts only after
    `provision` has tried once to log in."""
    slow, go = "/etc/systemd/system/ssh.service.d", "/root/go"
    text = f'[Service]\\nExecStartPre=/bin/sh -c "until test -e {go}; do sleep 0.1; done"\\n'
    practice.run("work2", f"mkdir -p {slow}; printf '{text}' > {slow}/slow.conf")
    practice.machine("work2").crash()
    started = subprocess.run(
        [sys.executable, "-P", "-c", START, practice.file, practice.folder], capture_output=True, text=True
    )
    assert started.returncode == 0, started.stderr
    workspace = Workspace(practice.folder)
    node = virtual.list_nodes(practice.cluster, workspace)[2]
    asked = []

    def once(argv, **options):
        asked.append(argv)
        try:
            return log_in(argv, **options)
        except Unreachable:
            (practice.machine("work2").root_folder / go[1:]).touch()
            raise

    log_in, node.remote.run = node.remote.run, once
    found = virtual.bring_up(practice.cluster, workspace, node)
    assert isinstance(found, Nothing)
    assert len(asked) > 1  # the first attempt to log in got no answer
    said = practice.provision("plan")
    assert states(said)["work2", "machine"]["state"] == "nothing to do"
    practice.run("work2", f"rm -r {slow} {go}; systemctl daemon-reload")
    script = str(practice.machine("work2").folder / "boot.sh")
    assert sum(script in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])) == 1


def test_a_machine_that_hangs_up_during_the_login_says_nothing_of_keys(practice):
    assert practice.nodes["work1"].run(["touch", "/run/nologin"], timeout_s=HANG_S, root=True).code == 0
    address = Address(
        practice.nodes["work1"].host,
        user=base.PRACTICE_USER,
        identity=practice.folder / ".shardlab/practice/id_ed25519",
        known_hosts=practice.folder / ".shardlab/known_hosts",
    )
    try:
        with pytest.raises(Unreachable, match="closed the connection during the login"):
            Remote(address).run(["true"], timeout_s=HANG_S)
    finally:
        assert practice.nodes["work1"].run(["rm", "/run/nologin"], timeout_s=HANG_S, root=True).code == 0
    assert Remote(address).run(["true"], timeout_s=HANG_S).code == 0


def test_services_of_two_nodes_start_and_end_at_once_without_harm(practice):
    """Starts and ends services on two nodes at the same time. If the nodes shared a control group, the systemd of one node
    would remove the control group of a service that the other node is starting."""
    unit = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nType=oneshot\nExecStart=/bin/true\n"
    script = f"""
        printf '{unit}' > /run/systemd/system/often.service; systemctl daemon-reload
        for turn in $(seq 300); do systemctl start often; done
        rm /run/systemd/system/often.service; systemctl daemon-reload"""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: practice.run(name, script), ("work1", "work2")))


@only_in_long_form
def test_an_operation_reboots_a_node_once_and_its_services_start_again(practice):
    node = practice.nodes["work1"]
    target = Target(node, FactAnswers(node))
    before = target.facts[SYSTEM].boot_id

    def plan(site: Site, target: Target) -> list[Change] | Nothing:
        return [Reboot("it is tried", pause_s=0.2)] if target.facts[SYSTEM].boot_id == before else Nothing("it was")

    site = Site(practice.cluster, Workspace(practice.folder), [target])
    (step,) = converge_site(site, [Operation("reboot", plan)], targets=[target], only_names={"reboot"}, is_dry_run=False)
    assert (step.state, step.changes) == ("changed", 1), step.says
    assert target.facts[SYSTEM].boot_id == read_boot_id(node) != before
    assert practice.provision()["verified"] is True


def test_one_provision_repairs_different_damage_on_three_nodes(practice):
    """One `provision` repairs different damage on three nodes.

    work1 has a wrong munge key, lacks the host key of work2, and its slurmd is off. On work2, an installation was interrupted.
    On head, slurmctld has not read a file since the file changed, as if provisioning had been killed after writing the file and
    before restarting slurmctld.
    """
    key = practice.run("head", "base64 -w0 /etc/munge/munge.key")
    practice.run("head", "touch /etc/slurm/slurm.conf")
    wrong = "head -c 128 /dev/urandom > /etc/munge/munge.key; systemctl restart munge"
    practice.run("work1", f"{wrong}; sed -i '/^work2,/d' /etc/ssh/ssh_known_hosts; systemctl disable -q --now slurmd")
    practice.run("work2", "dpkg --unpack --force-all /var/cache/apt/archives/munge_*.deb")
    answer = practice.nodes["work1"].run(["sh", "-c", f"{STRICT} work2 true"], timeout_s=HANG_S)
    assert answer.code != 0
    assert "Host key verification failed" in answer.stderr
    logs = practice.folder / ".shardlab" / "log"
    for log in logs.iterdir():
        log.unlink()
    said = practice.provision()
    logged = "".join(path.read_text() for path in logs.iterdir())
    told = {step: one["says"] for step, one in states(said).items() if one["state"] == "changed"}
    told.pop(("head", "slurm-nodes"), None)  # the operation slurm-nodes may also report that it waited for workers
    assert told.keys() == {
        ("head", "slurm-controller"),
        ("work2", "packages"), ("work2", "slurm-workers"),  # slurmd is started again, because unpacking munge stopped it
        ("work1", "munge"), ("work1", "slurm-workers"), ("work1", "trust"),
    }  # fmt: skip
    assert told["head", "slurm-controller"] == ["restart slurmctld, because its files have changed"]
    assert told["work1", "munge"][0] == "copy the munge key from head"
    assert states(said)["work1", "munge"]["changes"] == 2
    assert told["work1", "slurm-workers"] == ["enable slurmd, so that it starts at every boot", "start slurmd"]
    assert told["work1", "trust"] == ["write the keys of 3 nodes into /etc/ssh/ssh_known_hosts"]
    assert states(said)["work1", "trust"]["changes"] == 1
    assert told["work2", "packages"][0] == "finish the installation that was interrupted"
    assert said["verified"] is True
    assert practice.provision("plan")["changes"] == 0
    assert practice.run("work1", "base64 -w0 /etc/munge/munge.key; stat -c '%a %U' /etc/munge/munge.key") == f"{key}400 munge\n"
    assert FactAnswers(practice.nodes["work1"])[SERVICES]["slurmd"].state == "active"
    private = (practice.machine("work1").root_folder / f"home/{base.PRACTICE_USER}/.ssh/id_ed25519").read_text().splitlines()[2]
    assert "base64 /etc/munge/munge.key" in logged
    assert key[:24] not in logged
    assert private not in logged


@only_in_long_form
def test_provision_reports_a_full_disk_and_continues_once_there_is_room(practice):
    practice.machine("work2").remove()
    practice.give_disk("work2", "3G")
    with practice.start() as process:
        for line in process.stderr:
            if line.startswith("work2: munge-user: changed"):
                break
        practice.give_disk("work2", "24M")  # too small for the packages, which `provision` installs next
        stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 1, stderr
    one = states(json.loads(stdout))
    assert one["work2", "packages"]["state"] == "failed"
    assert "a disk is full" in one["work2", "packages"]["says"][-1]
    assert one["work2", "munge"]["state"] == "not reached"
    assert {state["state"] for (node, _), state in one.items() if node != "work2"} <= {"nothing to do", "changed"}
    said = practice.provision("plan", code=1)
    assert "GiB are free on /, and packages may take 2 GiB" in states(said)["work2", "space"]["says"][0]
    practice.give_disk("work2", "3G")
    assert practice.provision()["verified"] is True
    assert practice.provision("plan")["changes"] == 0


@only_in_long_form
def test_provision_killed_after_every_change_continues_without_duplicates(practice):
    """`provision` creates removed nodes again. It is killed once after each change and started again, until it completes."""
    for name in ("head", "work2"):
        practice.take_back_disk(name)
        practice.machine(name).remove()
    (environment,) = (practice.folder / "shared" / "shardlab").iterdir()
    (environment / "source.made").unlink(missing_ok=True)
    seen = practice.folder / "killed-after"
    command = [sys.executable, "-P", Path(__file__).parents[1] / "support" / "support_killed.py", seen, *practice.words()]
    killed = 0
    while (done := subprocess.run(command, capture_output=True, text=True)).returncode == -signal.SIGKILL:
        killed += 1
        assert killed < 150, done.stderr
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["verified"] is True
    assert len(seen.read_text().splitlines()) == killed > 20
    assert practice.provision("plan")["changes"] == 0
    for name in practice.nodes:
        begins = f"grep -c '^# begin shardlab {practice.cluster.name}$'"
        counted = practice.run(
            name, f"{begins} /home/{base.PRACTICE_USER}/.ssh/authorized_keys; {begins} /etc/ssh/ssh_known_hosts"
        )
        assert counted.split() == ["1", "1"]
        assert practice.run(name, "sort /etc/hosts | uniq -d") == ""
        assert practice.run(name, "pgrep -c -x munged; pgrep -c -x slurmd || true").split() == [
            "1",
            "0" if name == "head" else "1",
        ]
    assert practice.run("head", "pgrep -c -x slurmctld; pgrep -c -x slurmdbd").split() == ["1", "1"]
    assert practice.run("head", "sacctmgr -nP show cluster format=cluster").split() == [practice.cluster.name]
    assert practice.run("head", "sinfo -hN -o %N").split() == ["work1", "work2"]
    assert practice.run("head", "mariadb -BNe \"SELECT COUNT(*) FROM mysql.user WHERE user='slurm'\"") == "1\n"
    assert len([path for path in environment.iterdir() if path.name.startswith("source-")]) == 1


@only_in_long_form
def test_a_node_that_dies_on_the_way_stops_alone_and_is_made_by_the_next_run(practice):
    practice.machine("work2").remove()
    process = practice.start()
    ends = time.monotonic() + 120
    while not (init := practice.machine("work2").find_pid()) or not _answers(practice, "work2"):
        assert time.monotonic() < ends, init
        time.sleep(0.2)
    practice.machine("work2").crash()
    said = json.loads(process.communicate(timeout=HANG_S)[0])
    assert process.returncode == 1
    ended = {step: one for step, one in states(said).items() if one["state"] in ("failed", "not reached", "not answered")}
    assert {name for name, _ in ended} == {"work2"}, ended
    said = practice.provision()
    assert said["verified"] is True


def _answers(practice, name):
    try:
        return practice.nodes[name].run(["true"], timeout_s=10).code == 0  # meant to be reached: the node may be down
    except Unreachable:
        return False


def test_a_full_disk_is_reported_and_keeps_the_old_file(practice):
    node = practice.nodes["work1"]
    practice.run("work1", "mkdir -p /mnt/small; mount -t tmpfs -o size=64k tmpfs /mnt/small; echo old > /mnt/small/file")
    answer = node.put(b"x" * 200_000, "/mnt/small/file", mode=0o644, owner="root:root")
    assert answer.code != 0
    assert "No space left on device" in answer.stderr
    assert practice.run("work1", "cat /mnt/small/file; ls -A /mnt/small; umount /mnt/small") == "old\nfile\n"


def test_a_skewed_clock_or_a_sudo_with_a_password_stops_only_its_node(practice):
    """`provision` does not continue on work1, whose clock is wrong, nor on work2, where sudo asks for a password. All practice
    nodes share the clock of this machine, so the program `date` of work1 is replaced by a program that adds 5 s."""
    date = practice.machine("work1").root_folder / "usr/local/bin/date"
    rule = practice.machine("work2").root_folder / f"etc/sudoers.d/{base.PRACTICE_USER}"
    before = rule.read_text()
    try:
        rule.write_text(f"{base.PRACTICE_USER} ALL=(ALL) ALL\n")
        date.write_text("#!/bin/sh\nexec /usr/bin/date -d '+5 seconds' \"$@\"\n")
        date.chmod(0o755)
        said = practice.provision(code=1)
        node = practice.nodes["work1"]
        outcome = CLOCK.run(Site(practice.cluster, Workspace(practice.folder), []), Target(node, FactAnswers(node)))
    finally:
        date.unlink(missing_ok=True)
        rule.write_text(before)
    one = states(said)
    assert one["work1", "clock"]["state"] == "failed"
    assert re.search(r"work1: its clock is \+[45]\.\d+ s from this machine's clock", one["work1", "clock"]["says"][0])
    assert one["work1", "slurm-workers"]["state"] == "not reached"
    assert (one["work2", "space"]["state"], one["work2", "space"]["changes"]) == ("failed", 0)
    assert "a password is required" in one["work2", "space"]["says"][0]
    assert one["work2", "packages"]["state"] == "not reached"
    assert one["head", "slurm-controller"]["state"] == one["work1", "packages"]["state"] == "nothing to do"
    failed = {(check["node"], check["says"]) for check in said["checks"] if check["passed"] is False}
    places = (("work1", "clock"), ("work2", "space"))
    assert failed == {(node, f"{name} failed: {one[node, name]['says'][-1]}") for node, name in places}
    assert outcome.passed is False
    assert re.match(r"\+[45]\.\d+ s from this machine's clock", outcome.says)
    assert practice.provision("plan")["changes"] == 0


def test_a_hung_node_is_reported_once_and_delays_no_other_node(practice):
    daemons = [
        one for one in psutil.Process(practice.machine("work1").find_pid()).children(recursive=True) if one.name() == "sshd"
    ]
    assert daemons
    try:
        for one in daemons:
            one.suspend()
        proven_without(practice.provision("verify", code=1), "work1", "cannot be reached")
    finally:
        for one in daemons:
            one.resume()


@only_in_long_form
def test_a_changed_host_key_stops(practice):
    known = practice.folder / ".shardlab" / "known_hosts"
    before, head = known.read_text(), practice.nodes["head"].host
    other = (practice.machine("work1").host_key_path.with_suffix(".pub")).read_text().split()[1]
    try:
        known.write_text(
            "\n".join(f"{head} ssh-ed25519 {other}" if line.startswith(f"{head} ") else line for line in before.splitlines())
            + "\n"
        )
        said = practice.provision("verify", code=1)
        told = " ".join(one["says"] for one in said["checks"])
        assert "its host key CHANGED" in told
        assert "SHA256:" in told
    finally:
        known.write_text(before)


def test_an_unknown_host_key_stops_with_its_fingerprint_unless_new_ones_are_accepted(practice, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    identity = practice.folder / ".shardlab" / "practice" / "id_ed25519"
    known = tmp_path / "known_hosts"
    public = practice.machine("head").host_key_path.with_suffix(".pub")
    mark = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout.split()[1]
    head = practice.nodes["head"].host
    strict = Remote(Address(head, user=base.PRACTICE_USER, identity=identity, known_hosts=known))
    with pytest.raises(Unreachable, match="its host key is not known") as caught:
        strict.run(["true"], timeout_s=HANG_S)
    assert mark in str(caught.value)
    assert not known.exists()
    accepting = Remote(Address(head, user=base.PRACTICE_USER, identity=identity, known_hosts=known, host_keys="accept-new"))
    assert accepting.run(["true"], timeout_s=HANG_S).code == 0
    assert strict.run(["true"], timeout_s=HANG_S).code == 0


def test_a_remote_command_past_its_limit_is_ended(practice):
    node = practice.nodes["work1"]
    answer = node.run(["sh", "-c", "exec sleep 4321"], timeout_s=1, root=True)  # meant to be reached
    assert answer.code is None
    until(lambda: node.run(["pgrep", "-f", "[s]leep 4321"], timeout_s=HANG_S).stdout == "", "the command ends")


def test_a_command_that_ends_before_it_reads_its_input_breaks_no_other_command(practice):
    node = practice.nodes["work1"]
    with ThreadPoolExecutor() as pool:
        commands = [(["true"], b"x" * 10_000_000), (["sleep", "1"], b""), (["false"], b"x" * 10_000_000)]
        answers = pool.map(lambda command: node.run(command[0], timeout_s=HANG_S, stdin=command[1]), commands)
        assert [answer.code for answer in answers] == [0, 0, 1]


def test_words_of_a_remote_command_arrive_unchanged(practice):
    """Words with quotes, spaces and shell characters arrive unchanged at a command on a node."""
    words = ["a b", "$HOME", "`id`", "'", '"', "\n", "*", "-n", "é", ";rm"]
    answer = practice.nodes["work1"].run(["printf", "%s\\0", *words], timeout_s=HANG_S, env={"X": "$(id)'"})
    assert answer.stdout.split("\0")[:-1] == words


def test_the_user_goes_from_node_to_node_without_a_question(practice):
    address = practice.nodes["work2"].host
    for to, name in (("work2", "work2"), (address, "work2"), ("head", "head")):  # the user logs in by name and by address
        said = practice.run("work1", f"{STRICT} {to} 'id -un; hostname'", root=False)
        assert said.split() == [base.PRACTICE_USER, name]
    private = (practice.machine("work1").root_folder / f"home/{base.PRACTICE_USER}/.ssh/id_ed25519").read_text().splitlines()[2]
    for other in ("head", "work2"):
        ssh = practice.machine(other).root_folder / f"home/{base.PRACTICE_USER}/.ssh"
        assert private not in "".join(path.read_text() for path in ssh.iterdir() if path.is_file())


def test_a_change_that_fails_says_why(practice):
    with pytest.raises(Exception, match=r"work1: try it: .*nonesuch"):
        shell_change("try it", "nonesuch").make(practice.nodes["work1"])
