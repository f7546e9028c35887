"""`ssh: {sudo: false}`: shardlab does what the user may do, and prints the exact commands for an administrator to do the
rest."""

import json
import os
import subprocess
from pathlib import Path
from shlex import quote

import pytest
from support_e2e import HANG_S

from provision import cli
from provision.command import display
from provision.facts import tools
from provision.operation import RunCommand, Write, shell_change
from provision.plan import OperationStep
from provision.providers import ssh
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.remote.remote import CommandOutput, Unreachable, make_put_command
from shardlab.terminal.console import Output

NOBODY = 65534
FILE = """\
schema: 1
name: lab
provider: ssh
nodes: [{name: gpu0, host: 127.0.0.1}]
ssh: {sudo: false}
storage: {shared: SHARED}
"""


class AsNobody:
    """Replaces `Remote`: runs commands on this machine as a user without rights."""

    home: Path

    def __init__(self, address, *, may_sudo=True):
        assert not may_sudo
        self.running = ()

    def run(self, argv, *, timeout_s, env=None, stdin=b"", root=False):
        if root:
            raise Unreachable("a command asked for root")
        path = f"{self.home}/bin:/usr/bin:/bin"  # has no sbin folders, as in a login over SSH
        words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *argv]
        variables = {"PATH": path, "HOME": str(self.home), "LC_ALL": "C", **(env or {})}
        done = subprocess.run(words, input=stdin, capture_output=True, env=variables, check=False, timeout=timeout_s, cwd="/")
        return CommandOutput(done.returncode, done.stdout.decode(), done.stderr.decode())

    def put(self, content, path, *, mode, owner):
        return self.run(
            make_put_command(content, path, mode=mode, owner=owner), timeout_s=HANG_S, stdin=content, root=bool(owner)
        )


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A workspace whose cluster has one node: this machine, as the user nobody. If `sudo` is ever started, the test fails."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    home = Path(
        subprocess.run(["mktemp", "-d", "/tmp/without-root.XXXXXX"], capture_output=True, check=True, text=True).stdout.strip()
    )
    home.chmod(0o755)
    for name in ("bin", "shared"):
        (home / name).mkdir()
    os.chown(home / "shared", NOBODY, NOBODY)
    (home / "bin" / "sudo").write_text(f'#!/bin/sh\necho "$@" >> {home}/shared/sudo-was-started\n')
    (home / "bin" / "sudo").chmod(0o755)
    (tmp_path / "cluster.yaml").write_text(FILE.replace("SHARED", str(home / "shared")))
    monkeypatch.setattr(AsNobody, "home", home, raising=False)
    monkeypatch.setattr(ssh, "Remote", AsNobody)
    for name in tools.PROBE_BY_TOOL:
        monkeypatch.setitem(tools.PROBE_BY_TOOL, name, "true")
    yield tmp_path
    assert not (home / "shared" / "sudo-was-started").exists()
    subprocess.run(["rm", "-rf", str(home)], check=True)


def provision(lab, capsys, *words) -> tuple[int, str, dict]:
    """Runs `provision` and returns (exit code, text on standard error, JSON document)."""
    code = cli.main([*words, "--json", "--workspace", str(lab), "--skip", "environment,inventory"])
    said = capsys.readouterr()
    return code, said.err, json.loads(said.out)


def states(document) -> dict[str, str]:
    return {operation["name"]: operation["state"] for operation in document["nodes"][0]["operations"]}


def test_a_complete_machine_needs_no_administrator(lab, capsys):
    code, said, document = provision(lab, capsys, "plan")
    assert set(states(document).values()) == {"nothing to do", "skipped"}, said
    assert (code, document["changes"]) == (0, 0)
    assert "administrator" not in said


def test_commands_for_an_administrator_are_printed_and_the_exit_code_is_not_0(lab, capsys, monkeypatch):
    monkeypatch.setitem(tools.PROBE_BY_TOOL, "python3-venv", "false")
    for words in (["plan"], []):
        code, said, document = provision(lab, capsys, *words)
        assert code == 1
        assert states(document)["packages"] == "administrator"
        assert document["changes"] == 0
        assert "an administrator has to do: gpu0: packages" in said
        assert "# for an administrator: to be run as root on gpu0" in said
        (packages,) = [entry for entry in document["nodes"][0]["operations"] if entry["name"] == "packages"]
        assert "apt-get" in packages["administrator"][-1]
        assert " install python3-venv\n" in packages["administrator"][-1]
        assert packages["administrator"][-1] in said
    assert document["verified"] is False
    (finding,) = document["checks"]
    assert (finding["check"], finding["passed"]) == ("administrator", False)


