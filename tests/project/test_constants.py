"""The numbers and lists of names that the modules of all packages state: limits, times, keys, columns; and modes of files.

Golden file: golden/constants.txt. It has the constants of modules, the defaults of fields and the defaults of parameters, so
that the diff shows each limit that a change touches. Texts are not in it: other golden files have them.
"""

import ast
import io
import tokenize

from support_golden import same_as_golden
from support_units import is_literal, name_of

from tests.project.test_house import ROOT, SOURCES


def value_text(node):
    """The value of a constant as text; "" for a value that is computed, and for a text."""
    if isinstance(node, ast.Constant):
        is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        return repr(node.value) if is_number else ""
    if isinstance(node, ast.BinOp | ast.UnaryOp) and is_literal(node) and "'" not in ast.unparse(node):
        return repr(eval(compile(ast.Expression(node), "constant", "eval"), {}))
    is_collection = isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
    is_set = isinstance(node, ast.Call) and name_of(node.func) in ("frozenset", "set") and len(node.args) == 1
    if not (is_collection or is_set):
        return ""
    parts = list(ast.walk(node.args[0] if is_set else node))
    plain = all(isinstance(part, PLAIN) for part in parts)
    return ast.unparse(node) if plain and any(isinstance(part, ast.Constant) for part in parts) else ""


PLAIN = (
    ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Constant, ast.Name, ast.Attribute, ast.Starred, ast.BinOp, ast.UnaryOp,
    ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip


def constants(text):
    """(name, value) of each constant of a module, default of a field and default of a parameter, in order."""
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
            unpacked = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(names) > 1
            values = node.value.elts if unpacked else [node.value] * len(names)
            yield from ((name_of(name), value) for name, value in zip(names, values, strict=True))
    for scope in ast.walk(tree):
        if isinstance(scope, ast.ClassDef):
            fields = [entry for entry in scope.body if isinstance(entry, ast.AnnAssign) and entry.value is not None]
            yield from ((f"{scope.name}.{name_of(field.target)}", field.value) for field in fields)
        if isinstance(scope, ast.FunctionDef):
            arguments = scope.args
            given = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) :] if arguments.defaults else []
            pairs = [
                *zip(given, arguments.defaults, strict=True),
                *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
            ]
            yield from ((f"{scope.name}({argument.arg})", default) for argument, default in pairs if default is not None)


def modes(text):
    """The modes and masks of files in a source text: its octal numbers, in order."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.NUMBER and token.string.startswith("0o")]


def test_the_constants_of_all_modules_have_their_golden_values():
    lines = []
    for path in SOURCES:
        found = [(name, value_text(value)) for name, value in constants(path.read_text()) if value is not None]
        lines += [f"{path.relative_to(ROOT)}: {name} = {value}" for name, value in found if value and name != "__all__"]
        lines += [f"{path.relative_to(ROOT)}: modes {' '.join(found)}" for found in [modes(path.read_text())] if found]
    same_as_golden("constants.txt", "\n".join(lines) + "\n")


def test_constants_fields_and_defaults_of_parameters_are_read():
    text = (
        "A = 2 * 2**10\nB, C = 1, 'x'\nD = ('a', 'b')\nE: int = f(1)\nclass G:\n    h: int = 3\ndef i(j, k=4, *, l=0.5): ...\n"
    )
    assert [(name, value_text(value)) for name, value in constants(text)] == [
        ("A", "2048"), ("B", "1"), ("C", ""), ("D", "('a', 'b')"), ("E", ""), ("G.h", "3"), ("i(k)", "4"), ("i(l)", "0.5"),
    ]  # fmt: skip
    assert modes("a.chmod(0o700)\nb = 1, '0o7'\nc(mode=0o600)  # 0o644\n") == ["0o700", "0o600"]
