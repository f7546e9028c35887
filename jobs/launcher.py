"""What a launcher says of itself and the command line that it makes of a run."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shardlab import registry
from shardlab.errors import UnknownName
from shardlab.run import Run


class Launcher(msgspec.Struct, frozen=True):
    """A launcher on the menu.

    rehearsal: what it starts shows that the line works, not how fast it is. command: argv that starts all ranks of a run on
    this node, to be run in the run's folder, for a path of the Python interpreter.
    """

    name: str
    summary: str
    rehearsal: bool
    command: Callable[[Run, str], list[str]]


def launchers() -> dict[str, Launcher]:
    """Every launcher by name."""
    return {module.LAUNCHER.name: module.LAUNCHER for module in registry.load_all("jobs.launchers")}


def launcher(name: str) -> Launcher:
    """The launcher with this name. Raises UnknownName with the menu."""
    menu = launchers()
    if name not in menu:
        raise UnknownName("launcher", name, menu)
    return menu[name]
