"""Makes the Python environment of a Slurm site in its shared folder, without root and with nothing under $HOME.

The folder is named by the digest of its packages, so that queued runs keep the environment that they were submitted with.
`bin/python` there is a script that loads the site's modules and starts the interpreter; `venv` is the virtual environment.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import templates
from provision import software
from provision.fact import Unanswered
from provision.facts.environment import ENVIRONMENT
from provision.node import last_line
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target, Write
from provision.operations import space
from provision.site import jobs, requests
from shardlab.cluster import Cluster

MAKE_S = 600.0
DOWNLOAD_S = 3600.0
INSTALL_S = 4 * 3600.0  # of waiting in the queue and of installing
INSTALL_MINUTES = 60
# $1: the folder. $2: the interpreter.
VENV = """\
set -e
mkdir -p "$1/tmp"
rm -rf "$1/venv" "$1/packages.made"
"$2" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$2 is $("$2" --version 2>&1); shardlab needs Python 3.11 or newer: set environment.modules or .python" >&2; exit 1; }
"$2" -m venv "$1/venv"
"""
UNPACK = """\
set -e
cd "$1"
rm -rf "source-$2"; mkdir "source-$2"; tar -x -C "source-$2" -f "source-$2.tar" --no-same-owner; rm "source-$2.tar"
"""


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Raises Unanswered."""
    python = PurePosixPath(target.node.python)
    folder = python.parent.parent
    environment = site.cluster.environment
    found = target.facts[ENVIRONMENT]
    source, changes = software.source_digest(), list[Change]()
    if found.packages != software.digest() or (found.source is not None and found.version is None):  # the latter: purged
        changes += _use(site, target, folder) if environment.use else _packages(site, target, folder)
    if changes or found.source != source:
        archive = f"{folder}/source-{source}.tar"
        changes.append(Write(f"send shardlab's own source ({source})", archive, software.source(), 0o644, ""))
        changes.append(_command("unpack this source", ["sh", "-c", UNPACK, "unpack", str(folder), source]))
        changes.append(
            Write("write the script that starts Python", str(python), wrapper(site.cluster, folder, source), 0o755, "")
        )
        changes.append(Write("mark this source as complete", f"{folder}/source.made", f"{source}\n".encode(), 0o644, ""))
    return changes or Nothing(f"{folder}: packages {software.digest()}, source {source}")


def wrapper(cluster: Cluster, folder: PurePosixPath, source: str) -> bytes:
    """The script that loads the site's modules and starts the environment's interpreter."""
    environment = cluster.environment
    return templates.render(
        "site/python.sh.j2",
        modules=environment.modules,
        setup=cluster.slurm.setup if cluster.slurm is not None else [],
        wrapper=f"{folder}/bin/python",
        caches=caches(folder),
        source_path=f"{folder}/source-{source}",
        interpreter=f"{environment.use or f'{folder}/venv'}/bin/python",
    ).encode()


def caches(folder: PurePosixPath) -> list[tuple[str, str]]:
    """Variables of tools that would otherwise write under $HOME, where users of a site have a small quota."""
    parent = folder.parent / "cache"
    return [
        ("PIP_CACHE_DIR", f"{parent}/pip"),
        ("XDG_CACHE_HOME", str(parent)),
        ("TORCHINDUCTOR_CACHE_DIR", f"{parent}/inductor"),
        ("TRITON_CACHE_DIR", f"{parent}/triton"),
        ("TORCH_EXTENSIONS_DIR", f"{parent}/torch_extensions"),
    ]


def _packages(site: Site, target: Target, folder: PurePosixPath) -> list[Change]:
    """Raises Unanswered if there is too little room, or if a job of an earlier command still installs the packages."""
    environment = site.cluster.environment
    space.environment_fits(target, from_index=environment.wheelhouse is None)
    if environment.build != "login":
        jobs.must_not_wait(target.node, f"{folder}/install.sh", "installs the packages")
    python = environment.python or "python3"
    make = with_modules(site.cluster, ["sh", "-c", VENV, "venv", str(folder), python])
    changes: list[Change] = [
        _command(f"make a Python environment at {folder}", make),
        Write("send the tested package versions", f"{folder}/constraints.txt", software.constraints(), 0o644, ""),
    ]
    wheels = environment.wheelhouse
    if wheels is None and environment.build == "auto":
        wheels = f"{folder}/wheels"
        made_in = [*caches(folder), ("TMPDIR", f"{folder}/tmp")]  # not in /tmp, which is small
        words = ["-m", "pip", "--disable-pip-version-check", "-q", "download", "-d", wheels, "-c", f"{folder}/constraints.txt"]
        get = with_modules(site.cluster, [f"{folder}/venv/bin/python", "-I", *words, *software.requirements()], made_in)
        changes.append(_command("download the packages on the login node", get, DOWNLOAD_S))
    script = f"{folder}/install.sh"
    changes.append(Write("send the script that installs the packages", script, _install(site, folder, wheels), 0o755, ""))
    if environment.build == "login":
        changes.append(_command("install the packages on the login node", ["bash", script], INSTALL_S))
    else:
        changes.append(jobs.submit("install the packages in a job", script, f"{folder}/install.log", INSTALL_S))
    return changes


def _install(site: Site, folder: PurePosixPath, wheels: str | None) -> bytes:
    slurm = site.cluster.slurm
    options = [
        f"--job-name={jobs.NAME}",
        f"--output={folder}/install.log",
        *requests.options(site.cluster, nodes=1, minutes=INSTALL_MINUTES),
    ]
    return templates.render(
        "site/install.sh.j2",
        options=options,
        folder=str(folder),
        modules=site.cluster.environment.modules,
        setup=slurm.setup if slurm is not None else [],
        caches=[*caches(folder), ("TMPDIR", f"{folder}/tmp")],
        wheels=wheels,
        requirements=software.requirements(),
        digest=software.digest(),
    ).encode()


def _use(site: Site, target: Target, folder: PurePosixPath) -> list[Change]:
    """An environment of the site or the user: it is looked at and not changed. Raises Unanswered if a package is missing."""
    where = site.cluster.environment.use
    listing = with_modules(site.cluster, [f"{where}/bin/python", "-m", "pip", "list", "--format=freeze"])
    answer = target.node.run(listing, timeout_s=MAKE_S)
    if answer.code != 0:
        raise Unanswered(f"{target.node.name}: environment.use: {where} cannot list its packages: {last_line(answer)}")
    missing, _ = software.differences(answer.stdout)
    if missing:
        raise Unanswered(f"{target.node.name}: environment.use: {where} lacks {', '.join(missing)}. Install them there.")
    mark = f"{software.digest()}\n".encode()
    return [Write(f"use the environment {where} as it is", f"{folder}/packages.made", mark, 0o644, "")]


def with_modules(cluster: Cluster, argv: list[str], variables: list[tuple[str, str]] | None = None) -> list[str]:
    """A command after the site's modules were loaded, as in a login shell."""
    lines = list(cluster.slurm.setup) if cluster.slurm is not None else []
    lines += [f"module load {name}" for name in cluster.environment.modules]
    lines += [f"export {name}='{value}'" for name, value in variables or []]
    script = "\n".join([*(f"{line}\ntest $? = 0 || exit 1" for line in lines), 'exec "$@"'])  # a line may end with a comment
    return ["bash", "-lc", script, "bash", *argv]


def _command(says: str, argv: list[str], limit_s: float = MAKE_S) -> RunCommand:
    return RunCommand(says, argv, limit_s, root=False)


SITE_SOFTWARE = Operation("site-environment", plan)
