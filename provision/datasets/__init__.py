"""Downloads, unpacks and checks data sets, each completely or not at all.

Its records are dataclasses, because this package imports only Python's standard library and modules of shardlab that do not
import msgspec.
"""
