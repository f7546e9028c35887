"""Brings the wheels of all packages into the shared folder of a site. The login node downloads them; if no package index
answers there, this machine downloads them and sends them over the SSH connection."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from provision import software
from provision.fact import Unanswered, decode_last_line
from provision.node import Node, find_error_line
from provision.operation import failure_reason
from shardlab.files import files
from shardlab.remote.remote import CommandOutput

DOWNLOAD_S = 3600.0
ANSWER_S = 300.0
PIP_WORDS = ("-m", "pip", "--disable-pip-version-check", "--quiet")
FROM_SOURCE = ("deepspeed",)  # the index has no wheels of these packages; the wheels that pip builds work with any Python
OLDEST_GLIBC = 17  # glibc 2.17 of manylinux2014, the oldest platform for which packages still publish wheels
PLATFORM_PROGRAM = """\
import json, platform, sys
version = '%d.%d' % sys.version_info[:2]
kind = {'system': sys.platform, 'machine': platform.machine(), 'libc': platform.libc_ver()}
print(json.dumps({'python': version, **kind}))
"""
# Prints the digests of the wheels in a folder. All these wheels are complete, because `put` gives a file its name only when the
# whole file has arrived.
LIST_ARRIVED = 'cd "$1" 2> /dev/null || exit 0; for wheel in *.whl; do test ! -f "$wheel" || sha256sum -- "$wheel"; done'


class InterpreterPlatform(msgspec.Struct, frozen=True):
    """The interpreter and machine for which wheels are wanted."""

    python: str
    system: str
    machine: str
    libc: tuple[str, str]
    """Name and version of the C library, such as ("glibc", "2.28")."""


class WheelDownload:
    """A change that fills a folder of the site with the wheels of all required packages.

    download_words: the command that downloads the wheels on the login node.
    interpreter_words: the command that starts the site's interpreter.
    folder: the folder of the site. requirements: the requirements.
    local_folder: an existing folder of this machine for a temporary copy of the wheels; None: this machine is the login node.
    """

    script = ""

    def __init__(
        self,
        download_words: Sequence[str],
        interpreter_words: Sequence[str],
        folder: PurePosixPath,
        requirements: Sequence[str],
        local_folder: Path | None,
    ) -> None:
        self.download_words, self.interpreter_words, self.folder = download_words, interpreter_words, folder
        self.requirements, self.local_folder = requirements, local_folder
        self._result_text = ""

    @property
    def description(self) -> str:
        """The sentence for this change, as `Change.description`. After the download, it says which machine downloaded."""
        if self._result_text:
            return f"download the packages {self._result_text}"
        return f"download the packages on the login node{', or here and send them' if self.local_folder is not None else ''}"

    @property
    def command(self) -> str:
        """The command that downloads the wheels on the login node, as `Change.command`."""
        return shlex.join(self.download_words)

    def make(self, node: Node) -> None:
        """Download the wheels. Raises Unanswered if neither the login node nor this machine can download them."""
        download_output = node.run(self.download_words, timeout_s=DOWNLOAD_S)
        if download_output.code == 0:
            self._result_text = "on the login node"
            return
        failure_text = f"not ended within {DOWNLOAD_S:g} s" if download_output.code is None else failure_reason(download_output)
        if self.local_folder is None:
            raise Unanswered(f"{node.name}: the packages cannot be downloaded: {failure_text}. {WHEEL_ADVICE}")
        target_platform = self._read_platform(node)
        files.make_folder(self.local_folder)
        with tempfile.TemporaryDirectory(dir=self.local_folder, prefix="wheels-") as temporary_folder:
            try:
                wheel_paths = download_wheels(Path(temporary_folder), target_platform, self.requirements)
            except Unanswered as error:
                raise Unanswered(
                    f"{node.name}: the packages cannot be downloaded there ({failure_text}), nor here: {error} {WHEEL_ADVICE}"
                ) from None
            self._send_wheels(node, wheel_paths)
        self._result_text = f"here, as the login node could not ({failure_text}), and send them"

    def _read_platform(self, node: Node) -> InterpreterPlatform:
        platform_output = node.run([*self.interpreter_words, "-I", "-c", PLATFORM_PROGRAM], timeout_s=ANSWER_S)
        if platform_output.code != 0:
            raise Unanswered(f"{node.name}: its Python does not start: {find_error_line(platform_output)}.")
        try:
            return decode_last_line(platform_output.stdout, InterpreterPlatform)
        except ValueError as error:
            raise Unanswered(f"{node.name}: its Python cannot be identified: {error}") from None

    def _send_wheels(self, node: Node, wheel_paths: Sequence[Path]) -> None:
        """Send wheels from this machine to the site. Wheels that an interrupted command has sent before are skipped."""
        node_output = node.run(["sh", "-c", LIST_ARRIVED, "arrived", str(self.folder)], timeout_s=ANSWER_S)
        arrived_digests = {line.partition("  ")[2]: line.partition("  ")[0] for line in node_output.stdout.splitlines()}
        for wheel_path in wheel_paths:
            wheel_bytes = wheel_path.read_bytes()
            if arrived_digests.get(wheel_path.name) == hashlib.sha256(wheel_bytes).hexdigest():
                continue
            node_output = node.put(wheel_bytes, f"{self.folder}/{wheel_path.name}", mode=0o644, owner="")
            if node_output.code != 0:
                fault = "it took too long" if node_output.code is None else failure_reason(node_output)
                raise Unanswered(f"{node.name}: {wheel_path.name} was downloaded here, but not sent to {self.folder}: {fault}.")


WHEEL_ADVICE = "Set environment.wheelhouse to a folder of wheels at the site, or environment.use to an environment of yours."


def download_wheels(folder: Path, target: InterpreterPlatform, requirements: Sequence[str]) -> list[Path]:
    """Download the wheels of `requirements` into `folder`, for the interpreter `target` of another machine.

    Returns the paths of the wheels. Raises Unanswered.
    """
    own_platform = (sys.platform, platform.machine())
    if (target.system, target.machine) != own_platform:  # pip would skip packages that only the system of the site needs
        platform_phrase = f"{target.system} {target.machine}"
        raise Unanswered(
            f"this machine is {' '.join(own_platform)}, the site is {platform_phrase}; pip downloads only for its own system."
        )
    own_version = ".".join(platform.python_version_tuple()[:2])
    if target.python != own_version:  # requirements may depend on the version of Python; pip evaluates them for its own version
        raise Unanswered(
            f"`provision` runs here with Python {own_version}, the site's Python is {target.python}; for another version, pip "
            f"may choose the wrong packages. Run `provision` with Python {target.python}, or let environment.modules or "
            f"environment.python name a Python {own_version} of the site."
        )
    constraints_path = folder / "constraints.txt"
    constraints_path.write_bytes(software.read_constraints(tuple(requirements)))
    common_options = ["--constraint", str(constraints_path)]
    source_requirements = [word for word in requirements if any(word.startswith(name) for name in FROM_SOURCE)]
    if source_requirements:
        _run_pip(["wheel", "--no-deps", "--wheel-dir", str(folder), *common_options, *source_requirements])
    _run_pip(
        ["download", "--dest", str(folder), "--find-links", str(folder), *pip_options(target), *common_options, *requirements]
    )
    return sorted(folder.glob("*.whl"))


def pip_options(target_platform: InterpreterPlatform) -> list[str]:
    """The options of `pip download` for wheels that work with the interpreter `target_platform` and its C library."""
    option_words = ["--only-binary=:all:", "--implementation=cp", f"--python-version={target_platform.python}"]
    libc_name, libc_version = target_platform.libc
    _, _, minor_version = libc_version.partition(".")
    newest_minor = int(minor_version) if libc_name == "glibc" and minor_version.isdecimal() else OLDEST_GLIBC
    platform_tags = [f"manylinux_2_{glibc_minor}" for glibc_minor in range(newest_minor, OLDEST_GLIBC - 1, -1)]
    platform_tags += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
    return [*option_words, *(f"--platform={platform_tag}_{target_platform.machine}" for platform_tag in platform_tags)]


def _run_pip(pip_words: Sequence[str]) -> None:
    pip_command = [sys.executable, *PIP_WORDS, *pip_words]
    pip_environment = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.run(
            pip_command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_S, env=pip_environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unanswered(f"pip did not end within {DOWNLOAD_S:g} s.") from None
    if process.returncode != 0:
        raise Unanswered(f"{failure_reason(CommandOutput(process.returncode, process.stdout, process.stderr)).rstrip('.')}.")
