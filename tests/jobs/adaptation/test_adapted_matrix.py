"""`jobs plan --adapt` and `jobs submit --adapt`: the nearest matrix that fits a cluster, and the list of all its changes."""

import json

import msgspec
import pytest
import support_configured

from jobs.adaptation.adapt import adapt_matrix
from jobs.adaptation.adapted_cells import adapt_cells
from jobs.cli import main, parser
from jobs.planner import planner_table
from jobs.planning.resolve import Capacity, resolve_cells
from jobs.plugins.own_plugins import OwnPlugins, PluginSet
from jobs.verbs.adapted_matrix import format_matrix_file, use_adapted_matrix, write_adapted_matrix
from shardlab.errors import InputError
from shardlab.files.document import parse_document
from shardlab.matrix import cell_names, matrix
from shardlab.matrix.cell import Optimizer
from shardlab.plugins.plugin_kind import OwnWorkload
from shardlab.runs.prediction import Prediction
from shardlab.verb import Invocation, format_words
from shardlab.workspace.workspace import Workspace

PAPERS = [f"paper{number}" for number in range(1, 6)]
CLUSTERS = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 2)]  # (nodes, GPUs of each node)
HEAD = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, strategy: ddp, global_batch_size: 16, steps: 2}
"""
CLUSTER = """\
schema: 1
name: small
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}]
slurm: {}
gpus: {per_node: GPUS}
"""


def machine(nodes, gpus):
    return Capacity(most_nodes=nodes, gpus_per_node=gpus, has_rank_tasks=False)


def read(content, folder):
    """The matrix of a file with this content in `folder`."""
    return matrix.expand_matrix(parse_document(content, str(folder / "m.yaml")), folder)


def adapted(asked, nodes, gpus, folder):
    """Returns (the adapted matrix, its cells, the changes) on a cluster. The matrix is read from the text of its file."""
    found = adapt_matrix(asked, machine(nodes, gpus), OwnPlugins(), "small")
    if found is None:
        return None
    again = read(format_matrix_file(asked, found.file_content), folder)
    return again, resolve_cells(again, capacity=machine(nodes, gpus)), found.changes


def of_text(words, nodes, gpus, folder):
    return adapted(read((HEAD + words).encode(), folder), nodes, gpus, folder)


def values(cell):
    return cell_names.map_cell_values(msgspec.to_builtins(cell)) | {"instruments": cell.instruments, "expect": cell.expect}


def same_but_listed(before, after, changes):
    """Whether all differences between the values of two cells are in the list of changes. nnodes may differ without a change,
    because a matrix may leave it to the cluster."""
    known = [(change.key, change.study, change.here) for change in changes]
    return before.keys() == after.keys() and all(
        (key, value, after[key]) in known for key, value in before.items() if value != after[key] and key != "nnodes"
    )


@pytest.fixture(scope="module", params=PAPERS)
def study(request):
    return matrix.load_matrix(matrix.find_matrix_file(request.param))


@pytest.fixture(scope="module")
def paper1():
    return matrix.load_matrix(matrix.find_matrix_file("paper1"))


@pytest.mark.parametrize(("nodes", "gpus"), CLUSTERS)
def test_the_adapted_study_fits_and_lists_every_difference(study, nodes, gpus, tmp_path):
    found = adapted(study, nodes, gpus, tmp_path)
    before = [values(cell) for cell in resolve_cells(study, capacity=Capacity(most_nodes=None, gpus_per_node=64))]
    fits = all(cell["gpus"] <= nodes * gpus for cell in before)
    again, cells, changes = found or (study, resolve_cells(study, capacity=machine(nodes, gpus)), [])
    assert fits or changes
    assert all(cell.nnodes <= nodes and cell.gpus <= cell.nnodes * gpus for cell in cells)
    assert adapt_matrix(again, machine(nodes, gpus), OwnPlugins(), "small") is None

    after = [values(cell) for cell in cells]
    changes = [change for change in changes if change.key not in ("name", "cells")]
    for here in after:
        assert any(same_but_listed(old, here, changes) for old in before), here
    left_out = [change.study for change in changes if change.key == "cell"]
    for old in before:
        is_here = any(same_but_listed(old, here, changes) for here in after)
        assert is_here or any(all(old[key] == value for key, value in gone.items()) for gone in left_out), old

    given, new = study.document.data, again.document.data
    same = set(given) - {"name", "exclude", "include", "claims", "reported"}
    assert {key: given[key] for key in same} == {key: new[key] for key in same}
    told = {change.key: change.here for change in changes}
    kept = {claim.id: claim.test for claim in again.file.claims}
    for claim in study.file.claims:
        assert told.get(f"claims.{claim.id}", claim.test) == kept.get(claim.id)
    assert all(change in again.file.deviations for change in changes)


@pytest.mark.parametrize(("nodes", "gpus"), CLUSTERS)
def test_strategies_of_equal_work_on_one_size_still_do_equal_work(study, nodes, gpus):
    keys = ("workload", "gpus", "nnodes", "global_batch_size", "micro_batch_size", "seq_len", "steps", "epochs", "precision")
    groups: dict[tuple, set[tuple]] = {}
    for one in adapt_cells(study, machine(nodes, gpus), OwnPlugins()):
        if one.new_cell is not None and one.original_cell.tp == one.original_cell.pp == 1:
            old, new = (tuple(getattr(cell, key) for key in keys) for cell in (one.original_cell, one.new_cell))
            groups.setdefault(old, set()).add(new)
            assert (one.new_cell.gpus > 1) == (one.original_cell.gpus > 1)
    assert {len(news) for news in groups.values()} == {1}


def test_study_1_on_two_nodes_of_two_gpus_asks_all_its_questions(paper1, tmp_path):
    again, cells, _ = adapted(paper1, 2, 2, tmp_path)
    sizes = {(cell.gpus, cell.nnodes) for cell in cells}
    assert sizes == {(1, 1), (2, 1), (4, 2)}  # 4 GPUs on one node become 2; 8 on two nodes become 4
    claims = {claim.id: claim for claim in again.file.claims}
    assert len(claims) == 9
    scales = claims["p1-deepspeed-scales-better"]
    assert (
        "throughput_per_s(strategy='zero2', gpus=4, micro_batch_size=64) / throughput_per_s(strategy='zero2', gpus=2"
        in scales.test
    )
    assert "gpus 4 instead of 8" in scales.adapted
    (speed,) = (entry for entry in again.file.reported if entry.metric == "speed_gain_pct")
    assert (speed.cell["gpus"], speed.against["gpus"]) == (2, 2)
    assert "gpus 2 instead of 4" in speed.adapted


def test_combinations_that_fit_stay_on_the_axes(paper1, tmp_path):
    """Cells of two nodes become cells of one node that the axes have already, so no cell is listed in `include`."""
    again, _, _ = adapted(paper1, 1, 4, tmp_path)
    assert again.file.include == paper1.file.include
    assert again.file.exclude[:-1] == paper1.file.exclude
    assert (again.file.exclude[-1]["gpus"], again.file.exclude[-1]["nnodes"]) == (8, 2)


def test_a_new_cell_changes_no_combination_with_its_values_on_the_axes(tmp_path):
    """The `include` entry with 4 GPUs becomes a cell on 2 GPUs. The axes also give a cell on 2 GPUs, with another batch.

    The adapted matrix has both cells.
    """
    words = "axes: {gpus: [1, 2]}\ninclude: [{gpus: 4, micro_batch_size: 2}]\n"
    again, cells, _ = of_text(words, 1, 2, tmp_path)
    assert sorted((cell.gpus, cell.micro_batch_size) for cell in cells) == [(1, 16), (2, 2), (2, 8)]
    assert "listed in `include`" in again.file.exclude[0]["why"]


def test_study_1_on_one_node_leaves_out_claims_about_two_nodes(paper1, tmp_path):
    again, cells, changes = adapted(paper1, 1, 4, tmp_path)
    assert {("gpus", 8, 4), ("nnodes", 2, 1)} <= {(one.key, one.study, one.here) for one in changes if one.cells == 21}
    assert len(cells) == 41  # the study's 41 cells on one node; each cell on two nodes becomes equal to one of these
    gone = {change.key.removeprefix("claims."): change.why for change in changes if change.here is None}
    assert gone.keys() == {"p1-deepspeed-scales-better", "p1-deepspeed-more-network", "p1-full-shard-least-network"}
    assert gone["p1-deepspeed-scales-better"] == "left out: cells that it compares are the same cell here"
    assert "network between nodes" in gone["p1-deepspeed-more-network"]
    assert {claim.id for claim in again.file.claims}.isdisjoint(gone)


def test_a_claim_selects_the_new_cells_alone(tmp_path):
    words = """\
