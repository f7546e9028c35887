"""Downloads, unpacks and checks data sets, each completely or not at all.

This package imports only Python's standard library and shardlab's own modules without msgspec, so its records are dataclasses.
"""
