"""The request for an experiment of CloudLab, checked against the hardware catalogue, written as an RSpec or a profile."""

from __future__ import annotations

import ipaddress
import math
import re
from xml.etree import ElementTree  # used only to write XML; defusedxml parses XML

import msgspec

import templates
from provision import gpu_generations
from provision.cloudlab import hardware
from provision.cloudlab.hardware import HardwareType
from shardlab.cluster.cloudlab_keys import EXTRA_DISK, Cloudlab
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError

RSPEC = "http://www.geni.net/resources/rspec/3"
EMULAB = "http://www.protogeni.net/resources/rspec/ext/emulab/1"
SCHEMAS = f"{RSPEC} {RSPEC}/request.xsd"
LAN = ipaddress.IPv4Network("10.10.0.0/16")
EACH_OCTET = 254  # of 256 addresses, 254 are used: addresses that end with 0 or 255 are not used
RATED_NODES = 100  # most nodes if lan_mbps is set: a request then states the rate for each ordered pair of interfaces
UBUNTU = re.compile(r"(?:^|[:/+])UBUNTU(\d\d)-64-")  # the names of CloudLab's own Ubuntu images, such as UBUNTU24-64-STD
OLDEST_UBUNTU = 24  # the first Ubuntu LTS whose Python is 3.11 or newer
BY_HAND_ADVICE = "To use it nevertheless, create the experiment at the portal, and name its manifest in cloudlab.manifest"


class NodeRequest(msgspec.Struct, frozen=True):
    """A machine that is requested for an experiment."""

    name: str
    address: str | None
    """The machine's IPv4 address on the experiment network; None: an experiment with a single node has no such network."""


class ExperimentRequest(msgspec.Struct, frozen=True):
    """The nodes, the network and the disks that are requested from CloudLab."""

    aggregate: str
    """The aggregate (the site) from which the machines are requested, such as wisc.cloudlab.us."""
    hardware: str
    """The hardware type."""
    image: str
    """The disk image, as a URN or as PROJECT:NAME."""
    nodes: tuple[NodeRequest, ...]
    lan_kbps: int | None
    """The rate of the experiment network in kbit/s; None: the best that the nodes have."""
    blockstore_gb: int | None
    """The size of the disk at /mydata in units of 1e9 bytes; 0: all free space; None: no disk is requested."""
    unknown: tuple[str, ...] = ()
    """Sentences about values that were not checked, because the hardware catalogue does not contain them."""

    @property
    def manager(self) -> str:
        """The URN of the aggregate (the site) from which the machines are requested."""
        return f"urn:publicid:IDN+{self.aggregate}+authority+cm"


def plan_experiment(cluster: Cluster) -> ExperimentRequest:
    """The request that a cluster file with the key `cloudlab` describes. Raises InputError if its experiment could not work."""
    keys = cluster.cloudlab
    if keys is None or keys.hardware is None:
        raise InputError(
            f"{cluster.name}: cloudlab.hardware is missing. Allowed: a type; `provision hardware` lists types with GPUs."
        )
    entry, site = _find_hardware(keys, keys.hardware)
    unknown = [f"the hardware catalogue does not list {keys.hardware} at {site}, so nothing of it was checked"]
    if entry is not None:
        unknown = _check_hardware(entry, keys.nodes, cluster.environment.wheelhouse is not None)
    if (release := UBUNTU.search(keys.image)) is not None and int(release[1]) < OLDEST_UBUNTU:
        raise InputError(
            f"cloudlab.image: {keys.image} is Ubuntu {release[1]}.04, whose Python is older than 3.11. Allowed: "
            f"UBUNTU{OLDEST_UBUNTU}-64-STD, or a newer one."
        )
    if keys.lan_mbps is not None and keys.nodes > RATED_NODES:
        raise InputError(
            f"cloudlab.lan_mbps is set for {keys.nodes} nodes. Allowed: up to {RATED_NODES} nodes, or null, which is the best "
            "rate that the nodes have."
        )
    return ExperimentRequest(
        aggregate=hardware.load_catalogue().aggregate(site),
        hardware=keys.hardware,
        image=image_urn(keys.image),
        nodes=tuple(NodeRequest(f"node{i}", _node_address(i) if keys.nodes > 1 else None) for i in range(keys.nodes)),
        lan_kbps=keys.lan_mbps * 1000 if keys.lan_mbps is not None and keys.nodes > 1 else None,
        blockstore_gb=None if keys.blockstore_gib is None else math.ceil(keys.blockstore_gib * 2**30 / 1e9),
        unknown=tuple(unknown),
    )


def image_urn(name: str) -> str:
    """The disk image as a request names it.

    name: a URN or PROJECT:NAME, which are returned without change; PROJECT//NAME; or NAME of an image of emulab-ops.
    """
    if ":" in name:
        return name
    return f"urn:publicid:IDN+emulab.net+image+{name if '//' in name else f'emulab-ops//{name}'}"


def _node_address(index: int) -> str:
    block, last = divmod(index, EACH_OCTET)
    return str(LAN.network_address + ((block + 1) * 256 + last + 1))


def _find_hardware(keys: Cloudlab, name: str) -> tuple[HardwareType | None, str]:
    """Find the hardware type `name` in the catalogue. Raises InputError if the cluster file names no site and the catalogue
    does not tell which site is meant.

    Returns (the type, or None if the catalogue does not list it; the site of its machines).
    """
    catalogue = hardware.load_catalogue()
    listed_types = catalogue.types_named(name)
    if keys.site is not None:
        return catalogue.find_type(keys.site, name), keys.site
    if len(listed_types) > 1:
        choices = "; ".join(f"{hardware_type.site}: {_gpu_text(hardware_type)}" for hardware_type in listed_types)
        raise InputError(
            f"cloudlab.site is missing, and {name} is another machine at each site ({choices}). Allowed: one of them."
        )
    if not listed_types:
        raise InputError(
            f"cloudlab.site is missing, and the hardware catalogue does not list {name}. Allowed: one of "
            f"{', '.join(catalogue.sites)}."
        )
    return listed_types[0], listed_types[0].site


