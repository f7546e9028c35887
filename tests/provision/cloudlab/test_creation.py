"""`provision` creates or adopts an experiment at the portal over TLS, and handles every fault of the portal."""

import json
import signal
import threading
from pathlib import Path

import pytest
from support_e2e import HANG_S
from support_portal import END, TOKEN, URN, UUID, carried_out_then, half_document, nodes, status, truncated, two_nodes
from support_portal_workspace import HOSTILE, place_of_portal

from shardlab.cloudlab import cloudlab_experiment
from shardlab.cluster import cluster, lease

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


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    with place_of_portal(tmp_path, monkeypatch, capsys) as made:
        yield made


def test_provision_creates_an_experiment_for_a_cluster_file_without_nodes(place):
    assert place.provision() == 1
    assert [body for _, _, body in place.portal.asked("POST")] == [BODY]
    assert "creating the experiment bench in the project myproj" in place.out
    assert "experiment provisioning, 1 of 2 nodes ready; node1: status booting, rawstate BOOTING" in place.out
    assert place.out.count("the clock of this machine is ") == 1  # the clock of the stand-in portal is in 2031
    assert "node0" in place.out  # `provision` names the nodes that it cannot reach
    described = cluster.find_cluster(None, place.folder)
    assert [one.name for one in described.nodes] == ["node0", "node1"]
    assert (place.own / "cloudlab/wisc.cloudlab.us.xml").read_text() == two_nodes()
    lent = lease.read_newest_lease(place.own, [])
    assert (lent.expires.isoformat(), lent.source) == (END, "portal")
    assert cloudlab_experiment.read_note(place.own).created_by_us
    place.provision()  # the nodes are already known; `provision` reads the end of the experiment again
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
def test_a_command_that_needs_nodes_is_refused_before_an_experiment_is_created(place, words):
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
        ("nodes: 2", "nodes: 2, bindings: {phystype: c240g5}", "cloudlab.bindings: phystype cannot be requested. Allowed: "),
        ("nodes: 2", 'nodes: 2, bindings: {nodeCount: "1"}', "nodeCount cannot be requested. Allowed: cloudlab.nodes"),
    ],
)
def test_an_impossible_request_is_refused_before_an_experiment_is_created(place, before, after, says):
    place.change(before, after)
    assert place.provision() == 2
    assert says in place.out
    assert place.portal.requests == []
    assert place.kept() == []


def test_the_parameters_of_another_profile_are_only_the_bindings(place):
    """If the cluster file names the user's own profile, `provision` sends no parameters to it except `cloudlab.bindings`."""
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
        (status(404, "No such profile"), "HTTP 404: No such profile"),
        (status(403, "not a member"), "Allowed: a member of the project"),
        (status(401, "expired"), "does not accept the token of"),
    ],
)
def test_a_creation_that_the_portal_refuses_changes_nothing(place, fault, says):
    place.portal.fail("POST", "/experiments", fault)
    assert place.provision() == 2
    assert says in place.out
    assert place.kept() == []


