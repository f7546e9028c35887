"""Reads the manifests of a CloudLab experiment: its nodes, logins, networks and the time when it ends.

A manifest is an RSpec v3 document in XML. It comes from the portal or from a person, so nothing in it is trusted: a DOCTYPE is
refused, the size is limited, and each name and address is checked before it is used. The order of elements does not matter,
because it differs between real manifests. An element in the namespace of an extension is not read as an element of RSpec.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlab.errors import InputError, MissingExtra
from shardlab.files import files
from shardlab.terminal import moments

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element  # only for type annotations; defusedxml parses the XML

MOST_BYTES = 16 << 20
MOST_NODES = 10_000
HOST_PATTERN = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}\.)*[A-Za-z0-9-]{0,62}\Z")
NODE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
# a full name begins with a client_id, which may contain _
FULL_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\Z")
LOGIN_PATTERN = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]{0,31}\Z")
MOUNT_PATTERN = re.compile(r"^/[A-Za-z0-9._/-]{1,200}\Z")
MAC_PATTERN = re.compile(r"^(?:[0-9a-f]{12}|(?:[0-9a-f]{2}:){5}[0-9a-f]{2})\Z")
# A URN such as urn:publicid:IDN+wisc.cloudlab.us+node+d8545-sample1: the aggregate, the kind of object, its name.
_URN_PATTERN = re.compile(r"^urn:publicid:IDN\+([A-Za-z0-9.:_-]{1,200})\+([a-z]{1,40})\+([A-Za-z0-9.:_-]{1,200})\Z")
# the sliver types that are machines; nodes of other types, such as blockstores, are ignored
MACHINE_SLIVER_TYPES = ("raw-pc", "raw", "")


class ManifestInterface(msgspec.Struct, frozen=True):
    """An interface of a node on an experiment network."""

    address: str
    """IPv4."""
    prefix_length: int
    """Length of the network's prefix in bits."""
    mac: str | None
    """Lower case with colons; None: the manifest does not contain it."""
    link_name: str | None
    """The client_id of the link or LAN of this interface."""


class ManifestNode(msgspec.Struct, frozen=True):
    """A machine of an experiment."""

    name: str
    """The client_id of the node."""
    site: str
    """The aggregate, such as wisc.cloudlab.us."""
    hardware: str | None
    """The hardware type, such as d8545."""
    login_by_user: dict[str, tuple[str, int]]
    """Host and port of the login, by the name of the project member."""
    control: str | None
    """The IPv4 address on the control network."""
    interfaces: tuple[ManifestInterface, ...]
    full_name: str | None = None
    """NODE.EXPERIMENT.PROJECT.SITE."""
    mounts: tuple[str, ...] = ()
    """The folders at which the blockstores of the node are mounted."""


class Experiment(msgspec.Struct, frozen=True):
    """An experiment, combined from its manifests."""

    nodes: tuple[ManifestNode, ...]
    expires: str | None
    """ISO 8601, the earliest end of all aggregates; None: no manifest contains an end."""

    def find_common_users(self) -> set[str]:
        """The project members that can log in to every node."""
        return set.intersection(*(set(node.login_by_user) for node in self.nodes)) if self.nodes else set()


def read_manifest(path: Path) -> bytes:
    """Read the file of a manifest, at most MOST_BYTES + 1 bytes. Raises InputError."""
    try:
        with files.open_regular(path, follow_links=True) as manifest_file:
            return manifest_file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Allowed: the file of a manifest.") from None


def aggregate_name(manifest_name: str, urn: str) -> str:
    """The name of the aggregate (site) in a URN: wisc.cloudlab.us for urn:publicid:IDN+wisc.cloudlab.us+authority+cm.

    The name is safe as a file name. manifest_name: the name of the manifest for error messages. Raises InputError.
    """
    urn_parts = _URN_PATTERN.match(urn)
    if urn_parts is None or HOST_PATTERN.fullmatch(urn_parts[1]) is None:
        raise InputError(f"{manifest_name}: is of no aggregate. Allowed: urn:publicid:IDN+SITE+authority+cm.")
    return urn_parts[1]


