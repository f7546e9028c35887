"""Finds the samples of the same network interface, although the kernel may rename it, and give its old name to another one."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import msgspec
import polars as pl

IDENTITY_COLUMNS = {"mac": pl.String, "pci": pl.String}  # the columns that identify an interface in addition to its name
_INTERFACE_KEYS = ("run", "host", "kind", "name", *IDENTITY_COLUMNS)


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
    unique_name: str = ""
    """The name that all samples of the interface get."""

    def continues_as(self, later: InterfaceSpan) -> bool:
        """Whether `later` is the same interface with a new name or a new MAC address, so that its counters continue."""
        if self.last_s > later.first_s or (self.kind, self.pci) != (later.kind, later.pci):
            return False
        same_address = self.mac is not None and self.mac == later.mac
        return same_address or (self.pci is not None and self.name == later.name)


def unify_interface_names(nics: pl.DataFrame) -> pl.DataFrame:
    """Give each network interface the same unique name in all its samples of a run, and drop IDENTITY_COLUMNS.

    If udev renamed an interface, all its samples get its last name. If an interface was removed and created again, or took the
    name of another interface, then two interfaces with different counters have the same name. In this case, the interface that
    was seen last keeps the name, such as `eth0`, and the earlier interface is called `eth0 (2)`.
    """
    distinct_keys = nics.select(_INTERFACE_KEYS).unique()
    names_of_hosts = distinct_keys.select("run", "host", "name")
    identities_of_hosts = distinct_keys.select("run", "host", "kind", *IDENTITY_COLUMNS)
    if names_of_hosts.n_unique() == identities_of_hosts.n_unique() == distinct_keys.height:
        return nics.drop(IDENTITY_COLUMNS)
    spans = nics.group_by(_INTERFACE_KEYS, maintain_order=True).agg(first_s=pl.min("wall_s"), last_s=pl.max("wall_s"))
    interfaces = [InterfaceSpan(**row) for row in spans.iter_rows(named=True)]
    interfaces.sort(key=attrgetter("last_s", "first_s", "name"), reverse=True)
    for host_key in dict.fromkeys((interface.run, interface.host) for interface in interfaces):
        _set_unique_names(interface for interface in interfaces if (interface.run, interface.host) == host_key)
    name_columns = {key: [getattr(interface, key) for interface in interfaces] for key in (*_INTERFACE_KEYS, "unique_name")}
    unique_names = pl.DataFrame(name_columns, {key: nics.schema.get(key, pl.String) for key in name_columns})
    named_nics = nics.join(unique_names, on=_INTERFACE_KEYS, how="left", nulls_equal=True, maintain_order="left")
    return named_nics.with_columns(name=pl.col("unique_name")).drop(*IDENTITY_COLUMNS, "unique_name")


def _set_unique_names(interfaces: Iterable[InterfaceSpan]) -> None:
    """Set `unique_name` of each span of one host in one run, the same for spans of the same interface.

    interfaces: the spans, the latest first, by their last sample.
    """
    earliest_spans: list[InterfaceSpan] = []  # the earliest span of each interface that has a name so far
    names_in_use: set[str] = set()
    for interface in interfaces:
        index = next((index for index, other in enumerate(earliest_spans) if interface.continues_as(other)), None)
        if index is not None:
            interface.unique_name = earliest_spans[index].unique_name
            earliest_spans[index] = interface
            continue
        number, interface.unique_name = 1, interface.name
        while interface.unique_name in names_in_use:
            number += 1
            interface.unique_name = f"{interface.name} ({number})"
        names_in_use.add(interface.unique_name)
        earliest_spans.append(interface)
