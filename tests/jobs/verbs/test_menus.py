"""What `jobs strategies` prints, the remarks of `jobs plan`, refused options, and the files that the source digest covers."""

import pytest

from jobs import on_controller
from jobs.cli import main
from shardlab.files import source_digest


@pytest.fixture
def options(capsys):
    """Maps each option that `jobs strategies` prints to its lines. An option with several defaults has several lines."""
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.partition("\noptions\n")[2].splitlines()[1:]
    found = {}
    for line in lines:
        if not line.startswith(" "):
            name = line.split()[0]
        found.setdefault(name, []).append(line.split())
    return found


def test_an_option_is_named_once_with_each_of_its_defaults(options):
    named, other = options["overlap_comm"]
    assert named[:2] == ["overlap_comm", "false"]
    assert named[-1] == "zero1"
    assert other[0] == "true"
    assert other[-2:] == ["zero2,", "zero3"]


def test_a_family_is_a_pattern_only_if_it_has_several_members(options):
    """`jobs strategies` writes `ddp*` for several strategies with a common start, and `ddp` for one strategy."""
    ((*_, first, second, third),) = options["reduce_bucket_size"]
    assert [first, second, third] == ["zero1,", "zero2,", "zero3"]
    assert options["bucket_cap_mb"][0][-1] == "ddp*"
    assert options["comm_hook"][0][-1] == "ddp"


@pytest.mark.parametrize("count", ["0", "-1", "100001"])
def test_too_few_or_too_many_runs_at_a_time_are_refused(count, tmp_path, capsys):
    assert main(["submit", "--matrix", "quickstart", "--max-parallel", count, "--workspace", str(tmp_path)]) == 2
    assert f"--max-parallel: found {count}. Allowed: 1 to 100000." in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("count", ["1", "100000"])
def test_the_least_and_the_largest_number_of_runs_at_a_time_are_accepted(count, tmp_path, monkeypatch):
    monkeypatch.setattr(on_controller, "starts_runs_here", lambda _where: True)
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("PROVIDER", "ssh").replace("/shared", str(tmp_path)))
    words = ["submit", "--matrix", "quickstart", "--dry-run", "--where", "gpus == 1", "--workspace", str(tmp_path)]
    assert main([*words, "--max-parallel", count]) == 0


@pytest.mark.parametrize(
    ("verb", "options", "named"),
    [
        (["submit", "--matrix", "quickstart"], ["--max-parallel", "2"], "--max-parallel: only for Slurm"),
        (["submit", "--matrix", "quickstart", "--dry-run"], ["--pack"], "--pack: only for Slurm"),
        (["submit", "--matrix", "quickstart"], ["--pack", "--after", "*"], "--pack and --after: only for Slurm"),
        (["retry"], ["--max-parallel", "2"], "--max-parallel: only for Slurm"),
    ],
)
def test_options_of_slurm_are_refused_on_this_machine(verb, options, named, tmp_path, capsys):
    assert main([*verb, "--where", "gpus == 1", *options, "--workspace", str(tmp_path)]) == 2
    assert f"error: {named}, and the cluster local has no `slurm`; its runs start" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_retry_names_the_allowed_states(tmp_path, capsys):
    assert main(["retry", "--only", "failed,broken", "--workspace", str(tmp_path)]) == 2
    assert (
        "error: --only: unknown state in which a run ends 'broken'. Allowed: cancelled, completed, failed, held, hung, "
        "node_fail, oom, preempted, timeout, unknown." in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (
            "strategy: zero3\n  gpus: 2\n  options: {offload_param: nvme, nvme_path: here}",
            "defaults.options.nvme_path: nvme_path: found here. Allowed: an absolute path on each node",
        ),
        (
            "strategy: zero3\n  gpus: 2\n  options: {offload_param: nvme}",
            "nvme_path: found null. Allowed: an absolute path on each node",
        ),
    ],
)
def test_a_refusal_of_an_option_begins_with_the_option(cell, problem, tmp_path, capsys):
    (tmp_path / "m.yaml").write_text(
        f"schema: 1\nname: m\ndefaults:\n  workload: gpt2-tiny\n  launcher: torchrun\n  steps: 2\n"
        f"  gpu_batch_size: 2\n  {cell}\naxes: {{precision: [bf16]}}\n"
    )
    assert main(["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


CLUSTER = """\
schema: 1
name: bench
provider: PROVIDER
slurm: {partition: batch}
nodes: [{name: n1, host: 10.0.0.1, roles: [controller, worker]}]
gpus: {type: a100, per_node: 4}
storage: {shared: /shared}
"""


@pytest.mark.parametrize(("provider", "remarks"), [("virtual", True), ("ssh", False)])
def test_a_plan_remarks_only_on_practice_nodes_that_their_gpus_do_not_exist(provider, remarks, tmp_path, capsys):
    file = tmp_path / "cluster.yaml"
    text = CLUSTER.replace("PROVIDER", provider)
    if provider == "virtual":
        text = text.replace(", host: 10.0.0.1", "")
    file.write_text(text)
    words = [
        "plan",
        "--matrix",
        "quickstart",
        "--where",
        "gpus == 1",
        "--cluster",
        str(file),
        "--workspace",
        str(tmp_path / "w"),
    ]
    assert main(words) == 0
    told = capsys.readouterr()
    assert ("practice nodes: their GPUs exist only in Slurm;" in told.out + told.err) is remarks


def test_our_source_is_every_file_but_hidden_ones_and_bytecode(tmp_path):
    kept = ["jobs/a.py", "jobs/sub/b.j2"]
    for name in (*kept, "jobs/.hidden", "jobs/sub/.a.py.swp", "jobs/__pycache__/a.cpython-311.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [str(path.relative_to(tmp_path)) for path in source_digest.list_source_files(["jobs"], tmp_path)] == kept
    before = source_digest.digest_source(tmp_path)
    (tmp_path / "jobs" / ".hidden").write_text("changed")
    assert source_digest.digest_source(tmp_path) == before
    (tmp_path / "jobs" / "a.py").write_text("changed")
    assert source_digest.digest_source(tmp_path) != before
