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
_KEY = re.compile(r"(ssh|ecdsa)-[a-z0-9-]+ [A-Za-z0-9+/=]+")
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
    as_user = ["runuser", "-u", keys.login, "--"] if target.node.may_sudo else []
    make_key = [*as_user, "env", f"HOME={keys.home}", "sh", "-euc", MAKE_KEY, "make", f"{keys.login}@{target.node.name}"]
    return [RunCommand(f"make an SSH key of {keys.login}", make_key, root=target.node.may_sudo)]


def plan_ssh_trust(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the node accept the users' keys of all nodes, and know the host keys of all nodes. Raises Unanswered."""
    if not site.cluster.ssh.between_nodes:
        return Nothing(NOT_SET)
    user = target.facts[KEYS]
    begin, end = (f"# {word} shardlab {site.cluster.name}" for word in ("begin", "end"))
    answers = site.answers(KEYS)
    absent_names = [member.node.name for member in site.targets if member not in [answering for answering, _ in answers]]
    if absent_names and begin in user.authorized:  # the keys of nodes that do not answer must stay in the files
        return Nothing(f"not changed: {', '.join(absent_names)} cannot be asked")
    if keyless := [member.node.name for member, answer in answers if not answer.key]:
        return [
            LocalCall("accept the keys of all nodes, once all nodes have a key", functools.partial(_raise_keyless, keyless))
        ]
    files = {
        f"{user.home}/.ssh/authorized_keys": (user.authorized, authorized_keys_lines(answers), f"{user.login}:", "600"),
    }
    if target.node.may_sudo:
        files[KNOWN_HOSTS] = (user.known, known_hosts_lines(answers), "root:root", "644")
    else:
        files[f"{user.home}/.ssh/known_hosts"] = (user.known_by_user, known_hosts_lines(answers), f"{user.login}:", "600")
    changes: list[Change] = []
    for path, (present_lines, lines, owner, mode) in files.items():
        block = [begin, *lines, end]
        if _find_block(target, path, present_lines, begin, end) != block:
            command = ["sh", "-euc", REPLACE_BLOCK, "block", path, begin, end, owner, mode]
            content = "".join(f"{line}\n" for line in block).encode()
            changes.append(
                RunCommand(
                    f"write the keys of {len(answers)} nodes into {path}", command, stdin=content, root=target.node.may_sudo
                )
            )
    return changes or Nothing(f"{len(answers)} nodes know one another")


def _raise_keyless(names: Sequence[str]) -> None:
    raise Unanswered(f"{', '.join(names)}: the user who logs in has no SSH key: run the operation keys first")


def authorized_keys_lines(answers: Sequence[tuple[Target, Keys]]) -> list[str]:
    """The lines of authorized_keys: the user's key of each node. A key that nodes share is listed once. Raises Unanswered."""
    lines: dict[str, str] = {}
    for target, keys in answers:
        lines.setdefault(_check_public_key(target, keys.key or ""), f"{keys.login}@{target.node.name}")
    return [f"{key} {comment}" for key, comment in lines.items()]


def known_hosts_lines(answers: Sequence[tuple[Target, Keys]]) -> list[str]:
    """The lines of known_hosts: the host keys of each node, under its names and addresses. Raises Unanswered."""
    lines = []
    for target, keys in answers:
        names = list(dict.fromkeys((target.node.name, target.node.host, target.node.address)))
        if target.node.port not in (None, 22):
            names += [f"[{name}]:{target.node.port}" for name in names]
        lines += [f"{','.join(names)} {_check_public_key(target, key)}" for key in keys.hosts]
    return lines


def _check_public_key(target: Target, key: str) -> str:
    if not _KEY.fullmatch(key):
        raise Unanswered(f"{target.node.name}: {key[:80]!r} is not a public key")
    return key


def _find_block(target: Target, path: str, lines: Sequence[str], begin: str, end: str) -> list[str]:
    """The lines of shardlab in a file on a node: from the line `begin` to the line `end`; empty if there are none.

    lines: all lines of the file. Raises Unanswered if `begin` or `end` is missing or occurs twice.
    """
    if begin not in lines and end not in lines:
        return []
    if (lines.count(begin), lines.count(end)) != (1, 1) or lines.index(begin) > lines.index(end):
        raise Unanswered(
            f"{target.node.name}: {path}: the lines {begin!r} and {end!r} must each occur once, in this order: remove them"
        )
    return list(lines[lines.index(begin) : lines.index(end) + 1])


SSH_KEYS = Operation("keys", plan_ssh_key)
SSH_TRUST = Operation("trust", plan_ssh_trust)
