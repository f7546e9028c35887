"""Scripts that `provision` submits as jobs at a site."""

import contextlib
import os

import pytest

from provision.fact import Unanswered
from provision.nodes.login_node import LocalLoginNode
from provision.operations import site_environment
from provision.site import jobs
from provision.site.package_check import PackageCheck
from shardlab.remote.remote import CommandOutput


class RejectingLogin:
    """A login node where the submission fails with these words."""

    name = "login"

    def __init__(self, words):
        self.words = words

    def run(self, argv, **options):
        return CommandOutput(1, "", self.words)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid qos specification",
            ". Decided in the cluster file by: slurm.qos.",
        ),
        ("pip: no space for the account", ""),
    ],
)
def test_a_job_of_provision_that_slurm_rejects_names_the_keys(words, advice):
    with pytest.raises(Unanswered) as caught:
        jobs.make_script_submission("install", "/s/install.sh", "/s/log", 5).make(RejectingLogin(words))
    assert str(caught.value) == f"login: install: {words}{advice}"
    assert caught.value.reasons_by_node == {"login": str(caught.value)}


# Stand-ins: the job ends when squeue has been asked three times. Slurm knows the reason only the second time.
WAITING_SBATCH = 'until test "$(wc -l < "$0.asked")" -ge 3; do sleep 0.02; done'
WAITING_SQUEUE = """\
echo asked >> "$(dirname "$0")/sbatch.asked"
echo "6|PENDING|JobHeldUser|/s/other.sh"
reason=PartitionTimeLimit
test "$(wc -l < "$(dirname "$0")/sbatch.asked")" -ge 2 || reason=None
echo "7|PENDING|$reason|$SCRIPT"
"""


@pytest.mark.parametrize("kind", ["script", "packages"])
def test_while_a_job_of_provision_waits_the_reason_is_printed_once(tmp_path, monkeypatch, capsys, kind):
    for name, text in (("sbatch", WAITING_SBATCH), ("squeue", WAITING_SQUEUE)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "sbatch.asked").touch()
    script = f"{tmp_path}/{'install.sh' if kind == 'script' else 'list_packages.sh'}"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SCRIPT", script)
    monkeypatch.setattr(jobs, "ASK_S", 0.05)
    change = jobs.make_script_submission("install", script, f"{tmp_path}/log", 60)
    if kind == "packages":
        argv = ["sh", "-c", site_environment.SUBMIT_AND_SHOW, "submit", str(tmp_path), "exit"]
        change = PackageCheck("install", argv, tmp_path, 60, "", job_script=script)
    with contextlib.nullcontext() if kind == "script" else pytest.raises(Unanswered):  # the job lists no packages
        change.make(LocalLoginNode(name="login", python="python3"))
    printed = capsys.readouterr().err
    work = "install" if kind == "script" else "check the packages of install"
    assert printed.startswith(f"login: {work}: waits for job 7 (PENDING: Slurm never starts it, because its time limit")
    assert printed.count("waits for job") == 1
    assert "slurm.max_time or slurm.provision.time" in " ".join(printed.split())