def parse_manifests(manifests: Iterable[tuple[str, bytes]]) -> Experiment:
    """Read an experiment from its manifests, one manifest of each aggregate.

    manifests: for each manifest, (its name for error messages, its content).

    The manifest of an aggregate also lists the nodes of the other aggregates, as they were requested, without a login. Nodes
    without a login are ignored if the manifest of their own aggregate lists them.

    Raises InputError with the name of the manifest, and MissingExtra if defusedxml is not installed.
    """
    node_by_name: dict[str, ManifestNode] = {}
    place_by_node: dict[str, str] = {}  # for each node without a login: its name -> `MANIFEST: NAME` for error messages
    expirations: list[tuple[datetime, str]] = []
    for name, manifest_bytes in manifests:
        root_element = _parse_root(name, manifest_bytes)
        if (expiry_text := root_element.get("expires")) is not None:
            expirations.append((_parse_expiry(name, expiry_text), expiry_text))
        link_by_interface = _map_interfaces_to_links(root_element)
        for node_element in _find_children(root_element, "node"):
            node = _read_node(name, node_element, link_by_interface)
            if node is None:
                continue
            if not node.login_by_user:
                place_by_node.setdefault(node.name, f"{name}: {node.name}")
                continue
            if node_by_name.setdefault(node.name, node) != node:
                raise InputError(f"{name}: two different nodes are called {node.name}. Allowed: each client_id once.")
            if len(node_by_name) > MOST_NODES:
                raise InputError(f"{name}: more than {MOST_NODES:,} nodes. Allowed: the manifest of one experiment.")
    for name, where in place_by_node.items():
        if name not in node_by_name:
            raise InputError(
                f"{where}: the manifest has no login. Allowed: the manifest of an experiment whose nodes are ready, and one of "
                "each site."
            )
    if not node_by_name:
        raise InputError(
            "The manifest lists no machine (virtual machines and blockstores are none). Allowed: the manifest of an experiment "
            "whose nodes are ready."
        )
    return Experiment(tuple(node_by_name.values()), min(expirations)[1] if expirations else None)


def _parse_root(name: str, manifest_bytes: bytes) -> Element:
    try:
        from defusedxml import DefusedXmlException
        from defusedxml.ElementTree import ParseError, fromstring
    except ModuleNotFoundError:
        raise MissingExtra("a CloudLab manifest", "defusedxml") from None
    if len(manifest_bytes) > MOST_BYTES:
        raise InputError(f"{name}: is larger than {MOST_BYTES >> 20} MiB. Allowed: a manifest as CloudLab writes it.")
    try:
        root: Element = fromstring(manifest_bytes, forbid_dtd=True)
    except DefusedXmlException:
        raise InputError(f"{name}: has a DOCTYPE. Allowed: a manifest as CloudLab writes it, which has none.") from None
    except (ParseError, ValueError, LookupError) as error:  # LookupError: the XML names an unknown encoding
        raise InputError(f"{name}: is not XML ({error}). Allowed: the manifest of an experiment.") from None
    if _tag(root) != "rspec":
        raise InputError(f"{name}: its first element is {_tag(root)[:40]!r}. Allowed: a manifest, which begins with <rspec>.")
    return root


def _parse_expiry(manifest_name: str, expiry_text: str) -> datetime:
    expiry = moments.parse_time(expiry_text)
    if expiry is None or expiry.tzinfo is None:
        raise InputError(f"{manifest_name}: expires is {expiry_text[:40]!r}. Allowed: a moment such as 2031-05-02T18:00:00Z.")
    return expiry


def _map_interfaces_to_links(root_element: Element) -> dict[str, str]:
    """For each interface in a manifest: its client_id -> the client_id of its link."""
    return {
        interface_reference.get("client_id", ""): link_element.get("client_id", "")
        for link_element in _find_children(root_element, "link")
        for interface_reference in _find_children(link_element, "interface_ref")
    }