def _check_hardware(entry: HardwareType, nodes: int, has_wheelhouse: bool) -> list[str]:
    """Check that the hardware type can be used. Returns a sentence for each property that could not be checked.

    Raises InputError if shardlab or its torch does not support the type, or if the site has fewer machines than `nodes`.
    has_wheelhouse: whether the cluster file names a folder with its own wheels of torch.
    """
    if entry.arch == "ppc64le":
        raise InputError(f"{entry.name}: its processors are POWER (ppc64le), for which torch has no build. Allowed: x86_64.")
    if entry.arch is not None and entry.arch != "x86_64":
        raise InputError(
            f"{entry.name}: its processors are {entry.arch}, on which shardlab was never run. Allowed: x86_64. "
            f"{BY_HAND_ADVICE}."
        )
    if entry.nodes is not None and nodes > entry.nodes:
        raise InputError(
            f"{entry.name}: {nodes} nodes are requested, but the site has {entry.nodes} ({entry.source}). Allowed: at most "
            f"{entry.nodes}. {BY_HAND_ADVICE}."
        )
    builds = hardware.cuda_builds(entry)
    if builds is None:
        return [
            f"the hardware catalogue does not know the GPUs of {entry.name}, so it was not checked whether torch supports them"
        ]
    gpu = f"its {entry.gpu} GPUs ({entry.generation})"
    if not builds:
        allowed = _list_supported_types()
        raise InputError(f"{entry.name}: torch {gpu_generations.TORCH_VERSION} has no build for {gpu}. Allowed: {allowed}.")
    if gpu_generations.USUAL_CUDA not in builds and not has_wheelhouse:
        raise InputError(
            f"{entry.name}: torch {gpu_generations.TORCH_VERSION} for CUDA {gpu_generations.USUAL_CUDA}, which pip installs, "
            f"does not support {gpu}. Allowed: environment.wheelhouse, a folder on each node with wheels of torch for CUDA "
            f"{' or '.join(builds)}; or another type: {_list_supported_types()}."
        )
    return []


def _list_supported_types() -> str:
    """The names of the hardware types whose GPUs are supported by the build of torch that pip installs."""
    cuda = gpu_generations.USUAL_CUDA
    return ", ".join(
        entry.name
        for entry in hardware.load_catalogue().types
        if entry.arch == "x86_64" and cuda in (hardware.cuda_builds(entry) or ())
    )


def _gpu_text(entry: HardwareType) -> str:
    return f"{entry.gpus} x {entry.gpu}" if entry.gpus is not None and entry.gpu is not None else "GPUs not known"


def render_rspec(request: ExperimentRequest) -> str:
    """The request as an RSpec of version 3, in XML."""
    root = ElementTree.Element(
        "rspec",
        {
            "xmlns": RSPEC,
            "xmlns:emulab": EMULAB,
            "xmlns:xsi": "http://www.w3.org/2001/XMLSchema-instance",
            "xsi:schemaLocation": SCHEMAS,
            "type": "request",
        },
    )
    for node in request.nodes:
        element = ElementTree.SubElement(
            root, "node", client_id=node.name, exclusive="true", component_manager_id=request.manager
        )
        sliver = ElementTree.SubElement(element, "sliver_type", name="raw-pc")
        ElementTree.SubElement(sliver, "disk_image", name=request.image)
        ElementTree.SubElement(element, "hardware_type", name=request.hardware)
        if node.address is not None:
            interface = ElementTree.SubElement(element, "interface", client_id=_interface_id(node))
            ElementTree.SubElement(interface, "ip", address=node.address, netmask=str(LAN.netmask), type="ipv4")
        if request.blockstore_gb is not None:
            store = {"name": f"{node.name}-bs", "class": "local", "mountpoint": EXTRA_DISK, "placement": "any"}
            ElementTree.SubElement(element, "emulab:blockstore", store, size=f"{request.blockstore_gb}GB")
    linked = [node for node in request.nodes if node.address is not None]
    if linked:
        link = ElementTree.SubElement(root, "link", client_id="lan0")
        for node in linked:
            ElementTree.SubElement(link, "interface_ref", client_id=_interface_id(node))
        ElementTree.SubElement(link, "link_type", name="lan")
        for source, target in _interface_pairs(linked) if request.lan_kbps is not None else ():
            ElementTree.SubElement(link, "property", source_id=source, dest_id=target, capacity=str(request.lan_kbps))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def render_profile(request: ExperimentRequest) -> str:
    """The request as a profile of CloudLab: a Python script for geni-lib. Its parameters have the names of small-lan."""
    return templates.render(
        "cloudlab/profile.py.j2",
        request=request,
        manager=request.manager,
        mount=EXTRA_DISK,
        network=str(LAN.network_address).rpartition(".0.0")[0],
        netmask=str(LAN.netmask),
        each_octet=EACH_OCTET,
    )


def _interface_id(node: NodeRequest) -> str:
    return f"{node.name}:if0"


def _interface_pairs(nodes: list[NodeRequest]) -> list[tuple[str, str]]:
    return [(_interface_id(node), _interface_id(other)) for node in nodes for other in nodes if node is not other]
