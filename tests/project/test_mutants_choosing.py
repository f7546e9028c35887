"""`make mutants` (tools/mutants/) chooses the tests that judge a mutant by their recorded lines, and how many it draws."""

import json
from types import SimpleNamespace

import choosing
import operators
import pytest

PRODUCT = {
    "limits.py": "LIMIT_S = 5\nOTHER = 1\n\n\ndef wait():\n    return LIMIT_S\n\n\ndef go_on():\n    return OTHER\n",
    "uses.py": (
        "import limits\n\n\ndef use():\n    return limits.LIMIT_S\n\n\n"
        "def idle():\n    return 0\n\n\ndef never():\n    return 1\n"
    ),
}
# test file -> (test -> seconds, file -> line -> numbers of the tests that run it; -1: when the file is imported)
RECORDED = {
    "tests/test_waits.py": (
        {"test_wait": 9.0, "test_go_on": 0.1, "test_fails": 0.1},
        {"limits.py": {1: [-1], 2: [-1], 6: [0, 2], 10: [1]}},
    ),
    "tests/test_uses.py": (
        {"test_broad": 0.1, "test_use": 0.1, "test_idle": 0.1},
        {"limits.py": {1: [-1], 6: [0]}, "uses.py": {5: [0, 1], 9: [0, 2]}},
    ),
}


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    for name, code in PRODUCT.items():
        (tmp_path / name).write_text(code)
    for name, (seconds, lines) in RECORDED.items():
        tests = {
            f"{name}::{test}": {"seconds": took, "outcome": "failed" if test == "test_fails" else "passed"}
            for test, took in seconds.items()
        }
        (tmp_path / f"{name.replace('/', '-')}.json").write_text(json.dumps({"tests": tests, "lines": lines}))
    (tmp_path / "work" / "digest").mkdir(parents=True)
    replaced = {
        "ROOT": tmp_path,
        "WORK": tmp_path / "work",
        "product_digest": lambda: "digest",
        "sources": lambda: list(PRODUCT),
        "test_files": lambda: list(RECORDED),
        "place": lambda name: tmp_path / f"{name.replace('/', '-')}.json",
    }
    for name, value in replaced.items():
        monkeypatch.setattr(choosing, name, value)
    yield choosing.Recordings()
    for cached in (choosing.bodies, choosing.importers, choosing._imports, choosing._tree):
        cached.cache_clear()


def chosen(recordings, line, file="limits.py"):
    """(the names of the chosen tests in their order, the number of tests that are left out, how they are chosen)"""
    choice = recordings.choose(SimpleNamespace(file=file, at=line, line=line, end=line))
    return [name.partition("::")[2] for batch in choice.batches for name in batch.tests], choice.left_out, choice.how


def test_a_line_is_judged_by_passing_tests_that_run_it_narrow_and_short_first(recordings):
    assert chosen(recordings, 6) == (["test_broad", "test_wait"], 0, "line")
    assert chosen(recordings, 9, "uses.py") == (["test_idle", "test_broad"], 0, "line")
    assert chosen(recordings, 13, "uses.py") == ([], 0, "line")


def test_a_constant_is_judged_first_by_tests_that_run_a_line_with_its_name(recordings):
    names, *others = chosen(recordings, 1)
    assert (set(names[:3]), names[3:]) == ({"test_wait", "test_use", "test_broad"}, ["test_go_on", "test_idle"])
    assert others == [0, "import"]
    assert chosen(recordings, 2)[0][0] == "test_go_on"


def test_tests_for_which_there_is_no_time_are_counted(recordings, monkeypatch):
    monkeypatch.setattr(choosing, "BUDGET_S", 1.0)
    assert chosen(recordings, 6) == (["test_broad"], 1, "line")


def test_a_test_that_fails_without_a_mutant_is_not_chosen_any_more(recordings):
    recordings.distrust("tests/test_uses.py::test_broad")
    assert chosen(recordings, 6) == (["test_wait"], 0, "line")
    assert choosing.read_killers()["unreliable"] == ["tests/test_uses.py::test_broad"]


@pytest.mark.parametrize("number", [200, 100, 10, 1])
def test_half_of_the_mutants_are_syntactic_and_the_other_kinds_are_balanced(number):
    shares = operators.shares(number)
    semantic = [share for name, share in shares.items() if name != operators.SYNTACTIC]
    assert (sum(shares.values()), sum(semantic)) == (number, number // 2)
    assert len(semantic) == 8
    assert max(semantic) - min(semantic) <= 1


def test_a_keyword_is_needed_if_no_function_or_class_of_its_name_has_a_default(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("def f(a, b=1, *, c, d=2): pass\ndef g(x): pass\nclass A:\n    k: int\n    m: int = 1\n")
    (tmp_path / "b.py").write_text("class B:\n    def __init__(self, n): pass\n    def g(self, x=1): pass\n")
    monkeypatch.setattr(operators, "ROOT", tmp_path)
    monkeypatch.setattr(operators, "sources", lambda: ["a.py", "b.py"])
    needed = operators._needed_keywords() - {("__init__", "self"), ("__init__", "n"), ("g", "self"), ("B", "self")}
    assert needed == {("f", "a"), ("f", "c"), ("A", "k"), ("B", "n")}
