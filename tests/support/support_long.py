"""Whether the long forms of tests run: `make test-long` sets SHARDLAB_TESTS=long."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])
LONG = os.environ.get("SHARDLAB_TESTS") == "long"


def only_long(*cases: object) -> tuple[object, ...]:
    """These further cases of a parametrized test, if the long forms of tests run; else no cases."""
    return cases if LONG else ()


def only_in_long_form(test: Test) -> Test | None:
    """A decorator for a test that belongs to the long form only: in the short form, pytest does not collect the test."""
    return test if LONG else None
