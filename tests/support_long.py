"""Whether the long forms of tests run: `make test-long` sets SHARDLAB_TESTS=long."""

import os

LONG = os.environ.get("SHARDLAB_TESTS") == "long"


def only_long(*cases: object) -> tuple[object, ...]:
    """These further cases of a parametrized test, if the long forms of tests run; else no cases."""
    return cases if LONG else ()
