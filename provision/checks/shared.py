"""A shared folder that all nodes see the same files in, and may write into."""

from __future__ import annotations

import secrets

from provision.checks import Check, Outcome
from provision.facts import last_line
from provision.operations import Site, Target


def run(site: Site, target: Target) -> Outcome:
    """Each node writes a word; then each reads all words."""
    folder = site.cluster.storage.shared
    if folder is None:
        return Outcome(None, "cluster.yaml names no storage.shared")
    mark = f"{folder}/.shardlab-verify-{secrets.token_hex(4)}"
    nodes = [one.node for one in site.targets]
    try:
        for node in nodes:
            answer = node.run(["sh", "-euc", f"echo {node.name} > {mark}.{node.name}"], timeout_s=20)
            if answer.code != 0:
                why = "it did not answer within 20 s" if answer.code is None else last_line(answer)
                return Outcome(
                    False, f"{node.name} cannot write into {folder}: {why}", "is it mounted there (findmnt), and whose is it?"
                )
        wanted = sorted(node.name for node in nodes)
        for node in nodes:
            seen = sorted(node.run(["sh", "-c", f"cat {mark}.*"], timeout_s=20).stdout.split())
            if seen != wanted:
                says = f"{node.name} sees the files of {', '.join(seen) or 'nobody'} in {folder}"
                return Outcome(False, says, "the folder is not the same on all nodes: compare findmnt there and on the others")
    finally:
        nodes[0].run(["sh", "-c", f"rm -f {mark}.*"], timeout_s=20)
    return Outcome(True, f"{folder}: written by {len(nodes)} nodes, and read by each")


SHARED = Check("shared_storage", run, once=True)
