"""`collect watch`: which records it reads, what its page shows about runs, and which requests its server answers."""

import contextlib
import json
import os
import socket

import pytest
import support_collect as support
import support_watch
from support_e2e import HANG_S
from support_watch import asked, running, served, step

from collect.cli import main
from collect.loading.loaded_run import LoadedRun
from collect.sources import followed_records, steps, world_steps
from collect.sources.followed_records import FollowedRecords
from collect.watch.curve import MOST_POINTS, LiveCurve
from collect.watch.live_page import MOST_DRAWN_RUNS, LivePage
from collect.watch.queue import Queue, QueuedRun, estimate_remaining_s
from collect.watch.run_series import GPU_BUSY, LOSS, NETWORK_SENT, STEP_TIME, RunSeries
from collect.watch.server import open_below
from shardlab.runs import suspension
from shardlab.runs.record import TRACKER_ENDED, GpuSample, LineWriter, Sample, StepRecord
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """Yields (a workspace with runs in several states, one of which is running; the address of its page)."""
    workspace = support.matrix(tmp_path_factory.mktemp("matrix"))
    running(workspace, steps=50)
    with served(workspace) as url:
        yield workspace, url


def shown(workspace):
    return json.loads(LivePage(workspace).refresh_document()[0])


def series(folder):
    return RunSeries(folder, folder.read_run(), 0.0, [])


def test_only_what_was_appended_is_read(workspace):
    folder = running(workspace, done=3)
    path = folder.steps_file(0)
    followed = FollowedRecords(str(path), StepRecord)
    assert [record.step for record in followed.read_new()] == [1, 2, 1, 2, 3]
    assert followed.read_new() == []
    size = path.stat().st_size
    with path.open("r+b") as handle:  # damages records that were already read
        handle.write(b"x" * (size - 1))
    step(folder, 4, 1.0, rank=0)
    assert [record.step for record in followed.read_new()] == [4]


def test_an_unfinished_line_is_read_once_complete_and_a_damaged_line_never(workspace):
    folder = running(workspace, done=1)
    path = folder.steps_file(0)
    followed = FollowedRecords(str(path), StepRecord)
    followed.read_new()
    line = path.read_bytes().splitlines()[-1]
    with path.open("ab") as handle:
        handle.write(b"no record\n" + line[:20])
    assert followed.read_new() == []
    with path.open("ab") as handle:
        handle.write(line[20:] + b"\n")
    assert [record.step for record in followed.read_new()] == [1]


@pytest.mark.parametrize("content", [b"", b"another file, which is longer\n" * 200], ids=["shorter", "another"])
def test_a_file_that_was_replaced_is_noticed(workspace, content):
    folder = running(workspace, done=3)
    followed = FollowedRecords(str(folder.steps_file(0)), StepRecord)
    followed.read_new()
    support_watch.replaced(folder.steps_file(0), content)
    assert followed.read_new() is None


