"""GPU hours: how many the runs of a submission may use, the option --max-gpu-hours, and the remaining hours of an account."""

import json

import msgspec
import pytest
import support_collect as support
from support_queue import Queue, Study

from jobs.planning import gpu_hours
from jobs.planning.gpu_hours import RunTime
from jobs.schedulers import slurm
from jobs.slurm import share
from jobs.slurm.share import AccountShare
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_keys import Gpus, Slurm
from shardlab.errors import InputError
from shardlab.matrix.cell import CheckpointSettings, Instruments
from shardlab.matrix.retry import Retry
from shardlab.runs.prediction import PredictedRange, Prediction

pytestmark = pytest.mark.usefixtures("source_copied_faster")
SITE = Cluster(schema=1, name="c", provider="slurm", gpus=Gpus(per_node=4), slurm=Slurm(time="02:00:00"))
SHARED = msgspec.structs.replace(SITE, slurm=Slurm(time="02:00:00", exclusive=False))


def cell(strategy, gpus, launcher="torchrun", **other):
    return support.cell(strategy, gpus, launcher, **{"time_limit_s": None, **other})


def named(cells, numbers):
    return {one.name(): number for one, number in zip(cells, numbers, strict=True)}


@pytest.mark.parametrize(
    ("recorded_s", "predicted_s", "limit_s", "elapsed_s", "expected"),
    [
        (100.0, 900.0, 3600, 0, RunTime(100.0, "recorded times", 300)),
        (None, 900.0, 3600, 0, RunTime(900.0, "predictions", 1200)),  # 1,125 s, in steps of five minutes
        (None, 9000.0, 3600, 0, RunTime(3600, "predictions", 11400)),  # it ends at its limit, which is too short
        (None, None, 3600, 0, RunTime(3600, "time limits")),
        (100.0, 900.0, 3600, 200, RunTime(900.0, "predictions", 300)),  # it takes longer than the runs before it
        (None, 900.0, 3600, 900, RunTime(3600, "time limits", 1200)),
        (None, 900.0, None, 0, RunTime(900.0, "predictions", 1200)),
        (None, None, None, 0, None),
    ],
)
def test_a_run_takes_its_recorded_time_or_its_highest_predicted_time_or_its_limit(
    recorded_s, predicted_s, limit_s, elapsed_s, expected
):
    predicted = None if predicted_s is None else Prediction(time_s=PredictedRange(1.0, 2.0, predicted_s))
    assert gpu_hours.estimate_run_time(recorded_s, predicted, limit_s, elapsed_s) == expected
    assert gpu_hours.estimate_run_time(recorded_s, predicted or Prediction(), limit_s, elapsed_s) == expected


def test_gpu_hours_are_those_of_complete_nodes_by_the_source_of_the_times():
    """Each time is multiplied by all GPUs of the nodes of the run."""
    cells = [cell("ddp", 2), cell("ddp", 8, nnodes=2), cell("ddp", 2, seed=7, time_limit_s=360)]
    runs = named(cells, [3, 1, 1])
    predicted = {one.name(): Prediction(time_s=PredictedRange(1.0, 2.0, 900.0)) for one in cells[:2]}
    hours = gpu_hours.estimate_cell_hours(cells, runs, {cells[0].name(): 1800.0}, predicted, SITE)
    assert [entry.total_gpu_hours for entry in hours] == [pytest.approx(n) for n in (3 * 4 * 0.5, 8 * 0.25, 4 * 0.1)]
    assert gpu_hours.sum_hours(hours) == gpu_hours.GpuHours(pytest.approx(6.0), pytest.approx(2.0), pytest.approx(0.4))
    assert gpu_hours.describe_hours(gpu_hours.sum_hours(hours)) == (
        "8.4 GPU hours (6 by recorded times, 2 by the high end of predictions, 0.4 by time limits)"
    )
    assert gpu_hours.describe_limits(hours) == (
        'proposed time_limit for 2 of 3 cells: "00:20:00" to "00:40:00", by cell in --json; '
        "jobs with a short limit start sooner"
    )
    assert gpu_hours.describe_limits(hours[2:]) == ""
    assert gpu_hours.estimate_cell_hours(cells[:1], runs, {}, {}, SHARED)[0].total_gpu_hours == pytest.approx(3 * 2 * 2.0)


