"""A service that runs, comes back after a boot, and has read its files as they are now."""

from __future__ import annotations

from collections.abc import Sequence

from provision.facts.files import FILES
from provision.facts.services import SERVICES
from provision.operations import Change, Run, Target


def running(target: Target, name: str, reads: Sequence[str], *, changed: bool = False) -> list[Change]:
    """What is to be done for it: nothing, or enable, or start. Raises Unanswered.

    It is started anew where what it reads is about to change (`changed`), or is younger than its process: then a start was
    missed, as when provisioning was killed between the two.
    """
    found = target.facts[SERVICES].get(name)
    changes: list[Change] = []
    if found is None or not found.enabled:
        changes.append(Run(f"have {name} start at every boot", ["systemctl", "enable", "--quiet", name]))
    files = target.facts[FILES]
    newest = max((files[path].written_s for path in reads if path in files), default=0.0)
    if found is None or found.state != "active" or found.since_s is None:
        changes.append(Run(f"start {name}", ["systemctl", "restart", name], 120))
    elif changed or newest > found.since_s:
        changes.append(Run(f"start {name} anew, as what it reads has changed", ["systemctl", "restart", name], 120))
    return changes
