"""Downloads wheels of packages that are missing on a GPU machine without a network.

    python benchmarks/gpu/wheels.py [--python 3.12]      # on a machine with a network; then copy benchmarks/gpu/wheels

prove.py unpacks the wheels from benchmarks/gpu/wheels. Torch, transformers and other large packages must be installed on the
GPU machine. If a package is installed there, its wheel is not used.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "wheels"
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
# The name of each package that may be missing, and the name of the module that it installs.
MODULES = {
    "msgspec": "msgspec", "PyYAML": "yaml", "Jinja2": "jinja2", "MarkupSafe": "markupsafe", "rich": "rich",
    "nvidia-ml-py": "pynvml", "deepspeed": "deepspeed", "hjson": "hjson", "einops": "einops", "py-cpuinfo": "cpuinfo",
    "msgpack": "msgpack", "pydantic": "pydantic", "pydantic_core": "pydantic_core", "annotated-types": "annotated_types",
    "typing-inspection": "typing_inspection",
}  # fmt: skip
REQUIRED = {
    "msgspec",
    "PyYAML",
    "Jinja2",
    "MarkupSafe",
    "rich",
    "nvidia-ml-py",
}  # the packages that prove.py needs; without the other packages, only ZeRO cells are dropped
MOST_BYTES = 20 * 2**20


def use(folder: Path = FOLDER) -> list[str]:
    """Unpack the wheels of missing modules and make them importable in this process and its child processes.

    Returns the names of these wheels. A wheel is a ZIP archive with the files that pip copies to site-packages (PEP 427).
    Raises ValueError if a member of the archive would be written outside the folder.
    """
    absent = {name.lower().replace("-", "_") for name in missing()}
    found, into = [], folder / "unpacked"
    for wheel in sorted(folder.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        if name.lower() in absent and _is_for_this_python(wheel):
            with zipfile.ZipFile(wheel) as archive:
                if any(".." in Path(member).parts or Path(member).is_absolute() for member in archive.namelist()):
                    raise ValueError(f"{wheel}: holds a path outside of it")
                archive.extractall(into)
            found.append(name)
    if not found:
        return []
    sys.path.append(str(into))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(into)]))
    return found


def missing() -> list[str]:
    """The packages of MODULES that are not installed here."""
    return [name for name, module in MODULES.items() if importlib.util.find_spec(module) is None]


def _is_for_this_python(wheel: Path) -> bool:
    """Whether the tags in the name of a wheel (PEP 425) fit this Python. A wheel with the tag abi3 also fits later versions."""
    python, abi = wheel.stem.split("-")[-3:-1]
    version = sys.version_info[:2]
    named = re.fullmatch(r"cp3(\d+)", python)
    later = named is not None and abi == "abi3" and int(named[1]) <= version[1]
    return "py3" in python.split(".") or python == f"cp{version[0]}{version[1]}" or later


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="Python version of the GPU machine (default: 3.12)")
    arguments = parser.parse_args(argv)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    known = {name.lower() for name in MODULES}
    pinned = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0].lower() in known]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for package in pinned:
        with tempfile.TemporaryDirectory() as source:
            of_python = ["--only-binary=:all:", "--python-version", arguments.python, "--implementation", "cp"]
            got = subprocess.run([*pip, "download", "-q", "--no-deps", *of_python, "-d", FOLDER, package], check=False)
            # nobody publishes a wheel (for example of DeepSpeed): build the wheel here, without compiling DeepSpeed's operators
            if got.returncode:
                environment = {**os.environ, "DS_BUILD_OPS": "0"}
                build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", source, package]
                subprocess.run(build, check=True, env=environment)
                for wheel in Path(source).glob("*.whl"):
                    wheel.rename(FOLDER / wheel.name)
    size = sum(wheel.stat().st_size for wheel in FOLDER.glob("*.whl"))
    print(f"{len(pinned)} packages, {size / 2**20:.1f} MiB")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
