"""The scripts that start Python at a site: `bin/python` for shardlab's commands, `bin/rank-python` for ranks in a container."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import templates
from provision import software
from provision.operation import Write
from shardlab.cluster import container, tool_caches
from shardlab.cluster.cluster import Cluster
from shardlab.remote.login_shell import make_login_argv


def make_script_changes(cluster: Cluster, folder: PurePosixPath, source: str) -> list[Write]:
    """The changes that write the scripts of the environment in `folder`. source: the digest of the source that they use."""
    python_path = f"{folder}/bin/python"
    changes = [Write("write the script that starts Python", python_path, render_script(cluster, folder, source), 0o755, "")]
    if cluster.environment.container is not None:
        path, script = container.find_rank_python(cluster, python_path), render_script(cluster, folder, source, for_ranks=True)
        changes.append(Write("write the script that starts the Python of ranks in the container", path, script, 0o755, ""))
    return changes


def render_script(cluster: Cluster, folder: PurePosixPath, source_digest: str, *, for_ranks: bool = False) -> bytes:
    """The content of a script that loads the site's modules and starts an interpreter.

    for_ranks: True for the interpreter of the container image, which ranks use; False for the interpreter of the environment.
    """
    environment_keys = cluster.environment
    python_path = f"{folder}/bin/python"
    return templates.render(
        "site/python.sh.j2",
        modules=environment_keys.modules,
        setup=cluster.slurm.setup if cluster.slurm is not None else [],
        wrapper=python_path,
        caches=list_cache_variables(folder),
        source=f"{folder}/source-{source_digest}",
        interpreter="python3" if for_ranks else f"{environment_keys.use or f'{folder}/venv'}/bin/python",
        ranks=for_ranks,
        rank_python=container.find_rank_python(cluster, python_path),
        in_container=for_ranks and environment_keys.runtime == "pyxis",  # with pyxis, srun starts ranks in the container
        runtime=environment_keys.runtime,
        image=environment_keys.container,
        folders=container.list_mounts(cluster),
        gpus=has_gpus(cluster),
    ).encode()


def list_installed_extras(cluster: Cluster) -> tuple[str, ...]:
    """The extras of shardlab that are installed: none with a container, because ranks use the packages of the image."""
    return () if cluster.environment.container is not None else software.INSTALLED_EXTRAS


def list_requirements(cluster: Cluster) -> tuple[str, ...]:
    """The requirements that pip installs into the environment."""
    return software.list_required_packages(list_installed_extras(cluster), tuple(cluster.environment.packages))


def digest_packages(cluster: Cluster) -> str:
    """The digest of the packages that pip installs into the environment."""
    return software.compute_packages_digest(list_installed_extras(cluster), tuple(cluster.environment.packages))


def list_cache_variables(folder: PurePosixPath) -> list[tuple[str, str]]:
    """Environment variables that move the caches of tools out of $HOME, where users of a site have a small quota."""
    return tool_caches.list_cache_variables(folder.parent / "cache")


def has_gpus(cluster: Cluster) -> bool:
    """Whether a job of the site may have GPUs."""
    partitions = cluster.slurm.partitions if cluster.slurm is not None else []
    gpu_sections = [*([cluster.gpus] if cluster.gpus is not None else []), *(partition.gpus for partition in partitions)]
    return any(gpu_section.per_node for gpu_section in gpu_sections)


def wrap_with_modules(cluster: Cluster, argv: Sequence[str], variables: Sequence[tuple[str, str]] = ()) -> list[str]:
    """A command line that loads the site's modules in a login shell and then executes `argv`. variables: names with values."""
    setup_lines = list(cluster.slurm.setup) if cluster.slurm is not None else []
    setup_lines += [f"module load {module_name}" for module_name in cluster.environment.modules]
    setup_lines += [f"export {module_name}='{variable_value}'" for module_name, variable_value in variables]
    # The test of an exit code is on a line of its own, because a line of slurm.setup may end with a comment.
    script_text = "\n".join([*(f"{setup_line}\ntest $? = 0 || exit 1" for setup_line in setup_lines), 'exec "$@"'])
    return make_login_argv(script_text, *argv)
