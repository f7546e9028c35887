"""Whether the long forms of tests run: `make test-long` sets SHARDLAB_TESTS=long."""

import os

LONG = os.environ.get("SHARDLAB_TESTS") == "long"


def only_long(*cases: object) -> tuple[object, ...]:
    """Further cases of a parametrized test, which run only in the long form."""
    return cases if LONG else ()
