"""Rules of this project: the wheel has all files, commands start without large imports, and no file is too long."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("shardlab", "templates", "provision", "jobs", "trainers", "collect")
HEAVY = ("torch", "transformers", "deepspeed", "numpy", "polars", "plotly", "submitit", "fabric", "paramiko")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def test_the_wheel_holds_exactly_what_is_meant(tmp_path):
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*ROOMS, "matrices"}
    tracked = {str(path.relative_to(ROOT)) for path in SOURCES} | {
        str(path.relative_to(ROOT))
        for pattern in ("matrices/*.yaml", "templates/**/*.j2", "shardlab/schemas/*.json")
        for path in ROOT.glob(pattern)
    }
    assert tracked <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".orig"))]


@pytest.mark.parametrize("command", ["shardlab", "provision", "jobs", "collect"])
def test_help_starts_light(command):
    code = f"import sys; from {command}.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


def test_planning_and_rendering_need_no_torch(tmp_path):
    code = (
        "import sys; from jobs.cli import main\n"
        f"assert main(['render', '--matrix', 'quickstart', '--workspace', {str(tmp_path)!r}]) == 0\n"
        f"assert main(['strategies', '--json']) == 0 and main(['workloads']) == 0\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(list((tmp_path / "runs").glob("*/job.sh"))) > 20
    assert not set(HEAVY) & set(done.stdout.split("MODULES")[1].split())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_idea_and_says_which(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    assert ast.get_docstring(ast.parse(text)), "the module's docstring is one sentence of why it is there"


def test_no_text_is_left_half_merged():
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert len(texts) > 20
    assert not [
        path for path in texts if any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in path.read_text().splitlines())
    ]
