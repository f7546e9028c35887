"""Checks that Python imports shardlab's own packages, because names such as `jobs` and `trainers` are common.

A folder in PYTHONPATH with a package of the same name comes before an installed package. Another distribution with a package of
the same name overwrites its files. Without this check, the command would end with a traceback in the code of a stranger.
"""

from __future__ import annotations

import os
from importlib.machinery import PathFinder

from shardlab import PACKAGES

SOURCE_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 - pathlib would make each start slower


def explain_shadowed_package() -> str | None:
    """A sentence about the first package of shardlab that Python would import from elsewhere; None if there is none.

    The copy of the source that a run uses has no package `provision`, so only packages that are in SOURCE_ROOT are looked for.
    """
    for package in PACKAGES:
        init_file = os.path.join(SOURCE_ROOT, package, "__init__.py")  # noqa: PTH118
        package_spec = PathFinder.find_spec(package)
        if os.path.exists(init_file) and package_spec is not None and os.path.realpath(package_spec.origin or "") != init_file:  # noqa: PTH110
            return _explain_hidden_package(package, package_spec.origin or package)
    return None


def explain_overwritten_package() -> str | None:
    """A sentence about another distribution that installed files into a package of shardlab; None if there is none.

    Reads the lists of files of all installed distributions, which is slow: call it only after an import failed.
    """
    from importlib import metadata

    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        for file in distribution.files or () if name != "shardlab" else ():
            if file.parts[0] in PACKAGES and os.path.realpath(str(distribution.locate_file(file))).startswith(
                f"{SOURCE_ROOT}{os.sep}"
            ):
                return (
                    f"the package {name} overwrote files of shardlab's package {file.parts[0]}. Uninstall {name}, then install "
                    "shardlab again, in an environment of its own."
                )
    return None


def _explain_hidden_package(package: str, origin: str) -> str:
    """The sentence about a package that Python would import from the file `origin`, and how to avoid it."""
    import shlex

    folder = os.path.dirname(origin) if os.path.basename(origin) == "__init__.py" else origin  # noqa: PTH119, PTH120
    hiding_folder = os.path.realpath(os.path.dirname(folder))  # noqa: PTH120
    search_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    other_entries = [entry for entry in search_path if os.path.realpath(entry) != hiding_folder]
    if len(other_entries) < len(search_path):
        remedy_text = f"write this before the command: PYTHONPATH={shlex.quote(os.pathsep.join(other_entries))}"
    elif hiding_folder == os.path.realpath(os.curdir):
        remedy_text = "run the command in another folder"
    else:
        remedy_text = "install shardlab in an environment of its own"
    return f"{folder} hides shardlab's package {package}, which has the same name; {remedy_text}"
