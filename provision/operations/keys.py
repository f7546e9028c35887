"""SSH between nodes, for launchers that need it. Each node has a key, which all nodes accept. Private keys are not copied."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from provision.fact import Unanswered
from provision.facts.keys import KEYS, Keys
from provision.operation import Change, LocalCall, Nothing, Operation, RunCommand, Site, Target

KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
NOT_SET = "ssh.between_nodes is not set in cluster.yaml"
_PUBLIC_KEY = re.compile(r"(ssh|ecdsa)-[a-z0-9-]+ [A-Za-z0-9+/=]+")
# The key is made under a temporary name and then linked to its final name. If another node, which shares the home folder, has
# made a key first, the link fails and the key of the other node is used.
MAKE_KEY = """\
umask 077
mkdir -p -- "$HOME/.ssh"
new=$(mktemp -d -- "$HOME/.ssh/new.XXXXXX")
trap 'rm -rf -- "$new"' EXIT
ssh-keygen -q -t ed25519 -N '' -C "$1" -f "$new/key" </dev/null
if ln -T -- "$new/key" "$HOME/.ssh/id_ed25519" 2>/dev/null; then mv -f -- "$new/key.pub" "$HOME/.ssh/id_ed25519.pub"; fi
test -f "$HOME/.ssh/id_ed25519\""""
# Replaces the lines of shardlab in a file, from the line $2 to the line $3, by the lines on standard input. Other lines stay.
REPLACE_BLOCK = """\
path=$(readlink -f -- "$1"); begin=$2; end=$3
umask 077
new=$(mktemp -- "$path.XXXXXX")
trap 'rm -f -- "$new"' EXIT
others='$0 == b {skip = 1} !skip {print} $0 == e {skip = 0}'
if test -e "$path"; then sed -e '$a\\' -- "$path" | awk -v b="$begin" -v e="$end" "$others" > "$new"; fi
cat >> "$new"
chown -- "$4" "$new"
chmod -- "$5" "$new"
sync -- "$new"
mv -fT -- "$new" "$path\""""


def plan_ssh_key(site: Site, target: Target) -> list[Change] | Nothing:
    """Make a key for the user who logs in, on the node. If the user has a key, this key is used. Raises Unanswered."""
    if not site.cluster.ssh.between_nodes:
        return Nothing(NOT_SET)
    keys = target.facts[KEYS]
    if keys.key == "":
        raise Unanswered(
            f"{target.node.name}: {keys.home}/.ssh/id_ed25519 cannot be read without a passphrase, so no program can log in "
            "with it from node to node: rename this key on the node, and run the same command again"
        )
    if keys.key is not None:
        return Nothing(f"{keys.login} has a key")
    user_prefix = ["runuser", "-u", keys.login, "--"] if target.node.may_sudo else []
    key_command = [*user_prefix, "env", f"HOME={keys.home}", "sh", "-euc", MAKE_KEY, "make", f"{keys.login}@{target.node.name}"]
    return [RunCommand(f"make an SSH key of {keys.login}", key_command, root=target.node.may_sudo)]


