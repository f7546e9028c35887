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
HOST = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}\.)*[A-Za-z0-9-]{0,62}\Z")
NODE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
FULL_NAME = re.compile(
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\Z"
)  # a full name begins with a client_id, which may contain _
LOGIN = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]{0,31}\Z")
MOUNT = re.compile(r"^/[A-Za-z0-9._/-]{1,200}\Z")
MAC = re.compile(r"^(?:[0-9a-f]{12}|(?:[0-9a-f]{2}:){5}[0-9a-f]{2})\Z")
# A URN such as urn:publicid:IDN+wisc.cloudlab.us+node+d8545-sample1: the aggregate, the kind of object, its name.
_URN = re.compile(r"^urn:publicid:IDN\+([A-Za-z0-9.:_-]{1,200})\+([a-z]{1,40})\+([A-Za-z0-9.:_-]{1,200})\Z")
MACHINES = ("raw-pc", "raw", "")  # the sliver types that are machines; nodes of other types, such as blockstores, are ignored


class ManifestInterface(msgspec.Struct, frozen=True):
    """An interface of a node on an experiment network."""

    address: str
    """IPv4."""
    prefix: int
    """Length of the network's prefix in bits."""
    mac: str | None
    """Lower case with colons; None: the manifest does not contain it."""
    link: str | None
    """The client_id of the link or LAN of this interface."""


class ManifestNode(msgspec.Struct, frozen=True):
    """A machine of an experiment."""

    name: str
    """The client_id of the node."""
    site: str
    """The aggregate, such as wisc.cloudlab.us."""
    hardware: str | None
    """The hardware type, such as d8545."""
    logins: dict[str, tuple[str, int]]
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

    def users(self) -> set[str]:
        """The project members that can log in to every node."""
        return set.intersection(*(set(node.logins) for node in self.nodes)) if self.nodes else set()


def read_manifest(path: Path) -> bytes:
    """Read the file of a manifest, at most MOST_BYTES + 1 bytes. Raises InputError."""
    try:
        with files.open_regular(path, follow=True) as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Allowed: the file of a manifest.") from None


def aggregate_name(name: str, urn: str) -> str:
    """The name of the aggregate (site) in a URN: wisc.cloudlab.us for urn:publicid:IDN+wisc.cloudlab.us+authority+cm.

    The name is safe as a file name. name: the name of the manifest for error messages. Raises InputError.
    """
    match = _URN.match(urn)
    if match is None or HOST.fullmatch(match[1]) is None:
        raise InputError(f"{name}: is of no aggregate. Allowed: urn:publicid:IDN+SITE+authority+cm.")
    return match[1]


def parse_manifests(manifests: Iterable[tuple[str, bytes]]) -> Experiment:
    """Read an experiment from its manifests, one manifest of each aggregate.

    manifests: for each manifest, (its name for error messages, its content).

    The manifest of an aggregate also lists the nodes of the other aggregates, as they were requested, without a login. Nodes
    without a login are ignored if the manifest of their own aggregate lists them.

    Raises InputError with the name of the manifest, and MissingExtra if defusedxml is not installed.
    """
    nodes: dict[str, ManifestNode] = {}
    passed_through: dict[str, str] = {}  # for each node without a login: its name -> `MANIFEST: NAME` for error messages
    expirations: list[tuple[datetime, str]] = []
    for name, content in manifests:
        root = _parse_root(name, content)
        if (expires := root.get("expires")) is not None:
            expirations.append((_parse_expiry(name, expires), expires))
        links = _links_by_interface(root)
        for element in _find_children(root, "node"):
            node = _read_node(name, element, links)
            if node is None:
                continue
            if not node.logins:
                passed_through.setdefault(node.name, f"{name}: {node.name}")
                continue
            if nodes.setdefault(node.name, node) != node:
                raise InputError(f"{name}: two different nodes are called {node.name}. Allowed: each client_id once.")
            if len(nodes) > MOST_NODES:
                raise InputError(f"{name}: more than {MOST_NODES:,} nodes. Allowed: the manifest of one experiment.")
    for name, where in passed_through.items():
        if name not in nodes:
            raise InputError(
                f"{where}: the manifest has no login. Allowed: the manifest of an experiment whose nodes are ready, and one of "
                "each site."
            )
    if not nodes:
        raise InputError(
            "The manifest lists no machine (virtual machines and blockstores are none). Allowed: the manifest of an experiment "
            "whose nodes are ready."
        )
    return Experiment(tuple(nodes.values()), min(expirations)[1] if expirations else None)


def _parse_root(name: str, content: bytes) -> Element:
    try:
        from defusedxml import DefusedXmlException
        from defusedxml.ElementTree import ParseError, fromstring
    except ModuleNotFoundError:
        raise MissingExtra("a CloudLab manifest", "defusedxml") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"{name}: is larger than {MOST_BYTES >> 20} MiB. Allowed: a manifest as CloudLab writes it.")
    try:
        root: Element = fromstring(content, forbid_dtd=True)
    except DefusedXmlException:
        raise InputError(f"{name}: has a DOCTYPE. Allowed: a manifest as CloudLab writes it, which has none.") from None
    except (ParseError, ValueError, LookupError) as error:  # LookupError: the XML names an unknown encoding
        raise InputError(f"{name}: is not XML ({error}). Allowed: the manifest of an experiment.") from None
    if _tag(root) != "rspec":
        raise InputError(f"{name}: its first element is {_tag(root)[:40]!r}. Allowed: a manifest, which begins with <rspec>.")
    return root


