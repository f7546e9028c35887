"""Follows the section of README.md about an own comparison in bash, as it is printed, in a copy of the checkout."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_contributing import ROOT, copied
from support_e2e import HANG_S, logs, processes_of
from support_long import LONG

pytestmark = pytest.mark.e2e
# The short form of this test runs one of the 18 runs. All other lines are those of README.md.
SHORT = " --where \"strategy == 'ddp'\" --repeats 1"


def own_comparison() -> str:
    """The commands below the heading `Your own comparison`; the matrix between them is written to its file."""
    section = (ROOT / "README.md").read_text().partition("## Your own comparison\n")[2].partition("\n## ")[0]
    before, matrix, after = re.split(r"^```(?:yaml)?\n", section, flags=re.MULTILINE)
    first, then = ("\n".join(re.findall(r"^ {4}(.*)", text, re.MULTILINE)) for text in (before, after))
    return f"{first}\ncat > mine.yaml <<'END'\n{matrix}END\n{then}\n"


def files_in(folder: Path) -> set[Path]:
    """The files below a folder, without the environment and Python's bytecode."""
    return {path for path in folder.rglob("*") if path.is_file() and not {".venv", "__pycache__"}.intersection(path.parts)}


def test_the_commands_of_the_readme_end_with_a_report(tmp_path):
    (tmp_path / "checkout").mkdir()
    checkout, mine = copied(tmp_path / "checkout"), tmp_path / "mine"
    (checkout / ".venv").symlink_to(sys.prefix)
    before = files_in(checkout)
    block = own_comparison()
    submit = re.search(r"jobs submit --matrix ./mine.yaml --wait", block)[0]
    script = "set -euo pipefail\n" + (block if LONG else block.replace(submit, submit + SHORT)) + "collect archive\n"
    environment = {name: value for name, value in os.environ.items() if name != "SHARDLAB_WORKSPACE"}
    environment["PYTHONPATH"] = str(checkout)  # the commands are those of the copy
    options = {"cwd": checkout, "env": environment, "capture_output": True, "text": True, "timeout": HANG_S}
    try:
        done = subprocess.run(["bash", "-c", script], check=False, **options)
    finally:
        for process in processes_of(tmp_path):
            process.kill()
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}\n{logs(mine)}"
    summary = json.loads((mine / "report" / "summary.json").read_text())
    completed = [row["states"].get("completed", 0) for row in summary["rows"]]
    assert (len(completed), sum(completed)) == (3, 18 if LONG else 1)
    assert "verified: ready to train" in done.stdout
    assert f"report: {mine}/report/index.html" in done.stdout
    assert f"archive: {mine}/mine.shardlab.zip" in done.stdout  # nothing in it was taken for a secret
    assert "own template" not in done.stderr
    assert files_in(checkout) == before
