"""The locale, time zone, umask, temporary folder, user name, seed of Python's hashes and order of folders change no result of a
command. With any umask, no user may write to what commands make, except the owner and the group."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import support_collect as support
from support_trust import make_own

PLAIN = {"LC_ALL": "C.UTF-8", "TZ": "UTC", "USER": "root", "LOGNAME": "root", "PYTHONHASHSEED": "1"}
# No USER and no LOGNAME. The zone is 45 minutes beside UTC, so that a wrong time zone shows in minutes.
OTHER = {"LC_ALL": "C", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "2"}
# A module that Python imports when it starts, before pathlib: folders are listed from the last name to the first.
REVERSE = f"""import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import os, support_folder_order
support_folder_order.reverse(type("Patches", (), {{"setattr": staticmethod(setattr)}}))
"""
COMMANDS = {
    "status": "jobs status",
    "summarize": "collect summarize",
    "csv": "collect export --to csv --out exported",
    "archive": "collect archive --anonymous --out a.shardlab.zip",
    "history": "collect history",
    "matrices": "jobs matrices",
    "plan": "jobs plan --matrix quickstart",
    "render": "jobs render --matrix quickstart",
}
# Keys whose values differ each time: times, sizes, and in an archive the number of replaced names, such as that of the user.
VARY = {"created_s", "created", "bytes", "sha256", "wall_s", "replaced"}


def outputs(folder: Path, umask: int, **variables: str) -> dict[str, object]:
    """Run the COMMANDS in a new workspace. Returns what they print and write, without times and without the path of the folder.

    umask: the umask of the commands. variables: added to their environment.
    """
    made = make_own(support.matrix(folder / "ws").path)
    environment = {name: value for name, value in os.environ.items() if name not in {*PLAIN, "SUDO_USER"}} | variables
    results: dict[str, object] = {}
    for name, line in COMMANDS.items():
        program, *words = line.split()
        done = subprocess.run(
            [sys.executable, "-P", "-m", program, *words, "--json"],
            cwd=made.path, env=environment, umask=umask, capture_output=True, text=True, encoding="utf-8", check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}"
        results[name] = without_times(json.loads(done.stdout.replace(str(folder), "FOLDER")))
    results["report"] = without_times(json.loads((made.report / "summary.json").read_text().replace(str(folder), "FOLDER")))
    results["exported"] = {path.name: path.read_text() for path in sorted((made.path / "exported").rglob("*.csv"))}
    scripts = {path.parent.name: path.read_text().replace(str(folder), "FOLDER") for path in made.runs.rglob("job.sh")}
    results["scripts"] = {run: re.sub(r"rendered \S+00:00 ", "", script) for run, script in scripts.items()}
    with zipfile.ZipFile(made.path / "a.shardlab.zip") as zipped:
        results["members"] = zipped.namelist()
    return results


def without_times(value: object) -> object:
    """A JSON value without the keys VARY."""
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in VARY}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def test_the_surroundings_change_no_result(tmp_path):
    odd = tmp_path / "a b"
    odd.mkdir()
    (tmp_path / "link").symlink_to(odd)
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.mkdir()
    other.mkdir()
    expected = outputs(plain, 0o022, **PLAIN)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(REVERSE)
    changed = OTHER | {"PYTHONPATH": str(tmp_path / "start"), "HOME": "/proc/nothing", "TMPDIR": str(tmp_path / "link")}
    found = outputs(other, 0o077, **changed)
    for name, value in expected.items():
        assert found[name] == value, name


def test_nothing_is_writable_by_everybody_whatever_the_umask(tmp_path):
    """The umask decides about the group, with whose members a user may share a workspace."""
    tmp_path.chmod(0o755)
    made = make_own(support.matrix(tmp_path / "ws").path)
    before = {path: path.lstat().st_mode for path in (made.path, *made.path.rglob("*"))}
    outputs = []
    writing = [line for name, line in COMMANDS.items() if name not in ("history", "matrices")]
    for line in (*writing, "collect fetch", "collect open a.shardlab.zip --out opened"):
        program, *words = line.split()
        words = [sys.executable, "-P", "-m", program, *words]
        outputs.append(subprocess.run(words, cwd=made.path, umask=0, capture_output=True, text=True, check=False))
    assert [done.stderr for done in outputs if done.returncode] == []
    new = [path for path in made.path.rglob("*") if before.get(path) != path.lstat().st_mode]
    assert {path.relative_to(made.path).parts[0] for path in new} >= {".shardlab", "runs", "report", "exported", "opened"}
    assert [path for path in new if path.lstat().st_mode & 0o002] == []
    assert (made.path / "exported").stat().st_mode & 0o777 == 0o775
