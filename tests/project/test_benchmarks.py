"""Each program in benchmarks/ runs to its end and prints its numbers. The tests do not check the values of the numbers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support_e2e import HANG_S
from support_long import only_long

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        (
            ("loop.py", "--rounds", "1", "--steps", "1", "--n-embd", "16", "--seq-len", "16"),
            r"the loop +\d+\.\d{3} ms a step\na bare one +\d+\.\d{3} ms a step\nratio +\d+\.\d{4} ",
        ),
        (
            ("instruments.py", "--rounds", "1", "--n-embd", "16", "--seq-len", "16"),
            r"^(.+ \d+\.\d\d .*\d+\.\d{3}\n){3,}",
        ),
        pytest.param(
            ("sampler.py", "--hz", "10", "--seconds", "1", "--rounds", "1"),
            r"^8 GPUs at 10 Hz +\d+\.\d{3} % of a core +\d+\.\d{3} ms a sample +\d+\.\d\d samples a second ",
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
        ),
        (
            ("telemetry.py", "--nodes", "2", "--gpus", "2", "--seconds", "900", "--rounds", "1"),
            (
                r"^1806 samples of hosts, 3612 of GPUs -> coverage of 2 nodes, \d+ metrics\n"
                r"(?:.+ \d+\.\d\d s .* MB  \d\.\d{3} times .*\n){4}"
            ),
        ),
        (
            ("fetch.py", "--mib", "1", "--small", "3", "--runs", "2", "--rounds", "1"),
            (
                r"^one trace of 1 MiB +fetch +\d+\.\d\d s +\d+\.\d\d CPU s +rsync .*\n3 traces .*\n3 files of records.*\n"
                r"(?:.*over sshd.*\n)+nothing new of 2 runs +fetch "
            ),
        ),
        (("choices.py", "--cells", "40", "--rounds", "2"), r"^ +40 +\d+\.\d\d$"),
        (
            ("report_step.py", "--calls", "100", "--rounds", "3"),
            r"^json.dumps and os.write +\d+\.\d us\nreport +\d+\.\d us\nratio +\d+\.\d\d$",
        ),
        (("planner.py", "--cells", "64"), r"^64 cells: \d+\.\d s, \d+\.\d s of CPU time$"),
        (
            ("published/compare.py", "--table", "widths that suit", "--pairs"),
            (
                r"^21 published configurations, 0 refused; .*\n(?:.*\n)+"
                r"pairs of one job that differ by 5 % or more: \d+ of 24 in the right order "
            ),
        ),
        (
            ("rehearsal.py", "--workload", "gpt2-tiny", "--gpus", "512"),
            r"^gpt2-tiny, fsdp2, 512 ranks, its own depth: .* a rank\n\d+\.\d s, \d+\.\d s of CPU time, \d\.\d\d GiB$",
        ),
        (
            ("summarize.py", "--runs", "7", "--steps", "3", "--rounds", "1"),
            r"^collect summarize .* \d+\.\d\d s +\d+\.\d\d CPU s .* \d+\.\d\d times the CPU of reading alone$",
        ),
        *only_long(
            (("data.py", "--images", "32", "--rounds", "1"), r"^mean absolute difference of normalised pixels: 0\.\d{3}$"),
            pytest.param(
                ("sampler_effect.py", "--hz", "50", "--rounds", "2", "--steps", "2", "--n-embd", "16", "--seq-len", "16"),
                r"^ratio +\d+\.\d{4} +\(95 % interval \d+\.\d{4} to \d+\.\d{4}, 2 rounds of 2 steps\)$",
                marks=pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
            ),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_benchmark_ends_and_prints_its_figures(words, figures, tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / words[0], *words[1:]],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(figures, done.stdout, re.MULTILINE), done.stdout


def test_the_submission_benchmark_sends_arrays_and_queries_slurm_once(tmp_path):
    """benchmarks/sweep.py submits cells with two different numbers of GPUs, so `jobs submit` has two requests for Slurm.

    `jobs submit` tests each request by `sbatch --test-only` and then submits it as one job array. Each `jobs status` calls
    squeue once.
    """
    done = subprocess.run(
        [sys.executable, FOLDER / "sweep.py", "--runs", "400", "--sent", "200", "--rounds", "2"],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls = dict(re.findall(r"^(.+?)  .*calls: (.+)$", done.stdout, re.MULTILINE))
    assert calls["jobs submit of 200"] == "sbatch 4, scontrol 3"
    assert calls["jobs status"] == calls["jobs status --json"] == "squeue 1"


def test_the_submission_benchmark_cancels_every_job_that_it_submitted(tmp_path):
    """benchmarks/submission.py cancels every job that it submitted.

    Slurm's commands are stand-ins here; the times that this benchmark measures are real only on a cluster.
    """
    for name, script in (
        ("sbatch", 'case "$*" in *--parsable*) echo 12 ;; *) echo Submitted batch job 13 ;; esac'),
        ("scontrol", "echo ClusterName = here"),
        ("srun", "exit 1"),
        ("scancel", f'echo "$*" >{tmp_path}/cancelled'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cluster.yaml").write_text(
        "schema: 1\nname: here\nprovider: virtual\nnodes: [{name: head, roles: [controller]}, {name: work1}]\n"
        "gpus: {type: practice, per_node: 2}\nslurm: {partition: batch}\n"
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, FOLDER / "submission.py", tmp_path / "cluster.yaml", "--rounds", "1"],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "submitit" in done.stdout
    assert sorted((tmp_path / "cancelled").read_text().split()) == ["12", "12", "12", "12", "13", "13"]
