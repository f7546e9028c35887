"""Describes a model or a user's workload to `jobs`: parameters, operations, blocks and what is unknown."""