def _parse_expiry(name: str, text: str) -> datetime:
    moment = moments.parse_time(text)
    if moment is None or moment.tzinfo is None:
        raise InputError(f"{name}: expires is {text[:40]!r}. Allowed: a moment such as 2031-05-02T18:00:00Z.")
    return moment


def _links_by_interface(root: Element) -> dict[str, str]:
    """For each interface in a manifest: its client_id -> the client_id of its link."""
    return {
        reference.get("client_id", ""): link.get("client_id", "")
        for link in _find_children(root, "link")
        for reference in _find_children(link, "interface_ref")
    }


def _read_node(name: str, element: Element, links: dict[str, str]) -> ManifestNode | None:
    """Read a <node> element. Returns None if the node is not a machine but, for example, a blockstore. Raises InputError.

    name: the name of the manifest for error messages. links: as `_links_by_interface` returns them.
    """
    sliver = next((child.get("name", "") for child in _find_children(element, "sliver_type")), "")
    if sliver not in MACHINES:
        return None
    node_name = _check_pattern(name, "the client_id", element.get("client_id", ""), NODE_NAME)
    where = f"{name}: {node_name}"
    urn = _URN.match(element.get("component_manager_id") or element.get("component_id") or "")
    if urn is None:
        raise InputError(
            f"{where}: component_manager_id is no URN of an aggregate. Allowed: urn:publicid:IDN+SITE+authority+cm."
        )
    logins: dict[str, tuple[str, int]] = {}
    for services in _find_children(element, "services"):
        for login in _find_children(services, "login"):
            user = _check_pattern(where, "the user of a login", login.get("username", ""), LOGIN)
            host = _check_pattern(where, "the host of a login", login.get("hostname", ""), HOST)
            logins[user] = (host, _check_port(where, login.get("port") or "22"))
    host_element = next(iter(_find_children(element, "host")), None)
    control = host_element.get("ipv4") if host_element is not None else None
    full_name = host_element.get("name") if host_element is not None else None
    hardware = next((child.get("hardware_type") for child in _find_extensions(element, "vnode")), None) or next(
        (child.get("name") for child in _find_children(element, "hardware_type")), None
    )
    return ManifestNode(
        name=node_name,
        site=urn[1],
        hardware=_check_pattern(where, "the hardware type", hardware, NODE_NAME) if hardware is not None else None,
        logins=logins,
        control=_check_address(where, control) if control else None,
        interfaces=tuple(_read_interfaces(where, element, links)),
        full_name=_check_pattern(where, "the name of the host", full_name, FULL_NAME) if full_name else None,
        mounts=tuple(
            _check_pattern(where, "the mount point of a blockstore", blockstore.get("mountpoint", ""), MOUNT)
            for blockstore in _find_extensions(element, "blockstore")
            if blockstore.get("mountpoint")
        ),
    )


def _read_interfaces(where: str, element: Element, links: dict[str, str]) -> Iterable[ManifestInterface]:
    for interface in _find_children(element, "interface"):
        for ip in _find_children(interface, "ip"):
            text = ip.get("address", "")
            if ip.get("type", "ipv6" if ":" in text else "ipv4") != "ipv4":
                continue
            address = _check_address(where, text)
            try:
                prefix = ipaddress.IPv4Network(f"{address}/{ip.get('netmask', '')}", strict=False).prefixlen
            except ValueError:
                raise InputError(f"{where}: netmask {ip.get('netmask', '')[:40]!r}. Allowed: such as 255.255.255.0.") from None
            mac = interface.get("mac_address")
            link = links.get(interface.get("client_id", ""))
            yield ManifestInterface(
                address,
                prefix,
                _format_mac(_check_pattern(where, "a MAC address", mac.lower(), MAC)) if mac else None,
                _check_pattern(where, "the client_id of a link", link, NODE_NAME) if link else None,
            )


def _format_mac(mac: str) -> str:
    return mac if ":" in mac else ":".join(mac[index : index + 2] for index in range(0, 12, 2))


def _check_address(where: str, text: str) -> str:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_loopback or address.is_multicast or address.is_reserved:
        raise InputError(f"{where}: found the address {text[:40]!r}. Allowed: the IPv4 address of a machine.")
    return str(address)


def _check_port(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise InputError(f"{where}: found the port {text[:40]!r}. Allowed: 1 to 65535.")
    return int(text)


def _check_pattern(where: str, description: str, text: str, pattern: re.Pattern[str]) -> str:
    if len(text) > 253 or pattern.fullmatch(text) is None:
        raise InputError(f"{where}: {description} is {text[:40]!r}. Allowed: {pattern.pattern}")
    return text


def _tag(element: Element) -> str:
    """The name of an element without its namespace."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _find_children(element: Element, name: str) -> Sequence[Element]:
    """The child elements with this name in the namespace of `element`, which differs between versions of RSpec."""
    namespace = element.tag.rpartition("}")[0]
    return [child for child in _find_extensions(element, name) if child.tag.rpartition("}")[0] == namespace]


def _find_extensions(element: Element, name: str) -> Sequence[Element]:
    """The child elements with this name in any namespace, such as the namespace of emulab's extension of RSpec."""
    return [child for child in element if _tag(child) == name]
