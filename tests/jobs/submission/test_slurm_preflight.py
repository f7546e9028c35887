"""Before `jobs submit` writes any file, it calls `sbatch --test-only` once for each distinct request to Slurm."""

import pytest
from support_queue import Queue, Study

from jobs.schedulers import slurm
from jobs.slurm import partitions
from jobs.submission import preflight
from shardlab.cluster import sbatch_request

pytestmark = pytest.mark.usefixtures("source_copied_faster")
NODES = "allocation failure: Requested node configuration is not available"
ACCOUNT = "sbatch: error: This site needs an account.\nallocation failure: Unspecified error"


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    return Queue(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def study(tmp_path, queue):
    made = Study(tmp_path, 2)
    # The two cells differ in their number of nodes, so their requests to Slurm differ.
    made.matrix.write_text(made.matrix.read_text().replace("strategy: single, gpus: 1", "strategy: ddp, gpus: 4, nnodes: 1"))
    made.matrix.write_text(made.matrix.read_text().replace("axes: {seed: [0, 1]}", "axes: {seed: [0, 1], nnodes: [1, 2]}"))
    cluster = made.workspace.path / "cluster.yaml"
    cluster.write_text(cluster.read_text().replace("{name: work1}", "{name: work1}, {name: work2}"))
    return made


def untouched(study):
    return not study.workspace.runs.exists() and not list(study.workspace.shardlab_folder.glob("matrices/*"))


@pytest.mark.parametrize("verb", [["submit"], ["submit", "--dry-run"]])
def test_a_rejected_request_is_named_and_nothing_is_written(study, queue, capsys, verb):
    queue.rule(rejects={"--nodes=2": NODES})
    assert study.jobs(*verb) == 2
    said = capsys.readouterr().err
    assert "Slurm would reject 2 run(s) (ddp-gpt2-tiny-g4-b4-" in said
    assert "Requested node configuration is not available. Decided in the cluster file by: slurm.partition, " in said
    assert said.count("Slurm would reject") == 1
    assert untouched(study)
    assert queue.calls("sbatch") == []


def test_the_words_of_a_submit_plugin_are_repeated(study, queue, capsys):
    queue.rule(rejects={"--partition": ACCOUNT})
    assert study.jobs("submit") == 2
    said = capsys.readouterr().err
    assert said.count("This site needs an account. Decided in the cluster file by: slurm.account.") == 2
    assert "Unspecified" not in said


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("Batch job submission failed: Invalid generic resource (gres) specification", "slurm.gpu_request (none"),
        ("Requested GRES option unsupported by configured SelectType plugin", "slurm.gpu_request (none"),
        ("Invalid account or account/partition combination specified", "slurm.account, slurm.partition"),
        ("Invalid qos specification", "slurm.qos"),
        ("Invalid feature specification", "slurm.constraint"),
        ("Memory specification can not be satisfied", "slurm.mem, slurm.omit: [mem]"),
        ("exclusive allocations are not allowed in this partition", "slurm.exclusive, slurm.omit: [exclusive]"),
        ("invalid partition specified: gpux", "slurm.partition."),
        ("Invalid node name specified", "slurm.exclude"),
        ("CPU count per node can not be satisfied", "slurm.cpus_per_rank"),
    ],
)
def test_slurms_words_for_a_rejection_lead_to_the_keys_that_decide_it(words, key):
    assert sbatch_request.advise_on_rejection(words).startswith(f"Decided in the cluster file by: {key}")


def test_a_rejection_without_known_words_names_no_key():
    assert sbatch_request.advise_on_rejection("Zero Bytes were transmitted or received") == ""


def test_nodes_that_are_down_now_reject_nothing(study, queue):
    queue.rule(rejects={"--nodes=2": NODES}, node_states=["idle", "drained"])
    assert study.jobs("submit") == 0


