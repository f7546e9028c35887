"""A site whose Slurm has several clusters: commands about a run go to the cluster to which it was sent, and to no other.

The user has a job with the same number on the default cluster, because each cluster numbers its own jobs.
"""

import re

import pytest
from support_queue import Queue, Study

from jobs.schedulers import slurm
from jobs.slurm import query, submission
from jobs.slurm.commands import call_slurm, is_controller_down
from jobs.supervisor import retries
from shardlab.runs.state import ENDED_IN_SLURM

pytestmark = pytest.mark.usefixtures("source_copied_faster")
SITE = "schema: 1\nname: c\nprovider: slurm\nslurm: {partition: gpu}\nstorage: {shared: SHARED}\n"
JOB_OF_USER = [["1", "my-production-job", "/bin/true", 0]]


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    monkeypatch.setattr(submission, "SEARCH_INTERVAL_S", 0.0)
    for name in ("SLURM_CLUSTER_NAME", "SLURMD_NODENAME", "SLURM_CLUSTERS"):
        monkeypatch.delenv(name, raising=False)
    made = Queue(tmp_path / "slurm", monkeypatch)
    made.rule(ends=0)
    made.add_cluster("cm4")
    made.add_job_of_user(1, "my-production-job")
    return made


@pytest.fixture
def study(tmp_path, queue, monkeypatch):
    monkeypatch.setenv("SHARDLAB_PYTHON", str(tmp_path / "bin/python"))
    made = Study(tmp_path, 2)
    write_cluster(made)
    return made


def write_cluster(study, key=""):
    text = SITE.replace("SHARED", str(study.workspace.path.parent)).replace("gpu}", f"gpu{key}}}")
    (study.workspace.path / "cluster.yaml").write_text(text)


def choose(study, monkeypatch, way):
    """Choose the cluster cm4 by the key of the cluster file, or by the environment of the user's shell."""
    if way == "key":
        write_cluster(study, ", cluster: cm4")
    else:
        monkeypatch.setenv("SLURM_CLUSTERS", "cm4")


def forget(study, monkeypatch):
    """Remove the choice from the cluster file and from the environment."""
    write_cluster(study)
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)


def clusters_of(queue, name):
    """The cluster of each call of a command; None: the default cluster."""
    return [
        next((word.partition("=")[2] for word in words if word.startswith("--clusters=")), None) for words in queue.calls(name)
    ]


@pytest.mark.parametrize("way", ["key", "environment"])
def test_runs_stay_with_their_cluster_also_if_the_choice_changes(study, queue, monkeypatch, way):
    choose(study, monkeypatch, way)
    assert study.jobs("submit") == 0
    assert clusters_of(queue, "sbatch") == ["cm4"]
    for folder in study.workspace.list_run_dirs():
        assert "\n#SBATCH --clusters=cm4\n" in (folder.path / "job.sbatch").read_text()
        sent = [event.data for event in folder.read_events() if event.event == "submitted"]
        assert [data["cluster"] for data in sent] == ["cm4"]
    assert [one.cluster for one in submission.list_submissions(study.workspace)] == ["cm4"]
    forget(study, monkeypatch)
    before = len(queue.calls("squeue"))
    assert [(status.scheduler["id"], status.state) for status in study.statuses()] == [
        ("cm4:1_0", "pending"),
        ("cm4:1_1", "pending"),
    ]
    assert clusters_of(queue, "squeue")[before:] == ["cm4"]
    assert study.jobs("cancel", "--all") == 0
    assert set(clusters_of(queue, "scancel")) == {"cm4"}
    assert study.states() == ["cancelled", "cancelled"]
    assert queue.state("cm4")["tasks"] == []
    assert queue.state()["tasks"] == JOB_OF_USER
    assert set(clusters_of(queue, "sacct")) == {"cm4"}


def test_runs_of_two_clusters_are_each_asked_and_cancelled_on_their_own(study, queue):
    assert study.jobs("submit", "--where", "seed == 0") == 0
    write_cluster(study, ", cluster: cm4")
    assert study.jobs("submit") == 0
    assert clusters_of(queue, "sbatch") == [None, "cm4"]
    before = len(queue.calls("squeue"))
    assert sorted(status.scheduler["id"] for status in study.statuses()) == ["1", "cm4:1"]
    assert sorted(map(str, clusters_of(queue, "squeue")[before:])) == ["None", "cm4"]
    (of_cm4,) = (status.id for status in study.statuses() if status.scheduler["id"] == "cm4:1")
    assert study.jobs("cancel", of_cm4) == 0
    assert queue.state("cm4")["tasks"] == []
    assert len(queue.state()["tasks"]) == 2


