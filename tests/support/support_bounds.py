"""Says whether a value is allowed, for tests of limits: a value at a limit is allowed, and the next value is refused."""

from collections.abc import Callable, Sequence
from typing import Any


def refusal(call, *values, of=Exception):
    """The message with which a call of the product refuses the values; None if it accepts them. of: the type of a refusal."""
    try:
        call(*values)
    except of as error:
        return str(error)
    return None


def is_allowed(call, *values, says="Allowed: ", of=Exception):
    """Whether a call of the product accepts the values. says: the words that its refusal must contain."""
    message = refusal(call, *values, of=of)
    assert message is None or says in message, f"the refusal does not say {says!r}: {message}"
    return message is None


def check_limit(allows: Callable[[Any], object], allowed: Sequence[object], refused: Sequence[object]) -> None:
    """Check that each of the values up to a limit is allowed, and that none of the values beyond it is."""
    assert [value for value in allowed if not allows(value)] == []
    assert [value for value in refused if allows(value)] == []