axes: {gpus: [4], micro_batch_size: [2, 4]}
include: [{gpus: 2, micro_batch_size: 4, seed: 1}]
claims:
- {id: c, says: s, where: w, test: "train_time_s(gpus=4, micro_batch_size=4) > 2 * train_time_s(gpus=4, micro_batch_size=2)"}
"""
    again, cells, _ = of_text(words, 1, 2, tmp_path)
    assert sorted((cell.gpus, cell.micro_batch_size, cell.seed) for cell in cells) == [(2, 2, 42), (2, 4, 1), (2, 4, 42)]
    test = again.file.claims[0].test
    assert test == "train_time_s(gpus=2, micro_batch_size=4, seed=42) > 2 * train_time_s(gpus=2, micro_batch_size=2)"


def test_degrees_are_divided_and_stay_above_one(tmp_path):
    both = "include: [{strategy: tp-pp, gpus: 8, tp: 4, pp: 2, micro_batch_size: 2}]\n"
    _, (cell,), changes = of_text(both, 1, 4, tmp_path)
    assert (cell.gpus, cell.dp, cell.tp, cell.pp) == (4, 1, 2, 2)
    assert ("tp", 4, 2) in [(change.key, change.study, change.here) for change in changes]
    with pytest.raises(InputError, match=r"no cell fits the cluster small, also not with fewer GPUs"):
        of_text(both, 1, 2, tmp_path)


def test_all_strategies_of_one_size_get_the_same_size_or_are_left_out(tmp_path):
    """On a node of 4 GPUs, 6 GPUs become 3, the largest divisor that fits. Hybrid sharding needs an even number of GPUs."""
    words = "axes: {strategy: [ddp, pp-1f1b, fsdp1-hybrid-shard]}\n"
    words += "zip: [{gpus: [6], global_batch_size: [36], microbatches: [6], options.n_layer: [6]}]\n"
    _, cells, changes = of_text(words, 1, 4, tmp_path)
    assert {(cell.strategy, cell.gpus) for cell in cells} == {("ddp", 3), ("pp-1f1b", 3)}
    (gone,) = (change for change in changes if change.key == "cell")
    assert gone.study["strategy"] == "fsdp1-hybrid-shard"


def test_a_cell_that_the_matrix_excludes_is_left_out_with_its_reason(tmp_path):
    """If a cell, adapted to fewer GPUs, is one that the matrix excludes, the cell is left out with this reason."""
    words = """\
