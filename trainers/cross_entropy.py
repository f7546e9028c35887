"""Computes the cross-entropy of 16-bit logits without fp32 copies of all logits.

With GPT-2's vocabulary, the logits of 8 x 1024 tokens have 0.8 GB in 16 bits. torch's cross_entropy on fp32 logits keeps the
logits, the log-softmax and the gradients in fp32: three times 1.6 GB. Here, only one chunk of rows at a time is cast to fp32.
Forward computes the gradient of a chunk from the log-softmax that it has just computed. So the logits are read once, and only
their gradient is kept for backward.

With tensor parallelism, each rank may have a slice of the columns. Then ranks exchange the largest logit and the sum of
exponentials of each row, and the logits stay divided (Shoeybi et al., Megatron-LM, 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Number of logits that are cast at a time: 128 MiB in fp32, and as much for their log-softmax. On an H100, smaller chunks cost
# time for the launches of kernels, and larger chunks are hardly faster (docs/gpus.md).
CHUNK_LOGITS = 2**25
# In fp16, the gradient is kept multiplied by this factor, because small probabilities would be rounded to 0. The largest
# element is then 2^15; fp16 ends at 65504.
FP16_FACTOR = 2.0**15


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        class_count: int | None,
        group: dist.ProcessGroup | None,
        with_gradient: bool,
    ) -> torch.Tensor:
        log_likelihood = torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)  # of the targets, as logarithms
        gradient = None
        if with_gradient:
            gradient = torch.empty_like(logits) if class_count is None else torch.zeros_like(logits)
        ctx.factor = FP16_FACTOR if logits.dtype == torch.float16 else 1.0
        first_class, own_class_count = _locate_classes(logits, class_count, group)
        for row_slice in _list_row_slices(logits):
            target = targets[row_slice, None] - first_class
            is_here = torch.ones_like(target, dtype=torch.bool) if group is None else (target >= 0) & (target < own_class_count)
            target = target.where(is_here, 0)
            log_probabilities = _compute_log_softmax(_take_class_columns(logits[row_slice], own_class_count).float(), group)
            log_likelihood[row_slice] = log_probabilities.gather(1, target).where(is_here, 0.0)
            if gradient is not None:
                # softmax - onehot. Backward divides by the number of rows: in fp16, small quotients would be rounded to 0.
                log_probabilities.exp_().scatter_add_(1, target, -is_here.float())
                log_probabilities = log_probabilities[:, :own_class_count]
                gradient[row_slice, :own_class_count] = (
                    log_probabilities if ctx.factor == 1 else log_probabilities.mul_(ctx.factor)
                )
            del log_probabilities  # before the next chunk is cast
        if group is not None:
            dist.all_reduce(log_likelihood, group=group)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return -log_likelihood.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        # In place, because a copy would have the size of all logits. torch refuses a second backward pass of the same loss.
        _multiply_in_place(gradient, loss_gradient.float() / (len(gradient) * ctx.factor))
        return gradient, None, None, None, None


def _multiply_in_place(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a 2-dim tensor of any floating dtype in place by a factor, 0-dim in fp32; the product is computed in fp32.

    On a GPU, `mul_` would round a 0-dim factor to the dtype of the tensor first: in bf16 by up to 0.4 %, in fp16 to infinity
    above 65504. A factor with dimensions is not rounded: both are cast to fp32. A CPU makes a copy in fp32 for this, of one
    chunk at a time.
    """
    for row_slice in _list_row_slices(tensor):
        tensor[row_slice].mul_(factor.reshape(1, 1))


def _locate_classes(logits: torch.Tensor, class_count: int | None, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(the first class of which this rank has logits (..., n), the number of its classes); its other columns are padding.
    class_count, group: as in `compute_cross_entropy`."""
    column_count = logits.shape[-1]
    first_class = 0 if group is None else group.rank() * column_count
    return first_class, column_count if class_count is None else max(0, min(column_count, class_count - first_class))


def _take_class_columns(logits: torch.Tensor, class_count: int) -> torch.Tensor:
    """The first columns (..., width) of logits. Of a rank that has only padding: one column, of probability 0."""
    return logits[..., :class_count] if class_count else torch.full_like(logits[..., :1], -torch.inf)


def _compute_log_softmax(logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The logarithms of the probabilities, for logits (rows, n) in fp32, of which each rank of the group has a slice."""
    if group is None:
        return torch.log_softmax(logits, -1)
    largest_logits = logits.amax(1, keepdim=True)
    dist.all_reduce(largest_logits, dist.ReduceOp.MAX, group=group)
    logits = logits - largest_logits
    exponential_sums = logits.exp().sum(1, keepdim=True)
    dist.all_reduce(exponential_sums, group=group)
    return logits.sub_(exponential_sums.log_())


def compute_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, class_count: int | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The mean cross-entropy over rows, 0-dim in fp32.

    The loss of a row is -log softmax(logits)[target]; the gradient of the logits is (softmax(logits) - onehot(target)) / rows.
    Both are computed in fp32. The gradient is rounded to the dtype of the logits before and after the division by rows. The
    loss has no second derivative.

    logits: (rows, n), of any floating dtype. targets: (rows,) in int64. class_count: number of real classes; the columns
    after them
    are padding and are ignored; None: all columns are classes. group: the ranks over which the columns are divided in equal
    slices, in order; the loss is then a collective, and each rank gets the gradient of its own logits. None: not divided.
    """
    with_gradient = torch.is_grad_enabled() and logits.requires_grad
    loss: torch.Tensor = _CrossEntropy.apply(logits, targets, class_count, group, with_gradient)  # type: ignore[no-untyped-call]
    return loss


def count_correct_predictions(
    logits: torch.Tensor, targets: torch.Tensor, class_count: int | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The number of targets (...) that are the class with the largest of the logits (..., n); 0-dim, int64. class_count,
    group: as
    in `compute_cross_entropy`."""
    first_class, own_class_count = _locate_classes(logits, class_count, group)
    largest_logits, winners = _take_class_columns(logits, own_class_count).max(-1)
    if group is not None:
        largest_of_all = largest_logits.clone()
        dist.all_reduce(largest_of_all, dist.ReduceOp.MAX, group=group)
        winners = (winners + first_class).where(largest_logits == largest_of_all, torch.iinfo(torch.int64).max)
        dist.all_reduce(winners, dist.ReduceOp.MIN, group=group)
    return (winners == targets).sum()


def _list_row_slices(logits: torch.Tensor) -> Iterator[slice]:
    rows_per_chunk = max(1, CHUNK_LOGITS // logits.shape[1])
    return (slice(begin, begin + rows_per_chunk) for begin in range(0, len(logits), rows_per_chunk))
