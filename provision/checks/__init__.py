"""Acceptance checks, one per file. A node is ready to train when each check passes or does not apply to the node."""
