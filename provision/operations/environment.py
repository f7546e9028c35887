"""Makes the same Python environment on all nodes: the tested packages and shardlab's source, each identified by a digest.

The build of torch is that of the wheelhouse, or pip's default for the version in constraints.txt.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from provision import software
from provision.facts.environment import ENVIRONMENT
from provision.facts.system import SYSTEM
from provision.node import Node
from provision.operation import Change, Nothing, Operation, Site, Target, Write, plan_each_environment, shell_change
from provision.operations import fstab

MAKE_S = 3600.0  # time limit of pip: torch with CUDA has gigabytes, and the network may be slow
PATH_FILE = "shardlab.pth"


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the environment on a node, or bring it to the current packages and source. Raises Unanswered."""
    node = target.node
    environment_folder = PurePosixPath(node.python).parent.parent
    if site.cluster.storage.shared is not None and target is not site.targets[0]:
        return Nothing(f"{site.targets[0].node.name} makes the environment for all nodes, on the shared storage")
    installed_environment = target.facts[ENVIRONMENT]
    owner = target.facts[SYSTEM].user
    changes: list[Change] = []
    own_packages = tuple(site.cluster.environment.packages)
    wanted_digest = software.compute_packages_digest(own_packages=own_packages)
    if installed_environment.packages != wanted_digest:
        changes += _plan_package_installation(environment_folder, owner, node, own_packages)
    wanted_source = software.digest_source()
    if changes or installed_environment.source != wanted_source:
        archive_path = f"{environment_folder}/source-{wanted_source}.tar"
        archive_bytes = software.make_source_archive()
        changes.append(
            Write(f"send shardlab's own source ({wanted_source})", archive_path, archive_bytes, 0o644, _file_owner(node, owner))
        )
        unpack_script = _render_unpack_script(node, environment_folder, owner, archive_path, wanted_source)
        changes.append(shell_change("make Python use this source", unpack_script, root=node.may_sudo))
    if changes:
        return [*fstab.make_mount_checks(site, target), *changes]
    return Nothing(f"{environment_folder}: packages {wanted_digest}, source {wanted_source}")


def _file_owner(node: Node, owner_name: str) -> str:
    """The value `owner` for `Write`: the user `owner_name`, or, on a node without sudo, empty: the user writes the file."""
    return f"{owner_name}:" if node.may_sudo else ""


def _plan_package_installation(folder: PurePosixPath, owner: str, node: Node, own_packages: tuple[str, ...]) -> list[Change]:
    """The changes that make the environment with its packages. The last command writes a file that marks it as complete.
    own_packages: packages of the cluster file.

    The environment is made in its final folder, because a Python environment cannot be moved.
    """
    wheelhouse = node.wheelhouse
    constraints_path = f"{folder}/constraints.txt"
    user_prefix, folder_command = (f"runuser -u {owner} -- ", f"install -d -o {owner}") if node.may_sudo else ("", "install -d")
    venv_script = f"rm -rf {folder}; {folder_command} {folder}; {user_prefix}{node.venv_python} -m venv {folder}"
    index_options = f"--no-index --find-links {wheelhouse}" if wheelhouse else ""
    requirement_words = " ".join(f"'{package}'" for package in software.list_required_packages(own_packages=own_packages))
    pip_command = f"{user_prefix}{folder}/bin/python -m pip --disable-pip-version-check -q install"
    pip_command += f" {index_options} -c {constraints_path} {requirement_words}"
    mark_command = f"printf '%s\\n' {software.compute_packages_digest(own_packages=own_packages)} > {folder}/packages.made"
    return [
        shell_change(f"make a Python environment at {folder}", venv_script, timeout_s=300, root=node.may_sudo),
        Write(
            "send the tested package versions",
            constraints_path,
            software.read_constraints(own_packages),
            0o644,
            _file_owner(node, owner),
        ),
        shell_change(
            "install the packages" + (f" from {wheelhouse}" if wheelhouse else ""),
            f"{pip_command}; {mark_command}",
            timeout_s=MAKE_S,
            root=node.may_sudo,
        ),
    ]


def _render_unpack_script(node: Node, folder: PurePosixPath, owner_name: str, archive_path: str, source_digest: str) -> str:
    """A shell script that unpacks the new source into a folder of its own, and then makes Python use it by one rename."""
    site_packages_command = f"$({folder}/bin/python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    return f"""\
new={folder}/source-{source_digest}
rm -rf "$new"; mkdir "$new"; tar -x -C "$new" -f {archive_path} --no-same-owner; rm {archive_path}
{f'chown -R {owner_name}: "$new"' if node.may_sudo else ""}
site={site_packages_command}
printf '%s\\n' "$new" > "$site/.{PATH_FILE}"; mv "$site/.{PATH_FILE}" "$site/{PATH_FILE}"
printf '%s\\n' {source_digest} > {folder}/source.made
find {folder} -maxdepth 1 -name 'source-*' ! -name source-{source_digest} -exec rm -rf {{}} +"""


SOFTWARE = Operation("environment", plan_each_environment(plan))