def plan_ssh_trust(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the node accept the users' keys of all nodes, and know the host keys of all nodes. Raises Unanswered."""
    if not site.cluster.ssh.between_nodes:
        return Nothing(NOT_SET)
    user_keys = target.facts[KEYS]
    begin_line, end_line = (f"# {marker_word} shardlab {site.cluster.name}" for marker_word in ("begin", "end"))
    key_answers = site.collect_answers(KEYS)
    absent_names = [member.node.name for member in site.targets if member not in [answering for answering, _ in key_answers]]
    if absent_names and begin_line in user_keys.authorized:  # the keys of nodes that do not answer must stay in the files
        return Nothing(f"not changed: {', '.join(absent_names)} cannot be asked")
    if keyless := [member.node.name for member, node_keys in key_answers if not node_keys.key]:
        return [
            LocalCall("accept the keys of all nodes, once all nodes have a key", functools.partial(_raise_keyless, keyless))
        ]
    key_lines_by_path = {
        f"{user_keys.home}/.ssh/authorized_keys": (
            user_keys.authorized,
            make_authorized_keys_lines(key_answers),
            f"{user_keys.login}:",
            "600",
        )
    }
    if target.node.may_sudo:
        key_lines_by_path[KNOWN_HOSTS] = (user_keys.known, make_known_hosts_lines(key_answers), "root:root", "644")
    else:
        key_lines_by_path[f"{user_keys.home}/.ssh/known_hosts"] = (
            user_keys.known_by_user,
            make_known_hosts_lines(key_answers),
            f"{user_keys.login}:",
            "600",
        )
    changes: list[Change] = []
    for path, (present_lines, wanted_lines, owner, mode) in key_lines_by_path.items():
        block_lines = [begin_line, *wanted_lines, end_line]
        if _find_block(target, path, present_lines, begin_line, end_line) != block_lines:
            command = ["sh", "-euc", REPLACE_BLOCK, "block", path, begin_line, end_line, owner, mode]
            content = "".join(f"{line}\n" for line in block_lines).encode()
            changes.append(
                RunCommand(
                    f"write the keys of {len(key_answers)} nodes into {path}", command, stdin=content, root=target.node.may_sudo
                )
            )
    return changes or Nothing(f"{len(key_answers)} nodes know one another")


def _raise_keyless(keyless_names: Sequence[str]) -> None:
    raise Unanswered(f"{', '.join(keyless_names)}: the user who logs in has no SSH key: run the operation keys first")


def make_authorized_keys_lines(key_answers: Sequence[tuple[Target, Keys]]) -> list[str]:
    """The lines of authorized_keys: the user's key of each node. A key that nodes share is listed once. Raises Unanswered."""
    comment_by_key: dict[str, str] = {}
    for target, node_keys in key_answers:
        comment_by_key.setdefault(_check_public_key(target, node_keys.key or ""), f"{node_keys.login}@{target.node.name}")
    return [f"{public_key} {comment}" for public_key, comment in comment_by_key.items()]


def make_known_hosts_lines(key_answers: Sequence[tuple[Target, Keys]]) -> list[str]:
    """The lines of known_hosts: the host keys of each node, under its names and addresses. Raises Unanswered."""
    host_lines = []
    for target, node_keys in key_answers:
        host_names = list(dict.fromkeys((target.node.name, target.node.host, target.node.address)))
        if target.node.port not in (None, 22):
            host_names += [f"[{host_name}]:{target.node.port}" for host_name in host_names]
        host_lines += [f"{','.join(host_names)} {_check_public_key(target, host_key)}" for host_key in node_keys.hosts]
    return host_lines


def _check_public_key(target: Target, key_text: str) -> str:
    if not _PUBLIC_KEY.fullmatch(key_text):
        raise Unanswered(f"{target.node.name}: {key_text[:80]!r} is not a public key")
    return key_text


def _find_block(target: Target, file_path: str, file_lines: Sequence[str], begin: str, end: str) -> list[str]:
    """The lines of shardlab in a file on a node: from the line `begin` to the line `end`; empty if there are none.

    file_lines: all lines of the file. Raises Unanswered if `begin` or `end` is missing or occurs twice.
    """
    if begin not in file_lines and end not in file_lines:
        return []
    if (file_lines.count(begin), file_lines.count(end)) != (1, 1) or file_lines.index(begin) > file_lines.index(end):
        raise Unanswered(
            f"{target.node.name}: {file_path}: the lines {begin!r} and {end!r} must each occur once, in this order: remove them"
        )
    return list(file_lines[file_lines.index(begin) : file_lines.index(end) + 1])


SSH_KEYS = Operation("keys", plan_ssh_key)
SSH_TRUST = Operation("trust", plan_ssh_trust)
