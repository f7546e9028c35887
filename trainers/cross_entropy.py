"""Computes the cross-entropy of 16-bit logits without fp32 copies of all logits.

With GPT-2's vocabulary, the logits of 8 x 1024 tokens have 0.8 GB in 16 bits. torch's cross_entropy on fp32 logits keeps the
logits, the log-softmax and the gradients in fp32: three times 1.6 GB. Here, only one chunk of rows at a time is cast to fp32.
Forward computes the gradient of a chunk from the log-softmax that it has just computed. So the logits are read once, and only
their gradient is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Number of logits that are cast at a time: 128 MiB in fp32, and as much for their log-softmax. On an H100, smaller chunks cost
# time for the launches of kernels, and larger chunks are hardly faster (docs/gpus.md).
CHUNK = 2**25
# In fp16, the gradient is kept multiplied by this factor, because small probabilities would be rounded to 0. The largest
# element is then 2^15; fp16 ends at 65504.
FP16_FACTOR = 2.0**15


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, classes: int | None, with_gradient: bool
    ) -> torch.Tensor:
        log_likelihood = torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)  # of the targets, as logarithms
        gradient = None
        if with_gradient:
            gradient = torch.empty_like(logits) if classes is None else torch.zeros_like(logits)
        ctx.factor = FP16_FACTOR if logits.dtype == torch.float16 else 1.0
        for rows in _row_slices(logits):
            target = targets[rows, None]
            log_probabilities = torch.log_softmax(logits[rows, :classes].float(), -1)
            torch.gather(log_probabilities, 1, target, out=log_likelihood[rows])
            if gradient is not None:
                # softmax - onehot. Backward divides by the number of rows: in fp16, small quotients would be rounded to 0.
                log_probabilities.exp_().scatter_add_(1, target, torch.full_like(log_likelihood[rows], -1.0))
                gradient[rows, :classes] = log_probabilities if ctx.factor == 1 else log_probabilities.mul_(ctx.factor)
            del log_probabilities  # before the next chunk is cast
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return -log_likelihood.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        # In place, because a copy would have the size of all logits. torch refuses a second backward pass of the same loss.
        _multiply_in_place(gradient, loss_gradient.float() / (len(gradient) * ctx.factor))
        return gradient, None, None, None


def _multiply_in_place(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a 2-dim tensor of any floating dtype in place by a factor, 0-dim in fp32; the product is computed in fp32.

    On a GPU, `mul_` would round a 0-dim factor to the dtype of the tensor first: in bf16 by up to 0.4 %, in fp16 to infinity
    above 65504. A factor with dimensions is not rounded: both are cast to fp32. A CPU makes a copy in fp32 for this, of one
    chunk at a time.
    """
    for rows in _row_slices(tensor):
        tensor[rows].mul_(factor.reshape(1, 1))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, classes: int | None = None) -> torch.Tensor:
    """The mean cross-entropy over rows, 0-dim in fp32.

    The loss of a row is -log softmax(logits)[target]; the gradient of the logits is (softmax(logits) - onehot(target)) / rows.
    Both are computed in fp32. The gradient is rounded to the dtype of the logits before and after the division by rows. The
    loss has no second derivative.

    logits: (rows, n), of any floating dtype. targets: (rows,) in int64. classes: number of real classes; the columns after them
    are padding and are ignored; None: all n columns are classes.
    """
    with_gradient = torch.is_grad_enabled() and logits.requires_grad
    loss: torch.Tensor = _CrossEntropy.apply(logits, targets, classes, with_gradient)  # type: ignore[no-untyped-call]
    return loss


def _row_slices(logits: torch.Tensor) -> Iterator[slice]:
    size = max(1, CHUNK // logits.shape[1])
    return (slice(begin, begin + size) for begin in range(0, len(logits), size))
