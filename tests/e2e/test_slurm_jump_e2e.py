"""`provision`, `jobs` and `collect` reach a controller that lies behind two other machines, which `~/.ssh/config` names."""

import json
import pwd
from pathlib import Path

import pytest
from support_slurm import MATRIX, Desk

from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.e2e
# Of the machines in CONFIG, this machine can reach only `gate`. SSH knows the name `gate` from CONFIG only; the names of the
# other machines are known only behind `gate`.
CONFIG = """\
Host *
  User {user}
  IdentityFile "{identity}"
Host gate
  HostName {gate}
  ProxyJump none
Host head
  ProxyJump gate,work2
"""
FAR = """\
schema: 1
name: far
provider: ssh
nodes: [{{name: head, host: head, roles: [controller, worker]}}]
storage: {{shared: {shared}}}
"""


@pytest.fixture
def desk(slurm, tmp_path):
    """The machine of a person whose ~/.ssh/config is CONFIG. The host keys of the machines on the way to the controller are
    only in the workspace, not in ~/.ssh/known_hosts."""
    address = {name: node.address for name, node in slurm.nodes.items()}
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    text = CONFIG.format(user=address["head"].user, identity=address["head"].identity, gate=address["work1"].host)
    (home / ".ssh/config").write_text(text)
    passwd = tmp_path / "passwd"  # OpenSSH finds the home folder in this file and ignores $HOME
    me = pwd.getpwuid(0)
    passwd.write_text(Path("/etc/passwd").read_text().replace(f":{me.pw_dir}:{me.pw_shell}", f":{home}:{me.pw_shell}", 1))
    in_home = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$0" /etc/passwd && exec "$@"',
        str(passwd),
        "env",
        f"HOME={home}",
    ]
    folder = tmp_path / "100% 'far'"
    folder.mkdir()
    found = Desk(slurm, folder, in_home)
    own = Workspace(folder).shardlab_folder
    keys = dict(line.split(" ", 1) for line in (own / "known_hosts").read_text().splitlines())
    names = {"head": "head", "work2": "work2", address["work1"].host: "work1"}
    (own / "known_hosts").write_text("".join(f"{name} {keys[address[node].host]}\n" for name, node in names.items()))
    inventory = json.loads((own / "inventory.json").read_text())
    inventory["nodes"] = [node | {"host": node["name"]} for node in inventory["nodes"]]
    (own / "inventory.json").write_text(json.dumps(inventory))
    return found


def test_commands_reach_the_controller_through_two_jump_hosts(desk):
    (desk.path / "far.yaml").write_text(FAR.format(shared=desk.slurm.shared))
    (head,) = json.loads(desk.run("provision", str(desk.path / "far.yaml"), "facts", "--json").stdout)["nodes"]
    assert [desk.slurm.nodes["head"].address.host] in head["addresses"].values()
    (desk.path / "one.yaml").write_text(MATRIX.format(name="far", steps=3, more="axes: {strategy: [single]}"))
    sent = json.loads(desk.run("jobs", "submit", "--matrix", str(desk.path / "one.yaml"), "--wait", "--json").stdout)
    assert [run["state"] for run in sent["runs"]] == ["completed"]
    assert "1 completed" in desk.run("jobs", "status").stdout
    assert "nothing to cancel" in desk.run("jobs", "cancel", "--all").stdout
    assert desk.run("jobs", "logs", "single*").stdout
    told = desk.path / ".shardlab/away.json"
    # The file away.json contains the mark of the folder on the cluster. If the mark in it is changed, this machine believes
    # that it cannot see the folder, so `collect fetch` must copy the files.
    told.write_text(told.read_text().replace('"mark": "', '"mark": "another '))
    (run,) = json.loads(desk.run("collect", "fetch", "--json").stdout)
    assert (run["complete"], run.get("problems", [])) == (True, [])
