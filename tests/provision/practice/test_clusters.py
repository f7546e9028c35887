"""Several clusters of practice nodes on one machine: each has its own numbers and folders, and removes only what is its own."""

import support_practice
from support_practice import FILE, Practice, cluster_number

from provision.practice import machine


def test_the_control_group_of_all_clusters_stays_until_the_last_cluster_leaves(tmp_path, monkeypatch):
    """A cluster whose last node ends must not remove the group: another cluster may be making the group of its first node."""
    monkeypatch.setattr(machine, "_list_cgroup_roots", lambda: [tmp_path / "groups"])
    monkeypatch.setattr(machine, "STATE_FOLDER", tmp_path / "state")
    (tmp_path / "state/another-cluster").mkdir(parents=True)  # so `remove_unused_folders` removes no mount
    (group,) = machine.make_cgroups("one", "head")
    machine.remove_cgroups("one", "head")
    assert not group.parent.exists()
    assert group.parent.parent.is_dir()
    machine.remove_unused_folders()
    assert not group.parent.parent.exists()


def test_clusters_of_tests_have_different_names_and_subnets_while_they_are_up(tmp_path, monkeypatch):
    monkeypatch.setattr(support_practice, "NUMBER", str(tmp_path / "number-{}"))
    with cluster_number() as first, cluster_number() as second:
        files = [support_practice.numbered(FILE, number) for number in (first, second)]
    with cluster_number() as third:
        assert third == first != second
    clusters = []
    for place, file in enumerate(files):
        (tmp_path / str(place)).mkdir()
        clusters.append(Practice(tmp_path / str(place), file).cluster)
    assert len({cluster.name for cluster in clusters}) == len({cluster.lan.subnet for cluster in clusters}) == 2