def test_ranks_on_the_cpu_need_no_gpu_hours_and_an_unknown_time_is_not_zero():
    local = Cluster(schema=1, name="l", provider="local")
    assert gpu_hours.count_occupied_gpus(cell("ddp", 2, "fork"), SITE) == 0
    assert gpu_hours.count_occupied_gpus(cell("ddp", 2), msgspec.structs.replace(SITE, gpus=None)) == 0
    (unknown,) = gpu_hours.estimate_cell_hours([one := cell("ddp", 2)], {one.name(): 1}, {}, {}, local)
    assert unknown.run_time is None
    with pytest.raises(InputError, match="Set `time_limit` in the matrix"):
        gpu_hours.must_be_within_gpu_hours(10, [unknown])


def test_a_bound_names_the_sum_and_how_to_select_fewer_cells():
    cells = [cell("ddp", gpus, nnodes=max(1, gpus // 4)) for gpus in (2, 4, 8)]
    hours = gpu_hours.estimate_cell_hours(cells, named(cells, [1, 1, 1]), {}, {}, SITE)
    gpu_hours.must_be_within_gpu_hours(32, hours)
    with pytest.raises(InputError, match=r"--max-gpu-hours 20: .* 32 GPU hours \(32 by time limits\).*--where \"gpus <= 4\""):
        gpu_hours.must_be_within_gpu_hours(20, hours)


def test_submit_refuses_more_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    queue, study = Queue(tmp_path / "slurm", monkeypatch), Study(tmp_path, 3)
    file = study.workspace.path / "cluster.yaml"
    file.write_text(file.read_text() + "gpus: {per_node: 2}\n")
    assert study.jobs("submit", "--max-gpu-hours", "5.9") == 2
    assert "the runs may take 6 GPU hours (6 by time limits)" in capsys.readouterr().err
    assert study.jobs("submit", "--max-gpu-hours", "nan") == 2
    assert (queue.calls("sbatch"), study.workspace.runs.exists()) == ([], False)
    assert study.jobs("submit", "--max-gpu-hours", "6") == 0
    assert study.jobs("submit", "--max-gpu-hours", "0.1") == 0  # no run is left, so no GPU hours are needed


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (Retry(), (0, 2)),  # node_fail and preempted together; a run without checkpoints is not started again after a timeout
        (Retry(failed=1, oom=3), (4, 2)),
        (Retry(node_fail=1), (1, 1)),  # the larger number counts: slurm.requeue for preempted
        (Retry(node_fail=4), (4, 0)),
        (Retry(node_fail=0, preempted=0), (0, 0)),
    ],
)
def test_the_most_retries_of_a_run_are_those_of_all_states(retry, expected):
    found = gpu_hours.count_most_retries(cell("ddp", 2), retry, 2, on_slurm=True)
    assert (found.by_matrix, found.by_cluster) == expected


def test_states_that_cannot_be_retried_do_not_count():
    retry = Retry(oom=1, node_fail=2, preempted=8, timeout=16)
    saves = Instruments(checkpoints=CheckpointSettings(every_steps=2))
    for which, on_slurm, most in [
        (cell("ddp", 2), False, 1 + 2),
        (cell("ddp", 2, instruments=saves), False, 1 + 2 + 16),
        (cell("ddp", 2, expect=["oom"]), False, 2),
        (cell("ddp", 2), True, 1 + 8),
        (cell("ddp", 2, expect=["node_fail"]), True, 1 + 8),
        (cell("ddp", 2, expect=["node_fail", "preempted"]), True, 1),
    ]:
        assert gpu_hours.count_most_retries(which, retry, 0, on_slurm=on_slurm) == gpu_hours.MostRetries(most, 0)


def test_a_retry_takes_as_long_as_a_run():
    known, new = cell("ddp", 2), cell("ddp", 2, seed=7)
    retries = {known.name(): gpu_hours.MostRetries(1, 2), new.name(): gpu_hours.MostRetries(2, 0)}
    hours = gpu_hours.sum_hours(
        gpu_hours.estimate_cell_hours([known, new], named([known, new], [1, 1]), {known.name(): 1800.0}, {}, SITE, retries)
    )
    assert (hours.measured, hours.limits, hours.retries, hours.requeues) == pytest.approx((2, 8, 2 + 16, 4))
    assert gpu_hours.describe_retries(hours) == (
        "about 32 GPU hours with all retries (18 by `retry` of the matrix, 4 by `slurm.requeue`)"
    )


def test_a_bound_counts_the_retries_of_the_matrix_and_no_restart_of_the_cluster():
    (one,) = cells = [cell("ddp", 4)]
    hours = gpu_hours.estimate_cell_hours(cells, {one.name(): 1}, {}, {}, SITE, {one.name(): gpu_hours.MostRetries(1, 2)})
    gpu_hours.must_be_within_gpu_hours(16, hours)
    with pytest.raises(
        InputError, match=r"8 GPU hours .*and 8 GPU hours more with all retries of the matrix.*numbers of `retry`"
    ):
        gpu_hours.must_be_within_gpu_hours(15.9, hours)


def test_a_plan_shows_the_hours_with_retries_and_submit_bounds_them(tmp_path, monkeypatch, capsys):
    Queue(tmp_path / "slurm", monkeypatch)
    study = Study(tmp_path, 3)
    file = study.workspace.path / "cluster.yaml"
    file.write_text(file.read_text() + "gpus: {per_node: 2}\n")
    study.matrix.write_text(study.matrix.read_text() + "retry: {failed: 1}\n")
    assert study.jobs("plan", "--matrix", str(study.matrix)) == 0
    said = capsys.readouterr().out
    assert "about 6 GPU hours (6 by time limits)." in said
    assert "about 24 GPU hours with all retries (6 by `retry` of the matrix, 12 by `slurm.requeue`)." in said
    assert study.jobs("plan", "--matrix", str(study.matrix), "--json") == 0
    document = json.loads(capsys.readouterr().out)["gpu_hours"]
    assert document == {"measured": 0, "predicted": 0, "limits": 6, "unknown": 0, "retries": 6, "requeues": 12}
    assert study.jobs("submit", "--dry-run", "--max-gpu-hours", "11.9") == 2
    assert study.jobs("submit", "--dry-run", "--max-gpu-hours", "12") == 0


ROWS = """\
root|||cpu=0,gres/gpu=12
 abc_g||cpu=600000,gres/gpu=6000|cpu=1200,mem=77,gres/gpu=1500
  abc_g|alice||cpu=10,gres/gpu=60
 other||gres/gpu=600|gres/gpu=900
 by_type||gres/gpu:a100=600|gres/gpu=1
 charged||billing=120,mem=5000|billing=30,mem=4999
"""


@pytest.mark.parametrize(
    ("text", "account", "expected"),
    [
        (ROWS, "abc_g", [AccountShare("abc_g", "gres/gpu", 75.0, 100.0), AccountShare("abc_g", "cpu", 9980.0, 10000.0)]),
        (
            ROWS,
            None,
            [
                AccountShare("other", "gres/gpu", 0.0, 10.0),
                AccountShare("charged", "billing", 1.5, 2.0),
                AccountShare("abc_g", "cpu", 9980.0, 10000.0),
                AccountShare("by_type", "gres/gpu:a100", 10.0, 10.0),
            ],
        ),
        (ROWS, "by_type", [AccountShare("by_type", "gres/gpu:a100", 10.0, 10.0)]),
        (ROWS, "absent", []),
        ("", None, []),
        ("sshare: error\n|||||\nabc_g||gres/gpu=many|x\n", None, []),
        ("\x1b[31mred||gres/gpu=60|\n", None, []),
        ("a||gres/gpu:\x1b[31m=60,gres/gpu=\u0661|\n", None, []),
    ],
)
def test_the_output_of_sshare_is_parsed(text, account, expected):
    assert share.parse_shares(text, account) == expected


def test_each_limit_has_a_sentence_with_its_unit():
    said = [one.describe_remaining_hours() for one in share.parse_shares(ROWS, None)]
    assert said == [
        "0 of 10 GPU hours left",
        "1.5 of 2 billing hours left",
        "9,980 of 10,000 processor hours left",
        "10 of 10 GPU hours of the type a100 left",
    ]
