"""The token that authenticates this user at the CloudLab portal. It is a secret, so shardlab writes it into no message or
file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from shardlab.cluster.cloudlab_keys import TOKEN_VARIABLE
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files

DEFAULT_URL = "https://boss.emulab.net:43794"  # the address of CloudLab's portal
TOKEN_FILE = Path(".config", "shardlab", "cloudlab-token")  # the file with the token, relative to the home folder of the user
MOST_BYTES = 16 << 10
TOKEN_PLACEHOLDER = "[token]"
TOKEN_HELP = (
    f"To get a token, sign in at the portal, choose your name, then Portal API Token; store it in ~/{TOKEN_FILE} with mode "
    f"0600, or set {TOKEN_VARIABLE}. A token for the portal of another cloudlab.portal_url is in ~/{TOKEN_FILE}.HOST:PORT."
)


class Token:
    """A token of the portal. Its repr and str do not show it."""

    def __init__(self, secret: str, source: str) -> None:
        """secret: the token itself. source: where the token comes from, for errors."""
        self._secret = secret
        self.source = source

    def __repr__(self) -> str:
        return f"Token({TOKEN_PLACEHOLDER}, {self.source!r})"

    def reveal(self) -> str:
        """The token itself. Use it only for the header of a request."""
        return self._secret

    def hide(self, portal_text: str) -> str:
        """A text of the portal, in which each occurrence of the token is replaced by TOKEN_PLACEHOLDER."""
        return portal_text.replace(self._secret, TOKEN_PLACEHOLDER)


def read_token(portal_url: str | None = None) -> Token | None:
    """The token for one portal; None if there is none. portal_url: the address of the portal; None: CloudLab's portal.

    A token goes only to the portal that it was stored for, because a cluster file of somebody else may name any portal:
    $CLOUDLAB_TOKEN, else TOKEN_FILE, to CloudLab's portal; a token for another portal is in the file TOKEN_FILE.HOST:PORT.

    Raises InputError for a file that other users can read or that contains no token, and WorkspaceError for an unreadable file.
    """
    portal_host = urlsplit(portal_url or DEFAULT_URL).netloc
    is_cloudlab = portal_host == urlsplit(DEFAULT_URL).netloc
    if is_cloudlab and (secret := os.environ.get(TOKEN_VARIABLE, "").strip()):
        return _check_token(secret, TOKEN_VARIABLE)
    path = Path.home() / (TOKEN_FILE if is_cloudlab else TOKEN_FILE.with_name(f"{TOKEN_FILE.name}.{portal_host}"))
    try:
        with files.open_regular(path) as token_file:
            token_file_stat = os.fstat(token_file.fileno())
            token_bytes = token_file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
    if (file_mode := stat.S_IMODE(token_file_stat.st_mode)) & 0o077:
        raise InputError(f"{path}: has mode {file_mode:04o}, so others can use the token. Allowed: 0600. Run: chmod 600 {path}")
    if token_file_stat.st_uid not in (os.geteuid(), 0):
        raise InputError(f"{path}: belongs to another user (uid {token_file_stat.st_uid}). Allowed: a file of your own.")
    return _check_token(token_bytes.decode("latin-1").strip(), str(path))


def _check_token(secret: str, token_source: str) -> Token:
    """The token, if it contains only characters that an HTTP header may contain. Raises InputError."""
    if not secret or len(secret) > MOST_BYTES or not all("!" <= character <= "~" for character in secret):
        raise InputError(f"{token_source}: holds no token. Allowed: one line of visible ASCII characters. {TOKEN_HELP}")
    return Token(secret, token_source)
