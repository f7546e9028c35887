"""The supervisor of a run in a Slurm job waits while the Slurm controller does not answer, because no job step can start
without the controller."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support_e2e import HANG_S, benches, until

PING = "#!/bin/sh\ntest -e '{0}' && echo 'Slurmctld(primary) at head is UP' || echo 'Slurmctld(primary) at head is DOWN'\n"


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


@pytest.fixture
def supervised(bench, tmp_path):
    """Yields (the folder of a run on Slurm, the process of its supervisor, a path). The Slurm controller does not answer until
    this path exists."""
    (tmp_path / "scontrol").write_text(PING.format(tmp_path / "back"))
    (tmp_path / "scontrol").chmod(0o755)
    bench.run("jobs", "render", "--matrix", bench.matrix("axes: {strategy: [single]}"))
    (folder,) = bench.folders()
    folder.run_json.write_text(json.dumps(json.loads(folder.run_json.read_text()) | {"scheduler": "slurm"}))
    words = [
        sys.executable,
        "-P",
        "-m",
        "jobs.supervisor.attempt",
        folder.path,
        "--",
        "sh",
        "-c",
        "touch begun; test -e back || sleep 1000",
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = tmp_path / "said"
    with said.open("wb") as log, subprocess.Popen(words, cwd=tmp_path, stderr=log, env=environment) as supervisor:
        until(lambda: "waiting for it" in said.read_text(), "it waits for the controller")
        assert not (tmp_path / "begun").exists()
        yield folder, supervisor, tmp_path / "back"


def test_a_supervisor_starts_its_run_when_the_controller_is_back(supervised):
    _, supervisor, back = supervised
    back.touch()
    assert supervisor.wait(HANG_S) == 0
    assert back.with_name("begun").exists()


def test_a_supervisor_that_waits_for_the_controller_ends_on_a_signal(supervised):
    folder, supervisor, _ = supervised
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(HANG_S)
    until(lambda: folder.judge().state == "failed", "it ends")
    assert "Slurm told the run to end" in folder.judge().why
