"""Acceptance checks, one per file: each must pass, or not apply, before a node is ready to train."""
