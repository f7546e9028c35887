"""Says where the numbers of a report come from: the runs of each cell with hosts and files, and the software and hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from collect.findings.row import CellRow, RunRow
from collect.findings.traffic import HostTraffic, RunTraffic
from collect.loading.loaded_run import LoadedRun
from collect.loading.records import NO_FOLDER_STATE
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.summary import Summary
from collect.verdicts import reasons
from shardlab.terminal import notation
from shardlab.terminal.table import Column, Table, TextPiece
from shardlab.workspace import handles

RUN_METRICS = ("throughput_per_s", "step_time_ms", "final_loss")  # the metrics of which the table of runs has columns


class RunProvenance(msgspec.Struct, frozen=True):
    """The hosts on which a run ran, and the files that the run wrote."""

    hosts: list[str]
    """The names of the hosts."""
    files: list[str] | None
    """The names of record files and subfolders in the run folder; None if there is no run folder."""


class CellProvenance(msgspec.Struct, frozen=True):
    """Where the numbers of a cell come from."""

    configuration: str
    """The hash of the cell; "" if no run of the cell has a run.json."""
    rehearsal: str
    """How the runs differ from what the study ran, if the runs are a rehearsal; else ""."""
    runs: dict[str, RunProvenance]
    """The runs of the cell by run id."""

    def make_runs_table(self, row: CellRow, label: str, table_columns: Sequence[Column[CellRow]]) -> Table[RunRow]:
        """The runs of a cell. row: the row of the cell. label: its label. table_columns: the columns of the table of cells, of
        which some are shown for each run, too."""

        def make_metric_column(column: Column[CellRow]) -> Column[RunRow]:
            unit = column.unit or (row.metrics[column.name].unit if column.name in row.metrics else "")
            return Column(column.heading, lambda run: run.metrics.get(column.name), unit, is_number=True)

        columns: list[Column[RunRow]] = [
            *([handles.make_handle_column(lambda run: f"{row.handle}.{run.repeat}")] if row.handle else []),
            Column(
                "Run", lambda run: run.run_id, is_number=False, is_code=True,
                link=lambda run: "" if self.runs[run.run_id].files is None else f"{run.run_id}/",
            ),
            Column("State", lambda run: run.state, state=lambda run: run.state),
            Column("Hosts", lambda run: ", ".join(self.runs[run.run_id].hosts), is_number=False),
            *(make_metric_column(column) for column in table_columns if column.name in RUN_METRICS),
            Column(
                "Files", separator=" ",
                pieces=lambda run: [TextPiece(name, f"{run.run_id}/{name}") for name in self.runs[run.run_id].files or ()],
            ),
            Column("Why", lambda run: run.why, is_number=False),
        ]  # fmt: skip
        return Table(f"Runs of {label}", columns, row.runs)


def find_cell_provenance(loaded: LoadedCell) -> CellProvenance:
    """Say where the numbers of one cell come from. loaded: the cell with its runs."""
    cell_hashes = [run.run.cell_hash for run in loaded.runs if run.run]
    runs = {run.run_id: _find_run_provenance(run) for run in loaded.runs}
    return CellProvenance(cell_hashes[0] if cell_hashes else "", reasons.explain_rehearsal(loaded), runs)


def _find_run_provenance(run: LoadedRun) -> RunProvenance:
    if run.verdict == NO_FOLDER_STATE:
        return RunProvenance([], None)
    records_by_name = {
        "run.json": run.run,
        "result.json": run.result,
        "steps/": run.steps.height,
        "samples/": run.samples.hosts.height,
        "trace/": run.breakdowns,
        "memory/": run.memory,
    }
    return RunProvenance(
        list(dict.fromkeys(host.host for host in run.hosts)), [name for name, exists in records_by_name.items() if exists]
    )


def list_run_properties(loaded: LoadedMatrix) -> list[tuple[str, list[str]]]:
    """The cluster, launchers, code, package versions and data of all runs.

    Returns a list of (name of a property such as "Launchers", the different values of this property in the runs).
    """
    runs = [run for run in loaded.runs if run.run]
    properties: dict[str, list[str]] = {"Cluster": [], "Launchers": [], "Own workloads": [], "Own strategies": []}
    properties |= {"Git commit": [], "Versions": [], "Data": []}
    for run in runs:
        assert run.run is not None
        properties["Cluster"].append(", ".join(f"{key} {value}" for key, value in run.run.cluster.items()))
        properties["Launchers"].append(run.run.launcher)
        if (workload := run.run.own_workload) is not None:
            properties["Own workloads"].append(f"{workload.name}: {workload.file}, digest of its code {workload.code}")
        if (strategy := run.run.own_strategy) is not None:
            properties["Own strategies"].append(f"{strategy.name}: {strategy.file}, digest of its code {strategy.code}")
        properties["Git commit"].append(run.run.git_commit or "not in a git repository")
        if run.result and run.result.data:
            data = run.result.data
            synthetic_mark = " (synthetic)" if data.get("synthetic") else ""
            properties["Data"].append(f"{data.get('name', 'unnamed')}{synthetic_mark}, SHA-256 {data.get('sha256', 'unknown')}")
    versions = list_environments([_merge_run_versions(run) for run in runs])
    properties["Versions"] = [", ".join(f"{name} {version}" for name, version in sorted(entry.items())) for entry in versions]
    return [(property_name, list(dict.fromkeys(values))) for property_name, values in properties.items() if values]


def list_environments(reports: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The different environments in these reports. A report is {name of a package: version}.

    Some reports name fewer packages than others: a failed run wrote no result, and a result does not contain the version of
    Python. Two reports are of the same environment if there is no package for which they give different versions.
    """
    merged: list[dict[str, str]] = []
    for report in sorted(reports, key=len, reverse=True):
        same_environment = next(
            (entry for entry in merged if all(entry.get(name, version) == version for name, version in report.items())), None
        )
        if same_environment is None:
            merged.append(dict(report))
        else:
            same_environment |= report
    return [entry for entry in merged if entry]


