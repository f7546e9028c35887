"""shardlab never reads a pickle, because reading a pickle can execute code that its writer put into it. The only files that
name the module `pickle` only write: our launcher for submitit, and the export for PyTorch's page memory_viz. The pickles of
torch's allocator are read by collect/sources/plain_pickle.py, which cannot execute anything."""

import ast
import pickle
from pathlib import Path

import support_collect as support

from collect.cli import main
from jobs.launchers import submitit
from shardlab.runs.run import make_run_id
from tests.project.test_house import ROOT, SOURCES

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
READ_PICKLES = {
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("pd", "read_pickle"),
    ("pickle", "load"),
    ("pickle", "loads"),
}
WRITERS = {ROOT / "jobs/launchers/submitit.py", ROOT / "collect/exports/memory_viz.py"}


def readers_of_pickles(path: Path) -> set[str]:
    """Returns the names in a source file that give access to a pickle: imported modules and called functions."""
    tree = ast.parse(path.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    calls = {f"{node.value.id}.{node.attr}" for node in attributes}
    return {name for name in names if name.split(".")[0] in PICKLES} | (calls & READ_PICKLES)


def test_no_file_of_ours_reads_a_pickle():
    found = {path: readers for path in SOURCES if (readers := readers_of_pickles(path))}
    assert found == {path: {"pickle"} for path in WRITERS}  # they import `pickle` only to write one


class Canary:
    """An object that makes a file when its pickle is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_report_of_runs_that_hold_pickles_reads_none(tmp_path):
    workspace, canary = support.matrix(tmp_path / "w"), tmp_path / "was read"
    content = pickle.dumps(Canary(canary))
    run = workspace.find_run_dir(make_run_id(support.cell(), 1))
    for name in (submitit.SUBMITIT_FOLDER, "trace", "memory", "steps", "log", "env"):
        folder = run.path / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("1_submitted.pkl", "1_0_result.pkl", "snapshot.pickle", "checkpoint.pt"):
            (folder / file).write_bytes(content)
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    assert not canary.exists()
    pickle.loads(content)
    assert canary.exists()  # shows that the canary works: reading its pickle makes the file
