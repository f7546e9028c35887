"""The public SSH keys of a machine and of the user who logs in; private keys are never sent."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery

# A private key has a passphrase if ssh-keygen cannot derive its public key with an empty passphrase.
PRINT_KEYS = """\
login=${SUDO_USER:-$(id -un)}
home=$(getent passwd "$login" | cut -d : -f 6)
key=$home/.ssh/id_ed25519
printf 'login %s\\nhome %s\\n' "$login" "$home"
if test -e "$key"; then printf 'key %s\\n' "$(ssh-keygen -y -P '' -f "$key" 2>/dev/null </dev/null | cut -d ' ' -f 1,2)"; fi
for path in /etc/ssh/ssh_host_*_key.pub; do test -f "$path" && printf 'host %s\\n' "$(cut -d ' ' -f 1,2 "$path")"; done
sed 's/^/authorized /' "$home/.ssh/authorized_keys" 2>/dev/null
sed 's/^/known /' /etc/ssh/ssh_known_hosts 2>/dev/null
sed 's/^/known_by_user /' "$home/.ssh/known_hosts" 2>/dev/null
exit 0
"""


class Keys(msgspec.Struct, frozen=True):
    """The keys that a login between nodes needs."""

    login: str
    """The user who logs in."""
    home: str
    """The home folder of this user."""
    key: str | None
    """The public key of this user; None: no key; empty: the key has a passphrase."""
    hosts: tuple[str, ...]
    """The machine's public host keys."""
    authorized: tuple[str, ...] = ()
    """The lines of the user's authorized_keys."""
    known: tuple[str, ...] = ()
    """The lines of /etc/ssh/ssh_known_hosts."""
    known_by_user: tuple[str, ...] = ()
    """The lines of the user's known_hosts."""


def build_command(python: str) -> list[str]:
    """The command that prints the public keys. It sends no private key."""
    return ["sh", "-c", PRINT_KEYS]


def parse(stdout: str) -> Keys:
    """The keys in the output of PRINT_KEYS. Raises ValueError if a line has an unknown first word or a key is missing."""
    values: dict[str, list[str]] = {tag: [] for tag in ("login", "home", "key", "host", "authorized", "known", "known_by_user")}
    for line in stdout.splitlines():
        line_tag, _, tag_value = line.partition(" ")
        if line_tag not in values:
            raise ValueError(f"{line[:80]!r} is an unexpected line.")
        values[line_tag].append(tag_value)
    if not (values["login"] and values["home"] and values["home"][0]):
        raise ValueError("the user who logs in is missing.")
    public_key = values["key"][0] if values["key"] else None
    host_keys, authorized, known_lines, user_known_lines = (
        tuple(values[name]) for name in ("host", "authorized", "known", "known_by_user")
    )
    return Keys(
        values["login"][0], values["home"][0], public_key, tuple(sorted(host_keys)), authorized, known_lines, user_known_lines
    )


KEYS = FactQuery("keys", build_command, parse, timeout_s=30, root=True)
