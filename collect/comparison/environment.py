"""Finds properties of machines and software that differ between runs: possible reasons for different results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from collect.loading.loaded_run import LoadedRun
from shardlab.terminal import notation


def collect_properties(runs: Iterable[LoadedRun]) -> dict[str, list[str]]:
    """The properties of machines and software of some runs: {name of a property: its sorted values over all runs}.

    Host names are left out, because another machine of the same kind is no reason for different results.
    """
    values_by_property: dict[str, set[str]] = {}

    def add(label: str, value: str | None) -> None:
        if value:
            values_by_property.setdefault(label, set()).add(value)

    for run in runs:
        for host in run.hosts:
            gpus = [gpu.name for gpu in host.gpus or ()]
            add("GPU", ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none")
            add("GPU driver", host.gpu_driver)
            add("processor", host.cpu_model)
            add("processors allowed", str(host.cpus_allowed))
            add("memory", f"{notation.format_number(host.memory_bytes / notation.GIB, 3)} GiB")
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
    return {property_name: sorted(values) for property_name, values in values_by_property.items()}


def property_differences(
    before: Mapping[str, list[str]], after: Mapping[str, list[str]]
) -> list[tuple[str, list[str], list[str]]]:
    """Compare properties of two sets of runs. before, after: the properties of each set, from `collect_properties`.

    Returns (property, its values in `before`, its values in `after`) for each property that is known in both and differs.
    """
    return [(name, before[name], after[name]) for name in before if name in after and before[name] != after[name]]
