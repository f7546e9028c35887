"""The state of the services that `provision` manages: whether they run, since when, and whether they start at boot."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from provision.fact import Fact

TIME = ("systemd-timesyncd", "ntp", "ntpsec", "openntpd")  # services other than chrony that set the clock
SLURM = ("munge", "mariadb", "slurmdbd", "slurmctld", "slurmd")
UNITS = ("chrony", *TIME, *SLURM, "nfs-server", "nvidia-persistenced", "nvidia-fabricmanager")
_MOMENT = "%a %Y-%m-%d %H:%M:%S.%f UTC"


class Service(msgspec.Struct, frozen=True):
    """The state of a service that is installed on a machine."""

    state: str  # the state that systemd reports: active, inactive, failed, ...
    enabled: bool  # whether the service starts at boot
    since_s: float | None  # when its process started, in seconds since the epoch; None: the service has no process


def command(python: str) -> list[str]:
    """The command that asks systemd about all services at once."""
    wanted = ["Id", "LoadState", "ActiveState", "UnitFileState", "ExecMainStartTimestamp"]
    return ["systemctl", "show", "--timestamp=us+utc", *(f"--property={name}" for name in wanted), "--", *UNITS]


def parse(stdout: str) -> dict[str, Service]:
    """The installed services, by name. Raises ValueError."""
    services = {}
    for block in stdout.split("\n\n"):
        said = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if said.get("LoadState") != "loaded":
            continue
        moment = said.get("ExecMainStartTimestamp", "")
        since = datetime.strptime(moment, _MOMENT).replace(tzinfo=UTC).timestamp() if moment and moment != "n/a" else None
        enabled = said.get("UnitFileState") in ("enabled", "static", "generated")
        services[said["Id"].removesuffix(".service")] = Service(said.get("ActiveState", ""), enabled, since)
    return services


SERVICES = Fact("services", command, parse, timeout_s=30)
