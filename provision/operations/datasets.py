"""Stages the data sets of cluster.yaml in the data path, where runs read them."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from provision.datasets.stage import DataSetState, StageRequest
from provision.fact import Unanswered, decode_last_line
from provision.node import find_error_line
from provision.operation import Change, LocalCall, Nothing, Operation, Site, Target, Write
from provision.site import jobs, requests
from shardlab import url
from shardlab.cluster import first_node
from shardlab.cluster.cluster_keys import DataSet
from shardlab.remote import remote_workspace
from templates import render

JOB_MINUTES = 12 * 60  # time limit of a job that stages; ImageNet has 1.3 million files
INSPECT_S, STAGE_S = 120.0, 24 * 3600.0  # time limits: to look for a data set, and to stage it, such as a download of ImageNet
NOT_FOUND = (126, 127)  # exit codes of a command that cannot be started
# Errors of an environment that is not complete, or of an older version of shardlab, which expects the request as an argument.
NO_ENVIRONMENT = ("No module named", "missing 1 required positional argument: 'request'")


class NoEnvironment(Unanswered):
    """Raised if the node has no complete Python environment, whose programs look at the data sets."""


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Stage each data set that is missing, and verify existing data sets once. Raises Unanswered."""
    data_sets = site.cluster.data.list_data_sets()
    if not data_sets:
        return Nothing("cluster.yaml names no data sets under data.sets")
    changes: list[Change] = []
    for data_set in data_sets:
        stage_request = _make_request(site, data_set)
        try:
            state = _ask_node(target, "look", stage_request, INSPECT_S)
        except NoEnvironment:  # the operation that makes the environment was only planned, or --only excludes it
            data_set_name = data_set.name
            later_description = (
                f"look for the data set {data_set_name}, and stage it if it is missing, once the Python environment is made"
            )
            changes.append(LocalCall(later_description, functools.partial(_ask_node, target, "stage", stage_request, STAGE_S)))
            continue
        if not state.can:
            raise Unanswered(f"{target.node.name}: {state.says}.")
        if state.makes and site.cluster.provider == "slurm":
            changes += _plan_staging_job(site, target, data_set, stage_request, state)
        elif not state.ready:
            changes.append(LocalCall(state.says, functools.partial(_ask_node, target, "stage", stage_request, STAGE_S)))
    return changes or Nothing(f"{', '.join(data_set.name for data_set in data_sets)}: staged and unchanged")


def _plan_staging_job(site: Site, target: Target, data_set: DataSet, request_json: str, state: DataSetState) -> list[Change]:
    """The changes that stage a data set in a job, as login nodes of a Slurm site must not unpack archives or copy folders.

    Raises Unanswered if a job of an earlier command that stages this data set has not ended yet.
    """
    staging_folder = f"{site.cluster.storage.shared}/datasets"
    script_path, log_path, request_path = (f"{staging_folder}/{data_set.name}.{suffix}" for suffix in ("sh", "log", "request"))
    jobs.check_no_waiting_job(target.node, script_path, f"stages the data set {data_set.name}")
    changes: list[Change] = []
    if data_set.is_url and site.cluster.environment.build != "job":  # at most sites, only the login node can download
        download_archive = functools.partial(_ask_node, target, "download", request_json, STAGE_S)
        changes.append(LocalCall(f"download {url.remove_secrets(data_set.archive or '')} on the login node", download_archive))
    sbatch_options = [
        f"--job-name={jobs.JOB_NAME}",
        f"--output={log_path}",
        *requests.list_sbatch_options(site.cluster, node_count=1, minutes=JOB_MINUTES),
    ]
    script_text = render(
        "site/dataset.sh.j2",
        options=sbatch_options,
        data_set=data_set.name,
        data_path=_find_data_path(site),
        python=target.node.python,
        request=request_path,
    )
    changes.append(Write(f"send the request to stage {data_set.name}", request_path, request_json.encode(), 0o600, ""))
    changes.append(Write(f"send the script that stages {data_set.name}", script_path, script_text.encode(), 0o755, ""))
    return [*changes, jobs.make_script_submission(f"{state.says}, in a job", script_path, log_path, STAGE_S)]


def _make_request(site: Site, data_set: DataSet) -> str:
    archive_source = data_set.archive
    if archive_source is not None and not data_set.is_url:
        archive_source = str(site.workspace.resolve_path(archive_source))
    return msgspec.json.encode(StageRequest(_find_data_path(site), data_set.name, archive_source, data_set.sha256)).decode()


def _find_data_path(site: Site) -> str:
    """The folder from which runs read data sets.

    A relative path, or the default path, is inside the workspace that stores the runs: this workspace, or, if commands about
    runs are executed on the nodes, the workspace there.
    """
    cluster, workspace = site.cluster, site.workspace
    if cluster.slurm is not None:
        shared_folder = cluster.storage.shared
        is_here = shared_folder is not None and workspace.real_path.is_relative_to(Path(shared_folder).resolve())
    else:
        is_here = cluster.provider == "local" or first_node.is_on_first_node(cluster)
    run_workspace = workspace if is_here else remote_workspace.find_twin_workspace(workspace, cluster)
    return str(run_workspace.find_data_folder(cluster.data.path))


def _ask_node(target: Target, verb: str, request_json: str, timeout_s: float) -> DataSetState:
    stage_words = [target.node.python, "-m", "provision.datasets", verb]
    # other users can read argv, and scripts
    stage_output = target.node.run(stage_words, timeout_s=timeout_s, stdin=request_json.encode())
    name = f"{target.node.name}: the data sets"
    if stage_output.code is None:
        raise Unanswered(f"{name}: not finished within {timeout_s:g} s; run the same command again.")
    if stage_output.code in NOT_FOUND or any(text in stage_output.stderr for text in NO_ENVIRONMENT):
        raise NoEnvironment(f"{name}: its Python environment is not made yet; run the same command without --only and --skip.")
    if stage_output.code != 0:
        raise Unanswered(f"{name}: {find_error_line(stage_output)}")
    try:
        return decode_last_line(stage_output.stdout, DataSetState)
    except ValueError as error:
        raise Unanswered(f"{name}: the answer cannot be read: {error}") from None


DATASETS = Operation("datasets", plan)
