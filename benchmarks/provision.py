"""Measures how long `provision` takes to make a verified Slurm cluster of 3 practice nodes, and the reboot of a node.

    sudo python benchmarks/provision.py [--rounds 1] [--subnet 10.91.0.0/24] [--shared /srv/bench-provision]

`provision` runs twice; the second time, nothing has to be changed. The base system and the wheels are cached first. For
comparison, in turns with `provision`, plain ssh commands do only what cannot be avoided: they boot the same nodes, and install
the same packages with apt and the same wheels with pip, on all nodes at once. They configure and check nothing, so their time
is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from provision import software
from provision.check import map_targets
from provision.fact import FactAnswers
from provision.operation import Nothing, Target
from provision.operations import packages
from provision.operations.reboot import read_boot_id
from provision.practice.base import PRACTICE_USER
from provision.practice.machine import WHEELS_FOLDER
from provision.providers import virtual
from provision.providers.ssh import SshNode
from shardlab.cluster import cluster
from shardlab.workspace.workspace import Workspace

FILE = """\
schema: 1
name: bench-provision
provider: virtual
nodes: [{{name: head, roles: [controller]}}, {{name: work1}}, {{name: work2}}]
lan: {{subnet: {subnet}, mbps: 1000}}
gpus: {{type: practice, per_node: 2}}
storage: {{shared: {shared}}}
slurm: {{}}
"""


class Bench:
    """A workspace with the cluster file of three practice nodes, and the actions that are timed."""

    def __init__(self, folder: Path, subnet: str, shared: Path) -> None:
        self.shared, self.workspace, self.file = shared, Workspace(folder), folder / "cluster.yaml"
        self.file.write_text(FILE.format(subnet=subnet, shared=shared))
        self.cluster = cluster.load_cluster(self.file)
        self.nodes = virtual.list_nodes(self.cluster, self.workspace)

    def provision(self, *words: str) -> dict:
        command = [sys.executable, "-P", "-m", "provision", self.file, *words, "--json", "--workspace", self.workspace.path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def down(self) -> None:
        self.provision("down")
        subprocess.run(["rm", "-rf", self.shared], check=True)

    def apply(self, changes: bool) -> None:
        said = self.provision()
        assert said["verified"] is True, said
        assert bool(said["changes"]) is changes, said

    def by_hand(self) -> None:
        # The nodes are booted in a child process that ends afterwards. The processes that boot a node again after a reboot are
        # then no longer our children, so they can end without being waited for.
        booting = multiprocessing.get_context("fork").Process(target=self._boot)
        booting.start()
        booting.join()
        assert booting.exitcode == 0
        map_targets(self._targets(), lambda target: self._by_hand(target.node))

    def _by_hand(self, node: SshNode) -> None:
        role = packages.CONTROLLER_PACKAGES if node is self.nodes[0] else packages.WORKER_PACKAGES
        apt = "sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install"
        script = f"sudo apt-get -qq update; {apt} {' '.join([*packages.BASE_PACKAGES, *packages.MUNGE_PACKAGES, *role])}"
        if node is self.nodes[0]:
            words = " ".join(f"'{word}'" for word in software.list_required_packages())
            pip = f"{self.shared}/venv/bin/python -m pip -q install --no-index --find-links {WHEELS_FOLDER}"
            script += f" && python3 -m venv {self.shared}/venv && {pip} {words}"
        known = self.workspace.shardlab_folder / "known_hosts"
        key = self.workspace.shardlab_folder / "practice" / "id_ed25519"
        ssh = [
            "ssh",
            "-i",
            key,
            "-o",
            f"UserKnownHostsFile={known}",
            "-o",
            "BatchMode=yes",
            f"{PRACTICE_USER}@{node.host}",
            script,
        ]
        done = subprocess.run(ssh, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, done.stderr

    def _boot(self) -> None:
        def boot(target: Target) -> None:
            booted = virtual.bring_up(self.cluster, self.workspace, target.node)
            assert not isinstance(booted, Nothing)
            for change in booted:
                change.make(target.node)

        map_targets(self._targets(), boot)

    def _targets(self) -> list[Target]:
        return [Target(node, FactAnswers(node)) for node in self.nodes]

    def reboot(self) -> None:
        """Reboot one node, and wait until it answers over SSH with another boot id."""
        node = self.nodes[1]
        before = read_boot_id(node)
        node.run(["systemctl", "reboot"], timeout_s=10, root=True)
        while read_boot_id(node) in (None, before):
            time.sleep(0.05)


def seconds(of: Callable[[], object]) -> float:
    begin = time.monotonic()
    of()
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="(default: 1)")
    parser.add_argument("--subnet", default="10.91.0.0/24", help="(default: 10.91.0.0/24)")
    parser.add_argument("--shared", type=Path, default=Path("/srv/bench-provision"), help="is removed (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.shared.exists():
        parser.error(f"{arguments.shared} is there already, and would be removed")
    took: dict[str, list[float]] = {"by hand": [], "first": [], "second": [], "reboot": []}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.subnet, arguments.shared)
        bench.provision("warm")
        try:
            for _ in range(arguments.rounds):
                took["by hand"].append(seconds(bench.by_hand))
                bench.down()
                took["first"].append(seconds(lambda: bench.apply(True)))
                took["second"].append(seconds(lambda: bench.apply(False)))
                took["reboot"].append(seconds(bench.reboot))
                bench.down()
        finally:
            bench.down()
    middle = {name: statistics.median(all_of_it) for name, all_of_it in took.items()}
    ratios = [ours / bare for ours, bare in zip(took["first"], took["by hand"], strict=True)]
    print(f"from nothing to a verified cluster  {middle['first']:6.1f} s, {statistics.median(ratios):.2f} times the next")
    print(f"boots, packages, wheels by ssh      {middle['by hand']:6.1f} s")
    print(f"a second time, nothing to do        {middle['second']:6.1f} s")
    print(f"a node's reboot until SSH           {middle['reboot']:6.1f} s")


if __name__ == "__main__":
    main()
