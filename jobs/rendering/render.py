"""Writes the run folders of a matrix. A run folder contains run.json and the script that the scheduler starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import msgspec

import templates
from jobs.launcher import find_launcher
from jobs.planner import machine as planned_machine
from jobs.plugins import own_plugins, plugin_store
from jobs.plugins.own_plugins import OwnPlugins
from jobs.rendering import frozen_source, python_environment, sbatch_options, scripts
from jobs.rendering.preview import Preview
from jobs.rendering.python_environment import PythonEnvironment
from jobs.scheduler import find_scheduler
from jobs.status.reconcile import find_blocking_status
from shardlab import __version__
from shardlab.cluster import container, tool_caches
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.login_node import PYTHON_VARIABLE
from shardlab.cluster.slurm_cluster import choose_slurm_cluster
from shardlab.errors import ShardlabError
from shardlab.files import files, source_digest
from shardlab.hardware import host
from shardlab.matrix import batch_search
from shardlab.matrix.batch_search import BatchSearch
from shardlab.matrix.cell import AnyCell, Cell
from shardlab.matrix.expansion import ExpandedCell, Expansion
from shardlab.matrix.matrix import Matrix
from shardlab.matrix.retry import Retry
from shardlab.runs import prediction
from shardlab.runs.prediction import Prediction
from shardlab.runs.run import Run, World, is_rehearsal, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.runs.trace_part import TracePart
from shardlab.workspace.workspace import Workspace

# the file with the cluster, in the folder of each run whose supervisor may render another run for the same cluster
CLUSTER_FILE = "cluster.json"


class RenderContext(msgspec.Struct, frozen=True, dict=True):
    """The values that are the same for all runs that are rendered together."""

    matrix: str
    """The name of the matrix."""
    cluster: Cluster
    """The cluster."""
    scheduler: str
    """The name of the scheduler."""
    own_templates: Path | None
    """The workspace's folder of templates, which replace shipped templates of the same name; or None."""
    template_digests: dict[str, str]
    """By the name of the file, the SHA-256 of every template from which the scheduler's scripts may be rendered, and of the
    files that these templates include."""
    source: str
    """As in `Run`."""
    packages: str
    """As in `Run`."""
    data_path: str
    """As in `Run`."""
    proofs_path: str
    """As in `Run`."""
    versions: dict[str, str]
    """As in `Run`."""
    git_commit: str | None
    """As in `Run`."""
    created: str
    """As in `Run`."""
    frozen_plugins_folder: Path
    """The folder of the frozen copies of plug-ins."""
    wait_gpus_s: int = 0
    """As in `Run`."""
    track: str | None = None
    """As in `Run`."""
    plugins: OwnPlugins = OwnPlugins()
    """The plug-ins of the workspace."""
    predictions: dict[str, Prediction] = {}
    """The planner's prediction for a run, by the name of its cell."""
    retry: Retry = Retry()
    """The key `retry` of the matrix; for a new attempt, `retry` of the earlier attempt."""
    search_by_family: dict[str, BatchSearch] = {}
    """The searches to which runs may belong, by the text that `batch_search.compute_search_hash` gives for all cells of a
    search."""
    trace_part_by_cell: dict[str, TracePart] = {}
    """What a run analyses, if it does not train, by the name of its cell."""
    workspace: Workspace | None = None
    """The workspace with the inventory of the environments; None: the runs are rendered by the records of earlier runs."""

    preview: Preview | None = None
    """How the scripts are rendered for reading; None: they are rendered for this machine."""

    def find_search(self, cell: AnyCell) -> BatchSearch | None:
        """The search of which a run of this cell is a try; None if the cell belongs to no search."""
        family = batch_search.compute_search_hash(cell.require_training()) if self.search_by_family else ""
        return self.search_by_family.get(family)

    def read_environment(self, name: str | None) -> PythonEnvironment:
        """The Python environment of a cell, as it is now. name: as in the cell. Raises InputError if it cannot be used."""
        default_environment = PythonEnvironment(self.packages, self.versions)
        if name is None or self.workspace is None or self.preview is not None:
            return default_environment
        if name not in self._environments:
            environment = python_environment.read_environment(self.workspace, self.cluster, name)
            shardlab_version = {"shardlab": __version__}
            self._environments[name] = msgspec.structs.replace(environment, versions=environment.versions | shardlab_version)
        return self._environments[name]

    @cached_property
    def _environments(self) -> dict[str, PythonEnvironment]:
        """The environments that were read, by name: each is read only once, because its interpreter has to start."""
        return {}

    @cached_property
    def _has_gpus_by_type(self) -> dict[str | None, bool]:
        """For each GPU type that a cell may name, and for None: whether nodes with GPUs are known."""
        return {name: planned_machine.plan_machine(self.cluster, name).on_gpu for name in (None, *self.cluster.gpu_types)}

    def plans_rehearsal(self, cell: AnyCell) -> bool:
        """Whether a run of this cell is planned as a rehearsal, because its ranks will have no GPUs or for another reason."""
        on_gpus = find_launcher(cell.launcher).on_gpus and self._has_gpus_by_type.get(cell.gpu_type, True)
        trains_on_cpu = not on_gpus and isinstance(cell, Cell)
        return is_rehearsal(cell, make_cluster_record(self), on_cpu=trains_on_cpu)