axes: {gpus: [1, 4], strategy: [ddp, fsdp2]}
exclude: [{strategy: fsdp2, gpus: 2, why: not on two}, {strategy: fsdp2, gpus: 1, why: not on one}]
"""
    _, cells, changes = of_text(words, 1, 2, tmp_path)
    assert {(cell.strategy, cell.gpus) for cell in cells} == {("ddp", 1), ("ddp", 2)}
    (gone,) = (change for change in changes if change.key == "cell")
    assert gone.study["strategy"] == "fsdp2"
    assert gone.why.endswith("on 2 GPUs the matrix excludes it: not on two")


def test_an_inclusion_that_lost_its_combinations_becomes_no_cell(tmp_path):
    """An `include` entry that only adds keys to cells does not become a cell when these cells get fewer GPUs."""
    words = """\
axes: {strategy: [ddp], gpus: [1, 4]}
include: [{gpus: 4, options.gradient_as_bucket_view: false}]
"""
    again, cells, _ = of_text(words, 1, 2, tmp_path)
    assert [(cell.gpus, cell.options["gradient_as_bucket_view"]) for cell in cells] == [(1, True), (2, False)]
    assert len(again.file.include) == 1


def on(room, words, folder):
    """The adapted matrix, its cells and the changes on machines with this capacity, as `adapted` returns them."""
    found = adapt_matrix(read((HEAD + words).encode(), folder), room, OwnPlugins(), "small")
    again = read(format_matrix_file(read((HEAD + words).encode(), folder), found.file_content), folder)
    cells = resolve_cells(again, capacity=room)
    assert {cell.hash() for cell in cells} == found.cell_hashes
    return again, cells, found.changes


def listed(changes):
    return [(change.key, change.study, change.here, change.cells) for change in changes if change.key != "name"]


def test_a_time_limit_becomes_the_largest_that_the_partition_allows(tmp_path):
    words = 'axes: {gpus: [2]}\nzip: [{seed: [1, 2], time_limit: ["00:10:00", "10:00:00"]}]\n'
    _, cells, changes = on(Capacity(most_nodes=1, gpus_per_node=2, limit_s=3600), words, tmp_path)
    assert [(cell.seed, cell.time_limit_s) for cell in cells] == [(1, 600), (2, 3600)]
    assert listed(changes) == [("time_limit_s", 36000, 3600, 1)]
    assert changes[-1].why == "the partition allows 01:00:00"
    _, (cell,), _ = on(
        Capacity(most_nodes=1, gpus_per_node=2, limit_s=90_061), 'include: [{gpus: 2, time_limit: "9-00:00:00"}]\n', tmp_path
    )
    assert cell.time_limit_s == 90_061  # 1-01:01:01


@pytest.mark.parametrize(
    ("types", "here", "why"),
    [
        ([], None, "the cluster file names no GPU type"),
        (["a100"], "a100", "the cluster has only the GPU type a100"),
        (["a100", "v100"], None, "the cluster has only the GPU types a100, v100"),
    ],
)
def test_a_gpu_type_becomes_the_only_or_the_default_type_of_the_cluster(types, here, why, tmp_path):
    room = Capacity(most_nodes=1, gpus_per_node=2)
    room = msgspec.structs.replace(room, by_gpu_type=dict.fromkeys(types, room))
    again, cells, changes = on(room, "axes: {gpus: [1, 2], gpu_type: [h100]}\n", tmp_path)
    assert [(cell.gpus, cell.gpu_type) for cell in cells] == [(1, here), (2, here)]
    assert listed(changes) == [("gpu_type", "h100", here, 2)]
    assert changes[-1].why == why
    assert adapt_matrix(again, room, OwnPlugins(), "small") is None


def test_a_launcher_of_slurm_becomes_torchrun_without_slurm(tmp_path):
    _, cells, changes = on(machine(1, 2), "axes: {launcher: [submitit, deepspeed], gpus: [2]}\n", tmp_path)
    assert sorted(cell.launcher for cell in cells) == ["deepspeed", "torchrun"]
    assert listed(changes) == [("launcher", "submitit", "torchrun", 1)]
    assert changes[-1].why == "the launcher submitit starts its ranks by Slurm, which the cluster does not have"


def test_a_value_that_all_cells_share_changes_in_one_place(tmp_path):
    head = HEAD.replace("steps: 2}", 'steps: 2, gpu_type: h100, time_limit: "10:00:00"}')
    words = """\
