"""Makes sure that a service runs, starts at boot, and has read the current version of its files."""

from __future__ import annotations

from collections.abc import Sequence

from provision.facts.files import FILES
from provision.facts.services import SERVICES
from provision.operations import Change, Run, Target


def running(target: Target, name: str, reads: Sequence[str], *, changed: bool = False) -> list[Change]:
    """The changes that a service needs: none, enable, start, or restart. Raises Unanswered.

    It is restarted if the files that it reads are about to change (`changed`), or are newer than its process: then a restart is
    missing, for example because provisioning was killed before it.
    """
    found = target.facts[SERVICES].get(name)
    changes: list[Change] = []
    if found is None or not found.enabled:
        changes.append(Run(f"enable {name}, so that it starts at every boot", ["systemctl", "enable", "--quiet", name]))
    files = target.facts[FILES]
    newest = max((files[path].written_s for path in reads if path in files), default=0.0)
    if found is None or found.state != "active" or found.since_s is None:
        changes.append(Run(f"start {name}", ["systemctl", "restart", name], 120))
    elif changed or newest > found.since_s:
        changes.append(Run(f"restart {name}, because its files have changed", ["systemctl", "restart", name], 120))
    return changes
