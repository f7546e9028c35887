"""On a node of an experiment, `provision` takes the manifest from the command `geni-get manifest`."""

import stat

import pytest
from support_portal import two_nodes
from support_portal_workspace import HOSTILE, place_of_portal

from provision.cloudlab import own_manifest
from shardlab.cluster import cluster, lease


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    with place_of_portal(tmp_path, monkeypatch, capsys) as made:
        yield made


def geni_get(folder, monkeypatch, text):
    """Install a program geni-get that prints this manifest, as on a node of an experiment."""
    folder.mkdir()
    (folder / "manifest.xml").write_text(text)
    program(folder, monkeypatch, f'#!/bin/sh\n[ "$1" = manifest ] && exec cat {folder}/manifest.xml\nexit 1\n')


def test_init_on_a_node_needs_no_file(place, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place.provision("init", "--cloudlab") == 2
    assert "this machine is no node of an experiment, because it has no command geni-get. Allowed: --cloudlab FILE" in place.out
    geni_get(tmp_path / "bin", monkeypatch, two_nodes())
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    assert place.provision("init", "--cloudlab") == 0
    assert "`provision` reads the new end" in place.out
    (place.folder / "cluster.yaml").write_text(place.document)
    place.provision()
    assert [one.name for one in cluster.find_cluster(None, place.folder).nodes] == ["node0", "node1"]
    assert place.provision("init", "--cloudlab", "--ssh", "a") == 2
    assert place.provision("plan", "--cloudlab") == 2
    geni_get(tmp_path / "hostile", monkeypatch, HOSTILE["a DOCTYPE"][1])
    assert place.provision("init", "--cloudlab") == 2
    assert (place.document, "geni-get manifest: has a DOCTYPE" in place.out) == ("", True)


def program(folder, monkeypatch, script):
    """Install this script as the program geni-get, first in PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / "geni-get"
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize("has_token", [True, False])
def test_on_a_node_the_manifest_is_that_of_the_node(place, monkeypatch, tmp_path, has_token):
    geni_get(tmp_path / "bin", monkeypatch, two_nodes())
    if has_token:
        place.change("project: myproj, ", "")  # without a project, `provision` cannot create an experiment
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
    place.provision("plan")
    assert place.kept() == []
    assert place.provision() == 1
    assert "node0" in place.out
    assert [one.name for one in cluster.find_cluster(None, place.folder).nodes] == ["node0", "node1"]
    assert lease.read_newest_lease(place.own, []).source == "manifest"
    (tmp_path / "bin/manifest.xml").write_text(two_nodes().replace("2031-05-02", "2031-05-09"))
    place.provision()
    assert lease.read_newest_lease(place.own, []).expires.day == 9
    assert place.provision("down", "--yes") == 0
    assert place.portal.requests == []


@pytest.mark.parametrize("says", ["a DOCTYPE", "larger than 16 MiB", "the host of a login", "lists no machine"])
def test_a_hostile_manifest_of_a_node_changes_nothing(place, monkeypatch, tmp_path, says):
    monkeypatch.setenv("HOME", str(tmp_path))
    geni_get(tmp_path / "bin", monkeypatch, HOSTILE[says][1])
    assert place.provision() == 2
    assert says in place.out
    assert place.kept() == []


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\necho no answer of boss >&2\nexit 3\n", "geni-get manifest: exit code 3: no answer of boss."),
        ("#!/bin/sh\nexec sleep 600\n", "geni-get manifest: did not end within 0.2 s."),
        ("#!/no/such/interpreter\n", "geni-get manifest: cannot be executed (No such file or directory)."),
        ("#!/bin/sh\n", "geni-get manifest: is not XML"),
    ],
    ids=["fails", "hangs", "is broken", "says nothing"],
)
def test_an_unreadable_manifest_of_a_node_is_reported(place, monkeypatch, tmp_path, script, says):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(own_manifest, "TIMEOUT_S", 0.2 if "sleep" in script else 60.0)
    program(tmp_path / "bin", monkeypatch, script)
    assert place.provision() == 2
    assert says in place.out
    assert place.kept() == []
