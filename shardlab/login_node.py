"""Whether this machine is a login node of a Slurm cluster, on which users must not train."""

from __future__ import annotations

import os
import shutil
import subprocess

from shardlab.errors import InputError

ANSWER_S = 10.0
PYTHON = "SHARDLAB_PYTHON"  # at a Slurm site: the script that loads the site's modules and starts the environment's interpreter


def is_login_node() -> bool:
    """Whether Slurm's client answers here and this process is in no job."""
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None or "SLURM_JOB_ID" in os.environ:
        return False
    try:
        asked = subprocess.run(["sinfo", "--noheader", "--format=%P"], capture_output=True, timeout=ANSWER_S, check=False)
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        return True  # the controller is busy, and this is still its login node
    return asked.returncode == 0 and bool(asked.stdout.strip())


def must_not_be(*, here: bool) -> None:
    """Checks this machine before ranks start on it. here: allow a login node. Raises InputError if it is one."""
    if not here and is_login_node():
        raise InputError(
            "this machine is a login node of a Slurm cluster (sinfo answers, and this process is in no job). Training here "
            "would disturb other users. To use Slurm, run: provision init > cluster.yaml. To train here all the same: --here."
        )