def test_provision_without_a_token_sends_no_request(place, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place.provision() == 2
    assert "there is no experiment yet. Allowed: cloudlab.manifest" in place.out
    assert place.portal.requests == []


def test_a_plan_needs_no_token(place, monkeypatch, tmp_path):
    """docs/cloudlab-paper1.md prints the plan before the reader may have a token. The token is needed for the creation only."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place.provision("plan", "--json") == 0
    shown = json.loads(place.document)
    assert (shown["changes"], shown["request"]) == (1, BODY)
    assert "note: bench: there is no experiment yet. Allowed: cloudlab.manifest" in place.out
    assert "To get a token" in place.out
    place.change("project: myproj, ", "")  # a user without a project requests the machines on the web
    assert place.provision("plan") == 2
    assert "error: bench: there is no experiment yet. Allowed: cloudlab.manifest" in place.out
    assert place.portal.requests == []
    assert place.kept() == []


@pytest.mark.parametrize("verb", ["apply", "facts", "verify"])
def test_a_command_that_needs_machines_is_refused_without_a_token(place, monkeypatch, tmp_path, verb):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place.provision(verb) == 2
    assert "error: bench: there is no experiment yet. Allowed: cloudlab.manifest" in place.out
    assert place.kept() == []


def test_a_requested_experiment_is_remembered_without_a_token(place, monkeypatch, tmp_path):
    place.portal.fail("POST", "/experiments", carried_out_then(status(500)), status(500))
    place.portal.fail("GET", "myproj,bench", *[status(404, "not yet")] * 2)
    assert place.provision() == 1
    kept = place.kept()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place.provision() == 2
    assert "an earlier command asked the portal for the experiment bench, and there is no token" in place.out
    assert place.kept() == kept == ["cloudlab-experiment.json"]


@pytest.mark.parametrize("fault", [status(500), status(504), truncated, half_document])
def test_a_creation_whose_answer_is_lost_is_found_by_its_name(place, fault):
    place.portal.fail("POST", "/experiments", carried_out_then(fault))
    assert place.provision() == 1
    assert "Looking for the experiment by its name" in place.out
    assert len(place.portal.asked("POST")) == 1
    assert cloudlab_experiment.read_note(place.own).uuid == UUID
    assert [one.name for one in cluster.find_cluster(None, place.folder).nodes] == ["node0", "node1"]


def test_a_creation_that_was_not_carried_out_is_asked_again_by_the_next_command(place):
    place.portal.fail("POST", "/experiments", status(500))
    assert place.provision() == 1
    assert "The experiment bench is not there. Run the same command again" in place.out
    assert place.provision() == 1
    assert len(place.portal.asked("POST")) == 2
    assert cloudlab_experiment.list_stored_manifests(place.own)


def in_use(place, **fields):
    """Make the portal refuse a POST because the name is in use, and add the experiment at the same moment."""

    def refuse(handler):
        place.portal.add(**fields)
        handler.answer(400, {"code": 400, "error": "Experiment name is already in use"})

    place.portal.fail("POST", "/experiments", refuse)


def test_an_experiment_that_the_portal_creates_late_is_adopted(place):
    place.portal.fail("POST", "/experiments", status(500))
    assert place.provision() == 1
    in_use(place)
    assert place.provision() == 1
    assert cloudlab_experiment.read_note(place.own).created_by_us
    assert cloudlab_experiment.list_stored_manifests(place.own)


@pytest.mark.parametrize(("creator", "code"), [("alice", 1), ("bob", 2)])
def test_an_experiment_that_another_user_created_meanwhile_is_not_adopted(place, creator, code):
    in_use(place, creator=creator)
    assert place.provision() == code
    note = cloudlab_experiment.read_note(place.own)
    assert note is None if creator == "bob" else not note.created_by_us


def test_a_creation_killed_after_its_request_is_continued(place):
    release = threading.Event()
    place.portal.fail("POST", "/experiments", carried_out_then(lambda _handler: release.wait(HANG_S)))
    running = place.begun()
    place.wait_for("POST", "/experiments")
    running.kill()
    said = running.communicate()[0]
    release.set()
    assert "creating the experiment bench" in said
    assert cloudlab_experiment.read_note(place.own).uuid is None
    assert place.provision() == 1
    assert "an earlier command created the experiment bench; this command continues with it" in place.out
    assert len(place.portal.asked("POST")) == 1
    assert cloudlab_experiment.read_note(place.own).created_by_us


def test_a_creation_interrupted_while_it_waits_is_continued(place):
    place.portal.polls = 1_000_000
    running = place.begun()
    place.wait_for("GET", UUID, times=2)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=HANG_S)[0]
    assert running.returncode == 130
    assert "run the same command again to continue" in said
    place.portal.polls = 0
    assert place.provision() == 1
    assert len(place.portal.asked("POST")) == 1
    assert cloudlab_experiment.list_stored_manifests(place.own)


@pytest.mark.parametrize("unknown", [{"creator": None, "created_at": None}, {"creator": None, "created_at": "soon"}])
def test_an_experiment_without_proof_of_our_creation_is_not_adopted(place, unknown):
    place.portal.fail("POST", "/experiments", status(500))
    assert place.provision() == 1
    place.portal.add(**unknown)
    assert place.provision() == 2
    assert "neither its creator nor when it was created is known" in place.out
    assert place.provision("down", "--yes") == 0
    assert place.portal.asked("DELETE") == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("name: bench", "name: other", "uses the experiment bench of the project myproj"),
        ("project: myproj", "project: other", "uses the experiment bench of the project myproj"),
        (None, "https://portal.example.org", "created at the portal 127.0.0.1:"),  # replaces the address of the portal
    ],
)
@pytest.mark.parametrize("words", [[], ["down", "--yes"], ["extend", "--hours", "5", "--reason", "x"]])
def test_a_cluster_file_that_names_another_experiment_is_refused(place, words, before, after, says):
    """If the cluster file names another experiment or portal than the workspace's records, every command is refused."""
    place.provision()
    place.change(before or place.portal.url, after)
    kept, asked = place.kept(), len(place.portal.requests)
    assert place.provision(*words) == 2
    assert says in place.out
    assert (place.kept(), len(place.portal.requests)) == (kept, asked)


def test_an_end_that_no_clock_reaches_is_not_known(place):
    """The portal answers with an end in the year 9999, which overflows in UTC. `provision` ignores it and continues."""
    place.portal.fail(
        "POST", "/experiments", lambda handler: handler.answer(201, place.portal.add(expires_at="9999-12-31T23:59:59-12:00"))
    )
    assert place.provision() == 1
    assert "node0" in place.out
    assert lease.read_newest_lease(place.own, []).source == "manifest"


def test_the_experiment_of_another_member_is_not_used(place):
    place.portal.add(creator="bob")
    assert place.provision() == 2
    assert "already has an experiment bench, which this workspace did not create (its creator is bob)" in place.out
    assert place.portal.asked("POST") == []
    assert place.kept() == []


@pytest.mark.parametrize("was_killed", [True, False])
def test_an_experiment_of_another_profile_is_not_used(place, was_killed):
    if was_killed:
        place.portal.fail("POST", "/experiments", status(500))
        assert place.provision() == 1
    place.portal.add(profile_name="openstack")
    assert place.provision() == 2
    assert "which this workspace did not create (its profile is PortalProfiles/openstack)" in place.out
    assert place.kept() == []
    assert place.provision("down", "--yes") == 0
    assert place.portal.asked("DELETE") == []


def test_the_case_of_a_profile_does_not_matter(place):
    place.change("nodes: 2", "nodes: 2, profile_project: portalprofiles")
    place.portal.fail(
        "POST",
        "/experiments",
        carried_out_then(
            lambda handler: place.portal.found(UUID).update(profile_project="PortalProfiles") or status(500)(handler)
        ),
    )
    assert place.provision() == 1
    assert cloudlab_experiment.read_note(place.own).uuid == UUID


def test_a_grant_of_fewer_hours_than_requested_is_reported(place):
    place.provision()
    assert "the portal granted" not in place.out
    place.provision("down", "--yes")
    place.portal.polls = 1
    place.change("nodes: 2", "nodes: 2, hours: 24")
    place.provision()
    assert (
        "the portal granted 16h 00m for the experiment bench, and the cluster file asks for 24 h: it ends at 2031-05-02 04:00 "
        "UTC. To ask for more hours: provision CLUSTER.yaml extend" in place.out
    )


def test_fewer_nodes_than_requested_are_reported_for_each_profile(place):
    place.change("hardware: d8545, nodes: 2", "profile: bench, profile_project: myproj, nodes: 3")
    assert place.provision() == 1
    assert "the manifests have 2 node(s), and the cluster file asks for 3." in place.out
    place.change("nodes: 3", "nodes: 2")
    place.provision()
    assert [one.name for one in cluster.find_cluster(None, place.folder).nodes] == ["node0", "node1"]


def test_an_experiment_of_the_user_is_adopted_and_not_terminated(place):
    place.portal.add(created_at="2031-04-01T00:00:00+00:00")
    assert place.provision() == 1
    assert "already has your experiment bench: this command uses it as it is" in place.out
    assert place.portal.asked("POST") == []
    assert len(cluster.find_cluster(None, place.folder).nodes) == 2
    assert place.provision("extend", "--hours", "3", "--reason", "a deadline") == 0
    assert place.provision("down", "--yes") == 0
    assert "provision did not create the experiment bench, so it was not terminated" in place.out
    assert place.portal.asked("DELETE") == []
    assert cluster.find_cluster(None, place.folder).nodes == []


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
def test_a_failed_experiment_is_reported_with_its_web_page(place, state, says):
    place.portal.fail("POST", "/experiments", lambda handler: handler.answer(201, place.portal.add(**state)))
    assert place.provision() == 1
    assert says in place.out
    assert "https://www.cloudlab.us/status.php" in place.out
    assert cloudlab_experiment.list_stored_manifests(place.own) == []


@pytest.mark.parametrize("says", HOSTILE)
def test_a_manifest_that_cannot_be_used_is_not_stored(place, says):
    urn, text = HOSTILE[says]
    place.portal.manifests = {urn: text}
    assert place.provision() == 1  # not 2, because the experiment was created
    assert says in place.out
    assert "provision CLUSTER.yaml down" in place.out or "Run the same command again" in place.out
    assert place.kept() == ["cloudlab-experiment.json"]


def test_a_mismatch_of_cluster_file_and_nodes_is_reported_once_nodes_exist(place):
    place.change("ssh: {", "storage: {shared: /mydata/shardlab, server: gpu0}\nssh: {")
    assert place.provision() == 1  # not 2, because the experiment was created
    assert "cluster.yaml:5:" in place.out
    assert "no node is called gpu0" in place.out
    assert "Its machines exist. Correct the cluster file" in place.out
    assert place.provision() == 2
    place.change("gpu0", "node0")
    assert place.provision() == 1
    assert "no node is called" not in place.out
    assert len(place.portal.asked("POST")) == 1


def test_nodes_at_another_site_are_reported(place):
    place.change("hardware: d8545", "hardware: d8545, site: wisc")
    place.portal.manifests = {URN: two_nodes("clemson.cloudlab.us")}
    assert place.provision() == 1
    assert "the nodes are at clemson.cloudlab.us, and the cluster file says cloudlab.site: wisc" in place.out
    assert cloudlab_experiment.list_stored_manifests(place.own) == []


def test_the_token_is_in_no_output_file_or_command_line(place):
    place.portal.polls = 1_000_000
    running = place.begun()
    place.wait_for("GET", UUID)
    assert TOKEN not in Path(f"/proc/{running.pid}/cmdline").read_text()
    place.portal.polls = 0
    said = running.communicate(timeout=HANG_S)[0]
    assert running.returncode == 1
    assert "creating the experiment" in said
    assert TOKEN not in said
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
