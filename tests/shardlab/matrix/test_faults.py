"""Faults on purpose: their keys are checked and are part of a cell's identity, and the state of a run says what was done."""

import msgspec
import pytest
from support_cells import CELL

from collect.findings.row import flatten_cell
from jobs.planning import tiny_twin
from jobs.planning.resolve import resolve_cells
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.matrix.cell import Instruments
from shardlab.matrix.cell_names import map_cell_values, matches_cell
from shardlab.matrix.expression import Expression
from shardlab.matrix.faults import ENDED_ON_PURPOSE, LostWorker, SlowedRank, describe_faults
from shardlab.runs.record import SCHEMA, Event, StepRecord
from shardlab.runs.rundir import _count_timed_steps
from shardlab.runs.state import judge
from trainers import menu

SLOWED, LOST = SlowedRank(rank=1, delay_ms=50), LostWorker(rank=1, step=4)
WHY = "rank 1 was ended on purpose at step 4 (instruments.lost_worker)"
MATRIX = """\
schema: 1
name: m
defaults: {workload: vgg16-tiny, strategy: ps-async, gpus: 2, global_batch_size: 8, steps: 10, optimizer: {name: sgd, lr: 0.1}}
axes: {instruments.straggler: [null, {rank: 1, delay_ms: 50}]}
"""


def faulty(**fault):
    return msgspec.structs.replace(CELL, instruments=Instruments(**fault))


def loaded(tmp_path, text):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return matrix.load_matrix(path)


def test_a_fault_makes_another_cell_and_its_name_says_so():
    cells = [CELL, faulty(straggler=SLOWED), faulty(straggler=SlowedRank(rank=1, delay_ms=60)), faulty(lost_worker=LOST)]
    assert len({cell.hash() for cell in cells}) == 4
    assert [("-slowed-" in cell.name(), "-lost-" in cell.name()) for cell in cells] == [
        (False, False), (True, False), (True, False), (False, True),
    ]  # fmt: skip


def test_faults_are_named_for_filters_and_for_readers():
    plain = [msgspec.to_builtins(cell) for cell in (CELL, faulty(straggler=SLOWED), faulty(lost_worker=LOST))]
    assert [map_cell_values(cell)["fault"] for cell in plain] == ["none", "straggler", "lost_worker"]
    assert [describe_faults(cell["instruments"]) for cell in plain] == ["", "rank 1 slowed by 50 ms", "rank 1 lost at step 4"]
    assert [flatten_cell(cell).get("fault") for cell in plain] == [None, "rank 1 slowed by 50 ms", "rank 1 lost at step 4"]
    assert not [
        key for cell in plain for key in flatten_cell(cell) if key in ("instruments.straggler", "instruments.lost_worker")
    ]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("{rank: 1, d", "{rank: 2, d", r"instruments.straggler\[1\]: rank: found 2. Allowed: 0 to 1, the ranks that train."),
        ("delay_ms: 50", "delay_ms: 0", "delay_ms: found the number 0: expected `float` > 0.0"),
        (", delay_ms: 50", "", "the key 'delay_ms' is missing"),
        ("straggler: [null, {rank: 1, delay_ms: 50}]", "lost_worker: [{rank: 0, step: 11}]", "found 11, but the last timed"),
        (
            "straggler: [null, {rank: 1, delay_ms: 50}]",
            "lost_worker: [{rank: 0, step: 1}]",
            "step: found the number 1: expected `int` >= 2",
        ),
    ],
)
def test_an_impossible_fault_is_refused_at_its_place(tmp_path, old, new, why):
    with pytest.raises(InputError, match=r"m\.yaml:4:.*" + why):
        resolve_cells(loaded(tmp_path, MATRIX.replace(old, new)))


def test_a_twin_keeps_its_fault_and_loses_its_worker_within_its_steps(tmp_path):
    text = MATRIX.replace("straggler: [null, {rank: 1, delay_ms: 50}]", "lost_worker: [null, {rank: 1, step: 9}]")
    ordinary, lost = tiny_twin.make_twins(resolve_cells(loaded(tmp_path, text)), menu.load_workloads())
    assert (ordinary.instruments.lost_worker, lost.instruments.lost_worker) == (None, LostWorker(rank=1, step=3))
    assert (ordinary.launcher, lost.launcher) == ("torchrun", "fork")  # torchrun would end all ranks