def _read_node(manifest_name: str, node_element: Element, link_by_interface: dict[str, str]) -> ManifestNode | None:
    """Read a <node> element. Returns None if the node is not a machine but, for example, a blockstore. Raises InputError.

    manifest_name: the name of the manifest for error messages. link_by_interface: as `_map_interfaces_to_links` returns them.
    """
    sliver_type = next((child.get("name", "") for child in _find_children(node_element, "sliver_type")), "")
    if sliver_type not in MACHINE_SLIVER_TYPES:
        return None
    node_name = _check_pattern(manifest_name, "the client_id", node_element.get("client_id", ""), NODE_NAME)
    place = f"{manifest_name}: {node_name}"
    urn_parts = _URN_PATTERN.match(node_element.get("component_manager_id") or node_element.get("component_id") or "")
    if urn_parts is None:
        raise InputError(
            f"{place}: component_manager_id is no URN of an aggregate. Allowed: urn:publicid:IDN+SITE+authority+cm."
        )
    login_by_user: dict[str, tuple[str, int]] = {}
    for services_element in _find_children(node_element, "services"):
        for login_element in _find_children(services_element, "login"):
            user_name = _check_pattern(place, "the user of a login", login_element.get("username", ""), LOGIN_PATTERN)
            host = _check_pattern(place, "the host of a login", login_element.get("hostname", ""), HOST_PATTERN)
            login_by_user[user_name] = (host, _check_port(place, login_element.get("port") or "22"))
    host_element = next(iter(_find_children(node_element, "host")), None)
    control_address = host_element.get("ipv4") if host_element is not None else None
    full_name = host_element.get("name") if host_element is not None else None
    hardware_type = next((child.get("hardware_type") for child in _find_extensions(node_element, "vnode")), None) or next(
        (child.get("name") for child in _find_children(node_element, "hardware_type")), None
    )
    return ManifestNode(
        name=node_name,
        site=urn_parts[1],
        hardware=_check_pattern(place, "the hardware type", hardware_type, NODE_NAME) if hardware_type is not None else None,
        login_by_user=login_by_user,
        control=_check_address(place, control_address) if control_address else None,
        interfaces=tuple(_read_interfaces(place, node_element, link_by_interface)),
        full_name=_check_pattern(place, "the name of the host", full_name, FULL_NAME) if full_name else None,
        mounts=tuple(
            _check_pattern(place, "the mount point of a blockstore", blockstore.get("mountpoint", ""), MOUNT_PATTERN)
            for blockstore in _find_extensions(node_element, "blockstore")
            if blockstore.get("mountpoint")
        ),
    )


def _read_interfaces(node_place: str, node_element: Element, link_by_interface: dict[str, str]) -> Iterable[ManifestInterface]:
    for interface_element in _find_children(node_element, "interface"):
        for ip_element in _find_children(interface_element, "ip"):
            address_text = ip_element.get("address", "")
            if ip_element.get("type", "ipv6" if ":" in address_text else "ipv4") != "ipv4":
                continue
            address = _check_address(node_place, address_text)
            try:
                prefix_length = ipaddress.IPv4Network(f"{address}/{ip_element.get('netmask', '')}", strict=False).prefixlen
            except ValueError:
                raise InputError(
                    f"{node_place}: netmask {ip_element.get('netmask', '')[:40]!r}. Allowed: such as 255.255.255.0."
                ) from None
            mac = interface_element.get("mac_address")
            link_name = link_by_interface.get(interface_element.get("client_id", ""))
            yield ManifestInterface(
                address,
                prefix_length,
                _format_mac(_check_pattern(node_place, "a MAC address", mac.lower(), MAC_PATTERN)) if mac else None,
                _check_pattern(node_place, "the client_id of a link", link_name, NODE_NAME) if link_name else None,
            )


def _format_mac(mac_address: str) -> str:
    return mac_address if ":" in mac_address else ":".join(mac_address[index : index + 2] for index in range(0, 12, 2))


def _check_address(node_place: str, address_text: str) -> str:
    try:
        address = ipaddress.IPv4Address(address_text)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_loopback or address.is_multicast or address.is_reserved:
        raise InputError(f"{node_place}: found the address {address_text[:40]!r}. Allowed: the IPv4 address of a machine.")
    return str(address)


def _check_port(node_place: str, port_text: str) -> int:
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 1 <= int(port_text) <= 65535):
        raise InputError(f"{node_place}: found the port {port_text[:40]!r}. Allowed: 1 to 65535.")
    return int(port_text)


def _check_pattern(node_place: str, value_phrase: str, checked_text: str, pattern: re.Pattern[str]) -> str:
    if len(checked_text) > 253 or pattern.fullmatch(checked_text) is None:
        raise InputError(f"{node_place}: {value_phrase} is {checked_text[:40]!r}. Allowed: {pattern.pattern}")
    return checked_text


def _tag(element: Element) -> str:
    """The name of an element without its namespace."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _find_children(element: Element, element_name: str) -> Sequence[Element]:
    """The child elements with this name in the namespace of `element`, which differs between versions of RSpec."""
    namespace = element.tag.rpartition("}")[0]
    return [child for child in _find_extensions(element, element_name) if child.tag.rpartition("}")[0] == namespace]


def _find_extensions(element: Element, element_name: str) -> Sequence[Element]:
    """The child elements with this name in any namespace, such as the namespace of emulab's extension of RSpec."""
    return [child for child in element if _tag(child) == element_name]
