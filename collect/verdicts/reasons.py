"""Lists possible reasons why a measured number differs from the number that a study printed.

The reasons come from the descriptions of the hosts and from the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from collect.findings import traffic
from collect.findings.row import CellRow
from collect.reading.load import LoadedCell, LoadedMatrix
from shardlab.matrix import cell_names
from shardlab.matrix.study import Assumed, Claim, Reported

_SIZE_KEYS = (
    "workload",
    "global_batch_size",
    "micro_batch_size",
    "seq_len",
    "steps",
    "epochs",
    "warmup_steps",
    "launcher",
    "nnodes",
)
# Keys of cells whose values influence speed and size. If the matrix had to assume the value of such a key, this is listed as a
# reason. The page of the report lists the assumed values of all keys.
_SPEED_KEYS = {
    "workload", "strategy", "nnodes", "global_batch_size", "gpu_batch_size", "micro_batch_size", "microbatches", "seq_len",
    "precision", "optimizer.name", "activation_checkpointing", "compile", "warmup_steps", "options.wrap", "options.image_size",
}  # fmt: skip
_PLACE_PATTERN = re.compile(r"(tables?|sections?|figures?)|(\d+(?:\.\d+)*)")
REHEARSAL_PREFIX = "rehearsal: "
ASSUMED_PREFIX = "assumed, because the study does not state it: "
_DATA_METRICS = {"final_loss", "final_accuracy_pct", "time_to_accuracy_s"}


def explain_rehearsal(cell: LoadedCell) -> str:
    """A sentence that says why the runs of a cell are only a rehearsal; "" if the runs are not a rehearsal."""
    if cell.cell.rehearses is not None:
        twin_cell, large_cell = cell.cell, cell.cell.rehearses
        changed_settings = [
            f"{key.replace('_', ' ')} {getattr(twin_cell, key)} instead of {getattr(large_cell, key)}"
            for key in _SIZE_KEYS
            if getattr(twin_cell, key) != getattr(large_cell, key)
        ]
        return f"{REHEARSAL_PREFIX}a tiny twin on CPU ({', '.join(changed_settings)}): absolute numbers are not comparable"
    if any(run.run and run.run.cluster.get("provider") == "virtual" for run in cell.runs):
        return f"{REHEARSAL_PREFIX}practice nodes, all on one machine's CPU: absolute numbers are not comparable"
    if any(run.is_rehearsal for run in cell.runs):
        return f"{REHEARSAL_PREFIX}ranks on CPU: absolute numbers are not comparable"
    return ""


def explain_uncounted_traffic(cell: LoadedCell, metric: str) -> str:
    """The reason why a claim about the traffic of a network cannot be judged: the ranks of a tiny twin ran on one host, and
    those of the cell that it represents run on several; or RDMA was used between nodes, or may have been. "" if none of this is
    so. metric: the name of the metric."""
    if not metric.startswith("network_"):
        return ""
    study_cell = cell.cell.rehearses
    if study_cell is not None and cell.cell.nnodes == 1 < study_cell.nnodes:
        return f"all ranks ran on one host here ({study_cell.nnodes} nodes in the study), so no bytes crossed a network"
    traffic_of_runs = [traffic.measure_run_traffic(run) for run in cell.completed_runs] if cell.cell.nnodes > 1 else []
    if any(run_traffic.rdma for run_traffic in traffic_of_runs if run_traffic):
        return f"the ranks sent by RDMA, whose bytes {metric} does not count"
    unknown = next((run_traffic.why for run_traffic in traffic_of_runs if run_traffic and run_traffic.rdma is None), "")
    return f"{metric} does not count bytes sent by RDMA, and whether it was used is not known: {unknown}" if unknown else ""


def list_likely_reasons(loaded: LoadedMatrix, cell: LoadedCell, row: CellRow, metric_names: set[str]) -> list[str]:
    """The possible reasons why measured numbers of a cell differ from the numbers of the study, one clause for each reason.

    The reasons are: another GPU, link, network or software than the study states, synthetic data, and values that the matrix
    had to assume. metric_names: the names of the metrics that are compared.
    """
    clauses = []
    hosts = [host for run in cell.completed_runs for host in run.hosts]
    gpu_names = sorted({gpu.name for host in hosts for gpu in host.gpus or ()})
    has_nvlink = any(gpu.nvlinks for host in hosts for gpu in host.gpus or ())
    nic_speeds_mbps = [nic.speed_mbps for host in hosts for nic in host.nics if nic.kind == "physical" and nic.speed_mbps]
    for setting in (setting for setting in loaded.expansion.settings if cell_names.matches_cell(row.cell, setting.cell)):
        if study_gpu := setting.gpu:
            if not gpu_names and hosts:
                clauses.append(f"no GPU here, {study_gpu} in the study")
            elif other_names := [name for name in gpu_names if study_gpu not in name]:
                clauses.append(f"another GPU: {', '.join(other_names)} here, {study_gpu} in the study")
        if (study_link := setting.link) and gpu_names and cell.cell.gpus > 1 and has_nvlink != (study_link == "NVLink"):
            clauses.append(
                f"another link between GPUs: {'NVLink' if has_nvlink else 'no NVLink'} here, {study_link} in the study"
            )
        study_mbps = setting.network_mbps
        if study_mbps and cell.cell.nnodes > 1 and nic_speeds_mbps and max(nic_speeds_mbps) != study_mbps:
            clauses.append(f"another network: {max(nic_speeds_mbps)} Mbit/s here, {study_mbps} Mbit/s in the study")
        for package, version in setting.software.items():
            results = [run.result for run in cell.completed_runs if run.result]
            other_names = sorted({_find_base_version(result.versions, package) for result in results} - {""})
            if different_versions := [other for other in other_names if not other.startswith(version)]:
                clauses.append(f"other software: {package} {', '.join(different_versions)} here, {version} in the study")
    if metric_names & _DATA_METRICS and any(run.result and run.result.data.get("synthetic") for run in cell.completed_runs):
        clauses.append("synthetic data here")
    value_of_name = cell_names.map_cell_values(row.cell.get("rehearses") or row.cell)
    for assumed_value in loaded.expansion.assumed:
        key = assumed_value.key
        if key in _SPEED_KEYS and key in value_of_name and _has_assumed_value(assumed_value, value_of_name[key]):
            clauses.append(f"{ASSUMED_PREFIX}{key} {str(value_of_name[key]).lower()}")
    return list(dict.fromkeys(clauses))


def list_adaptation_clauses(claim_or_number: Claim | Reported) -> list[str]:
    """The clause that says how the cells of a claim or a printed number differ from those of the study, because the matrix was
    adapted to the cluster; empty if they do not differ."""
    return [f"adapted to the cluster: {claim_or_number.adapted}"] if claim_or_number.adapted else []


def find_notes_at(loaded: LoadedMatrix, where: str) -> list[str]:
    """The notes of the matrix on a table, section or figure of the study. where: the place, such as `table 2`."""
    note_places = find_named_places(where)
    return [note.says for note in loaded.expansion.notes if note_places & find_named_places(note.where)]


def find_named_places(where: str) -> set[str]:
    """The places of a study that a text names: {section 3.1, section 4.1.2} for `sections 3.1 and 4.1.2`.

    A part of the text without a number, such as `abstract`, is a place, too.
    """
    place_names, place_kind, rest_of_text = set(), "", where
    for match in _PLACE_PATTERN.finditer(where):
        if match[1]:
            place_kind = match[1].rstrip("s")
        elif place_kind:
            place_names.add(f"{place_kind} {match[2]}")
    for place_part in re.split(r",| and ", rest_of_text):
        part_text = place_part.strip()
        if part_text and not _PLACE_PATTERN.search(part_text):
            place_names.add(part_text)
    return place_names


def find_common_clauses(clause_lists: Sequence[Sequence[str]]) -> list[str]:
    """The reasons that are in each of these lists of reasons."""
    return [
        clause for clause in (clause_lists[0] if clause_lists else ()) if all(clause in clauses for clauses in clause_lists)
    ]


def _find_base_version(versions: Mapping[str, str], package: str) -> str:
    return versions.get(package, "").partition("+")[0]


def _has_assumed_value(assumed_value: Assumed, value: Any) -> bool:
    """Whether a cell has the assumed value, or one of the assumed values if the entry is a list."""
    return value in assumed_value.value if isinstance(assumed_value.value, list) else bool(value == assumed_value.value)
