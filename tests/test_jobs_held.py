"""A queue on this machine whose packages change while runs wait: it holds them, in one sentence, and fails none of them."""

import os
import subprocess

import pytest
from support_line import benches, started, until

# Waits for a file, so that packages can change between the sending and the start; then is supervised as any run.
SCRIPT = """\
cd {{ folder | quote }}
until test -e ../../go; do sleep 0.05; done
exec {{ python | quote }} -P -m jobs.attempt . -- sh -c 'exit 3'
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    yield from benches(tmp_path)


def sent(bench, *words):
    (bench.path / "templates/launch").mkdir(parents=True)
    (bench.path / "templates/launch/local.sh.j2").write_text(SCRIPT)
    return bench.matrix("axes: {strategy: [single], seed: [1, 2, 3, 4]}")


def install(tmp_path):
    """What pip leaves of a package."""
    (tmp_path / "site/some_package-1.0.dist-info").mkdir()


def test_runs_that_wait_are_held_and_sent_again_with_what_is_installed_then(bench, tmp_path):
    name = sent(bench)
    words = bench.command("jobs", "submit", "--matrix", name, "--wait")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as waiting:
        until(lambda: len(bench.folders()) == 4 and (bench.path / ".shardlab/local/runner.json").exists(), "they wait")
        install(tmp_path)
        (bench.path / "go").touch()
        said, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 1
    (sentence,) = [line for line in said.splitlines() if "packages or shardlab's source changed" in line]
    assert sentence.startswith("4 run(s) did not start (")
    assert "`jobs submit` or `jobs retry` submits it with the packages and the source that are installed now" in sentence
    assert set(bench.states().values()) == {"planned"}
    assert not any(started(folder) for folder in bench.folders())
    assert not any(folder.claim.exists() for folder in bench.folders())
    refused = sorted(event.writer for folder in bench.folders() for event in folder.events() if event.event == "refused")
    assert refused == ["attempt", "queue", "queue", "queue"]  # the first one looked, and no other was started
    assert "2 run(s) submitted" in bench.run("jobs", "retry", "--where", "seed < 3").stdout
    assert "2 run(s) submitted, 2 skipped" in bench.run("jobs", "submit", "--matrix", name).stdout
    until(lambda: set(bench.states().values()) == {"failed"}, "they are made")
    assert {folder.judge().why for folder in bench.folders()} == {"exit code 3"}


def test_runs_that_were_sent_since_go_on(bench, tmp_path):
    name = sent(bench)
    bench.run("jobs", "submit", "--matrix", name, "--where", "seed < 3")
    install(tmp_path)
    bench.run("jobs", "submit", "--matrix", name, "--where", "seed > 2")
    (bench.path / "go").touch()

    def states():
        return {folder.read_run().cell.seed: folder.judge().state for folder in bench.folders()}

    until(lambda: states() == {1: "planned", 2: "planned", 3: "failed", 4: "failed"}, "the older ones are held")
