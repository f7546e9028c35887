"""How the machines and the software of the runs of A and B differ: possible reasons for different results."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from collect import notation
from collect.load import LoadedRun


class Difference(msgspec.Struct, frozen=True):
    """what, and every value that it has on either side; an empty side says nothing of it."""

    what: str
    a: list[str]
    b: list[str]


def differences(a: Iterable[LoadedRun], b: Iterable[LoadedRun]) -> list[Difference]:
    """All that differs and that both sides know."""
    ours, theirs = _told(a), _told(b)
    return [Difference(what, ours[what], theirs[what]) for what in ours if what in theirs and ours[what] != theirs[what]]


def _told(runs: Iterable[LoadedRun]) -> dict[str, list[str]]:
    """What -> its values over all runs, sorted. Names of hosts are left out: another machine of the same kind is no reason."""
    found: dict[str, set[str]] = {}

    def add(what: str, value: str | None) -> None:
        if value:
            found.setdefault(what, set()).add(value)

    for run in runs:
        for host in run.hosts:
            gpus = [gpu.name for gpu in host.gpus or ()]
            add("GPU", ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none")
            add("GPU driver", host.gpu_driver)
            add("processor", host.cpu_model)
            add("processors allowed", str(host.cpus_allowed))
            add("memory", f"{notation.number(host.memory_bytes / notation.GIB, 3)} GiB")
            speeds = [nic.speed_mbps for nic in host.nics if nic.kind != "loopback" and nic.speed_mbps]
            add("network", f"{max(speeds)} Mbit/s" if speeds else None)
            add("system", host.system)
            add("kernel", host.kernel)
            add("Python", host.python)
        if run.run:
            add("git commit", run.run.git_commit)
            add("cluster", ", ".join(f"{key} {value}" for key, value in sorted(run.run.cluster.items())))
            versions = (run.result.versions if run.result else {}) or run.run.versions
            for package, version in versions.items():
                add(package, version)
    return {what: sorted(values) for what, values in found.items()}
