"""Tests of all facts, operations and checks, which are found by searching their folders: new files need no entry in a list."""

import ast
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from provision import order, provider
from provision.check import Check
from provision.fact import FactQuery, Unanswered
from provision.facts.users import USERS, Users
from provision.operation import Nothing, Operation, Write
from shardlab import registry
from shardlab.cluster.slurm_keys import Gpus
from tests.provision.operations.test_operations import site

PACKAGE = Path(provider.__file__).parent
TESTS = Path(__file__).parents[1]


def defined(folder: str, kind: type) -> dict[str, Any]:
    """Returns all objects of this type that the files of a folder define, by FILE.NAME."""
    modules = registry.load_plugins(f"provision.{folder}")
    return {f"{one.__name__}.{name}": value for one in modules for name, value in vars(one).items() if isinstance(value, kind)}


FACTS = defined("facts", FactQuery)


@pytest.mark.parametrize("place", FACTS)
def test_a_fact_says_the_type_of_its_answer(place):
    """The type is used to decode the answers in a facts file (provision plan --pretend)."""
    assert get_type_hints(FACTS[place].parse)["return"] is not None


def test_the_names_of_facts_are_not_used_twice():
    names = [fact.name for fact in {id(fact): fact for fact in FACTS.values()}.values()]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", registry.list_plugin_names("provision.facts"))
def test_the_parser_of_a_fact_is_tested(name):
    used = re.compile(rf"from provision\.facts(\.{name} import| import [^\n]*\b{name}\b)")
    assert any(used.search(path.read_text()) for path in TESTS.rglob("test_*.py"))


def test_every_operation_has_its_place_in_the_order():
    """The list order.OPERATIONS has every operation exactly once."""
    assert {id(one) for one in defined("operations", Operation).values()} == {id(one) for one in order.ALL_OPERATIONS}
    names = [operation.name for operation in order.ALL_OPERATIONS]
    assert sorted(names) == sorted(set(names))


def test_every_check_has_its_place_in_the_order():
    stages = [stage for name in ("ssh", "slurm", "cloudlab") for stage in order.select_checks(provider.find_provider(name))]
    assert {id(one) for one in defined("checks", Check).values()} == {id(check) for stage in stages for check in stage}


@pytest.mark.parametrize("operation", order.ALL_OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_names_each_file_of_etc_that_it_writes(operation):
    """`provision` looks only at files that an operation names. It would write any other file again at each run."""
    one = site(gpus=Gpus(per_node=0), shared="/mydata")
    for target in one.targets:
        target.facts.answers[USERS.name] = Users("alice", {})
        try:
            planned = operation.plan(one, target)
        except (Unanswered, AttributeError):  # the operation needs facts that this test does not provide
            continue
        for change in () if isinstance(planned, Nothing) else planned:
            if isinstance(change, Write) and change.path.startswith("/etc/"):
                assert change.path in operation.written_paths


def test_no_two_folders_import_each_other():
    imports = {}
    for path in PACKAGE.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("provision."):
                imports.setdefault(path.parent.name, set()).add(node.module.split(".")[1])
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}

    def reached(folder, seen):
        for other in (imports.get(folder, set()) & folders) - {folder} - seen:
            seen |= {other} | reached(other, seen | {other})
        return seen

    assert [folder for folder in folders if folder in reached(folder, set())] == []
