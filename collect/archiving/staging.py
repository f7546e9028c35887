"""Makes the folder whose files become an archive: a workspace with the chosen files, the cluster, and a new report."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from collect import write_report
from collect.archiving import anonymous, contents
from collect.archiving.anonymous import Pseudonyms
from collect.archiving.contents import ArchivedCommand, ArchiveSource
from collect.reading import own_metrics
from collect.reading.load import LoadedMatrix, load_matrix
from collect.summary import Summary, summarize
from shardlab import url
from shardlab.cluster import cluster
from shardlab.cluster.cluster import Cluster
from shardlab.files import files
from shardlab.hardware.host import Host
from shardlab.matrix.command import find_sent_folders_path
from shardlab.plugins import command_copies
from shardlab.runs.run import Run
from shardlab.transfer import manifest
from shardlab.workspace import archive
from shardlab.workspace.archive import LeftOutFile
from shardlab.workspace.workspace import Workspace

# Why cluster.yaml is left out: the values that the archived cluster file lacks, because they may be secret.
MISSING_VALUES_REASON = (
    f"{archive.CLUSTER_FILE} has its content without ssh.identity, slurm.setup, slurm.extra, the "
    "bindings and the portal_url of cloudlab, and without users, passwords and queries of URLs"
)


class RunEnvironment(msgspec.Struct, frozen=True):
    """The versions of packages and the git commit that some runs used. Runs with the same software share one entry."""

    runs: list[str]
    versions: dict[str, str]
    git_commit: str | None


class ArchivedEnvironment(msgspec.Struct, frozen=True):
    """The content of environment.json."""

    schema: int
    software: list[RunEnvironment]
    hosts: dict[str, Host]
    """The machines by name, as the first run on each machine recorded it."""


def copy_files(folder: Path, archive_sources: Sequence[ArchiveSource], pseudonyms: Pseudonyms | None) -> list[LeftOutFile]:
    """Copy files into `folder`. Returns the files that were not copied because names in them cannot be replaced.

    pseudonyms: replaces names in contents and file names; None: files are copied unchanged.
    """
    left_out = []
    for source in archive_sources:
        target = folder / (source.archive_path if pseudonyms is None else pseudonyms.replace_names_in_text(source.archive_path))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (
                files.as_workspace_error("copy"),
                files.open_regular(source.path) as source_file,
                target.open("xb") as target_file,
            ):
                if pseudonyms is None:
                    shutil.copyfileobj(source_file, target_file)
                else:
                    anonymous.copy_with_pseudonyms(source.archive_path, source_file, target_file, pseudonyms)
        except anonymous.UnsearchableFile as error:
            target.unlink()
            left_out.append(LeftOutFile(source.archive_path, source.size_bytes, str(error)))
    return left_out


def pack_commands(folder: Path, loaded: LoadedMatrix, archived_commands: Sequence[ArchivedCommand]) -> None:
    """Write the files of commands into `folder`, an archive for each command, and the list of these beside the matrix file."""
    if not archived_commands:
        return
    files.make_folder(folder / archive.COMMANDS_FOLDER)
    for digest, frozen_copy in {command.sent_folder.digest: command.frozen_copy for command in archived_commands}.items():
        packed_files = command_copies.pack_files(frozen_copy, command_copies.list_copy(frozen_copy))
        files.write_new(folder / archive.COMMANDS_FOLDER / f"{digest}.tar.gz", packed_files)
    matrix_path = folder / contents.MATRIX_FOLDER / Path(loaded.expansion.path).name
    files.write_new(
        find_sent_folders_path(matrix_path), files.encode_json([command.sent_folder for command in archived_commands])
    )


def write_descriptions(
    folder: Path, loaded: LoadedMatrix, cluster_config: Cluster, pseudonyms: Pseudonyms | None
) -> list[LeftOutFile]:
    """Write three files into `folder`: the expansion of the matrix, the cluster without its secrets, and environment.json.

    Returns cluster.yaml with the reason why it is left out, if the archived cluster is not the same.
    """
    expansion = loaded.expansion
    archived_expansion = msgspec.structs.replace(expansion, path=f"{contents.MATRIX_FOLDER}/{Path(expansion.path).name}")
    public_cluster = _encode_public_cluster(cluster_config)
    content_by_path = {
        f".shardlab/matrices/{expansion.name}.json": msgspec.json.encode(archived_expansion),
        archive.ENVIRONMENT_FILE: msgspec.json.encode(_collect_environment(loaded)),
        archive.CLUSTER_FILE: public_cluster,
    }
    for relative_path, content in content_by_path.items():
        document_path = folder / relative_path
        document_path.parent.mkdir(parents=True, exist_ok=True)
        archived_content = content if pseudonyms is None else pseudonyms.replace_names(content)
        files.write_new(document_path, msgspec.json.format(archived_content, indent=2) + b"\n")
    if public_cluster == cluster.encode_resolved_file(cluster_config):
        return []
    return [LeftOutFile("cluster.yaml", None, MISSING_VALUES_REASON)]


def finish_workspace(folder: Path, matrix_name: str, original_workspace: Workspace) -> Summary:
    """Write the manifests of the runs in `folder` and the report of the matrix. Returns the summary of the report.

    original_workspace: the workspace that is archived. If its own metrics may be executed, the report contains them.
    """
    staged_workspace = Workspace(folder)
    for run in staged_workspace.list_run_dirs():
        manifest.write_manifest(run, manifest.make_manifest(run, manifest.list_files(run.path), is_complete=True))
    return write_matrix_report(staged_workspace, matrix_name, original_workspace)


def write_matrix_report(workspace: Workspace, matrix_name: str, original_workspace: Workspace) -> Summary:
    """Write the report of a matrix, and return its summary. original_workspace: as in `finish_workspace`."""
    loaded = load_matrix(workspace, matrix_name)
    workspace_metrics = own_metrics.compute_own_metrics(workspace, matrix_name, original_workspace=original_workspace)
    workspace_metrics.add_to_runs(loaded)
    summary = summarize(loaded, loaded.expansion.baseline)
    summary.remarks.extend(workspace_metrics.list_remarks())
    write_report.write_report(workspace.report, workspace, loaded, summary)
    return summary


def _collect_environment(loaded: LoadedMatrix) -> ArchivedEnvironment:
    runs_by_software: dict[bytes, tuple[Run, list[str]]] = {}
    host_by_name: dict[str, Host] = {}
    for loaded_run in loaded.runs:
        run_file = loaded_run.folder.read_run()
        software_key = msgspec.json.encode((run_file.versions, run_file.git_commit))
        runs_by_software.setdefault(software_key, (run_file, []))[1].append(loaded_run.run_id)
        for host in loaded_run.hosts:
            host_by_name.setdefault(host.host, host)
    software = [RunEnvironment(ids, first_run.versions, first_run.git_commit) for first_run, ids in runs_by_software.values()]
    return ArchivedEnvironment(1, software, host_by_name)


def _encode_public_cluster(cluster_config: Cluster) -> bytes:
    """The content of the archived cluster file, without the values that MISSING_VALUES names."""
    replace, slurm, experiment = msgspec.structs.replace, cluster_config.slurm, cluster_config.cloudlab
    public_cluster = replace(
        cluster_config,
        ssh=replace(cluster_config.ssh, identity=None),
        slurm=slurm and replace(slurm, setup=[], extra={}),
        cloudlab=experiment and replace(experiment, bindings={}, portal_url=None),
    )
    return url.remove_secrets(cluster.encode_resolved_file(public_cluster).decode()).encode()
