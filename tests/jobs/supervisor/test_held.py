"""Packages change while runs wait in the queue of this machine: the runs are held, there is one message, and no run fails."""

import json
import os
import subprocess

import pytest
from support_e2e import HANG_S, benches, make_second_environment, started, until
from support_trust import make_own

# The template of a run's script. The script waits for the file `go`, so that the test can change packages after the submission.
# Then it starts the supervisor like the script of any run.
SCRIPT = """\
cd {{ folder | quote }}
until test -e ../../go; do sleep 0.05; done
exec {{ python | quote }} -P -m jobs.supervisor.attempt . -- sh -c 'exit 3'
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    yield from benches(tmp_path)


def sent(bench, *words):
    make_own(bench.path)
    (bench.path / "templates/launch").mkdir(parents=True)
    (bench.path / "templates/launch/local.sh.j2").write_text(SCRIPT)
    return bench.matrix("axes: {strategy: [single], seed: [1, 2, 3, 4]}")


def install(tmp_path):
    """Change the installed packages: make the folder dist-info that pip writes when it installs a package."""
    (tmp_path / "site/some_package-1.0.dist-info").mkdir()


def test_waiting_runs_are_held_and_sent_again_with_the_new_packages(bench, tmp_path):
    name = sent(bench)
    words = bench.command("jobs", "submit", "--matrix", name, "--wait")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as waiting:
        until(lambda: len(bench.folders()) == 4 and (bench.path / ".shardlab/local/runner.json").exists(), "they wait")
        install(tmp_path)
        (bench.path / "go").touch()
        said, _ = waiting.communicate(timeout=HANG_S)
    assert waiting.returncode == 1
    (sentence,) = [line for line in said.splitlines() if "the installed packages changed" in line]
    assert sentence.startswith("4 run(s) did not start (")
    assert "`jobs retry --only held` goes on with the packages that are installed then" in sentence
    waits = bench.json("jobs", "status")["runs"]
    assert {(run["state"], run["held"], run["scheduler"]["raw"]) for run in waits} == {("pending", True, "held")}
    assert all(run["why"].startswith("held, because the installed packages changed") for run in waits)
    assert not any(started(folder) for folder in bench.folders())
    assert not any(folder.claim.exists() for folder in bench.folders())
    held = {
        folder.run_id: event.writer for folder in bench.folders() for event in folder.read_events() if event.event == "held"
    }
    # Only one run was started: its supervisor found the change, held this run and then the other three runs.
    (first,) = [run_id for run_id, writer in held.items() if writer == "attempt"]
    assert sorted(held.values()) == ["attempt", *[f"hold.{first}"] * 3]
    assert "0 run(s) submitted, 4 skipped" in bench.run("jobs", "submit", "--matrix", name).stdout
    assert "0 run(s) submitted" in bench.run("jobs", "retry").stdout
    assert "2 run(s) submitted" in bench.run("jobs", "retry", "--only", "held", "--where", "seed < 3").stdout
    until(lambda: sorted(bench.states().values()) == ["failed", "failed", "pending", "pending"], "the released ones are made")
    assert "2 run(s) submitted" in bench.run("jobs", "retry", "--only", "held").stdout
    until(lambda: set(bench.states().values()) == {"failed"}, "they are made")
    assert {folder.judge().why for folder in bench.folders()} == {"exit code 3"}


def test_a_change_of_one_environment_holds_only_the_runs_of_this_environment(bench, tmp_path):
    """Both environments have the same packages when the runs are submitted, so only the environment tells the runs apart."""
    packages = make_second_environment(tmp_path / "other")
    (bench.path / "cluster.yaml").write_text(
        json.dumps({"schema": 1, "name": "here", "provider": "local", "environments": {"other": {"use": f"{tmp_path}/other"}}})
    )
    sent(bench)
    bench.run("provision", "--only", "inventory")
    name = bench.matrix("axes: {strategy: [single], seed: [1, 2], environment: [null, other]}")
    bench.run("jobs", "submit", "--matrix", name)
    runs = [folder.read_run() for folder in bench.folders()]
    assert len({run.packages for run in runs}) == 1
    (packages / "some_package-1.0.dist-info").mkdir()
    (bench.path / "go").touch()
    until(lambda: {run["held"] or run["state"] for run in bench.json("jobs", "status")["runs"]} == {True, "failed"}, "it ends")
    held = {folder.read_run().cell.environment: folder.judge().held for folder in bench.folders()}
    assert held == {None: False, "other": True}
    assert "2 run(s) submitted" in bench.run("jobs", "retry", "--only", "held").stdout
    until(lambda: set(bench.states().values()) == {"failed"}, "they are made")
    digests = {folder.read_run().cell.environment: folder.read_run().packages for folder in bench.folders()}
    assert digests[None] == runs[0].packages != digests["other"]


def test_runs_submitted_after_the_change_of_packages_are_not_held(bench, tmp_path):
    """After packages changed, only the runs that were submitted before are held. Runs submitted after the change run."""
    name = sent(bench)
    bench.run("jobs", "submit", "--matrix", name, "--where", "seed < 3")
    install(tmp_path)
    bench.run("jobs", "submit", "--matrix", name, "--where", "seed > 2")
    (bench.path / "go").touch()

    def states():
        return {folder.read_run().cell.seed: folder.judge().state for folder in bench.folders()}

    until(lambda: states() == {1: "pending", 2: "pending", 3: "failed", 4: "failed"}, "the older ones are held")
