"""Executes a file of a user that defines strategies (docs/own-strategies.md), and checks what it defines.

The file has the same interface as the files in trainers/strategies: it defines `VARIANTS`, a tuple of `Strategy`. The module of
an engine is a helper file in the same folder, or a module of trainers/engines. Only ranks, `python -m trainers describe`,
`python -m trainers refuse` and `python -m trainers rehearse` execute the file.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from shardlab import registry
from shardlab.errors import InputError, ShardlabError
from shardlab.files import plugin_source
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix.cell import Cell
from shardlab.plugins import own_code
from shardlab.plugins.plugin_kind import STRATEGIES, OwnStrategy, RefusalAnswer, RefusalQuestion, StrategyFacts
from trainers import menu
from trainers.strategy import Strategy

ENGINES_PACKAGE = "trainers.engines"
FUNCTIONS = ("refuse", "unprovable", "other_work")  # the fields of Strategy whose functions return a sentence or None


def load_strategy_file(source: PluginSource) -> list[Strategy]:
    """Execute the file, but not the modules of its engines, and return its strategies, checked.

    Raises InputError with the file, and with the line if it is known.
    """
    file, module = str(source.file), own_code.execute_plugin(source)
    variants = getattr(module, "VARIANTS", None)
    if not isinstance(variants, tuple) or not variants or not all(isinstance(strategy, Strategy) for strategy in variants):
        raise InputError(f"{file}: defines no VARIANTS. Needed: a tuple of Strategy (trainers.strategy).")
    base_name = STRATEGIES.make_base_name(source.file)
    names = [strategy.name for strategy in variants]
    for name in names:
        if not STRATEGIES.may_define(source.file, str(name)):
            raise InputError(f"{file}: found the strategy {str(name)[:60]!r}. Allowed: {base_name}, or {base_name}-...")
        if names.count(name) > 1:
            raise InputError(f"{file}: defines the strategy {name} twice.")
    return [_check_strategy(source, strategy, module.__name__) for strategy in variants]


def add_strategies(file: Path, code: str | None) -> None:
    """Add the strategies of a user's file, so that `menu.find_strategy_of_cell` finds them.

    code: the digest of the file when the run was submitted. Raises InputError if the file has changed since then.
    """
    for strategy in load_strategy_file(plugin_source.read_submitted_plugin(file, code)):
        menu.add_own_strategy(strategy)


def describe_strategies(source: PluginSource) -> list[OwnStrategy]:
    """The strategies of a file. The modules of their engines are imported too, to find errors in them. Raises InputError, or
    any error of the user's code."""
    strategies = load_strategy_file(source)
    for strategy in strategies:
        _check_engine(str(source.file), strategy)
    return [_describe_strategy(source, strategy) for strategy in strategies]


def answer_questions(file: Path, questions: Iterable[bytes], answers: IO[bytes]) -> None:
    """Answer the questions of `jobs`: does a strategy of the file refuse a cell, and why? Each question and each answer is one
    line of JSON.

    If the file itself has an error, this error is the answer to every question.
    """
    file_error, strategies = "", dict[str, Strategy]()
    try:
        strategies = {strategy.name: strategy for strategy in load_strategy_file(plugin_source.read_plugin(file))}
    except ShardlabError as error:
        file_error = str(error)
    for question_line in questions:
        question = msgspec.json.decode(question_line, type=RefusalQuestion)
        try:
            if (own_workload := question.own_workload) is not None:
                menu.add_own_workload(own_workload, Path(own_workload.file))
            reply = (
                RefusalAnswer(fault=file_error)
                if file_error
                else RefusalAnswer(why=strategies[question.strategy].refuse(question.cell))
            )
        except ShardlabError as error:
            reply = RefusalAnswer(fault=str(error))
        answers.write(msgspec.json.encode(reply) + b"\n")
        answers.flush()


def _check_strategy(source: PluginSource, strategy: Strategy, module: str) -> Strategy:
    """A strategy of the file, checked. Its functions are wrapped, so that an error in them names the file and the line.

    module: the name of the file's module. Raises InputError.
    """
    file = str(source.file)
    helper_modules = {name.removesuffix(".py") for name in source.contents if name.startswith("_")}
    shipped_engines = {f"{ENGINES_PACKAGE}.{name}" for name in registry.list_plugin_names(ENGINES_PACKAGE)}
    if strategy.engine not in {module, *helper_modules, *shipped_engines}:
        raise InputError(
            f"{file}: {strategy.name}: engine: found {str(strategy.engine)[:60]!r}. Allowed: a helper beside the file "
            f"({', '.join(sorted(helper_modules)) or 'a file whose name begins with _'}), __name__, or "
            f"{', '.join(sorted(shipped_engines))}."
        )
    if not isinstance(strategy.settings, dict):
        raise InputError(f"{file}: {strategy.name}: settings is no dict.")
    functions: dict[str, Any] = {}
    for name in (*FUNCTIONS, "communication_period"):
        if not callable(getattr(strategy, name)):
            raise InputError(f"{file}: {strategy.name}: {name} is no function of a cell.")
        allowed_types = (int, type(None)) if name == "communication_period" else (str, type(None))
        functions[name] = partial(_call_own_function, file, strategy.name, name, getattr(strategy, name), allowed_types)
    checked_strategy = msgspec.structs.replace(strategy, code=source.digest, file=file, **functions)
    _describe_strategy(source, checked_strategy)
    return checked_strategy


def _call_own_function(
    file: str, strategy: str, name: str, function: Callable[[Cell], Any], allowed_types: tuple[type, ...], cell: Cell
) -> Any:
    """Call a function of the file for a cell and return its result.

    Raises InputError with the line if the function raises an error. Raises InputError also if the type of its result is not
    allowed.
    """
    with own_code.raise_plugin_errors(file, f"So {name} of {strategy} is not known."):
        returned_value = function(cell)
    if type(returned_value) not in allowed_types:
        allowed_text = "a whole number or None" if int in allowed_types else "a sentence or None"
        raise InputError(f"{file}: {name} of {strategy} returned {repr(returned_value)[:60]}. Allowed: {allowed_text}.")
    return returned_value


def _describe_strategy(source: PluginSource, strategy: Strategy) -> OwnStrategy:
    """The fields of a strategy that are plain data, without its functions. Raises InputError if a field has a wrong type."""
    facts = {name: getattr(strategy, name) for name in StrategyFacts.__struct_fields__}
    try:
        return msgspec.convert(msgspec.to_builtins({**facts, "code": source.digest, "file": str(source.file)}), OwnStrategy)
    except (*DECODE_FAULTS, ValueError, TypeError) as error:
        raise InputError(f"{source.file}: {str(strategy.name)[:60]}: {error}.") from None


def _check_engine(file: str, strategy: Strategy) -> None:
    """Import the module of a strategy's engine. Raises InputError if the module has no function `build` (and `build_server`, if
    the strategy has parameter servers)."""
    module = importlib.import_module(strategy.engine)
    for name in ("build", *(["build_server"] if strategy.servers else [])):
        if not inspect.isfunction(getattr(module, name, None)):
            module_file = getattr(module, "__file__", None) or file
            raise InputError(f"{module_file}: defines no function `{name}`, which makes the engine of {strategy.name}.")
