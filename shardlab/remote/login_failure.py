"""Says in one sentence why a login failed and what helps, from the messages of OpenSSH."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from shardlab.files import files

LOG_LEVEL = ["-o", "LogLevel=DEBUG1"]  # with it, a login that fails names the fingerprint and the keys that were offered
_DETAIL = re.compile(r"^(debug\d: |OpenSSH_|\s*$)")
# From here on, the machine has proved its host key, and its banner may contain any text.
_HOST_KEY_ACCEPTED = "SSH2_MSG_SERVICE_ACCEPT received"
_HOST = r"([A-Za-z0-9_.:%\[\]-]+)"
_UNKNOWN = re.compile(rf"host key is known for {_HOST} and you have requested strict checking")
_CHANGED = re.compile(rf"^Host key for {_HOST} has changed", re.M)
_REVOKED = re.compile(rf"^\S+ host key for {_HOST} was revoked|^Host key \S+ \S+ revoked by file (.+)$", re.M)
_OFFENDING = re.compile(r"^Offending \S+ key in (.+):(\d+)$", re.M)
_FOUND_KEY = re.compile(r"^debug1: Server host key: (\S+ SHA256:\S+)$", re.M)
_NO_CONNECTION = re.compile(r"^(?:ssh: )?connect to (?:host|address) (\S+) port (\d+): (.+)$", re.M)
_CLOSED = re.compile(r"^(?:kex_exchange_identification: )?(?:Connection (?:closed|reset)|read: Connection reset)", re.M)


def describe_login_failure(host: str, ssh_output: str, *, keeps_host_keys: bool = True) -> str:
    """The sentence for a login that failed. host: the name of the machine. ssh_output: what `ssh` printed with LOG_LEVEL.
    keeps_host_keys: whether `ssh` of the user keeps the host keys of new machines."""
    output_lines = [line.rstrip() for line in ssh_output.splitlines()]
    output_text = "\n".join(output_lines)
    text_before_login = output_text.partition(_HOST_KEY_ACCEPTED)[0]
    found_key = next(reversed(_FOUND_KEY.findall(text_before_login)), "its fingerprint is not known")
    messages = [line for line in output_lines if not _DETAIL.match(line)]
    if revoked := _REVOKED.search(text_before_login):
        place = "a line @revoked in a file of known host keys" if revoked[2] is None else f"the file {revoked[2]}"
        return (
            f"{revoked[1] or host}: its host key {found_key} is revoked by {place}, because somebody may have stolen it. Do "
            "not log in to this machine until its administrator has given it a new key."
        )
    if unknown := _UNKNOWN.search(text_before_login):
        login_advice = "log in once with ssh"
        if not keeps_host_keys:
            login_advice = f"name another UserKnownHostsFile than /dev/null in your SSH configuration and {login_advice}"
        return (
            f"{unknown[1]}: its host key is not known: {found_key}. Compare it with one that the machine's console or provider "
            f"shows, then {login_advice}, or write host_keys: accept-new under ssh in the cluster file."
        )
    if changed_match := _CHANGED.search(text_before_login):
        return _describe_changed_key(changed_match[1], found_key, _OFFENDING.search(text_before_login))
    if "Permission denied (" in output_text or "Too many authentication failures" in output_text:
        return f"{host}: {_describe_refusal(output_text, messages)}"
    if refused_match := _NO_CONNECTION.search(output_text):
        place = f"port {refused_match[2]}" if refused_match[1] == host else f"{refused_match[1]}, port {refused_match[2]}"
        return f"{host}: cannot be reached: {refused_match[3]} ({place})."
    if _CLOSED.search(output_text):
        return f"{host}: it closed the connection during the login: it may be starting, or have too many logins."
    reasons = [line for line in messages if line != "Host key verification failed."] or messages or ["ssh gave no reason"]
    reason = reasons[-1].removeprefix("ssh: ").rstrip(".")
    return f"{host}: cannot be reached: {reason}."


def compute_key_fingerprint(key_bytes: bytes) -> str:
    """The SHA-256 fingerprint of a public key, in the format of ssh-keygen -l."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key_bytes).digest()).decode().rstrip("=")


def _describe_changed_key(name: str, found_key: str, offending_match: re.Match[str] | None) -> str:
    """name: the machine, as files of host keys name it. offending_match: the file and the line of the known key."""
    known_key, advice = "another one", "replace the old key where your SSH configuration takes it from"
    # The file does not exist if the key comes from a command (KnownHostsCommand).
    if offending_match is not None and (file := Path(offending_match[1])).is_file():
        key_lines = files.read(file, follow_links=True).decode(errors="replace").splitlines()[int(offending_match[2]) - 1 :][:1]
        key_match = re.search(r" (?:ssh|ecdsa|sk)-\S+ ([A-Za-z0-9+/=]+)", key_lines[0]) if key_lines else None
        known_key = compute_key_fingerprint(base64.b64decode(key_match[1])) if key_match is not None else known_key
        advice = f"ask the administrator of your machine to replace the old key in {file}"
        if all(os.access(path, os.W_OK, effective_ids=True) for path in (file, file.parent)):  # ssh-keygen writes a new file
            advice = f"remove the old key: {shlex.join(['ssh-keygen', '-R', name, '-f', offending_match[1]])}"
    return (
        f"{name}: its host key CHANGED: known is {known_key}, found is {found_key}. If the machine was reinstalled, {advice}. "
        "Otherwise the connection may be intercepted."
    )


def _describe_refusal(text: str, messages: Sequence[str]) -> str:
    """Why a machine accepted no key of this user. messages: the lines of `text` without details."""
    if "with partial success" in text:  # the site wants a password or a code, too
        return f"it accepts the SSH key and asks for more: {messages[-1].rstrip('.')}."
    if "debug1: Server accepts key: " in text:  # the key could not be used, because nobody can be asked for its passphrase
        return "the key needs a passphrase; add it to an agent: ssh-add."
    if "debug1: Authentications that can continue" in text and "debug1: Offering public key: " not in text:
        return (
            "found no SSH key: no SSH agent has a key, and ~/.ssh has no key with a default name. Add a key to an agent "
            f"(ssh-add), or set ssh.identity in the cluster file to the path of a key. {messages[-1].rstrip('.')}."
        )
    return f"it accepts no SSH key of this user: {messages[-1].rstrip('.')}."
