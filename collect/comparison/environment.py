"""Finds properties of machines and software that differ between runs: possible reasons for different results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from collect.loading.loaded_run import LoadedRun
from shardlab.terminal import notation


def collect_properties(runs: Iterable[LoadedRun]) -> dict[str, list[str]]:
    """{name of a property: its sorted values over all runs}, without host names: another equal machine is no reason."""
    values_by_property: dict[str, set[str]] = {}

    def add_value(label: str, value: str | None) -> None:
        if value:
            values_by_property.setdefault(label, set()).add(value)

    for run in runs:
        for host in run.hosts:
            gpu_names = [gpu.name for gpu in host.gpus or ()]
            add_value("GPU", ", ".join(f"{gpu_names.count(name)} x {name}" for name in dict.fromkeys(gpu_names)) or "none")
            add_value("GPU driver", host.gpu_driver)
            add_value("processor", host.cpu_model)
            add_value("processors allowed", str(host.cpus_allowed))
            add_value("memory", f"{notation.format_number(host.memory_bytes / notation.GIB, 3)} GiB")
            speeds_mbps = [nic.speed_mbps for nic in host.nics if nic.kind != "loopback" and nic.speed_mbps]
            add_value("network", f"{max(speeds_mbps)} Mbit/s" if speeds_mbps else None)
            add_value("system", host.system)
            add_value("kernel", host.kernel)
            add_value("Python", host.python)
        if run.run:
            add_value("git commit", run.run.git_commit)
            add_value("installed packages (digest)", run.run.packages)
            add_value("cluster", ", ".join(f"{key} {value}" for key, value in sorted(run.run.cluster.items())))
            versions = (run.result.versions if run.result else {}) or run.run.versions
            for package, version in versions.items():
                add_value(package, version)
    return {property_name: sorted(values) for property_name, values in values_by_property.items()}


def find_property_differences(
    before: Mapping[str, list[str]], after: Mapping[str, list[str]]
) -> list[tuple[str, list[str], list[str]]]:
    """Compare two results of `collect_properties`. Returns (property, its values in `before`, its values in `after`) for each
    property that is known in both and differs."""
    return [(name, before[name], after[name]) for name in before if name in after and before[name] != after[name]]
