"""Finds code in which the order of a set, or of the entries of a folder, reaches a list, a text or an action.

The order of a set differs from process to process, that of the entries of a folder from file system to file system.

An expression is a set if its code says so (`{a, b}`, `set(x)`, `x.keys() - y`), or if it is a name, a field or a function that
is annotated as a set or is only assigned sets.
"""

import ast
import functools

OPERATORS = ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor
METHODS = {"difference", "intersection", "symmetric_difference", "union"}
# Functions whose result does not depend on the order of their argument.
IN_ANY_ORDER = {
    "all", "any", "bool", "Counter", "dict_keys", "frozenset", "isdisjoint", "issubset", "issuperset", "len", "set", "sorted",
    "sum", "difference", "difference_update", "intersection", "is_in", "symmetric_difference", "union", "update",
}  # fmt: skip
# Functions whose result has the order of their argument, and functions that give it on to the function around them.
IN_ORDER = {"chain", "enumerate", "extend", "from_iterable", "fromkeys", "iter", "join", "list", "repr", "str", "tuple", "zip"}
PASS_ON = {"filter", "map"}
# Functions that return the entries of a folder, in an order that differs from file system to file system.
LISTINGS = {"glob", "iterdir", "listdir", "rglob", "scandir"}
# Methods by which a loop over a set gives its order to a list, a file, a terminal or another process.
ACTIONS = {"append", "extend", "insert", "put", "run", "send", "write", "writelines", "print", "add_row"}


def is_set_type(annotation):
    """Whether an annotation is a set, or a set or None."""
    text = ast.unparse(annotation).strip("'\"") if annotation is not None else ""
    return text.split("[")[0].split(".")[-1] in ("AbstractSet", "Set", "frozenset", "set")


def set_names(trees):
    """(functions, fields) of all code whose every definition is a set: names that a call, or an attribute, may have."""
    functions, fields = {}, {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, set()).add(is_set_type(node.returns))
                if any(isinstance(decorator, ast.Name) and "property" in decorator.id for decorator in node.decorator_list):
                    fields.setdefault(node.name, set()).add(is_set_type(node.returns))
            elif isinstance(node, ast.ClassDef):
                for entry in node.body:
                    if isinstance(entry, ast.AnnAssign):
                        fields.setdefault(entry.target.id, set()).add(is_set_type(entry.annotation))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                fields.setdefault(node.target.attr, set()).add(is_set_type(node.annotation))
    return tuple({name for name, kinds in found.items() if kinds == {True}} for found in (functions, fields))


