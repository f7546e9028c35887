"""Requests to CloudLab: the XML and the profile script match the cluster file, and wrong keys are refused before a request."""

import ipaddress
import json
from collections import Counter

import pytest
import support_geni
from defusedxml.ElementTree import fromstring

from provision import cli, gpu_generations
from provision.cloudlab import hardware, request
from shardlab.cloudlab import cloudlab_manifest
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.files import document, validation

RSPEC = "{http://www.geni.net/resources/rspec/3}"
EMULAB = "{http://www.protogeni.net/resources/rspec/ext/emulab/1}"
# The elements of RSpec version 3 that we use, from its schema: the parent of each element, its required attributes and its
# other attributes.
ELEMENTS = {
    f"{RSPEC}rspec": (None, {"type"}, {"{http://www.w3.org/2001/XMLSchema-instance}schemaLocation"}),
    f"{RSPEC}node": (f"{RSPEC}rspec", {"client_id", "exclusive"}, {"component_manager_id"}),
    f"{RSPEC}sliver_type": (f"{RSPEC}node", {"name"}, set()),
    f"{RSPEC}disk_image": (f"{RSPEC}sliver_type", {"name"}, set()),
    f"{RSPEC}hardware_type": (f"{RSPEC}node", {"name"}, set()),
    f"{RSPEC}interface": (f"{RSPEC}node", {"client_id"}, set()),
    f"{RSPEC}ip": (f"{RSPEC}interface", {"address"}, {"netmask", "type"}),
    f"{EMULAB}blockstore": (f"{RSPEC}node", {"name", "class", "mountpoint", "size", "placement"}, set()),
    f"{RSPEC}link": (f"{RSPEC}rspec", {"client_id"}, set()),
    f"{RSPEC}interface_ref": (f"{RSPEC}link", {"client_id"}, set()),
    f"{RSPEC}link_type": (f"{RSPEC}link", {"name"}, set()),
    f"{RSPEC}property": (f"{RSPEC}link", {"source_id", "dest_id"}, {"capacity"}),
}
# A parent element has at most one element of each of these names.
MOST_ONE = {f"{RSPEC}sliver_type", f"{RSPEC}hardware_type", f"{RSPEC}disk_image"}
LARGE = "hardware: c220g5, site: wisc, nodes: 1000"


def described(keys: str, more: str = "") -> Cluster:
    text = f"schema: 1\nname: bench\nprovider: cloudlab\ncloudlab: {{{keys}}}\n{more}"
    return validation.convert_document(document.parse_document(text.encode(), "cluster.yaml"), Cluster)


def planned(keys: str, more: str = "") -> request.ExperimentRequest:
    return request.plan_experiment(described(keys, more))


def refused(keys: str, more: str = "") -> str:
    with pytest.raises(InputError) as caught:
        planned(keys, more)
    return str(caught.value)


def checked(text: str):
    """The root element of a request, after checking that the request follows the rules of the schema."""
    root = fromstring(text.encode(), forbid_dtd=True)
    assert (root.tag, root.get("type")) == (f"{RSPEC}rspec", "request")
    parents = {child: parent for parent in root.iter() for child in parent}
    for element in root.iter():
        parent, required, other = ELEMENTS[element.tag]
        assert (parents[element].tag if element in parents else None) == parent
        assert required <= set(element.keys()) <= required | other
        assert not (element.text or "").strip()
        counts = Counter(child.tag for child in element)
        assert all(counts[tag] <= 1 for tag in MOST_ONE)
    ids = [
        element.get("client_id")
        for element in root.iter()
        if element.tag != f"{RSPEC}interface_ref" and element.get("client_id")
    ]
    assert max(Counter(ids).values()) == 1
    interfaces = {element.get("client_id") for element in root.iter(f"{RSPEC}interface")}
    referred = [element.get("client_id") for element in root.iter(f"{RSPEC}interface_ref")]
    assert sorted(referred) == sorted(interfaces)
    for rate in root.iter(f"{RSPEC}property"):
        assert {rate.get("source_id"), rate.get("dest_id")} <= interfaces
        assert rate.get("source_id") != rate.get("dest_id")
    assert all(node.get("exclusive") in ("true", "false") for node in root.iter(f"{RSPEC}node"))
    return root


