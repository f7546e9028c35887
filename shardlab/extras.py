"""The extras of shardlab: optional packages that some commands need, such as the extra `report` of `collect summarize`."""

from __future__ import annotations

import sys
from pathlib import Path

from shardlab.package_origin import SOURCE_ROOT

# Each extra -> the modules that it installs and that our code imports. A module of two extras stands at the smaller one.
MODULES_OF_EXTRA = {
    "trainers": ("PIL", "deepspeed", "tokenizers", "torch", "torchvision", "transformers"),
    "report": ("numpy", "plotly", "polars", "zlib_ng"),
    "images": ("kaleido",),
    "xlsx": ("openpyxl",),
    "cloudlab": ("defusedxml", "httpx"),
    "mlflow": ("mlflow",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
EXTRA_OF_MODULE = {module: extra for extra, modules in MODULES_OF_EXTRA.items() for module in modules}


def make_install_command(extra: str, *options: str) -> str:
    """The command that installs an extra for the Python that runs this program. options: further options of pip.

    The command names shardlab's checkout, if this program runs from one. Otherwise shardlab is installed for this Python, so
    pip takes only the packages of the extra from an index and not shardlab, which is on none.
    """
    import shlex  # not at the top: each start of a command imports this module
    from importlib.metadata import distributions  # not find_spec, for which setuptools warns once distutils is imported

    pip_requirement = (
        f"-e {shlex.quote(f'{SOURCE_ROOT}[{extra}]')}"
        if Path(SOURCE_ROOT, "pyproject.toml").is_file()
        else f"'shardlab[{extra}]'"
    )
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        installer_words = f"pipx runpip {shlex.quote(Path(sys.prefix).name)} install"
    elif not any(distributions(name="pip")):  # uv makes environments without pip
        installer_words = f"uv pip install --python {shlex.quote(sys.executable)}"
    else:
        installer_words = f"{shlex.quote(sys.executable)} -m pip install"
    return " ".join([installer_words, *options, pip_requirement])
