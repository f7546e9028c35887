"""The wall clock is set back while a run trains, as when somebody sets the time: the run completes, and no time is negative."""

import itertools

import pytest
from support_e2e import HANG_S, benches, until

pytestmark = pytest.mark.e2e
# Python reads this file when it starts. All processes of a machine share the kernel's clock (a time namespace changes only the
# clocks that count from the boot), so the test sets back only Python's clock.
SITE = """
import os, time
real = time.time
time.time = lambda: real() - (3600 if os.path.exists({back!r}) else 0)
"""


@pytest.fixture
def bench(tmp_path, short, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.format(back=str(tmp_path / "back")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    # The socket of the fork server is in this folder. So a new fork server starts, which also imports sitecustomize.py. If the
    # folder had a longer path, the socket would be in /tmp, where the fork server of another test may answer.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    yield from benches(tmp_path)


def test_a_clock_that_steps_back_an_hour_makes_no_run_red_and_no_time_negative(bench, tmp_path):
    name = bench.matrix("axes: {strategy: [ddp], gpus: [2]}", steps=150)
    bench.run("jobs", "submit", "--matrix", name)
    (folder,) = bench.folders()
    until(lambda: len([record for record in folder.steps(1).records if not record.warmup]) > 20, "it makes steps", HANG_S)
    (tmp_path / "back").touch()
    until(lambda: bench.states() == {folder.run_id: "completed"}, "it completes", HANG_S)
    walls = [record.wall_s for record in folder.steps(0).records]
    assert min(after - before for before, after in itertools.pairwise(walls)) < -3000  # the clock was really set back
    (row,) = bench.json("collect", "summarize")["rows"]
    assert row["states"] == {"completed": 1}
    assert {name: figure["value"] for name, figure in row["metrics"].items() if figure["value"] < 0} == {}
