"""The facts that operations, checks, facts, providers and data sets of provision state, and their order.

Golden file: golden/facts/provision.txt.
"""

import importlib
import pkgutil

import support_facts
from support_golden import same_as_golden

import provision.facts
from provision import order
from provision.datasets.formats import FORMATS
from provision.fact import FactQuery
from provision.provider import NOTHING_TO_DO, find_provider
from shardlab import registry

FUNCTIONS = ("request", "profile", "warm", "down", "present", "obtain", "extend", "confirmation")


def describe_order():
    for operation in order.ALL_OPERATIONS:
        yield from support_facts.describe(f"operation {operation.name}", operation, left_out=("name",))
    yield f"files of operations: {support_facts.format_fact(order.list_operation_files())}"
    yield f"only if named: {support_facts.format_fact(order.ONLY_NAMED)}"
    yield f"facts: {', '.join(fact.name for fact in order.ALL_FACTS)}"


def describe_providers():
    for name in registry.list_plugin_names("provision.providers"):
        plugin = find_provider(name)
        yield from support_facts.describe(f"provider {name}", plugin, left_out=("name",))
        yield f"  has: {', '.join(key for key in FUNCTIONS if getattr(plugin, key) is not None)}"
        yield f"  operations in order: {', '.join(operation.name for operation in order.select_operations(plugin))}"
        for number, stage in enumerate(order.select_checks(plugin), 1):
            yield f"  checks, stage {number}: {', '.join(check.name + ' once' * check.once for check in stage)}"
    yield from (f"nothing to do for {verb}: {text}" for verb, text in NOTHING_TO_DO.items())


def describe_facts():
    for entry in pkgutil.iter_modules(provision.facts.__path__):
        if entry.name.startswith("_"):
            continue
        module = importlib.import_module(f"provision.facts.{entry.name}")
        found = {name: value for name, value in vars(module).items() if isinstance(value, FactQuery)}
        for name, fact in sorted(found.items()):
            yield from support_facts.describe(f"fact {entry.name}.{name}", fact)
            yield f"  command: {support_facts.format_fact(fact.command('/opt/python'))}"


def test_provision_states_the_golden_facts():
    lines = [*describe_order(), *describe_providers(), *describe_facts()]
    for name, data_set in FORMATS.items():
        lines += support_facts.describe(f"data set {name}", data_set)
    same_as_golden("facts/provision.txt", "\n".join(lines) + "\n")
