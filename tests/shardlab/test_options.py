"""Options of strategies and workloads: each states which values it allows, and refuses all other values with one sentence."""

import math
from typing import get_type_hints

import pytest

from shardlab.registry import Option, TypedOptions, declare
from trainers import menu

EVERY = {
    f"{entry.name} {option.name}": option
    for entry in (*menu.load_strategies().values(), *menu.load_workloads().values())
    for option in entry.options
}
NULLABLE = {  # maps options that allow null to the meaning of null; options whose null means "none" are not listed
    "allgather_bucket_size": "the model's size",
    "dropout": "no dropout",
    "nvme_path": "nowhere",
    "reduce_bucket_size": "the model's size",
    "subset": "all images",
    "tokens_file": "no file",
}


def test_null_is_allowed_only_for_nullable_options():
    assert {option.name for option in EVERY.values() if option.explain_refused_value(None) is None} == NULLABLE.keys()


def test_numbers_below_their_least_and_above_their_most_are_refused():
    numbers = [option for option in EVERY.values() if not option.choices and type(option.default) in (int, float)]
    assert len(numbers) > 20
    for option in numbers:
        assert option.least is not None, f"{option.name}: no number of our options may be as small as one likes"
        assert option.explain_refused_value(option.least) is None
        assert f"Allowed: a whole number from {option.least}" in option.explain_refused_value(option.least - 1)
        if option.most is not None:
            assert option.explain_refused_value(option.most) is None
            assert option.explain_refused_value(option.most + 1).startswith(f"found {option.most + 1}. Allowed: ")


def test_a_value_of_another_type_is_refused():
    for name, option in EVERY.items():
        kind = option.kind or type(option.default).__name__
        for value in (True, 64, 0.5, "a word"):
            fits = type(value).__name__ == kind and not (option.choices and value not in option.choices)
            assert (option.explain_refused_value(value) is None) == fits, (name, value)


def test_the_message_of_a_refused_option_spells_values_as_a_matrix_file():
    assert Option("a", 4, "", least=1, most=8).explain_refused_value(9) == "found 9. Allowed: a whole number from 1 to 8."
    assert Option("a", None, "", kind="int", most=8, nullable=True).explain_refused_value(True) == (
        "found true. Allowed: a whole number up to 8, or null."
    )
    assert Option("a", 0.5, "", least=0, most=1).explain_refused_value(1.5) == "found 1.5. Allowed: a number from 0 to 1."
    assert Option("a", False, "").explain_refused_value("yes") == "found yes. Allowed: true, false."
    assert Option("a", "pre", "", ("pre", "post")).explain_refused_value(None) == "found null. Allowed: pre, post."
    assert Option("a", "", "").explain_refused_value(3) == "found 3. Allowed: text."


def test_an_option_of_type_float_accepts_integers_and_refuses_nan():
    """An option of type float accepts 1 for 1.0, and refuses NaN."""
    option = Option("a", 0.5, "", least=0.25)
    assert option.explain_refused_value(1) is None
    assert option.explain_refused_value(math.nan) is not None


@pytest.mark.parametrize("broken", [{"default": None}, {"default": None, "nullable": True}, {"default": 0, "least": 1}])
def test_an_option_whose_default_is_not_allowed_cannot_be_made(broken):
    """Making an Option raises ValueError if its own default is not allowed."""
    with pytest.raises(ValueError, match="option a: "):
        Option("a", summary="", **broken)


def test_typed_options_have_the_values_of_a_cell_or_their_defaults():
    class Typed(TypedOptions):
        period: int = declare(4, "steps between two averages", least=1)
        path: str | None = declare(None, "a folder", kind="str")

    assert Typed.list_options() == (
        Option("period", 4, "steps between two averages", least=1),
        Option("path", None, "a folder", kind="str", nullable=True),
    )
    typed = Typed({"path": "/scratch", "another": True})
    assert vars(typed) == {"period": 4, "path": "/scratch"}


def test_each_typed_option_allows_the_values_of_its_declared_type():
    checked = 0
    for typed_options in TypedOptions.__subclasses__():
        types = get_type_hints(typed_options) if typed_options.__module__.startswith("trainers.") else {}
        for option in typed_options.list_options() if types else ():
            kind = {"bool": bool, "int": int, "float": float, "str": str}[option.kind or type(option.default).__name__]
            assert types[option.name] == (kind | None if option.nullable else kind), option.name
            checked += 1
    assert checked > 30
