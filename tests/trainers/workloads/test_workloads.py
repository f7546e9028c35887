"""Every workload on the menu builds the model that it names, and each tiny workload trains like the full model."""

import itertools
import threading

import msgspec
import numpy as np
import pytest
from support_cells import CELL
from support_long import LONG

from shardlab.files import image_files
from trainers import menu
from trainers.data import data_sets
from trainers.task import Batch
from trainers.tasks import vision_library

pytest_plugins = ["support_trainers"]
WORKLOADS = list(menu.load_workloads())
TINY = [name for name in WORKLOADS if name.endswith("-tiny")]


@pytest.fixture(scope="module")
def task_of(tmp_path_factory):
    """Returns a function that builds the task of a workload with the given options, without starting a rank."""
    from support_trainers import Bench

    vision_library.import_torchvision()
    bench = Bench(tmp_path_factory.mktemp("tasks"))

    def make(name, data_path=None, keys=None, **options):
        cell = bench.run_dir(workload=name, options=options, **(keys or {})).read_run().cell
        return menu.find_workload(name).build(cell, data_path or bench.data)

    return make


def on_meta(task):
    """Builds the model of a task on the meta device, where parameters take no memory."""
    import torch

    with torch.device("meta"):
        return task.model()


def test_the_menu_has_what_the_studies_trained_and_a_twin_of_each():
    originals = {
        "vit-b-32": 88_224_232, "vgg16": 138_357_544, "efficientnet-v2-l": 118_515_272, "convnext-large": 197_767_336,
        "resnet50": 25_557_032, "resnet101": 44_549_160, "densenet121": 7_978_856, "gpt2": 124_439_808,
        "gpt2-large": 774_030_080, "llm-1.3b": 1_345_423_360, "llm-7b": 6_738_415_616,
    }  # fmt: skip
    assert {name: menu.find_workload(name).parameters for name in originals} == originals
    twins = [menu.find_workload(f"{name}-tiny") for name in originals]
    assert all(50_000 < twin.parameters < 500_000 for twin in twins)


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameters_and_operations_stand_on_the_menu_as_they_are_in_the_model(name, task_of):
    workload, task = menu.find_workload(name), task_of(name)
    model = on_meta(task)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == workload.parameters
    assert task.flops_per_unit() == workload.flops_per_unit
    inside = {id(p): p.numel() for block in task.blocks(model) for p in block.parameters()}
    assert sum(inside.values()) > 0.3 * workload.parameters
    assert set(workload.proof_options) <= {option.name for option in workload.options}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_operations_are_those_that_torch_counts(name, task_of):
    """The number of operations of a workload agrees with what torch counts. Torch counts the matrix products and convolutions
    of a model that takes no memory. Models with blocks are built with two blocks.

    The formula 6N of PaLM also counts weights that are in no product (biases, norms, the table of positions), so the difference
    must be exactly six times the number of these weights. In backward, torch does not take the groups of convolutions into
    account. So for a model with grouped convolutions, the expected number is three times that of its forward pass, minus the
    gradient of the images, which is never needed.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    workload = menu.find_workload(name)
    task = task_of(name, **({workload.blocks: 2} if workload.blocks else {}))
    batch = task.fetch(np.arange(2), torch.device("cpu"))
    # Language models are built with fake tensors, because their library cannot build them on the meta device. Other models are
    # built on the meta device, because fake tensors are much slower for them.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake if workload.unit == "tokens" else torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = task.model()
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")  # on a CPU, torch does not count fused attention
        inputs, targets = (torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (batch.inputs, batch.targets))
        outputs = task.outputs(model, Batch(inputs=inputs, targets=targets))
        forward = counter.get_total_flops()
        outputs.sum().backward()
    counted = counter.get_total_flops()
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    if any(module.groups > 1 for module in convolutions):
        positions = (batch.inputs.shape[-1] // convolutions[0].stride[0]) ** 2
        counted = 3 * forward - 2 * (2 * positions * convolutions[0].weight.numel())
    idle = 0
    if workload.unit == "tokens" and "PaLM" in workload.flops_source:
        idle = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 1 or name.endswith("wpe.weight"))
    assert task.flops_per_unit() == pytest.approx(counted / (2 * task.units_per_item) + 6 * idle, rel=1e-9)


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_of_a_tiny_workload_gets_a_gradient_from_one_item(name, task_of):
    """The micro-batch has a single image. So this also tests that BatchNorm gets more than one number per channel."""
    import torch

    task = task_of(name)
    model = task.model().train()
    batch = task.fetch(np.array([0]), torch.device("cpu"))
    outputs = task.outputs(model, batch)
    task.criterion(outputs, batch.targets).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()] == []
    likeliest, classes = outputs.argmax(-1), outputs.shape[-1]
    assert likeliest.shape == batch.targets.shape
    assert int(task.correct(outputs, likeliest)) == batch.targets.numel()
    assert int(task.correct(outputs, (likeliest + 1) % classes)) == 0


# The short form trains one workload of each architecture.
ONLY_LONG = ("gpt2-large-tiny", "llm-1.3b-tiny", "resnet101-tiny", "vit-b-32-tiny")


@pytest.mark.parametrize("name", [name for name in TINY if LONG or name not in ONLY_LONG])
def test_a_tiny_workload_has_something_to_learn(name, bench, task_of):
    import torch

    run = bench.complete(
        workload=name, steps=30, global_batch_size=16, optimizer=menu.find_workload(name).optimizer, warmup_steps=0
    )
    losses = [record.loss for record in run.steps(0).records]
    task = task_of(name)
    batch = task.fetch(np.array([0]), torch.device("cpu"))
    outputs = task.counted_classes or task.outputs(task.model(), batch).shape[-1]
    assert losses[0] == pytest.approx(np.log(outputs), rel=0.25)
    # The median is compared, because the mean depends on single steps that differ between processors.
    assert np.median(losses[-10:]) < 0.85 * losses[0]
    result = run.read_result()
    assert result.parameters == menu.find_workload(name).parameters
    assert result.data["classes"] == (10 if result.unit == "images" else None)


def test_right_answers_are_counted_and_the_validation_split_is_another(task_of):
    import torch

    task = task_of("vit-tiny")
    outputs = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    assert int(task.correct(outputs, torch.tensor([1, 2]))) == 1
    for name in ("vit-tiny", "gpt2-tiny", "llm-7b-tiny"):
        task = task_of(name)
        other = task.open_validation()
        assert other.source.items < task.source.items
        assert other.source.classes == task.source.classes
        a, b = (t.fetch(np.arange(4), torch.device("cpu")).inputs for t in (task, other))
        assert a.shape == b.shape
        assert not torch.equal(a, b)


@pytest.mark.parametrize("name", ["resnet50", "resnet50-tiny", "vit-b-32", "vgg16"])
def test_the_head_has_the_classes_of_the_data(name, task_of, tmp_path):
    import torch

    folder = tmp_path / data_sets.FOLDER_BY_DATA_SET["cifar10"]
    folder.mkdir()
    for file in (*image_files.CIFAR10_FILES["train"], *image_files.CIFAR10_FILES["validation"]):
        (folder / file).write_bytes(bytes([3] + [7] * (image_files.CIFAR10_RECORD_BYTES - 1)) * 4)
    task = task_of(name, tmp_path, data="cifar10")
    assert (task.source.classes, task.source.items, task.open_validation().source.items) == (10, 20, 4)
    model = on_meta(task)
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    assert last.out_features == 10
    assert task.flops_per_unit() <= menu.find_workload(name).flops_per_unit
    batch = task.fetch(np.array([1]), torch.device("cpu"))
    assert batch.inputs.shape == (1, 3, task.image_size, task.image_size)
    assert batch.targets.tolist() == [3]


def test_other_sizes_have_other_operations(task_of):
    assert task_of("vgg16-tiny", image_size=64).flops_per_unit() > 2 * task_of("vgg16-tiny").flops_per_unit()
    menus = menu.find_workload("gpt2-tiny").flops_per_unit
    assert task_of("gpt2-tiny", keys={"seq_len": 32}).flops_per_unit() == menus - 12 * 4 * 64 * 32
    assert task_of("llm-7b-tiny", n_layer=3).flops_per_unit() < menu.find_workload("llm-7b-tiny").flops_per_unit


def test_a_longer_sequence_gets_a_longer_position_table(task_of):
    for seq_len, rows in ((32, 64), (96, 96)):
        task = task_of("gpt2-tiny", keys={"seq_len": seq_len})
        assert on_meta(task).transformer.wpe.weight.shape == (rows, 64)


@pytest.mark.parametrize("name", ["vgg16-tiny", "efficientnet-v2-l-tiny", "convnext-large-tiny", "vit-b-32-tiny", "gpt2-tiny"])
def test_dropout_is_off_by_default(name, task_of):
    import torch
    from torchvision.ops import StochasticDepth

    def rates(**options):
        found = on_meta(task_of(name, **options)).modules()
        return {module.p for module in found if isinstance(module, (torch.nn.Dropout, StochasticDepth))}

    assert rates() == {0.0}
    assert max(rates(dropout=True)) == {"vgg": 0.5, "eff": 0.4, "con": 0.5, "vit": 0.1, "gpt": 0.1}[name[:3]]


def test_a_subset_is_so_many_images(task_of):
    assert task_of("resnet50-tiny", subset=64).source.items == 64


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("resnet50-tiny", {"image_size": 16}, "image_size: found 16. Allowed: a whole number from 32."),
        ("resnet50-tiny", {"image_size": None}, "image_size: found null. Allowed: a whole number from 32."),
        ("vit-b-32-tiny", {"image_size": 36}, "image_size: found 36. Allowed: a multiple of 8, the side of a patch."),
        ("vgg16-tiny", {"subset": "many"}, "subset: found many. Allowed: a whole number from 1, or null."),
        ("vgg16-tiny", {"subset": True}, "subset: found true. Allowed: a whole number from 1, or null."),
        ("vit-b-32", {"n_head": 5}, "n_head: 5 does not divide the width of 768 (n_embd)."),
        ("gpt2-tiny", {"n_head": 5}, "n_head: 5 does not divide the width of 64 (n_embd)."),
        ("gpt2", {"n_layer": 0}, "n_layer: found 0. Allowed: a whole number from 1."),
        ("llm-7b-tiny", {"n_embd": 36, "n_head": 4}, "n_embd: 36 / n_head 4 gives an odd head width."),
        ("llm-7b-tiny", {"data": "tokens"}, "tokens_file: data: tokens needs a file"),
        ("llm-7b-tiny", {"tokens_file": "a.tok"}, "tokens_file: found a.tok with data: synthetic."),
        ("densenet121", {"image_size": 63}, "image_size: found 63 with micro_batch_size 1"),
    ],
)
def test_an_impossible_option_of_a_workload_is_refused_in_a_sentence(name, options, why):
    assert why in menu.refuse(cell_of(name, options))


def cell_of(name, options, **keys):
    workload = menu.find_workload(name)
    defaults = {option.name: option.default for option in (*workload.options, *menu.find_strategy("single").options)}
    known = {"strategy": "single", "gpus": 1, "dp": 1, "micro_batch_size": 1, "gradient_accumulation_steps": 1} | keys
    known |= {"workload": name, "seq_len": workload.seq_len and 8, "options": defaults | options}
    return msgspec.structs.replace(CELL, **known)


SHAPES = itertools.product((1, 2, 36, 64), (1, 2, 3, 32), (0, 1))
SMALL_SHAPES = [dict(zip(("n_embd", "n_head", "n_layer"), shape, strict=True)) for shape in SHAPES]
IMAGES = [(1, 1), (31, 1), (32, 1), (32, 2), (33, 1), (63, 1), (64, 1)]  # (image size in pixels, images in a micro-batch)


def grid(name):
    """Yields cells of a workload. Some of their sizes are allowed and others must be refused."""
    options = {option.name for option in menu.find_workload(name).options}
    for shape in SMALL_SHAPES if "n_embd" in options else [{}]:
        for size, items in IMAGES if "image_size" in options and not shape else [(None, 1)]:
            chosen = shape | {"data": "synthetic"} | ({"image_size": size} if size else {})
            yield cell_of(name, chosen, micro_batch_size=items, global_batch_size=items)
    if "image_size" in options and "n_embd" in options:
        yield from (cell_of(name, {"data": "synthetic", "image_size": size, "n_layer": 1}) for size, _ in IMAGES)


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_accepted_cell_can_be_built_and_takes_a_micro_batch(name, tmp_path):
    """A cell that `jobs plan` accepts never fails later because of its sizes: its model can be built and can process one
    micro-batch. Models without the option n_embd are large, so they are built on the meta device."""
    import torch

    vision_library.import_torchvision()
    buildable = [cell for cell in grid(name) if menu.refuse(cell) is None]
    assert buildable
    for cell in buildable:
        task = menu.find_workload(name).build(cell, tmp_path)
        with torch.device("cpu" if cell.options.keys() & {"n_embd"} else "meta"):
            model = task.model().train()
            if cell.seq_len is None:
                inputs = torch.zeros(cell.micro_batch_size, 3, task.image_size, task.image_size)
            else:
                inputs = torch.zeros(cell.micro_batch_size, cell.seq_len, dtype=torch.int64)
            outputs = task.outputs(model, Batch(inputs=inputs, targets=inputs))
        assert outputs.shape[0] == cell.micro_batch_size


def test_an_architecture_without_dropout_refuses_the_option():
    option = next(option for option in menu.find_workload("resnet50").options if option.name == "dropout")
    assert option.explain_refused_value(True) == "found true. Allowed: false."
    assert option.explain_refused_value(False) is None


def test_fetch_gives_the_same_items_in_another_thread(task_of):
    """`fetch` gives the same items in another thread."""
    import torch

    task, found = task_of("resnet50-tiny"), []
    thread = threading.Thread(target=lambda: found.append(task.fetch(np.arange(8), torch.device("cpu"))))
    thread.start()
    thread.join()
    here = task.fetch(np.arange(8), torch.device("cpu"))
    assert torch.equal(found[0].inputs, here.inputs)
    assert torch.equal(found[0].targets, here.targets)


@pytest.mark.parametrize("name", ["vgg16-tiny", "convnext-large-tiny", "vit-b-32-tiny", "gpt2-large-tiny"])
def test_sharded_and_recomputed_twins_do_the_work_of_one_process(name, bench):
    """These tiny workloads have no BatchNorm. With BatchNorm, each rank would have its own statistics, so the work would not
    equal that of one process."""
    run = bench.complete(workload=name, strategy="fsdp2", gpus=2, steps=2, prove="auto", activation_checkpointing="full")
    proof = run.read_result().same_work
    assert proof.verdict == "proven", proof.why


@pytest.mark.parametrize("name", ["resnet101-tiny", "densenet121-tiny", "efficientnet-v2-l-tiny"])
def test_twins_with_batch_norm_do_the_same_work_sharded_as_replicated(name, bench):
    """Each of the two ranks has its own BatchNorm statistics, whether the model is sharded or replicated. So sharded and
    replicated training must give the same losses."""
    keys = {"workload": name, "gpus": 2, "steps": 4}
    replicated = bench.losses(strategy="ddp", **keys)
    sharded = bench.losses(strategy="fsdp2", activation_checkpointing="full", **keys)
    assert sharded == pytest.approx(replicated, abs=2e-4)


@pytest.mark.parametrize(
    ("name", "strategy"), [("resnet50-tiny", "fsdp2"), ("efficientnet-v2-l-tiny", "zero1"), ("densenet121-tiny", "zero3")]
)
def test_batch_norm_bears_weights_in_bf16(name, strategy, bench):
    """BatchNorm computes with weights in bf16 and statistics in fp32, a mixture that torch's own BatchNorm refuses. Rounding to
    bf16 changes a number by at most 2**-9 of it."""
    keys = {"workload": name, "gpus": 2, "steps": 2}
    rounded, whole = bench.losses(strategy=strategy, precision="bf16", **keys), bench.losses(strategy="ddp", **keys)
    assert 1e-6 < abs(rounded[0] - whole[0]) < 0.01 * whole[0]


def test_batch_norm_in_bf16_counts_and_follows_its_batches_as_torchs_own():
    import torch

    from trainers.tasks.convolutional_task import mix_batch_norms

    torch.manual_seed(0)
    images = torch.randn(4, 3, 5, 5) * 2 + 1
    whole, mixed = torch.nn.BatchNorm2d(3), mix_batch_norms(torch.nn.BatchNorm2d(3))
    mixed.weight.data, mixed.bias.data = mixed.weight.data.bfloat16(), mixed.bias.data.bfloat16()
    for _ in range(2):
        expected, found = whole(images), mixed(images)
    assert torch.equal(expected, found)
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, mixed.get_buffer(name))
    assert torch.equal(whole.eval()(images), mixed.eval()(images))
