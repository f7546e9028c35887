"""Records that another person or a hostile node wrote: their texts reach no script, no path and no command, and their numbers
stop no command. A job of Slurm is used only under our name, and a signal goes only to the process of the run."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import support_collect as support
from support_queue import Queue, Study

import collect.cli
import templates
from jobs import cli, run_queue
from jobs.schedulers import slurm
from jobs.slurm import query, submission
from shardlab import json_schema, record_types, run_guard
from shardlab.cluster.cluster import Cluster
from shardlab.hardware import host
from shardlab.runs.record import Event, read_records
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir

LINE = "n1\nid > /tmp/PWNED\n#"


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    monkeypatch.setattr(slurm, "ENDED_S", 0.0)
    monkeypatch.setattr(submission, "SEARCH_INTERVAL_S", 0.0)
    return Queue(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def study(tmp_path, queue):
    """Two runs that wait in Slurm as the tasks 1_0 and 1_1 of an array."""
    queue.rule(ends=0)
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 0
    return study


def change(path, **values):
    """Change keys of the last record of a file."""
    text = path.read_text()
    *before, last = text.splitlines() if path.suffix == ".jsonl" else [text]
    document = json.loads(last)
    for key, value in values.items():
        place = document["data"] if key in document.get("data", {}) else document
        place[key] = value
    path.write_text("".join(f"{line}\n" for line in [*before, json.dumps(document)]))


def end(queue, folder, reason, **values):
    """The run has ended, and so has its job."""
    state = queue.state()
    (queue.folder / "queue.json").write_text(json.dumps({**state, "tasks": []}))
    event = {"schema": 1, "event": "exited", "writer": "attempt", "wall_s": time.time(), "host": "work1"} | values
    folder.claim.mkdir(exist_ok=True)
    with folder.events_file("attempt").open("a") as lines:
        lines.write(json.dumps(event | {"data": {"code": 1, "reason": reason}}) + "\n")


def set_aside(said, folder):
    return [line for line in said.err.splitlines() if line.startswith(f"{folder.run_id}: set aside: ")]


def written(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("key", "value"), [("avoid", [LINE]), ("matrix", "../../../elsewhere/x"), ("resume", ["../../x"])])
def test_a_text_of_run_json_reaches_no_script_and_no_path(tmp_path, queue, study, capsys, key, value):
    bad, other = study.workspace.list_run_dirs()
    for folder in (bad, other):
        end(queue, folder, "failed")
    change(bad.run_json, **{key: value})
    before = written(tmp_path) - written(study.workspace.path)
    assert study.jobs("retry", "--only", "failed") == 1
    assert len(set_aside(capsys.readouterr(), bad)) == 1
    assert [call[-1] for call in queue.calls("sbatch")[1:]] == [
        str(study.workspace.find_run_dir(f"{other.run_id}-a2").path / "job.sbatch")
    ]
    assert all("PWNED" not in path.read_text() for path in study.workspace.path.rglob("*.sbatch"))
    assert {path for path in written(tmp_path) - before if path.is_relative_to(tmp_path / "elsewhere")} == set()


def test_a_host_name_of_an_event_reaches_no_script(queue, study, capsys):
    bad, other = study.workspace.list_run_dirs()
    end(queue, bad, "node_fail", host=LINE)
    end(queue, other, "node_fail", host="work1")
    assert study.jobs("retry", "--only", "node_fail") == 1
    said = capsys.readouterr()
    assert "events.attempt.jsonl:1: is not an event of this version" in set_aside(said, bad)[0]
    assert len(queue.calls("sbatch")) == 2
    assert all("PWNED" not in path.read_text() for path in study.workspace.path.rglob("*.sbatch"))


def test_a_run_json_of_another_run_is_set_aside(study, capsys):
    bad, other = study.workspace.list_run_dirs()
    bad.run_json.write_bytes(other.run_json.read_bytes())
    assert study.jobs("status") == 1
    said = capsys.readouterr()
    assert f"describes the run {other.run_id}, not the run of its folder" in set_aside(said, bad)[0]


def test_a_job_number_that_is_an_option_cancels_nothing(queue, study, capsys):
    bad, other = study.workspace.list_run_dirs()
    change(bad.events_file("controller"), job="--me")
    assert study.jobs("cancel", "--all") == 1
    assert len(set_aside(capsys.readouterr(), bad)) == 1
    assert queue.calls("scancel") == [["1_1"]]
    assert other.judge().state == "cancelled"


def give_number_again(queue, number, name):
    """Slurm lost its state and gives a number to another job, as after a crash of its controller."""
    state = queue.state()
    state["tasks"] = [[number, name, *task[2:]] if task[0] == number else task for task in state["tasks"]]
    (queue.folder / "queue.json").write_text(json.dumps(state))


def test_a_job_with_the_number_and_another_name_is_not_cancelled(queue, study):
    give_number_again(queue, "1_0", "somebodys-training")
    assert study.jobs("cancel", "--all") == 0
    assert queue.calls("scancel") == [["1_1"]]
    assert [task[:2] for task in queue.state()["tasks"]] == [["1_0", "somebodys-training"]]
    assert study.states() == ["cancelled", "cancelled"]


def test_only_jobs_with_our_name_are_held_released_and_waited_for(queue, study):
    give_number_again(queue, "1_0", "somebodys-training")
    (token,) = {sent.token for sent in submission.list_submissions(study.workspace)}
    assert query.select_own_jobs({"1_0": token, "1_1": token}) == [(None, ["1_1"])]
    slurm.SCHEDULER.hold_jobs({"1_0": token, "1_1": token})
    slurm.SCHEDULER.release_jobs({"1_0": token, "1_1": token})
    changed = [call for call in queue.calls("scontrol") if call[0] in ("hold", "release")]
    assert changed == [["hold", "1_1"], ["release", "1_1"]]
    run_ids = [folder.run_id for folder in study.workspace.list_run_dirs()]
    assert slurm._find_unended_jobs(study.workspace, run_ids, None) == ["1_1"]


def test_no_job_is_cancelled_while_slurm_does_not_answer(queue, study, capsys):
    queue.rule(ends=0, unreachable=["squeue", "sacct"])
    assert study.jobs("cancel", "--all") == 1
    assert queue.calls("scancel") == []
    assert "The runs are marked as cancelled in the workspace" in capsys.readouterr().err
    queue.rule(ends=0)
    study.jobs("status")
    assert sorted(number for call in queue.calls("scancel") for number in call) == ["1_0", "1_1"]


SLEEPER = "import time; print(flush=True); time.sleep(600)"


def started(folder, *words, **environment):
    """A process of this user, which the records of the run name as its supervisor."""
    argv = [sys.executable, "-c", SLEEPER, *words]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment, cwd="/")
    process.stdout.readline()
    data = {"pid": process.pid, "created": psutil.Process(process.pid).create_time(), "boot_id": host.read_boot_id()}
    folder.write_event("attempt", "started", **data)
    return process


def test_a_signal_goes_only_to_a_process_that_names_the_folder_of_the_run(tmp_path):
    workspace = support.Workspace(tmp_path / "w")
    folders = [support.prepare(workspace, support.cell(), repeat) for repeat in (1, 2, 3)]
    link = tmp_path / "link"
    link.symlink_to(workspace.path)
    processes = [
        started(folders[0], PWD=str(folders[1].path)),  # a process of another run
        started(folders[1], PWD=str(link / "runs" / folders[1].run_id)),  # the shell found the folder by another path
        started(folders[2], str(folders[2].path)),
    ]
    try:
        for folder in folders:
            folder.claim.mkdir()
            run_queue._cancel_run(folder, folder.judge())
        assert [process.wait() for process in processes[1:]] == [-15, -15]
        assert processes[0].poll() is None
        assert [event.event for event in folders[0].read_events()][-1] == "cancel_requested"  # a supervisor would read it
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


STEP = {"schema": 1, "step": 1, "t_s": 1.0, "wall_s": 1.8e9, "units": 1, "step_ms": 1.0}
SAMPLE = {"schema": 1, "t_s": 1.0, "wall_s": 1.8e9, "host": "node0", "boot_id": "b"}
EVENT = {"schema": 1, "event": "e", "writer": "w", "wall_s": 1.8e9, "host": "node0"}
NUMBERS = [
    ("events.other.jsonl", {**EVENT, "wall_s": 1795702032092}),
    ("events.other.jsonl", {**EVENT, "event": "resumed", "data": {"step": 10**40}}),
    ("events.other.jsonl", {**EVENT, "data": {"anything": [{"deeper": 10**40}]}}),
    ("events.other.jsonl", {**EVENT, "event": "started", "data": dict.fromkeys(("pid", "created", "boot_id"))}),
    ("events.other.jsonl", {**EVENT, "event": "stood_still", "data": {"seconds": 1.0, "ended_s": None}}),
    ("steps/rank-00000.jsonl", {**STEP, "units": 2**63}),
    ("steps/rank-00000.jsonl", {**STEP, "rss_bytes": 10**40}),
    ("steps/rank-00000.jsonl", {**STEP, "loss": 1e300}),
    ("steps/rank-00000.jsonl", {**STEP, "backward_ms": 1e300}),
    ("samples/node0.jsonl", {**SAMPLE, "nics": [{"name": "e", "kind": "virtual", "tx_errors": 10**40}]}),
]


@pytest.mark.parametrize(("name", "document"), NUMBERS)
def test_a_number_outside_its_bounds_is_a_damaged_line_of_one_run(tmp_path, capsys, name, document):
    workspace = support.Workspace(tmp_path / "w")
    support.keep(workspace, [support.cell()], repeats=2)
    bad, other = (support.completed(workspace, support.cell(), repeat) for repeat in (1, 2))
    with (bad.path / name).open("a") as lines:
        lines.write(json.dumps(document) + "\n")
    where = ["--workspace", str(workspace.path)]
    assert cli.main(["status", *where]) == int(name.startswith("events"))
    assert other.run_id in capsys.readouterr().out
    assert collect.cli.main(["summarize", *where]) in (0, 1)
    said = capsys.readouterr()
    assert bad.run_id in said.out + said.err
    assert f"{name}: 1 corrupt line" in said.out + said.err or f"{name}:1: is not an event" in said.out + said.err


@pytest.mark.parametrize("key", ["steps", "seq_len", "global_batch_size"])
def test_a_number_of_the_expansion_outside_its_bounds_is_reported(tmp_path, capsys, key):
    workspace = support.Workspace(tmp_path / "w")
    support.keep(workspace, [support.cell()])
    path = workspace.shardlab_folder / "matrices" / "quickstart.json"
    document = json.loads(path.read_bytes())
    document["cells"][0]["cell"][key] = 2**63
    path.write_text(json.dumps(document))
    assert collect.cli.main(["summarize", "--workspace", str(workspace.path)]) == 2
    assert f"$.cells[0].cell.{key}" in capsys.readouterr().err.replace("[...]", "[0]")


def test_an_unexpected_exception_about_a_run_sets_this_run_aside(study, monkeypatch, capsys):
    bad, other = study.workspace.list_run_dirs()
    judge = RunDir.judge_with_result

    def fail(folder, *arguments):
        return judge(folder, *arguments) if folder.run_id != bad.run_id else 1 / 0

    monkeypatch.setattr(RunDir, "judge_with_result", fail)
    with pytest.raises(ZeroDivisionError):  # a defect keeps its traceback in our tests
        study.jobs("status")
    monkeypatch.setattr(run_guard, "UNEXPECTED", (Exception,))
    assert study.jobs("status") == 1
    said = capsys.readouterr()
    assert "(ZeroDivisionError: division by zero); please report this defect" in set_aside(said, bad)[0]
    assert other.run_id in said.out


@pytest.mark.parametrize("option", [LINE, "a\x1b[2J", "", "a\u2028b"])
@pytest.mark.parametrize("template", [slurm.SCHEDULER.TEMPLATE, *slurm.SHARED_TEMPLATES.values()])
def test_a_template_refuses_an_option_that_is_not_one_printable_line(template, option):
    with pytest.raises(templates.TemplateFault, match="one line of printable characters"):
        templates.render(template, options=["--time=1", option])


def test_a_token_is_the_name_of_a_file():
    for name in ("m", "../../x", "-rf", "a\nb", "a/b", "x" * 200):
        token = submission.make_token(name)
        assert re.search(record_types.TOKEN_PATTERN, token), (name, token)


def patterns(schema):
    if isinstance(schema, dict):
        yield from (text for key, text in schema.items() if key == "pattern" and isinstance(text, str))
        schema = list(schema.values())
    if isinstance(schema, list):
        for entry in schema:
            yield from patterns(entry)


def test_a_pattern_of_a_type_allows_no_line_break_at_the_end():
    """msgspec searches, and `$` also matches before a line break at the end. Editors know only $, so the schemas have it."""
    kinds = (Run, Event, Cluster, submission.Submission)
    _, components = msgspec.json.schema_components(kinds)
    found = set(patterns(components))
    assert len(found) > 20
    assert all(text.endswith("\\Z") or text in (r"^/", r"^--(output|array|dependency)=") for text in found), found
    assert not any("\\Z" in text for schema in json_schema.make_schemas().values() for text in patterns(schema))
    root = Path(record_types.__file__).parents[1]
    sources = [
        path for name in ("shardlab", "provision", "jobs", "trainers", "collect") for path in (root / name).rglob("*.py")
    ]
    assert [path for path in sources if re.search(r"""pattern=r?f?["'][^"'\n]*\$["']""", path.read_text())] == []


def test_a_corrupt_line_is_counted_and_the_others_are_read(tmp_path):
    path = tmp_path / "events.x.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [EVENT, {**EVENT, "host": "a\n"}, EVENT]))
    lines = read_records(path, Event)
    assert (len(lines.records), lines.corrupt) == (2, 1)