def test_a_request_names_hardware_image_network_and_disk():
    root = checked(request.render_rspec(planned("hardware: d8545, nodes: 2, lan_mbps: 100000, blockstore_gib: 0")))
    nodes = root.findall(f"{RSPEC}node")
    assert [node.get("client_id") for node in nodes] == ["node0", "node1"]
    for place, node in enumerate(nodes, 1):
        assert node.get("component_manager_id") == "urn:publicid:IDN+wisc.cloudlab.us+authority+cm"
        assert node.find(f"{RSPEC}sliver_type").get("name") == "raw-pc"
        assert node.find(f"{RSPEC}hardware_type").get("name") == "d8545"
        image = node.find(f"{RSPEC}sliver_type/{RSPEC}disk_image").get("name")
        assert image == "urn:publicid:IDN+emulab.net+image+emulab-ops//UBUNTU24-64-STD"
        (ip,) = node.iter(f"{RSPEC}ip")
        assert (ip.get("address"), ip.get("netmask"), ip.get("type")) == (f"10.10.1.{place}", "255.255.0.0", "ipv4")
        store = node.find(f"{EMULAB}blockstore")
        assert (store.get("mountpoint"), store.get("class"), store.get("size")) == ("/mydata", "local", "0GB")
    (link,) = root.findall(f"{RSPEC}link")
    assert link.find(f"{RSPEC}link_type").get("name") == "lan"
    rates = {(rate.get("source_id"), rate.get("dest_id")): rate.get("capacity") for rate in link.iter(f"{RSPEC}property")}
    assert rates == dict.fromkeys([("node0:if0", "node1:if0"), ("node1:if0", "node0:if0")], "100000000")  # in kbit/s


def test_a_request_is_read_back_by_the_reader_of_manifests():
    """A manifest is a request to which the portal has added logins."""
    text = request.render_rspec(planned("hardware: d7525, nodes: 3, blockstore_gib: 100"))
    login = '<services><login hostname="h.wisc.cloudlab.us" port="22" username="alice"/></services></node>'
    made = cloudlab_manifest.parse_manifests([("request", text.replace("</node>", login).encode())])
    assert [(node.name, node.site, node.hardware, node.mounts) for node in made.nodes] == [
        (f"node{place}", "wisc.cloudlab.us", "d7525", ("/mydata",)) for place in range(3)
    ]
    assert [node.interfaces[0].address for node in made.nodes] == ["10.10.1.1", "10.10.1.2", "10.10.1.3"]
    assert {node.interfaces[0].link_name for node in made.nodes} == {"lan0"}


def test_one_node_has_no_network_and_a_thousand_have_an_address_each():
    alone = checked(request.render_rspec(planned("hardware: d8545, lan_mbps: 1000")))
    assert [element.tag for element in alone] == [f"{RSPEC}node"]
    assert list(alone.iter(f"{RSPEC}ip")) == list(alone.iter(f"{RSPEC}property")) == []
    many = checked(request.render_rspec(planned(LARGE)))
    addresses = [ipaddress.IPv4Address(ip.get("address")) for ip in many.iter(f"{RSPEC}ip")]
    assert len(set(addresses)) == 1000
    assert all(one in ipaddress.IPv4Network("10.10.0.0/16") and one.packed[3] not in (0, 255) for one in addresses)
    assert refused(f"{LARGE}, lan_mbps: 1000").startswith("cloudlab.lan_mbps is set for 1000 nodes. Allowed: up to 100")


@pytest.mark.parametrize(("gib", "gigabytes"), [(1, "2GB"), (100, "108GB"), (0, "0GB")])
def test_a_size_in_gib_is_requested_in_units_of_1e9_bytes_and_is_never_smaller(gib, gigabytes):
    (store,) = checked(request.render_rspec(planned(f"hardware: d8545, blockstore_gib: {gib}"))).iter(f"{EMULAB}blockstore")
    assert store.get("size") == gigabytes


