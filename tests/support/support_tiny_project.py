"""A build backend for pip that needs no package: it makes a wheel whose only content is one command.

A test that runs the real make and pip copies this file into a project, so that an installation takes seconds instead of
gigabytes and needs no network.
"""

import zipfile
from pathlib import Path

PROJECT = """
[build-system]
requires = []
build-backend = "support_tiny_project"
backend-path = ["."]
"""


def write_wheel(folder: Path, name: str, *, needs: tuple[str, ...] = ()) -> str:
    """Write the wheel of a package that brings a command of its own name. Returns the name of the file."""
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
    metadata += [f"Provides-Extra: {extra}" for extra in ("trainers", "report", "dev")]
    members = {
        f"{name}.py": f"def main(): print('this is {name}')\n",
        f"{name}-1.0.dist-info/METADATA": "\n".join(metadata) + "\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-1.0.dist-info/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    members[f"{name}-1.0.dist-info/RECORD"] = (
        "".join(f"{member},,\n" for member in members) + f"{name}-1.0.dist-info/RECORD,,\n"
    )
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return f"{name}-1.0-py3-none-any.whl"


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """What pip calls (PEP 660). The package `project` needs the package `tool`. Notes in which folder pip builds."""
    Path("built-in").write_text(wheel_directory)
    return write_wheel(Path(wheel_directory), "project", needs=("tool",))
