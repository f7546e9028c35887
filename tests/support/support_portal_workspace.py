"""A workspace whose experiment the stand-in portal creates, and manifests that `provision` must refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support_cloudlab import lan, manifest, node
from support_portal import TOKEN, URN, serve, two_nodes

from provision import cli
from provision.cloudlab import creation, termination

FILE = """\
schema: 1
name: bench
provider: cloudlab
cloudlab: {{project: myproj, hardware: d8545, nodes: 2, lan_mbps: 25000, blockstore_gib: 0, portal_url: "{}"}}
ssh: {{user: alice, host_keys: accept-new}}
"""
# A Python script that runs `provision` in a process of its own, with the short polling interval of the tests.
COMMAND = (
    "import sys; from shardlab.terminal import command_start; from provision.cloudlab import creation, termination; "
    "creation.POLL_S = termination.POLL_S = 0.05; sys.exit(command_start.start_command('provision'))"
)


HOSTILE = {
    "a DOCTYPE": (URN, two_nodes().replace("<rspec", "<!DOCTYPE rspec []><rspec", 1)),
    "larger than 16 MiB": (URN, two_nodes().replace("</rspec>", " " * (16 << 20) + "</rspec>")),
    "the host of a login": (URN, two_nodes().replace("127.0.0.1", "-oProxyCommand=id")),
    "is of no aggregate": ("urn:publicid:IDN+../../x+authority+cm", two_nodes()),
    "lists no machine": (URN, manifest()),
    "the manifests have 1 node(s)": (URN, manifest(node("node0", 1), lan(["node0"]))),
}


class Place:
    """A workspace, the stand-in portal that `provision` uses for it, and the output of the last `provision`."""

    def __init__(self, folder, portal, capsys):
        self.folder, self.portal, self.capsys = folder, portal, capsys
        self.own = folder / ".shardlab"
        (folder / "cluster.yaml").write_text(FILE.format(portal.url))
        self.out = self.document = ""

    def provision(self, *words):
        """Run `provision`; returns its exit code.

        The nodes cannot be reached. So the exit code is 1 even if all requests to the portal succeed.
        """
        try:
            code = cli.main(["--workspace", str(self.folder), *words])
        except SystemExit as end:  # the words themselves are refused
            code = end.code
        said = self.capsys.readouterr()
        self.document = said.out
        self.out = " ".join((said.out + said.err).split())
        return code

    def begun(self, *words, stdin=subprocess.DEVNULL):
        command = [sys.executable, "-c", COMMAND, "-v", "--workspace", str(self.folder), *words]
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_for(self, method, end, times=1):
        with self.portal.changed:
            assert self.portal.changed.wait_for(
                lambda: sum(path.endswith(end) for _, path, _ in self.portal.asked(method)) >= times, 60
            )

    def kept(self):
        """The names of all files in .shardlab, except locks and the trust mark, which every new workspace has."""
        found = [path for path in self.own.rglob("*") if path.is_file() and path.suffix != ".lock"]
        return sorted(str(path.relative_to(self.own)) for path in found if not path.name.startswith("trusted."))

    def change(self, before, after):
        file = self.folder / "cluster.yaml"
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))


@contextmanager
def place_of_portal(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Iterator[Place]:
    """Make a workspace without an experiment, and its stand-in portal. The portal's token is in the user's token file."""
    server, home, workspace = (tmp_path / name for name in ("portal", "home", "workspace"))
    for folder in (server, home / ".config/shardlab", workspace):
        folder.mkdir(parents=True)
    workspace.chmod(0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("CLOUDLAB_TOKEN", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(server / "certificate.pem"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(creation, "POLL_S", 0.01)
    monkeypatch.setattr(termination, "POLL_S", 0.01)
    with serve(server) as portal:
        token = home / f".config/shardlab/cloudlab-token.{urlsplit(portal.url).netloc}"
        token.write_text(TOKEN)
        token.chmod(0o600)
        yield Place(workspace, portal, capsys)
