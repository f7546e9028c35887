"""Finds out whether this machine is a login node of a Slurm cluster. Users must not train on a login node."""

from __future__ import annotations

import os
import shutil
import subprocess

from shardlab.cluster.slurm_cluster import drop_cluster_headers
from shardlab.errors import InputError

ANSWER_S = 10.0  # time limit of sinfo
# At a Slurm site, this environment variable contains the path of a script that loads the site's modules and then starts the
# Python in which shardlab is installed.
PYTHON_VARIABLE = "SHARDLAB_PYTHON"


def is_login_node() -> bool:
    """Whether this machine is a login node: Slurm's commands work here, and this process is not on a node of a job.

    A process in a shell of `salloc` is in a job too, but the shell may run on the login node."""
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None or "SLURMD_NODENAME" in os.environ:
        return False
    try:
        sinfo = subprocess.run(["sinfo", "--noheader", "--format=%P"], capture_output=True, timeout=ANSWER_S, check=False)
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        return True  # Slurm's controller is busy, but Slurm is installed, so this is a login node
    return sinfo.returncode == 0 and bool(drop_cluster_headers(sinfo.stdout.decode("utf-8", "replace")).strip())


def refuse_login_node(*, here_option: bool) -> None:
    """Raise InputError if this machine is a login node, before ranks start on it. here_option: whether the user gave the option
    --here, which switches this check off."""
    if not here_option and is_login_node():
        raise InputError(
            "this machine is a login node of a Slurm cluster (sinfo answers, and this process is not on a node of a job). "
            "Training here would disturb other users. To use Slurm, run: provision init > cluster.yaml. To train here all the "
            "same: --here."
        )
