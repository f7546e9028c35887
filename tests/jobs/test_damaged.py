"""A run with a damaged record is skipped: every command names it, continues with the other runs, and ends with exit code 1."""

import re
import shutil

import pytest
from support_long import LONG
from support_queue import Queue, Study

from jobs.schedulers import local, slurm
from jobs.slurm import submission
from shardlab.runs.rundir import RunDir
from shardlab.terminal import printable
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    monkeypatch.setattr(submission, "SEARCH_INTERVAL_S", 0.0)
    return Queue(tmp_path / "slurm", monkeypatch)


def cut_run(folder):
    folder.run_json.write_text(folder.run_json.read_text()[:40])
    return "run.json: is not a run of this version"


def lost_run(folder):
    folder.run_json.unlink()
    return "run.json: no such run"


def unreadable_run(folder):
    folder.run_json.unlink()
    folder.run_json.mkdir()
    return "cannot read"


def garbled_events(folder):
    path = folder.events_file("controller")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\0" * 30 + b"\n" + b"".join(lines[1:]))
    return "events.controller.jsonl:1: is not an event of this version"


def unreadable_events(folder):
    folder.events_file("controller").unlink()
    folder.events_file("controller").mkdir()
    return "cannot read"


DAMAGES = [cut_run, lost_run, unreadable_run, garbled_events, unreadable_events]


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damaged(request, tmp_path, queue, capsys):
    """Returns (a study of three runs that wait in Slurm; the run whose records are damaged; words of the message about it)."""
    queue.rule(ends=0)
    study = Study(tmp_path, 3)
    assert study.jobs("submit") == 0
    folder = study.workspace.list_run_dirs()[1]
    words = request.param(folder)
    capsys.readouterr()
    return study, folder, words


# `submit` and `status` meet every damage. For the other commands, one damaged run.json and one damaged file of events are
# enough in the short form.
some_damages = pytest.mark.parametrize(
    "damaged", DAMAGES if LONG else [cut_run, garbled_events], ids=lambda damage: damage.__name__, indirect=True
)


def is_named(said, folder, words):
    (line,) = [line for line in said.err.splitlines() if line.startswith(f"{folder.run_id}: set aside: ")]
    assert words in line
    assert f"move the folder {folder.path} out of runs/ and run `jobs submit` to create it again" in line
    return line


def test_submit_continues_with_the_undamaged_runs(damaged, queue, capsys):
    study, folder, words = damaged
    more = study.matrix.read_text().replace("[0, 1, 2]", "[0, 1, 2, 3]")
    study.matrix.write_text(more)
    assert study.jobs("submit") == 1
    said = capsys.readouterr()
    line = is_named(said, folder, words)
    assert "1 run(s) submitted, 3 skipped" in said.out
    assert len(queue.state()["tasks"]) == 4
    if words.startswith("run.json"):
        assert "(its job 1_" in line
        assert re.search(r"`scancel --name=m\.[0-9a-f]{10} 1_[0-9]` cancels it", line)


@some_damages
def test_a_waiting_command_waits_for_the_undamaged_runs(damaged, queue, capsys):
    study, folder, words = damaged
    queue.rule()
    assert study.jobs("submit", "--wait") == 1
    is_named(capsys.readouterr(), folder, words)
    assert sorted(one.state for one in study.statuses()) == ["oom", "oom", "unknown"]


def test_status_shows_the_undamaged_runs(damaged, capsys):
    study, folder, words = damaged
    assert study.jobs("status") == 1
    said = capsys.readouterr()
    is_named(said, folder, words)
    assert "2 pending, 1 unknown" in said.out


@some_damages
def test_cancel_ends_the_undamaged_runs(damaged, queue, capsys):
    study, folder, words = damaged
    assert study.jobs("cancel", "--all") == 1
    said = capsys.readouterr()
    is_named(said, folder, words)
    assert "2 run(s) cancelled." in said.out
    assert len(queue.state()["tasks"]) == 1


@some_damages
def test_retry_submits_the_undamaged_runs_again(damaged, queue, capsys):
    study, folder, words = damaged
    queue.rule()
    study.jobs("status")
    queue.rule(ends=0)
    capsys.readouterr()
    assert study.jobs("retry", "--only", "oom", "--where", "seed < 5") == 1
    said = capsys.readouterr()
    is_named(said, folder, words)
    assert "2 run(s) submitted, 0 skipped" in said.out


@some_damages
def test_the_logs_of_the_damaged_run_are_printed(damaged, capsys):
    study, folder, words = damaged
    folder.rank_log(1).write_text("step 7\n")
    assert study.jobs("logs", folder.run_id, "--rank", "1") == 1
    said = capsys.readouterr()
    is_named(said, folder, words)
    assert said.out == "step 7\n"


@some_damages
def test_a_run_is_rendered_again_after_its_damaged_folder_is_moved_away(damaged, tmp_path, queue):
    study, folder, _ = damaged
    shutil.move(folder.path, tmp_path / "damaged")
    queue.rule()
    assert study.jobs("submit", "--wait") == 0
    assert study.states() == ["oom"] * 3


