"""Which kernels of a trace communicate, and which collective each of them carries out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collect.traces import collective
from collect.traces.collective import CollectiveOperation
from collect.traces.trace import Trace


class Communication(NamedTuple):
    """rows: which events of the trace are kernels that communicate, shape (events,).

    operation: index into `operations` for each event, -1 for all others, shape (events,).
    """

    rows: NDArray[np.bool_]
    operation: NDArray[np.int32]
    operations: list[CollectiveOperation]

    def names(self, rows: NDArray[np.intp]) -> list[str]:
        """The collective of each of these events, as torch.distributed names it."""
        return [self.operations[index].name for index in self.operation[rows]]


def kernel_communication(trace: Trace, kernel: NDArray[np.bool_]) -> Communication:
    """The collectives among these kernels. Kineto's arguments say it first; the name of the kernel where it has none.

    The name alone gives neither the process group nor elements: RCCL launches one kernel for all collectives.
    """
    operations = list(trace.collectives)
    by_label = np.full(len(trace.labels), -1, np.int32)
    for label in np.unique(trace.name[kernel]):
        if name := collective.of_kernel(trace.labels[label]):
            by_label[label] = len(operations)
            operations.append(CollectiveOperation(name))
    operation = np.where(trace.collective >= 0, trace.collective, by_label[trace.name]) if len(trace.name) else trace.collective
    operation = np.where(kernel, operation, np.int32(-1)).astype(np.int32)
    return Communication(operation >= 0, operation, operations)
