"""The sentence about a failed login, from the messages of OpenSSH."""

import contextlib
import os

from shardlab.remote.login_failure import describe_login_failure

SECOND_FACTOR = """\
OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.17 1 Jul 2025
debug1: Server host key: ssh-ed25519 SHA256:x
debug1: SSH2_MSG_SERVICE_ACCEPT received
debug1: Offering public key: /home/bob/.ssh/id_ed25519 ED25519 SHA256:y
debug1: Server accepts key: /home/bob/.ssh/id_ed25519 ED25519 SHA256:y
Authenticated using "publickey" with partial success.
debug1: Authentications that can continue: keyboard-interactive
debug1: No more authentication methods to try.
bob@uni: Permission denied (keyboard-interactive).
"""


def test_a_site_that_wants_a_second_factor_does_not_blame_the_key():
    said = describe_login_failure("uni", SECOND_FACTOR)
    assert said == "uni: it accepts the SSH key and asks for more: bob@uni: Permission denied (keyboard-interactive)."


def test_a_key_that_cannot_be_used_needs_its_passphrase():
    text = "".join(line for line in SECOND_FACTOR.splitlines(keepends=True) if "partial" not in line)
    assert "passphrase" in describe_login_failure("uni", text.replace("(keyboard-interactive)", "(publickey)"))


@contextlib.contextmanager
def without_root():
    """In this context, the process has the rights of a user who is not root."""
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)


def test_a_changed_key_in_the_file_of_all_users_is_replaced_by_an_administrator():
    text = "Offending ED25519 key in /etc/passwd:1\nHost key for uni has changed and you have requested strict checking.\n"
    with without_root():
        said = describe_login_failure("uni", text)
    assert (
        "If the machine was reinstalled, ask the administrator of your machine to replace the old key in /etc/passwd." in said
    )
    assert "ssh-keygen" not in said


def test_the_reason_stands_before_the_last_words_of_ssh():
    text = "Error checking host key ED25519 SHA256:x in revoked keys file /gone: No such file\nHost key verification failed.\n"
    assert describe_login_failure("uni", text).endswith("in revoked keys file /gone: No such file.")
