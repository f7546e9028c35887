"""Operators that drop something from the code: an element of a display, a keyword argument, a validation, an order.

They are written like the operators of Cosmic Ray: `mutation_positions` yields the places at which a node of parso can be
changed, and `mutate` changes the node at one of these places. operators.py adds them to the operators of Cosmic Ray.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import parso

Position = tuple[tuple[int, int], tuple[int, int]]
DISPLAYS = ("testlist_comp", "dictorsetmaker")
COMPREHENSIONS = ("sync_comp_for", "comp_for")
# Functions that take a tuple of any length.
TAKE_TUPLES = {"isinstance", "issubclass", "startswith", "endswith", "set", "frozenset", "list", "sorted", "any", "all", "dict"}
HELP = {"help", "description", "epilog", "metavar", "usage"}  # arguments of argparse that golden files hold
# Arguments without an effect as long as our code has no defect, or without any effect.
GUARDS = {"strict=True", "check=False"}
CHECKS = re.compile(r"_?(check|must|refuse|require|validate|verify|ensure)(_\w+)?")
PROBLEMS = re.compile(r"\w*(problems|faults|refused)(\.append|\.extend| \+=)")


def text(node: Any) -> str:
    """The code of a node without the spaces and comments before it."""
    return str(node.get_code(include_prefix=False))


def position(first: Any, last: Any = None) -> Position:
    """The position of a node, or of all nodes from the first to the last."""
    return first.start_pos, (last or first).end_pos


def expression(code: str, like: Any) -> Any:
    """A node for an expression or `pass`, with the spaces and comments that stand before the node `like`."""
    node = parso.parse(code).children[0]
    node.get_first_leaf().prefix = like.get_first_leaf().prefix
    node.parent = like.parent
    return node


def replace(node: Any, new: Any) -> None:
    """Puts a new node at the place of a node in its parent."""
    children = node.parent.children
    children[next(index for index, child in enumerate(children) if child is node)] = new


def elements(node: Any) -> list[list[Any]]:
    """The elements of a node that separates them by commas, each as its nodes (an entry of a dict has several)."""
    groups: list[list[Any]] = [[]]
    for child in node.children:
        if child.type == "operator" and child.value == ",":
            groups.append([])
        else:
            groups[-1].append(child)
    return [group for group in groups if group]


def drop(node: Any, index: int, *, keeps_comma: bool = False) -> None:
    """Drops an element of a node that separates its elements by commas. keeps_comma: a comma follows the last element."""
    commas = [child for child in node.children if child.type == "operator" and child.value == ","]
    kept = elements(node)
    del kept[index]
    children: list[Any] = []
    for number, group in enumerate(kept):
        children += [*([commas[number - 1]] if number else []), *group]
    node.children = [*children, *([commas[0]] if keeps_comma else [])]


class DropElement:
    """Drops an element of a list, set or dict with several elements, or of a tuple that may have any length.

    A tuple may have any length if it is searched (`in`), iterated, unpacked by `*`, assigned to a name in upper case, after
    `except`, or an argument of a function in TAKE_TUPLES. If another tuple, such as a pair that a function returns, loses an
    element, the code usually only raises.
    """

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        groups = self._elements(node)
        for group in groups if len(groups) > 1 else []:
            yield position(group[0], group[-1])

    def mutate(self, node: Any, index: int) -> Any:
        drop(node, index, keeps_comma=node.parent.children[0].value == "(" and len(elements(node)) == 2)
        return node

    def _elements(self, node: Any) -> list[list[Any]]:
        if node.type not in DISPLAYS or node.parent.type != "atom":
            return []
        if any(child.type in COMPREHENSIONS for child in node.children):
            return []
        if node.parent.children[0].value == "(" and not _may_have_any_length(node.parent):
            return []
        return elements(node)


def _may_have_any_length(atom: Any) -> bool:
    parent = atom.parent
    words = [text(child) for child in parent.children]
    if parent.type in ("comparison", "for_stmt", *COMPREHENSIONS, "except_clause", "argument", "star_expr"):
        before = words[next(index for index, child in enumerate(parent.children) if child is atom) - 1]
        return before in ("in", "not in", "except", "*")
    if parent.type == "expr_stmt":
        return bool(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", words[0]))
    if parent.type == "annassign":
        return bool(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", text(parent.parent.children[0])))
    call = parent.parent if parent.type == "arglist" else parent
    return call.type == "trailer" and _callee(call) in TAKE_TUPLES


def _callee(trailer: Any) -> str:
    """The last name before the brackets of a call: `f` of `a.f(b)`."""
    siblings = trailer.parent.children
    before = siblings[next(index for index, child in enumerate(siblings) if child is trailer) - 1]
    return text(before).rpartition(".")[2]


class DropKeyword:
    """Drops a keyword argument of a call, unless the function needs it or it is in HELP or GUARDS.

    needed: the keywords without a default, as (name of the function or class, keyword). Without such a keyword, the call would
    only raise.
    """

    needed: frozenset[tuple[str, str]] = frozenset()

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        for group in self._keywords(node):
            yield position(group[0])

    def mutate(self, node: Any, index: int) -> Any:
        (dropped,) = self._keywords(node)[index]
        inside = node.children[1]
        if inside is dropped:
            del node.children[1]
        else:
            drop(inside, next(number for number, group in enumerate(elements(inside)) if group[0] is dropped))
        return node

    def _keywords(self, node: Any) -> list[list[Any]]:
        if node.type != "trailer" or node.children[0].value != "(":
            return []
        groups = elements(node.children[1]) if node.children[1].type == "arglist" else [[node.children[1]]]
        return [
            group
            for group in groups
            if group[0].type == "argument"
            and text(group[0].children[1]) == "="
            and text(group[0].children[0]) not in HELP
            and text(group[0]) not in GUARDS
            and (_callee(node), text(group[0].children[0])) not in self.needed
        ]


class DropValidation:
    """Drops a validation: a branch that raises or appends a problem is never taken, or a `raise` or a call of a function that
    checks (CHECKS) becomes `pass`.

    The condition of a dropped branch is still computed, because it may set a variable.
    """

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        for place in self._places(node):
            yield position(place)

    def mutate(self, node: Any, index: int) -> Any:
        place = self._places(node)[index]
        replace(place, expression(f"({text(place)}) and False" if node.type == "if_stmt" else "pass", place))
        return node

    def _places(self, node: Any) -> list[Any]:
        if node.type == "if_stmt":
            words = node.children
            return [
                words[index + 1]
                for index, word in enumerate(words)
                if word.type == "keyword" and word.value in ("if", "elif") and _ends_in_refusal(words[index + 3])
            ]
        if node.type == "simple_stmt":
            (statement, *_) = node.children
            if statement.type == "raise_stmt" and not _is_in_branch(node):
                return [statement]
            if statement.type in ("atom_expr", "power") and _is_check(statement):
                return [statement]
        return []


def _ends_in_refusal(suite: Any) -> bool:
    """Whether the last statement of a branch raises, or the branch only appends a problem."""
    statements = suite.children[1:] if suite.type == "suite" else [suite]
    last = statements[-1]
    if last.type != "simple_stmt":
        return False
    is_problem = len(statements) == 1 and PROBLEMS.match(text(last)) is not None
    return last.children[0].type == "raise_stmt" or is_problem


def _is_in_branch(statement: Any) -> bool:
    """Whether a statement is in a branch of an `if` that has a condition. Then the condition is changed, not the statement."""
    branch = statement.parent if statement.parent.type == "suite" else statement
    if branch.parent.type != "if_stmt":
        return False
    words = branch.parent.children
    return text(words[next(index for index, child in enumerate(words) if child is branch) - 2]) != "else"


def _is_check(statement: Any) -> bool:
    last = statement.children[-1]
    return last.type == "trailer" and last.children[0].value == "(" and CHECKS.fullmatch(_callee(last)) is not None


class DropOrder:
    """Drops an order: `sorted(...)` and `reversed(...)` become `list(...)`, and the statement `a.sort(...)` becomes `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if (place := self._place(node)) is not None:
            yield position(place)

    def mutate(self, node: Any, index: int) -> Any:
        place = self._place(node)
        if node.type == "simple_stmt":
            replace(place, expression("pass", place))
            return node
        place.value = "list"
        brackets = node.children[1]
        if brackets.children[1].type == "arglist":  # `list` takes no key
            brackets.children[1].children = elements(brackets.children[1])[0]
        return node

    def _place(self, node: Any) -> Any:
        words = [text(child) for child in node.children[:2]] if node.type in ("atom_expr", "power") else []
        if words and words[0] in ("sorted", "reversed") and words[1].startswith("("):
            return node.children[0]
        is_call = node.type == "simple_stmt" and node.children[0].type in ("atom_expr", "power")
        if is_call and [text(child) for child in node.children[0].children[-2:-1]] == [".sort"]:
            return node.children[0]
        return None