def test_an_unfinished_file_of_a_killed_writer_is_no_damage(tmp_path, queue):
    queue.rule(ends=0)
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 0
    (folder,) = study.workspace.list_run_dirs()
    with folder.events_file("attempt").open("a") as lines:
        lines.write('{"schema":1,"event":"start')
    folder.write_event("attempt", "started")
    assert study.jobs("status") == 0


def test_a_damaged_submission_file_stops_nothing_and_its_runs_can_be_sent_again(tmp_path, queue, capsys):
    queue.rule(loses_answers=True, unreachable=["squeue"])
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 1
    (file,) = submission.find_submissions_folder(study.workspace).glob("*.json")
    file.write_text(file.read_text()[:60])
    queue.rule(ends=0)
    study.matrix.write_text(study.matrix.read_text().replace("[0, 1]", "[0, 1, 2]"))
    capsys.readouterr()
    assert study.jobs("submit") == 1
    said = capsys.readouterr()
    assert "1 run(s) submitted, 2 skipped" in said.out
    first, second = (run.run_id for run in study.workspace.list_run_dirs() if run.read_events()[-1].event == "submitting")
    assert f"{file}: is not a submission of this version: " in said.err
    assert f"It is not known whether Slurm accepted the job {file.stem}" in said.err
    assert f"these runs are set aside: {first} {second}." in said.err
    for words in (("status",), ("retry",), ("cancel", first, second)):
        assert study.jobs(*words) == 1
        assert f"{file}: " in capsys.readouterr().err
    assert study.jobs("status") == 1
    why = "is not a submission of this version: Input data was truncated"
    assert f"{file}: {why}. No run waits for this submission: remove the file." in capsys.readouterr().err
    file.unlink()
    assert study.jobs("retry", "--only", "cancelled") == 0
    assert "2 run(s) submitted" in capsys.readouterr().out


def test_a_submission_whose_run_is_gone_is_given_up(tmp_path, queue, capsys):
    queue.rule(unreachable=["sbatch", "squeue"])
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 1
    (folder,) = study.workspace.list_run_dirs()
    shutil.move(folder.path, tmp_path / "elsewhere")
    queue.rule()
    assert study.jobs("submit", "--wait") == 0
    assert "the folders of its runs are gone; the submission is dropped" in capsys.readouterr().err
    assert len([words for words in queue.calls("sbatch") if words[-1].startswith(str(folder.path))]) == 2


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_the_queue_of_this_machine_continues_with_the_undamaged_runs(tmp_path, damage):
    study = Study(tmp_path, 2)
    (study.workspace.path / "cluster.yaml").write_text("schema: 1\nname: c\nprovider: local\n")
    script = study.workspace.own_templates / local.SCHEDULER.TEMPLATE
    script.write_text("touch {{ folder | quote }}/begun\nexit 3\n")
    assert study.jobs("render", "--matrix", str(study.matrix)) == 0
    one, other = study.workspace.list_run_dirs()
    for folder in (one, other):
        folder.write_event("controller", "submitted", scheduler="local")
    damage(one)
    assert local.SCHEDULER.work_as_runner(Workspace(study.workspace.path)) == 0
    assert (other.path / "begun").exists()
    assert not (one.path / "begun").exists()
    assert [now.state for now in study.statuses()] == ["unknown", "failed"]
    assert study.statuses()[0].why.startswith("set aside: ")


def test_render_leaves_the_folder_of_a_queued_run_whose_records_are_damaged(tmp_path, queue, capsys):
    queue.rule(ends=0)
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 0
    one, other = study.workspace.list_run_dirs()
    events = one.events_file("controller")
    events.write_bytes(events.read_bytes().replace(b'"event":"subm', b'"event":1,"subm'))
    left = one.path / "left"
    left.touch()
    capsys.readouterr()
    assert study.jobs("render", "--matrix", str(study.matrix)) == 1
    said = capsys.readouterr()
    assert "0 run(s) rendered" in said.out
    assert f"{one.run_id}: set aside: {events}:2: is not an event of this version" in said.err
    assert left.exists()
    assert other.judge().state == "pending"


def test_render_creates_a_missing_run_behind_a_submitted_run(tmp_path, queue):
    """`jobs render` skips runs that were submitted, and renders the missing run after them."""
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 0
    _, other = sorted(study.workspace.list_run_dirs(), key=lambda run: run.read_run().cell.seed)
    shutil.rmtree(other.path)
    assert study.jobs("render", "--matrix", str(study.matrix)) == 0
    assert other.path.exists()


