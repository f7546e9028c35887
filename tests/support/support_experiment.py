"""Practice nodes that imitate a CloudLab experiment: two networks, an unused partition, the program mkextrafs.pl, a manifest.

The network of the practice cluster is the control network, which logins use. The experiment network is a second bridge, on
which this machine has no address.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import support_cloudlab
from support_e2e import HANG_S
from support_practice import Practice, bad, provisioned, unprovisioned
from support_slurm import BOOT

from provision.facts.mkextrafs import MKEXTRAFS_PATH
from provision.practice import network
from provision.practice.base import PRACTICE_USER
from shardlab.cluster.cloudlab_keys import EXTRA_DISK

NAME = "test-cloudlab"
NODES = ("gpu0", "gpu1")
LEASE = timedelta(hours=30)
CONTROL, EXPERIMENT = "host0", "exp0"  # names of a node's interfaces on the control network and the experiment network
PARTITION = "/dev/sda4"  # on a node: the unused partition of the boot disk
MACHINES = f"""\
schema: 1
name: {NAME}
provider: virtual
nodes: [{", ".join(f"{{name: {name}}}" for name in NODES)}]
lan: {{subnet: 10.89.79.0/24}}
storage: {{shared: SHARED}}
"""
# The cluster file of the experiment. The kernel of practice nodes has no NFS, so the nodes share a folder of this machine.
CLUSTER = f"""\
schema: 1
name: {NAME}
provider: cloudlab
cloudlab: {{{{manifest: manifest.xml}}}}
ssh: {{{{user: {PRACTICE_USER}, identity: {{identity}}, host_keys: accept-new}}}}
storage: {{{{shared: {{shared}}}}}}
data: {{{{path: {EXTRA_DISK}/datasets}}}}
environment: {{{{wheelhouse: /opt/wheels}}}}
slurm: {{{{partition: gpu}}}}
"""
# A script that does the same as CloudLab's program mkextrafs.pl: it makes a file system in partition 4 of the boot disk, and
# mounts the file system now and at every boot. It fails if the folder does not exist, or if the partition already has a file
# system and the option -f is not given.
MKEXTRAFS = f"""\
#!/bin/sh
set -e
quiet= force=
while getopts qf option; do
  case $option in q) quiet=yes;; f) force=yes;; *) echo "usage: mkextrafs [-q] [-f] FOLDER" >&2; exit 1;; esac
done
shift $((OPTIND - 1))
test $# -eq 1 -a -d "$1" || {{ echo "*** mkextrafs: $1 does not exist" >&2; exit 1; }}
if mountpoint -q "$1" || grep -q " $1 " /etc/fstab; then
  test "$quiet" && exit 0
  echo "*** mkextrafs: there is already a file system at $1" >&2; exit 1
fi
if test -z "$force" && blkid {PARTITION}; then
  echo "*** mkextrafs: the partition {PARTITION} is in use" >&2; exit 1
