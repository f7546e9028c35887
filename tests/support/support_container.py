"""Makes a small image for Charliecloud.

The image has its own Python interpreter. It has the records of installed packages, but not the files of these packages.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from provision import software
from provision.nodes.login_node import LocalLoginNode

USER = 65534  # the user nobody, who has no rights
LEFT_OUT = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__", "config-*", "idlelib", "ensurepip")


def why_not() -> str | None:
    """Why this machine cannot start a container, in one line; None if it can."""
    if shutil.which("ch-run") is None:
        return "needs ch-run: apt-get install --no-install-recommends charliecloud-runtime"
    if os.geteuid() != 0:
        return "needs root, to become a user without rights"
    allowed = subprocess.run([*AS_USER, "unshare", "--user", "--map-root-user", "true"], capture_output=True, check=False)
    return None if allowed.returncode == 0 else "needs user namespaces for users without root"


AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]


class UserNode(LocalLoginNode, eq=False):
    """This machine as a login node, where commands run as a user without rights."""

    def run(self, argv, **options):
        return super().run([*AS_USER, "env", "HOME=/", "USER=nobody", *argv], **options)


def make_image(image: Path, mounts: list[Path], variables: dict[str, str]) -> None:
    """Make an image for Charliecloud.

    mounts: empty folders for bind mounts. variables: environment variables of the image, which its interpreter reads.
    """
    for name in ("dev", "proc", "sys", "etc", "tmp", "usr/bin", "usr/lib", "home", "ch"):
        (image / name).mkdir(parents=True)
    for name in ("hosts", "passwd", "group", "resolv.conf", "machine-id"):
        (image / "etc" / name).touch()
    (image / "bin").symlink_to("usr/bin")
    stdlib = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, image / "usr/lib" / stdlib.name, ignore=LEFT_OUT)
    programs = [(sys._base_executable, "python3"), (shutil.which("bash"), "bash")]
    for program, name in programs:
        shutil.copy(Path(program).resolve(), image / "usr/bin" / name)
    needing = [*(program for program, _ in programs), *map(str, (stdlib / "lib-dynload").glob("*zlib*.so"))]
    listed = subprocess.run(["ldd", *needing], capture_output=True, text=True, check=True).stdout
    for library in set(re.findall(r"(/\S+) \(0x", listed)):
        (image / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(library).resolve(), image / library.lstrip("/"))
    for path in mounts:
        (image / str(path).lstrip("/")).mkdir(parents=True)
    lines = {"PATH": "/usr/bin", **variables}
    (image / "ch/environment").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))


def record_packages(image: Path, **versions: str | None) -> None:
    """Write into an image a record of each package that the ranks need, with the version with which shardlab is tested.

    versions: package -> a version that replaces the tested version; None: the package has no record.
    """
    (library,) = (image / "usr/lib").glob("python3*")
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s]+)", software.read_constraints().decode(), re.MULTILINE))
    names = {re.match(r"[A-Za-z0-9._-]+", word)[0] for word in software.list_required_packages()}
    tested = {name: next(version for pin, version in pinned.items() if _plain(pin) == _plain(name)) for name in names}
    for name, version in (tested | versions).items():
        if version is not None:
            folder = library / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
