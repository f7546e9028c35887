"""Providers of nodes, one per file: each returns the nodes of a cluster and runs commands on them."""
