"""The lease of borrowed machines: from where shardlab reads the end of the lease, how old this information is, and what
messages and the inventory say about it."""

import json
import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest
from support_cloudlab import lan, manifest, node

from provision.operation import Nothing, Site
from provision.operations import inventory as operation
from shardlab.cluster import cluster, lease
from shardlab.cluster.lease import Lease
from shardlab.errors import InputError
from shardlab.remote.remote import CommandOutput
from shardlab.terminal import moments
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace
from tests.provision.facts.test_facts import A100S, ADDRESSES, target

NOW = datetime(2031, 5, 2, 12, 0, tzinfo=UTC)
END = NOW + timedelta(hours=6)
FILE = "schema: 1\nname: bench\nprovider: cloudlab\ncloudlab: {manifest: [a.xml, b.xml]}\nssh: {user: alice}\n"


@pytest.fixture
def experiment(tmp_path):
    """The folder of a cluster file with two manifests. The lease in a.xml ends at 19:00 UTC; the lease in b.xml ends earlier,
    at 18:00 UTC. The file a.xml was fetched at the time NOW, the file b.xml one hour before NOW."""
    texts = {
        "a.xml": manifest(node("gpu0", 1), lan(["gpu0", "gpu1"]), expires="2031-05-02T19:00:00Z"),
        "b.xml": manifest(node("gpu1", 2), expires="2031-05-02T13:00:00-05:00"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    taken(tmp_path / "a.xml", NOW)
    taken(tmp_path / "b.xml", NOW - timedelta(hours=1))
    (tmp_path / "cluster.yaml").write_text(FILE)
    return tmp_path


def taken(path, moment):
    os.utime(path, (moment.timestamp(), moment.timestamp()))


def from_portal(workspace, **fields):
    own = workspace / ".shardlab/cloudlab"
    own.mkdir(parents=True, exist_ok=True)
    said = {"schema": 1, "expires": "2031-05-03T18:00:00Z", "read": "2031-05-02T11:30:00Z", "source": "portal"}
    (own / "lease.json").write_text(json.dumps({**said, **fields}))


def read(workspace):
    described = cluster.load_cluster(workspace / "cluster.yaml")
    return lease.read_newest_lease(workspace / ".shardlab", [Path(name) for name in described.cloudlab.manifests])


def test_a_lease_has_the_first_end_and_the_oldest_time_of_its_manifests(experiment):
    assert read(experiment) == Lease(END, NOW - timedelta(hours=1), "manifest")


def test_the_portal_counts_if_it_was_asked_later(experiment):
    """The lease is read from the portal's answer if it is newer than the manifests, otherwise from the manifests."""
    from_portal(experiment)
    assert read(experiment) == Lease(END + timedelta(days=1), NOW - timedelta(minutes=30), "portal")
    taken(experiment / "b.xml", NOW)
    assert read(experiment).source == "manifest"


def test_an_experiment_that_provision_created_has_the_lease_of_its_manifests(tmp_path):
    assert lease.read_newest_lease(tmp_path, []) is None
    (tmp_path / "cloudlab").mkdir()
    (tmp_path / "cloudlab/wisc.xml").write_text(manifest(node("gpu0", 1)))
    assert lease.read_newest_lease(tmp_path, []).expires == datetime(2031, 5, 2, 18, 0, tzinfo=UTC)
    (tmp_path / "cloudlab/wisc.xml").write_text(manifest(node("gpu0", 1), expires=None))
    assert lease.read_newest_lease(tmp_path, []) is None


@pytest.mark.parametrize(
    "fields", [{"expires": "2031-05-03T18:00:00"}, {"read": "soon"}, {"schema": 2}, {"source": "neighbour"}], ids=str
)
def test_a_damaged_note_of_the_portals_answer_is_refused_with_its_file(experiment, fields):
    from_portal(experiment, **fields)
    with pytest.raises(InputError, match=r"lease.json: is not what the portal said of a lease"):
        read(experiment)


def test_the_end_of_a_lease_is_shown_in_utc_and_local_time():
    east, west = timezone(timedelta(hours=9), "JST"), timezone(timedelta(hours=-5), "CDT")
    assert moments.format_time(END, UTC) == "2031-05-02 18:00 UTC"
    assert moments.format_time(END, west) == "2031-05-02 18:00 UTC (13:00 CDT)"
    assert moments.format_time(END, east) == "2031-05-02 18:00 UTC (2031-05-03 03:00 JST)"
    assert moments.format_time(END.astimezone(east), UTC) == "2031-05-02 18:00 UTC"


def test_a_stale_lease_and_an_ended_lease_are_reported():
    fresh = Lease(END, NOW - timedelta(hours=2), "portal")
    assert "in 6h 00m (read 2h 00m ago, from the portal)." in fresh.describe(NOW)
    assert "stale" not in fresh.describe(NOW)
    later = NOW + timedelta(hours=7)
    assert "the lease ended 2031-05-02 18:00 UTC" in fresh.describe(later)
    assert "1h 00m ago (read 9h 00m ago" in fresh.describe(later)
    assert "This is stale" in fresh.describe(later)
    assert "with a new manifest" in Lease(END, NOW, "manifest").describe(later)


def test_a_lease_that_was_read_by_a_wrong_clock_is_stale_and_counts_last(experiment):
    assert not Lease(END, NOW + timedelta(minutes=4), "portal").is_stale(NOW)
    said = Lease(END, NOW + timedelta(hours=1), "portal").describe(NOW)
    assert "(read at 2031-05-02 13:00 UTC" in said
    assert "which lies ahead, so a clock is wrong, from the portal). This is stale" in said
    now = datetime.now(UTC).replace(microsecond=0)
    from_portal(experiment, read=(now - timedelta(hours=9)).isoformat())
    for name in ("a.xml", "b.xml"):
        taken(experiment / name, now + timedelta(days=1))
    assert read(experiment).source == "portal"


@pytest.mark.parametrize(("minutes", "urged"), [(121, False), (120, True), (1, True), (0, False), (-5, False)])
def test_fetching_is_urged_from_two_hours_before_the_end(minutes, urged):
    said = Lease(END, NOW, "manifest").make_copy_reminder(END - timedelta(minutes=minutes))
    assert (said is not None and said.endswith("copy them to your machine: collect fetch")) == urged


def site(folder):
    asked = target({"shardlab.hardware.host": CommandOutput(0, A100S, ""), "psutil": CommandOutput(0, ADDRESSES, "")})
    return Site(cluster.load_cluster(folder / "cluster.yaml"), Workspace(folder), [asked])


def test_the_inventory_with_the_lease_is_rewritten_only_if_the_lease_is_read_again(experiment):
    content = operation.render_inventory(site(experiment))
    written = msgspec.json.decode(content)["lease"]
    assert written == {"expires": "2031-05-02T18:00:00Z", "read": "2031-05-02T11:00:00Z", "source": "manifest"}
    assert operation.render_inventory(site(experiment)) == content
    from_portal(experiment)
    assert operation.render_inventory(site(experiment)) != content


def test_an_extension_is_written_although_a_node_is_away(experiment):
    path = inventory.inventory_path(Workspace(experiment))
    path.parent.mkdir()
    path.write_bytes(operation.render_inventory(site(experiment)))
    from_portal(experiment)
    away = msgspec.structs.replace(site(experiment), skipped={"gpu0": "it is away"})
    before = msgspec.json.decode(path.read_bytes())
    (change,) = operation.plan(away, away.targets[0])
    change.make(away.targets[0].node)
    after = msgspec.json.decode(path.read_bytes())
    assert after.pop("lease")["expires"] == "2031-05-03T18:00:00Z"
    before.pop("lease")
    assert after == before
    assert isinstance(operation.plan(away, away.targets[0]), Nothing)
    assert inventory.read_leased_inventory(Workspace(experiment), "bench").lease.source == "portal"
    assert inventory.read_leased_inventory(Workspace(experiment), "other") is None
