"""Makes manifests of CloudLab experiments, in the forms that CloudLab's documentation and its users show."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import quoteattr

RSPEC = "http://www.geni.net/resources/rspec/3"
EMULAB = "http://www.protogeni.net/resources/rspec/ext/emulab/1"


def node(
    name: str,
    number: int,
    *,
    site: str = "wisc.cloudlab.us",
    hardware: str = "d8545",
    users: Sequence[str] = ("alice", "bob"),
    sliver: str = "raw-pc",
    host: str | None = None,
    services_first: bool = False,
    address: str | None = None,
    control: str | None = None,
    mac: str | None = None,
    more: str = "",
) -> str:
    """The XML element of a node in a manifest.

    number: the number of the node, from 1. Addresses that are not given are computed from this number.
    address: the node's address on the experiment network. control: its address on the control network.
    host: the host name for logins.
    mac: the MAC address of the node's interface on the experiment network, without colons.
    more: further XML elements inside the node's element.
    """
    machine = f"{hardware}-sample{number}"
    at = quoteattr(host or f"{machine}.{site}")
    logins = "".join(f'<login authentication="ssh-keys" hostname={at} port="22" username={quoteattr(user)}/>' for user in users)
    services = f"<services>{logins}</services>"
    own_control = control or f"192.0.2.{number % 250 + 1}"
    hosts = f'<host name="{name}.bench.myproj-PG0.{site}" ipv4="{own_control}"/>'
    own_mac = mac or f"0a0b0c0d{number:04x}"
    ip = address or f"10.10.{number // 250 + 1}.{number % 250 + 1}"
    interface = (
        f'<interface client_id="{name}:if0" component_id="urn:publicid:IDN+{site}+interface+{machine}:eth2" '
        f'mac_address="{own_mac}"><ip address="{ip}" netmask="255.255.0.0" type="ipv4"/></interface>'
    )
    parts = [
        f'<sliver_type name="{sliver}"/>',
        f'<hardware_type name="{hardware}"/>',
        interface,
        f'<emulab:vnode name="{machine}" hardware_type="{hardware}"/>',
        *([services, hosts] if services_first else [hosts, services]),
        more,
    ]
    manager = f"urn:publicid:IDN+{site}+authority+cm"
    return (
        f'<node client_id={quoteattr(name)} exclusive="true" component_manager_id="{manager}" '
        f'component_id="urn:publicid:IDN+{site}+node+{machine}">{"".join(parts)}</node>'
    )


def lan(names: Sequence[str], name: str = "lan0") -> str:
    """The XML element of the network that connects these nodes."""
    references = "".join(f'<interface_ref client_id="{one}:if0"/>' for one in names)
    return f'<link client_id="{name}">{references}<link_type name="lan"/></link>'


def manifest(*elements: str, expires: str | None = "2031-05-02T18:00:00Z", kind: str = "manifest") -> str:
    """A whole manifest with these XML elements."""
    end = f' expires="{expires}"' if expires else ""
    return (
        f'<?xml version="1.0"?>\n<rspec xmlns="{RSPEC}" xmlns:emulab="{EMULAB}" type="{kind}"{end}>'
        + "".join(elements)
        + "</rspec>\n"
    )
