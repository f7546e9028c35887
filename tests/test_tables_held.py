"""Every table that a command prints is held by a test with known numbers, or has no numbers. A new table must be added here."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("shardlab", "provision", "jobs", "collect")
TRACE, OF_COLLECT, OF_JOBS = "test_table_numbers_trace", "test_table_numbers_collect", "test_table_numbers_jobs"
WORDS = "only words"
# The function that prints a table: the test file that compares its cells with known numbers, or why no test needs to.
HELD = {
    "collect/traces/answer_tables.py why": TRACE,
    "collect/traces/answer_tables.py _collectives": TRACE,
    "collect/traces/answer_tables.py _waits": TRACE,
    "collect/traces/answer_tables.py _idle": TRACE,
    "collect/traces/answer_tables.py _phases": TRACE,
    "collect/traces/command.py _tables": TRACE,
    "collect/traces/command.py _tallies": TRACE,
    "collect/traces/command.py _operators": TRACE,
    "collect/traces/detail_tables.py _layers": TRACE,
    "collect/traces/detail_tables.py _memory": TRACE,
    "collect/traces/detail_tables.py _products": TRACE,
    "collect/traces/detail_tables.py _attention": TRACE,
    "collect/comparison/command.py _pairs": OF_COLLECT,
    "collect/comparison/command.py _show": WORDS,
    "collect/explain/command.py _show": OF_COLLECT,
    "collect/explain/command.py list_metrics": WORDS,
    "collect/fetching/fetch_command.py show": OF_COLLECT,
    "collect/history/command.py _show": OF_COLLECT,
    "collect/report/terminal.py show": OF_COLLECT,
    "collect/report/terminal.py _table": OF_COLLECT,
    "collect/report/terminal.py choices": "test_collect_choices",
    "collect/report/terminal.py claims": WORDS,
    "collect/report/terminal.py verdicts": OF_COLLECT,
    "collect/timeline/command.py show": OF_COLLECT,
    "jobs/menus.py strategies": WORDS,
    "jobs/menus.py workloads": OF_JOBS,
    "jobs/menus.py launchers": WORDS,
    "jobs/menus.py matrices": "test_jobs_menus",
    "jobs/menus.py _options": "test_jobs_menus",
    "jobs/planner/planner_table.py scale_out": OF_JOBS,
    "jobs/planner/planner_table.py advice": OF_JOBS,
    "jobs/views.py plan": OF_JOBS,
    "jobs/views.py _predictions": OF_JOBS,
    "jobs/views.py status": OF_JOBS,
    "provision/cli.py _hardware": OF_JOBS,
    "provision/display.py machines": OF_JOBS,
    "provision/display.py operations": WORDS,
    "provision/display.py checks": WORDS,
}


def printed_tables():
    """The functions of the program that print a table: `FILE FUNCTION`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if ".table(" not in text:
                continue
            for function in ast.walk(ast.parse(text)):
                calls = ast.walk(function) if isinstance(function, ast.FunctionDef) else ()
                if any(is_table(call) for call in calls):
                    yield f"{path.relative_to(ROOT)} {function.name}"


def is_table(node):
    """Whether a node of the syntax tree is the call `output.table(title, columns, rows)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "table"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("output", "out")
    )


def test_every_printed_table_is_held_by_a_test_with_known_numbers():
    assert sorted(printed_tables()) == sorted(HELD)


def test_every_file_that_holds_a_table_exists():
    missing = {file for file in HELD.values() if file != WORDS and not (ROOT / "tests" / f"{file}.py").exists()}
    assert not missing