fi
mkfs.ext4 -q {PARTITION}
echo "{PARTITION} $1 ext4 defaults 0 0" >> /etc/fstab
mount "$1"
"""


class PracticeExperiment:
    """The imitated experiment, and a workspace on this machine for the commands of a test."""

    def __init__(self, practice: Practice, workspace: Path) -> None:
        self.practice, self.path = practice, workspace
        self.bridge = network.make_interface_name(f"{practice.cluster.name}/experiment")
        self.hosts = {name: node.host for name, node in practice.nodes.items()}  # on the control network
        self.addresses = {name: f"10.90.79.{place}" for place, name in enumerate(NODES, 1)}  # on the experiment network
        self.verified: dict[str, Any] = {}
        self.expires = (datetime.now(UTC) + LEASE).replace(microsecond=0)

    def write_files(self) -> None:
        """Write the manifest, which describes the practice nodes, and the cluster file."""
        elements = [
            support_cloudlab.node(
                name,
                place,
                users=("alice", PRACTICE_USER),
                host=self.hosts[name],
                control=self.hosts[name],
                address=self.addresses[name],
                mac=self.links(name)[EXPERIMENT]["address"].replace(":", ""),
            )
            for place, name in enumerate(NODES, 1)
        ]
        expires = self.expires.strftime("%Y-%m-%dT%H:%M:%SZ")
        text = support_cloudlab.manifest(*elements, support_cloudlab.lan(NODES), expires=expires)
        (self.path / "manifest.xml").write_text(text)
        identity = self.practice.folder / ".shardlab/practice/id_ed25519"
        (self.path / "cluster.yaml").write_text(CLUSTER.format(identity=identity, shared=self.practice.shared))

    def links(self, name: str) -> dict[str, dict[str, Any]]:
        """The network interfaces of a node with their counters, by interface name. Reading them needs no login to the node."""
        said = json.loads(self._in_network(name, "ip", "-json", "-statistics", "link", "show"))
        return {link["ifname"]: link for link in said}

    def sent_bytes(self, interface: str) -> dict[str, int]:
        """How many bytes the interface with this name has sent on each node, by node name."""
        return {name: self.links(name)[interface]["stats64"]["tx"]["bytes"] for name in NODES}

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one of our commands in the workspace, and check its exit code."""
        command = [sys.executable, "-P", "-m", *words, "--workspace", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def verify(self) -> None:
        """Run `provision`, check that it verified all nodes, and keep its JSON document in `verified`."""
        said = self.run("provision", "--json").stdout
        self.verified = json.loads(said)
        assert self.verified["verified"] is True, bad(said)

    def add_network(self, name: str) -> None:
        """Connect a node to the experiment network."""
        cable = network.make_interface_name(f"{self.practice.cluster.name}/{name}/experiment")
        pid = str(self.practice.machine(name).find_pid())
        ip("link", "add", cable, "master", self.bridge, "type", "veth", "peer", "name", EXPERIMENT, "netns", pid)
        ip("link", "set", cable, "up")
        self._in_network(name, "ip", "address", "add", f"{self.addresses[name]}/16", "dev", EXPERIMENT)
        self._in_network(name, "ip", "link", "set", EXPERIMENT, "up")

    def add_partition(self, name: str, device: str) -> None:
        """Give a node the program mkextrafs.pl and an unused partition.

        device: a block device of this machine, which becomes the unused partition of the node's boot disk.
        """
        node = Path(f"/proc/{self.practice.machine(name).find_pid()}/root")
        os.mknod(node / PARTITION[1:], 0o600 | stat.S_IFBLK, Path(device).stat().st_rdev)
        program = self.practice.machine(name).root_folder / MKEXTRAFS_PATH[1:]
        program.parent.mkdir(parents=True)
        program.write_text(MKEXTRAFS)
        program.chmod(0o755)

    def _in_network(self, name: str, *words: str) -> str:
        pid = str(self.practice.machine(name).find_pid())
        return subprocess.run(["nsenter", "--target", pid, "--net", *words], check=True, capture_output=True, text=True).stdout


def experiments(folder: Path, workspace: Path) -> Iterator[PracticeExperiment]:
    """Yield an imitated experiment whose nodes `provision` set up and verified. It is removed at the end."""
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(disk(folder.with_name(f"{folder.name}-{name}.img"))) for name in NODES]
        practice = stack.enter_context(unprovisioned(folder, MACHINES))
        made = PracticeExperiment(practice, workspace)
        network.delete_bridge(made.bridge)  # a test that was killed may have left this bridge
        ip("link", "add", made.bridge, "type", "bridge")
        stack.callback(network.delete_bridge, made.bridge)
        ip("link", "set", made.bridge, "up")
        for name, device in zip(NODES, disks, strict=True):
            subprocess.run([sys.executable, "-P", "-c", BOOT, practice.file, practice.folder, name], check=True)
            made.add_network(name)
            made.add_partition(name, device)
        made.write_files()
        stack.enter_context(provisioned(practice, made.verify))
        yield made


@contextlib.contextmanager
def disk(file: Path) -> Iterator[str]:
    """Yield a block device of this machine whose content is in a new file. The device and the file are removed at the end."""
    with file.open("wb") as handle:
        handle.truncate(1 << 30)
    try:
        device = subprocess.run(
            ["losetup", "--find", "--show", file], check=True, capture_output=True, text=True
        ).stdout.strip()
        try:
            yield device
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)
    finally:
        file.unlink()


def ip(*words: str) -> None:
    """Run the command `ip`. Raises CalledProcessError if it fails."""
    subprocess.run(["ip", *words], check=True, capture_output=True)