def test_a_retry_goes_to_the_cluster_of_the_file(study, queue):
    write_cluster(study, ", cluster: cm4")
    queue.rule()
    assert study.jobs("submit", "--wait") == 0
    assert study.states() == ["oom", "oom"]
    queue.rule(ends=0)
    assert study.jobs("retry", "--only", "oom") == 0
    assert clusters_of(queue, "sbatch") == ["cm4", "cm4"]
    assert len(queue.state("cm4")["tasks"]) == 2


@pytest.mark.parametrize("way", ["key", "environment"])
def test_an_interrupted_submission_is_adopted_by_its_name_on_its_cluster(study, queue, monkeypatch, way):
    """Slurm has the job, but its answer is lost, and the choice of the cluster changes before the next command."""
    choose(study, monkeypatch, way)
    queue.rule(ends=0, loses_answers=True, unreachable=["squeue", "sacct"])
    assert study.jobs("submit") == 1
    forget(study, monkeypatch)
    queue.rule(ends=0)
    assert study.jobs("submit") == 0
    assert clusters_of(queue, "sbatch") == ["cm4"]
    assert [status.scheduler["id"] for status in study.statuses()] == ["cm4:1_0", "cm4:1_1"]
    assert queue.state()["tasks"] == JOB_OF_USER


