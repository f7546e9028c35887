"""Finds which kernels in a trace communicate, and which collective each of these kernels carries out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import collective
from collect.traces.collective import CollectiveOperation
from collect.traces.trace import Trace


class CommunicationKernels(NamedTuple):
    """The kernels in a trace that communicate."""

    is_communication: NDArray[np.bool_]
    """Which events of the trace are kernels that communicate, shape (number of events,)."""
    operation_index: NDArray[np.int32]
    """For each event, the index of its collective in `operations`; -1 if the event does not communicate; same shape."""
    operations: list[CollectiveOperation]
    """The distinct collectives."""

    def name_collectives(self, event_rows: NDArray[np.intp]) -> list[str]:
        """The name in torch.distributed of the collective of each of these events. event_rows: the indexes of events that
        communicate."""
        return [self.operations[index].name for index in self.operation_index[event_rows]]


def find_communication(trace: Trace, is_kernel: NDArray[np.bool_]) -> CommunicationKernels:
    """Find the kernels that communicate. is_kernel: which events of the trace are kernels, shape (number of events,).

    The collective of a kernel is known from the arguments that Kineto wrote for the kernel. If a kernel has no arguments, the
    collective is known from the name of the kernel. The name says neither the process group nor the number of elements, and
    RCCL has one kernel name for all collectives.
    """
    operations = list(trace.collectives)
    operation_index_by_label = np.full(len(trace.labels), -1, np.int32)
    for label_index in np.flatnonzero(np.bincount(trace.name[is_kernel])):  # np.unique would import numpy.ma, which takes time
        if collective_name := collective.find_kernel_collective(trace.labels[label_index]):
            operation_index_by_label[label_index] = len(operations)
            operations.append(CollectiveOperation(collective_name))
    operation_index = trace.collective
    if len(trace.name):
        operation_index = np.where(trace.collective >= 0, trace.collective, operation_index_by_label[trace.name])
    operation_index = np.where(is_kernel, operation_index, np.int32(-1)).astype(np.int32)
    return CommunicationKernels(operation_index >= 0, operation_index, operations)
