"""Renders a run by the records of an earlier run, in a process that has neither the cluster file nor the matrix."""

from __future__ import annotations

from jobs.plugins import plugin_store
from jobs.rendering.render import CLUSTER_FILE, RenderContext
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.files import json_file
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace


def read_render_context(run_dir: RunDir, run: Run) -> RenderContext:
    """The values with which `run` is rendered, except predictions.

    run_dir: the folder of the earlier run, which contains the file of the cluster. run: the run that will be rendered. Raises
    InputError or WorkspaceError if the cluster cannot be read.
    """
    workspace = Workspace(run_dir.path.parent.parent)
    return RenderContext(
        matrix=run.matrix,
        cluster=_read_cluster(run_dir),
        scheduler=run.scheduler,
        own_templates=workspace.own_templates,
        template_digests=run.templates,
        source=run.source or "",
        packages=run.packages or "",
        data_path=run.data_path,
        proofs_path=run.proofs_path or "",
        versions=run.versions,
        git_commit=run.git_commit,
        created=run.created,
        frozen_plugins_folder=plugin_store.find_store(workspace),
    )


def _read_cluster(run_dir: RunDir) -> Cluster:
    """The cluster with which the earlier run was submitted."""
    cluster = json_file.read_json(run_dir.path / CLUSTER_FILE, Cluster, "is not a cluster of this version: {}.")
    if cluster is None:
        raise InputError(f"{run_dir.path / CLUSTER_FILE}: no such file.")
    return cluster
