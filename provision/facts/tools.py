"""Which tools a machine has, from any package or installed by hand. This fact is asked on nodes where users cannot install."""

from __future__ import annotations

from provision.fact import FactQuery

# For each Debian package, a shell command that succeeds if the tool of this package is installed.
PROBE_BY_TOOL = {
    "python3-venv": "python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'",
    "gcc": "command -v gcc || command -v cc",
    "libc6-dev": "test -e /usr/include/stdio.h",
    "python3-dev": "python3 -c 'import os, sys, sysconfig; "
    'sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))\'',
    "munge": "command -v munged",
    "slurmctld": "command -v slurmctld",
    "slurmdbd": "command -v slurmdbd",
    "slurmd": "command -v slurmd",
    "slurm-client": "command -v sbatch",
    "mariadb-server": "command -v mariadbd || command -v mysqld",
    "nfs-kernel-server": "command -v exportfs",
    "nfs-common": "command -v mount.nfs",
    "rdma-core": "command -v rdma-ndd || test -e /usr/lib/udev/rules.d/60-rdma-ndd.rules",
    "ibverbs-utils": "command -v ibv_devinfo",
}


def build_command(python: str) -> list[str]:
    """The command that prints the names of PROBE_BY_TOOL whose tools are installed. It needs only a shell."""
    probe_lines = [f"if ({probe}) > /dev/null 2>&1; then echo {tool}; fi" for tool, probe in PROBE_BY_TOOL.items()]
    return ["sh", "-c", "\n".join(["PATH=$PATH:/usr/sbin:/sbin", *probe_lines])]


def parse(stdout: str) -> frozenset[str]:
    """The installed tools, by their names in PROBE_BY_TOOL, from the output of the command."""
    return frozenset(stdout.split()) & frozenset(PROBE_BY_TOOL)


TOOLS = FactQuery("tools", build_command, parse, timeout_s=60)