def _merge_run_versions(run: LoadedRun) -> dict[str, str]:
    """The package versions of a run: the versions when it was submitted, replaced by the versions that its ranks imported."""
    assert run.run is not None
    return run.run.versions | (run.result.versions if run.result else {})


def describe_hosts(loaded: LoadedMatrix) -> list[tuple[str, list[tuple[str, str]]]]:
    """The hosts on which runs ran. A host that was rebooted between runs is listed once for each boot.

    Returns a list of (name of the host, [(name of a property such as "Memory", value of the property)]).
    """
    host_by_boot = {(host.host, host.boot_id): host for run in loaded.runs for host in run.hosts}
    descriptions = []
    for host in host_by_boot.values():
        gpu_names = ", ".join(f"{gpu.name} ({gpu.uuid})" for gpu in host.gpus or ())
        nic_texts = [f"{nic.name} ({nic.kind}{f', {nic.speed_mbps} Mbit/s' if nic.speed_mbps else ''})" for nic in host.nics]
        host_properties = [
            ("Processors", f"{host.cpus_allowed} of {host.cpus}, {host.cpu_model or 'model unknown'}"),
            ("Memory", f"{notation.format_number(host.memory_bytes / notation.GIB, 3)} GiB"),
            ("GPUs", gpu_names or f"no GPU{f' ({host.gpu_why_absent})' if host.gpu_why_absent else ''}"),
            ("Network", ", ".join(nic_texts) or "no interface"),
            ("System", f"{host.system}, kernel {host.kernel}"),
            ("Python", ", ".join([host.python, *(f"{name} {version}" for name, version in sorted(host.packages.items()))])),
        ]
        descriptions.append((host.host, host_properties))
    return descriptions


MOST_TRAFFIC_RUNS = 100  # the most runs that the table of traffic shows; summary.json contains all runs


class HostCoverage(NamedTuple):
    """How complete the telemetry of a host is, over all runs on the host."""

    host: str
    runs: int
    samples: int
    lowest_pct: float | None
    """The lowest share of the timed steps of a run that telemetry covers."""
    largest_gap_s: float | None
    """The longest time without a sample."""
    incomplete: int
    """The number of runs whose telemetry does not cover all timed steps."""


def make_record_tables(summary: Summary) -> list[Table[Any]]:
    """The tables of the quality of the records that have rows: how complete the telemetry of each host is, and the traffic."""
    tables: list[Table[Any]] = [_make_coverage_table(summary), _make_traffic_table(summary)]
    return [table for table in tables if table.rows]


def _make_coverage_table(summary: Summary) -> Table[HostCoverage]:
    rows = []
    for host in dict.fromkeys(entry.host for entry in summary.telemetry):
        entries = [entry for entry in summary.telemetry if entry.host == host]
        shares = [entry.coverage_pct for entry in entries if entry.coverage_pct is not None]
        gaps_s = [entry.largest_gap_s for entry in entries if entry.largest_gap_s is not None]
        samples, incomplete = sum(entry.samples for entry in entries), sum(bool(entry.incomplete) for entry in entries)
        rows.append(HostCoverage(host, len(entries), samples, min(shares, default=None), max(gaps_s, default=None), incomplete))
    columns: list[Column[HostCoverage]] = [
        Column("Telemetry of host", lambda row: row.host),
        Column("Runs", lambda row: row.runs),
        Column("Samples", lambda row: row.samples),
        Column("Lowest coverage of a timed window", lambda row: row.lowest_pct, "%", digits=3),
        Column("Largest gap", lambda row: row.largest_gap_s, "s", digits=2),
        Column("Incomplete", lambda row: row.incomplete or None, "runs"),
    ]
    return Table("Coverage of telemetry", columns, rows)


def _make_traffic_table(summary: Summary) -> Table[tuple[RunTraffic, HostTraffic | None]]:
    """The network traffic of the first MOST_TRAFFIC_RUNS runs, one row per run and host."""
    columns: list[Column[tuple[RunTraffic, HostTraffic | None]]] = [
        Column("Traffic of run", lambda row: row[0].run),
        Column("Host", lambda row: row[1].host if row[1] else "", is_number=False),
        Column("Interface with the most", lambda row: f"{row[1].interface} ({row[1].kind})" if row[1] else "unknown"),
        Column("Share of all interfaces", lambda row: round(row[1].share_pct) if row[1] else None, "%"),
        Column("RDMA", lambda row: {True: "yes", False: "no", None: "unknown"}[row[0].rdma]),
        Column("Known from", lambda row: row[0].why, is_number=False),
    ]
    no_host: list[HostTraffic | None] = [None]
    rows = [(run, host) for run in summary.traffic[:MOST_TRAFFIC_RUNS] for host in run.hosts or no_host]
    hidden_runs = len(summary.traffic) - MOST_TRAFFIC_RUNS
    hidden_note = f" {hidden_runs:,} more runs are in summary.json." if hidden_runs > 0 else ""
    return Table("Traffic", columns, rows, note=f"Traffic: of all programs of the host, in the timed steps.{hidden_note}")
