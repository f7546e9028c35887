"""Makes sure that a service runs, starts at boot, and has read the current version of its files."""

from __future__ import annotations

from collections.abc import Sequence

from provision.facts.files import FILES
from provision.facts.services import SERVICES
from provision.operation import Change, RunCommand, Target


def plan_running_service(target: Target, name: str, read_paths: Sequence[str], *, config_changed: bool = False) -> list[Change]:
    """The changes that the service `name` needs: none, enable, start, or restart. Raises Unanswered.

    read_paths: the files that the service reads. config_changed: whether earlier changes of the plan write these files.
    The service is restarted if `config_changed`, or if a file in `read_paths` is newer than the process of the service: an
    earlier `provision` may have been killed after it wrote the file and before it restarted the service.
    """
    service = target.facts[SERVICES].get(name)
    changes: list[Change] = []
    if service is None or not service.enabled:
        changes.append(RunCommand(f"enable {name}, so that it starts at every boot", ["systemctl", "enable", "--quiet", name]))
    file_by_path = target.facts[FILES]
    newest_file_s = max((file_by_path[path].written_s for path in read_paths if path in file_by_path), default=0.0)
    if service is None or service.state != "active" or service.since_s is None:
        changes.append(RunCommand(f"start {name}", ["systemctl", "restart", name], 120))
    elif config_changed or newest_file_s > service.since_s:
        changes.append(RunCommand(f"restart {name}, because its files have changed", ["systemctl", "restart", name], 120))
    return changes
