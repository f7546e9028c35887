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

RSPEC_NAMESPACE = "http://www.geni.net/resources/rspec/3"
EMULAB_NAMESPACE = "http://www.protogeni.net/resources/rspec/ext/emulab/1"
SCHEMA_LOCATIONS = f"{RSPEC_NAMESPACE} {RSPEC_NAMESPACE}/request.xsd"
LAN_NETWORK = ipaddress.IPv4Network("10.10.0.0/16")
EACH_OCTET = 254  # of 256 addresses, 254 are used: addresses that end with 0 or 255 are not used
RATED_NODES = 100  # most nodes if lan_mbps is set: a request then states the rate for each ordered pair of interfaces
UBUNTU_IMAGE = re.compile(r"(?:^|[:/+])UBUNTU(\d\d)-64-")  # the names of CloudLab's own Ubuntu images, such as UBUNTU24-64-STD
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
    unchecked: tuple[str, ...] = ()
    """Sentences about values that were not checked, because the hardware catalogue does not contain them."""

    @property
    def manager_urn(self) -> str:
        """The URN of the aggregate (the site) from which the machines are requested."""
        return f"urn:publicid:IDN+{self.aggregate}+authority+cm"


def plan_experiment(cluster: Cluster) -> ExperimentRequest:
    """The request that a cluster file with the key `cloudlab` describes. Raises InputError if its experiment could not work."""
    keys = cluster.cloudlab
    if keys is None or keys.hardware is None:
        raise InputError(
            f"{cluster.name}: cloudlab.hardware is missing. Allowed: a type; `provision hardware` lists types with GPUs."
        )
    hardware_type, site = _find_hardware(keys, keys.hardware)
    unchecked_sentences = [f"the hardware catalogue does not list {keys.hardware} at {site}, so nothing of it was checked"]
    if hardware_type is not None:
        unchecked_sentences = _check_hardware(hardware_type, keys.nodes, cluster.environment.wheelhouse is not None)
    if (ubuntu_match := UBUNTU_IMAGE.search(keys.image)) is not None and int(ubuntu_match[1]) < OLDEST_UBUNTU:
        raise InputError(
            f"cloudlab.image: {keys.image} is Ubuntu {ubuntu_match[1]}.04, whose Python is older than 3.11. Allowed: "
            f"UBUNTU{OLDEST_UBUNTU}-64-STD, or a newer one."
        )
    if keys.lan_mbps is not None and keys.nodes > RATED_NODES:
        raise InputError(
            f"cloudlab.lan_mbps is set for {keys.nodes} nodes. Allowed: up to {RATED_NODES} nodes, or null, which is the best "
            "rate that the nodes have."
        )
    return ExperimentRequest(
        aggregate=hardware.load_catalogue().find_aggregate(site),
        hardware=keys.hardware,
        image=resolve_image_urn(keys.image),
        nodes=tuple(NodeRequest(f"node{i}", _assign_node_address(i) if keys.nodes > 1 else None) for i in range(keys.nodes)),
        lan_kbps=keys.lan_mbps * 1000 if keys.lan_mbps is not None and keys.nodes > 1 else None,
        blockstore_gb=None if keys.blockstore_gib is None else math.ceil(keys.blockstore_gib * 2**30 / 1e9),
        unchecked=tuple(unchecked_sentences),
    )


def resolve_image_urn(image_name: str) -> str:
    """The disk image as a request names it.

    image_name: a URN or PROJECT:NAME, which are returned without change; PROJECT//NAME; or NAME of an image of emulab-ops.
    """
    if ":" in image_name:
        return image_name
    return f"urn:publicid:IDN+emulab.net+image+{image_name if '//' in image_name else f'emulab-ops//{image_name}'}"


def _assign_node_address(node_index: int) -> str:
    octet_block, last_octet = divmod(node_index, EACH_OCTET)
    return str(LAN_NETWORK.network_address + ((octet_block + 1) * 256 + last_octet + 1))


