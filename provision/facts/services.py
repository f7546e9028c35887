"""The state of the services that `provision` manages: whether they run, since when, and whether they start at boot."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from provision.fact import FactQuery

TIME_SERVICES = ("systemd-timesyncd", "ntp", "ntpsec", "openntpd")  # services other than chrony that set the clock
SLURM_SERVICES = ("munge", "mariadb", "slurmdbd", "slurmctld", "slurmd")
ASKED_UNITS = ("chrony", *TIME_SERVICES, *SLURM_SERVICES, "nfs-server", "nvidia-persistenced", "nvidia-fabricmanager")
_TIME_FORMAT = "%a %Y-%m-%d %H:%M:%S.%f UTC"


class Service(msgspec.Struct, frozen=True):
    """The state of a service that is installed on a machine."""

    state: str
    """The state that systemd reports: active, inactive, failed, ..."""
    enabled: bool
    """Whether the service starts at boot."""
    since_s: float | None
    """When its process started, in seconds since the epoch; None: the service has no process."""


def build_command(python: str) -> list[str]:
    """The command that asks systemd about all services at once."""
    property_names = ["Id", "LoadState", "ActiveState", "UnitFileState", "ExecMainStartTimestamp"]
    return ["systemctl", "show", "--timestamp=us+utc", *(f"--property={name}" for name in property_names), "--", *ASKED_UNITS]


def parse(stdout: str) -> dict[str, Service]:
    """The installed services, by name. Raises ValueError."""
    service_by_name = {}
    for unit_block in stdout.split("\n\n"):
        fields = dict(line.split("=", 1) for line in unit_block.splitlines() if "=" in line)
        if fields.get("LoadState") != "loaded":
            continue
        text = fields.get("ExecMainStartTimestamp", "")
        start_s = datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC).timestamp() if text and text != "n/a" else None
        is_enabled = fields.get("UnitFileState") in ("enabled", "static", "generated")
        service_by_name[fields["Id"].removesuffix(".service")] = Service(fields.get("ActiveState", ""), is_enabled, start_s)
    return service_by_name


SERVICES = FactQuery("services", build_command, parse, timeout_s=30)
