"""Before shardlab makes a practice node, it checks how many practice nodes this machine can run."""

import msgspec
import pytest
from support_practice import FILE

from provision.practice import base
from provision.practice.base import PracticeNodeError
from provision.practice.machine import PracticeMachine
from provision.providers import virtual
from shardlab.cluster import cluster
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def three(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual, "INSTANCES_LIMIT_FILE", tmp_path / "limit")
    monkeypatch.setattr(virtual, "STATE_FOLDER", tmp_path / "state")
    monkeypatch.setattr("provision.practice.machine.STATE_FOLDER", tmp_path / "state")
    # Other checks of practice nodes depend on the operating system of this machine, so stand-ins replace them.
    monkeypatch.setattr(base, "check_machine", lambda _release=None: None)
    monkeypatch.setattr(base, "find_base_folder", lambda _packages, _release: tmp_path / "base")
    (tmp_path / "state").mkdir(mode=0o700)
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.replace("SHARED", str(tmp_path / "shared")))
    return cluster.load_cluster(file)


def changes(three, tmp_path):
    """Returns descriptions of the changes that would bring up the first of the three nodes. No change is carried out."""
    workspace = Workspace(tmp_path)
    return [change.description for change in virtual.bring_up(three, workspace, virtual.list_nodes(three, workspace)[0])]


def test_a_node_that_was_made_from_another_base_is_refused_before_it_is_booted(three, tmp_path):
    machine = PracticeMachine(three.name, "head", "10.0.0.1", 24, "bridge", tmp_path / "base-1", "")
    machine._check_base()
    (machine.folder / "upper").mkdir()
    machine._check_base()
    other = msgspec.structs.replace(machine, base_folder=tmp_path / "base-2")
    with pytest.raises(
        PracticeNodeError, match="head: this practice node was made by another version of shardlab, or for another"
    ):
        other._check_base()
    (machine.folder / "base").unlink()  # older versions of shardlab did not write the file `base`
    with pytest.raises(PracticeNodeError, match="made by another version"):
        machine._check_base()


def test_the_nodes_of_all_clusters_count(three, tmp_path):
    virtual.INSTANCES_LIMIT_FILE.write_text("41\n")
    assert changes(three, tmp_path) == ["make and boot the practice node head at 10.89.77.1"]
    (tmp_path / "state" / three.name / "head" / "upper").mkdir(parents=True)  # the first of the three nodes now exists
    assert changes(three, tmp_path) == ["boot the practice node head at 10.89.77.1"]
    (tmp_path / "state" / "other" / "node0" / "upper").mkdir(parents=True)
    said = (
        "4 practice nodes on this machine need 48 inotify instances, but its limit is 41; "
        "run: sysctl -w fs.inotify.max_user_instances="
    )
    with pytest.raises(PracticeNodeError, match=f"^{said}96$"):
        changes(three, tmp_path)
