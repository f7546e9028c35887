"""GPU hours: how many the runs of a submission may use, the option --max-gpu-hours, and the remaining hours of an account."""

import msgspec
import pytest
import support_collect as support
from support_queue import Queue, Study

from jobs import gpu_hours
from jobs.schedulers import slurm
from jobs.slurm import share
from jobs.slurm.share import Share
from shardlab.cluster import Cluster
from shardlab.errors import InputError
from shardlab.slurm_keys import Gpus, Slurm

SITE = Cluster(schema=1, name="c", provider="slurm", gpus=Gpus(per_node=4), slurm=Slurm(time="02:00:00"))
SHARED = msgspec.structs.replace(SITE, slurm=Slurm(time="02:00:00", exclusive=False))


def cell(strategy, gpus, launcher="torchrun", **other):
    return support.cell(strategy, gpus, launcher, **{"time_limit_s": None, **other})


def named(cells, numbers):
    return {one.name(): number for one, number in zip(cells, numbers, strict=True)}


def test_recorded_times_stand_before_time_limits_and_whole_nodes_are_counted():
    """GPU hours use the recorded time of a cell, otherwise its time limit, times all GPUs of its nodes."""
    cells = [cell("ddp", 2), cell("ddp", 8, nnodes=2), cell("ddp", 2, seed=7, time_limit_s=360)]
    runs = named(cells, [3, 1, 1])
    hours = gpu_hours.of(cells, runs, {cells[0].name(): 1800.0}, SITE)
    assert [entry.hours for entry in hours] == [pytest.approx(n) for n in (3 * 4 * 0.5, 8 * 2.0, 4 * 0.1)]
    assert gpu_hours.total(hours) == gpu_hours.GpuHours(pytest.approx(6.0), pytest.approx(16.4), 0)
    assert gpu_hours.in_words(gpu_hours.total(hours)) == "22.4 GPU hours (6 by recorded times, 16.4 by time limits)"
    assert gpu_hours.of(cells[:1], runs, {}, SHARED)[0].hours == pytest.approx(3 * 2 * 2.0)


def test_ranks_on_the_cpu_take_no_gpu_hours_and_an_unknown_time_is_no_zero():
    local = Cluster(schema=1, name="l", provider="local")
    assert gpu_hours.occupied(cell("ddp", 2, "fork"), SITE) == 0
    assert gpu_hours.occupied(cell("ddp", 2), msgspec.structs.replace(SITE, gpus=None)) == 0
    (unknown,) = gpu_hours.of([one := cell("ddp", 2)], {one.name(): 1}, {}, local)
    assert unknown.hours is None
    with pytest.raises(InputError, match="Set `time_limit` in the matrix"):
        gpu_hours.must_be_within(10, [unknown])


def test_a_bound_names_the_sum_and_how_to_select_fewer_cells():
    cells = [cell("ddp", gpus, nnodes=max(1, gpus // 4)) for gpus in (2, 4, 8)]
    hours = gpu_hours.of(cells, named(cells, [1, 1, 1]), {}, SITE)
    gpu_hours.must_be_within(32, hours)
    with pytest.raises(InputError, match=r"--max-gpu-hours 20: .* 32 GPU hours \(32 by time limits\).*--where \"gpus <= 4\""):
        gpu_hours.must_be_within(20, hours)


def test_submit_refuses_more_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    queue, study = Queue(tmp_path / "slurm", monkeypatch), Study(tmp_path, 3)
    file = study.workspace.path / "cluster.yaml"
    file.write_text(file.read_text() + "gpus: {per_node: 2}\n")
    assert study.jobs("submit", "--max-gpu-hours", "5.9") == 2
    assert "the runs may take 6 GPU hours (6 by time limits)" in capsys.readouterr().err
    assert study.jobs("submit", "--max-gpu-hours", "nan") == 2
    assert (queue.calls("sbatch"), study.workspace.runs.exists()) == ([], False)
    assert study.jobs("submit", "--max-gpu-hours", "6") == 0
    assert study.jobs("submit", "--max-gpu-hours", "0.1") == 0  # no run is left, so no GPU hours are needed


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
        (ROWS, "abc_g", [Share("abc_g", "gres/gpu", 75.0, 100.0), Share("abc_g", "cpu", 9980.0, 10000.0)]),
        (
            ROWS,
            None,
            [
                Share("other", "gres/gpu", 0.0, 10.0),
                Share("charged", "billing", 1.5, 2.0),
                Share("abc_g", "cpu", 9980.0, 10000.0),
                Share("by_type", "gres/gpu:a100", 10.0, 10.0),
            ],
        ),
        (ROWS, "by_type", [Share("by_type", "gres/gpu:a100", 10.0, 10.0)]),
        (ROWS, "absent", []),
        ("", None, []),
        ("sshare: error\n|||||\nabc_g||gres/gpu=many|x\n", None, []),
        ("\x1b[31mred||gres/gpu=60|\n", None, []),
        ("a||gres/gpu:\x1b[31m=60,gres/gpu=\u0661|\n", None, []),
    ],
)
def test_what_sshare_prints(text, account, expected):
    assert share.parse(text, account) == expected


def test_each_limit_has_a_sentence_with_its_unit():
    said = [one.in_words() for one in share.parse(ROWS, None)]
    assert said == [
        "0 of 10 GPU hours left",
        "1.5 of 2 billing hours left",
        "9980 of 10000 processor hours left",
        "10 of 10 GPU hours of the type a100 left",
    ]
