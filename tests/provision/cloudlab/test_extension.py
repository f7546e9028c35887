"""`provision extend` and `provision down` at a portal over TLS: the hours that are granted, and the user's confirmation."""

import json
import os
import sys

import pytest
from support_e2e import HANG_S
from support_portal import UUID, carried_out_then, status, truncated
from support_portal_workspace import place_of_portal

from provision.cloudlab import termination
from shardlab.cloudlab import cloudlab_experiment
from shardlab.cluster import cluster, lease
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    with place_of_portal(tmp_path, monkeypatch, capsys) as made:
        yield made


@pytest.fixture
def created(place):
    place.provision()
    return place


def inventory_of(place):
    """Write the inventory of this cluster, as `provision` writes it when the nodes answer."""
    place.own.joinpath("inventory.json").write_text(json.dumps({"schema": 1, "cluster": "bench", "nodes": []}))


def test_granted_hours_are_in_the_lease_that_jobs_reads(created):
    inventory_of(created)
    assert created.provision("extend", "--hours", "5", "--reason", "a deadline", "--json") == 0
    assert "the portal granted 5 h for the experiment bench: it ends at 2031-05-02 09:00 UTC" in created.out
    assert lease.read_newest_lease(created.own, []).expires.isoformat() == "2031-05-02T09:00:00+00:00"
    assert inventory.read_leased_inventory(Workspace(created.folder), "bench").lease == lease.read_newest_lease(created.own, [])
    assert json.loads(created.document)["lease"]["expires"] == "2031-05-02T09:00:00Z"
    assert created.portal.asked("PUT")[0][2] == {"extend_by": 5, "reason": "a deadline"}


@pytest.mark.parametrize(("granted", "says"), [(2, "granted 2 of 5 h"), (0, "granted none of 5 h")])
def test_an_extension_by_fewer_hours_than_requested_is_reported(created, granted, says):
    created.portal.grants = lambda _hours: granted
    inventory_of(created)
    assert created.provision("extend", "--hours", "5", "--reason", "a deadline") == 1
    assert says in created.out
    assert "An administrator may grant the rest" in created.out
    assert inventory.read_leased_inventory(Workspace(created.folder), "bench").lease == lease.read_newest_lease(created.own, [])


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
        (["--hours", "5"], "--hours belongs to the verb extend"),
        (["--yes"], "belongs to the verb down"),
    ],
)
def test_options_of_extend_and_down_are_checked(place, words, says):
    try:
        code = place.provision(*words)
    except SystemExit as ended:  # argparse raises it for wrong options
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
    assert cluster.find_cluster(None, created.folder).nodes == []
    assert lease.read_newest_lease(created.own, []) is None
    assert (created.own / "cloudlab.old/wisc.cloudlab.us.xml").exists()
    assert created.provision("down", "--yes") == 0


@pytest.mark.parametrize(("typed", "code"), [("bench\n", 0), ("Bench\n", 2), ("\n", 2), ("\4", 2)], ids=repr)
def test_the_typed_name_confirms(created, typed, code):
    """The last input is Ctrl-D, which ends the input without a name."""
    terminal, stdin = os.openpty()
    running = created.begun("down", stdin=stdin)
    os.write(terminal, typed.encode())
    said = running.communicate(timeout=HANG_S)[0]
    os.close(terminal)
    os.close(stdin)
    assert running.returncode == code, said
    assert "all data on its nodes is lost" in said
    assert ("the typed name is not bench. Nothing was changed" in said) == (code == 2)
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
    assert cloudlab_experiment.read_note(created.own) is not None
    monkeypatch.setattr(termination, "MOST_WAIT_S", 60.0)
    created.portal.gone_after = 0
    assert created.provision("down", "--yes") == 0


def test_an_experiment_that_has_ended_is_reported_and_its_record_removed(created):
    created.portal.experiments.clear()
    assert created.provision() == 1
    assert "no longer exists at the portal. It was to end at 2031-05-02 04:00 UTC" in created.out
    assert created.provision("down", "--yes") == 0
    assert "no longer exists at the portal; its note was put away" in created.out
    assert cloudlab_experiment.read_note(created.own) is None


# A stand-in of `ssh` that answers as `jobs status` does on the first node.
SSH = f"""\
#!{sys.executable}
import base64, json, re, shlex, sys
if "-G" not in sys.argv:
    script = re.search(r"echo ([^ ]+) [|]", sys.argv[-1])
    words = shlex.split(base64.b64decode(script[1]).decode())
    print(words[1].rstrip(";"))
    print(json.dumps({{"runs": [{{"id": name, "state": state}} for name, state in (
        ("fetched", "completed"), ("half", "failed"), ("missing", "running"), ("held", "planned"), ("../evil", "completed")
    )]}}))
"""


def sent_there(created):
    """Record that the runs of this workspace are on the nodes."""
    away = {
        "schema": 1, "cluster": "bench", "host": "127.0.0.1", "port": 1, "user": "alice", "identity": None,
        "known_hosts": str(created.own / "known_hosts"), "host_keys": "strict", "python": "/usr/bin/python3",
        "workspace": "/opt/shardlab/workspaces/x", "mark": "here:x\n", "shared": False,
    }  # fmt: skip
    (created.own / "away.json").write_text(json.dumps(away))


def test_down_names_runs_that_were_not_fetched(created, tmp_path, monkeypatch):
    sent_there(created)
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    for name, complete in (("fetched", True), ("half", False)):
        (created.folder / "runs" / name).mkdir(parents=True)
        (created.folder / "runs" / name / "manifest.json").write_text(json.dumps({"complete": complete}))
    assert created.provision("down") == 2
    assert "2 run(s) were not fetched and would be lost: half, missing. To fetch them, run: collect fetch" in created.out
    assert created.portal.asked("DELETE") == []


def test_down_says_that_the_cluster_does_not_answer(created):
    sent_there(created)
    assert created.provision("down") == 2
    assert "The cluster does not say which runs it has" in created.out
    assert "Runs that were not fetched are lost" in created.out


def test_a_portal_that_is_away_does_not_stop_work_on_nodes_that_exist(created, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    assert created.provision() == 1
    assert "warning: the end of the lease was not read anew: the portal 127.0.0.1:" in created.out
    assert "cannot be reached" in created.out
    assert "node0" in created.out
