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

    code: the digest of the files that define the workload.
    file: the path of the defining file in the workspace from which the run was submitted.
    flops_per_unit: None if the operations cannot be counted.

    The following fields belong to a model that is given by its configuration (shardlab/matrix/model_file.py), whose file is
    JSON:

    twin: whether the model is the tiny twin.
    seq_len: the length of a sequence, in tokens.
    longest: the longest possible sequence, in tokens.
    remarks: sentences about properties that could not be derived from the configuration.
    """

    name: str  # the name in a matrix
    summary: str  # what it is, in one line
    code: str
    file: str
    unit: str  # what a batch counts, such as images or tokens
    parameters: Count  # number of parameters
    flops_per_unit: Measured | None
    flops_source: str  # where the number of operations comes from
    optimizer: Optimizer  # the default optimizer
    options: tuple[Option, ...]  # its options, with defaults and bounds
    tensor_degrees: tuple[Count, ...] = ()  # tensor-parallel degrees that are possible besides 1
    most_stages: Count = 0  # the largest number of pipeline stages; 0: no pipeline is possible
    block: str = ""  # the name of the class of its blocks
    block_parameters: tuple[Count, ...] = ()  # parameters of each block that strategies wrap; shared ones count in the first
    twin: bool = False
    seq_len: Count | None = None
    longest: Count | None = None
    remarks: tuple[str, ...] = ()

    @property
    def block_count(self) -> int:
        """The number of blocks that strategies wrap one by one."""
        return len(self.block_parameters)

    @property
    def is_data(self) -> bool:
        """Whether the workload is defined by a configuration, so that no code of the workspace is executed."""
        return self.file.endswith(".json")


class Description(msgspec.Struct, frozen=True):
    """What `python -m trainers describe` prints about a file of WORKSPACE/workloads.

    workloads: the workloads that the file defines. fault: why the file defines no workload, as a sentence; else empty.
    """

    workloads: list[OwnWorkload] = []
    fault: str = ""
