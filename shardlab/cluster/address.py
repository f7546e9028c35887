"""How to log in to a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

HostKeys = Literal["strict", "accept-new"]


class Address(msgspec.Struct, frozen=True):
    """How to log in to a machine. If a field is None, `~/.ssh/config` decides."""

    host: str
    """An address, or a name from ~/.ssh/config."""
    port: int | None = None
    user: str | None = None
    identity: Path | None = None
    """The private key."""
    known_hosts: Path | None = None
    """The workspace's file of host keys, used in addition to the user's file."""
    host_keys: HostKeys = "strict"
    shared: bool = False
    """Whether all our commands share one connection (shared_connection), as for the login node of a site."""
