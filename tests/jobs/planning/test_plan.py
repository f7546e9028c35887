"""What `jobs plan` and `jobs submit` print before they queue runs: differences of cells, what fits, and missing data."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support_trust import make_own

from jobs import on_controller
from jobs.cli import main
from jobs.planning import cell_differences, datasets, plan
from jobs.planning.resolve import Capacity, find_misfits, resolve_cells
from jobs.rendering import render, sbatch_options
from shardlab.cluster import cluster
from shardlab.errors import InputError, ShardlabError
from shardlab.matrix import matrix
from shardlab.remote import remote_workspace
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.workspace.workspace import Workspace

HEAD = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, strategy: ddp, gpus: 2, global_batch_size: 16, steps: 2}
"""
IMAGES = """\
schema: 1
name: m
defaults: {workload: vit-tiny, strategy: single, gpu_batch_size: 4, steps: 1}
axes: {options.data: [cifar10, mnist, synthetic]}
"""
FAR = """\
schema: 1
name: far
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}]
storage: {shared: SHARED}
slurm: {}
"""


def written(folder, text, head=HEAD):
    path = folder / "m.yaml"
    path.write_text(head + text)
    return str(path)


def cells(folder, text, head=HEAD):
    return resolve_cells(matrix.load_matrix(Path(written(folder, text, head))))


def images(folder):
    return written(folder, "", IMAGES)


@pytest.mark.parametrize(
    ("axis", "shown"),
    [
        ("seed: [1, 2]", ["seed=1", "seed=2"]),
        ("options.n_layer: [2, 4]", ["options.n_layer=2", "options.n_layer=4"]),
        ("memory_limit_gib: [null, 4]", ["memory_limit_gib=none", "memory_limit_gib=4"]),
        ("instruments.memory: [peak, categories]", ["instruments.memory=peak", "instruments.memory=categories"]),
        (
            "instruments: [{}, {checkpoints: {every_steps: 2}}]",
            ["instruments.checkpoints=none", "instruments.checkpoints={every_steps: 2, keep: 2, layout: sharded}"],
        ),
        ("optimizer: [{name: sgd, lr: 0.1}, {name: sgd, lr: 0.01}]", ["optimizer.lr=0.1", "optimizer.lr=0.01"]),
        ("precision: [fp32, bf16]", ["precision=fp32", "precision=bf16"]),
        ("seq_len: [16, 32]", ["seq_len=16", "seq_len=32"]),
        ("compile: [false, true]", ["compile=false", "compile=true"]),
        ("steps: [2, 3]", ["", ""]),  # not shown: the table has a column `steps`
        # The table has a column `strategy`, and options that only one of the strategies has are not shown.
        ("strategy: [ddp, fsdp2]", ["", ""]),
    ],
)
def test_every_key_in_which_cells_differ_is_shown(tmp_path, axis, shown):
    assert cell_differences.describe_differences(cells(tmp_path, f"axes: {{{axis}}}\n")) == shown


@pytest.mark.parametrize(
    ("axis", "shown"),
    [
        ('time_limit: [null, "1-02:00:03"]', ["time_limit=none", "time_limit=1-02:00:03"]),
        ('hang_limit: ["00:10:00", "00:30:00"]', ["hang_limit=00:10:00", "hang_limit=00:30:00"]),
        ("expect: [[], [oom, timeout]]", ["expect=none", "expect=[oom, timeout]"]),
    ],
)
def test_a_plan_shows_differing_limits_and_expected_ends(tmp_path, axis, shown):
    # The two cells also differ in their seed, because cells that differ only in limits or expected ends are the same cell.
    found = cell_differences.describe_differences(cells(tmp_path, f"zip: [{{seed: [1, 2], {axis}}}]\n"))
    assert found == [f"seed=1, {shown[0]}", f"seed=2, {shown[1]}"]