@pytest.mark.parametrize(
    ("image", "requested"),
    [
        ("DEBIAN12-64-STD", "urn:publicid:IDN+emulab.net+image+emulab-ops//DEBIAN12-64-STD"),
        ("myproj//mine", "urn:publicid:IDN+emulab.net+image+myproj//mine"),
        ("emulab-ops:UBUNTU24-64-STD", "emulab-ops:UBUNTU24-64-STD"),
        ("urn:publicid:IDN+wisc.cloudlab.us+image+p//i", "urn:publicid:IDN+wisc.cloudlab.us+image+p//i"),
    ],
)
def test_an_image_of_another_project_keeps_its_name(image, requested):
    assert planned(f'hardware: d8545, image: "{image}"').image == requested


@pytest.mark.parametrize("keys", ["hardware: d8545, nodes: 2, lan_mbps: 100000, blockstore_gib: 200", "hardware: d8545", LARGE])
def test_the_profile_requests_the_same_as_the_rspec(keys, monkeypatch):
    wanted = planned(keys)
    made = support_geni.run(request.render_profile(wanted), monkeypatch)
    root = checked(request.render_rspec(wanted))
    of_rspec = [
        (
            node.get("client_id"),
            node.get("component_manager_id"),
            node.find(f"{RSPEC}hardware_type").get("name"),
            next(node.iter(f"{RSPEC}disk_image")).get("name"),
            [(one.get("client_id"), one[0].get("address"), one[0].get("netmask")) for one in node.iter(f"{RSPEC}interface")],
            [(one.get("name"), one.get("mountpoint"), one.get("size")) for one in node.iter(f"{EMULAB}blockstore")],
        )
        for node in root.findall(f"{RSPEC}node")
    ]
    of_profile = [
        (
            node.name,
            node.component_manager_id,
            node.hardware_type,
            node.disk_image,
            [(one.name, *one.addresses[0]) for one in node.interfaces],
            [(one.name, one.mount, one.size) for one in node.stores],
        )
        for node in made.nodes
    ]
    assert of_profile == of_rspec
    assert [lan.name for lan in made.lans] == [link.get("client_id") for link in root.findall(f"{RSPEC}link")]
    rates = {rate.get("capacity") for rate in root.iter(f"{RSPEC}property")}
    assert {str(lan.bandwidth) for lan in made.lans if lan.bandwidth} == rates


def test_the_profile_accepts_the_parameters_of_small_lan(monkeypatch):
    script = request.render_profile(planned("hardware: d8545, nodes: 2"))
    given = {"nodeCount": 3, "phystype": "d7525", "linkSpeed": 25_000_000, "tempFileSystemMax": True}
    made = support_geni.run(script, monkeypatch, **given)
    assert [node.hardware_type for node in made.nodes] == ["d7525"] * 3
    assert [node.stores[0].size for node in made.nodes] == ["0GB"] * 3
    assert made.lans[0].bandwidth == 25_000_000


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("nodes: 2", "cloudlab.hardware is missing. Allowed: a type; `provision hardware`"),
        ("hardware: c4130", "another machine at each site (wisc: 4 x V100; clemson: 2 x K40m)"),
        ("hardware: c4130, site: clemson", "has no build for its K40m GPUs (Kepler). Allowed: d8545 at wisc, d7525 at wisc"),
        ("hardware: c4130, site: clemson.cloudlab.us", "has no build for its K40m GPUs (Kepler)"),
        ("hardware: c240g5", "for CUDA 13.0, which pip installs, does not support its P100 GPUs (Pascal)"),
        ("hardware: r7525", "wheels of torch for CUDA 12.6"),
        ("hardware: ibm8335", "its processors are POWER (ppc64le)"),
        ("hardware: nvidiagh", "its processors are aarch64, on which shardlab was never run"),
        (
            "hardware: d8545, image: UBUNTU22-64-STD",
            "cloudlab.image: UBUNTU22-64-STD is Ubuntu 22.04, whose Python is older than",
        ),
        ('hardware: d8545, image: "emulab-ops:UBUNTU20-64-STD"', "Allowed: UBUNTU24-64-STD"),
        ("hardware: d8545, nodes: 5", "5 nodes are requested, but the site has 4"),
        ("hardware: c220g5", "does not list c220g5. Allowed: one of wisc, clemson"),
        ("hardware: c220g5, site: mars", "cloudlab.site is mars. Allowed: wisc"),
    ],
)
def test_an_impossible_request_is_refused_before_the_portal_is_asked(keys, says):
    assert says in refused(keys)


