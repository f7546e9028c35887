"""Reads, checks and writes files safely: YAML, JSON, sources of plug-ins, and digests of our own source."""
