"""Removes the secret parts of URLs, so that a URL can be shown, logged and archived."""

from __future__ import annotations

import re

# The groups 1 and 2 are kept: the scheme, and host and path. A query may be a signature, as in pre-signed URLs, and a fragment
# may be a token, as in #access_token=. A password may have a slash, although it should be escaped; a number before the slash
# is a port.
_USER_PATTERN = r"[^\s/?#@:'\"]*(?::(?!\d+/)[^\s@'\"]*)?@"
_URL_PATTERN = re.compile(
    rf"\b([a-z][a-z0-9+.-]*://)(?:{_USER_PATTERN})?((?:(?!#\w+=)[^\s?'\"<>])*)(?:(?:\?|#\w+=)[^\s'\"<>]*)?", re.IGNORECASE
)


def remove_secrets(text: str) -> str:
    """A text in which each URL has lost its user, password and query, and a fragment like #token=. text: a URL, or a message
    that contains URLs."""
    return _URL_PATTERN.sub(r"\1\2", text)