def test_wheels_for_another_cuda_release_are_enough_for_gpus_that_they_support():
    wheels = "environment: {wheelhouse: /opt/wheels}\n"
    assert planned("hardware: c240g5", wheels).unchecked == ()
    assert "Kepler" in refused("hardware: c4130, site: clemson", wheels)


def test_hardware_that_the_catalogue_lacks_is_requested_with_a_note():
    assert "does not list c220g5 at wisc" in planned("hardware: c220g5, site: wisc").unchecked[0]
    assert "does not know the GPUs of g893 at wisc" in planned("hardware: g893").unchecked[0]
    assert planned("hardware: x1, site: new.cloudlab.us").manager_urn == "urn:publicid:IDN+new.cloudlab.us+authority+cm"


def test_the_catalogue_is_keyed_by_site_and_type_and_each_entry_has_a_source():
    types = hardware.load_catalogue().types
    assert len({(one.site, one.type) for one in types}) == len(types)
    known = {generation.name for generation in gpu_generations.GENERATIONS}
    for one in types:
        assert one.site in hardware.load_catalogue().sites
        assert len(one.source) > 10
        assert one.generation is None or one.generation in known
        assert (one.gpu is None) == (one.generation is None)
        assert 0 not in (one.nodes, one.gpus, one.gpu_memory_gib, one.memory_gb)
    assert (
        hardware.load_catalogue().find_type("wisc", "c4130").gpu,
        hardware.load_catalogue().find_type("clemson", "c4130").gpu,
    ) == (
        "V100",
        "K40m",
    )


def run(capsys, *words):
    try:
        code = cli.main(list(words))
    except SystemExit as ended:  # argparse raises it for wrong words
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_prints_the_request_and_nothing_else(tmp_path, capsys):
    file = tmp_path / "cluster.yaml"
    file.write_text("schema: 1\nname: bench\nprovider: cloudlab\ncloudlab: {hardware: g893, nodes: 2}\n")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(capsys, str(file), "request", "--workspace", str(tmp_path))
    assert code == 0
    assert checked(out).get("type") == "request"
    assert "warning: the hardware catalogue does not know the GPUs of g893" in err
    assert run(capsys, str(file), "request", "--profile", "--workspace", str(tmp_path))[1].startswith(
        '"""A cluster for training'
    )
    document = json.loads(run(capsys, str(file), "request", "--json", "--workspace", str(tmp_path))[1])
    assert checked(document["request"]).get("type") == "request"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_refuses_with_code_2_and_an_empty_standard_output(tmp_path, capsys):
    file = tmp_path / "cluster.yaml"
    file.write_text("schema: 1\nname: bench\nprovider: cloudlab\ncloudlab: {hardware: c240g5}\n")
    assert run(capsys, str(file), "request", "--workspace", str(tmp_path))[:2] == (2, "")
    code, _, err = run(capsys, str(file), "plan", "--profile", "--workspace", str(tmp_path))
    assert (code, "--profile belongs to the verb request" in err) == (2, True)


def test_the_catalogue_is_printed_as_a_table_and_as_json(tmp_path, capsys):
    _, out, _ = run(capsys, "hardware", "--workspace", str(tmp_path))
    lines = out.splitlines()
    assert len(lines) == 1 + len(hardware.load_catalogue().types)
    assert lines[0].split()[:4] == ["site", "type", "nodes", "GPUs"]
    assert lines[1].split()[:5] == ["wisc", "d8545", "4", "4", "A100"]
    made = json.loads(run(capsys, "hardware", "--json", "--workspace", str(tmp_path))[1])
    of = {(one["site"], one["type"]): one for one in made["types"]}
    assert of["wisc", "d8545"]["cuda_builds"] == ["12.6", "13.0", "13.2"]
    assert of["clemson", "c4130"]["cuda_builds"] == []
    assert of["wisc", "g893"]["cuda_builds"] is None
    assert of["wisc", "g893"]["gpus"] is None
    assert run(capsys, "cluster.yaml", "hardware", "--workspace", str(tmp_path))[0] == 2
