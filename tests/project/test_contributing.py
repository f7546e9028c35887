"""The worked examples of docs/contributing are followed in a copy of the repository: their changes, tests and commands."""

import subprocess
import sys
from pathlib import Path

import pytest
from support_contributing import BLOCK, PAGES, ROOT, applied, change, copied, run, shown, text_of
from support_long import LONG

RUFF = str(Path(sys.executable).parent / "ruff")


def files_of(name, ending):
    return [path for kind, path, _ in BLOCK.findall(text_of(name)) if path.endswith(ending)]


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy of the repository with the changes of all pages."""
    folder = copied(tmp_path_factory.mktemp("contributing"))
    for name in PAGES:
        change(name, folder)
    return folder


def test_the_tests_of_all_examples_pass_together(changed):
    tests = [path for name in PAGES for path in files_of(name, ".py") if path.startswith("tests/")]
    assert len(tests) >= 6
    run(["python", "-m", "pytest", "-q", *tests, "tests/shardlab/matrix/test_metric_names.py"], changed)


def test_the_examples_keep_the_rules_of_ruff(changed):
    paths = sorted({path for name in PAGES for path in files_of(name, ".py")})
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run([RUFF, *words, *paths], cwd=changed, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


# The commands of the pages `provider` and `study` need no torch. Those of the other pages run only in the long form.
@pytest.mark.parametrize("name", PAGES if LONG else ["provider", "study"])
def test_the_commands_of_each_page_print_the_output_on_the_page(name, tmp_path):
    folder = copied(tmp_path)
    change(name, folder)
    printed = "".join(
        run(line, folder) for kind, _, text in BLOCK.findall(text_of(name)) if kind == "sh" for line in text.splitlines()
    )
    assert [line for line in shown(name) if line not in printed] == []


def test_every_kind_of_addition_has_a_page():
    """CONTRIBUTING.md links each page, and some page names each folder to which contributors add files."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in PAGES if f"docs/contributing/{name}.md" not in contributing] == []
    folders = [
        "trainers/strategies", "trainers/engines", "trainers/workloads", "trainers/tasks", "trainers/data",
        "trainers/instruments", "provision/facts", "provision/operations", "provision/checks", "provision/providers",
        "collect/metrics", "collect/figures", "collect/traces", "collect/exports", "jobs/launchers", "jobs/schedulers",
        "jobs/verbs", "provision/verbs", "matrices",
    ]  # fmt: skip
    pages = "".join(text_of(name) for name in PAGES)
    assert [folder for folder in folders if f"`{folder}/" not in pages] == []


def test_a_diff_that_no_longer_fits_is_named():
    assert applied("a\nb\n", " a\n-b\n+c\n", "x") == "a\nc\n"
    for content in ("a\n", "a\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="x has this text"):
            applied(content, " a\n-b\n+c\n", "x")
