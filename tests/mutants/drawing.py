"""Draws mutants by a seed. A mutant is identified by what it changes (file, definition, text of the line, operator) and not by
a line number: if other code changes, the same seed still draws the same mutants from code that did not."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TypeGuard

import parso
from copies import ROOT, WORK, product_digest, sources
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code

# What is left out of Cosmic Ray's operators: those that need arguments, and `is` for `==` (`3 is 3` says nothing of the tests).
WITH_ARGUMENTS = {"VariableReplacer", "VariableInserter"}
# A bare `*` between parameters is no multiplication, though Cosmic Ray takes it for one.
SIGNATURES = {"parameters", "lambdef"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    file:       name of the file, from the repository's root
    definition: function or class that holds the change, with those around it; empty at module level
    text:       the line before the change, without its indentation
    operator:   Cosmic Ray's name of the operator
    repeat:     which of the operator's changes with the same definition and text, from 0
    line, end:  first and last line of the statement (of a compound statement: of its head), in this tree
    at:         line of the change, in this tree
    occurrence: Cosmic Ray's number of the change in this file, in this tree
    """

    file: str
    definition: str
    text: str
    operator: str
    repeat: int
    at: int
    line: int
    end: int
    occurrence: int

    @property
    def name(self) -> str:
        """12 characters that are the same in every tree in which the code is the same."""
        return _digest(self.file, self.definition, self.text, self.operator, self.repeat)

    def changed(self) -> str:
        """The file's text with the change."""
        text = mutate_code((ROOT / self.file).read_text(), plugins.get_operator(self.operator)(), self.occurrence)
        assert text is not None, self
        return str(text)

    def change(self) -> tuple[str, str]:
        """What the change takes out and what it puts in, as lines."""
        before, after = (ROOT / self.file).read_text().splitlines(), self.changed().splitlines()
        while before and after and before[0] == after[0]:
            del before[0], after[0]
        while before and after and before[-1] == after[-1]:
            del before[-1], after[-1]
        return " ".join(line.strip() for line in before), " ".join(line.strip() for line in after)


def draw(seed: int, number: int) -> list[Mutant]:
    """Draws this number of places, and at each place one of the changes that operators offer. A place counts once, however many
    operators fit. The places whose digests of seed and content are least are drawn, which is a uniform draw."""
    kept = WORK / product_digest() / f"drawn-{seed}-{number}.json"
    if kept.exists():
        return [Mutant(**fields) for fields in json.loads(kept.read_text())]
    chosen: list[tuple[str, list[Mutant]]] = []
    for file in sources():
        for mutants in _places(file).values():
            first = min(mutants, key=lambda mutant: (mutant.operator, mutant.repeat))
            chosen.append((_digest(seed, first.file, first.definition, first.text, first.operator, first.repeat), mutants))
    chosen.sort(key=lambda pair: pair[0])
    print(
        f"{len(chosen)} places in {len(sources())} files can be changed; {number} are drawn with the seed {seed}",
        file=sys.stderr,
    )
    drawn: list[Mutant] = []
    for _, mutants in chosen:
        mutants.sort(key=lambda mutant: _digest(seed, mutant.name))
        drawn += [mutant for mutant in mutants if _compiles(mutant)][:1]
        if len(drawn) == number:
            break
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([asdict(mutant) for mutant in drawn]))
    return drawn


def _operators() -> Iterator[str]:
    for name in plugins.operator_names():
        short = name.split("/")[1]
        if short in WITH_ARGUMENTS or (short.startswith("ReplaceComparison") and _of_identity(short)):
            continue
        yield name


def _of_identity(name: str) -> bool:
    """Whether a comparison of values becomes one of identity, or the reverse."""
    before, after = name.split("_")[1:3]
    return (before in ("Is", "IsNot")) != (after in ("Is", "IsNot"))


def _places(file: str) -> dict[tuple[tuple[int, int], tuple[int, int]], list[Mutant]]:
    """All mutants of a file by the place that they change."""
    code = (ROOT / file).read_text()
    lines, outline = code.splitlines(), _Outline(code)
    nodes = list(ast_nodes(parso.parse(code)))
    places: dict[tuple[tuple[int, int], tuple[int, int]], list[Mutant]] = {}
    for operator in _operators():
        made = plugins.get_operator(operator)()
        repeats: Counter[tuple[str, str]] = Counter()
        occurrence = -1
        for node in nodes:
            for place in made.mutation_positions(node):
                occurrence += 1
                at = place[0][0]
                if not outline.runs(*place) or (node.parent is not None and node.parent.type in SIGNATURES):
                    continue
                definition, text = outline.definition(at), lines[at - 1].strip()
                repeat = repeats[definition, text]
                repeats[definition, text] += 1
                line, end = outline.statement(at)
                mutant = Mutant(file, definition, text, operator, repeat, at, line, end, occurrence)
                places.setdefault(place, []).append(mutant)
    return places


class _Outline:
    """Where a file's definitions and statements are, and which of its text never runs."""

    def __init__(self, code: str) -> None:
        tree = ast.parse(code)
        self._dead: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._definitions: list[tuple[int, int, str]] = []
        self._statements: list[tuple[int, int]] = []
        self._look(tree, "")

    def _look(self, node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}".removeprefix(".")
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                self._definitions.append((first, child.end_lineno or first, name))
            if isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                end = body[0].lineno - 1 if body else child.end_lineno
                self._statements.append((child.lineno, max(child.lineno, end or child.lineno)))
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._never_runs(child.returns)
            elif isinstance(child, ast.arg | ast.AnnAssign):
                self._never_runs(child.annotation)
            elif _is_for_type_checkers(child):
                self._never_runs(child)
            self._look(child, name)

    def _never_runs(self, node: ast.expr | ast.stmt | None) -> None:
        if node is not None:
            self._dead.append(((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)))

    def runs(self, start: tuple[int, int], end: tuple[int, int]) -> bool:
        """Whether this text is more than an annotation, `__all__`, a type's name or what only a type checker reads."""
        return not any(first <= start and end <= last for first, last in self._dead)

    def definition(self, line: int) -> str:
        """The innermost definition around a line."""
        return max(((first, name) for first, last, name in self._definitions if first <= line <= last), default=(0, ""))[1]

    def statement(self, line: int) -> tuple[int, int]:
        """First and last line of the innermost statement, or of its head."""
        return max(((first, last) for first, last in self._statements if first <= line <= last), default=(line, line))


def _is_for_type_checkers(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Whether this is `if TYPE_CHECKING:`, `__all__`, or a union of types under a name that is written as one of a type."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    if not isinstance(node, ast.Assign):
        return False
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    union = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
    return "__all__" in names or (union and all(name[:1].isupper() and not name.isupper() for name in names))


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.changed(), mutant.file, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _digest(*words: object) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]