axes: {gpus: [1, 2, 4]}
claims: [{id: c, says: s, where: w, test: "throughput_per_s(gpus=2, gpu_type='h100') > 0"}]
"""
    asked = read((head + words).encode(), tmp_path)
    a100 = Capacity(most_nodes=1, gpus_per_node=2, limit_s=3600)
    room = msgspec.structs.replace(a100, by_gpu_type={"a100": a100})
    found = adapt_matrix(asked, room, OwnPlugins(), "small")
    assert found.file_content["defaults"] == asked.document.data["defaults"] | {"gpu_type": "a100", "time_limit": "01:00:00"}
    changes = listed(found.changes)
    assert ("gpu_type", "h100", "a100", 3) in changes
    assert ("time_limit_s", 36000, 3600, 3) in changes
    assert ("gpus", 4, 2, 1) in changes
    (claim,) = found.file_content["claims"]
    assert claim["test"] == "throughput_per_s(gpus=2, gpu_type='a100') > 0"
    assert claim["adapted"].startswith("gpu_type a100 instead of h100")
    cells = resolve_cells(read(format_matrix_file(asked, found.file_content), tmp_path), capacity=room)
    assert {cell.hash() for cell in cells} == found.cell_hashes
    assert {(cell.gpus, cell.gpu_type, cell.time_limit_s) for cell in cells} == {(1, "a100", 3600), (2, "a100", 3600)}


def test_a_default_that_an_entry_depends_on_changes_in_the_cells(tmp_path):
    head = HEAD.replace("steps: 2}", "steps: 2, gpu_type: h100}")
    words = "axes: {gpus: [1, 2]}\ninclude: [{when: \"gpu_type == 'h100'\", seed: 7}]\n"
    asked = read((head + words).encode(), tmp_path)
    found = adapt_matrix(asked, Capacity(most_nodes=1, gpus_per_node=2), OwnPlugins(), "small")
    cells = resolve_cells(read(format_matrix_file(asked, found.file_content), tmp_path), capacity=machine(1, 2))
    assert [(cell.gpus, cell.gpu_type, cell.seed) for cell in cells] == [(1, None, 7), (2, None, 7)]
    assert {cell.hash() for cell in cells} == found.cell_hashes


def test_a_plan_reports_cells_that_do_not_fit_and_that_adapt_keeps_batch_sizes():
    foreseen = {"a": Prediction(fits="no"), "b": Prediction(fits="unlikely"), "c": Prediction(fits="yes")}
    unfit, unlikely, adapts = planner_table.describe_sums(foreseen, dict.fromkeys(foreseen, 1))
    assert unfit.startswith("predicted: 1 of 3 cell(s) do not fit the memory of a GPU")
    assert unlikely == "predicted: 1 of 3 cell(s) are unlikely to fit the memory of a GPU."
    assert "--adapt changes no batch size" in adapts
    assert planner_table.describe_sums({"c": foreseen["c"]}, {"c": 1}) == []


def test_cells_on_gpu_types_that_become_the_same_type_run_once(tmp_path):
    words = """\