@pytest.mark.parametrize(
    "says",
    [
        "sbatch: error: AssocMaxSubmitJobLimit\nallocation failure: Job violates accounting/QOS policy",
        "allocation failure: Requested nodes are busy",
        "allocation failure: Required node not available (down, drained or reserved)",
        "allocation failure: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_temporary_reason_of_test_only_does_not_stop_the_submission(study, queue, says):
    """`jobs submit` ignores a rejection by --test-only whose reason may pass, such as busy nodes or a full queue."""
    queue.rule(rejects={"--nodes=2": says})
    assert study.jobs("submit") == 0


def test_a_controller_that_does_not_answer_test_only_does_not_stop_the_submission(study, queue, capsys):
    queue.rule(unreachable=["sbatch", "squeue", "sacct"])
    assert study.jobs("submit") == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_pack_is_asked_with_its_whole_time(study, queue, capsys):
    queue.rule(rejects={"--time=126": "allocation failure: Requested time limit is invalid (missing or exceeds some limit)"})
    assert study.jobs("submit", "--dry-run") == 0
    assert study.jobs("submit", "--pack") == 2
    assert "by: slurm.time." in capsys.readouterr().err


SMALL = "PartitionName=batch AllowQos=ALL Default=YES MaxNodes=1 MaxTime=00:30:00 MinNodes=0"


def test_a_request_above_a_limit_of_its_partition_is_named(study, queue, capsys):
    """Slurm would accept the job and never start it."""
    queue.rule(partitions=[SMALL])
    assert study.jobs("submit") == 2
    said = capsys.readouterr().err
    why = "the time limit 63 min is above MaxTime=00:30:00 of the partition batch"
    assert said.count("Slurm would never start 2 run(s) (ddp-gpt2-tiny-g4-b4-") == 2
    assert said.count(f"{why}. Decided in the cluster file by: slurm.time.") == 2
    assert untouched(study)
    assert queue.calls("sbatch") == []
    assert sum(words[-1] == "partition" for words in queue.calls("scontrol")) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--time=31"], "the time limit 31 min is above MaxTime=00:30:00 of the partition batch"),
        (["--time=5", "--time=31"], "the time limit 31 min is above"),
        (["--partition=batch", "--time=1-0"], "the time limit 1440 min is above"),
        (["--partition=batch,short", "--time=31"], "the time limit 31 min is above"),
        (["--nodes=2", "--time=30"], "the node count 2 is above MaxNodes=1 of the partition batch"),
        (["--nodes=1", "--time=30"], ""),
        (["--nodes=1-2", "--time=00:30:00"], ""),
        (["--partition=batch,long", "--time=31"], ""),
        (["--partition=elsewhere", "--time=31"], ""),
        (["--qos=extended", "--time=31"], ""),  # a QOS may have limits of its own
    ],
)
def test_the_limits_of_a_partition_are_compared_with_a_request(queue, options, words):
    others = ("PartitionName=long MaxNodes=UNLIMITED MaxTime=UNLIMITED", "PartitionName=short MaxNodes=1 MaxTime=00:10:00", "?")
    queue.rule(partitions=[SMALL, *others])
    why = partitions.find_exceeded_limit(partitions.read_partitions(20, None), options)
    assert (words in why, bool(why)) == (True, bool(words)), why
    queue.rule(away=True)
    assert partitions.find_exceeded_limit(partitions.read_partitions(20, None), options) == ""


def test_a_retry_is_checked_with_test_only(study, queue, capsys):
    assert study.jobs("submit", "--wait") == 0
    before = sorted(path.name for path in study.workspace.runs.iterdir())
    queue.rule(rejects={"--nodes=1": "allocation failure: Invalid feature specification"})
    assert study.jobs("retry", "--only", "oom") == 2
    assert "by: slurm.constraint." in capsys.readouterr().err
    assert sorted(path.name for path in study.workspace.runs.iterdir()) == before


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("", "sbatch gave no reason"),
        ("allocation failure: Unspecified error\n", "Unspecified error"),
        ("sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified\n",
         "invalid partition specified: x; Invalid partition name specified"),
    ],
)  # fmt: skip
def test_the_error_text_of_sbatch_is_parsed(stderr, said):
    assert preflight.join_error_lines(stderr) == said
