"""Finds the samples of one network interface: its name may change during a run, and another interface may get that name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import msgspec
import polars as pl

IDENTITY = {"mac": pl.String, "pci": pl.String}  # columns of the samples beside the name
_KEYS = ("run", "host", "kind", "name", *IDENTITY)


class InterfaceSpan(msgspec.Struct):
    """An interface as long as its name and its addresses stay the same. first_s, last_s: its first and last sample (wall_s).

    known_as: the name in the rows of all its samples.
    """

    run: int
    host: str
    kind: str
    name: str
    mac: str | None
    pci: str | None
    first_s: float
    last_s: float
    known_as: str = ""

    def becomes(self, later: InterfaceSpan) -> bool:
        """Whether `later` is this interface, renamed or with another MAC address: then its counter goes on."""
        if self.last_s > later.first_s or (self.kind, self.pci) != (later.kind, later.pci):
            return False
        same_address = self.mac is not None and self.mac == later.mac
        return same_address or (self.pci is not None and self.name == later.name)


def with_one_name_each(nics: pl.DataFrame) -> pl.DataFrame:
    """The samples of interfaces with names that tell the interfaces of a run and a host apart, without the columns IDENTITY.

    udev may rename an interface: all its rows get its last name. An interface that is removed and made again, or that takes the
    name of another one, begins another count: the one that was seen last keeps the name, an earlier one is called `eth0 (2)`.
    """
    seen = nics.select(_KEYS).unique()
    by_name, by_identity = seen.select("run", "host", "name"), seen.select("run", "host", "kind", *IDENTITY)
    if by_name.n_unique() == by_identity.n_unique() == seen.height:
        return nics.drop(IDENTITY)
    spans = nics.group_by(_KEYS).agg(first_s=pl.min("wall_s"), last_s=pl.max("wall_s"))
    interfaces = [InterfaceSpan(**row) for row in spans.iter_rows(named=True)]
    interfaces.sort(key=attrgetter("last_s", "first_s", "name"), reverse=True)
    for place in dict.fromkeys((interface.run, interface.host) for interface in interfaces):
        _name(interface for interface in interfaces if (interface.run, interface.host) == place)
    columns = {key: [getattr(interface, key) for interface in interfaces] for key in (*_KEYS, "known_as")}
    names = pl.DataFrame(columns, {key: nics.schema.get(key, pl.String) for key in columns})
    named = nics.join(names, on=_KEYS, how="left", nulls_equal=True, maintain_order="left")
    return named.with_columns(name=pl.col("known_as")).drop(*IDENTITY, "known_as")


def _name(interfaces: Iterable[InterfaceSpan]) -> None:
    """Set the names of the interfaces of one host, which come in the order of their last samples, the latest first."""
    earliest: list[InterfaceSpan] = []  # of each that was named so far
    taken: set[str] = set()
    for interface in interfaces:
        place = next((place for place, other in enumerate(earliest) if interface.becomes(other)), None)
        if place is not None:
            interface.known_as = earliest[place].known_as
            earliest[place] = interface
            continue
        number, interface.known_as = 1, interface.name
        while interface.known_as in taken:
            number += 1
            interface.known_as = f"{interface.name} ({number})"
        taken.add(interface.known_as)
        earliest.append(interface)
