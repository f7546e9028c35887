"""provision as a person runs it on this machine: it converges, verifies, and reports each problem in one sentence."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest
from support_e2e import HANG_S, until
from support_trust import make_own

from provision.check import Outcome
from provision.cli import main
from provision.fact import FactAnswers
from provision.nodes.local_node import LocalNode
from provision.operation import LocalCall, Operation, Site, Target
from provision.plan import converge_site
from provision.verify import Finding, is_verified
from shardlab import extras

ROOT = Path(__file__).parents[3]
LOCAL = str(ROOT / "examples/local.yaml")
LOCKED = {
    ".",
    ".shardlab",
    ".shardlab/provision.lock",
    f".shardlab/trusted.{os.geteuid()}.json",
}  # files that remain after a command that changed nothing


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "a 'b' \"c\" $d; e"
    folder.mkdir()
    return folder


def provision(*words, env=None, cwd=None):
    command = [sys.executable, "-P", "-m", "provision", *map(str, words)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=HANG_S)


def exit_code(words):
    """The exit code of `provision`; argparse ends the process for wrong words."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


def stamps(folder):
    """Returns the names, contents and modification times of all files below a folder. Of the lock file, only the name: its
    content is the last holder."""
    return {
        str(path.relative_to(folder)): None
        if path.name == "provision.lock"
        else (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def test_apply_makes_the_changes_and_a_second_apply_finds_none(workspace):
    done = provision(LOCAL, "--json", "--workspace", workspace)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    assert (first["changes"], first["verified"]) == (1, True)
    (node,) = first["nodes"]
    assert {"name", "host", "port", "user", "addresses", "facts", "operations"} <= set(node)
    assert node["facts"]["host"]["cpus"] == os.cpu_count()
    assert [(operation["name"], operation["state"]) for operation in node["operations"]] == [
        ("datasets", "nothing to do"),
        ("inventory", "changed"),
    ]
    checks = {check["check"]: check for check in first["checks"]}
    assert list(checks) == ["torch", "gpus", "all_reduce", "compile"]
    measured = checks["all_reduce"]["measured"]
    expected = 2 * (2 - 1) / 2 * measured["bytes"] / measured["time_s"] / 1e9
    assert measured["bus_bandwidth_gb_per_s"] == pytest.approx(expected)
    before = stamps(workspace)
    assert set(before) == LOCKED | {".shardlab/inventory.json"}
    inventory = msgspec.json.decode(before[".shardlab/inventory.json"][1])
    assert (inventory["cluster"], inventory["provider"]) == ("this-machine", "local")
    (kept,) = inventory["all_reduces"]
    assert (kept["nodes"], kept["ranks"], kept["backend"]) == ([node["name"]], 2, measured["backend"])
    assert [one["bytes"] for one in kept["times"]][-1] == measured["bytes"]
    assert kept["times"][-1]["bus_bandwidth_gb_per_s"] == pytest.approx(expected)
    assert all(one["fastest_s"] <= one["seconds"] <= one["slowest_s"] for one in kept["times"])

    left = set(Path(tempfile.gettempdir()).iterdir())
    done = provision(LOCAL, "--workspace", workspace)
    assert done.returncode == 0
    assert "nothing to do" in done.stdout
    assert "changes: 0" in done.stdout
    assert "verified: ready to train" in done.stdout
    assert stamps(workspace) == before
    assert not [path for path in Path(tempfile.gettempdir()).glob("torchelastic*") if path not in left]


@pytest.mark.parametrize("words", [["plan"], ["--check"], ["--check", "plan"]])
def test_plan_twice_changes_nothing(workspace, words, capsys):
    before = stamps(workspace)
    for _ in range(2):
        assert main([LOCAL, *words, "--json", "--workspace", str(workspace)]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["changes"], said["verified"]) == (1, None)
        _, step = said["nodes"][0]["operations"]
        assert step["state"] == "would change"
        assert "inventory.json" in step["says"][0]
    assert stamps(workspace) == before


def test_a_damaged_inventory_is_rewritten(workspace, capsys):
    make_own(workspace)
    (workspace / ".shardlab" / "inventory.json").write_text("{half")
    assert main([LOCAL, "plan", "--workspace", str(workspace)]) == 0
    assert "rewrite" in capsys.readouterr().out


def test_operations_that_skip_or_only_excludes_are_marked_as_skipped(workspace, capsys):
    """Operations that --skip or --only excludes have the state `skipped` in the JSON document."""
    for words in (["--skip", "inventory"], ["--only", "datasets"]):
        assert main([LOCAL, "plan", *words, "--json", "--workspace", str(workspace)]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["changes"] == 0
        assert said["nodes"][0]["operations"][-1]["state"] == "skipped"
    assert main(["--json", LOCAL, "--limit", "localhost", "plan", "--workspace", str(workspace)]) == 0


def test_an_empty_list_of_operations_is_refused(workspace, capsys):
    """An empty value, for example of an unset variable of the shell, would leave out all operations without a word."""
    with pytest.raises(SystemExit, match="2"):
        main([LOCAL, "plan", "--only", "", "--workspace", str(workspace)])
    assert "--only: found ''. Allowed: one or more names, separated by commas or spaces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["paln"], "unknown verb 'paln'. Did you mean 'plan'?"),
        (["--check", "apply"], "--check belongs to the verb plan and cannot be combined with the verb 'apply'"),
        (["--limit", "gpu7"], "unknown node 'gpu7'. Allowed: localhost."),
        (["--only", "inventroy"], "Did you mean 'inventory'? Allowed: datasets, inventory."),
        (["--skip", "x,inventory"], "unknown operation 'x'"),
        (["request"], "provider local has nothing to request"),
    ],
)
def test_wrong_words_write_nothing(workspace, words, says, capsys):
    before = stamps(workspace)
    assert exit_code([LOCAL, *words, "--workspace", str(workspace)]) == 2
    assert says in capsys.readouterr().err
    assert stamps(workspace) == before


@pytest.mark.parametrize(
    "text",
    [
        "schema: 1\nname: x\n",
        "schema: 1\nname: x\nprovider: cloud\n",
        "a: [",
        "",
        "schema: 1\nname: x\nprovider: local\nnode: 1\n",
    ],
)
def test_a_wrong_file_writes_nothing(workspace, tmp_path, text, capsys):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    before = stamps(workspace)
    assert main([str(file), "--workspace", str(workspace)]) == 2
    assert f"{file}:" in capsys.readouterr().err
    assert stamps(workspace) == before


def test_the_verb_before_the_file_is_turned_round(capsys):
    """If the verb stands before the file, the error shows the command with both in the right order."""
    assert exit_code(["plan", LOCAL]) == 2
    assert f"provision {LOCAL} plan" in capsys.readouterr().err
    assert exit_code(["plan", "down"]) == 2
    assert "found two verbs, plan and down. Allowed: one; write a cluster file plan as ./plan." in capsys.readouterr().err


def test_provision_without_a_file_uses_the_workspaces_cluster_file(workspace, capsys):
    own = workspace / "cluster.yaml"
    own.write_bytes(Path(LOCAL).read_bytes())
    for words in (["plan"], ["--check"], ["--json", "plan"]):
        assert main([*words, "--workspace", str(workspace)]) == 0
        assert "this-machine" in capsys.readouterr().out or "--json" not in words
    own.write_text(own.read_text().replace("this-machine", "another"))
    assert main(["plan", "--json", "--workspace", str(workspace)]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == "another"
    own.write_text("schema: 2\n")
    assert main(["--workspace", str(workspace)]) == 2
    assert f"{own}:1" in capsys.readouterr().err


def test_provision_without_any_file_names_the_expected_file(workspace, capsys):
    for words in ([], ["plan"], ["down"]):
        before = stamps(workspace)
        assert main([*words, "--workspace", str(workspace)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"error: {workspace / 'cluster.yaml'}: no such file, and the command names no other cluster file"
        )
        assert "provision init > cluster.yaml" in said
        assert said.count("\n") == 1
        assert stamps(workspace) == before
    (workspace / "cluster.yaml").symlink_to("nowhere")
    assert main(["plan", "--workspace", str(workspace)]) == 2
    assert "is a symlink to a file that does not exist" in capsys.readouterr().err


def test_a_first_word_that_is_a_verb_is_the_verb_and_a_path_is_a_file(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    (workspace / "down").write_text(Path(LOCAL).read_text().replace("this-machine", "named-down"))
    assert main(["down"]) == 2
    assert "cluster.yaml: no such file" in capsys.readouterr().err
    assert main(["./down", "plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == "named-down"
    assert exit_code(["paln"]) == 2
    assert "unknown cluster file or verb 'paln'. Did you mean 'plan'?" in capsys.readouterr().err


def test_down_says_that_there_is_nothing_to_undo(workspace, capsys):
    assert main([LOCAL, "down", "--workspace", str(workspace)]) == 0
    assert "created no machine" in capsys.readouterr().out


def test_a_workspace_that_cannot_be_written_is_one_sentence(workspace, capsys):
    (workspace / ".shardlab").write_text("in the way")
    assert main([LOCAL, "--workspace", str(workspace)]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: cannot ")


@pytest.mark.parametrize(("options", "says"), [("ro", "read-only"), ("size=4k", "the disk is full")])
def test_a_read_only_or_full_disk_is_one_sentence(tmp_path, options, says):
    inner = f'mount -t tmpfs -o {options} tmpfs "$1" && shift && {{ dd if=/dev/zero "of=$0/fill" 2> /dev/null; exec "$@"; }}'
    command = [sys.executable, "-P", "-m", "provision", LOCAL, "--workspace", tmp_path, "--json"]
    done = subprocess.run(["unshare", "-rm", "sh", "-c", inner, tmp_path, tmp_path, *command], capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine does not let a test mount a file system of its own")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_without_torch_verify_says_how_to_install_it(workspace, tmp_path):
    hidden = tmp_path / "hidden" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = provision(LOCAL, "verify", "--json", "--workspace", workspace, env={"PYTHONPATH": str(hidden.parent)})
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert (said["verified"], said["changes"]) == (False, 0)
    assert {check["check"]: check["passed"] for check in said["checks"]} == {
        "torch": False,
        "gpus": None,
        "all_reduce": None,
        "compile": None,
    }
    assert "No module named 'torch'" in said["checks"][0]["says"]
    assert extras.make_install_command("trainers") in done.stderr
    assert "Traceback" not in done.stderr
    assert stamps(workspace).keys() == LOCKED


def test_a_missing_interpreter_is_reported(workspace, monkeypatch, capsys):
    """The Python interpreter of the node does not exist: `provision` fails and names it."""
    monkeypatch.setattr("provision.providers.local.LocalNode", lambda: LocalNode(python="/nowhere/python"))
    assert main([LOCAL, "--json", "--workspace", str(workspace)]) == 1
    caught = capsys.readouterr()
    said = json.loads(caught.out)
    assert said["nodes"][0]["operations"][-1]["state"] == "failed"
    assert "/nowhere/python: No such file or directory" in said["nodes"][0]["unanswered"]["host"]
    assert said["verified"] is False
    assert main([LOCAL, "facts", "--workspace", str(workspace)]) == 1
    assert stamps(workspace).keys() == LOCKED


def test_provision_facts_prints_the_facts_of_the_machine(workspace, capsys):
    assert main([LOCAL, "facts", "--workspace", str(workspace)]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("CPU", "memory", "GPUs", "NICs", "Python", "torch"))
    assert stamps(workspace).keys() == {"."}


def test_a_dry_run_reports_the_changes_of_the_real_run(tmp_path):
    """A dry run and a real run report the same changes; only the real run makes them."""
    made = []
    operation = Operation("two", lambda site, target: [LocalCall(f"step {n}", lambda: made.append(1)) for n in (1, 2)])
    site = Site(None, None, [])
    target = Target(LocalNode(), FactAnswers(LocalNode()))
    (dry,) = converge_site(site, [operation], targets=[target], only_names={"two"}, is_dry_run=True)
    assert (dry.state, dry.changes, made) == ("would change", 2, [])
    (done,) = converge_site(site, [operation], targets=[target], only_names={"two"}, is_dry_run=False)
    assert (done.says, done.state, made) == (dry.says, "changed", [1, 1])


def test_verified_needs_a_passed_check_and_no_failed_check():
    """`is_verified` is true if at least one check passed and none failed, and None if there was no check."""

    def of(*outcomes):
        return is_verified([Finding("n", "c", Outcome(passed, "")) for passed in outcomes])

    assert (of(), of(True, None), of(True, False), of(None)) == (None, True, False, False)


def test_a_command_past_its_limit_ends_with_its_child_processes(tmp_path):
    pids = tmp_path / "pids"
    # Like torchrun: a child in a session of its own, and a parent that ignores SIGTERM.
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '2000'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('said', flush=True)\n"
        "time.sleep(2000)\n"
    )
    answer = LocalNode().run([sys.executable, "-c", program], timeout_s=5)  # this limit is meant to be reached
    assert (answer.code, answer.stdout) == (None, "said\n")
    until(lambda: not any(map(_runs, map(int, pids.read_text().split()))), "its processes end")


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_commands_run_untranslated_and_safe_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    answer = LocalNode().run([sys.executable, "-c", "import json, os; print(os.environ['LC_ALL'])"], timeout_s=HANG_S)
    assert (answer.code, answer.stdout) == (0, "C\n")


def test_help_has_an_example_and_needs_no_torch():
    code = (
        "import sys\nfrom provision.cli import main\ntry: main(['--help'])\nexcept SystemExit as end: print(end.code)\n"
        "print('torch' in sys.modules, 'psutil' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert "provision plan  " in done.stdout
    assert done.stdout.splitlines()[-2:] == ["0", "False False"]