def _find_hardware(cloudlab_keys: Cloudlab, type_name: str) -> tuple[HardwareType | None, str]:
    """Find the hardware type `type_name` in the catalogue. Raises InputError if the cluster file names no site and the
    catalogue does not tell which site is meant.

    Returns (the type, or None if the catalogue does not list it; the site of its machines).
    """
    catalogue = hardware.load_catalogue()
    types_at_sites = catalogue.find_types(type_name)
    if cloudlab_keys.site is not None:
        return catalogue.find_type(cloudlab_keys.site, type_name), cloudlab_keys.site
    if len(types_at_sites) > 1:
        type_choices = "; ".join(f"{hardware_type.site}: {_describe_gpus(hardware_type)}" for hardware_type in types_at_sites)
        raise InputError(
            f"cloudlab.site is missing, and {type_name} is another machine at each site ({type_choices}). Allowed: one of them."
        )
    if not types_at_sites:
        raise InputError(
            f"cloudlab.site is missing, and the hardware catalogue does not list {type_name}. Allowed: one of "
            f"{', '.join(catalogue.sites)}."
        )
    return types_at_sites[0], types_at_sites[0].site


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
    cuda_releases = hardware.list_cuda_builds(entry)
    if cuda_releases is None:
        return [
            f"the hardware catalogue does not know the GPUs of {entry.name}, so it was not checked whether torch supports them"
        ]
    gpu = f"its {entry.gpu} GPUs ({entry.generation})"
    if not cuda_releases:
        supported = _list_supported_types()
        raise InputError(f"{entry.name}: torch {gpu_generations.TORCH_VERSION} has no build for {gpu}. Allowed: {supported}.")
    if gpu_generations.USUAL_CUDA not in cuda_releases and not has_wheelhouse:
        raise InputError(
            f"{entry.name}: torch {gpu_generations.TORCH_VERSION} for CUDA {gpu_generations.USUAL_CUDA}, which pip installs, "
            f"does not support {gpu}. Allowed: environment.wheelhouse, a folder on each node with wheels of torch for CUDA "
            f"{' or '.join(cuda_releases)}; or another type: {_list_supported_types()}."
        )
    return []


def _list_supported_types() -> str:
    """The names of the hardware types whose GPUs are supported by the build of torch that pip installs."""
    usual_cuda = gpu_generations.USUAL_CUDA
    return ", ".join(
        hardware_type.name
        for hardware_type in hardware.load_catalogue().types
        if hardware_type.arch == "x86_64" and usual_cuda in (hardware.list_cuda_builds(hardware_type) or ())
    )


def _describe_gpus(entry: HardwareType) -> str:
    return f"{entry.gpus} x {entry.gpu}" if entry.gpus is not None and entry.gpu is not None else "GPUs not known"


def render_rspec(request: ExperimentRequest) -> str:
    """The request as an RSpec of version 3, in XML."""
    rspec_element = ElementTree.Element(
        "rspec",
        {
            "xmlns": RSPEC_NAMESPACE,
            "xmlns:emulab": EMULAB_NAMESPACE,
            "xmlns:xsi": "http://www.w3.org/2001/XMLSchema-instance",
            "xsi:schemaLocation": SCHEMA_LOCATIONS,
            "type": "request",
        },
    )
    for node in request.nodes:
        node_element = ElementTree.SubElement(
            rspec_element, "node", client_id=node.name, exclusive="true", component_manager_id=request.manager_urn
        )
        sliver_element = ElementTree.SubElement(node_element, "sliver_type", name="raw-pc")
        ElementTree.SubElement(sliver_element, "disk_image", name=request.image)
        ElementTree.SubElement(node_element, "hardware_type", name=request.hardware)
        if node.address is not None:
            interface_element = ElementTree.SubElement(node_element, "interface", client_id=_make_interface_id(node))
            ElementTree.SubElement(interface_element, "ip", address=node.address, netmask=str(LAN_NETWORK.netmask), type="ipv4")
        if request.blockstore_gb is not None:
            blockstore_attributes = {"name": f"{node.name}-bs", "class": "local", "mountpoint": EXTRA_DISK, "placement": "any"}
            ElementTree.SubElement(node_element, "emulab:blockstore", blockstore_attributes, size=f"{request.blockstore_gb}GB")
    linked_nodes = [node for node in request.nodes if node.address is not None]
    if linked_nodes:
        link_element = ElementTree.SubElement(rspec_element, "link", client_id="lan0")
        for node in linked_nodes:
            ElementTree.SubElement(link_element, "interface_ref", client_id=_make_interface_id(node))
        ElementTree.SubElement(link_element, "link_type", name="lan")
        for source_interface, target_interface in _list_interface_pairs(linked_nodes) if request.lan_kbps is not None else ():
            ElementTree.SubElement(
                link_element, "property", source_id=source_interface, dest_id=target_interface, capacity=str(request.lan_kbps)
            )
    ElementTree.indent(rspec_element)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(rspec_element, encoding="unicode")}\n'


def render_profile(experiment_request: ExperimentRequest) -> str:
    """The request as a profile of CloudLab: a Python script for geni-lib. Its parameters have the names of small-lan."""
    return templates.render(
        "cloudlab/profile.py.j2",
        request=experiment_request,
        manager=experiment_request.manager_urn,
        mount=EXTRA_DISK,
        network=str(LAN_NETWORK.network_address).rpartition(".0.0")[0],
        netmask=str(LAN_NETWORK.netmask),
        each_octet=EACH_OCTET,
    )


def _make_interface_id(node: NodeRequest) -> str:
    return f"{node.name}:if0"


def _list_interface_pairs(nodes: list[NodeRequest]) -> list[tuple[str, str]]:
    return [(_make_interface_id(node), _make_interface_id(other)) for node in nodes for other in nodes if node is not other]
