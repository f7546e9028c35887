"""A workload that a file of the workspace defines (WORKSPACE/workloads/NAME.py): what `jobs` knows of it without torch."""

from __future__ import annotations

import msgspec

from shardlab.cell import Optimizer
from shardlab.registry import Option

FOLDER = "workloads"  # in a workspace, and the folder of the copies in the folder of a run


class OwnWorkload(msgspec.Struct, frozen=True):
    """What is known of the workload at its default options. name, unit, parameters and so on: as in trainers.workload.Workload.

    code: the digest of its files. file: the file that defines it, in the workspace from which the run was submitted.
    flops_per_unit: None if the operations cannot be counted. block_count: the number of blocks that are wrapped one by one.
    tensor_degrees, most_stages: as in trainers.workload.Workload.
    The others are of a model by its configuration (shardlab/model_file.py), whose file is JSON. block: the class of its blocks.
    twin: whether it is the tiny twin. longest: the longest sequence, in tokens. remarks: sentences about what could not be
    derived.
    """

    name: str
    summary: str
    code: str
    file: str
    unit: str
    parameters: int
    block_count: int
    flops_per_unit: float | None
    flops_source: str
    optimizer: Optimizer
    options: tuple[Option, ...]
    tensor_degrees: tuple[int, ...] = ()
    most_stages: int = 0
    block: str = ""
    twin: bool = False
    seq_len: int | None = None
    longest: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def is_data(self) -> bool:
        """Whether a configuration defines it, so that no code of the workspace is executed."""
        return self.file.endswith(".json")


class Description(msgspec.Struct, frozen=True):
    """What `python -m trainers describe` found in a file: its workloads, or why it defines none."""

    workloads: list[OwnWorkload] = []
    fault: str = ""
