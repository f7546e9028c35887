"""Transfers files between two machines that both have shardlab, and the manifests that show whether all of them arrived."""
