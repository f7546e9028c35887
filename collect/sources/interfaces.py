"""Finds the samples that belong to the same network interface, although the name of the interface may change during a run.

The kernel may rename an interface, and another interface may get the old name.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import msgspec
import polars as pl

IDENTITY = {"mac": pl.String, "pci": pl.String}  # the columns that identify an interface in addition to its name
_KEYS = ("run", "host", "kind", "name", *IDENTITY)


class InterfaceSpan(msgspec.Struct):
    """A network interface during the time in which its name and its addresses stay the same."""

    run: int
    """The index of the run."""
    host: str
    kind: str
    name: str
    mac: str | None
    """The MAC address of the interface; None if not known."""
    pci: str | None
    """The PCI address of the interface; None if not known."""
    first_s: float
    """The time of the first sample of the interface, in seconds since the epoch."""
    last_s: float
    """The time of the last sample of the interface, in seconds since the epoch."""
    known_as: str = ""
    """The unique name that all samples of the interface get."""

    def becomes(self, later: InterfaceSpan) -> bool:
        """Whether `later` is the same interface with a new name or a new MAC address, so that its counters continue."""
        if self.last_s > later.first_s or (self.kind, self.pci) != (later.kind, later.pci):
            return False
        same_address = self.mac is not None and self.mac == later.mac
        return same_address or (self.pci is not None and self.name == later.name)


def unify_interface_names(nics: pl.DataFrame) -> pl.DataFrame:
    """Give each network interface the same unique name in all its samples of a run, and drop the columns IDENTITY.

    If udev renamed an interface, all its samples get its last name. If an interface was removed and created again, or took the
    name of another interface, then two interfaces with different counters have the same name. In this case, the interface that
    was seen last keeps the name, such as `eth0`, and the earlier interface is called `eth0 (2)`.
    """
    distinct = nics.select(_KEYS).unique()
    by_name, by_identity = distinct.select("run", "host", "name"), distinct.select("run", "host", "kind", *IDENTITY)
    if by_name.n_unique() == by_identity.n_unique() == distinct.height:
        return nics.drop(IDENTITY)
    spans = nics.group_by(_KEYS, maintain_order=True).agg(first_s=pl.min("wall_s"), last_s=pl.max("wall_s"))
    interfaces = [InterfaceSpan(**row) for row in spans.iter_rows(named=True)]
    interfaces.sort(key=attrgetter("last_s", "first_s", "name"), reverse=True)
    for host_key in dict.fromkeys((interface.run, interface.host) for interface in interfaces):
        _set_known_names(interface for interface in interfaces if (interface.run, interface.host) == host_key)
    columns = {key: [getattr(interface, key) for interface in interfaces] for key in (*_KEYS, "known_as")}
    names = pl.DataFrame(columns, {key: nics.schema.get(key, pl.String) for key in columns})
    named = nics.join(names, on=_KEYS, how="left", nulls_equal=True, maintain_order="left")
    return named.with_columns(name=pl.col("known_as")).drop(*IDENTITY, "known_as")


def _set_known_names(interfaces: Iterable[InterfaceSpan]) -> None:
    """Set `known_as`, the unique name, of each span of one host in one run. Spans of the same interface get the same name.

    interfaces: the spans, sorted by the time of their last sample, the latest first.
    """
    earliest: list[InterfaceSpan] = []  # the earliest span of each interface that has a name so far
    names_in_use: set[str] = set()
    for interface in interfaces:
        index = next((index for index, other in enumerate(earliest) if interface.becomes(other)), None)
        if index is not None:
            interface.known_as = earliest[index].known_as
            earliest[index] = interface
            continue
        number, interface.known_as = 1, interface.name
        while interface.known_as in names_in_use:
            number += 1
            interface.known_as = f"{interface.name} ({number})"
        names_in_use.add(interface.known_as)
        earliest.append(interface)
