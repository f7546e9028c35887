"""The description of a workload that a file of the workspace defines (WORKSPACE/workloads/NAME.py).

`jobs` uses this description, so that `jobs` needs neither torch nor the code in the file.
"""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Optimizer
from shardlab.record_types import Count, Measured
from shardlab.registry import Option

FOLDER = "workloads"  # folder of a workspace with the files of workloads; a run folder has copies in a folder of this name


class OwnWorkload(msgspec.Struct, frozen=True):
    """The properties of a workload at its default options. A field that is not listed here is as in trainers.workload.Workload.

    The following fields belong to a model that is given by its configuration (shardlab/matrix/model_file.py), whose file is
    JSON:
    """

    name: str
    """The name in a matrix."""
    summary: str
    """What it is, in one line."""
    code: str
    """The digest of the files that define the workload."""
    file: str
    """The path of the defining file in the workspace from which the run was submitted."""
    unit: str
    """What a batch counts, such as images or tokens."""
    parameters: Count
    """Number of parameters."""
    flops_per_unit: Measured | None
    """None if the operations cannot be counted."""
    flops_source: str
    """Where the number of operations comes from."""
    optimizer: Optimizer
    """The default optimizer."""
    options: tuple[Option, ...]
    """Its options, with defaults and bounds."""
    tensor_degrees: tuple[Count, ...] = ()
    """Tensor-parallel degrees that are possible besides 1."""
    most_stages: Count = 0
    """The largest number of pipeline stages; 0: no pipeline is possible."""
    block: str = ""
    """The name of the class of its blocks."""
    block_parameters: tuple[Count, ...] = ()
    """Parameters of each block that strategies wrap; shared ones count in the first."""
    twin: bool = False
    """Whether the model is the tiny twin."""
    seq_len: Count | None = None
    """The length of a sequence, in tokens."""
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


class Description(msgspec.Struct, frozen=True):
    """What `python -m trainers describe` prints about a file of WORKSPACE/workloads."""

    workloads: list[OwnWorkload] = []
    """The workloads that the file defines."""
    fault: str = ""
    """Why the file defines no workload, as a sentence; else empty."""
