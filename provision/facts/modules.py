"""The environment modules of a site (Lmod or environment-modules) that concern training: Python, CUDA, NCCL and compilers."""

from __future__ import annotations

import re

from provision.fact import FactQuery
from shardlab.remote.login_shell import make_login_argv

# `module` is a function of the login shell. Lmod and environment-modules both write the list to standard error.
LIST_MODULES = "module --terse avail 2>&1 || true"
LISTED_KINDS = (
    "python",
    "python3",
    "cpython",
    "cray-python",
    "anaconda3",
    "miniconda3",
    "miniforge3",
    "mambaforge",
    "cuda",
    "cudatoolkit",
    "nccl",
    "gcc",
    "apptainer",
    "singularity",
    "charliecloud",
)
_MODULE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.+/-]{0,100}\Z")


def build_command(python: str) -> list[str]:
    return make_login_argv(LIST_MODULES)


def parse(stdout: str) -> tuple[str, ...]:
    """The modules NAME/VERSION whose kind is in LISTED_KINDS, in the order of the list. Empty if the site has no modules."""
    module_names: dict[str, None] = {}
    for line in stdout.splitlines():
        module_name = re.sub(r"\([^()]*\)$", "", line.strip())  # removes a mark such as (default), (D) or (default:latest)
        module_folder, _, version = module_name.rpartition("/")
        if version and module_folder.rpartition("/")[2].lower() in LISTED_KINDS and _MODULE_NAME.match(module_name):
            module_names[module_name] = None
    return tuple(module_names)


MODULES = FactQuery("modules", build_command, parse, timeout_s=60)
