"""Units agree: that which a name states, the number that an expression is divided by, and the unit in the text beside it.

Names state units with their last words (`step_ms`, `memory_gib`). Five rules hold for the code of all packages: a value in a
text has the unit that follows it; a value has the unit of the name that it gets; units that are added or compared are the same;
a number such as GIB beside a title such as `Memory (GiB)` is that unit; and a column or a metric has the unit of its value.
support_units.py has the reading of units.
"""

import ast
import functools
import itertools
import re

import pytest
from support_units import (
    CONSTANTS,
    TEXT_UNIT,
    UNITS,
    agree,
    is_literal,
    may_become,
    name_of,
    power_of,
    unit_after,
    unit_of,
    unit_of_name,
)

from tests.project.test_house import ROOT, SOURCES

# (file, value): why the text after a converted value does not begin with its unit, or has a unit that its name does not state.
IN_TEXTS = {
    ("provision/cloudlab/extension.py", "granted_time.total_seconds() / 3600"): "its callers write the unit",
    ("provision/command/init.py", "size / GIB"): "its caller writes the unit",
    ("jobs/verbs/menus.py", "flops / 1000000.0"): "the column has the unit",
    ("collect/explain/command.py", "event_place.start_ns // 1000"): "a time as the trace file has it, with three decimals",
    ("collect/explain/command.py", "event_place.start_ns % 1000"): "the three decimals of a time in us",
    (
        "collect/figures/why_slower.py",
        "notation.format_number(abs(difference.difference_ns) / 1000000.0, 3)",
    ): "the axis has the unit",
    ("collect/timeline/command.py", "1000 * clock.offset_s[0]"): "the column has the unit",
    ("collect/timeline/command.py", "1000 * clock.within_s"): "the column has the unit",
    ("collect/timeline/command.py", "1000 * clock.drift_s"): "the column has the unit",
    (
        "collect/traces/answer_tables.py",
        "notation.format_number(total_flops / total_ns / 1000)",
    ): "FLOPs per ns, so that 1000 gives TFLOP/s",
    (
        "jobs/rendering/sbatch_options.py",
        "limit_minutes if longest_s is None else max(1, min(limit_minutes, longest_s // 60))",
    ): ("an option of sbatch, which is in minutes"),
}
# (file, value): the unit after a value whose name states none.
WITHOUT_NAMES = {
    ("provision/checks/network.py", "bytes_per_s / 1000000000.0 * 8"): "Gbit/s",
    ("provision/cloudlab/creation.py", "request.duration"): "h",
    ("provision/cloudlab/extension.py", "_format_hours(granted_time)"): "h",
    ("provision/command/init.py", "limit_text"): "GiB",
    ("provision/providers/cloudlab.py", "request.duration"): "h",
}
ANY_VALUE = ("B", "bytes", "%")  # units after values whose names need not state them
# (file, name): why a value of another unit gets this name.
IN_NAMES = {
    ("trainers/engines/ddp.py", "bucket_cap_mb"): "PyTorch's name; its MB are MiB",
    ("jobs/planner/gpu.py", "memory_gb"): "the sizes that makers give as GB are GiB, and only the order matters",
    ("collect/traces/hta.py", "span_ns"): "times in us until the function returns them in ns",
}
# (file, function): the number by which a function divides the values of the panel with the title that it is given.
SCALES = {("collect/figures/telemetry.py", "_counter_panel"): "MB"}


@functools.cache
def parse(text):
    return list(ast.walk(ast.parse(text)))


def wrong_texts(file, text):
    """The values in f-strings that the unit after them does not fit: (value, that which the text says)."""
    for node in parse(text):
        if not isinstance(node, ast.JoinedStr):
            continue
        for place, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                rest = "".join(
                    str(getattr(other, "value", "")) if isinstance(other, ast.Constant) else "#"
                    for other in node.values[place + 1 :]
                )
                problem = _problem_in_text(file, part.value, rest)
                if problem:
                    yield ast.unparse(part.value), problem


def _problem_in_text(file, value, rest):
    """What is wrong with the text after a value; "" if nothing is."""
    unit, key = unit_of(value), (file, ast.unparse(value))
    at_once = TEXT_UNIT.match(rest.lstrip(" \xa0"))
    if unit is None:
        stated = at_once and at_once[1] not in ANY_VALUE and WITHOUT_NAMES.get(key) != at_once[1]
        return f"no name states {at_once[1]}" if stated else ""
    if is_converted(value) and key not in IN_TEXTS:
        is_clock = unit[1] in (60.0, 3600.0) and rest.startswith(":")
        found = unit_after(rest)
        return "" if is_clock or (found and agree(unit, UNITS[found])) else f"followed by {found}"
    return f"followed by {at_once[1]}" if at_once and not is_converted(value) and not agree(unit, UNITS[at_once[1]]) else ""


