"""Manifests of CloudLab become the nodes of a cluster, whatever order their elements have. Hostile manifests are refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_cloudlab import RSPEC, lan, manifest, node

from shardlab.cloudlab import cloudlab_manifest
from shardlab.cloudlab.cloudlab_manifest import ManifestInterface
from shardlab.cluster import cloudlab_keys, cluster
from shardlab.errors import InputError

TWO = manifest(node("gpu0", 1), node("gpu1", 2), lan(["gpu0", "gpu1"]))
FILE = "schema: 1\nname: bench\nprovider: cloudlab\ncloudlab: {manifest: manifest.xml}\nssh: {user: alice}\n"


def experiment(*texts: str):
    return cloudlab_manifest.parse_manifests((f"manifest{place}.xml", text.encode()) for place, text in enumerate(texts))


def refused(text: str | bytes) -> str:
    with pytest.raises(InputError) as caught:
        cloudlab_manifest.parse_manifests([("manifest.xml", text.encode() if isinstance(text, str) else text)])
    return str(caught.value)


def test_a_manifest_has_nodes_with_logins_addresses_and_an_end():
    made = experiment(TWO)
    assert [one.name for one in made.nodes] == ["gpu0", "gpu1"]
    first = made.nodes[0]
    assert (first.site, first.hardware, first.control) == ("wisc.cloudlab.us", "d8545", "192.0.2.2")
    assert first.login_by_user == dict.fromkeys(("alice", "bob"), ("d8545-sample1.wisc.cloudlab.us", 22))
    assert first.interfaces == (ManifestInterface("10.10.1.2", 16, "0a:0b:0c:0d:00:01", "lan0"),)
    assert made.expires == "2031-05-02T18:00:00Z"


def test_the_order_of_elements_and_the_type_of_the_document_do_not_matter():
    other = manifest(
        lan(["gpu1", "gpu0"]), node("gpu0", 1, services_first=True), node("gpu1", 2, services_first=True), kind="request"
    )
    assert experiment(other) == experiment(TWO)


def test_manifests_of_two_sites_are_one_experiment_that_ends_with_the_first():
    wisc = manifest(node("gpu0", 1), lan(["gpu0", "gpu1"]))
    clemson = manifest(node("gpu1", 2, site="clemson.cloudlab.us", hardware="r7525"), expires="2031-05-02T12:00:00-05:00")
    for texts in ((wisc, clemson), (clemson, wisc)):
        made = experiment(*texts)
        assert {one.name: one.site for one in made.nodes} == {"gpu0": "wisc.cloudlab.us", "gpu1": "clemson.cloudlab.us"}
        assert made.expires == "2031-05-02T12:00:00-05:00"  # this is 17:00 UTC


def test_a_manifest_may_repeat_nodes_of_other_sites_without_their_logins():
    """A site repeats the nodes of other sites in its own manifest, but without their logins."""
    names = ["gpu0", "gpu1"]
    own = [node("gpu0", 1), node("gpu1", 2, site="clemson.cloudlab.us", hardware="r7525")]
    passed = [one.replace("<services>", "<!--").replace("</services>", "-->") for one in own]
    wisc, clemson = manifest(own[0], passed[1], lan(names)), manifest(passed[0], own[1], lan(names))
    for texts in ((wisc, clemson), (clemson, wisc)):
        made = experiment(*texts)
        assert {one.name: sorted(one.login_by_user) for one in made.nodes} == {
            "gpu0": ["alice", "bob"],
            "gpu1": ["alice", "bob"],
        }
    with pytest.raises(InputError, match=r"gpu1: the manifest has no login.* one of each site"):
        experiment(wisc)


def test_logins_and_names_that_cloudlab_allows_are_accepted():
    made = experiment(manifest(node("gpu_0", 1, users=("Kwang", "alice"))))
    assert [one.name for one in cloudlab_keys.select_nodes(made, "Kwang", "m")] == ["gpu-0"]


def test_a_blockstore_and_a_container_are_no_machines():
    others = ["emulab-blockstore", "docker", "emulab-xen", "default-vm"]
    elements = [node(f"other{number}", number, sliver=sliver) for number, sliver in enumerate(others, 2)]
    assert [one.name for one in experiment(manifest(node("gpu0", 1), *elements)).nodes] == ["gpu0"]
    assert "lists no machine (virtual machines and blockstores are none)" in refused(manifest(*elements))


def test_xml_elements_of_another_namespace_are_ignored():
    """XML elements with the name of an RSpec element but another namespace do not change the experiment that is read."""
    more = (
        '<other:host xmlns:other="urn:other" name="x y" ipv4="x"/><emulab:sliver_type name="docker"/>'
        '<emulab:interface client_id="gpu0:if0"><emulab:ip address="x"/></emulab:interface>'
    )
    root = '<other:node xmlns:other="urn:other" client_id="../x"/><other:link xmlns:other="urn:other"/></rspec>'
    assert experiment(TWO.replace("<sliver_type", f"{more}<sliver_type", 1).replace("</rspec>", root)) == experiment(TWO)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("xmlns:emulab=", "xmlns:e="),
        ("rspec/3", "rspec/4"),
        (f' xmlns="{RSPEC}"', ""),
        ('xmlns="', 'xmlns:r="'),
    ],
)
def test_the_prefixes_and_the_version_of_the_namespaces_do_not_matter(before, after):
    assert before in TWO
    text = TWO.replace(before, after)
    if after == "xmlns:e=":
        text = text.replace("emulab:", "e:")
    if after == 'xmlns:r="':
        text = re.sub(r"<(/?)(?![?/])(?!emulab:)", r"<\1r:", text)
    assert experiment(text) == experiment(TWO)


@pytest.mark.parametrize(("kind", "is_passed_over"), [(' type="ipv6"', True), ("", True), (' type="ipv4"', False)])
def test_ipv6_addresses_are_ignored(kind, is_passed_over):
    six = f'<interface client_id="gpu0:if9"><ip address="fd00::1" netmask="64"{kind}/></interface>'
    text = TWO.replace("<interface", f"{six}<interface", 1)
    if is_passed_over:
        assert experiment(text) == experiment(TWO)
    else:
        assert "found the address 'fd00::1'" in refused(text)


def test_a_manifest_of_a_thousand_nodes_is_read():
    names = [f"node{number}" for number in range(1000)]
    made = experiment(manifest(*(node(name, number) for number, name in enumerate(names)), lan(names)))
    chosen = cloudlab_keys.select_nodes(made, "alice", "manifest.xml")
    assert len({one.network.address for one in chosen}) == 1000


def test_a_cluster_file_has_a_thousand_nodes(tmp_path):
    names = [f"node{number}" for number in range(1000)]
    (tmp_path / "manifest.xml").write_text(manifest(*(node(name, number) for number, name in enumerate(names)), lan(names)))
    (tmp_path / "cluster.yaml").write_text(FILE)
    assert len(cluster.load_cluster(tmp_path / "cluster.yaml").nodes) == 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not XML"),
        ("<rspec", "is not XML"),
        ("<html/>", "its first element is 'html'"),
        ('<!DOCTYPE rspec [<!ENTITY a "b">]><rspec>&a;</rspec>', "has a DOCTYPE"),
        ('<!DOCTYPE rspec SYSTEM "file:///etc/passwd"><rspec/>', "has a DOCTYPE"),
        (b"<rspec>" + b" " * (16 << 20) + b"</rspec>", "is larger than 16 MiB"),
        ('<?xml version="1.0" encoding="no-such"?><rspec/>', "is not XML"),
        (manifest(), "lists no machine"),
        (manifest(node("gpu0", 1), expires="soon"), "expires is 'soon'"),
        (manifest(node("gpu0", 1), expires="2031-05-02T18:00:00"), "expires is '2031-05-02T18:00:00'"),
        (manifest(node("gpu0", 1), expires="9999-12-31T23:59:59-12:00"), "expires is '9999-12-31T23:59:59-12:00'"),
        (manifest(node("gpu0", 1), expires="0001-01-01T00:00:00+14:00"), "expires is '0001-01-01T00:00:00+14:00'"),
        (manifest(node("gpu0", 1), node("gpu0", 2)), "two different nodes are called gpu0"),
        (manifest(node("gpu0", 1, users=())), "gpu0: the manifest has no login"),
        (manifest(node("gpu0", 1, host="-oProxyCommand=reboot")), "gpu0: the host of a login is '-oProxyCommand=reboot'"),
        (manifest(node("gpu0", 1, host="a b")), "gpu0: the host of a login is 'a b'"),
        (manifest(node("gpu0", 1, host="a\nHost *")), "gpu0: the host of a login"),
        (manifest(node("gpu0", 1, host="h" * 300)), "gpu0: the host of a login"),
        (manifest(node("gpu0", 1, users=("root; reboot",))), "gpu0: the user of a login is 'root; reboot'"),
        (manifest(node("../../etc", 1)), "the client_id is '../../etc'"),
        (manifest(node("gpu0", 1, address="10.10.1.999")), "gpu0: found the address '10.10.1.999'"),
        (manifest(node("gpu0", 1, address="127.0.0.1")), "gpu0: found the address '127.0.0.1'"),
        (manifest(node("gpu0", 1, control="0.0.0.0")), "gpu0: found the address '0.0.0.0'"),
        (manifest(node("gpu0", 1, control="224.0.0.1")), "gpu0: found the address '224.0.0.1'"),
        (manifest(node("gpu0", 1).replace("255.255.0.0", "x")), "gpu0: netmask 'x'"),
        (manifest(node("gpu0", 1).replace("0a0b0c0d", "zz")), "gpu0: a MAC address"),
        (manifest(node("gpu0", 1).replace('port="22"', 'port="0"')), "gpu0: found the port '0'"),
        (manifest(node("gpu0", 1).replace('port="22"', 'port="0000229999"')), "gpu0: found the port '0000229999'"),
        (manifest(node("gpu0", 1).replace('"urn:publicid:IDN+wisc.cloudlab.us+authority+cm"', '"x"')), "is no URN"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_manifest_is_refused_with_its_place(text, says):
    assert says in refused(text)


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: f"<rspec>{text}</rspec>".encode()))
def test_arbitrary_bytes_as_a_manifest_give_an_error_of_one_sentence(content):
    """Random bytes and XML texts as a manifest raise InputError, never another exception."""
    with pytest.raises(InputError):
        cloudlab_manifest.parse_manifests([("manifest.xml", content)])


def test_the_login_is_that_of_the_given_user_or_of_this_user(monkeypatch):
    made = experiment(TWO)
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    assert {one.user for one in cloudlab_keys.select_nodes(made, "alice", "m")} == {"alice"}
    assert {one.user for one in cloudlab_keys.select_nodes(made, None, "m")} == {"bob"}
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    with pytest.raises(InputError, match=r"none of the logins is of the user root .* ssh.user to one of: alice, bob"):
        cloudlab_keys.select_nodes(made, None, "m")
    with pytest.raises(InputError, match="the user carol has no login on every node"):
        cloudlab_keys.select_nodes(made, "carol", "m")
    alone = experiment(manifest(node("gpu0", 1, users=("carol",))))
    assert cloudlab_keys.select_nodes(alone, None, "m")[0].user == "carol"


def test_the_nodes_meet_on_the_network_that_all_of_them_are_on():
    storage = '<interface client_id="gpu0:if1"><ip address="172.16.0.1" netmask="255.255.255.0" type="ipv4"/></interface>'
    made = experiment(manifest(node("gpu0", 1, more=storage), node("gpu1", 2), lan(["gpu0", "gpu1"])))
    assert [one.network.address for one in cloudlab_keys.select_nodes(made, "alice", "m")] == ["10.10.1.2", "10.10.1.3"]
    apart = experiment(manifest(node("gpu0", 1), node("gpu1", 2, address="10.99.0.1")))
    with pytest.raises(InputError, match=r"its nodes share no experiment network\. Allowed"):
        cloudlab_keys.select_nodes(apart, "alice", "m")
    bare = node("gpu1", 2).replace("<interface", "<!--").replace("</interface>", "-->")
    with pytest.raises(
        InputError, match=r"share no experiment network \(gpu1: on none\)\. Allowed: a LAN that all nodes are on"
    ):
        cloudlab_keys.select_nodes(experiment(manifest(node("gpu0", 1), bare)), "alice", "m")


def test_of_two_interfaces_on_the_network_the_first_is_used():
    second = '<interface client_id="gpu0:if1"><ip address="10.10.7.7" netmask="255.255.0.0" type="ipv4"/></interface>'
    made = experiment(manifest(node("gpu0", 1, more=second), node("gpu1", 2), lan(["gpu0", "gpu1"])))
    assert [one.network.address for one in cloudlab_keys.select_nodes(made, "alice", "m")] == ["10.10.1.2", "10.10.1.3"]


def test_names_that_differ_only_in_case_or_behind_31_characters_are_refused():
    for first, second in (("GPU0", "gpu0"), ("gpu_0", "gpu-0"), ("a" * 40, "a" * 41)):
        made = experiment(manifest(node(first, 1), node(second, 2)))
        with pytest.raises(InputError, match="two nodes are called"):
            cloudlab_keys.select_nodes(made, "alice", "m")


def test_two_nodes_with_one_address_are_refused():
    made = experiment(manifest(node("gpu0", 1), node("gpu1", 2, address="10.10.1.2")))
    with pytest.raises(InputError, match=r"m: gpu0 and gpu1 have the same address 10.10.1.2"):
        cloudlab_keys.select_nodes(made, "alice", "m")


def test_the_cluster_file_names_the_manifest_and_the_nodes_are_filled_in(tmp_path):
    (tmp_path / "manifest.xml").write_text(TWO)
    (tmp_path / "cluster.yaml").write_text(FILE)
    made = cluster.load_cluster(tmp_path / "cluster.yaml")
    assert [(one.name, one.host, one.address, one.user) for one in made.nodes] == [
        ("gpu0", "d8545-sample1.wisc.cloudlab.us", "10.10.1.2", "alice"),
        ("gpu1", "d8545-sample2.wisc.cloudlab.us", "10.10.1.3", "alice"),
    ]
    assert [one.roles for one in made.nodes] == [["controller", "worker"], ["worker"]]
    (tmp_path / "manifest.xml").unlink()
    with pytest.raises(InputError, match=r"manifest.xml: No such file or directory"):
        cluster.load_cluster(tmp_path / "cluster.yaml")


def test_the_manifest_is_beside_the_cluster_file_also_if_that_names_the_nodes(tmp_path, monkeypatch):
    """`provision` finds the manifest and reads the lease from it, whatever the current folder is."""
    monkeypatch.chdir("/")
    (tmp_path / "cluster.yaml").write_text(f"{FILE}nodes: [{{name: a, host: a, roles: [controller, worker]}}]\n")
    made = cluster.load_cluster(tmp_path / "cluster.yaml")
    assert made.cloudlab is not None
    assert made.cloudlab.manifests == [str(tmp_path / "manifest.xml")]
    assert [entry.name for entry in made.nodes] == ["a"]


def test_a_machine_without_the_manifest_gets_the_nodes_in_its_cluster_file(tmp_path):
    (tmp_path / "manifest.xml").write_text(TWO)
    (tmp_path / "cluster.yaml").write_text(FILE + 'slurm: {partition: gpu, time: "01:30:00"}\n')
    made = cluster.load_cluster(tmp_path / "cluster.yaml")
    (tmp_path / "there.yaml").write_bytes(cluster.encode_resolved_file(made))
    (tmp_path / "manifest.xml").unlink()
    there = cluster.load_cluster(tmp_path / "there.yaml")
    assert there.nodes == made.nodes
    assert there.slurm == made.slurm


def test_an_experiment_that_provision_created_is_read_from_the_workspace(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.replace("{manifest: manifest.xml}", "{hardware: d8545, site: wisc, nodes: 2, project: myproj}"))
    assert cluster.find_cluster(file, tmp_path).nodes == []
    folder = tmp_path / ".shardlab/cloudlab"
    folder.mkdir(parents=True)
    (folder / "wisc.xml").write_text(TWO)
    assert [one.name for one in cluster.find_cluster(file, tmp_path).nodes] == ["gpu0", "gpu1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FILE.replace("cloudlab: {manifest: manifest.xml}\n", ""), "provider cloudlab needs the key cloudlab"),
        (FILE.replace("provider: cloudlab", "provider: ssh\nnodes: [{name: a, host: a}]"), "not allowed with provider ssh"),
        (FILE.replace("manifest: manifest.xml", "portal_url: http://portal"), "portal_url"),
    ],
)
def test_a_mistake_in_the_cluster_file_of_an_experiment_is_refused(text, says, tmp_path):
    (tmp_path / "manifest.xml").write_text(TWO)
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(InputError, match=says):
        cluster.load_cluster(tmp_path / "cluster.yaml")
