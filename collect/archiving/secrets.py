"""Finds texts that look like secrets, so that their files stay out of an archive."""

from __future__ import annotations

import re

# The beginnings of private keys and of the tokens of services that logs of training runs name, and assignments to variables
# that hold a secret. A token is at least 16 characters long, so that documentation such as `hf_...` is no match.
PATTERNS = {
    "a private key": re.compile(rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"),
    "a token": re.compile(rb"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|xoxb-|sk-|AKIA)[A-Za-z0-9_-]{16,}"),
    "a secret variable": re.compile(
        rb"\b[A-Z][A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9+/_.-]{16,}"
    ),
}


def found(content: bytes) -> str | None:
    """What in a text looks like a secret, as a noun such as `a token`; None: nothing does."""
    return next((what for what, pattern in PATTERNS.items() if pattern.search(content)), None)
