"""Makes the Python environment of a Slurm site in its shared folder, without root and with nothing under $HOME.

The name of the environment's folder contains the digest of its packages, so that queued runs keep the environment with which
they were submitted. In this folder, `bin/python` is a script that loads the site's modules and starts the interpreter, and
`venv` is the virtual environment. With a container, `bin/rank-python` starts the interpreter of the image, and `venv` has only
the packages of shardlab's commands.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import templates
from provision import software
from provision.facts.environment import ENVIRONMENT
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target, Write, plan_each_environment
from provision.operations import space
from provision.site import jobs, python, requests
from provision.site.package_check import PackageCheck
from provision.site.wheels import PIP_WORDS, WheelDownload
from shardlab.cluster import container
from shardlab.cluster.environment_keys import Environment

MAKE_S = 600.0
INSTALL_S = 4 * 3600.0  # the time limit for a job's wait in the queue and its installation
INSTALL_MINUTES = 60
LIST_MINUTES = 15  # time limit of a job that lists packages; pyxis may first have to import the image
# Makes the virtual environment. $1: the folder of the environment. $2: the interpreter.
MAKE_VENV = """\
set -e
mkdir -p "$1/tmp"
rm -rf "$1/venv" "$1/packages.made"
"$2" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$2 is $("$2" --version 2>&1); shardlab needs Python 3.11 or newer: set environment.modules or environment.python" >&2
    exit 1
}
"$2" -m venv "$1/venv"
"""
# Submits the script $2 as a job, waits for the job, and prints the list of packages that the job wrote into the folder $1.
SUBMIT_AND_SHOW = f"""\
{requests.WITHOUT_VARIABLES}
mkdir -p -- "$1" && cd "$1" || exit 1
rm -f -- packages.log packages.txt
printf '%s' "$2" > list_packages.sh
sbatch --wait --parsable list_packages.sh > /dev/null || {{
    test ! -s packages.log || echo "$(tail -n 1 packages.log) (see $1/packages.log)" >&2
    exit 1
}}
cat packages.txt
"""
UNPACK_SCRIPT = """\
set -e
cd "$1"
rm -rf "source-$2"; mkdir "source-$2"; tar -x -C "source-$2" -f "source-$2.tar" --no-same-owner; rm "source-$2.tar"
"""


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the environment of a site, or bring it to the current packages and source. Raises Unanswered."""
    folder = PurePosixPath(target.node.python).parent.parent
    environment = site.cluster.environment
    installed = target.facts[ENVIRONMENT]
    source, changes = software.digest_source(), list[Change]()
    packages_digest = python.digest_packages(site.cluster)
    script_changes = python.make_script_changes(site.cluster, folder, source)
    is_damaged = installed.incomplete is not None or (installed.source is not None and installed.version is None)
    if installed.packages != packages_digest or is_damaged:
        if environment.use or environment.container:
            changes += [*script_changes, _make_package_check(site, target, folder)]
        changes += [_make_mark(folder, packages_digest)] if environment.use else _plan_installation(site, target, folder)
    if changes or installed.source != source:
        archive_path = f"{folder}/source-{source}.tar"
        changes.append(Write(f"send shardlab's own source ({source})", archive_path, software.make_source_archive(), 0o644, ""))
        changes.append(_make_user_command("unpack this source", ["sh", "-c", UNPACK_SCRIPT, "unpack", str(folder), source]))
        changes += [script_change for script_change in script_changes if script_change not in changes]
        changes.append(Write("mark this source as complete", f"{folder}/source.made", f"{source}\n".encode(), 0o644, ""))
    difference_text = f"; {_describe_packages(environment)}: {installed.differences}" if installed.differences else ""
    return changes or Nothing(f"{folder}: packages {packages_digest}, source {source}{difference_text}")


def _describe_packages(environment_keys: Environment) -> str:
    """A text KEY: VALUE, the entry of the cluster file for the packages that `provision` did not install."""
    if environment_keys.container is not None:
        return f"environment.container: {environment_keys.container}"
    return f"environment.use: {environment_keys.use}"


def _make_package_check(site: Site, target: Target, folder: PurePosixPath) -> PackageCheck:
    """The change that checks packages which `provision` did not install: on the login node if possible, otherwise in a job."""
    environment_keys = site.cluster.environment
    rank_python = container.find_rank_python(site.cluster, target.node.python)
    packages_entry, mounted_folders = _describe_packages(environment_keys), " ".join(container.list_mounts(site.cluster))
    folder_advice = "Is this the folder of a virtual or conda environment?"
    if environment_keys.container is not None:
        folder_advice = f"Does {environment_keys.runtime} start this image there?"
    if environment_keys.runtime == "charliecloud":
        folder_advice += f" The image must contain folders for what is mounted: {mounted_folders}"
    if environment_keys.container is None or (environment_keys.runtime != "pyxis" and environment_keys.build != "job"):
        return PackageCheck(
            packages_entry,
            ["env", f"--chdir={folder}", rank_python, "-c", software.LISTING_PROGRAM],
            folder,
            MAKE_S,
            folder_advice,
        )
    sbatch_options = [
        f"--job-name={jobs.LISTING_NAME}",
        f"--output={folder}/packages.log",
        *requests.list_sbatch_options(site.cluster, node_count=1, minutes=LIST_MINUTES),
    ]
    job_script = templates.render(
        "site/list_packages.sh.j2",
        options=sbatch_options,
        folder=str(folder),
        container=container.list_srun_options(site.cluster, str(folder)),
        python=rank_python,
        program=software.LISTING_PROGRAM,
    )
    submit_argv = ["sh", "-c", SUBMIT_AND_SHOW, "submit", str(folder), job_script]
    return PackageCheck(packages_entry, submit_argv, folder, INSTALL_S, folder_advice, job_script=f"{folder}/list_packages.sh")