def test_a_link_and_a_pipe_are_not_read(workspace, tmp_path):
    folder = running(workspace, done=1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(folder.steps_file(0))
    for name in ("pipe", "link", "absent"):
        assert FollowedRecords(str(tmp_path / name), StepRecord).read_new() == []
    folder.steps_file(0).parent.rename(tmp_path / "elsewhere")
    folder.steps_file(0).parent.symlink_to(tmp_path / "elsewhere")
    found = series(folder)
    found.read_new_records()
    assert not found.curves[LOSS]


def test_loss_and_step_time_are_those_of_the_report(workspace):
    folder = running(workspace, done=20)
    found = series(folder)
    found.read_new_records()
    world = steps.join_world_steps(LoadedRun.read(folder).timed_steps)
    numbers, losses = found.curves[LOSS][""].get_points()
    assert numbers == world["step"].to_list()
    assert losses == pytest.approx(world["loss"].to_list())
    assert found.curves[STEP_TIME][""].get_points()[1] == pytest.approx(world["step_ms"].to_list())


def test_a_long_run_is_read_in_parts_and_whole(workspace, monkeypatch):
    """A part of each rank's records is read in turn. A step is kept until the records of all ranks have been read up to it."""
    monkeypatch.setattr(followed_records, "MOST_BYTES_PER_READ", 2000)
    monkeypatch.setattr(world_steps, "MOST_INCOMPLETE_STEPS", 50)
    found = series(running(workspace, steps=400, done=200))
    assert found.read_new_records()
    numbers = found.curves[LOSS][""].get_points()[0]
    assert (len(numbers), numbers[-1]) == (200, 200)


def test_a_step_counts_when_all_ranks_have_recorded_it(workspace):
    folder = running(workspace, done=2)
    found = series(folder)
    found.read_new_records()
    step(folder, 3, 1.5, rank=1)
    assert found.read_new_records()
    assert found.curves[LOSS][""].get_points()[0] == [1, 2]
    step(folder, 3, 0.5, rank=0)
    found.read_new_records()
    assert found.curves[LOSS][""].get_points()[0] == [1, 2, 3]
    assert found.curves[LOSS][""].get_points()[1][-1] == 1.0
    assert not found.read_new_records()


def test_a_run_whose_records_were_replaced_begins_again(workspace):
    """A run that resumes from a checkpoint replaces the records of later steps. They are then read from the start."""
    folder = running(workspace, done=9)
    found = series(folder)
    found.read_new_records()
    for rank in (0, 1):
        path = folder.steps_file(rank)
        support_watch.replaced(path, b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    assert found.read_new_records()
    assert found.curves[LOSS][""].get_points()[0] == [1, 2, 3, 4]
    assert found.progress.last_step == 4


def test_telemetry_is_grouped_by_host_and_gpu(workspace):
    folder = running(workspace, gpu=True)
    found = series(folder)
    found.read_new_records()
    assert list(found.curves[GPU_BUSY]) == [f"{support.HOST} GPU-0"]
    assert max(found.curves[NETWORK_SENT][support.HOST].get_points()[1]) == pytest.approx(2**20 / 10**6, rel=1e-4)


def test_a_suspension_is_in_no_step_time(workspace):
    folder = running(workspace, done=20)
    run = QueuedRun(folder)
    run.refresh()
    run.update_series()
    every = len(run.series.curves[STEP_TIME][""].get_points()[0])
    support.event(folder, suspension.SUSPENDED_EVENT, 2.0, seconds=0.1)
    run.refresh()
    run.update_series()
    assert len(run.series.curves[STEP_TIME][""].get_points()[0]) < every
    assert len(run.series.curves[LOSS][""].get_points()[0]) == every


@pytest.mark.parametrize("count", [5, 2 * MOST_POINTS, 5000])
def test_a_curve_has_few_points_and_the_mean_of_all_values(count):
    curve = LiveCurve()
    for number in range(count):
        curve.add(number, 2.0 * number)
    x, means = curve.get_points()
    assert len(x) <= 2 * MOST_POINTS
    assert x[-1] == count - 1
    assert x == sorted(x)
    edges = [-1, *x]
    for first, last, mean in zip(edges, x, means):
        assert mean == pytest.approx(first + 1 + last)


def test_a_curve_is_not_drawn_through_a_gap():
    curve = LiveCurve()
    for at in (0, 1, 2, 3, 10, 11):
        curve.add(at, 1.0)
    assert curve.get_points_with_gaps() == ([0, 1, 2, 3, 6.5, 10, 11], [1.0, 1.0, 1.0, 1.0, None, 1.0, 1.0])


def test_a_state_is_judged_again_only_if_its_files_changed(workspace):
    """The queue reads the events of a run again only if the run's files have changed."""
    folder = running(workspace)
    queue = Queue(workspace)
    (run,) = queue.refresh()
    assert run.verdict.state == "running"
    events = run.events
    (run,) = queue.refresh()
    assert run.events is events
    support.event(folder, "exited", 9, code=1)
    (run,) = queue.refresh()
    assert run.verdict.state == "failed"


def test_the_queue_shows_last_attempts_with_failures_first_and_then_running_runs(matrix):
    """The queue on the page lists the last attempt of each repeat; unexpected ends are at the top, then running runs."""
    workspace, _ = matrix
    runs = Queue(workspace).refresh()
    ids = [run.run_id for run in runs]
    assert [run for run in ids if run.endswith("-a2")]
    assert not [run for run in ids if f"{run}-a2" in ids]
    states = [run.verdict.state for run in runs]
    failure_count = sum(run.has_failed for run in runs)
    assert all(run.has_failed for run in runs[:failure_count])
    assert (failure_count > 0, states[failure_count]) == (True, "running")
    assert {run.verdict.state for run in runs} == {"running", "completed", "failed", "oom", "timeout"}


def test_figures_of_few_runs_are_drawn_and_the_others_are_counted(workspace):
    for strategy in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
        running(workspace, strategy)
    found = shown(workspace)
    assert len(found["runs"]) == MOST_DRAWN_RUNS
    assert found["not_drawn"] == 1
    assert found["queue"].count("20 of 100") == 5


def test_the_page_says_how_many_runs_ended_and_failed_and_when_all_end(workspace):
    folder = running(workspace)
    assert "left for all" not in shown(workspace)["overview"]
    support.completed(workspace, support.cell("fsdp2", 2))
    support.failed(workspace, support.cell("zero1", 2), 1, "broken", steps=1)
    found = shown(workspace)
    texts = ("<b>2</b> of 3 runs ended", '<li class="failed"><b>1</b> failed</li>', "left for all")
    assert [text for text in texts if text not in found["overview"]] == []
    runs = Queue(workspace).refresh()
    durations = [run.last_event_s - run.began_s for run in runs if run.run_id != folder.run_id]
    assert estimate_remaining_s(runs) == pytest.approx(sum(durations) / 2 / 2)
    assert "tokens/s" in found["queue"]


def test_the_title_of_the_page_is_the_name_of_the_matrix(matrix, workspace):
    assert b"<h1>quickstart</h1>" in LivePage(matrix[0]).render_html()
    assert f"<h1>{workspace.path.name}</h1>".encode() in LivePage(workspace).render_html()


def test_a_played_gpu_is_marked_on_the_live_page(workspace):
    folder = running(workspace)
    with LineWriter(folder.samples_file("h")) as lines:
        gpus = [GpuSample(uuid="GPU-1", utilization_pct=1.0, played=True), GpuSample(uuid="GPU-2", utilization_pct=1.0)]
        lines.write_record(Sample(schema=1, t_s=1.0, wall_s=1.0, host="h", boot_id="boot", gpus=gpus))
    found = series(folder)
    found.read_new_records()
    assert list(found.curves[GPU_BUSY])[-2:] == ["h GPU-1 (played)", "h GPU-2"]


def test_the_last_run_is_shown_if_no_run_is_running(workspace):
    assert shown(workspace)["runs"] == []
    support.completed(workspace, support.cell())
    found = shown(workspace)
    assert (len(found["runs"]), found["running"]) == (1, False)


def test_a_tracker_that_ended_early_is_shown_in_the_queue_and_at_the_run(workspace):
    folder = running(workspace)
    assert "tracker" not in json.dumps(shown(workspace))
    support.event(folder, TRACKER_ENDED, 1, code=1)
    found = shown(workspace)
    sentence = "the tracker ended early (exit code 1): see log/tracker.log"
    assert sentence in found["queue"]
    assert sentence in found["runs"][0]["head"]


def test_a_run_that_cannot_be_read_is_unknown_and_stops_nothing(workspace):
    running(workspace)
    support.prepare(workspace, support.cell()).run_json.write_text("{")
    found = shown(workspace)
    assert "is not a run of this version" in found["queue"]
    assert len(found["runs"]) == 1


def test_hostile_texts_are_escaped(workspace):
    folder = running(workspace)
    support.failed(workspace, support.cell(), 1, support_watch.HOSTILE)
    folder.samples_file(support.HOST).rename(folder.samples_file("<b>a host"))
    document = LivePage(workspace).refresh_document()[0].decode()
    assert "\x1b" not in document
    assert "<img" not in document
    assert "\u202e" not in document
    found = json.loads(document)
    assert "&lt;img" in found["queue"]
    names = [line["name"] for one in found["runs"] for figure in one["figures"] for line in figure["data"]]
    assert any("&lt;b&gt;a host" in name for name in names)
    assert not any("<" in name for name in names)


def test_the_token_is_needed_and_new_in_each_start(matrix, workspace):
    _, url = matrix
    token = url.rstrip("/").rpartition("/")[2]
    assert len(token) >= 32
    for path in ("/", f"/{token}", f"/{token[:-1]}/", f"/{token}x/", "/wrong/data", "/../", "/é/"):
        status, _, body = asked(url, path.encode("latin-1").decode("latin-1") if path.isascii() else "/%C3%A9/")
        assert status == 404
        assert token.encode() not in body
    assert asked(url)[0] == 200
    with served(workspace) as other:
        assert not other.endswith(f"/{token}/")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{}", 200),
        ("localhost:{}", 200),
        ("localhost:9000", 200),
        ("localhost", 200),
        ("example.org:{}", 421),
        ("127.0.0.1.example.org", 421),
        ("localhost:x", 421),
        ("", 421),
    ],
)
def test_a_request_for_another_host_name_is_refused(matrix, host, status):
    _, url = matrix
    assert asked(url, Host=host.format(url.split(":")[2].split("/")[0]))[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_the_watch_server_refuses_methods_that_write(matrix, method):
    _, url = matrix
    status, headers, _ = asked(url, "data", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["", "script.js", "data", "report/index.html", "report/summary.json", "runs/", "absent"])
def test_every_answer_has_a_strict_policy_and_a_head_without_a_body(matrix, path):
    """Every answer has security headers, and a HEAD request gets no body."""
    _, url = matrix
    asked(url, "report/")
    status, headers, body = asked(url, path)
    assert status == (404 if path == "absent" else 200)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    assert "*" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert len(body) == int(headers["Content-Length"])
    head = asked(url, path, "HEAD")
    assert (head[0], head[2]) == (status, b"")


def test_the_watch_server_answers_304_if_nothing_is_new(workspace):
    page = LivePage(workspace)
    running(workspace)
    with served(workspace) as url:
        status, headers, body = asked(url, "data")
        assert (status, json.loads(body)["running"]) == (200, True)
        status, _, body = asked(url, "data", **{"If-None-Match": headers["ETag"]})
        assert (status, body) == (304, b"")
    assert page.refresh_document() == page.refresh_document()


def test_the_report_is_drawn_and_nothing_in_the_workspace_changes(tmp_path):
    workspace = support.matrix(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with served(workspace) as url:
        status, headers, body = asked(url, "report/index.html")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        link = f"../runs/{workspace.list_run_ids()[0]}/"
        assert f'href="{link}"'.encode() in body
        assert asked(url, link.removeprefix("../"))[0] == 200
        assert asked(url, "report/tables/summary.csv")[0] == 200
        assert asked(url, "report/../../etc/passwd")[0] == 404
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_report_that_cannot_be_drawn_says_why(workspace):
    with served(workspace) as url:
        status, _, body = asked(url, "report/")
        assert status == 409
        assert b"no matrix was submitted here" in body


def test_files_of_runs_are_read_only_as_text_and_no_path_leads_out(matrix, tmp_path):
    workspace, url = matrix
    run = workspace.list_run_ids()[0]
    status, headers, body = asked(url, f"runs/{run}/run.json")
    assert (status, body) == (200, (workspace.runs / run / "run.json").read_bytes())
    (workspace.runs / run / "page.html").write_text("<script>alert(1)</script>")
    status, headers, _ = asked(url, f"runs/{run}/page.html")
    assert headers["Content-Type"].startswith("text/plain")
    assert "sandbox" in headers["Content-Security-Policy"]
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (workspace.runs / run / "link").symlink_to(secret)
    (workspace.runs / run / "folder").symlink_to(tmp_path)
    for path in ("link", "folder/", "folder/secret", "../../../secret", "..%2f..%2fsecret", "%00", "absent"):
        status, _, body = asked(url, f"runs/{run}/{path}")
        assert status in (403, 404)
        assert b"secret</" not in body
    (workspace.runs / run / "link").unlink()
    (workspace.runs / run / "folder").unlink()
    assert isinstance(open_below(workspace.runs, [run]), list)


def test_a_port_that_is_taken_or_invalid_is_refused(workspace, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", "--workspace", str(workspace.path), "--port", str(port)]) == 2
    assert f"--port {port}: 127.0.0.1 cannot be used: Address already in use" in capsys.readouterr().err
    assert main(["watch", "--workspace", str(workspace.path), "--port", "70000"]) == 2
    assert main(["watch", "--workspace", str(workspace.path / "absent")]) == 2


def test_the_watch_server_listens_only_on_this_machine(matrix):
    _, url = matrix
    port = int(url.split(":")[2].split("/")[0])
    name = "127.0.0.2"  # not 127.0.0.1: only a server on all addresses would answer
    with contextlib.suppress(socket.gaierror):  # the name of this machine may have no address
        address = socket.gethostbyname(socket.gethostname())
        name = name if address.startswith("127.") else address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((name, port), timeout=HANG_S).close()
