"""Rank 0 draws the weights for all ranks. Every rank gets the same weights, buffers and tied weights as a model that one
process builds."""

import gc
import weakref
from types import SimpleNamespace

import pytest

pytest_plugins = ["support_trainers"]


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        ("fsdp1-full-shard", 2, {"activation_checkpointing": "full", "accumulation": 2}),  # gpt2-tiny has tied weights
        ("fsdp1-full-shard", 2, {"options": {"wrap": "none"}}),
        # The position frequencies of this model are buffers that are not part of its state dict.
        ("fsdp1-shard-grad-op", 2, {"workload": "llm-1.3b-tiny", "seq_len": 64}),
        # The statistics of BatchNorm include integers.
        ("fsdp1-no-shard", 3, {"workload": "resnet50-tiny", "global_batch_size": 6}),
        ("fsdp1-hybrid-shard", 4, {"workload": "vit-tiny", "activation_checkpointing": "segments-2"}),
        ("fsdp1-hybrid-shard-zero2", 4, {"workload": "llm-1.3b-tiny", "seq_len": 64, "precision": "bf16"}),
        ("fsdp2", 2, {"workload": "resnet50-tiny", "global_batch_size": 4}),
        ("pp-fsdp2", 4, {"pp": 2, "accumulation": 2}),  # the tied weight is on the first stage and on the last stage
        ("tp-fsdp2", 4, {"tp": 2, "workload": "llm-1.3b-tiny", "seq_len": 64, "activation_checkpointing": "full"}),
    ],
)
def test_deferred_initialization_gives_the_weights_of_one_process(bench, strategy, gpus, keys):
    """The same-work proof compares the weights of the ranks with those of a process that drew its own weights, by name, before
    and after the steps of the proof."""
    result = bench.complete(strategy=strategy, gpus=gpus, steps=1, prove="auto", **keys).read_result()
    assert result.same_work.verdict == "proven", result.same_work.why


class Toy:
    """A task whose model has a module with its own weights (`block`) and two modules that share one weight."""

    def model(self):
        from torch import nn

        model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "block": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model


@pytest.fixture
def alone():
    """Makes a process group in which this process is the only rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(rank=0, device=torch.device("cpu"))
    dist.destroy_process_group()


def test_sharding_frees_the_full_weights_and_keeps_tied_weights_tied(alone):
    """After a module is sharded, nothing keeps its whole weight in memory. A tied weight remains one tensor."""
    import torch
    from torch import nn

    from trainers.model.deferred_init import DeferredModel

    deferred = DeferredModel(Toy(), alone, torch.bfloat16)
    model = deferred.model
    deferred.fill_module(model["block"])
    assert model["block"].weight.dtype == torch.bfloat16
    assert model["head"].weight.is_meta
    whole = weakref.ref(model["block"].weight)
    model["block"].weight = nn.Parameter(torch.zeros(1, 4))  # replaces the weight, as code that shards a module does
    gc.collect()
    assert whole() is None
    deferred.fill_own_tensors(model["embedding"], keep=False)
    assert model["embedding"].weight.is_meta
    deferred.fill_module(model)
    assert model["head"].weight is model["embedding"].weight
    assert not model["head"].weight.is_meta
