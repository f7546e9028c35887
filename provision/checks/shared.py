"""Checks that all nodes can write to the shared folder and see the same files there."""

from __future__ import annotations

import secrets

from provision.check import Check, Outcome, absent_nodes_note, map_targets
from provision.node import Node, find_error_line
from provision.operation import Site, Target
from shardlab.remote.remote import CommandOutput

LIMIT_S = 60.0


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if each node can write a file into the shared folder and then reads the files of all nodes."""
    folder = site.cluster.storage.shared
    if folder is None:
        return Outcome(None, "cluster.yaml names no storage.shared")
    marker_path = f"{folder}/.shardlab-verify-{secrets.token_hex(4)}"
    members = site.active_targets
    try:
        write_answers = map_targets(members, lambda node_target: _write_marker(node_target.node, marker_path))
        for node_target, write_output in zip(members, write_answers, strict=True):
            if write_output.code != 0:
                why = f"it did not answer within {LIMIT_S:g} s" if write_output.code is None else find_error_line(write_output)
                sentence = f"{node_target.node.name} cannot write into {folder}: {why}"
                return Outcome(False, sentence, "is it mounted there (findmnt), and who owns it (ls -ld)?")
        expected_names = sorted(node_target.node.name for node_target in members)
        read_outputs = map_targets(
            members, lambda node_target: node_target.node.run(["sh", "-c", f"cat {marker_path}.*"], timeout_s=LIMIT_S)
        )
        for node_target, write_output in zip(members, read_outputs, strict=True):
            seen_names = sorted(write_output.stdout.split())
            if seen_names != expected_names:
                sentence = f"{node_target.node.name} sees only the files of {', '.join(seen_names) or 'no node'} in {folder}"
                return Outcome(False, sentence, "the folder is not the same on all nodes: compare findmnt on all nodes")
    finally:
        members[0].node.run(["sh", "-c", f"rm -f {marker_path}.*"], timeout_s=LIMIT_S)
    return Outcome(True, f"{folder}: {len(members)} nodes wrote files, and each node read all of them{absent_nodes_note(site)}")


def _write_marker(node: Node, marker_path: str) -> CommandOutput:
    return node.run(["sh", "-euc", f"echo {node.name} > {marker_path}.{node.name}"], timeout_s=LIMIT_S)


SHARED = Check("shared_storage", run, once=True)
