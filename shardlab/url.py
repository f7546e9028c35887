"""Removes the secret parts of URLs, so that a URL can be shown, logged and archived."""

from __future__ import annotations

import re

# The groups 1 and 2 are kept: the scheme, and host and path. A query may be a signature, as in pre-signed URLs.
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)(?:[^\s/?#@'\"]*@)?([^\s?'\"<>]*)(?:\?[^\s'\"<>]*)?", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """A text in which each URL has lost its user, its password and its query. text: a URL, or a message that contains URLs."""
    return _URL.sub(r"\1\2", text)