class Reader:
    """Finds the places in one file. functions, fields: the names that `set_names` returns."""

    def __init__(self, tree, functions=frozenset(), fields=frozenset()):
        self.tree, self.functions, self.fields = tree, functions, fields
        self.nodes, self.parents, self.scope, self.of_scope = [tree], {}, {tree: tree}, {}
        self.sets_of_scope, self.known = {}, {}
        for node in self.nodes:  # the list grows in the loop
            inner = node if isinstance(node, ast.FunctionDef | ast.Lambda) else self.scope[node]
            for child in ast.iter_child_nodes(node):
                self.parents[child], self.scope[child] = node, inner
                self.of_scope.setdefault(inner, []).append(child)
                self.nodes.append(child)

    def names_of(self, scope):
        """The names of a function, or of the module, that are sets: annotated as sets, or assigned only sets."""
        if scope not in self.sets_of_scope:
            self.sets_of_scope[scope] = set()
            kinds = {}
            if isinstance(scope, ast.FunctionDef):
                kinds = {argument.arg: {is_set_type(argument.annotation)} for argument in _arguments(scope.args)}
            for node in self.of_scope.get(scope, ()):
                for target, value in _bindings(node):
                    for name, part in _pairs(target, value):
                        kinds.setdefault(name, set()).add(self.is_set(part) if isinstance(part, ast.expr) else bool(part))
            self.sets_of_scope[scope] = {name for name, found in kinds.items() if found == {True}}
        return self.sets_of_scope[scope]

    def binds(self, scope, name):
        """Whether a function has its own variable or argument with a name."""
        nodes = self.of_scope.get(scope, ())
        arguments = getattr(scope, "args", None)
        return any(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) for node in nodes) or (
            arguments is not None and any(argument.arg == name for argument in _arguments(arguments))
        )

    def is_set(self, node):
        if node not in self.known:
            self.known[node] = False  # for a name that is assigned from itself
            self.known[node] = self._is_set(node)
        return self.known[node]

    def _is_set(self, node):
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call):
            function = node.func
            if _called(node) in LISTINGS and not (
                isinstance(function, ast.Attribute) and ast.unparse(function.value) == "resources"
            ):
                return True
            if isinstance(function, ast.Attribute):
                return (
                    (function.attr in METHODS or function.attr == "copy") and self.is_set(function.value)
                ) or function.attr in self.functions
            return isinstance(function, ast.Name) and (function.id in ("set", "frozenset") or function.id in self.functions)
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            return any(self.is_set(part) or _is_view(part) for part in (node.left, node.right))
        if isinstance(node, ast.IfExp):
            return self.is_set(node.body) or self.is_set(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(self.is_set(part) for part in node.values)
        if isinstance(node, ast.NamedExpr):
            return self.is_set(node.value)
        if isinstance(node, ast.Attribute):
            return node.attr in self.fields
        if isinstance(node, ast.Name):
            scope = self.scope[node]
            while True:
                if node.id in self.names_of(scope):
                    return True
                if scope is self.tree or self.binds(scope, node.id):
                    return False
                scope = self.scope[scope]
        return False

    def places(self):
        """(line, code) of each place where the order of a set gets out."""
        for node in self.nodes:
            if isinstance(node, ast.expr) and self.is_set(node) and (code := self.leak(node)) is not None:
                yield code.lineno, ast.unparse(code).splitlines()[0]

    def leak(self, node):
        """The node that gives the order of a set on, or None."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.comprehension) and parent.iter is node:
            comprehension = self.parents[parent]
            if isinstance(comprehension, ast.SetComp):
                return None
            if isinstance(comprehension, ast.GeneratorExp | ast.ListComp):
                return self.use(comprehension)
            return comprehension
        if isinstance(parent, ast.For) and parent.iter is node:
            return parent if any(_acts(part) for statement in parent.body for part in ast.walk(statement)) else None
        if isinstance(parent, ast.FormattedValue):
            return parent
        return self.use(node)

    def has_one(self, node):
        """Whether the function of a set has a test of its size, as in `kinds.pop() if len(kinds) == 1 else None`."""
        return f"len({ast.unparse(node)})" in _unparse(self.scope[node])

    def is_sorted_later(self, node, parent):
        """Whether a list or generator gets a name, and the function sorts the values of this name."""
        name = parent.targets[0] if isinstance(parent, ast.Assign) else getattr(parent, "target", None)
        return isinstance(name, ast.Name) and f"sorted({name.id}" in _unparse(self.scope[node])

    def use(self, node):
        """The call or list around a set, or around a comprehension over it, if the order matters there."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Starred):
            outer = self.parents[parent]
            return (
                None
                if isinstance(outer, ast.Set) or (isinstance(outer, ast.Call) and _called(outer) in IN_ANY_ORDER)
                else outer
            )
        if isinstance(parent, ast.Call) and node in parent.args:
            name = _called(parent)
            if name in PASS_ON:
                return self.use(parent)
            if name in ("min", "max"):
                return parent if parent.keywords and isinstance(node, ast.Name | ast.Set | ast.SetComp) else None
            if name in ("iter", "next") and self.has_one(node):
                return None
            is_loop = not self.is_set(node) and name not in IN_ANY_ORDER
            return node if is_loop else parent if name in IN_ORDER else None
        if isinstance(parent, ast.Attribute) and parent.attr == "pop":
            return None if self.has_one(node) else self.parents[parent]
        return None if self.is_set(node) or self.is_sorted_later(node, parent) else node


def _arguments(arguments):
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


@functools.cache
def _unparse(node):
    return ast.unparse(node)


def _is_view(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("keys", "items")
        and not node.args
    )


def _called(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _bindings(node):
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign):
        yield node.target, is_set_type(node.annotation)
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, False
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, False


def _pairs(target, value):
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        values = (
            value.elts
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            else [False] * len(target.elts)
        )
        for part, given in zip(target.elts, values, strict=True):
            yield from _pairs(part, given)


def _acts(node):
    if isinstance(node, ast.Yield | ast.YieldFrom | ast.Return | ast.Raise | ast.Break):
        return True
    if isinstance(node, ast.Call):
        name = _called(node)
        return name in ACTIONS or name.startswith(("print", "write", "remove", "say"))
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Subscript) for target in targets)
