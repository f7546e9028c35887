"""`make test` runs the quick tests and `make test-all` the slow tests: each test is in one of the two, as a table says."""

import re
from pathlib import Path

import pytest
import support_tiers
from support_tiers import COLLECTED, QUICK, SLOW, SLOW_FILES, SLOW_TESTS, is_without_tests, missing_names, split, tier

TESTS = Path(__file__).parents[1]
MAKEFILE = (TESTS.parent / "Makefile").read_text()


@pytest.fixture
def table(monkeypatch):
    """A table that names two files and a test."""
    monkeypatch.setattr(support_tiers, "SLOW_FILES", {"test_a": (), "test_b": ("test_small", "test_of[ddp-2]")})
    monkeypatch.setattr(support_tiers, "SLOW_TESTS", {"test_c": ("test_large", "test_of[fsdp]")})


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/test_a.py::test_small", SLOW),
        ("tests/test_b.py::test_large", SLOW),
        ("tests/test_b.py::test_small", QUICK),
        ("tests/test_b.py::test_small[1]", QUICK),
        ("tests/test_b.py::test_of[ddp-2]", QUICK),
        ("tests/test_b.py::test_of[ddp-4]", SLOW),
        ("tests/test_c.py::test_small", QUICK),
        ("tests/test_c.py::test_large[a::b]", SLOW),
        ("tests/test_c.py::test_of[fsdp]", SLOW),
        ("tests/test_c.py::test_of[ddp]", QUICK),
        ("tests/test_d.py::test_large", QUICK),
    ],
)
def test_a_test_is_slow_if_the_table_names_its_file_or_its_name(table, test, expected):
    assert tier(test) == expected


def test_only_files_without_a_test_of_the_tier_are_not_imported(table):
    files = ["test_a", "test_b", "test_c", "test_d"]
    assert [file for file in files if is_without_tests(file, QUICK)] == ["test_a"]
    assert [file for file in files if is_without_tests(file, SLOW)] == ["test_d"]
    assert not any(is_without_tests(file, None) for file in files)


def test_names_that_no_test_has_are_reported(table):
    collected = ["tests/test_b.py::test_small[1]", "tests/test_b.py::test_of[ddp-4]", "tests/test_c.py::test_large"]
    assert missing_names(collected) == ["test_b::test_of[ddp-2]", "test_c::test_of[fsdp]"]


def test_each_file_of_the_table_exists_and_is_there_once():
    assert [file for file in (*SLOW_FILES, *SLOW_TESTS) if len(list(TESTS.rglob(f"{file}.py"))) != 1] == []
    assert SLOW_FILES.keys().isdisjoint(SLOW_TESTS)


def test_each_name_of_the_table_is_that_of_a_collected_test(request):
    assert missing_names(request.config.stash[COLLECTED]) == []


def test_the_quick_tier_has_two_end_to_end_tests_the_quickstart_and_a_script(request):
    end_to_end = [item.nodeid for item in request.session.items if item.get_closest_marker("e2e")]
    assert {split(test)[0] for test in end_to_end if tier(test) == QUICK} <= {"test_quickstart_e2e", "test_command_e2e"}


def test_make_runs_each_tier_once():
    recipes = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    assert re.findall(r"--tier (\w+)", recipes["test"]) == [QUICK]
    assert re.findall(r"--tier (\w+)", recipes["test-all"]) == [SLOW]
    assert re.findall(r"make (\S+)$", (TESTS.parent / ".ci/run").read_text(), re.MULTILINE) == ["test", "test-all"]
