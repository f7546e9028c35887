"""Every table that a command prints or a page shows is held by a test with known numbers, or has no numbers. A new table must
be added here."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("shardlab", "provision", "jobs", "collect")
TRACE, OF_COLLECT, OF_JOBS = "test_table_numbers_trace", "test_table_numbers_collect", "test_table_numbers_jobs"
WORDS = "only words"
# The function that prints a table: the test file that compares its cells with known numbers, or why no test needs to.
HELD = {
    "collect/traces/answer_tables.py print_answer_tables": TRACE,
    "collect/traces/command.py show_traces": TRACE,
    "collect/traces/command.py _print_breakdowns": TRACE,
    "collect/traces/command.py _print_kernels": TRACE,
    "collect/traces/command.py _print_report": TRACE,
    "collect/comparison/command.py _print_pairs": OF_COLLECT,
    "collect/comparison/command.py print_comparison": WORDS,
    "collect/explain/command.py _print_explanation": OF_COLLECT,
    "collect/explain/command.py print_metrics": WORDS,
    "collect/fetching/fetch_command.py fetch_and_print": OF_COLLECT,
    "collect/history/command.py _print_history": OF_COLLECT,
    "collect/report/answer.py print_answer": OF_COLLECT,
    "collect/report/terminal.py print_summary": OF_COLLECT,
    "collect/report/terminal.py _show_further": OF_COLLECT,
    "collect/importing/import_command.py _show_log_table": "test_import",
    "collect/importing/snapshot_report.py show_snapshot": "test_plain_pickle",
    "collect/report/terminal.py print_choices": "test_choices",
    "collect/report/terminal.py print_claims": WORDS,
    "collect/report/terminal.py print_verdicts": OF_COLLECT,
    "collect/timeline/command.py show_timeline": OF_COLLECT,
    "jobs/verbs/menus.py StrategiesVerb.run": WORDS,
    "jobs/verbs/menus.py WorkloadsVerb.run": OF_JOBS,
    "jobs/verbs/menus.py LaunchersVerb.run": WORDS,
    "jobs/verbs/menus.py MatricesVerb.run": "test_menus",
    "jobs/verbs/menus.py _print_options": "test_menus",
    "jobs/planner/planner_table.py print_scale_out": OF_JOBS,
    "jobs/planner/advice_text.py print_advice": OF_JOBS,
    "jobs/verbs/views.py _print_cells": OF_JOBS,
    "jobs/verbs/views.py _print_predictions": OF_JOBS,
    "jobs/verbs/views.py print_status": OF_JOBS,
    "provision/verbs/machines.py HardwareVerb.run": OF_JOBS,
    "provision/command/display.py show_machines": OF_JOBS,
    "provision/command/display.py show_operations": WORDS,
    "provision/command/display.py show_checks": WORDS,
}


PAGE = "test_table_numbers_page"
# The template of tables of a page: the number of its tables, and the test file that holds their numbers.
HELD_TEMPLATES = {"report/table.html.j2": (1, PAGE), "watch/queue.html.j2": (1, "test_watch")}


def printed_tables():
    """The functions of the program that print a table: `FILE FUNCTION`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if ".print_table(" not in text and ".show_table(" not in text:
                continue
            for name, function in functions_of(ast.parse(text)):
                if any(map(is_table, ast.walk(function))):
                    yield f"{path.relative_to(ROOT)} {name}"


def functions_of(tree, prefix=""):
    """The functions of a module and the methods of its classes, with their names."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def is_table(node):
    """Whether a node of the syntax tree is a call of `show_table` or `print_table` of an output."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("show_table", "print_table")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("output", "out")
    )


def test_every_printed_table_is_held_by_a_test_with_known_numbers():
    assert sorted(printed_tables()) == sorted(HELD)


def test_every_table_of_a_page_is_held_by_a_test_with_known_numbers():
    templates = {path: path.read_text().count("<table") for path in (ROOT / "templates").rglob("*.html.j2")}
    tables = {path.relative_to(ROOT / "templates").as_posix(): count for path, count in templates.items() if count}
    assert tables == {name: count for name, (count, _) in HELD_TEMPLATES.items()}


def test_every_file_that_holds_a_table_exists():
    missing = {
        file
        for file in {*HELD.values(), *(file for _, file in HELD_TEMPLATES.values())}
        if file != WORDS and not list((ROOT / "tests").rglob(f"{file}.py"))
    }
    assert not missing
