"""16-bit copies of weights: the model computes with the copies, and the gradients arrive at the fp32 weights."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainers.model.cast_weights import cast_weights, is_weight_copy

BF16 = torch.bfloat16


class Tied(nn.Module):
    """A model whose first and last layer share one weight. The layer between them is recomputed in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(8))
        self.seen = []

    def between(self, inputs):
        self.seen.append(self.middle.weight.dtype)
        return torch.relu(self.middle(inputs))

    def forward(self, inputs):
        hidden = checkpoint(self.between, self.first(inputs), use_reentrant=False)
        return self.last(hidden * self.scale.to(hidden.dtype))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


def batches(count):
    return torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(1)).to(BF16)


def test_gradients_are_those_of_a_model_in_bf16_added_up_in_fp32(model):
    """The expected gradients come from a second model, which is cast as a whole; the test adds up its gradients in fp32."""
    weights, twin = dict(model.named_parameters()), copy.deepcopy(model).to(BF16)
    sums = {name: torch.zeros(p.shape) for name, p in weights.items()}
    for batch in batches(3):
        with cast_weights(model, BF16):
            model(batch).float().square().sum().backward()
        twin.zero_grad()
        twin(batch).float().square().sum().backward()
        for name, p in twin.named_parameters():
            sums[name] += p.grad.float()
    assert set(weights) == {"first.weight", "first.bias", "middle.weight", "middle.bias"}
    for name, weight in weights.items():
        assert weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, sums[name]), name


def test_activation_checkpointing_recomputes_a_layer_with_bf16_weights(model):
    """Activation checkpointing calls the layer twice, and the layer has bf16 weights both times."""
    with cast_weights(model, BF16):
        model(batches(1)[0]).float().sum().backward()
    assert model.seen == [BF16, BF16]


def test_a_cast_makes_one_copy_of_a_tied_weight_and_no_copy_of_a_buffer(model):
    """During the `with` block, a tied weight has one bf16 copy and buffers stay fp32. After it, the fp32 weights are back."""
    before = dict(model.named_parameters())
    with cast_weights(model, BF16):
        assert model.first.weight is model.last.weight
        assert (model.first.weight.dtype, model.scale.dtype) == (BF16, torch.float32)
        assert is_weight_copy(model.middle.bias)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p and not is_weight_copy(p) for name, p in before.items())


def test_after_a_failure_the_model_has_its_weights(model):
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError), cast_weights(model, BF16):
        raise ZeroDivisionError
    assert all(p is before[name] for name, p in model.named_parameters())


def test_a_cast_without_a_dtype_uses_the_original_weights(model):
    before = dict(model.named_parameters())
    with cast_weights(model, None):
        assert all(p is before[name] for name, p in model.named_parameters())