def make_render_context(
    matrix: str,
    cluster: Cluster,
    workspace: Workspace,
    *,
    wait_gpus_s: int = 0,
    in_allocation: bool = False,
    track: str | None = None,
    plugins: OwnPlugins | None = None,
) -> RenderContext:
    """Collect the values that all runs of a matrix have in common.

    matrix: the name of the matrix. in_allocation: whether the runs start in the Slurm allocation of this process. wait_gpus_s,
    track: as in `Run`. plugins: the plug-ins of the workspace.
    """
    scheduler_name = "local" if cluster.provider == "local" else "ssh" if cluster.slurm is None else "slurm"
    scheduler_name = "allocation" if in_allocation else scheduler_name
    template_names = dict.fromkeys(
        name
        for name in find_scheduler(scheduler_name).TEMPLATES
        for name in templates.list_template_names(name, workspace.own_templates)
    )
    return RenderContext(
        matrix=matrix,
        cluster=cluster,
        scheduler=scheduler_name,
        own_templates=workspace.own_templates,
        template_digests={name: templates.template_digest(name, workspace.own_templates) for name in template_names},
        source=str(frozen_source.find_source_copies_folder(workspace) / source_digest.digest_source()),
        packages=source_digest.digest_installed_packages(),
        data_path=str(workspace.find_data_folder(cluster.data.path)),
        proofs_path=str(workspace.shardlab_folder / "proofs"),
        versions={**host.read_package_versions(), "shardlab": __version__, "python": sys.version.split()[0]},
        git_commit=host.read_git_commit(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        frozen_plugins_folder=plugin_store.find_store(workspace),
        wait_gpus_s=wait_gpus_s,
        track=track,
        plugins=plugins or OwnPlugins(),
        workspace=workspace,
    )


def render_for_reading(context: RenderContext, preview: Preview) -> RenderContext:
    """The same values for runs in the workspace on the cluster, whose scripts are only read."""
    preview_workspace = Workspace(preview.workspace_path)
    return msgspec.structs.replace(
        context,
        preview=preview,
        source=str(frozen_source.find_source_copies_folder(preview_workspace) / Path(context.source).name),
        data_path=str(preview_workspace.find_data_folder(context.cluster.data.path)),
        proofs_path=str(preview_workspace.shardlab_folder / "proofs"),
    )


def list_own_file_remarks(context: RenderContext) -> list[str]:
    """A remark for each template and each plug-in file of the workspace that the runs use: another person may have written
    them."""
    templates_folder = context.own_templates
    template_paths = (
        [templates_folder / name for name in context.template_digests if (templates_folder / name).exists()]
        if templates_folder is not None
        else []
    )
    plugins = context.plugins.workloads.by_name.values()
    workload_files = [plugin.file for plugin in plugins if not plugin.is_data and not plugin.name.endswith("-tiny")]
    strategy_files = dict.fromkeys(plugin.file for plugin in context.plugins.strategies.by_name.values())
    return [
        *(f"scripts are rendered from the workspace's own template {path}." for path in template_paths),
        *(f"runs execute the workspace's own workload {path}." for path in workload_files),
        *(f"runs execute the workspace's own strategies {path}." for path in strategy_files),
    ]


def make_cluster_record(context: RenderContext) -> dict[str, str]:
    """The name and the provider of the cluster, and the cluster of Slurm if one is chosen, as run.json records them. Raises
    InputError."""
    slurm_cluster = choose_slurm_cluster(context.cluster) if context.scheduler == "slurm" else None
    slurm_record = {"slurm": slurm_cluster} if slurm_cluster is not None else {}
    return {"name": context.cluster.name, "provider": context.cluster.provider, **slurm_record}


def make_run(
    cell: AnyCell,
    repeat: int,
    attempt: int,
    context: RenderContext,
    resume: Sequence[str] = (),
    avoid: Sequence[str] = (),
    retried: Sequence[str] = (),
) -> Run:
    """The content of run.json for one attempt at one repeat of a cell.

    resume: the ids of the runs from whose checkpoints the run may resume, the preferred run first. avoid: the names of nodes
    that the run must not use. retried: as in `Run`.
    """
    slurm = context.cluster.slurm
    environment = context.read_environment(cell.environment)
    return Run(
        schema=1,
        run_id=make_run_id(cell, repeat, attempt),
        matrix=context.matrix,
        cell=cell,
        cell_hash=cell.hash(),
        repeat=repeat,
        attempt=attempt,
        launcher=cell.launcher,
        rehearsal=context.plans_rehearsal(cell),
        scale="full" if cell.rehearses is None else "tiny",
        world=World(cell.nnodes, cell.world_size // cell.nnodes, cell.world_size),
        cluster=make_cluster_record(context),
        data_path=context.data_path,
        data_stage=context.cluster.data.stage,
        versions=environment.versions,
        git_commit=context.git_commit,
        templates=context.template_digests,
        created=context.created,
        proofs_path=context.proofs_path,
        resume=list(resume),
        scheduler=context.scheduler,
        source=context.source,
        packages=environment.packages,
        python=environment.python,
        limit_s=cell.time_limit_s or (slurm.time_s if slurm is not None else None),
        requeues=slurm.requeue if slurm is not None and context.scheduler == "slurm" else 0,
        retry=context.retry,
        retried=list(retried),
        avoid=list(avoid),
        shares_nodes=slurm is not None and context.scheduler == "slurm" and not slurm.exclusive,
        separate_folders=context.scheduler == "ssh" and context.cluster.has_separate_folders,
        track=context.track,
        wait_gpus_s=context.wait_gpus_s,
        own_workload=context.plugins.find_workload(cell),
        own_strategy=context.plugins.find_strategy(cell),
        traces=context.trace_part_by_cell.get(cell.name()),
        search=context.find_search(cell),
    )


def render_script(
    run: Run, run_folder: Path, cluster: Cluster, own_templates: Path | None, preview: Preview | None = None
) -> str:
    """The text of the run's script. `write` writes it into the run's folder; a dry run only prints it.

    run_folder: the run's folder. cluster: the cluster. own_templates: the workspace's folder of templates. preview: as in
    `RenderContext`.
    """
    python, run_launcher = run.python or os.environ.get(PYTHON_VARIABLE, sys.executable), find_launcher(run.launcher)
    python, unknown_notes = (python, ()) if preview is None else (preview.interpreter, preview.unknown_notes)
    if preview is not None and run.cell.environment is not None:
        unknown_notes = (
            *unknown_notes,
            f"the run uses the interpreter of the environment {run.cell.environment} instead of this one",
        )
    cluster = cluster.for_environment(run.cell.environment)
    template_values = {
        "run": run,
        "folder": run_folder,
        "python": python,
        "unknown": unknown_notes,
        "caches": _list_cache_variables(cluster),
    }
    rank_python = container.find_rank_python(cluster, python)
    container_options = container.list_srun_options(cluster, str(run_folder), copies_to_node_disk=run.data_stage == "node")
    if run.scheduler == "local":
        template_values["command"] = run_launcher.make_node_argv(run, python)
    elif run.scheduler == "allocation":
        template_values["command"] = run_launcher.make_srun_argv(
            run, rank_python, overlap=True, container_options=container_options
        )
    elif run.scheduler == "ssh":
        template_values["command"] = [python, "-m", "jobs.ssh.step", ".", "--", *run_launcher.make_task_argv(run, python)]
    else:
        template_values["command"] = run_launcher.make_srun_argv(run, rank_python, container_options=container_options)
        template_values["options"] = sbatch_options.list_sbatch_options(run, cluster)
    return scripts.render_template(find_scheduler(run.scheduler).TEMPLATE, own_templates, **template_values)


def _list_cache_variables(cluster: Cluster) -> list[tuple[str, str]]:
    """Variables that move the caches of the ranks' tools, as (name, value). On CloudLab the caches are moved out of the home
    folder: home folders are on NFS over the control network, which is meant only for logins."""
    return tool_caches.list_cache_variables(cluster.workspaces / ".cache") if cluster.provider == "cloudlab" else []


def write_run_folder(
    run: Run, runs_dir: Path, context: RenderContext, *, prepare: Callable[[RunDir], None] | None = None
) -> RunDir:
    """Create the folder of a run with all its files; if an error occurs, no folder is created.

    runs_dir: the folder of all runs. prepare: called with the new folder before anybody else can see it.

    Raises ShardlabError if the folder exists and its run was, or may have been, submitted. The error is not an InputError,
    because the command may have rendered other runs before.
    """
    final_folder = RunDir(runs_dir / run.run_id)
    replaces_folder = final_folder.path.exists()
    if replaces_folder:
        if (blocking_status := find_blocking_status(final_folder)) is not None:
            raise ShardlabError(f"{blocking_status.id}: {blocking_status.why}")
        if final_folder.judge().state != "planned":
            raise ShardlabError(f"{final_folder.path}: this run was submitted already; `jobs retry` makes a new attempt.")
    run_dir = RunDir(runs_dir / f".{run.run_id}.{'tmp' if prepare is None else 'next'}")
    with files.as_workspace_error("render"):
        shutil.rmtree(run_dir.path, ignore_errors=True)
        run_dir.path.mkdir(parents=True)
    try:
        files.write_new(run_dir.run_json, files.encode_json(run))
        own_plugins.write_plugin_code(context.frozen_plugins_folder, run, run_dir.path)
        if (cell_prediction := context.predictions.get(run.cell.name())) is not None:
            files.write_new(prediction.find_prediction_path(run_dir.path), files.encode_json(cell_prediction))
        run_dir.log.mkdir()  # the folder must exist: Slurm ends a job without a message if it cannot open the job's output file
        script_text = render_script(run, final_folder.path, context.cluster, context.own_templates, context.preview)
        files.write_new(run_dir.path / find_scheduler(run.scheduler).SCRIPT, script_text.encode(), mode=0o755)
        if run.search is not None or (run.may_be_retried and run.scheduler != "slurm"):
            files.write_new(run_dir.path / CLUSTER_FILE, files.encode_json(context.cluster))
        run_dir.write_event("controller", "rendered", sync=False)
        if prepare is not None:
            prepare(run_dir)
        with files.as_workspace_error("render"):
            if replaces_folder:
                shutil.rmtree(final_folder.path)
            run_dir.path.rename(final_folder.path)  # fails if another process has created the folder in the meantime
    except ShardlabError:
        with contextlib.suppress(OSError):
            shutil.rmtree(run_dir.path)
        raise
    return final_folder


def store_expansion(
    workspace: Workspace, context: RenderContext, matrix: Matrix, cells: Sequence[AnyCell], repeats_by_cell: Mapping[str, int]
) -> None:
    """Save the expanded matrix in the workspace, for commands that read runs without their matrix file.

    cells: all cells of the matrix. repeats_by_cell: the number of runs of each cell, by the name of the cell.
    """
    is_tiny = any(cell.rehearses for cell in cells)
    workspace.store_expansion(
        Expansion(
            schema=1,
            name=context.matrix,
            title=f"{matrix.file.title} (rehearsal at scale tiny)" if is_tiny else matrix.file.title,
            path=str(Path(matrix.path).absolute()),
            cells=[
                ExpandedCell(
                    cell.name(),
                    cell,
                    [make_run_id(cell, repeat) for repeat in range(1, repeats_by_cell[cell.name()] + 1)],
                    context.find_search(cell),
                )
                for cell in cells
            ],
            excluded=matrix.excluded,
            settings=matrix.file.settings,
            baseline=matrix.file.baseline,
            traces=matrix.file.traces,
            assumed=matrix.file.assumed,
            notes=matrix.file.notes,
            citation=matrix.file.citation,
            deviations=matrix.file.deviations,
            scale="tiny" if is_tiny else "full",
            reported=matrix.file.reported,
            tables=matrix.file.tables,
            claims=matrix.file.claims,
        )
    )
