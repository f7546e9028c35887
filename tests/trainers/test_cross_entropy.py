"""The chunked cross-entropy, compared with torch's own cross-entropy in double precision."""

import pytest
import torch
from torch.nn import functional

from trainers import cross_entropy


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 3e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_loss_and_gradient_are_torchs(monkeypatch, dtype, within, rows):
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 33 * 3)  # each chunk has three rows of 33 logits
    generator = torch.Generator().manual_seed(rows)
    logits = (8 * torch.randn(rows, 33, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(33, (rows,), generator=generator)
    exact = logits.detach().double().requires_grad_()
    expected = functional.cross_entropy(exact, targets)
    found = cross_entropy.compute_cross_entropy(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    (3 * expected).backward()
    (3 * found).backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=within, atol=within / rows / 10)


def test_padding_of_logits_changes_neither_loss_nor_gradient():
    """Logits are padded to 8 columns for 5 classes: the padding changes neither loss nor gradient."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 8, generator=generator, requires_grad=True)
    targets = torch.randint(5, (6,), generator=generator)
    expected = functional.cross_entropy(logits[:, :5], targets)
    (wanted,) = torch.autograd.grad(expected, logits)
    found = cross_entropy.compute_cross_entropy(logits, targets, 5)
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)
    assert not gradient[:, 5:].any()


def test_logits_far_apart_give_no_infinite_loss():
    logits = torch.tensor([[-1e4, 1e4], [1e4, -1e4]], dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy.compute_cross_entropy(logits, torch.tensor([0, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(1e4, rel=1e-2)
    assert logits.grad.tolist() == [[-0.5, 0.5], [0.0, 0.0]]


def test_only_the_gradient_is_kept_for_backward():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        logits = torch.randn(6, 5, dtype=torch.bfloat16, requires_grad=True)
        cross_entropy.compute_cross_entropy(logits, torch.zeros(6, dtype=torch.int64))
    assert [(tensor.shape, tensor.dtype) for tensor in kept] == [((6, 5), torch.bfloat16)]


def test_without_gradients_no_gradient_is_computed(monkeypatch):
    logits, targets = torch.randn(6, 5, requires_grad=True), torch.zeros(6, dtype=torch.int64)
    expected = functional.cross_entropy(logits, targets)
    monkeypatch.setattr(torch, "empty_like", None)  # forward allocates the gradient with it
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy.compute_cross_entropy(logits, targets), expected)
    torch.testing.assert_close(cross_entropy.compute_cross_entropy(logits.detach(), targets), expected)
    with pytest.raises(TypeError):
        cross_entropy.compute_cross_entropy(logits, targets)


def test_small_fp16_gradients_are_rounded_once():
    """The probabilities are about 1 / 50,257, which is subnormal in fp16. With the loss scale, the gradient is as exact as fp16
    allows."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 50_257, generator=generator).half().requires_grad_()
    targets = torch.randint(50_257, (64,), generator=generator)
    exact = logits.detach().double().requires_grad_()
    (2.0**16 * functional.cross_entropy(exact, targets)).backward()
    (2**16 * cross_entropy.compute_cross_entropy(logits, targets)).backward()
    differs = ((logits.grad.double() - exact.grad) / exact.grad).abs()
    assert differs.median() < 2**-11
    assert differs.max() < 2**-8  # a few results are subnormal


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_the_factor_of_a_gradient_is_not_rounded_to_its_dtype(dtype, within):
    """1/3 in bf16 is 0.2 % too large, and 2^17 in fp16 is infinite."""
    for number in (1 / 3, 2.0**17):
        tensor, factor = torch.full((2, 2), 1.5 * 2**-10, dtype=dtype), torch.tensor(number)
        expected = tensor.double() * factor.double()
        cross_entropy._multiply_in_place(tensor, factor)
        torch.testing.assert_close(tensor.double(), expected, rtol=within, atol=0)


def test_a_second_backward_pass_is_refused():
    logits = torch.randn(6, 5, requires_grad=True)
    loss = cross_entropy.compute_cross_entropy(logits, torch.zeros(6, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