def test_a_default_of_one_workload_is_no_difference_until_a_cell_sets_it(tmp_path):
    two = "include: [{workload: gpt2-tiny}, {workload: vit-tiny}, {workload: vit-tiny, options.data: cifar10}]\n"
    shown = cell_differences.describe_differences(cells(tmp_path, two))
    assert shown == ["options.data=stdlib-text", "options.data=synthetic", "options.data=cifar10"]
    assert cell_differences.describe_differences(
        cells(tmp_path, "include: [{workload: gpt2-tiny}, {workload: vit-tiny}]\n")
    ) == ["", ""]


def test_a_plan_shows_the_differences_of_cells_in_a_column(tmp_path, capsys):
    assert main(["plan", "--matrix", written(tmp_path, "axes: {seed: [7, 8]}\n"), "--workspace", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[1:4]
    assert head.endswith("differs in")
    assert [row.split()[-1] for row in rows] == ["seed=7", "seed=8"]


@pytest.mark.parametrize(("gpus", "nodes"), [("", 1), ("gpus: {per_node: 2}\n", 2), ("gpus: {per_node: 8}\n", 1)])
def test_ranks_take_as_many_nodes_as_their_gpus_need(tmp_path, capsys, gpus, nodes):
    two = "[{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}, {name: gpu1, host: 10.9.9.2, roles: [worker]}]"
    file = tmp_path / "cluster.yaml"
    file.write_text(f"schema: 1\nname: far\nprovider: ssh\nnodes: {two}\nslurm: {{}}\n{gpus}")
    words = ["--matrix", written(tmp_path, "include: [{strategy: ddp, gpus: 4}]\n"), "--cluster", str(file)]
    assert main(["plan", *words, "--json", "--workspace", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    (cell,) = document["cells"]
    assert (cell["cell"]["nnodes"], document["misfits"]) == (nodes, [])


@pytest.mark.parametrize(("scale", "said"), [([], False), (["--scale", "tiny"], True)])
def test_a_plan_says_whether_its_cells_are_tiny_twins(tmp_path, capsys, scale, said):
    assert main(["plan", "--matrix", "paper5", *scale, "--workspace", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert ("paper5-tiny:" in printed.out) is said
    assert f"every cell is a {REHEARSAL_NOTE}" in printed.err or not said


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("{strategy: [ddp, fsdp2, zero2]}", "in each pass: zero2; once a step: ddp, fsdp2; so sent bytes and memory differ"),
        ("{strategy: [fsdp2], options.sync: [last_pass, every_pass]}", "in each pass: fsdp2; once a step: fsdp2;"),
        ("{strategy: [ddp, fsdp2, zero1]}", None),
        ("{strategy: [ddp, zero2], microbatches: [1]}", None),
    ],
)
def test_a_plan_names_strategies_that_exchange_gradients_in_other_passes(tmp_path, capsys, axes, said):
    head = HEAD if "microbatches" in axes else HEAD.replace("steps: 2", "steps: 2, microbatches: 2")
    assert main(["plan", "--matrix", written(tmp_path, f"axes: {axes}\n", head), "--workspace", str(tmp_path)]) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    assert ("gradients are exchanged" in printed) == (said is not None)
    assert said is None or said in printed


@pytest.mark.parametrize(("section", "said"), [("", True), ("slurm: {}\n", False)])
def test_a_plan_reports_a_missing_torch_if_this_machine_trains(tmp_path, capsys, monkeypatch, section, said):
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    file = tmp_path / "cluster.yaml"
    nodes = "nodes: [{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}]\n" if section else ""
    file.write_text(f"schema: 1\nname: one\nprovider: {'ssh' if section else 'local'}\n{nodes}{section}")
    words = ["--matrix", written(tmp_path, "include: [{strategy: ddp, gpus: 2}]\n"), "--cluster", str(file)]
    assert main(["plan", *words, "--workspace", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert ("torch is not installed here" in printed.out + printed.err) is said


@pytest.mark.parametrize(
    ("axes", "machine", "where", "says"),
    [
        ("nnodes: [1, 2]", Capacity(1, None), None, '1 of 2 cells fit this cluster: --where "nnodes == 1" leaves only those.'),
        ("gpus: [4], nnodes: [1, 2, 4]", Capacity(2, 4), None,
         '2 of 3 cells fit this cluster: --where "nnodes <= 2" leaves only those.'),
        ("gpus: [2, 4, 8]", Capacity(1, 4), None, '2 of 3 cells fit this cluster: --where "gpus <= 4" leaves only those.'),
        (
            "nnodes: [1, 2], gpus: [4, 8]", Capacity(2, 4), None,
            '3 of 4 cells fit this cluster: --where "gpus <= 4 * nnodes" leaves only those.',
        ),
        (
            "nnodes: [1, 2], gpus: [4, 8]", Capacity(1, 4), None,
            '1 of 4 cells fit this cluster: --where "nnodes == 1 and gpus <= 4" leaves only those.',
        ),
        (
            "gpus: [2, 8], launcher: [fork, torchrun]", Capacity(1, 4), None,
            "3 of 4 cells fit this cluster: --where \"(launcher == 'fork' or gpus <= 4 * nnodes)\" leaves only those.",
        ),
        (
            "nnodes: [1, 2], seed: [1, 2]", Capacity(1, None), 'seed == 1 or "a" == "b"',
            "1 of 2 cells fit this cluster: --where '(seed == 1 or \"a\" == \"b\") and nnodes == 1' leaves only those.",
        ),
        ("nnodes: [2]", Capacity(1, None), None, None),
    ],
)  # fmt: skip
def test_a_matrix_that_does_not_fit_gets_a_filter_for_the_cells_that_fit(tmp_path, axes, machine, where, says):
    asked = matrix.load_matrix(Path(written(tmp_path, f"axes: {{{axes}}}\n")))
    every = resolve_cells(asked)
    chosen = [cell for cell in every if where is None or cell.seed == 1]
    found = plan.suggest_options(asked, every, chosen, machine, where)
    assert [one for one in found if "--where" in one] == ([says] if says else [])


def test_only_cells_with_one_gpu_fit_slices_of_gpus(tmp_path):
    asked = matrix.load_matrix(Path(written(tmp_path, "axes: {gpus: [1, 2]}\n")))
    cells = resolve_cells(asked)
    (misfit,) = find_misfits(asked, cells, Capacity(1, 14, has_slices=True), cells)
    assert "needs 2 GPUs, but the cluster's GPUs are slices of GPUs (MIG)" in misfit.why
    assert find_misfits(asked, cells, Capacity(1, 14), cells) == []


def test_servers_that_small_nodes_would_spread_are_a_misfit_and_no_fault_of_the_file(tmp_path):
    two = "[{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}, {name: gpu1, host: 10.9.9.2, roles: [worker]}]"
    site = f"schema: 1\nname: far\nprovider: ssh\nnodes: {two}\nslurm: {{}}\ngpus: {{per_node: 2}}\n"
    sgd = "optimizer: {name: sgd, lr: 0.1}"
    planned_matrix = planned(tmp_path, f"include: [{{strategy: ps-sync, gpus: 4, servers: 2, {sgd}}}]\n", site)
    assert [misfit.why for misfit in planned_matrix.misfits] == ["needs 4 GPUs, the cluster has 2 per node."]
    offloaded = "options: {quantized_gradients: true, offload_optimizer: nvme}"  # wrong on one node, too, by its own reason
    with pytest.raises(InputError, match="nvme_path: found null"):
        planned(tmp_path, f"include: [{{strategy: zero3, gpus: 4, {offloaded}}}]\n", site)
    with pytest.raises(InputError, match=r"all on the last node: found nnodes: 2\. Allowed: nnodes: 1"):
        planned(tmp_path, f"include: [{{strategy: ps-sync, gpus: 4, nnodes: 2, servers: 2, {sgd}}}]\n", site)


SITE = """\
schema: 1
name: site
provider: slurm
slurm:
  partition: small
  partitions:
    - {name: a, gpus: {per_node: 4, type: a100}, max_nodes: 2}
    - {name: h, gpus: {per_node: 8, type: h100}, max_time: "02:00:00"}
gpus: {per_node: 2}
storage: {shared: /scratch/a}
"""


def planned(tmp_path, text, site=SITE):
    (tmp_path / "cluster.yaml").write_text(site)
    file = written(tmp_path, text)
    return plan.plan_matrix(
        Workspace(tmp_path), file, cluster.load_cluster(tmp_path / "cluster.yaml"), where=None, repeats=None
    )


def test_a_cell_goes_to_the_partition_of_its_gpu_type(tmp_path):
    asked = planned(tmp_path, "axes: {gpus: [8], gpu_type: [a100, h100, null]}\n")
    assert [cell.nnodes for cell in asked.cells] == [2, 1, 4]
    assert asked.misfits == []
    names = [cell.name() for cell in asked.cells]
    assert "-a100-" in names[0]
    assert len(set(names)) == 3
    runs = [render.make_run(cell, 1, 1, asked.context) for cell in asked.cells]
    options = [sbatch_options.list_sbatch_options(run, asked.context.cluster) for run in runs]
    assert [words[0] for words in options] == ["--partition=a", "--partition=h", "--partition=small"]
    gpus = ["--gpus-per-node=a100:4", "--gpus-per-node=h100:8", "--gpus-per-node=2"]
    assert [word for words in options for word in words if "gpus" in word] == gpus


def test_an_environment_that_the_cluster_does_not_have_is_refused_with_its_place(tmp_path):
    text = "axes: {gpus: [2], environment: [null, others, nightly]}\n"
    asked = planned(tmp_path, text, SITE + "environments: {other: {}, nightly: {}}\n")
    assert [misfit.why for misfit in asked.misfits] == [
        "unknown environment of the cluster 'others'. Did you mean 'other'? Allowed: nightly, other."
    ]
    with pytest.raises(InputError, match=r"m.yaml:4:\d+: axes.environment\[1\]: unknown environment"):
        plan.must_fit_cluster(asked)
    (misfit, _) = planned(tmp_path, text).misfits
    assert misfit.why == "names the environment others, but the cluster file has no environments. Allowed: leave it out."
    assert cell_differences.describe_differences(asked.cells)[2] == "environment=nightly"


def test_each_partition_has_its_own_limits(tmp_path):
    long = 'include: [{when: "gpus == 8", time_limit: "03:00:00"}]\n'
    asked = planned(tmp_path, "axes: {gpus: [8, 16], gpu_type: [a100, h100]}\n" + long)
    assert [misfit.why for misfit in asked.misfits] == [
        "has a time limit of 10800 s, the partition allows 7200 s.",
        "needs 4 nodes, the cluster has 2.",
    ]


@pytest.mark.parametrize(
    ("site", "allowed"),
    [
        (SITE, "unknown GPU type of the cluster 'h200'. Did you mean 'h100'? Allowed: a100, h100."),
        (SITE[: SITE.index("slurm:")] + "slurm: {}\ngpus: {per_node: 8, type: h100}\nstorage: {shared: /scratch/a}\n",
         "Allowed: h100."),
        (SITE[: SITE.index("slurm:")] + "slurm: {}\ngpus: {per_node: 8}\nstorage: {shared: /scratch/a}\n",
         "the cluster file names no type. Allowed: leave gpu_type out."),
    ],
)  # fmt: skip
def test_a_gpu_type_that_the_cluster_does_not_have_is_refused_with_its_place(tmp_path, site, allowed):
    asked = planned(tmp_path, "axes: {gpus: [2], gpu_type: [null, h200]}\n", site)
    with pytest.raises(InputError) as caught:
        plan.must_fit_cluster(asked)
    (problem,) = [line for line in str(caught.value).splitlines() if "axes.gpu_type[1]" in line]
    assert allowed in problem
    assert ".yaml:" in problem
    assert "leaves only those" in str(caught.value)


def test_amd_gpus_are_planned_and_runs_on_them_are_refused(tmp_path):
    plan_of_amd = planned(tmp_path, "", SITE.replace("{per_node: 2}", "{per_node: 8, type: mi300x}"))
    assert next(iter(plan_of_amd.predictions.values())).step_s is not None
    with pytest.raises(InputError, match=r"gpus.type: found mi300x. Runs need NVIDIA GPUs"):
        plan.must_fit_cluster(plan_of_amd)


def test_a_plan_says_which_of_several_gpu_models_it_means(tmp_path):
    remarks = planned(tmp_path, "", SITE.replace("{per_node: 2}", "{per_node: 2, type: a100}")).remarks
    assert [remark for remark in remarks if remark.startswith("gpus.type: a100 is planned as a100-sxm4-40gb")]


def test_scale_tiny_is_suggested_if_the_twins_fit(tmp_path):
    asked = matrix.load_matrix(Path(written(tmp_path, "axes: {nnodes: [2]}\n")))
    every = resolve_cells(asked)
    assert plan.suggest_options(asked, every, every, Capacity(1, None), None)[0].startswith("--scale tiny rehearses every cell")
    on_gpus = matrix.load_matrix(Path(written(tmp_path, "axes: {nnodes: [2], gpus: [8]}\n")))
    every = resolve_cells(on_gpus)
    assert (
        plan.suggest_options(on_gpus, every, every, Capacity(1, 4), None) == []
    )  # no advice: the cell needs 8 GPUs, and a node has 4


def test_a_refused_matrix_gets_a_filter_and_scale_tiny_as_suggestions(tmp_path, capsys):
    """The error names two ways out: --where for the cells that fit, and --scale tiny."""
    assert main(["submit", "--matrix", "paper1", "--workspace", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert '\n41 of 62 cells fit this cluster: --where "nnodes == 1" leaves only those.\n--scale tiny rehearses' in said
    assert not (tmp_path / "runs").exists()


def test_missing_data_on_this_machine_are_reported_and_nothing_is_submitted(tmp_path, capsys):
    name, words = images(tmp_path), ["--workspace", str(tmp_path / "w")]
    folder = tmp_path / "w/.shardlab/data"
    for verb, code in (("plan", 0), ("submit", 2)):
        assert main([verb, "--matrix", name, *words]) == code
        said = capsys.readouterr()
        told = said.out if verb == "plan" else said.err
        assert (
            f"1 of 3 cell(s) read cifar10: {folder}/cifar-10-batches-bin: not found, so the data set cifar10 cannot be read."
            in told
        )
        assert f"1 of 3 cell(s) read mnist: {folder}/mnist: not found" in told
    assert "With --scale tiny every cell reads synthetic data." in said.err
    assert not (tmp_path / "w/runs").exists()
    (folder / "mnist").mkdir(parents=True)
    main(["plan", "--matrix", name, *words, "--json"])
    assert len(json.loads(capsys.readouterr().out)["missing_data"]) == 1


def test_a_token_file_that_is_missing_is_named(tmp_path, capsys):
    name = written(tmp_path, "include: [{options.data: tokens, options.tokens_file: mine.tokens}]\n")
    assert main(["submit", "--matrix", name, "--workspace", str(tmp_path)]) == 2
    assert f"read tokens: {tmp_path}/.shardlab/data/mine.tokens: no such file. `python -m trainers tokenize" in (
        capsys.readouterr().err
    )


class Far:
    """A stand-in for a cluster on other machines: a request to its controller is a process on this machine, without ssh."""

    def __init__(self, folder, workspace, monkeypatch):
        self.folder = folder
        self.asked = 0
        self.cluster = self.host = "far"
        monkeypatch.setattr(remote_workspace, "read_remote_workspace", lambda _workspace: self)
        make_own(workspace)
        (workspace / "cluster.yaml").write_text(FAR.replace("SHARED", str(folder)))

    def ask_command(self, module, arguments, shape, *, input_bytes):
        self.asked += 1
        words = [sys.executable, "-P", "-m", module, *arguments, "--json", "--workspace", str(self.folder / "workspaces/w")]
        return msgspec.json.decode(subprocess.run(words, input=input_bytes, capture_output=True, check=True).stdout, type=shape)


def test_the_data_of_a_remote_cluster_are_looked_up_on_its_controller(tmp_path, monkeypatch, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    far = Far(there, here, monkeypatch)
    (here / ".shardlab/data/cifar-10-batches-bin").mkdir(parents=True)  # data on this machine, which the cluster cannot read
    (there / "workspaces/w/.shardlab/data/mnist").mkdir(parents=True)
    assert main(["plan", "--matrix", images(tmp_path), "--workspace", str(here)]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no data: ")]
    assert f"read cifar10: {there}/workspaces/w/.shardlab/data/cifar-10-batches-bin: not found" in said
    assert far.asked == 1
    monkeypatch.setattr(far, "ask_command", lambda *_, **__: (_ for _ in ()).throw(ShardlabError("10.9.9.1: did not answer.")))
    assert main(["plan", "--matrix", images(tmp_path), "--workspace", str(here)]) == 0
    said = capsys.readouterr()
    unknown = "cannot check from here whether the cluster far has the data sets cifar10, mnist: 10.9.9.1: did not answer."
    assert unknown in said.err
    assert "no data" not in said.out


def test_the_cluster_of_earlier_runs_is_not_asked_about_another_cluster(tmp_path, monkeypatch, capsys):
    here = tmp_path / "here"
    here.mkdir()
    far = Far(tmp_path / "there", here, monkeypatch)
    far.cluster = "another"
    monkeypatch.setattr(
        remote_workspace,
        "find_remote_workspace",
        lambda _workspace, where: (_ for _ in ()).throw(ShardlabError(f"{where.name} was asked.")),
    )
    assert main(["plan", "--matrix", images(tmp_path), "--workspace", str(here)]) == 0
    assert "mnist: far was asked." in capsys.readouterr().err
    assert far.asked == 0


def test_a_plan_for_an_unprovisioned_cluster_says_that_data_are_not_checked(tmp_path, capsys):
    """Without an inventory, `jobs plan` says that it cannot check whether the data exist."""
    (tmp_path / "cluster.yaml").write_text(FAR.replace("SHARED", "/mydata"))
    assert main(["plan", "--matrix", images(tmp_path), "--workspace", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "cannot check from here" in said.err
    assert "inventory.json: no such file" in said.err
    assert "no data" not in said.out


def test_a_matrix_without_data_files_looks_up_no_data(tmp_path, monkeypatch):
    """If a matrix needs no data files, `jobs plan` sends no request to the cluster's controller."""
    here = tmp_path / "here"
    here.mkdir()
    far = Far(tmp_path, here, monkeypatch)
    assert main(["plan", "--matrix", "quickstart", "--workspace", str(here)]) == 0
    assert far.asked == 0


def test_a_controller_checks_shared_storage_and_no_disk_of_another_node(tmp_path, monkeypatch, capsys):
    make_own(tmp_path)
    (tmp_path / "cluster.yaml").write_text(FAR.replace("SHARED", str(tmp_path)))
    monkeypatch.setattr(on_controller, "starts_runs_here", lambda _where: True)
    assert main(["submit", "--matrix", images(tmp_path), "--workspace", str(tmp_path)]) == 2
    assert f"read mnist: {tmp_path}/.shardlab/data/mnist: not found" in capsys.readouterr().err
    own = datasets.DataSetQuestion(str(tmp_path), "/scratch/sets", [{"data": "cifar10"}])
    found = datasets.answer_question(own, Workspace(tmp_path))
    assert found.missing == []
    why = "cannot check from here whether every node has the data sets cifar10: /scratch/sets is not on storage that all"
    assert found.unknown.startswith(why)