axes: {gpus: [2], gpu_type: [a100, h100]}
claims: [{id: c, says: s, where: w, test: "throughput_per_s(gpu_type='h100') > throughput_per_s(gpu_type='a100')"}]
"""
    a100 = Capacity(most_nodes=1, gpus_per_node=2)
    again, cells, changes = on(msgspec.structs.replace(a100, by_gpu_type={"a100": a100}), words, tmp_path)
    assert [cell.gpu_type for cell in cells] == ["a100"]
    assert again.file.claims == []
    assert [change.why for change in changes if change.key == "claims.c"] == [
        "left out: cells that it compares are the same cell here"
    ]


def test_an_exclusion_still_applies_after_the_launcher_is_replaced(tmp_path):
    words = """\
axes: {gpus: [2], launcher: [submitit, deepspeed]}
exclude: [{launcher: torchrun, why: not with torchrun}]
"""
    _, cells, changes = on(machine(1, 2), words, tmp_path)
    assert [cell.launcher for cell in cells] == ["deepspeed"]
    (gone,) = (change for change in changes if change.key == "cell")
    assert gone.why == "with the values that the cluster has the matrix excludes it: not with torchrun"


def test_adapting_twice_keeps_the_changes_of_both(tmp_path):
    words = "axes: {gpus: [8]}\n"
    again, _, first = of_text(words, 1, 4, tmp_path)
    last, (cell,), second = adapted(again, 1, 2, tmp_path)
    assert cell.gpus == 2
    assert (again.name, last.name) == ("m-adapted", "m-adapted")
    assert last.file.deviations == [*first, *second]


@pytest.mark.parametrize(
    "odd", ["1e5", "yes", "on", "No", "null", "~", "00:50:00", "0o17", "3.10", "a: b", "# no", "é\tü", " x", "", "-"]
)
def test_the_text_of_an_adapted_matrix_parses_to_the_same_content(odd, tmp_path):
    asked = read(HEAD.encode(), tmp_path)
    content = {"title": odd, "list": [odd, {"key": odd}], "same": [{"a": 1}, {"a": 1}], "rate": 1e-8, "none": None, "is": True}
    assert parse_document(format_matrix_file(asked, content), "m.yaml").data == content


def cluster_file(folder, gpus):
    file = folder / "small.yaml"
    file.write_text(CLUSTER.replace("GPUS", str(gpus)))
    return str(file)


def test_adapt_writes_a_matrix_file_that_other_commands_accept(tmp_path, capsys):
    given = tmp_path / "m.yaml"
    given.write_text(HEAD + "axes: {gpus: [1, 2, 4], strategy: [ddp, fsdp2]}\n")
    words = ["--cluster", cluster_file(tmp_path, 2), "--workspace", str(tmp_path)]
    assert main(["plan", "--matrix", str(given), "--adapt", *words, "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    (file,) = (tmp_path / "adapted").glob("*/m-adapted.yaml")
    assert str(file) in printed.err
    assert "gpus: 2 instead of 4 (2 cells): a run can have 1 node and 2 GPUs on each node" in printed.err
    assert (document["matrix"], len(document["cells"]), document["misfits"]) == ("m-adapted", 4, [])
    assert main(["render", f"--matrix={file}", "--out", str(tmp_path / "out"), *words]) == 0
    before = file.read_bytes()
    assert main(["plan", f"--matrix={file}", "--adapt", *words]) == 0
    assert "nothing was changed" in capsys.readouterr().out
    assert main(["plan", "--adapt", f"--matrix={given}", *words]) == 0
    assert file.read_bytes() == before
    file.write_bytes(before + b"# mine\n")
    assert main(["plan", "--adapt", "--matrix", str(given), *words]) == 2
    assert "was changed after" in capsys.readouterr().err
    assert file.read_bytes() == before + b"# mine\n"


def test_the_command_line_names_the_adapted_file_in_place_of_adapt(tmp_path):
    """`--adapt` is removed from the command line, and `--matrix` names the adapted file.

    The controller of a remote cluster gets this command line. It lacks this machine's cluster file, so it could not adapt.
    """
    given = tmp_path / "m.yaml"
    given.write_text(HEAD + "axes: {gpus: [4]}\n")
    for words in (["--matrix", str(given)], [f"--matrix={given}"]):
        line = ["submit", *words, "--adapt", "--wait", "--cluster", cluster_file(tmp_path, 2), "--workspace", str(tmp_path)]
        invocation = Invocation(parser().parse_args(line))
        use_adapted_matrix(invocation)
        (file,) = (tmp_path / "adapted").glob("*/m-adapted.yaml")
        cluster, workspace = line[line.index("--cluster") + 1], str(tmp_path)
        words = [f"--workspace={workspace}", f"--matrix={file}", f"--cluster={cluster}", "--wait"]
        assert format_words(invocation.arguments) == ["submit", *words]


def test_models_that_a_matrix_names_are_copied_beside_it(tmp_path):
    """The model stays a configuration in the new file, also in a cell that `include` lists."""
    own = tmp_path / "own"
    name = support_configured.write(own / "models", "llama")
    model = f"{{transformers: models/{name}, seq_len: 24}}"
    defaults = "{strategy: ddp, gpus: 4, global_batch_size: 16, steps: 2}"
    axes = f"{{workload: [gpt2-tiny, {model}]}}"
    (own / "m.yaml").write_text(f"schema: 1\nname: m\ndefaults: {defaults}\naxes: {axes}\n")
    asked = matrix.load_matrix(own / "m.yaml")
    (workload,) = asked.models
    sgd = Optimizer("sgd", 0.1)
    known = OwnWorkload(
        name=workload, summary="A model.", code="0" * 64, file=f"{workload}.json", unit="tokens", parameters=9,
        flops_per_unit=None, flops_source="", optimizer=sgd, seq_len=24,
    )  # fmt: skip
    with_model = OwnPlugins(workloads=PluginSet(by_name={workload: known}))
    found = adapt_matrix(asked, machine(1, 2), with_model, "small")
    file = write_adapted_matrix(asked, found, machine(1, 2), with_model, Workspace(tmp_path / "w"))
    assert (file.parent / "models" / name).read_bytes() == (own / "models" / name).read_bytes()
    assert {point.keys["workload"]: point.keys["gpus"] for point in matrix.load_matrix(file).points} == {
        "gpt2-tiny": 2,
        workload: 2,
    }


def test_adapting_without_a_fitting_cell_is_one_sentence_and_writes_nothing(tmp_path, capsys):
    file = tmp_path / "m.yaml"
    file.write_text(HEAD + "axes: {gpus: [2, 4]}\n")
    words = ["--cluster", cluster_file(tmp_path, 1), "--workspace", str(tmp_path / "w")]
    assert main(["submit", "--matrix", str(file), "--adapt", "--dry-run", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no cell fits the cluster small, also not with fewer GPUs: needs 2 nodes, the cluster has 1." in said
    assert not (tmp_path / "w").exists()


def test_the_changes_of_an_adapted_matrix_are_stored_with_its_runs(tmp_path, capsys):
    """On this machine, runs of two nodes do not fit. The expansion, which `collect` reads for its report, lists the changes."""
    file = tmp_path / "m.yaml"
    file.write_text(HEAD + "zip: [{gpus: [2, 4], nnodes: [1, 2]}]\n")
    words = ["--workspace", str(tmp_path / "w")]
    assert main(["plan", "--matrix", str(file), "--adapt", *words]) == 0
    (new,) = (tmp_path / "w" / "adapted").glob("*/m-adapted.yaml")
    assert main(["render", "--matrix", str(new), *words]) == 0, capsys.readouterr().err
    kept = json.loads((tmp_path / "w" / ".shardlab" / "matrices" / "m-adapted.json").read_text())
    assert {"key": "nnodes", "study": 2, "here": 1, "why": "a run can have 1 node", "cells": 1} in kept["deviations"]
