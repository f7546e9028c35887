"""The kinds of changes from which mutants are drawn: the operators of Cosmic Ray, and our own, which change what code means."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any

from copies import ROOT, sources
from dropping import DropElement, DropKeyword, DropOrder, DropValidation
from replacing import ReplaceMode, ReplacePower, ReplaceText, ReplaceUnit

# Operators of Cosmic Ray that are not used, because they need arguments. Operators that replace `==` by `is` are not used
# either: `3 is 3` is true, so a test that does not detect such a mutant is not at fault.
WITH_ARGUMENTS = {"VariableReplacer", "VariableInserter"}
SYNTACTIC = "syntactic"
SEMANTIC = (DropElement, DropKeyword, DropValidation, DropOrder, ReplaceMode, ReplacePower, ReplaceUnit, ReplaceText)
PROVIDER = "shardlab"


class Provider:
    """Our operators, as Cosmic Ray looks operators up."""

    def __iter__(self) -> Iterator[str]:
        return (operator.__name__ for operator in SEMANTIC)

    def __getitem__(self, name: str) -> type[Any]:
        return next(operator for operator in SEMANTIC if operator.__name__ == name)


def kinds() -> list[str]:
    """The kinds of changes: all operators of Cosmic Ray together are one kind, each of our operators is another."""
    return [SYNTACTIC, *Provider()]


def kind(operator: str) -> str:
    """The kind to which an operator belongs. operator: its name in Cosmic Ray, such as `core/NumberReplacer`."""
    provider, _, name = operator.partition("/")
    return name if provider == PROVIDER else SYNTACTIC


def shares(number: int) -> dict[str, int]:
    """How many mutants of each kind are drawn: half of them are syntactic, and the other kinds have equal shares of the other
    half, as far as whole numbers allow."""
    half, count = number // 2, len(SEMANTIC)
    semantic = {name: half * (place + 1) // count - half * place // count for place, name in enumerate(Provider())}
    return {SYNTACTIC: number - half, **semantic}


@cache
def operators() -> dict[str, Any]:
    """An instance of each operator that is used, by its name in Cosmic Ray."""
    from cosmic_ray import plugins  # here, because only `make mutants` installs it

    DropKeyword.needed = _needed_keywords()
    plugins.OPERATOR_PROVIDERS[PROVIDER] = Provider()
    return {name: plugins.get_operator(name)() for name in plugins.operator_names() if _is_used(name)}


def _is_used(name: str) -> bool:
    """Whether an operator is used. An operator whose name says `is` replaces a comparison of values by one of identity, or the
    reverse, or one of identity by its contrary; only the last kind is used."""
    short = name.partition("/")[2]
    if not short.startswith("ReplaceComparison"):
        return short not in WITH_ARGUMENTS
    before, after = short.split("_")[1:3]
    return (before in ("Is", "IsNot")) == (after in ("Is", "IsNot"))


def _needed_keywords() -> frozenset[tuple[str, str]]:
    """The keywords that no function or class of this name in the product has a default for, as (name, keyword)."""
    needed: set[tuple[str, str]] = set()
    optional: set[tuple[str, str]] = set()
    for file in sources():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        (optional if field.value is not None else needed).add((node.name, field.target.id))
                    elif isinstance(field, ast.FunctionDef) and field.name == "__init__":
                        _add_parameters(field, node.name, needed, optional)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                _add_parameters(node, node.name, needed, optional)
    return frozenset(needed - optional)


def _add_parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    needed: set[tuple[str, str]],
    optional: set[tuple[str, str]],
) -> None:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = positional[: len(positional) - len(arguments.defaults)]
    needed |= {(name, parameter.arg) for parameter in without_default}
    optional |= {(name, parameter.arg) for parameter in positional[len(without_default) :]}
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (optional if default is not None else needed).add((name, parameter.arg))