def is_converted(value):
    """Whether an expression multiplies or divides by a number that converts units."""
    return any(is_conversion(part) for part in ast.walk(value))


def is_conversion(node):
    is_operation = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv | ast.RShift)
    return is_operation and bool(isinstance(node.op, ast.RShift) or power_of(node.left) or power_of(node.right))


def named_values(nodes):
    """(name, value) of each assignment, keyword, key of a dictionary and returned value."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in getattr(node, "targets", None) or [node.target]:
                yield name_of(target), node.value
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            yield name_of(node.target), node.value
        elif isinstance(node, ast.keyword):
            yield node.arg or "", node.value
        elif isinstance(node, ast.Dict):
            texts = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            yield from ((key, value) for key, value in zip(texts, node.values, strict=True) if isinstance(key, str))
        elif isinstance(node, ast.FunctionDef):
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
            yield from ((node.name, value) for value in returned)


def wrong_names(file, text):
    """(name, value) of each value whose unit is not that of the name that it gets."""
    for name, value in named_values(parse(text)):
        unit, converted = unit_of_name(name), unit_of(value)
        if unit and converted and not is_literal(value) and not may_become(converted, unit) and (file, name) not in IN_NAMES:
            yield name, ast.unparse(value)


def wrong_sums(file, text):
    """The sums, differences, comparisons, minima and maxima of values with different units."""
    for node in parse(text):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            values = [node.left, node.right]
        elif isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and name_of(node.func) in ("max", "min"):
            values = node.args
        else:
            continue
        units = [unit for value in values if (unit := unit_of(value)) and unit[0]]
        names = {name_of(part) for value in values for part in ast.walk(value)}
        is_wrong = not all(agree(unit, other) for unit, other in itertools.pairwise(units))
        if is_wrong and not any((file, name) in IN_NAMES for name in names):
            yield ast.unparse(node)


def wrong_titles(file, text):
    """The calls with a title that ends with a unit in brackets, and with a number that does not give this unit."""
    nodes = parse(text)
    titles = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            titles |= {name_of(target): _title(value) for target, value in zip(targets, values, strict=False) if _title(value)}
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        found = [title for title in (_title(argument) or titles.get(name_of(argument), "") for argument in arguments) if title]
        units = [match[1] for title in found if (match := re.search(r"\(([^ ()]+)\)$", title)) and match[1] in UNITS]
        if not units:
            continue
        yield from (
            f"{units[0]}: {ast.unparse(call)}" for fits in [_fits_title(file, call, arguments, UNITS[units[0]])] if not fits
        )


def _title(node):
    parts = node.values[-1:] if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return texts[0] if texts else ""


def _fits_title(file, call, arguments, unit):
    """Whether the number in a call, or the number by which an argument is divided, gives a unit."""
    powers = [power_of(argument) for argument in arguments]
    scale = SCALES.get((file, name_of(call.func)))
    powers = [power for power in [*powers, scale and CONSTANTS[scale]] if power]
    is_scaled = unit[0] in ("bytes", "bytes/s")
    given = [unit_of(argument) for argument in arguments if is_converted(argument)]
    sizes = powers or [other[1] for other in given if other]
    if any(is_scaled and abs(size / unit[1] - 1) > 1e-9 for size in sizes):
        return False
    ones = [argument for argument in arguments if isinstance(argument, ast.Constant) and argument.value == 1]
    return not (is_scaled and not powers and ones)


def wrong_columns(file, text):
    """The calls with a text that is a unit, and with a function or a name of another unit, such as the columns of tables."""
    for call in parse(text):
        if not isinstance(call, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        values = [*call.args, *keywords.values()]
        texts = [value.value if isinstance(value, ast.Constant) else None for value in [*call.args, keywords.get("unit")]]
        units = [text for text in texts[1:] if isinstance(text, str) and text in UNITS]
        bodies = [value.body for value in values if isinstance(value, ast.Lambda)]
        scale = getattr(keywords.get("scale"), "value", None) or power_of(keywords.get("scale"))
        if units and bodies:
            kind, size = unit_of(bodies[0]) or (None, 1.0)
            shown = (kind, size * (scale or 1.0))
            is_wrong = shown != (None, 1.0) and not (agree(shown, UNITS[units[0]]) or may_become(shown, UNITS[units[0]]))
        else:
            unit = unit_of_name(texts[0]) if units and isinstance(texts[0], str) else None
            is_wrong = unit is not None and not agree(unit, UNITS[units[0]])
        if is_wrong:
            yield ast.unparse(call)


def is_formatted(node):
    return isinstance(node, ast.FormattedValue)


RULES = {
    "texts": wrong_texts,
    "names": wrong_names,
    "sums": wrong_sums,
    "titles": wrong_titles,
    "columns": wrong_columns,
}


@pytest.mark.parametrize("rule", RULES)
def test_units_agree_in(rule):
    problems = []
    for path in SOURCES:
        file = str(path.relative_to(ROOT))
        problems += [f"{file}: {problem}" for problem in RULES[rule](file, path.read_text())]
    assert problems == []


def test_constants_with_the_name_of_a_unit_have_its_value():
    values = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and name_of(node.targets[0]).strip("_") in CONSTANTS:
                names = {name_of(target).strip("_") for target in node.targets}
                number = eval(compile(ast.Expression(node.value), "constant", "eval"), {})
                values[str(path.relative_to(ROOT))] = [(name, number) for name in names if number != CONSTANTS[name]]
    assert len(values) > 10
    assert {file: wrong for file, wrong in values.items() if wrong} == {}


def test_each_exception_is_still_needed():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
    values = {file: {ast.unparse(part.value) for part in parse(text) if is_formatted(part)} for file, text in texts.items()}
    unused = [key for key in [*IN_TEXTS, *WITHOUT_NAMES] if key[1] not in values[key[0]]]
    unused += [key for key in [*IN_NAMES, *SCALES] if key[1] not in texts[key[0]]]
    assert unused == []


def test_wrong_units_are_found():
    def found(rule, text):
        return len(list(RULES[rule]("a.py", text)))

    right = ["f'{x_bytes / 2**20:.1f} MiB'", "f'{a / GIB:.0f} of {b / GIB:.0f} GiB'", "f'{1000 * x_s:.1f} ms'", "f'{x_s} s'"]
    wrong = ["f'{x_bytes / 2**20:.1f} MB'", "f'{a >> 20} GiB'", "f'{1000 * x_s:.1f} s'", "f'{x_s} ms'", "f'{x} GiB'"]
    wrong += ["f'{a / GIB:.0f} of {b / MIB:.0f} GiB'", "f'{a / 1e6:.1f}'", "f'{x_s / 60:.0f} h'"]
    assert [found("texts", text) for text in right] == [0] * 4
    assert [found("texts", text) for text in wrong] == [1] * 8
    names = [
        "x_ms = y_ns / 1e6",
        "f(x_gib=y_bytes / GIB)",
        "x = {'y_s': z_ms / 1000}",
        "def x_ms(): return y / 1e6",
        "x_s = 4 * 60",
    ]
    assert [found("names", text) for text in names] == [0] * 5
    names = ["x_ms = y_ns / 1e3", "f(x_gib=y_bytes / MIB)", "x = {'y_s': z_ms}", "def x_ms(): return y_s", "x_ms = y / 1e12"]
    assert [found("names", text) for text in names] == [1] * 5
    assert [found("sums", text) for text in ("x_s + y_ms / 1000", "x_bytes < 2 * GIB", "max(x_s, 1)")] == [0] * 3
    assert [found("sums", text) for text in ("x_s + y_ms", "x_bytes < y_gib", "max(x_s, y_ms)")] == [1] * 3
    titles = ["T = 'Sent (MB/s)'\nadd(T, x_bytes / MB)", "Panel('Memory (GiB)', GIB)", "Panel('Power (W)', 1)"]
    assert [found("titles", text) for text in titles] == [0] * 3
    titles = ["T = 'Sent (MB/s)'\nadd(T, x_bytes / GB)", "Panel('Memory (GiB)', MIB)", "Panel('Memory (GiB)', 1)"]
    assert [found("titles", text) for text in titles] == [1] * 3
    columns = ["Column('Host', lambda time: time.host_ms, 'ms')", "Column('Sent', lambda row: row.sent_bytes, 'GB', scale=1e9)"]
    columns += [
        "Metric('pass_ms', 'ms', sum)",
        "Column('Host', lambda time: time.host, 'ms')",
        "f(lambda t: t.x_ns / 1e6, 'ms')",
    ]
    assert [found("columns", text) for text in columns] == [0] * 5
    columns = ["Column('Host', lambda time: time.host_ms, 's')", "Column('Sent', lambda row: row.sent_bytes, 'GB', scale=1e6)"]
    columns += [
        "Metric('pass_ms', 's', sum)",
        "Column('Sent', lambda row: row.sent_bytes, unit='MB')",
        "f(lambda t: t.x_ns, 'ms')",
    ]
    assert [found("columns", text) for text in columns] == [1] * 5
