"""The extras of shardlab: optional packages that some commands need, such as the extra `report` of `collect summarize`."""

from __future__ import annotations

import sys
from pathlib import Path

from shardlab.package_origin import ROOT

# The module that is imported -> the extra that installs it. A module of two extras has the smaller one.
EXTRAS = {
    "PIL": "trainers",
    "deepspeed": "trainers",
    "tokenizers": "trainers",
    "torch": "trainers",
    "torchvision": "trainers",
    "transformers": "trainers",
    "numpy": "report",
    "plotly": "report",
    "polars": "report",
    "zlib_ng": "report",
    "kaleido": "images",
    "openpyxl": "xlsx",
    "defusedxml": "cloudlab",
    "httpx": "cloudlab",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def install_command(extra: str) -> str:
    """The command that installs an extra for the Python that runs this program.

    The command names shardlab's checkout, if this program runs from one. Otherwise shardlab is installed for this Python, so
    pip takes only the packages of the extra from an index and not shardlab, which is on none.
    """
    import shlex  # not at the top: each start of a command imports this module

    project = f"-e {shlex.quote(f'{ROOT}[{extra}]')}" if Path(ROOT, "pyproject.toml").is_file() else f"'shardlab[{extra}]'"
    return f"{shlex.quote(sys.executable)} -m pip install {project}"
