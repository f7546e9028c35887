"""The kinds of plug-ins that a workspace may define in Python files of its own, and how such plug-ins are described.

`jobs` and `collect` use the descriptions and never execute the files themselves: separate processes do (own_code.py,
plugin_process.py). All kinds have the same rule of trust (shardlab/workspace/workspace_trust.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from shardlab.errors import InputError
from shardlab.matrix.cell import Cell, Optimizer, Precision
from shardlab.record_types import Amount, Count, Measured
from shardlab.registry import Option

A = TypeVar("A")
D = TypeVar("D")


class PluginKind(msgspec.Struct, Generic[A], frozen=True):
    """A kind of plug-in that a workspace may define: each Python file in one of its folders defines plug-ins of this kind."""

    noun: str
    """The word for a plug-in of this kind in messages, such as `workload`."""
    folder: str
    """The folder of a workspace with the files. If runs execute the files, a run folder has copies in a folder of this name."""
    answer_type: type[A]
    """What a process answers that executes a file to find out what the file defines."""
    suffix_pattern: str = ".*"
    """A pattern of what may follow the name of the file in the name of a plug-in."""
    uses_hyphens: bool = False
    """Whether `_` in the name of the file becomes `-` in the name of a plug-in."""

    def make_base_name(self, plugin_path: Path) -> str:
        """The name of a file as the names of its plug-ins contain it: `my_way.py` may define the strategy `my-way`."""
        return plugin_path.stem.replace("_", "-") if self.uses_hyphens else plugin_path.stem

    def may_define(self, plugin_path: Path, name: str) -> bool:
        """Whether a file may define a plug-in with this name."""
        return re.fullmatch(f"{re.escape(self.make_base_name(plugin_path))}{self.suffix_pattern}", name) is not None

    def refuse_used_name(self, file: Path, name: str, shipped_names: Collection[str], defined: Mapping[str, str]) -> None:
        """Raises InputError if a plug-in that a file defines has the name of another plug-in.

        shipped_names: the names of the plug-ins of this kind that ship with shardlab. defined: the file that defines each
        plug-in of the workspace, by name.
        """
        if name in shipped_names:
            raise InputError(
                f"{file}: the {self.noun} {name} ships with shardlab and cannot be replaced. Allowed: another name."
            )
        if name in defined:
            raise InputError(f"{file}: the {self.noun} {name} is defined by {defined[name]} as well. Allowed: another name.")


class PluginDescription(msgspec.Struct, Generic[D], frozen=True):
    """What `python -m trainers describe` writes about a file of a workspace."""

    plugins: list[D] = []
    """The plug-ins that the file defines."""
    fault: str = ""
    """Why the file defines no plug-in, as a sentence; else empty."""


class SavedBytes(msgspec.Struct, frozen=True):
    """What autograd saves for backward, in bytes per item (sequence or image) of a micro-batch."""

    block_whole: Amount
    """Tensors of one block that each tensor-parallel rank keeps whole, unless sequence parallelism splits them."""
    block_split: Amount
    """Tensors of one block that are split over the tensor-parallel ranks."""
    block_input: Amount
    """The hidden state between two blocks. A block with activation checkpointing keeps only this tensor, and a pipeline sends
    it from stage to stage."""
    head: Amount
    """Tensors outside of the blocks: of the last norm, the logits, and 16-bit copies of the input images."""
    logits: Amount
    """The gradient of the logits, which forward computes with the loss. All other saved tensors are still in memory then."""
    weights: Amount = 0.0
    """16-bit copies of the weights of a block, which autocast saves: bytes per block, and not per item."""
    head_weights: Amount = 0.0
    """The same outside of blocks: bytes for each micro-batch. Also other tensors of constant size there, such as masks."""
    inputs: Amount = 0.0
    """The batch as it is loaded. A part of no other field, although the first layer may save it."""
    block_gathered: Amount = 0.0
    """The part of `block_whole` that sequence parallelism gathers: the inputs of the layers that are split by columns."""
    block_squared: Amount = 0.0
    """The part of block_whole that grows with the square of the sequence length."""


class ModelCounts(msgspec.Struct, frozen=True):
    """What was counted in a model on tensors without memory. FLOPs are those of forward and backward for one item."""

    kind: Literal["transformer", "convolution", "unknown"]
    """What most of its operations are: those of blocks with attention, or convolutions."""
    block_flops: Amount
    """The FLOPs of all blocks."""
    attention_flops: Amount
    """The part of block_flops that grows with the square of the sequence length; the rest grows with the length."""
    other_flops: Amount
    """The FLOPs outside of blocks."""
    vocabulary: Count
    """The size of the vocabulary; 0: not a language model."""
    width: Count | None
    """The size of a hidden state, if the configuration says it."""
    saved: dict[str, SavedBytes]
    """What is saved, for the precisions fp32, bf16 and bf16-autocast, as far as it could be counted."""
    end_parameters: tuple[Count, Count, Count]
    """The numbers of parameters before the blocks, behind them, and in both."""
    reductions: tuple[Count, Count] | None
    """The numbers of row-parallel and of column-parallel layers of a block; None: they cannot be split."""
    splits_vocabulary: bool = False
    """Whether tensor-parallel ranks may split the rows of the embedding of tokens and of the head."""
    is_causal: bool = False
    """Whether it is known that a position attends only to earlier positions."""


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of every workload: of one that ships with shardlab (trainers.workload.Workload), and of one that a
    workspace defines (OwnWorkload)."""

    name: str
    """The name in a matrix."""
    summary: str
    """What it is, in one line."""
    unit: str
    """What a batch counts, such as images or tokens; the unit of throughput."""
    parameters: Count
    """The number of trainable parameters; tied weights count once."""
    flops_per_unit: Measured | None
    """Floating-point operations of forward and backward for a unit at the default options, by the formula of `flops_source`;
    None if the number is not known."""
    flops_source: str
    """Where the number of operations comes from."""
    optimizer: Optimizer
    """The optimizer of cells that name no optimizer. run.json always contains the optimizer of the run."""
    options: tuple[Option, ...] = ()
    """Its options, with defaults and bounds."""
    seq_len: Count | None = None
    """The default length of a sequence, in tokens; None if the workload has no sequences."""
    tensor_degrees: tuple[Count, ...] = ()
    """Only for a workload that a workspace defines: the numbers of ranks, from 2, over which its layers can be split with the
    default options; empty: its layers cannot be split."""
    most_stages: Count = 0
    """Only for a workload that a workspace defines: its number of blocks with the default options if a pipeline can divide the
    blocks into stages, else 0."""
    block_parameters: tuple[Count, ...] = ()
    """Only for a workload that a workspace defines: the number of parameters of each repeated block that strategies wrap, with
    the default options; shared parameters count in the first. Empty: the model has no repeated blocks."""
    counts: ModelCounts | None = None
    """Only for a workload that a workspace defines: what was counted in its model with the default options; None: nothing, or
    an older version described the model."""