@pytest.mark.parametrize("verb", ["render", "submit"])
def test_a_rendered_run_with_a_claim_is_not_changed(tmp_path, queue, capsys, verb):
    study = Study(tmp_path, 2)
    assert study.jobs("render", "--matrix", str(study.matrix)) == 0
    one, other = sorted(study.workspace.list_run_dirs(), key=lambda run: run.read_run().cell.seed)
    one.claim.mkdir()
    shutil.rmtree(other.path)
    more = ["--matrix", str(study.matrix)] if verb == "render" else []
    assert study.jobs(verb, *more) == 1
    assert other.path.exists()  # the other run is rendered again
    assert f"{one.run_id}: set aside: {one.claim}: the run is claimed, but" in capsys.readouterr().err
    assert one.claim.exists()
    assert "submitted" not in {event.event for event in one.read_events()}


def test_a_dry_run_names_the_runs_that_are_skipped(tmp_path, queue, capsys):
    queue.rule(ends=0)
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 0
    folder = study.workspace.list_run_dirs()[0]
    words = cut_run(folder)
    capsys.readouterr()
    assert study.jobs("submit", "--dry-run") == 1
    is_named(capsys.readouterr(), folder, words)


def test_a_dry_run_refuses_runs_of_another_cluster(tmp_path, capsys):
    study = Study(tmp_path, 1)
    cluster_file = study.workspace.path / "cluster.yaml"
    cluster_file.write_text("schema: 1\nname: c\nprovider: local\n")
    assert study.jobs("render", "--matrix", str(study.matrix)) == 0
    cluster_file.write_text("schema: 1\nname: other\nprovider: local\n")
    assert study.jobs("submit", "--dry-run") == 2
    assert "was run on cluster 'c', not 'other'" in capsys.readouterr().err


def test_retry_refuses_an_unsent_run_of_another_cluster(tmp_path, queue, capsys):
    study = Study(tmp_path, 1)
    assert study.jobs("render", "--matrix", str(study.matrix)) == 0
    (folder,) = study.workspace.list_run_dirs()
    folder.write_event("controller", "refused", why="Slurm had no room for it")
    cluster_file = study.workspace.path / "cluster.yaml"
    cluster_file.write_text(cluster_file.read_text().replace("name: c\n", "name: other\n"))
    assert study.jobs("retry") == 2
    assert "was run on cluster 'c', not 'other'" in capsys.readouterr().err
    assert queue.calls("sbatch") == []


def test_a_waiting_command_skips_runs_of_a_damaged_submission_file(tmp_path, queue, capsys, monkeypatch):
    queue.rule(loses_answers=True, unreachable=["squeue"])
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 1
    (file,) = submission.find_submissions_folder(study.workspace).glob("*.json")
    file.write_text(file.read_text()[:60])
    queue.rule(ends=0)
    monkeypatch.setattr(
        "jobs.verbs.watch._wait_to_poll", lambda *_, **__: pytest.fail("it waits for runs of which nobody hears")
    )
    capsys.readouterr()
    assert study.jobs("submit", "--wait") == 1
    assert f"unknown: {file}: is not a submission of this version" in capsys.readouterr().out
    assert study.jobs("cancel", "--all") == 1
    assert study.states() == ["cancelled", "cancelled"]


def test_a_command_with_the_exit_code_of_changed_packages_holds_no_other_run(tmp_path):
    study = Study(tmp_path, 2)
    (study.workspace.path / "cluster.yaml").write_text("schema: 1\nname: c\nprovider: local\n")
    script = study.workspace.own_templates / local.SCHEDULER.TEMPLATE
    script.write_text("touch {{ folder | quote }}/begun\nexit 76\n")
    assert study.jobs("render", "--matrix", str(study.matrix)) == 0
    for folder in study.workspace.list_run_dirs():
        folder.write_event("controller", "submitted", scheduler="local")
    assert local.SCHEDULER.work_as_runner(Workspace(study.workspace.path)) == 0
    assert all((folder.path / "begun").exists() for folder in study.workspace.list_run_dirs())
    assert study.states() == ["failed", "failed"]


def test_the_runs_of_a_large_damaged_submission_are_named_on_uncut_lines(tmp_path, monkeypatch):
    """Output lines are cut at LONGEST_LINE characters, so the message about many damaged runs has several lines.

    The command in the message must not be cut, because users copy it.
    """
    workspace = Workspace(tmp_path)
    runs = [f"gpt2-tiny-ddp-2gpus-batch8-seed{number}-0123456789abcdef-r1" for number in range(130)]
    for run in runs:
        (workspace.runs / run).mkdir(parents=True)
        RunDir(workspace.runs / run).write_event("controller", "submitting", sync=False, token="big.0123456789")
    submission.find_submissions_folder(workspace).mkdir(parents=True)
    (submission.find_submissions_folder(workspace) / "big.0123456789.json").write_text("{")
    (said,) = submission.describe_damaged(workspace)
    assert printable.clean_text(said) == said
    first, *commands = said.splitlines()
    assert f"so its 130 runs are set aside: {min(runs)} and others." in first
    assert [name for line in commands for name in line.removeprefix("  jobs cancel ").split()] == sorted(runs)
