"""Downloads, unpacks and checks data sets, each completely or not at all.

It needs only Python and shardlab.errors, so its records are dataclasses and not msgspec Structs.
"""