def event(name, wall_s, **data):
    return Event(schema=SCHEMA, event=name, writer="w", wall_s=wall_s, host="h", data=data)


def test_the_reason_of_a_failed_run_is_its_injected_fault():
    """Clocks differ, so the failure of another rank may seem to be older than its cause."""
    events = [event("started", 0), event("failed", 1, why="Connection closed by peer"), event(ENDED_ON_PURPOSE, 2, why=WHY)]
    failed = judge([*events, event("exited", 3, code=137)], has_result=False, steps=3, required_steps=10)
    assert (failed.state, failed.why) == ("failed", WHY)
    ended = judge(
        [*events, event("exited", 3, code=1, reason="timeout", why="limit")], has_result=False, steps=3, required_steps=10
    )
    assert (ended.state, ended.why) == ("timeout", "limit")


@pytest.mark.parametrize(("made", "steps", "state"), [(3, 10, "completed"), (2, 2, "failed")])
def test_a_run_with_a_lost_worker_is_complete_without_the_lost_steps(made, steps, state):
    ranks = [
        [StepRecord(schema=1, step=n + 1, t_s=n, wall_s=n, units=1, step_ms=1.0) for n in range(count)] for count in (10, made)
    ]
    assert _count_timed_steps(ranks, [], LOST) == steps
    assert _count_timed_steps(ranks, [], None) == made
    events = [event("started", 0), event(ENDED_ON_PURPOSE, 2, why=WHY), event("exited", 3, code=0)]
    found = judge(events, has_result=True, steps=steps, required_steps=10)
    assert found.state == state
    assert state == "failed" or found.why == WHY


def test_a_claim_can_select_a_cell_by_an_option(tmp_path):
    text = MATRIX.replace("instruments.straggler: [null, {rank: 1, delay_ms: 50}]", "options.pull_interval: [1, 4]")
    test = "staleness_mean(options__pull_interval=1) < staleness_mean(options__pull_interval=4)"
    cells = resolve_cells(loaded(tmp_path, text + f'claims: [{{id: a, says: s, where: w, test: "{test}"}}]\n'))
    wanted = [given for _, given in Expression(test).call_arguments]
    assert wanted == [{"options.pull_interval": 1}, {"options.pull_interval": 4}]
    assert [[matches_cell(msgspec.to_builtins(cell), one) for cell in cells] for one in wanted] == [
        [True, False],
        [False, True],
    ]
    with pytest.raises(InputError, match=r"no cell of this matrix has options\.pull_interval 8"):
        resolve_cells(loaded(tmp_path, text + f'claims: [{{id: a, says: s, where: w, test: "{test.replace("=4", "=8")}"}}]\n'))


FURTHER = [("paper1-16-to-64-gpus", 3 * 4), ("paper3-communication", 3 * (2 * 4 + 1)), ("paper3-faults", 4 * 3)]


@pytest.mark.parametrize(("name", "count"), FURTHER)
def test_the_further_matrices_of_studies_1_and_3_have_all_their_cells(name, count):
    found = matrix.load_matrix(matrix.find_matrix_file(name))
    cells = resolve_cells(found)
    assert len(cells) == count
    for claim in found.file.claims:
        for metric, wanted in Expression(claim.test).call_arguments:
            assert sum(matches_cell(msgspec.to_builtins(cell), wanted) for cell in cells) == 1, (claim.id, metric, wanted)


def test_the_most_frequent_communication_is_that_of_the_study():
    """These cells are cells of paper3, so a run of one matrix counts for the other too."""
    of_study = {cell.hash() for cell in resolve_cells(matrix.load_matrix(matrix.find_matrix_file("paper3")))}
    cells = resolve_cells(matrix.load_matrix(matrix.find_matrix_file("paper3-communication")))
    assert all((cell.hash() in of_study) == (cell.options.get("pull_interval", 1) == 1) for cell in cells)