def _make_mark(folder: PurePosixPath, packages_digest: str) -> Write:
    return Write("mark these packages as checked", f"{folder}/packages.made", f"{packages_digest}\n".encode(), 0o644, "")


def _plan_installation(site: Site, target: Target, folder: PurePosixPath) -> list[Change]:
    """The changes that make the virtual environment and install the packages.

    Raises Unanswered if there is too little space, or if a job of an earlier command still installs the packages.
    """
    environment_keys = site.cluster.environment
    space.check_environment_fits(target, from_index=environment_keys.wheelhouse is None)
    if environment_keys.build != "login":
        jobs.check_no_waiting_job(target.node, f"{folder}/install.sh", "installs the packages")
    python_path = environment_keys.python or "python3"
    constraints_bytes = software.read_constraints(tuple(environment_keys.packages))
    venv_command = python.wrap_with_modules(site.cluster, ["sh", "-c", MAKE_VENV, "venv", str(folder), python_path])
    changes: list[Change] = [
        _make_user_command(f"make a Python environment at {folder}", venv_command),
        Write("send the tested package versions", f"{folder}/constraints.txt", constraints_bytes, 0o644, ""),
    ]
    wheel_folder = environment_keys.wheelhouse
    if wheel_folder is None and environment_keys.build == "auto":
        wheel_folder = f"{folder}/wheels"
        changes.append(_make_wheel_download(site, target, folder, wheel_folder))
    script_path = f"{folder}/install.sh"
    changes.append(
        Write("send the script that installs the packages", script_path, _make_script(site, folder, wheel_folder), 0o755, "")
    )
    if environment_keys.build == "login":
        changes.append(_make_user_command("install the packages on the login node", ["bash", script_path], INSTALL_S))
    else:
        changes.append(
            jobs.make_script_submission("install the packages in a job", script_path, f"{folder}/install.log", INSTALL_S)
        )
    return changes


def _make_wheel_download(site: Site, target: Target, folder: PurePosixPath, wheel_folder: str) -> WheelDownload:
    """The change that downloads all packages as wheels into the folder `wheel_folder`.

    If the package index has no wheel of a package, pip builds the wheel: the job that installs it cannot get build tools.
    """
    requirements = python.list_requirements(site.cluster)
    python_path = f"{folder}/venv/bin/python"
    pip_variables = [*python.list_cache_variables(folder), ("TMPDIR", f"{folder}/tmp")]  # pip must not use /tmp, which is small
    pip_words = [
        "-I",
        *PIP_WORDS,
        "wheel",
        "--wheel-dir",
        wheel_folder,
        "--constraint",
        f"{folder}/constraints.txt",
        *requirements,
    ]
    return WheelDownload(
        download_words=python.wrap_with_modules(site.cluster, [python_path, *pip_words], pip_variables),
        interpreter_words=python.wrap_with_modules(site.cluster, [python_path]),
        folder=PurePosixPath(wheel_folder),
        requirements=requirements,
        local_folder=None if site.cluster.login is None else site.workspace.shardlab_folder,
    )


def _make_script(site: Site, environment_folder: PurePosixPath, wheel_folder: str | None) -> bytes:
    slurm_keys = site.cluster.slurm
    sbatch_options = [
        f"--job-name={jobs.JOB_NAME}",
        f"--output={environment_folder}/install.log",
        *requests.list_sbatch_options(site.cluster, node_count=1, minutes=INSTALL_MINUTES),
    ]
    return templates.render(
        "site/install.sh.j2",
        options=sbatch_options,
        folder=str(environment_folder),
        modules=site.cluster.environment.modules,
        setup=slurm_keys.setup if slurm_keys is not None else [],
        caches=[*python.list_cache_variables(environment_folder), ("TMPDIR", f"{environment_folder}/tmp")],
        wheels=wheel_folder,
        requirements=python.list_requirements(site.cluster),
        digest=python.digest_packages(site.cluster),
    ).encode()


def _make_user_command(description: str, command_words: list[str], limit_s: float = MAKE_S) -> RunCommand:
    return RunCommand(description, command_words, limit_s, root=False)


SITE_SOFTWARE = Operation("site-environment", plan_each_environment(plan))
