"""Whether this machine is a login node of a Slurm cluster, on which users must not train."""

from __future__ import annotations

import os
import shutil
import subprocess

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