def test_jobs_are_held_and_released_on_their_cluster(study, queue, monkeypatch):
    write_cluster(study, ", cluster: cm4")
    assert study.jobs("submit") == 0
    jobs = dict(folder.find_sent_job() for folder in study.workspace.list_run_dirs())
    monkeypatch.setattr(slurm, "ENDED_S", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    slurm.SCHEDULER.hold_jobs(jobs)
    slurm.SCHEDULER.release_jobs(jobs)
    assert queue.calls("scontrol")[-4:] == [
        ["--clusters=cm4", "hold", "1_0,1_1"],
        ["update", "JobId=9", "Requeue=1"],
        ["requeuehold", "9"],
        ["--clusters=cm4", "release", "1_0,1_1"],
    ]


def test_a_job_that_stays_in_the_queue_of_its_cluster_is_cancelled_there(queue):
    assert slurm.SCHEDULER.cancel_jobs(["cm4:1"]) == ""
    assert queue.calls("scancel") == [["--clusters=cm4", "1"]]
    assert queue.state()["tasks"] == JOB_OF_USER


@pytest.mark.parametrize(
    ("variables", "option"),
    [
        ({"SLURM_CLUSTER_NAME": "cm4"}, ["--clusters=cm4"]),  # in a shell of `salloc --clusters=cm4` on the login node of c
        ({"SLURM_CLUSTER_NAME": "c"}, []),
        ({"SLURM_CLUSTER_NAME": "cm4", "SLURMD_NODENAME": "gpu7"}, []),
        ({"SLURM_CLUSTERS": "cm4"}, []),  # without a job: the option of other commands is not believed
    ],
)
def test_questions_inside_a_job_go_to_the_cluster_of_the_job(queue, monkeypatch, variables, option):
    """On a node of the cluster, no option is needed, and it would need Slurm's database, which nodes may not reach."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    is_controller_down()
    assert queue.calls("scontrol")[-1] == [*option, "ping"]
    query.is_preempted("9")
    assert queue.calls("scontrol")[-1] == [*option, "show", "job", "9"]


def test_a_retry_inside_a_job_requeues_it_on_its_cluster(study, queue, monkeypatch):
    assert study.jobs("submit") == 0
    (folder, _) = study.workspace.list_run_dirs()
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "cm4")
    assert retries.requeue_job(folder, folder.read_run(), "failed") == ""
    calls = [words for words in queue.calls("scontrol") if "show" not in words]
    assert calls == [["--clusters=cm4", "update", "JobId=9", "Requeue=1"], ["--clusters=cm4", "requeue", "9"]]


@pytest.mark.parametrize("value", ["cm4,mysite", "all", "cm4 $(id)"])
@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_several_clusters_in_the_environment_are_refused_before_anything_is_sent(
    study, queue, monkeypatch, capsys, verb, value
):
    monkeypatch.setenv("SLURM_CLUSTERS", value)
    assert study.jobs(verb, *(["--matrix", str(study.matrix)] if verb == "plan" else [])) == 2
    assert re.search(r"SLURM_CLUSTERS is '.*', but a run needs one cluster.*slurm\.cluster", capsys.readouterr().err)
    assert queue.calls("sbatch") == []
    assert not (study.workspace.path / "runs").exists()


def test_a_request_is_tested_on_the_cluster_of_the_runs(study, queue, capsys):
    """Slurm says that no such node is available, and sinfo says that the nodes of this cluster are down now."""
    write_cluster(study, ", cluster: cm4")
    why = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    queue.rule(ends=0, rejects={"--clusters=cm4 --test-only": why}, node_states=["down"])
    assert study.jobs("submit") == 0
    assert clusters_of(queue, "sinfo") == ["cm4"]
    queue.rule(ends=0, rejects={"--clusters=cm4 --test-only": "sbatch: error: No cluster 'cm4' known by database."})
    (study.workspace.path / "m.yaml").write_text(study.matrix.read_text().replace("[0, 1]", "[2, 3]"))
    assert study.jobs("submit") == 2
    assert "No cluster 'cm4' known by database. Decided in the cluster file by: slurm.cluster." in capsys.readouterr().err


def test_a_final_state_learnt_from_another_cluster_is_recorded_as_of_there(study, queue):
    write_cluster(study, ", cluster: cm4")
    assert study.jobs("submit", "--where", "seed == 0") == 0
    (folder,) = study.workspace.list_run_dirs()
    (_, token) = folder.find_sent_job()
    (queue.folder / "squeue").write_text("#!/bin/sh\n")
    (queue.folder / "sacct").write_text(f"#!/bin/sh\necho '1|{token}|CANCELLED by 1|1|Unknown|None assigned|None'\n")
    assert [status.state for status in study.statuses()] == study.states() == ["cancelled"]
    (learnt,) = (event.data for event in folder.read_events(strict=True) if event.event == ENDED_IN_SLURM)
    assert (learnt["job"], learnt["cluster"]) == ("1", "cm4")


def test_a_run_cannot_wait_for_a_run_of_another_cluster(study, queue, capsys):
    assert study.jobs("submit", "--where", "seed == 0") == 0
    (folder,) = study.workspace.list_run_dirs()
    write_cluster(study, ", cluster: cm4")
    assert study.jobs("submit", "--after", folder.run_id) == 2
    assert "the job 1 is on another cluster of Slurm than the new runs" in capsys.readouterr().err


@pytest.mark.parametrize(("cluster", "code"), [("c", 0), ("cm4", 2)])
def test_in_a_federation_a_run_waits_only_for_a_run_of_the_same_cluster(study, queue, capsys, cluster, code):
    """sbatch names the cluster that it took, although no cluster was chosen; c is the default cluster."""
    file = queue.folder / f"queue.{cluster}.json"
    file.unlink(missing_ok=True)
    file.symlink_to("queue.json")
    queue.rule(ends=0, answers=[f"NUMBER;{cluster}"])
    assert study.jobs("submit", "--where", "seed == 0") == 0
    (folder,) = study.workspace.list_run_dirs()
    job = folder.find_sent_job()[0]
    assert job.startswith(f"{cluster}:")
    assert study.jobs("submit", "--after", folder.run_id) == code
    options = [word for words in queue.calls("sbatch") for word in words if word.startswith("--dependency")]
    assert options == ([f"--dependency=afterany:{job.partition(':')[2]}"] if code == 0 else [])
    assert (f"the job {job} is on another cluster" in capsys.readouterr().err) == (code != 0)


def test_a_template_of_the_user_may_name_the_cluster(study, queue):
    """Commands about the runs go to the cluster that the script names, also if the answer of sbatch was lost."""
    template = study.workspace.own_templates / slurm.SCHEDULER.TEMPLATE
    template.write_text(template.read_text().replace("#!/bin/bash\n", "#!/bin/bash\n#SBATCH --clusters=cm4\n"))
    queue.rule(ends=0, loses_answers=True, unreachable=["squeue", "sacct"])
    assert study.jobs("submit") == 1
    queue.rule(ends=0)
    assert study.jobs("submit") == 0
    assert clusters_of(queue, "sbatch") == ["cm4"]
    assert [status.scheduler["id"] for status in study.statuses()] == ["cm4:1_0", "cm4:1_1"]
    assert study.jobs("cancel", "--all") == 0
    assert queue.state("cm4")["tasks"] == []
    assert queue.state()["tasks"] == JOB_OF_USER


def test_the_cluster_that_sbatch_answers_is_recorded(study, queue):
    """The user's own template names the cluster in a line that shardlab does not write."""
    queue.rule(ends=0, answers=["NUMBER;cm4"])
    assert study.jobs("submit") == 0
    assert [status.scheduler["id"] for status in study.statuses()] == ["cm4:1_0", "cm4:1_1"]


def test_rows_below_the_line_with_the_name_of_a_cluster_are_read(queue):
    queue.rule(node_states=["idle", "down"])
    assert call_slurm(["sinfo", "-h"], cluster="cm4").stdout == "idle\ndown\n"
