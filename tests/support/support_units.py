"""Reads Python code for units: the unit that a name states, the unit that an expression has, and the unit that a text states.

A unit is (what it measures, its size in the base unit): `ms` is ("time", 1e-3), `MiB` is ("bytes", 2**20). An expression whose
names state no unit has the kind None; its size is then the number by which the expression is divided.
"""

import ast
import re

UNITS = {
    "B": ("bytes", 1.0), "bytes": ("bytes", 1.0),
    **{f"{prefix}iB": ("bytes", 1024.0**power) for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": ("bytes", 1000.0**power) for power, prefix in enumerate("kMGT", 1)},
    "ns": ("time", 1e-9), "us": ("time", 1e-6), "µs": ("time", 1e-6), "ms": ("time", 1e-3), "s": ("time", 1.0),
    "seconds": ("time", 1.0), "min": ("time", 60.0), "minutes": ("time", 60.0), "h": ("time", 3600.0),
    "hours": ("time", 3600.0), "days": ("time", 86400.0),
    "B/s": ("bytes/s", 1.0), "Mbit/s": ("bits/s", 1e6), "Gbit/s": ("bits/s", 1e9),
    **{f"{prefix}iB/s": ("bytes/s", 1024.0**power) for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B/s": ("bytes/s", 1000.0**power) for power, prefix in enumerate("kMGT", 1)},
    "MFLOP": ("flops", 1e6), "TFLOP/s": ("flops/s", 1e12),
    "%": ("share", 1e-2), "W": ("power", 1.0), "kWh": ("energy", 3.6e6), "J": ("energy", 1.0), "MHz": ("frequency", 1e6),
}  # fmt: skip
# The last words of names that state a unit, in small letters.
NAME_UNITS = {
    "bytes": "B", "kib": "KiB", "mib": "MiB", "gib": "GiB", "kb": "kB", "mb": "MB", "gb": "GB",
    "ns": "ns", "us": "us", "ms": "ms", "s": "s", "seconds": "s", "min": "min", "minutes": "min", "hours": "h", "days": "days",
    "pct": "%", "w": "W", "kwh": "kWh", "mhz": "MHz", "gbps": "Gbit/s", "mbps": "Mbit/s",
    "gb_per_s": "GB/s", "mb_per_s": "MB/s",
}  # fmt: skip
WHOLE_NAMES = {"ns", "us", "ms", "seconds", "minutes", "hours", "days", "kib", "mib", "gib", "pct", "mbps", "kwh"}
# Numbers of bytes, and of nanoseconds in a millisecond. The test holds that each constant of such a name has this value.
CONSTANTS = {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "MS": 1e6,
    "NS_PER_MS": 1e6,
}
NUMBERS = {float(base**power) for base in (1000, 1024) for power in range(1, 5)} | {60.0, 3600.0, 86400.0}
# Functions whose result has the unit of their first argument.
KEEP_UNIT = {
    "abs", "ceil", "fabs", "float", "floor", "fmean", "format_amount", "format_number", "int", "item", "max", "maximum", "mean",
    "median", "min", "minimum", "number_text", "round", "sum", "to_list", "to_numpy",
}  # fmt: skip
TEXT_UNIT = re.compile(r"(?<![\w/-])(" + "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True)) + r")(?![\w/'’-])")


def unit_of_name(name):
    """The unit that a name states with its last words; None without one. `max_bytes` is a number of bytes, `bytes` a type."""
    words = name.lower().strip("_").split("_")
    if "per" in words[1:]:
        rate = "_".join(words[-3:])
        return UNITS[NAME_UNITS[rate]] if rate in NAME_UNITS else None
    states_unit = words[-1] in NAME_UNITS and (len(words) > 1 or words[0] in WHOLE_NAMES)
    return UNITS[NAME_UNITS[words[-1]]] if states_unit else None


def name_of(node):
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return key if isinstance(key, str) else name_of(node.value)
    return ""


def power_of(node):
    """The number that a literal, a power or a named constant stands for if it converts units; else None."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
        parts = (node.left, node.right)
        if all(isinstance(part, ast.Constant) and isinstance(part.value, int | float) for part in parts):
            base, exponent = (part.value for part in parts)
            value = float(base**exponent if isinstance(node.op, ast.Pow) else base << exponent)
            return value if value in NUMBERS else None
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and float(node.value) in NUMBERS:
        return float(node.value)
    return float(CONSTANTS[name]) if (name := name_of(node).strip("_")) in CONSTANTS else None


def unit_of(node):
    """The unit (kind, size) of an expression, or None if the expression states none and is not converted."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return unit_of_name(name_of(node))
    if isinstance(node, ast.Call):
        name = name_of(node.func)
        if name in KEEP_UNIT:
            first = node.args[0] if node.args else getattr(node.func, "value", None)
            return unit_of(first) if first is not None else None
        return unit_of_name(name) if not name.startswith(("format_", "_format_", "describe_")) else None
    if isinstance(node, ast.UnaryOp):
        return unit_of(node.operand)
    if isinstance(node, ast.IfExp):
        return unit_of(node.body) or unit_of(node.orelse)
    if isinstance(node, ast.BinOp):
        return _unit_of_operation(node)
    return None


def _unit_of_operation(node):
    left, right = unit_of(node.left), unit_of(node.right)
    if isinstance(node.op, ast.Add | ast.Sub):
        return left or right
    if isinstance(node.op, ast.RShift) and isinstance(node.right, ast.Constant):
        kind, size = left or (None, 1.0)
        return kind, size * 2.0**node.right.value
    if isinstance(node.op, ast.Div | ast.FloorDiv):
        power = power_of(node.right)
        if power is not None:
            kind, size = left or (None, 1.0)
            return kind, size * power
        return left if right is None and not isinstance(node.right, ast.BinOp) and left and left[0] != "bytes" else None
    if isinstance(node.op, ast.Mult):
        for power, other in ((power_of(node.left), right), (power_of(node.right), left)):
            if power is not None:
                kind, size = other or (None, 1.0)
                return kind, size / power
    if isinstance(node.op, ast.Mod):
        return left
    return None


def is_literal(node):
    """Whether an expression has only numbers, such as `4 * 2**20`."""
    return all(isinstance(part, ast.BinOp | ast.UnaryOp | ast.Constant | ast.operator | ast.unaryop) for part in ast.walk(node))


def agree(unit, other):
    """Whether two units are the same. A unit of an unknown kind is the same if its size is."""
    return abs(unit[1] / other[1] - 1) < 1e-9 and (unit[0] == other[0] or None in (unit[0], other[0]))


def may_become(converted, unit):
    """Whether a value that is divided by a number can have a unit: that number leads to the unit from a unit of its kind."""
    kind, size = unit
    if converted[0] is not None:
        return agree(converted, unit)
    return any(other_kind == kind and abs(size / converted[1] / other - 1) < 1e-9 for other_kind, other in UNITS.values())


def unit_after(text):
    """The first unit in a text, or None: that of a value before the text. In `3 of 4 MiB` the unit of 3 is that of 4."""
    match = TEXT_UNIT.search(text)
    return match[1] if match else None
