"""`provision` creates, adopts, extends and terminates an experiment at a portal over TLS, whatever happens on the way."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support_cloudlab import lan, manifest, node
from support_portal import (
    END,
    TOKEN,
    URN,
    UUID,
    carried_out_then,
    half_document,
    nodes,
    serve,
    status,
    truncated,
    two_nodes,
)

from provision import cli
from provision.cloudlab import readiness, termination
from shardlab import cloudlab_experiment, cluster, inventory, lease
from shardlab.workspace import Workspace

FILE = """\
schema: 1
name: bench
provider: cloudlab
cloudlab: {{project: myproj, hardware: d8545, nodes: 2, lan_mbps: 25000, blockstore_gib: 0, portal_url: "{}"}}
ssh: {{user: alice, host_keys: accept-new}}
"""
BODY = {
    "name": "bench",
    "project": "myproj",
    "profile_name": "small-lan",
    "profile_project": "PortalProfiles",
    "duration": 16,
    "bindings": {
        "nodeCount": "2",
        "phystype": "d8545",
        "osImage": "urn:publicid:IDN+emulab.net+image+emulab-ops//UBUNTU24-64-STD",
        "linkSpeed": "25000000",
        "tempFileSystemMount": "/mydata",
        "tempFileSystemMax": "true",
    },
}
# The command in a process of its own, which asks as often as the tests do.
COMMAND = (
    "import sys; from shardlab import command_start; from provision.cloudlab import readiness, termination; "
    "readiness.POLL_S = termination.POLL_S = 0.05; sys.exit(command_start.start('provision'))"
)


class Place:
    """A workspace, its portal, and what `provision` printed last."""

    def __init__(self, folder, portal, capsys):
        self.folder, self.portal, self.capsys = folder, portal, capsys
        self.own = folder / ".shardlab"
        (folder / "cluster.yaml").write_text(FILE.format(portal.url))
        self.out = self.document = ""

    def provision(self, *words):
        """The exit code; nodes cannot be reached, so it is 1 where `provision` came as far as them."""
        code = cli.main(["--workspace", str(self.folder), *words])
        said = self.capsys.readouterr()
        self.document = said.out
        self.out = " ".join((said.out + said.err).split())
        return code

    def begun(self, *words, stdin=subprocess.DEVNULL):
        command = [sys.executable, "-c", COMMAND, "-v", "--workspace", str(self.folder), *words]
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_for(self, method, end, times=1):
        with self.portal.changed:
            assert self.portal.changed.wait_for(
                lambda: sum(path.endswith(end) for _, path, _ in self.portal.asked(method)) >= times, 60
            )

    def kept(self):
        """The names of all files in .shardlab but locks."""
        return sorted(
            str(path.relative_to(self.own)) for path in self.own.rglob("*") if path.is_file() and path.suffix != ".lock"
        )

    def change(self, before, after):
        file = self.folder / "cluster.yaml"
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    """Without any experiment; the token is in the file of the user."""
    server, home, workspace = (tmp_path / name for name in ("portal", "home", "workspace"))
    for folder in (server, home / ".config/shardlab", workspace):
        folder.mkdir(parents=True)
    workspace.chmod(0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("CLOUDLAB_TOKEN", raising=False)
    token = home / ".config/shardlab/cloudlab-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    monkeypatch.setenv("SSL_CERT_FILE", str(server / "certificate.pem"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(readiness, "POLL_S", 0.01)
    monkeypatch.setattr(termination, "POLL_S", 0.01)
    with serve(server) as portal:
        yield Place(workspace, portal, capsys)


def test_from_a_cluster_file_without_nodes_to_the_nodes(place):
    assert place.provision() == 1
    assert [body for _, _, body in place.portal.asked("POST")] == [BODY]
    assert "creating the experiment bench in the project myproj" in place.out
    assert "experiment provisioning, 1 of 2 nodes ready; node1: status booting, rawstate BOOTING" in place.out
    assert "node0" in place.out  # cannot be reached
    described = cluster.find(None, place.folder)
    assert [one.name for one in described.nodes] == ["node0", "node1"]
    assert (place.own / "cloudlab/wisc.cloudlab.us.xml").read_text() == two_nodes()
    lent = lease.newest(place.own, [])
    assert (lent.expires.isoformat(), lent.source) == (END, "portal")
    assert cloudlab_experiment.read(place.own).created_by_us
    place.provision()  # the nodes are known, and the end is read anew
    assert len(place.portal.asked("POST")) == 1


def test_a_plan_asks_no_portal_and_stores_nothing(place):
    assert place.provision("plan", "--json") == 0
    shown = json.loads(place.document)
    assert (shown["changes"], shown["request"]) == (1, BODY)
    assert place.provision("plan") == 0
    assert "create or adopt the experiment bench in the project myproj for 16 h" in place.out
    assert place.portal.requests == []
    assert place.kept() == []


@pytest.mark.parametrize("words", [["facts"], ["verify"], ["--limit", "node0"]])
def test_what_needs_nodes_is_refused_before_anything_is_created(place, words):
    assert place.provision(*words) == 2
    assert "needs nodes, and its machines do not exist yet" in place.out
    assert place.portal.requests == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("project: myproj, ", "", "cloudlab.project: null cannot be requested"),
        ("name: bench", "name: a-name-that-is-too-long", "at most 16 characters"),
        ("lan_mbps: 25000", "lan_mbps: 40000", "Allowed: 100, 1000, 10000, 25000, 100000 with the profile small-lan"),
        ("blockstore_gib: 0", "blockstore_gib: 187", "Allowed: 1 to 186 with the profile small-lan"),
        ("hardware: d8545", "hardware: c4130", "cloudlab.site is missing"),
        ("nodes: 2", "nodes: 5", "5 nodes are requested, but the site has 4"),
    ],
)
def test_what_cannot_be_requested_is_said_before_anything_is_created(place, before, after, says):
    place.change(before, after)
    assert place.provision() == 2
    assert says in place.out
    assert place.portal.requests == []
    assert place.kept() == []


def test_the_parameters_of_another_profile_are_only_the_bindings(place):
    place.change("hardware: d8545", "profile: bench, profile_project: myproj, bindings: {phystype: d7525}")
    place.provision()
    (body,) = [body for _, _, body in place.portal.asked("POST")]
    assert (body["profile_name"], body["profile_project"], body["bindings"]) == ("bench", "myproj", {"phystype": "d7525"})
    assert "only cloudlab.bindings are sent" in place.out


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (status(400, "No such project"), "HTTP 400: No such project"),
        (status(400, "No such image"), "HTTP 400: No such image"),
        (status(403, "not a member"), "Allowed: a member of the project"),
        (status(401, "expired"), "does not accept the token of"),
    ],
)
def test_a_creation_that_the_portal_refuses_changes_nothing(place, fault, says):
    place.portal.fail("POST", "/experiments", fault)
    assert place.provision() == 2
    assert says in place.out
    assert place.kept() == []


def test_without_a_token_nothing_is_asked(place, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place.provision() == 2
    assert "there is no experiment yet. Allowed: cloudlab.manifest" in place.out
    assert place.portal.requests == []


@pytest.mark.parametrize("fault", [status(500), status(504), truncated, half_document])
def test_a_creation_whose_answer_is_lost_is_found_by_its_name(place, fault):
    place.portal.fail("POST", "/experiments", carried_out_then(fault))
    assert place.provision() == 1
    assert "Looking for the experiment by its name" in place.out
    assert len(place.portal.asked("POST")) == 1
    assert cloudlab_experiment.read(place.own).uuid == UUID
    assert [one.name for one in cluster.find(None, place.folder).nodes] == ["node0", "node1"]


def test_a_creation_that_was_not_carried_out_is_asked_again_by_the_next_command(place):
    place.portal.fail("POST", "/experiments", status(500))
    assert place.provision() == 1
    assert "The experiment bench is not there. Run the same command again" in place.out
    assert place.provision() == 1
    assert len(place.portal.asked("POST")) == 2
    assert cloudlab_experiment.manifests(place.own)


def in_use(place, **fields):
    """A portal that has the experiment only when it is asked to create it again."""

    def refuse(handler):
        place.portal.add(**fields)
        handler.answer(400, {"code": 400, "error": "Experiment name is already in use"})

    place.portal.fail("POST", "/experiments", refuse)


def test_an_experiment_that_the_portal_made_late_is_ours(place):
    place.portal.fail("POST", "/experiments", status(500))
    assert place.provision() == 1
    in_use(place)
    assert place.provision() == 1
    assert cloudlab_experiment.read(place.own).created_by_us
    assert cloudlab_experiment.manifests(place.own)


@pytest.mark.parametrize(("creator", "code"), [("alice", 1), ("bob", 2)])
def test_an_experiment_that_somebody_created_since_we_looked_is_not_ours(place, creator, code):
    in_use(place, creator=creator)
    assert place.provision() == code
    note = cloudlab_experiment.read(place.own)
    assert note is None if creator == "bob" else not note.created_by_us


def test_a_command_that_is_killed_after_it_asked_is_continued(place):
    release = threading.Event()
    place.portal.fail("POST", "/experiments", carried_out_then(lambda _handler: release.wait(60)))
    running = place.begun()
    place.wait_for("POST", "/experiments")
    running.kill()
    said = running.communicate()[0]
    release.set()
    assert "creating the experiment bench" in said
    assert cloudlab_experiment.read(place.own).uuid is None
    assert place.provision() == 1
    assert "an earlier command created the experiment bench; this command continues with it" in place.out
    assert len(place.portal.asked("POST")) == 1
    assert cloudlab_experiment.read(place.own).created_by_us


def test_a_command_that_is_interrupted_while_it_waits_is_continued(place):
    place.portal.polls = 1_000_000
    running = place.begun()
    place.wait_for("GET", UUID, times=2)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[0]
    assert running.returncode == 130
    assert "run the same command again to continue" in said
    place.portal.polls = 0
    assert place.provision() == 1
    assert len(place.portal.asked("POST")) == 1
    assert cloudlab_experiment.manifests(place.own)


def test_the_experiment_of_another_member_is_not_used(place):
    place.portal.add(creator="bob")
    assert place.provision() == 2
    assert "already has an experiment bench, which this workspace did not create (its creator is bob)" in place.out
    assert place.portal.asked("POST") == []
    assert place.kept() == []


def test_an_experiment_of_the_user_is_adopted_and_not_terminated(place):
    place.portal.add(created_at="2031-04-01T00:00:00+00:00")
    assert place.provision() == 1
    assert "already has your experiment bench: this command uses it as it is" in place.out
    assert place.portal.asked("POST") == []
    assert len(cluster.find(None, place.folder).nodes) == 2
    assert place.provision("extend", "--hours", "3", "--reason", "a deadline") == 0
    assert place.provision("down", "--yes") == 0
    assert "provision did not create the experiment bench, so it was not terminated" in place.out
    assert place.portal.asked("DELETE") == []
    assert cluster.find(None, place.folder).nodes == []


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"status": "failed"}, "the experiment bench has failed: its status is failed"),
        ({"status": "ready", "aggregates": {URN: {"nodes": nodes(True, status="failed")}}}, "these nodes failed: node1"),
        (
            {"status": "ready", "aggregates": {URN: {"nodes": nodes(True, startup_status="failed")}}},
            "these nodes failed: node1",
        ),
    ],
)
def test_an_experiment_that_fails_is_said_with_its_page(place, state, says):
    place.portal.fail("POST", "/experiments", lambda handler: handler.answer(201, place.portal.add(**state)))
    assert place.provision() == 1
    assert says in place.out
    assert "https://www.cloudlab.us/status.php" in place.out
    assert cloudlab_experiment.manifests(place.own) == []


HOSTILE = {
    "a DOCTYPE": (URN, two_nodes().replace("<rspec", "<!DOCTYPE rspec []><rspec", 1)),
    "larger than 16 MiB": (URN, two_nodes().replace("</rspec>", " " * (16 << 20) + "</rspec>")),
    "the host of a login": (URN, two_nodes().replace("127.0.0.1", "-oProxyCommand=id")),
    "is of no aggregate": ("urn:publicid:IDN+../../x+authority+cm", two_nodes()),
    "lists no machine": (URN, manifest()),
    "the manifests have 1 nodes": (URN, manifest(node("node0", 1), lan(["node0"]))),
}


@pytest.mark.parametrize("says", HOSTILE)
def test_a_manifest_that_cannot_be_used_is_not_stored(place, says):
    urn, text = HOSTILE[says]
    place.portal.manifests = {urn: text}
    assert place.provision() == 1  # not 2: the experiment was created
    assert says in place.out
    assert "provision CLUSTER.yaml down" in place.out or "Run the same command again" in place.out
    assert place.kept() == ["cloudlab-experiment.json"]


def test_nodes_at_another_site_are_said(place):
    place.change("hardware: d8545", "hardware: d8545, site: wisc")
    place.portal.manifests = {URN: two_nodes("clemson.cloudlab.us")}
    assert place.provision() == 1
    assert "the nodes are at clemson.cloudlab.us, and the cluster file says cloudlab.site: wisc" in place.out
    assert cloudlab_experiment.manifests(place.own) == []


def test_the_token_is_in_no_output_file_or_command_line(place):
    place.portal.polls = 1_000_000
    running = place.begun()
    place.wait_for("GET", UUID)
    assert TOKEN not in Path(f"/proc/{running.pid}/cmdline").read_text()
    place.portal.polls = 0
    said = running.communicate(timeout=120)[0]
    assert running.returncode == 1
    assert "creating the experiment" in said
    assert TOKEN not in said
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


@pytest.fixture
def created(place):
    place.provision()
    return place


def inventory_of(place):
    """An inventory of this cluster, as `provision` writes it of nodes that answer."""
    place.own.joinpath("inventory.json").write_text(json.dumps({"schema": 1, "cluster": "bench", "nodes": []}))


def test_hours_that_were_granted_are_in_the_lease_and_jobs_knows_them(created):
    inventory_of(created)
    assert created.provision("extend", "--hours", "5", "--reason", "a deadline", "--json") == 0
    assert "the portal granted 5 h for the experiment bench: it ends at 2031-05-02 09:00 UTC" in created.out
    assert lease.newest(created.own, []).expires.isoformat() == "2031-05-02T09:00:00+00:00"
    assert inventory.leased(Workspace(created.folder), "bench").lease == lease.newest(created.own, [])
    assert json.loads(created.document)["lease"]["expires"] == "2031-05-02T09:00:00Z"
    assert created.portal.asked("PUT")[0][2] == {"extend_by": 5, "reason": "a deadline"}


@pytest.mark.parametrize(("granted", "says"), [(2, "granted 2 of 5 h"), (0, "granted none of 5 h")])
def test_a_partial_grant_is_said(created, granted, says):
    created.portal.grants = lambda _hours: granted
    inventory_of(created)
    assert created.provision("extend", "--hours", "5", "--reason", "a deadline") == 1
    assert says in created.out
    assert "An administrator may grant the rest" in created.out
    assert inventory.leased(Workspace(created.folder), "bench").lease == lease.newest(created.own, [])


def test_an_extension_whose_answer_is_lost_is_not_asked_twice(created):
    created.portal.fail("PUT", UUID, carried_out_then(status(502)))
    assert created.provision("extend", "--hours", "5", "--reason", "a deadline") == 0
    assert len(created.portal.asked("PUT")) == 1
    created.portal.fail("PUT", UUID, truncated)
    assert created.provision("extend", "--hours", "5", "--reason", "a deadline") == 1
    assert "granted none of 5 h" in created.out
    assert "is truncated" in created.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["extend"], "extend needs --hours"),
        (["extend", "--hours", "5"], "extend needs --reason TEXT"),
        (["extend", "--hours", "0", "--reason", "x"], "a whole number, 1 or more"),
        (["--hours", "5"], "belong to the verb extend"),
        (["--yes"], "belongs to the verb down"),
    ],
)
def test_options_of_extend_and_down_are_checked(place, words, says):
    try:
        code = place.provision(*words)
    except SystemExit as ended:  # argparse
        code, place.out = ended.code, place.capsys.readouterr().err
    assert code == 2
    assert says in place.out
    assert place.portal.requests == []


def test_without_an_experiment_there_is_nothing_to_extend_or_terminate(place):
    assert place.provision("extend", "--hours", "5", "--reason", "x") == 2
    assert "uses no experiment of the portal that could be extended" in place.out
    assert place.provision("down", "--yes") == 0
    assert "there is nothing to terminate" in place.out
    assert place.portal.requests == []


def test_down_terminates_only_what_was_confirmed(created):
    assert created.provision("down") == 2
    assert "down was not confirmed. Allowed: the option --yes, or the typed name bench" in created.out
    assert created.portal.asked("DELETE") == []
    assert created.provision("down", "--yes") == 0
    assert f"terminated the experiment bench ({UUID})" in created.out
    assert created.portal.experiments == {}
    assert cluster.find(None, created.folder).nodes == []
    assert lease.newest(created.own, []) is None
    assert (created.own / "cloudlab.old/wisc.cloudlab.us.xml").exists()
    assert created.provision("down", "--yes") == 0


@pytest.mark.parametrize(("typed", "code"), [("bench", 0), ("Bench", 2), ("", 2)])
def test_the_typed_name_confirms(created, typed, code):
    terminal, stdin = os.openpty()
    running = created.begun("down", stdin=stdin)
    os.write(terminal, f"{typed}\n".encode())
    said = running.communicate(timeout=60)[0]
    os.close(terminal)
    os.close(stdin)
    assert running.returncode == code, said
    assert "all data on its nodes is lost" in said
    assert len(created.portal.asked("DELETE")) == (code == 0)


@pytest.mark.parametrize("words", [["extend", "--hours", "5", "--reason", "x"], ["down", "--yes"]])
@pytest.mark.parametrize("method", ["GET", "CHANGE"])
def test_a_refusal_before_anything_was_changed_is_wrong_input(created, words, method):
    created.portal.fail({"extend": "PUT", "down": "DELETE"}[words[0]] if method == "CHANGE" else "GET", UUID, status(403, "no"))
    before = created.kept()
    assert created.provision(*words) == 2
    assert "the user of the token may not do this" in created.out
    assert created.kept() == before


@pytest.mark.parametrize("fault", [carried_out_then(status(500)), carried_out_then(truncated), carried_out_then(status(404))])
def test_a_termination_without_an_answer_is_waited_for(created, fault):
    created.portal.fail("DELETE", UUID, fault)
    assert created.provision("down", "--yes") == 0
    assert len(created.portal.asked("DELETE")) == 1
    assert created.portal.experiments == {}


def test_a_termination_that_was_not_carried_out_is_asked_again_by_the_next_command(created, monkeypatch):
    monkeypatch.setattr(termination, "MOST_WAIT_S", 0.0)
    created.portal.fail("DELETE", UUID, status(500))
    assert created.provision("down", "--yes") == 1
    assert "the experiment bench still exists 0 min after it was told to end" in created.out
    assert cloudlab_experiment.read(created.own) is not None
    monkeypatch.setattr(termination, "MOST_WAIT_S", 60.0)
    created.portal.gone_after = 0
    assert created.provision("down", "--yes") == 0


def test_an_experiment_that_has_ended_is_said_and_forgotten(created):
    created.portal.experiments.clear()
    assert created.provision() == 1
    assert "no longer exists at the portal. It was to end at 2031-05-02 04:00 UTC" in created.out
    assert created.provision("down", "--yes") == 0
    assert "no longer exists at the portal; its note was put away" in created.out
    assert cloudlab_experiment.read(created.own) is None


def test_down_names_runs_that_were_not_fetched(created):
    away = {
        "schema": 1, "cluster": "bench", "host": "127.0.0.1", "port": 1, "user": "alice", "identity": None,
        "known_hosts": str(created.own / "known_hosts"), "host_keys": "strict", "python": "/usr/bin/python3",
        "workspace": "/opt/shardlab/workspaces/x", "mark": "here:x\n", "shared": False,
    }  # fmt: skip
    (created.own / "away.json").write_text(json.dumps(away))
    assert created.provision("down") == 2
    assert "The cluster does not say which runs it has" in created.out
    assert "Runs that were not fetched are lost" in created.out


def test_a_portal_that_is_away_does_not_stop_work_on_nodes_that_exist(created):
    created.change(created.portal.url, "https://127.0.0.1:1")
    assert created.provision() == 1
    assert "warning: the end of the lease was not read anew: the portal 127.0.0.1:1: cannot be reached" in created.out
    assert "node0" in created.out


def geni_get(folder, monkeypatch, text):
    """A program geni-get that prints this manifest, as on a node of an experiment."""
    folder.mkdir()
    (folder / "manifest.xml").write_text(text)
    program = folder / "geni-get"
    program.write_text(f'#!/bin/sh\n[ "$1" = manifest ] && exec cat {folder}/manifest.xml\nexit 1\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize("has_token", [True, False])
def test_on_a_node_the_manifest_is_that_of_the_node(place, monkeypatch, tmp_path, has_token):
    geni_get(tmp_path / "bin", monkeypatch, two_nodes())
    if has_token:
        place.change("project: myproj, ", "")  # a file that could create nothing
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
    place.provision("plan")
    assert place.kept() == []
    assert place.provision() == 1
    assert "node0" in place.out
    assert [one.name for one in cluster.find(None, place.folder).nodes] == ["node0", "node1"]
    assert lease.newest(place.own, []).source == "manifest"
    (tmp_path / "bin/manifest.xml").write_text(two_nodes().replace("2031-05-02", "2031-05-09"))
    place.provision()
    assert lease.newest(place.own, []).expires.day == 9
    assert place.provision("down", "--yes") == 0
    assert place.portal.requests == []


@pytest.mark.parametrize("says", ["a DOCTYPE", "larger than 16 MiB", "the host of a login", "lists no machine"])
def test_a_hostile_manifest_of_a_node_changes_nothing(place, monkeypatch, tmp_path, says):
    monkeypatch.setenv("HOME", str(tmp_path))
    geni_get(tmp_path / "bin", monkeypatch, HOSTILE[says][1])
    assert place.provision() == 2
    assert says in place.out
    assert place.kept() == []
