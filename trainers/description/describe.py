"""Describes the plug-ins that a user's file defines, such as the parameters, operations, blocks and options of a workload.

`jobs` runs this module in a separate process, because the file imports torch, and because an error in the file must not end the
command.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardlab.errors import InputError, ShardlabError
from shardlab.files import plugin_source
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix import model_file
from shardlab.plugins import own_code
from shardlab.plugins.plugin_kind import STRATEGIES, OwnWorkload, PluginDescription
from shardlab.registry import OptionValue
from trainers.description.count_model import count_model
from trainers.model import counted_flops
from trainers.model.counted_flops import FlopCount
from trainers.plans.own import split_layers
from trainers.plugins import own_model, own_strategy
from trainers.plugins.own_model import OwnModel
from trainers.task import Batch
from trainers.tasks import vision_library
from trainers.tasks.own import FLOPS_FROM_FILE, OwnTask

META_DEVICE_HINT = "model() has to work on torch's meta device, on which FSDP and ZeRO-3 build it."


def describe_file(plugin_file: Path, seq_len: int | None = None) -> PluginDescription[Any]:
    """The plug-ins that a file of a workspace defines: its workloads or strategies, or a model by its configuration (.json).

    seq_len: tokens of a sequence, for a configuration; None for a model of images. An error in the file is returned as the
    `fault` of the description and not raised.
    """
    try:
        source = plugin_source.read_plugin(plugin_file)
        if plugin_file.suffix == model_file.CONFIGURATION_SUFFIX:
            vision_library.import_torchvision()  # needed before any model of transformers is imported
            from trainers.description import describe_model

            return PluginDescription(describe_model.describe_configuration(source, seq_len))
        if plugin_file.parent.name == STRATEGIES.folder:
            return PluginDescription(own_strategy.describe_strategies(source))
        return PluginDescription(_describe_workloads(source))
    except ShardlabError as error:
        return PluginDescription(fault=str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        return PluginDescription(fault=own_code.describe_error(str(plugin_file), error))


def _describe_workloads(source: PluginSource) -> list[OwnWorkload]:
    """The workload of a file, and its tiny twin if the file defines one."""
    plugin = own_model.load_definitions(source)
    workloads = [_describe_workload(plugin, source, source.name, {})]
    if plugin.tiny is not None:
        workloads.append(_describe_workload(plugin, source, f"{source.name}-tiny", plugin.tiny))
    return workloads


def _describe_workload(plugin: OwnModel, source: PluginSource, name: str, tiny_values: dict[str, OptionValue]) -> OwnWorkload:
    options = tuple(option.replace_default(tiny_values.get(option.name, option.default)) for option in plugin.options)
    task = OwnTask(plugin, source.digest, {option.name: option.default for option in options})
    task.check_items_repeat()
    with own_code.raise_plugin_errors(plugin.file, META_DEVICE_HINT), torch.device("meta"):
        model = task.model()
    parameter_count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not parameter_count:
        raise InputError(f"{plugin.file}: the module of model() has no parameters to train.")
    flop_count, flops_source = _count_flops(plugin, task)
    plan = task.plan() if plugin.tensor_parallel is not None or plugin.pipeline is not None else None
    tensor_degrees = plan.find_degrees() if plan is not None and plugin.tensor_parallel is not None else ()
    if plan is not None and plugin.pipeline is not None:
        plan.build_stage(model, 0, 1)
    return OwnWorkload(
        name=name,
        summary=plugin.summary if not tiny_values else f"the twin of {source.name}: {plugin.summary}",
        code=source.digest,
        file=str(source.file),
        unit=plugin.unit,
        parameters=parameter_count,
        block_parameters=counted_flops.count_block_parameters(task.blocks(model)),
        flops_per_unit=None if flop_count is None else flop_count.flops,
        flops_source=flops_source,
        optimizer=plugin.optimizer,
        options=options,
        tensor_degrees=tensor_degrees,
        most_stages=plan.block_count if plan is not None and plugin.pipeline is not None else 0,
        counts=None
        if flop_count is None
        else count_model(task, model, flop_count, task, partial(split_layers, plugin), tensor_degrees),
    )


def _count_flops(plugin: OwnModel, task: OwnTask) -> tuple[FlopCount | None, str]:
    """Count the operations of a model. Returns (the count, or None; the source of the number of operations, or why there is no
    number)."""
    if plugin.flops_per_unit is not None:  # where they are is not known; most are in blocks
        return FlopCount(plugin.flops_per_unit, [], plugin.flops_per_unit * task.units_per_item, 0.0), FLOPS_FROM_FILE
    try:
        counted = counted_flops.count_flops(task, Batch(*task.read_items(np.arange(1))))
    except Exception as error:  # noqa: BLE001 - the model may need data to compute
        return None, f"not counted: {own_code.describe_error(plugin.file, error)}"
    return (counted, counted_flops.FLOPS_SOURCE) if counted.flops else (None, "not counted: the model has no matrix product")
