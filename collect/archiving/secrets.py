"""Finds texts that look like secrets, such as private keys. A file with such a text is not put into an archive."""

from __future__ import annotations

import re

# The patterns match the beginnings of private keys, the tokens of services that training runs use (logs of runs may contain
# them), and assignments to variables that hold a secret. A token must have at least 16 characters after its prefix, so that
# `hf_...` in a documentation text does not match.
PATTERNS = {
    "a private key": re.compile(rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"),
    "a token": re.compile(rb"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|xoxb-|sk-|AKIA)[A-Za-z0-9_-]{16,}"),
    "a secret variable": re.compile(
        rb"\b[A-Z][A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9+/_.-]{16,}"
    ),
}


def found(content: bytes) -> str | None:
    """The kind of secret that a text seems to contain, such as `a token`; None if nothing in the text looks like a secret."""
    return next((what for what, pattern in PATTERNS.items() if pattern.search(content)), None)
