"""Checks that all nodes can write to the shared folder and see the same files there."""

from __future__ import annotations

import secrets

from provision.check import Check, Outcome, each, without
from provision.node import Node, last_line
from provision.operation import Site, Target
from shardlab.remote.remote import CommandOutput

LIMIT_S = 60.0


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if each node can write a file into the shared folder and then reads the files of all nodes."""
    folder = site.cluster.storage.shared
    if folder is None:
        return Outcome(None, "cluster.yaml names no storage.shared")
    mark = f"{folder}/.shardlab-verify-{secrets.token_hex(4)}"
    nodes = site.standing
    try:
        written = each(nodes, lambda member: _write(member.node, mark))
        for member, answer in zip(nodes, written, strict=True):
            if answer.code != 0:
                why = f"it did not answer within {LIMIT_S:g} s" if answer.code is None else last_line(answer)
                says = f"{member.node.name} cannot write into {folder}: {why}"
                return Outcome(False, says, "is it mounted there (findmnt), and who owns it (ls -ld)?")
        wanted = sorted(member.node.name for member in nodes)
        read = each(nodes, lambda member: member.node.run(["sh", "-c", f"cat {mark}.*"], timeout_s=LIMIT_S))
        for member, answer in zip(nodes, read, strict=True):
            seen = sorted(answer.stdout.split())
            if seen != wanted:
                says = f"{member.node.name} sees only the files of {', '.join(seen) or 'no node'} in {folder}"
                return Outcome(False, says, "the folder is not the same on all nodes: compare findmnt on all nodes")
    finally:
        nodes[0].node.run(["sh", "-c", f"rm -f {mark}.*"], timeout_s=LIMIT_S)
    return Outcome(True, f"{folder}: {len(nodes)} nodes wrote files, and each node read all of them{without(site)}")


def _write(node: Node, mark: str) -> CommandOutput:
    return node.run(["sh", "-euc", f"echo {node.name} > {mark}.{node.name}"], timeout_s=LIMIT_S)


SHARED = Check("shared_storage", run, once=True)
