"""Copies run folders from the cluster to this machine, verifies them, and can remove them from the cluster afterwards."""
