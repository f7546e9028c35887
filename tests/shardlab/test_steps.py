"""shardlab.steps.report: what it writes in a run, and that it does nothing elsewhere."""

import json
import subprocess
import sys

SCRIPT = """
import sys
from shardlab.steps import report
class Tensor:
    reads = 0
    def __float__(self):
        Tensor.reads += 1
        return 0.5
for step in range(8, 12):
    report(step=step, loss=Tensor(), tokens=7)
report(step=12, loss=float("nan"), seconds=0.25)
print(Tensor.reads, sorted(set(sys.modules) & {"torch", "msgspec", "numpy", "yaml"}))
"""


def run_script(**variables):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={**variables, "PATH": ""}
    )
    return done.stdout.strip()


def test_steps_are_written_for_the_rank_and_a_tensor_is_read_at_every_tenth_step(tmp_path):
    assert run_script(SHARDLAB_STEPS=str(tmp_path), RANK="3", SHARDLAB_WARMUP_STEPS="2") == "1 []"
    (path,) = tmp_path.iterdir()
    assert path.name == "rank-00003.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [8, 9, 10, 11, 12]
    assert [record.get("warmup", False) for record in records] == [True, True, False, False, False]
    assert [record.get("loss") for record in records] == [None, None, 0.5, None, None]
    assert [record["units"] for record in records] == [7, 7, 7, 7, 0]
    assert (records[-1]["step_ms"], records[-1]["diverged"], records[-1]["counts_units"]) == (250.0, True, False)


def test_outside_of_a_run_nothing_is_read_or_written():
    assert run_script() == "0 []"
