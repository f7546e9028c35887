"""Draws mutants (small changes of the product's code) at random; the same seed draws the same mutants.

A mutant is identified by the file, the definition, the text of the line and the operator of its change, and not by a line
number. So if some code changes, the same seed still draws the same mutants from the code that did not change.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TypeGuard

import parso
from copies import ROOT, WORK, digest, product_digest, sources
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from operators import kind, kinds, operators, shares

# Parso's names of the nodes in which a bare `*` separates parameters. Cosmic Ray would treat this `*` as a multiplication.
SIGNATURES = {"parameters", "lambdef"}
BRACKETS = set("()[]{},:.=")


@dataclass(frozen=True)
class Mutant:
    """One change of one file of the product.

    file:       path of the file, relative to the root of the repository
    definition: qualified name of the function or class that contains the change; empty at module level
    text:       the line before the change, without its indentation
    operator:   the name of the kind of change in Cosmic Ray, such as the replacement of `<` by `<=`
    repeat:     index of the change among the changes by this operator with the same definition and text, starting at 0
    at:         number of the changed line, in the present version of the file
    line, end:  first and last line of the changed statement (for a compound statement: of its head), in the present version
    occurrence: the number that Cosmic Ray gives the change, in the present version of the file
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
        """A name of 12 characters for the mutant. It is the same in every version of the repository in which the changed code
        is the same."""
        return _digest(self.file, self.definition, self.text, self.operator, self.repeat)

    def changed(self) -> str:
        """The content of the mutant's file after the change."""
        text = mutate_code((ROOT / self.file).read_text(), operators()[self.operator], self.occurrence)
        assert text is not None, self
        return str(text)

    def change(self) -> tuple[str, str]:
        """(the lines that the mutant removes, the lines that it adds), each as one text without line breaks."""
        before, after = (ROOT / self.file).read_text().splitlines(), self.changed().splitlines()
        while before and after and before[0] == after[0]:
            del before[0], after[0]
        while before and after and before[-1] == after[-1]:
            del before[-1], after[-1]
        return " ".join(line.strip() for line in before), " ".join(line.strip() for line in after)


def draw(seed: int, number: int) -> list[Mutant]:
    """Draws places in the code at random. At each place, chooses one of the changes that the operators offer there.

    number: how many places are drawn, in all. Each kind of change has its share (operators.shares). Within a kind, all places
    have the same probability, however many operators fit a place: the places are sorted by a digest of the seed and of their
    content, and the first places are taken. If a kind has too few places, fewer mutants are drawn.
    """
    kept = WORK / product_digest() / f"drawn-{seed}-{number}-{_operators_digest()}.json"
    if kept.exists():
        return [Mutant(**fields) for fields in json.loads(kept.read_text())]
    places: dict[str, list[tuple[str, list[Mutant]]]] = {name: [] for name in kinds()}
    for file in sources():
        for (name, *_), mutants in _places(file).items():
            first = min(mutants, key=lambda mutant: (mutant.operator, mutant.repeat))
            order = _digest(seed, first.file, first.definition, first.text, first.operator, first.repeat)
            places[name].append((order, mutants))
    counts = ", ".join(f"{len(ordered)} {name}" for name, ordered in places.items())
    print(f"places in {len(sources())} files: {counts}; {number} are drawn with the seed {seed}", file=sys.stderr)
    drawn = [
        mutant
        for name, share in shares(number).items()
        for mutant in _first(sorted(places[name], key=lambda pair: pair[0]), seed, share)
    ]
    drawn.sort(key=lambda mutant: _digest(seed, mutant.name))  # so that a part of a run is a sample of all kinds
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([asdict(mutant) for mutant in drawn]))
    return drawn


def _first(places: list[tuple[str, list[Mutant]]], seed: int, number: int) -> list[Mutant]:
    """A mutant of each of the first `number` places at which a change compiles."""
    drawn: list[Mutant] = []
    for _, mutants in places:
        if len(drawn) == number:
            break
        mutants.sort(key=lambda mutant: _digest(seed, mutant.name))
        drawn += [mutant for mutant in mutants if _compiles(mutant)][:1]
    return drawn


def _operators_digest() -> str:
    return digest(f"tools/mutants/{name}.py" for name in ("drawing", "dropping", "operators", "replacing"))


def _places(file: str) -> dict[tuple[str, tuple[int, int], tuple[int, int]], list[Mutant]]:
    """All mutants of a file, grouped by the place that they change. A place is (the kind of change, (line, column) of its
    start, (line, column) of its end)."""
    code = (ROOT / file).read_text()
    lines, outline = code.splitlines(), _Outline(code)
    nodes = list(ast_nodes(parso.parse(code)))
    # Two thirds of the operators replace arithmetic or comparisons. They look only at these nodes, which saves much time.
    signs = [node for node in nodes if node.type == "operator" and node.value not in BRACKETS]
    comparisons = [node for node in nodes if node.type == "comparison"]
    looks_at = {"core/ReplaceBinaryOperator": signs, "core/ReplaceComparisonOperator": comparisons}
    places: dict[tuple[str, tuple[int, int], tuple[int, int]], list[Mutant]] = {}
    for operator, made in operators().items():
        repeats: Counter[tuple[str, str]] = Counter()
        occurrence = -1
        for node in looks_at.get(operator.partition("_")[0], nodes):
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
                places.setdefault((kind(operator), *place), []).append(mutant)
    return places


class _Outline:
    """Where the definitions and the statements of a file are, and which parts of its text never run, such as annotations."""

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
        """Whether the text between two positions runs, that is, is not in an annotation, `__all__`, a type alias or code that
        only type checkers read."""
        return not any(first <= start and end <= last for first, last in self._dead)

    def definition(self, line: int) -> str:
        """The qualified name of the innermost definition around a line; "" at module level."""
        return max(((first, name) for first, last, name in self._definitions if first <= line <= last), default=(0, ""))[1]

    def statement(self, line: int) -> tuple[int, int]:
        """First and last line of the innermost statement around a line; of a compound statement, of its head."""
        return max(((first, last) for first, last in self._statements if first <= line <= last), default=(line, line))


def _is_for_type_checkers(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Whether only type checkers need a statement: `if TYPE_CHECKING:`, an assignment to `__all__`, or the definition of a type
    alias such as `RunState = A | B`."""
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
