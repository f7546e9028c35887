"""How wheels get to a site whose login node reaches no package index: pip downloads them on this machine, and provision
sends them."""

import io
import os
import platform
import re
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import msgspec
import pytest

from provision import software
from provision.fact import Unanswered
from provision.nodes.login_node import LocalLoginNode
from provision.site import wheels
from provision.site.wheels import InterpreterPlatform, WheelDownload

HERE, OTHER = (f"3.{sys.version_info.minor + more}" for more in (0, 1))  # the version of this Python, and another version
SITE = InterpreterPlatform(HERE, sys.platform, platform.machine(), ("glibc", "2.28"))
# Builds a wheel that fits every Python, as the setup of a package without compiled parts does.
BACKEND = """\
import zipfile

def build_wheel(folder, settings=None, metadata=None):
    name = "deepspeed-VERSION-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        info = "deepspeed-VERSION.dist-info"
        metadata = "Metadata-Version: 2.1\\nName: deepspeed\\nVersion: VERSION\\nRequires-Dist: few\\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip uses in place of a package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(index: Path, name: str, tag: str) -> None:
    with zipfile.ZipFile(index / f"{name}-1.0-{tag}.whl", "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")


def add_deepspeed(index: Path) -> None:
    """Adds the tested version of deepspeed as a source archive, because the real package index has no wheel of it."""
    line = next(line for line in software.read_constraints().decode().splitlines() if line.startswith("deepspeed=="))
    version = line.partition("==")[2]
    texts = {
        "backend.py": BACKEND.replace("VERSION", version),
        "pyproject.toml": PROJECT,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n",
    }
    with tarfile.open(index / f"deepspeed-{version}.tar.gz", "w:gz") as archive:
        for name, text in texts.items():
            entry = tarfile.TarInfo(f"deepspeed-{version}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def test_wheels_are_for_the_sites_python_and_not_newer_than_its_c_library(index, tmp_path):
    machine = platform.machine()
    add_wheel(index, "few", "py3-none-any")
    this, other = (f"cp{version.replace('.', '')}" for version in (HERE, OTHER))
    for tag in (f"{this}-{this}", f"{other}-{other}"):
        for libc in ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17"):
            add_wheel(index, "compiled", f"{tag}-{libc}_{machine}")
    add_deepspeed(index)
    folder = tmp_path / "wheels"
    folder.mkdir()
    names = [path.name for path in wheels.download_wheels(folder, SITE, ["compiled", "deepspeed>=0.1"])]
    assert names[0] == f"compiled-1.0-{this}-{this}-manylinux_2_28_{machine}.whl"
    assert [name.partition("-")[0] for name in names] == ["compiled", "deepspeed", "few"]


@pytest.mark.parametrize(
    ("libc", "newest"), [(("glibc", "2.31"), 31), (("glibc", ""), 17), (("", ""), 17), (("musl", "1.2"), 17)]
)
def test_an_unknown_c_library_gets_the_oldest_wheels(libc, newest):
    options = wheels.pip_options(msgspec.structs.replace(SITE, libc=libc))
    assert f"--platform=manylinux_2_{newest}_{SITE.machine}" in options
    assert f"--platform=manylinux_2_{newest + 1}_{SITE.machine}" not in options
    assert f"--platform=manylinux2014_{SITE.machine}" in options


@pytest.mark.parametrize("other", [{"system": "darwin"}, {"machine": "riscv64"}])
def test_wheels_for_another_system_are_not_guessed(tmp_path, other):
    with pytest.raises(Unanswered, match="pip downloads only for its own system"):
        wheels.download_wheels(tmp_path, msgspec.structs.replace(SITE, **other), ["few"])


def test_wheels_for_another_version_of_python_are_refused(index, tmp_path):
    """pip evaluates the marker of `few; python_version == OTHER` with its own Python version, so it would skip this
    requirement."""
    add_wheel(index, "few", "py3-none-any")
    with pytest.raises(
        Unanswered, match=rf"runs here with Python {HERE}, the site's Python is {OTHER}; .*Run `provision` with"
    ):
        wheels.download_wheels(tmp_path, msgspec.structs.replace(SITE, python=OTHER), ["few"])


class CountingLogin(LocalLoginNode, eq=False):
    """A login node that records the names of the files that are sent to it."""

    def put(self, content, path, **options):
        SENT.append(Path(path).name)
        return super().put(content, path, **options)


SENT: list[str] = []


def a_download(tmp_path: Path, *on_node: str, here: bool = True) -> WheelDownload:
    folder = tmp_path / "here"
    arrived = PurePosixPath(tmp_path / "site/wheels")
    return WheelDownload(on_node, [sys.executable], arrived, ["few", "compiled"], folder if here else None)


def test_this_machine_sends_what_the_login_node_cannot_download(index, tmp_path):
    for name in ("few", "compiled"):
        add_wheel(index, name, "py3-none-any")
    node, folder = CountingLogin(name="login"), tmp_path / "site/wheels"
    asked = a_download(tmp_path, "sh", "-c", "echo 'ERROR: no index answers' >&2; exit 1")
    assert asked.description == "download the packages on the login node, or here and send them"
    for sent in (["compiled-1.0-py3-none-any.whl", "few-1.0-py3-none-any.whl"], [], ["few-1.0-py3-none-any.whl"]):
        if sent and folder.exists():
            (folder / sent[0]).write_bytes(b"damaged")
        SENT.clear()
        asked.make(node)
        assert sent == SENT
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in index.iterdir()
        }
    says = "download the packages here, as the login node could not (ERROR: no index answers), and send them"
    assert asked.description == says
    assert list((tmp_path / "here").iterdir()) == []


def test_a_package_that_neither_machine_can_download_is_reported_with_both_reasons(index, tmp_path):
    node = CountingLogin(name="login")
    failing = ("sh", "-c", "echo 'ERROR: no index answers' >&2; exit 1")
    with pytest.raises(Unanswered, match=r"there \(ERROR: no index answers\), nor here: .*few.*environment\.wheelhouse"):
        a_download(tmp_path, *failing).make(node)
    with pytest.raises(Unanswered, match=r"cannot be downloaded: ERROR: no index answers\. Set environment\.wheelhouse"):
        a_download(tmp_path, *failing, here=False).make(node)
    assert not (tmp_path / "site").exists()


def test_a_failure_after_the_download_is_not_called_a_failure_to_download(index, tmp_path):
    for name in ("few", "compiled"):
        add_wheel(index, name, "py3-none-any")
    asked = a_download(tmp_path, "false")
    (tmp_path / "site").touch()  # a file in place of the site's folder, so that nothing can be sent there
    with pytest.raises(Unanswered, match=r"^login: compiled\S+ was downloaded here, but not sent to \S+: .*(directory|exists)"):
        asked.make(CountingLogin(name="login"))
    asked.interpreter_words = ["no-python"]
    with pytest.raises(Unanswered, match=r"^login: its Python does not start: "):
        asked.make(CountingLogin(name="login"))


def listing(**others: str | None) -> str:
    """Returns the listing of an environment with the tested versions. others: replaces versions; None removes a package."""
    pinned = [line.split() for line in software.read_constraints().decode().splitlines() if "==" in line and line[0] != "#"]
    tested = dict(line[0].split("==") for line in pinned)
    versions = {"python": "3.11.2", **tested, **others}
    return "".join(f"{name}=={version}\n" for name, version in versions.items() if version is not None)


@pytest.mark.parametrize(
    ("others", "missing", "other"),
    [
        ({}, [], []),
        ({"torch": None, "msgspec": "no version"}, ["msgspec", "torch"], []),
        ({"python": "3.10.4"}, ["Python >=3.11 (it is 3.10.4)"], []),
        ({"torch": "1.4.0"}, [], ["torch 1.4.0 (tested: TESTED; outside of the range RANGE of shardlab)"]),
        ({"rich": "99.1"}, [], ["rich 99.1 (tested: TESTED)"]),
        ({"torch": "TESTED+cu130", "absl-py": "0.1"}, [], []),
    ],
)
def test_packages_that_we_did_not_install_are_compared_with_the_tested_ones(others, missing, other):
    tested = dict(line.split("==") for line in listing().splitlines())
    torch = next(word.removeprefix("torch") for word in software.list_required_packages() if re.match("torch[^a-z]", word))
    others = {name: version and version.replace("TESTED", tested[name]) for name, version in others.items()}
    found = software.compare_packages(listing(**others))
    filled = [text.replace("TESTED", tested[text.split()[0]]).replace("RANGE", torch) for text in other]
    assert (found.missing_clauses, found.other_version_clauses) == (missing, filled)
