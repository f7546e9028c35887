"""Operators of `make mutants` (tools/mutants/): each makes exactly the changes that a table lists, and the result compiles."""

import dropping
import parso
import pytest
import replacing

# operator: (code before, the code after each change that the operator offers, in the order of the code)
CHANGES = {
    dropping.DropElement: [
        ("x = [a, b]", ["x = [ b]", "x = [a]"]),
        ("x = {a, b, c,}", ["x = { b, c}", "x = {a, c}", "x = {a, b}"]),
        ("x = {'a': 1, **b}", ["x = { **b}", "x = {'a': 1}"]),
        ("if x in (1, 2): y()", ["if x in ( 2,): y()", "if x in (1,): y()"]),
        ("NAMES = ('a', 'b')", ["NAMES = ( 'b',)", "NAMES = ('a',)"]),
        ("for x in (1, 2): y()", ["for x in ( 2,): y()", "for x in (1,): y()"]),
        ("x = [y for y in (1, 2)]", ["x = [y for y in ( 2,)]", "x = [y for y in (1,)]"]),
        ("x = a.startswith(('b', 'c'))", ["x = a.startswith(( 'c',))", "x = a.startswith(('b',))"]),
        ("try: x()\nexcept (A, B): y()", ["try: x()\nexcept ( B,): y()", "try: x()\nexcept (A,): y()"]),
        ("x = f(*(a, b))", ["x = f(*( b,))", "x = f(*(a,))"]),
        ("x = [a]; y = (1, 2); z = f((1, 2)); return_ = lambda: (1, 2)", []),
        ("x = [a for a in b]; y = {a: b for a, b in c}; z[a, b]; f(a, b)", []),
    ],
    dropping.DropKeyword: [
        ("f(a, b=1, *c, d=2)", ["f(a, *c, d=2)", "f(a, b=1, *c)"]),
        ("a.f(b=1)", ["a.f()"]),
        ("f(a, **b); x = [c]; zip(d, e, strict=True); run(f, check=False); add(g, help=h)", []),
        ("class A(B, frozen=True): pass", []),
    ],
    dropping.DropValidation: [
        ("if a:\n    raise B(c)\n", ["if (a) and False:\n    raise B(c)\n"]),
        ("if a: b = c\nelif d or e: raise F\n", ["if a: b = c\nelif (d or e) and False: raise F\n"]),
        ("if a:\n    b = c()\n    raise D(b)\n", ["if (a) and False:\n    b = c()\n    raise D(b)\n"]),
        ("if a:\n    problems.append(b)\n", ["if (a) and False:\n    problems.append(b)\n"]),
        ("if a:\n    b()\nelse:\n    raise C\n", ["if a:\n    b()\nelse:\n    pass\n"]),
        ("try:\n    a()\nexcept B:\n    raise C from None\n", ["try:\n    a()\nexcept B:\n    pass\n"]),
        ("a.must_be_of_cluster(b)\n", ["pass\n"]),
        ("_check(a)\n", ["pass\n"]),
        ("x = check(a)\nrun(b)\nif c:\n    d.append(e)\nif f:\n    raise G\n    h()\n", []),
    ],
    dropping.DropOrder: [
        ("x = sorted(a, key=b)", ["x = list(a)"]),
        ("for x in reversed(a): y()", ["for x in list(a): y()"]),
        ("a.b.sort(key=c)\n", ["pass\n"]),
        ("x = a.sorted(b)\ny = c.sort\n", []),
    ],
    replacing.ReplaceMode: [
        ("a.chmod(0o644)", ["a.chmod(0o600)"]),
        ("a.chmod(0o700)", ["a.chmod(0o755)"]),
        ("a.chmod(0o600)", ["a.chmod(0o644)"]),
        ("x = mode & 0o022", ["x = mode & 0o020"]),
        ("x = 420, 0o7", []),
    ],
    replacing.ReplacePower: [
        ("x = 1000", ["x = 1024", "x = 1000000"]),
        ("x = a / 1e6", ["x = a / 1048576.0", "x = a / 1000.0"]),
        ("x = a * 1e-3", ["x = a * 1e-6"]),
        ("x = 4 * 2**20", ["x = 4 * 1000000", "x = 4 * 1024"]),
        ("x = 1 << 10", ["x = 1000", "x = 1048576"]),
        ("x = 1024**3", ["x = 1000000000", "x = 1048576"]),
        ("x = 1_000_000", ["x = 1048576", "x = 1000"]),
        ("x = 100, 2**16, 1e10, 20, 0x400000, 1j", []),
    ],
    replacing.ReplaceUnit: [
        ("x = 'memory (GiB)'", ["x = 'memory (GB)'"]),
        ("x = f'{a:.1f} s of {b} ms'", ["x = f'{a:.1f} ms of {b} ms'", "x = f'{a:.1f} s of {b} s'"]),
        ("x = 'Mean (us)', 'kB'", ["x = 'Mean (ms)', 'kB'", "x = 'Mean (us)', 'KiB'"]),
        ("x = 'the user reads us, its-ms', '2 file(s)'; f(help='in GiB')", []),
        ('"""In GiB."""\n', []),
    ],
    replacing.ReplaceText: [
        ("x = 'follows from gpu_batch'", ["x = 'XX gpu_batch'"]),
        ("raise A('the run is gone: start it')", ["raise A('XX: start it')"]),
        ("x = f'{a} has no key {b!r} but this one'", ["x = f'{a} XX {b!r} but this one'", "x = f'{a} has no key {b!r} XX'"]),
        ("x = 'a\\nTwo words\\n'", ["x = 'a\\nXX\\n'"]),
        ("x = 'word', 'a-key', r'two words', b'two words'; f(help='two words')", []),
        ('def f():\n    """Two words."""\n', []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("operator", CHANGES, ids=lambda operator: operator.__name__)
def test_an_operator_makes_the_listed_changes_and_no_other(operator):
    for before, after in CHANGES[operator]:
        assert changes(operator(), before) == after
        for code in (before, *after):
            compile(code, "code", "exec")


def changes(operator, code):
    """The code after each change that an operator offers."""
    count = sum(len(list(operator.mutation_positions(node))) for node in nodes(parso.parse(code)))
    return [changed(operator, code, number) for number in range(count)]


def changed(operator, code, number):
    tree = parso.parse(code)
    places = [(node, index) for node in nodes(tree) for index, _ in enumerate(operator.mutation_positions(node))]
    node, index = places[number]
    new = operator.mutate(node, index)
    if new is not node:
        siblings = node.parent.children
        siblings[next(at for at, child in enumerate(siblings) if child is node)] = new
    return tree.get_code()


def nodes(tree):
    yield tree
    for child in getattr(tree, "children", ()):
        yield from nodes(child)


def test_a_keyword_that_the_function_needs_is_not_dropped(monkeypatch):
    monkeypatch.setattr(dropping.DropKeyword, "needed", frozenset({("f", "b")}))
    assert changes(dropping.DropKeyword(), "f(b=1, c=2); g(b=1)") == ["f(b=1); g(b=1)", "f(b=1, c=2); g()"]
