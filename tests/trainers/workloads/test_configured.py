"""Models that a configuration file defines: what shardlab derives from the file, and that every strategy that accepts the model
does the same work."""

import copy
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support_cells import CELL
from support_configured import CONFIGURATIONS, SEQ_LEN, described, model_of, use
from support_long import LONG, only_long

from shardlab.matrix.model_file import ModelByConfiguration, read_model
from trainers import menu
from trainers.workloads import llama as shipped

pytest_plugins = ["support_trainers"]
# (architecture, strategy): `make test-all` runs these, with each architecture and most families of strategies once. `make
# test-long` runs every combination.
SHORT = {
    ("llama", "tp"), ("qwen2", "fsdp2"), ("mistral", "zero3"), ("gpt_neox", "fsdp1-full-shard"), ("bert", "ddp"),
    ("vit", "ps-sync"),
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Returns a function that maps the name of an architecture to (the model, the workloads that are derived from it). Each
    model is derived only once."""
    folder, known = tmp_path_factory.mktemp("models"), {}

    def of(name):
        if name not in known:
            model = model_of(folder, name)
            found = described(folder / "described", model)
            assert not found.fault, found.fault
            known[name] = model, found.plugins
        return known[name]

    return of


def smallest(bench, models, name, strategy):
    """Makes the folder of a run on the fewest ranks that the strategy accepts, with two ranks in each dimension of its mesh.
    Returns None if no plan of the strategy is known for the model."""
    model, (known, *_) = models(name)
    mesh = {degree: 2 for degree in menu.find_strategy(strategy).degrees if degree != "dp"}
    for gpus in (2 ** len(menu.find_strategy(strategy).degrees), 2 * 2 ** len(menu.find_strategy(strategy).degrees), 1):
        servers = int(menu.find_strategy(strategy).servers)
        run_dir = bench.run_dir(strategy=strategy, gpus=gpus, accumulation=2, servers=servers, prove="auto", steps=2, **mesh)
        use(run_dir, model, known)
        why = menu.refuse(run_dir.read_run().cell)
        if why is None:
            return run_dir
        if "no split of its layers is known" in why or "where it may be cut is not known" in why:
            return None
    raise AssertionError(f"{strategy} refuses {name}: {why}")


def product():
    return [
        (name, strategy) for name in CONFIGURATIONS for strategy in menu.load_strategies() if LONG or (name, strategy) in SHORT
    ]


@pytest.mark.parametrize(("name", "strategy"), product())
def test_a_model_without_a_written_plan_does_the_work_of_one_process(bench, models, name, strategy):
    run_dir = smallest(bench, models, name, strategy)
    if run_dir is None:
        assert "pp" in strategy or name in ("bert", "vit")
    else:
        code, errors = bench.finish(run_dir)
        assert code == 0, errors + "".join(log.read_text() for log in run_dir.log.glob("*"))
        assert run_dir.read_result().parameters == models(name)[1][0].parameters
        assert_work(run_dir, menu.find_strategy(strategy))


@pytest.mark.parametrize(("name", "strategy", "mode"), [
    ("llama", "tp", "none"), ("gpt_neox", "tp-fsdp2", "full"),
    *only_long(("mistral", "tp", "full"), ("qwen2", "tp-fsdp2", "none")),
])  # fmt: skip
def test_a_model_without_a_written_plan_keeps_slices_of_the_positions(bench, models, name, strategy, mode):
    """Between the split layers, each rank has only its slice, so norms get only a part of their gradient."""
    model, (known, *_) = models(name)
    keys = {"accumulation": 2, "activation_checkpointing": mode, "prove": "auto", "steps": 2}
    run_dir = bench.run_dir(strategy=strategy, gpus=2 if strategy == "tp" else 4, tp=2, **keys)
    use(run_dir, model, known, sequence_parallel=True)
    code, errors = bench.finish(run_dir)
    assert code == 0, errors + "".join(log.read_text() for log in run_dir.log.glob("*"))
    assert run_dir.read_result().knobs["effective"]["sequence_parallel"]
    assert_work(run_dir, menu.find_strategy(strategy))


def assert_work(run_dir, strategy):
    """Check the verdict of a run's same-work proof, and the bytes of its collectives if the proof counted them."""
    found, cell = run_dir.read_result().same_work, run_dir.read_run().cell
    if strategy.unprovable(cell):
        assert found.verdict == "not provable"
    elif strategy.other_work(cell):
        assert found.verdict == "other work"
    else:
        assert found.verdict == "proven", found.why
        assert found.communication_bytes["counted"] == pytest.approx(found.communication_bytes["theory"], rel=0.02)


def test_recomputed_blocks_and_a_tiny_twin_do_the_same_work(bench, models):
    """With activation checkpointing by segments, blocks become part of other modules, so shardlab must find the blocks by their
    names."""
    model, (_, twin) = models("mistral")
    run_dir = bench.run_dir(strategy="fsdp2", gpus=2, prove="auto", steps=2, activation_checkpointing="segments-2")
    use(run_dir, model, twin)
    code, errors = bench.finish(run_dir)
    assert code == 0, errors
    result = run_dir.read_result()
    assert (result.same_work.verdict, result.parameters) == ("proven", twin.parameters)
    assert result.knobs["effective"]["checkpointed_blocks"] == 1


def test_a_network_of_torchvision_is_derived_and_its_twin_does_the_same_work(bench, tmp_path):
    model = read_model(ModelByConfiguration(torchvision="resnet18"), tmp_path)
    known, twin = described(tmp_path, model).plugins
    assert (known.parameters, known.block, known.block_count) == (11_689_512, "BasicBlock", 8)
    assert known.flops_per_unit == pytest.approx(6 * 1.814e9, rel=0.03)  # torchvision publishes this number of multiply-adds
    assert (twin.block_count, twin.unit) == (4, "images")
    sizes = {option.name: option.choices for option in known.options}["image_size"]
    assert sizes[:3] == (64, 96, 128)  # sizes begin at 64: at 32 pixels, BatchNorm would get a single value of each channel
    run_dir = bench.run_dir(strategy="fsdp2", gpus=2, prove="auto", steps=2)
    use(run_dir, model, twin)
    code, errors = bench.finish(run_dir)
    assert code == 0, errors
    assert run_dir.read_result().same_work.verdict == "proven"


def test_the_structure_of_a_model_is_derived_from_its_configuration(models):
    """From a configuration, shardlab derives the block, the number of blocks, the degrees of tensor parallelism and more."""
    found = {name: models(name)[1] for name in CONFIGURATIONS}
    firsts = {name: known for name, (known, _) in found.items()}
    assert {name: known.block for name, known in firsts.items()} == {
        "llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer", "mistral": "MistralDecoderLayer",
        "gpt_neox": "GPTNeoXLayer", "bert": "BertLayer", "vit": "ViTLayer",
    }  # fmt: skip
    assert {known.block_count for known in firsts.values()} == {3}
    assert {name: known.tensor_degrees for name, known in firsts.items()} == {
        "llama": (2,), "qwen2": (2,), "mistral": (2,), "gpt_neox": (2, 4), "bert": (), "vit": (),
    }  # fmt: skip
    assert [known.name for known in found["llama"]] == ["my-llama", "my-llama-tiny"]
    assert all("where a pipeline may cut it is not known" in " ".join(known.remarks) for known in firsts.values())
    assert {option.name: option.choices for option in firsts["gpt_neox"].options}["dropout"] == (False, True)
    assert {option.name: option.choices for option in firsts["llama"].options}["dropout"] == (False,)


def test_a_structure_that_cannot_be_derived_is_refused_before_a_run_starts(models):
    _, (known, _) = models("llama")

    def refusal(strategy, seq_len=SEQ_LEN, **keys):
        options = {option.name: option.default for option in (*menu.find_strategy(strategy).options, *known.options)}
        cell = cell_of(known, seq_len=seq_len, strategy=strategy, options=options | keys.pop("options", {}), **keys)
        return menu.refuse(cell)

    assert refusal("tp", gpus=2, dp=1, tp=2) is None
    assert "cannot be split over tp: 4 ranks. Allowed tp: 1, 2." in refusal("tp", gpus=4, dp=1, tp=4, options={"n_layer": 2})
    assert refusal("tp", gpus=2, tp=2, options={"sequence_parallel": True}) is None
    assert "where it may be cut is not known" in refusal("pp-gpipe", gpus=2, dp=1, pp=2)
    assert "my-llama has 128 positions, found seq_len: 129." in refusal("single", seq_len=129)
    assert "n_layer: found 4. Allowed: a whole number from 1 to 3." in refusal("single", options={"n_layer": 4})


def test_fewer_blocks_are_the_first_ones(models):
    """With a smaller n_layer, the model has this number of blocks."""
    _, (known, _) = models("mistral")
    assert len(task_of(known, n_layer=2).model().model.layers) == 2
    assert menu.find_workload_of_cell(cell_of(known)).proof_options == {"n_layer": 2}


def test_operations_and_parameters_are_those_of_the_formula(models):
    """A LLaMA whose heads share keys and values in groups. Each weight in a matrix product counts 6 operations (2 for forward,
    4 for backward). Attention counts as in appendix B of the PaLM paper."""
    _, (known, _) = models("llama")
    width, inner, layers, vocabulary, kept = 64, 96, 3, 300, 32
    in_products = layers * (2 * width**2 + 2 * width * kept + 3 * width * inner) + vocabulary * width
    assert known.parameters == in_products + vocabulary * width + (2 * layers + 1) * width
    assert known.flops_per_unit == 6 * in_products + 12 * layers * width * SEQ_LEN
    assert "6*(N - V*d) + 12*L*d*T" in shipped.FLOPS_SOURCE


def test_operations_of_grouped_convolutions_are_counted_as_those_of_shipped_networks(tmp_path):
    import torch

    from trainers.tasks import vision_classifier, vision_library
    from trainers.tasks.convolutional_task import count_flops_per_image

    vision_library.import_torchvision()
    options = {"image_size": 64, "dropout": False, "data": "synthetic", "subset": None, "subset_seed": 1, "channels_last": True}
    options |= {"cudnn_benchmark": False}
    task = vision_classifier.build(msgspec.structs.replace(CELL, options=options), tmp_path, "mobilenet_v2", twin=False)
    with torch.device("meta"):
        model, image = task.model().eval(), torch.empty(1, 3, 64, 64)
    assert task.flops_per_unit() == count_flops_per_image(model, image)
    assert {type(block).__name__ for block in task.blocks(model)} == {"InvertedResidual"}


def test_masked_positions_are_as_many_in_each_sequence_and_the_same_each_time(models):
    import torch

    from trainers.tasks import configured

    _, (known, _) = models("bert")
    task = task_of(known)
    assert isinstance(task, configured.MaskedTask)
    batch, again = (task.fetch(np.array(items), torch.device("cpu")) for items in ([0, 1, 2], [2, 0]))
    count = round(0.15 * SEQ_LEN)
    assert batch.targets.shape == (3, count)
    assert torch.equal(batch.inputs[[2, 0]], again.inputs)
    tokens, positions = batch.inputs[:, :SEQ_LEN], batch.inputs[:, SEQ_LEN:]
    assert (tokens.gather(1, positions) == 299).all()
    assert (positions.diff(dim=1) > 0).all()
    assert not torch.equal(positions[0], positions[1])
    assert task.source.sha256 != task._tokens.source.sha256


def test_the_digest_of_masked_data_depends_on_the_mask_token(models):
    """Two configurations with different mask tokens have different inputs, so their runs did not do equal work."""
    from trainers.tasks import configured

    _, (known, _) = models("bert")
    task = task_of(known)
    digests = []
    for token in (3, 5, 5):
        made = copy.copy(task.config)
        made.mask_token_id = token
        cell = cell_of(known, options={option.name: option.default for option in known.options})
        digests.append(configured.MaskedTask(cell, Path(), task._architecture, made).source.sha256)
    assert digests[0] != digests[1] == digests[2]


def test_the_attention_mask_equals_that_of_transformers(models):
    """The attention mask of shardlab equals the mask of transformers, also for a sliding window that is shorter than the
    sequence. The mask must not depend on the data."""
    import torch

    for name in ("mistral", "gpt_neox", "bert"):
        _, (known, _) = models(name)
        task = task_of(known)
        batch = task.fetch(np.arange(2), torch.device("cpu"))
        torch.manual_seed(0)
        model = task.model().eval()
        ours = task.outputs(model, batch)
        model.set_attn_implementation("eager")
        assert torch.allclose(ours, task.outputs(model, batch), atol=1e-5)


def task_of(known, **options):
    cell = cell_of(known, options={option.name: option.default for option in known.options} | options)
    return menu.find_workload_of_cell(cell).build(cell, Path())


def cell_of(known, **keys):
    """Returns a cell that trains this workload in one process, except for the given keys."""
    whole = {"strategy": "single", "gpus": 1, "dp": 1, "seq_len": known.seq_len, "workload_code": known.code} | keys
    return msgspec.structs.replace(CELL, workload=known.name, **whole)


@pytest.mark.parametrize(
    ("model_type", "changed", "said"),
    [
        ("nope", {}, "has the model_type 'nope'. Allowed: one that transformers"),
        ("bert", {"architectures": None}, "architectures: found nothing. Allowed for bert: a list with one of BertLMHeadModel"),
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, "BertForMaskedLM (masked language model)"),
        ("bert", {"architectures": ["BertLMHeadModel"]}, 'Allowed: "is_decoder": true.'),
        ("t5", {}, "t5 of transformers has no model that can be trained here."),
        ("llama", {"num_attention_heads": 5}, "transformers"),
        ("llama", {"hidden_act": "os.system"}, "transformers cannot build it: KeyError"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000. Allowed: up to 1000."),
        ("resnet", {"depths": [1, 10**9]}, "depths[1]: found 1000000000. Allowed: up to 1000."),
        ("llama", {"max_position_embeddings": 16}, "seq_len: found 24. Allowed: up to 16 (max_position_embeddings)."),
        ("vit", {"num_channels": 1}, "image_size, num_channels: found 32, 1. Allowed: a whole number, 3."),
    ],
)
def test_a_configuration_that_cannot_be_trained_is_refused_in_a_sentence(tmp_path, model_type, changed, said):
    found = described(tmp_path, model_of(tmp_path, model_type, **changed))
    assert said in found.fault
    assert found.plugins == []


def test_an_unknown_network_of_torchvision_is_refused_with_the_menu(tmp_path):
    found = described(tmp_path, read_model(ModelByConfiguration(torchvision="resnet153"), tmp_path))
    assert "unknown image classifier of torchvision 'resnet153'. Did you mean 'resnet152'?" in found.fault
