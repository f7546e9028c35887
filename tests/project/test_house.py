"""Rules of this project: the wheel has all files, commands start without large imports, no file is too long, and only
shardlab/files/files.py opens files that another person may have written."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support_e2e import HANG_S

ROOT = Path(__file__).parents[2]
ROOMS = ("shardlab", "templates", "provision", "jobs", "trainers", "collect")
HEAVY = ("torch", "transformers", "deepspeed", "numpy", "polars", "plotly", "submitit", "fabric", "paramiko")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

OPENS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}  # names of functions and methods
# An open of this text is safe by itself: a new file, a folder, no link, a descriptor, the kernel's files, files of our package.
SAFE = re.compile(r"'x[bt]?'|O_EXCL|O_DIRECTORY|O_NOFOLLOW|closefd=False|os\.devnull|'/(?:proc|etc)/|resources\.files\(")
# Other opens outside of shardlab/files/files.py, by file or folder, with the reason why they are safe.
OPENED = {
    "collect/archiving/command.py": "writes members of a zip file",
    "shardlab/transfer/arrival.py": "adds O_NOFOLLOW to its flags",
    "collect/sampler/": "files of the kernel",
    "collect/traces/run_traces.py": "our own source",
    "shardlab/plugins/plugin_process.py": "in a new folder of mode 0700",
    "jobs/plugins/send_folder.py": "reads members of an archive in memory",
    "shardlab/plugins/command_copies.py": "writes members of an archive in memory",
    "jobs/planning/rehearsals.py": "in a new folder of mode 0700",
    "jobs/submission/preflight.py": "in a new folder of mode 0700",
    "provision/checks/_prove_node.py": "in a new folder of mode 0700",
    "provision/datasets/": "data sets may be behind links; their sizes and digests are checked",
    "provision/practice/": "in root's folder of mode 0700",
    "provision/site/wheels.py": "files that pip has just written",
    "provision/software.py": "our own source",
    "shardlab/workspace/archive.py": "reads members of a zip file",
    "shardlab/steps.py": "a user's script imports it, so it has nothing of shardlab",
    "shardlab/hardware/host.py": "files of the kernel, found by their folders",
    "shardlab/json_schema.py": "writes files of our own source",
    "shardlab/remote/remote.py": "opens a connection",
    "shardlab/files/image_files.py": "data sets may be behind links",
    "shardlab/files/source_digest.py": "our own source",
    "templates/__init__.py": "imports nothing of ours; it reads templates only if is_file() is true, as jinja2 does",
    "trainers/data/": "data sets may be behind links",
    "trainers/forking/address.py": "our own source",
    "trainers/proof/proof.py": "our own source",
    "trainers/rehearsal/rehearse.py": "in a new folder of mode 0700",
}


def test_the_wheel_has_all_files_of_our_packages_and_no_other(tmp_path):
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*ROOMS, "matrices"}
    tracked = {str(path.relative_to(ROOT)) for path in SOURCES} | {
        str(path.relative_to(ROOT))
        for pattern in ("matrices/*.yaml", "templates/**/*.j2", "shardlab/schemas/*.json", "provision/datasets/*.txt")
        for path in ROOT.glob(pattern)
    }
    assert tracked <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".orig"))]


@pytest.mark.parametrize("command", ["shardlab", "provision", "jobs", "collect"])
def test_the_help_of_a_command_imports_no_large_library(command):
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


def test_each_source_file_has_a_docstring():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
    assert len(texts) > 500
    assert [name for name, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []


def test_no_page_has_a_conflict_marker_of_git():
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert len(texts) > 20
    assert not [
        path for path in texts if any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in path.read_text().splitlines())
    ]


def opens(text):
    """The calls in Python code that open, read or write a file by its path, without those that are safe by themselves."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [node for node in calls if getattr(node.func, "attr", getattr(node.func, "id", "")) in OPENS]
    return [shown for node in named if not SAFE.search(shown := ast.unparse(node))]


def test_only_shardlab_files_opens_files_that_another_person_may_have_written():
    where = {str(path.relative_to(ROOT)): opens(path.read_text()) for path in SOURCES}
    assert where.pop("shardlab/files/files.py") != []
    allowed = {name: prefix for name in where for prefix in OPENED if name.startswith(prefix)}
    assert {name: calls for name, calls in where.items() if calls and name not in allowed} == {}, "use shardlab.files.files"
    assert {prefix for name, prefix in allowed.items() if where[name]} == set(OPENED), "an exception is not needed any more"
    assert opens("gzip.open(p)\nopen(p)\np.open('ab')\nos.open(p, os.O_RDONLY)\np.open('xb')") == [
        "gzip.open(p)", "open(p)", "p.open('ab')", "os.open(p, os.O_RDONLY)",
    ]  # fmt: skip


def short_limits(text):
    """The calls in Python code that wait for something for a fixed number of seconds, without the lines that say why."""
    waits = {"run", "communicate", "wait", "get", "join", "Barrier", "create_connection", "HTTPConnection", "wait_procs"}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [node for node in calls if getattr(node.func, "attr", getattr(node.func, "id", "")) in waits]
    limits = [word.value for node in named for word in node.keywords if word.arg in ("timeout", "timeout_s")]
    short = [limit for limit in limits if isinstance(limit, ast.Constant) and limit.value < HANG_S]
    lines = [text.splitlines()[limit.lineno - 1] for limit in short]
    return [line for line in lines if "meant to be reached" not in line]


def test_tests_wait_with_the_common_limit_which_no_loaded_machine_reaches():
    limits = {path.name: short_limits(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert {name: lines for name, lines in limits.items() if lines} == {}, "use support_e2e.HANG_S"
    assert short_limits("run(timeout=HANG_S)\nnode.run([], timeout_s=5)  # meant to be reached\np.wait(timeout=5)") == [
        "p.wait(timeout=5)"
    ]


def own_nodes(function):
    """The nodes of a function's syntax tree without those of functions that are defined in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def test_names_of_tests_have_a_subject_and_no_test_returns_early():
    """The rule for names is in CONTRIBUTING.md. A test that returns early reads as passed although it asserted less."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    assert len(tests) > 2000
    assert not [test.name for test in tests if len(test.name) > 80 or test.name.startswith(("test_what_", "test_it_"))]
    assert not [test.name for test in tests if any(isinstance(node, ast.Return) for node in own_nodes(test))]
