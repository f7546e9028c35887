"""A stand-in of geni-lib that records what a CloudLab profile script requests.

The stand-in has the names and arguments that public profiles use: `Context.defineParameter`, `bindParameters`,
`makeRequestRSpec`, `RawPC`, `LAN`, `addInterface`, `addAddress`, `Blockstore`, `printRequestRSpec`.
"""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar


class Noted:
    """An object that a profile script makes, such as a node. Attributes that the script sets are recorded."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.name = name
        self.__dict__.update(attributes)


class Node(Noted):
    def __init__(self, name: str) -> None:
        super().__init__(name, interfaces=[], stores=[])

    def addInterface(self, name: str) -> Noted:  # noqa: N802
        made = Noted(f"{self.name}:{name}", addresses=[])
        made.addAddress = made.addresses.append
        self.interfaces.append(made)
        return made

    def Blockstore(self, name: str, mount: str) -> Noted:  # noqa: N802
        self.stores.append(Noted(name, mount=mount, where="local"))
        return self.stores[-1]


class Request:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.lans: list[Noted] = []

    def RawPC(self, name: str) -> Node:  # noqa: N802
        self.nodes.append(Node(name))
        return self.nodes[-1]

    def LAN(self, name: str) -> Noted:  # noqa: N802
        made = Noted(name, interfaces=[], bandwidth=None)
        made.addInterface = made.interfaces.append
        self.lans.append(made)
        return made


class Context:
    """The stand-in of geni-lib's class Context.

    bindings: the values that a user entered at the portal for parameters of the profile, in place of the defaults.
    """

    bindings: ClassVar[dict[str, Any]] = {}
    printed: ClassVar[list[Request]] = []

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}

    def defineParameter(self, name: str, label: str, kind: str, default: Any) -> None:  # noqa: N802
        assert isinstance(default, {"INTEGER": int, "STRING": str, "BOOLEAN": bool}[kind])
        assert name not in self.defaults
        self.defaults[name] = default

    def bindParameters(self) -> types.SimpleNamespace:  # noqa: N802
        assert set(self.bindings) <= set(self.defaults)
        return types.SimpleNamespace(**(self.defaults | self.bindings))

    def makeRequestRSpec(self) -> Request:  # noqa: N802
        return Request()

    def printRequestRSpec(self, request: Request) -> None:  # noqa: N802
        self.printed.append(request)


def run(script: str, monkeypatch: Any, **bindings: Any) -> Request:
    """Run a profile script and return what the script requests."""
    geni, rspec = types.ModuleType("geni"), types.ModuleType("geni.rspec")
    portal, pg, emulab = (types.ModuleType(f"geni.{name}") for name in ("portal", "rspec.pg", "rspec.emulab"))
    portal.ParameterType = types.SimpleNamespace(INTEGER="INTEGER", STRING="STRING", BOOLEAN="BOOLEAN")
    portal.Context = type("Context", (Context,), {"bindings": bindings, "printed": []})
    pg.IPv4Address = lambda address, netmask: (address, netmask)
    geni.portal, geni.rspec, rspec.pg, rspec.emulab = portal, rspec, pg, emulab
    for module in (geni, rspec, portal, pg, emulab):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(script, "profile.py", "exec"), {"__name__": "__main__"})
    (request,) = portal.Context.printed
    return request