class OwnWorkload(WorkloadFacts, frozen=True, kw_only=True):
    """The properties of a workload of the workspace, at its default options. The fields from `block` on belong to a model that
    is given by its configuration (shardlab/matrix/model_file.py), whose file is JSON."""

    code: str
    """The digest of the files that define the workload."""
    file: str
    """The path of the defining file in the workspace from which the run was submitted."""
    block: str = ""
    """The name of the class of its blocks."""
    twin: bool = False
    """Whether the model is the tiny twin."""
    longest: Count | None = None
    """The longest possible sequence, in tokens."""
    remarks: tuple[str, ...] = ()
    """Sentences about properties that could not be derived from the configuration."""

    @property
    def block_count(self) -> int:
        """The number of blocks that strategies wrap one by one."""
        return len(self.block_parameters)

    @property
    def is_data(self) -> bool:
        """Whether the workload is defined by a configuration, so that no code of the workspace is executed."""
        return self.file.endswith(".json")


class StrategyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is plain data of every strategy: of one that ships with shardlab (trainers.strategy.Strategy), and of one that a
    workspace defines (OwnStrategy)."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{0,39}\Z")]
    """The name in a matrix."""
    summary: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
    """What the strategy does, in one line."""
    precisions: tuple[str, ...]
    """The precisions that the strategy supports."""
    options: tuple[Option, ...] = ()
    """Options of the strategy, with defaults and bounds."""
    degrees: tuple[str, ...] = ("dp",)
    """The kinds of parallelism that the strategy has: data (dp), tensor (tp), pipeline (pp)."""
    switches: tuple[str, ...] = ()
    """Which of the keys activation_checkpointing, compile and max_grad_norm of a cell the strategy supports."""
    servers: bool = False
    """Whether the last ranks are parameter servers."""
    cuts: tuple[str, ...] | None = None
    """Which of parameter, gradient and optimizer_state the strategy shards over the data-parallel ranks of a group, according
    to textbooks; None if that is not known, or if the strategy divides the model in another way."""
    tolerates_lost_ranks: bool = False
    """Whether a run continues after a rank that trains was killed. No run continues without rank 0, which writes the result."""
    no_checkpoints: str = ""
    """Why a run of the strategy cannot be saved and resumed; empty if it can."""
    reasons: dict[str, str] = {}
    """By precision: why the strategy does not support it."""


class OwnStrategy(StrategyFacts, frozen=True, kw_only=True):
    """The properties of a strategy of the workspace, whose values are checked. Its functions stay in its file, which only
    processes of trainers execute."""

    precisions: Annotated[tuple[Precision, ...], msgspec.Meta(min_length=1)]
    degrees: Annotated[tuple[Literal["dp", "tp", "pp"], ...], msgspec.Meta(min_length=1)] = ("dp",)
    switches: tuple[Literal["activation_checkpointing", "compile", "max_grad_norm"], ...] = ()
    cuts: tuple[Literal["parameter", "gradient", "optimizer_state"], ...] | None = None
    code: str
    """The digest of the files that define the strategy."""
    file: str
    """The path of the file that defines the strategy, in the workspace from which the run was submitted."""


WORKLOADS = PluginKind("workload", "workloads", PluginDescription[OwnWorkload], suffix_pattern="(-tiny)?")
STRATEGIES = PluginKind("strategy", "strategies", PluginDescription[OwnStrategy], suffix_pattern="(-.*)?", uses_hyphens=True)


class RefusalQuestion(msgspec.Struct, frozen=True):
    """A question to the process `python -m trainers refuse`, as a line of JSON: does this strategy refuse this cell?"""

    strategy: str
    """The name of the strategy."""
    cell: Cell
    """A resolved cell."""
    own_workload: OwnWorkload | None = None
    """The workload of the cell, if a file of the workspace defines it."""


class RefusalAnswer(msgspec.Struct, frozen=True):
    """The answer of `python -m trainers refuse` to a RefusalQuestion, as a line of JSON."""

    why: str | None = None
    """The reason for the refusal, as a sentence; None: the strategy does not refuse the cell."""
    fault: str = ""
    """The error in the code of the strategy, as a sentence; else empty."""
