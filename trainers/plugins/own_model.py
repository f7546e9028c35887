"""Executes a file of a user that defines a workload (docs/own-models.md), and checks what it defines.

Only ranks and `python -m trainers describe` execute the file. Messages of errors name the file and the line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, get_args, get_type_hints

import msgspec

from shardlab.errors import InputError
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix.cell import Optimizer
from shardlab.plugins import own_code
from shardlab.registry import Option, OptionValue
from trainers.own_data import OwnData

OPTION_TYPES = (bool, int, float, str)
FUNCTIONS = ("model", "batch", "loss", "blocks", "tensor_parallel", "pipeline")
OPTIMIZER = Optimizer(name="adamw", lr=1e-3)


class OwnModel(msgspec.Struct, frozen=True):
    """The definitions in a user's file."""

    file: str
    """The path of the file."""
    summary: str
    """The first line of the file's docstring."""
    model: Callable[..., Any]
    """Returns the module; its keyword arguments are the options."""
    batch: Callable[..., Any]
    """Gets the numbers of items, (n,), and returns their (inputs, targets)."""
    loss: Callable[..., Any] | None
    """Returns the mean loss of (outputs, targets). None: the cross-entropy is used."""
    blocks: Callable[..., Any] | None
    """Returns the repeated blocks of a module. None: blocks are searched (trainers.model.blocks)."""
    tensor_parallel: Callable[..., Any] | None
    """Returns which linear layers of a block are split over a number of ranks, and how. None: tensor parallelism is not
    possible."""
    pipeline: Callable[..., Any] | None
    """Returns the modules before and after the blocks. None: the model cannot be divided into pipeline stages."""
    data: OwnData | None
    """`DATA` of the file. If it is not None, `batch` and `items` come from it."""
    items: int
    """Number of items in the data set."""
    unit: str
    """The unit of throughput in results, such as `images`."""
    units_per_item: int
    """Number of these units in one item."""
    flops_per_unit: float | None
    """Floating-point operations of forward and backward for one unit. None: they are counted."""
    optimizer: Optimizer
    """The default optimizer."""
    options: tuple[Option, ...]
    """The parameters of `model`, with their defaults."""
    tiny: dict[str, OptionValue] | None
    """The options of the tiny twin. None: there is no tiny twin."""

    def call_function(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call the function `name` of the file and return its result.

        Raises InputError with the line if the function raises an error. MemoryError and RuntimeError are not converted, because
        the rank's process recognizes torch's out-of-memory errors among them.
        """
        # torch reports a lack of memory as a RuntimeError; the rank's process records this error as `oom`
        with own_code.raise_plugin_errors(self.file, passed_errors=(MemoryError, RuntimeError)):
            return getattr(self, name)(*arguments, **options)


def load_definitions(source: PluginSource) -> OwnModel:
    """Execute the file and return its definitions, checked. Raises InputError with the file, and the line if it is known."""
    return _check_definitions(str(source.file), own_code.execute_plugin(source))


def _check_definitions(file: str, module: ModuleType) -> OwnModel:
    definitions = vars(module)
    data = _read_data(file, definitions)
    for name in ("model", "batch"):
        if name not in definitions and (name == "model" or data is None):
            raise InputError(
                f"{file}: defines no function `{name}`. Needed: model(), and either DATA or batch(items) and the number ITEMS."
            )
    for name in FUNCTIONS:
        if name in definitions and not callable(definitions[name]):
            raise InputError(f"{file}: {name} is no function.")
    items = _read_number(file, definitions, "ITEMS", None) if data is None else data.source.items
    options = _read_options(file, definitions["model"])
    return OwnModel(
        file=file,
        summary=next(iter((inspect.getdoc(module) or "").splitlines()), "") or "without a description",
        model=definitions["model"],
        batch=definitions["batch"] if data is None else data.batch,
        loss=definitions.get("loss"),
        blocks=definitions.get("blocks"),
        tensor_parallel=definitions.get("tensor_parallel"),
        pipeline=definitions.get("pipeline"),
        data=data,
        items=items,
        unit=_read_unit(file, definitions.get("UNIT", "items")),
        units_per_item=_read_number(file, definitions, "UNITS_PER_ITEM", 1 if data is None else data.units_per_item),
        flops_per_unit=_read_flops(file, definitions.get("FLOPS_PER_UNIT")),
        optimizer=_read_optimizer(file, definitions.get("OPTIMIZER")),
        options=options,
        tiny=_read_tiny(file, definitions.get("TINY"), options),
    )


def _read_data(file: str, definitions: Mapping[str, Any]) -> OwnData | None:
    data = definitions.get("DATA")
    if data is None:
        return None
    if not isinstance(data, OwnData):
        raise InputError(f"{file}: DATA is a {type(data).__name__}. Allowed: what a function of trainers.own_data returns.")
    if double_names := [name for name in ("batch", "ITEMS") if name in definitions]:
        raise InputError(f"{file}: defines DATA and {double_names[0]}. Allowed: either DATA, or batch and ITEMS.")
    return data


def _read_number(file: str, definitions: Mapping[str, Any], name: str, default: int | None) -> int:
    value = definitions.get(name, default)
    if type(value) is not int or value < 1:
        found_text = "nothing" if name not in definitions else _short_repr(value)
        raise InputError(f"{file}: {name}: found {found_text}. Allowed: a whole number from 1.")
    return value


def _read_flops(file: str, value: Any) -> float | None:
    if value is None or (type(value) in (int, float) and value > 0):
        return None if value is None else float(value)
    raise InputError(f"{file}: FLOPS_PER_UNIT: found {_short_repr(value)}. Allowed: a number above 0, or leave it out.")


def _read_unit(file: str, value: Any) -> str:
    if isinstance(value, str) and value.isidentifier() and len(value) <= 20:
        return value
    raise InputError(f"{file}: UNIT: found {_short_repr(value)}. Allowed: one word, such as 'images'.")


def _read_optimizer(file: str, value: Any) -> Optimizer:
    try:
        return OPTIMIZER if value is None else msgspec.convert(value, Optimizer)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{file}: OPTIMIZER: {error}. Allowed: as in a matrix file, such as dict(name='sgd', lr=0.1)."
        ) from None


def _read_options(file: str, model: Callable[..., Any]) -> tuple[Option, ...]:
    """The options of a workload: the parameters of the function `model`. Each must have a default.

    The type of an option is the annotation of the parameter; without an annotation, it is the type of the default. Raises
    InputError.
    """
    code_object = getattr(model, "__code__", None)
    location = f"{file}:{code_object.co_firstlineno}" if code_object is not None else file
    hint_by_name = _read_type_hints(model)
    options = []
    for name, parameter in inspect.signature(model).parameters.items():
        default, hint = parameter.default, hint_by_name.get(name)
        option_type = next((allowed for allowed in OPTION_TYPES if hint is allowed or allowed in get_args(hint)), type(default))
        if (
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            or type(default) not in OPTION_TYPES
            or option_type not in OPTION_TYPES
        ):
            raise InputError(
                f"{location}: model: the parameter {name} has no default that a matrix can write. Allowed: true or "
                f"false, a number or a text, such as {name}=64."
            )
        default = float(default) if option_type is float and type(default) is int else default
        options.append(Option(name, default, f"the parameter `{name}` of model() in {file.rpartition('/')[2]}"))
    return tuple(options)


def _read_type_hints(model: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(model)
    except (NameError, TypeError, AttributeError):  # an annotation uses a name that is imported only for type checkers
        return {}


def _read_tiny(file: str, value: Any, options: tuple[Option, ...]) -> dict[str, OptionValue] | None:
    if value is None:
        return None
    options_by_name = {option.name: option for option in options}
    if not isinstance(value, dict):
        raise InputError(f"{file}: TINY: found {_short_repr(value)}. Allowed: parameters of model(), such as dict(width=8).")
    for name, tiny_value in value.items():
        if name not in options_by_name:
            raise InputError(
                f"{file}: TINY: model() has no parameter {_short_repr(name)}. Allowed: {', '.join(options_by_name) or 'none'}."
            )
        if (why := options_by_name[name].explain_refused_value(tiny_value)) is not None:
            raise InputError(f"{file}: TINY: {name}: {why}")
    return value


def _short_repr(value: Any) -> str:
    return repr(value)[:60]
