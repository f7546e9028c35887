"""Describes a model that is defined by a configuration file: its parameters, operations and blocks, and what is unknown.

`jobs` runs this module in a separate process, as for the workloads of a user's file. No code from the file is executed: the
configuration is data, and the code comes from transformers and torchvision. Messages about the model do not name the file;
`jobs` adds the name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from shardlab.errors import InputError, ShardlabError
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix import model_file
from shardlab.matrix.cell import Cell, Optimizer
from shardlab.plugins.plugin_kind import OwnWorkload
from shardlab.registry import Option
from trainers import menu
from trainers.description.count_model import count_model
from trainers.model import configuration, counted_flops
from trainers.model.blocks import join_block_class_names
from trainers.model.frozen_statistics import list_batch_norm_layers as batch_norms
from trainers.plans import derived
from trainers.task import Batch, Task
from trainers.tasks import configured, vision_classifier
from trainers.tasks.convolutional_task import find_dropout_modules
from trainers.workload_options import list_image_options, list_token_options
from trainers.workloads.convolutional import OPTIONS

if TYPE_CHECKING:
    from trainers.model.configuration import Architecture
    from trainers.model.counted_flops import FlopCount
    from trainers.plans.derived import Split

OPTIMIZER = Optimizer(name="adamw", lr=3e-4)
LAYERS_OF_TWIN, MOST_OF_TWIN, MOST_FLOPS_OF_TWIN = 4, 30_000_000, 1e10  # largest numbers of blocks, parameters, FLOPs per item
COUNTED_BLOCKS = 2  # of equal blocks, in which the tensors are counted that autograd saves
IMAGE_SIZE = 224
IMAGE_SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 512)
# The outputs for one item in two different batches may differ by this much, relative to the largest output, by rounding.
OUTPUT_TOLERANCE = 1e-3


class ModelSizes(NamedTuple):
    """The options and the sequence lengths of a model."""

    summary: str
    """A description for people."""
    options: tuple[Option, ...]
    """The options with their defaults."""
    seq_len: int | None = None
    """The default sequence length in tokens; None for a model of images."""
    longest_sequence: int | None = None
    """The longest possible sequence in tokens; None for a model of images, or if the configuration does not say."""


def describe_configuration(source: PluginSource, seq_len: int | None) -> list[OwnWorkload]:
    """The workload of a configuration file (shardlab/matrix/model_file.py), and its tiny twin if a twin can be derived.

    seq_len: tokens of a sequence; None for a model of images. Raises InputError.
    """
    try:
        content = model_file.read_content(source.contents[source.file.name])
        workload = _describe_workload(content, source.digest, source.name, seq_len, twin=False)
    except ShardlabError:
        raise
    except Exception as error:  # a library may raise anything if the content of the file is invalid
        raise InputError(f"the model cannot be built: {configuration.summarize_error(error)}") from error
    if workload.name.endswith("-tiny"):
        return [workload]
    try:
        twin = _describe_workload(content, source.digest, f"{source.name}-tiny", seq_len, twin=True)
    except Exception as error:  # noqa: BLE001 - the sizes of a twin are a guess, with which a library may raise anything
        why = str(error) if isinstance(error, ShardlabError) else configuration.summarize_error(error)
        remark = f"no tiny twin could be derived, so --scale tiny refuses it: {why}"
        return [msgspec.structs.replace(workload, remarks=(*workload.remarks, remark))]
    _check_provable(content, twin)
    return [workload, twin]


def _describe_workload(
    configuration_content: dict[str, Any], digest: str, name: str, seq_len: int | None, *, twin: bool
) -> OwnWorkload:
    model_sizes = _read_sizes(configuration_content, seq_len, twin=twin)
    options = {option.name: option.default for option in model_sizes.options}
    task = configured.make_task(
        configuration_content, make_one_process_cell(name, model_sizes.seq_len, options), Path(), twin=twin
    )
    with torch.device("meta"):
        model = task.model()
    blocks = task.blocks(model)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if twin and parameters > MOST_OF_TWIN:
        raise InputError(f"at the smallest sizes that are known it has {parameters:,} parameters.")
    flop_count, flops_source = _count_flops(task)
    if twin and flop_count is not None and (item_flops := flop_count.flops * task.units_per_item) > MOST_FLOPS_OF_TWIN:
        raise InputError(f"at the smallest sizes that are known an item needs {item_flops:,.0f} operations.")
    if twin:
        _check_gradients(task)
    split: Split | str = "how to split its layers over ranks is not known"
    if isinstance(task, configured.CausalTask):
        split = derived.derive_split(model, blocks, task.config)
    remarks = [f"{split}, so {_name_refused_strategies('tp')} are refused"] if isinstance(split, str) else []
    remarks.append(f"where a pipeline may cut it is not known, so {_name_refused_strategies('pp')} are refused")
    if not blocks:
        remarks.append("no repeated blocks were found, so FSDP and ZeRO-3 gather the whole model at once")
    if flop_count is None:
        remarks.append(flops_source)
    block_parameters, shallow = counted_flops.count_block_parameters(blocks), task
    if len(set(block_parameters)) == 1 and options.get("n_layer") == len(blocks):
        cell = make_one_process_cell(name, model_sizes.seq_len, {**options, "n_layer": min(len(blocks), COUNTED_BLOCKS)})
        shallow = configured.make_task(configuration_content, cell, Path(), twin=twin)
    layers = derived.Split((), (), ()) if isinstance(split, str) else split
    counts = flop_count and count_model(task, model, flop_count, shallow, layers.map_styles, layers.degrees)
    return OwnWorkload(
        name=name,
        summary=("the tiny twin of " if twin else "") + model_sizes.summary,
        code=digest,
        file=f"{name.removesuffix('-tiny') if twin else name}{model_file.CONFIGURATION_SUFFIX}",
        unit="images" if model_sizes.seq_len is None else "tokens",
        parameters=parameters,
        block_parameters=block_parameters,
        flops_per_unit=None if flop_count is None else flop_count.flops or None,
        flops_source=flops_source,
        optimizer=OPTIMIZER,
        options=model_sizes.options,
        block=join_block_class_names(blocks),
        twin=twin,
        seq_len=model_sizes.seq_len,
        longest=model_sizes.longest_sequence,
        tensor_degrees=layers.degrees,
        remarks=tuple(remarks),
        counts=counts and msgspec.structs.replace(counts, splits_vocabulary=layers.vocabulary_layers is not None),
    )


def _name_refused_strategies(degree: str) -> str:
    """The names of the strategies that use a dimension of the mesh (`tp` or `pp`), for a message that they are refused."""
    return ", ".join(name for name, strategy in menu.load_strategies().items() if degree in strategy.degrees)


def _read_sizes(content: dict[str, Any], seq_len: int | None, *, twin: bool) -> ModelSizes:
    """The options and sequence lengths of the model, or of its tiny twin. Raises InputError if `seq_len` or the size of images
    does not fit the model."""
    if "torchvision" in content:
        return _read_torchvision_sizes(content["torchvision"], twin=twin)
    config_values = content["transformers"]
    architecture = configuration.find_architecture(config_values)
    if twin:
        config_values = configuration.shrink_to_twin(architecture, config_values)
    config = configuration.make_config(architecture, config_values, dropout=True)
    dropout_keys = configuration.list_dropout_keys(config)
    layer_count = getattr(config, configuration.LAYERS_KEY, None)
    layers: tuple[Option, ...] = ()
    if isinstance(layer_count, int) and layer_count > 0 and not hasattr(config, "depths"):
        help_text = "blocks; if fewer than in the configuration, the first ones"
        layers = (
            Option("n_layer", min(layer_count, LAYERS_OF_TWIN) if twin else layer_count, help_text, least=1, most=layer_count),
        )
    summary = f"{architecture.model.__name__} of transformers, random weights"
    if architecture.kind == "image classifier":
        if seq_len is not None:
            raise InputError("seq_len: an image classifier has no sequences. Allowed: leave seq_len out.")
        options = _list_possible_image_options(
            *_find_transformer_image_sizes(architecture, config, twin=twin), ", ".join(dropout_keys) or None
        )
        return ModelSizes(summary, (*layers, *options))
    if seq_len is None:
        raise InputError(
            "seq_len is missing: the tokens of a sequence. Needed: {transformers: FILE, seq_len: 1024}, for example."
        )
    longest_sequence = getattr(config, "max_position_embeddings", None)
    longest_sequence = longest_sequence if type(longest_sequence) is int and longest_sequence > 0 else None
    if longest_sequence is not None and seq_len > longest_sequence:
        raise InputError(f"seq_len: found {seq_len}. Allowed: up to {longest_sequence} (max_position_embeddings).")
    dropout = Option(
        "dropout",
        False,
        f"the rates of the configuration: {', '.join(dropout_keys)}" if dropout_keys else "the model has no dropout",
        choices=(False, True) if dropout_keys else (False,),
    )  # fmt: skip
    return ModelSizes(summary, (*layers, dropout, *list_token_options("synthetic")), seq_len, longest_sequence)


def _find_transformer_image_sizes(architecture: Architecture, config: Any, *, twin: bool) -> tuple[int, tuple[int, ...]]:
    """The sizes of the images of a classifier of transformers, as widths in pixels: (default size, all possible sizes).

    Raises InputError if the configuration asks for images that are not square or do not have 3 channels.
    """
    size, colours = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if colours != 3 or (size is not None and type(size) is not int):
        raise InputError(f"image_size, num_channels: found {str(size)[:40]}, {str(colours)[:40]}. Allowed: a whole number, 3.")
    if size is not None:
        return size, (size,)
    with torch.device("meta"):
        network = configuration.build_model(architecture, config).train()
    return _find_image_sizes(lambda images: network(images).logits, twin=twin)


def _read_torchvision_sizes(name: str, *, twin: bool) -> ModelSizes:
    with torch.device("meta"):
        network = vision_classifier.build_network(name, 2, twin=twin).train()
    dropout = "those of torchvision" if find_dropout_modules(network) else None
    options = (*_list_possible_image_options(*_find_image_sizes(network, twin=twin), dropout), *OPTIONS)
    return ModelSizes(f"{name} of torchvision, random weights", options)


def _find_image_sizes(network: Callable[[torch.Tensor], Any], *, twin: bool) -> tuple[int, tuple[int, ...]]:
    """The sizes of the images of a network, as widths in pixels: (default size, all possible sizes). They are found by trying,
    because the network does not name its sizes. For a twin, only the smallest possible size. Raises InputError if the network
    accepts no size."""
    working_sizes = tuple(itertools.islice(_find_trainable_sizes(network), 1 if twin else None))
    if not working_sizes:
        raise InputError(f"the network computes no image in training, of {', '.join(map(str, IMAGE_SIZES))} pixels a side.")
    return (IMAGE_SIZE if IMAGE_SIZE in working_sizes else max(working_sizes)), working_sizes


def _find_trainable_sizes(network: Callable[[torch.Tensor], Any]) -> Iterator[int]:
    """The sizes of IMAGE_SIZES with which the network can compute in training mode, for a batch of one image."""
    for size in IMAGE_SIZES:
        try:
            outputs = network(torch.empty(1, 3, size, size, device="meta"))
        except Exception:  # noqa: BLE001 - networks raise many kinds of errors if an image is too small
            continue
        if not isinstance(outputs, torch.Tensor):
            raise InputError(f"the network returns a {type(outputs).__name__} in training. Allowed: a network with one output.")
        yield size


def _list_possible_image_options(size: int, sizes: tuple[int, ...], dropout: str | None) -> tuple[Option, ...]:
    return tuple(
        msgspec.structs.replace(option, choices=sizes, least=None) if option.name == "image_size" else option
        for option in list_image_options(size, dropout)
    )


def _count_flops(task: Task) -> tuple[FlopCount | None, str]:
    """Count the operations of a model. Returns (the count, or None; the source of the number of operations, or why there is no
    number).

    Raises InputError if some parameters get no gradient, because DDP cannot train such a model.
    """
    try:
        flop_count = counted_flops.count_flops(task, task.fetch(np.arange(1), torch.device("cpu")))
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - the model may need data to compute
        return None, f"its operations cannot be counted: {configuration.summarize_error(error)}"
    if flop_count.unused_parameters:
        names = ", ".join(flop_count.unused_parameters[:3])
        raise InputError(
            f"{len(flop_count.unused_parameters)} of its parameters get no gradient, such as {names}; DDP cannot train it."
        )
    return flop_count, counted_flops.FLOPS_SOURCE


def _check_gradients(task: Task) -> None:
    """Raises an error if the twin cannot compute its loss, or if a parameter gets no finite gradient."""
    outputs, targets, model = _compute_outputs(task, 2)
    task.criterion(outputs, targets).backward()  # type: ignore[no-untyped-call]
    if without_gradient := [name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]:
        raise InputError(f"its parameter {without_gradient[0]} gets no finite gradient.")


def _check_provable(content: dict[str, Any], twin: OwnWorkload) -> None:
    """Raises InputError if the model's outputs for an item depend on chance or on the other items of the batch, because ranks
    could not share the work of such a model. BatchNorm is allowed, because the same-work proof freezes it."""
    options = {option.name: option.default for option in twin.options}
    task = configured.make_task(content, make_one_process_cell(twin.name, twin.seq_len, options), Path(), twin=True)
    with torch.no_grad():
        batch_outputs, _, model = _compute_outputs(task, 2)
        if batch_norms(model):
            return
        single_output, _, _ = _compute_outputs(task, 1)
    if float((batch_outputs[:1] - single_output).abs().max()) > OUTPUT_TOLERANCE * float(batch_outputs.abs().max()):
        raise InputError(
            "what it computes for an item depends on chance or on the other items of the batch, so that ranks cannot share the "
            "work. Needed: the same outputs for the same item."
        )


def _compute_outputs(task: Task, items: int) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """Compute the twin's outputs for its first `items` items. Returns (outputs, targets, model); the weights are the same in
    each call."""
    torch.manual_seed(0)
    model = task.model().train()
    batch = task.fetch(np.arange(items), torch.device("cpu"))
    torch.manual_seed(items)
    outputs = task.outputs(model, Batch(batch.inputs, batch.targets))
    return outputs, batch.targets, model


def make_one_process_cell(name: str, seq_len: int | None, options: dict[str, Any]) -> Cell:
    """A cell of one process with this workload, from which a task takes its sizes."""
    return Cell(
        workload=name, strategy="single", gpus=1, dp=1, launcher="fork", global_batch_size=1, micro_batch_size=1,
        seq_len=seq_len, steps=1, prove="off", optimizer=OPTIMIZER, seed=0, options=options,
    )  # fmt: skip