def test_verify_names_the_missing_part_as_well(lab, capsys, monkeypatch):
    monkeypatch.setitem(tools.PROBE_BY_TOOL, "python3-venv", "false")
    code, said, document = provision(lab, capsys, "verify")
    assert (code, document["verified"]) == (1, False)
    assert "an administrator has to do: packages" in said


def test_later_changes_wait_for_an_administrator(lab, capsys, monkeypatch):
    monkeypatch.setitem(tools.PROBE_BY_TOOL, "python3-venv", "false")
    text = (lab / "cluster.yaml").read_text()
    # the folder of wheels does not exist, so that a bug in shardlab cannot download torch
    (lab / "cluster.yaml").write_text(f"{text}environment: {{wheelhouse: /nowhere}}\n")
    assert cli.main(["--json", "--workspace", str(lab), "--skip", "inventory"]) == 1
    document = json.loads(capsys.readouterr().out)
    (environment,) = [entry for entry in document["nodes"][0]["operations"] if entry["name"] == "environment"]
    assert environment["state"] == "not reached"
    assert environment["says"] == ["waits for an administrator: packages"]
    assert list(AsNobody.home.joinpath("shared").iterdir()) == []


def test_changes_that_need_no_root_are_made_by_the_user(lab, capsys, monkeypatch):
    """The user's part ends at pip, which finds no packages in an empty folder of wheels."""
    wheels = AsNobody.home / "wheels"
    wheels.mkdir()
    text = (lab / "cluster.yaml").read_text()
    (lab / "cluster.yaml").write_text(f"{text}environment: {{wheelhouse: {wheels}}}\n")
    code = cli.main(["--json", "--workspace", str(lab), "--only", "environment"])
    said = capsys.readouterr().err
    assert code == 1
    (python,) = (AsNobody.home / "shared/shardlab").glob("python-*/bin/python3")
    assert python.lstat().st_uid == NOBODY
    assert "install the packages from" in said


def test_the_scripts_for_an_administrator_do_what_the_changes_do(tmp_path):
    path = tmp_path / "etc" / "x.conf"
    scripts = [
        Write("write it", str(path), b"$HOME `id` 'x'\nlast line", 0o640, f"{os.getuid()}:{os.getgid()}").script,
        shell_change("two steps", f"test -f {quote(str(path))}\nfalse || exit 0\necho never").script,
        RunCommand("input", ["tee", f"{path}.2"], stdin=b"a\nb\n").script,
    ]
    done = subprocess.run(["bash"], input="\n".join(scripts), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a\nb\n", "")
    assert path.read_bytes() == b"$HOME `id` 'x'\nlast line\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert Path(f"{path}.2").read_bytes() == b"a\nb\n"


LONG = f"printf '%s\\n' 'a\tb' '{'x' * 5000}'"  # a tab and a very long line, which must be printed unchanged


def shown(capsys, script) -> str:
    display.show_administrator_commands(
        Output(), [OperationStep("n1", "hosts", "administrator", ["write /etc/hosts"], commands=[script])]
    )
    return capsys.readouterr().out


def test_the_commands_for_an_administrator_are_printed_unchanged(capsys):
    assert f"# hosts: write /etc/hosts\n{LONG}\n" in shown(capsys, LONG)


@pytest.mark.parametrize("steering", ["\x1b[2J", "\r", "\u202e"])
def test_commands_that_would_steer_a_terminal_are_not_printed(capsys, steering):
    said = shown(capsys, f"{LONG}{steering}")
    assert "printf" not in said
    assert "use --json" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("provider: ssh\nnodes: [{name: a, host: a}]\nssh: {sudo: false}\n", "needs storage.shared"),
        (
            "provider: ssh\nnodes: [{name: a, host: a}]\nssh: {sudo: false}\nstorage: {shared: /d, disk: /dev/b, mount: /d}\n",
            "only root can see whether a disk is empty",
        ),
        ("provider: virtual\nnodes: [{name: a}]\nssh: {sudo: false}\nstorage: {shared: /s}\n", "only with provider ssh"),
        ("provider: slurm\nslurm: {partition: a}\nssh: {sudo: false}\nstorage: {shared: /s}\n", "which never uses sudo"),
    ],
)
def test_a_file_that_cannot_be_provisioned_without_root_is_refused(tmp_path, text, says):
    (tmp_path / "cluster.yaml").write_text(f"schema: 1\nname: lab\n{text}")
    with pytest.raises(InputError, match=says):
        cluster.load_cluster(tmp_path / "cluster.yaml")
