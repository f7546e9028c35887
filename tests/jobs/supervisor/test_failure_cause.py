"""A failed run says more than `exit code 1`, if its disk is full or if a signal ended one of its ranks."""

import subprocess
import sys

import pytest
from support_e2e import HANG_S

from jobs.supervisor import failure_cause
from jobs.supervisor.failure_cause import find_failure_cause

RANK = "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGSEGV); time.sleep(1000)"
DEEPSPEED = "[ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = {}\n"


def test_the_signal_that_ended_a_rank_is_read_from_the_output_of_torchrun(tmp_path):
    script, log = tmp_path / "rank.py", tmp_path / "job.log"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    with log.open("wb") as output:
        subprocess.run(
            [*command, "--rdzv-endpoint=127.0.0.1:0", script], stdout=output, stderr=output, check=False, timeout=HANG_S
        )
    assert find_failure_cause(tmp_path, log) == "SIGSEGV ended rank 1; see log/job.log"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DEEPSPEED.format(-9), "SIGKILL ended a rank; see log/job.log"),
        (DEEPSPEED.format(-15) + DEEPSPEED.format(-6), "SIGABRT ended a rank; see log/job.log"),
        (DEEPSPEED.format(-15), ""),  # the launcher or a person ended this rank
        (DEEPSPEED.format(-99) + DEEPSPEED.format(-40), ""),  # 40 is a signal without a name
        (DEEPSPEED.format(1), ""),
        ("", ""),
    ],
)
def test_only_a_signal_that_is_a_cause_is_named(tmp_path, text, cause):
    (tmp_path / "job.log").write_text(text)
    assert find_failure_cause(tmp_path, tmp_path / "job.log") == cause


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    (tmp_path / "job.log").write_text(DEEPSPEED.format(-9))
    monkeypatch.setattr(failure_cause, "LEAST_FREE_BYTES", 1 << 62)
    assert find_failure_cause(tmp_path, tmp_path / "missing.log") == f"the disk of {tmp_path} is full"
