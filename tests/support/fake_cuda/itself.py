"""Checks of the fake GPUs; each raises AssertionError if a fake GPU behaves differently from a real GPU."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fake_cuda.waits import Waits

WELL = "as a GPU does"
MIB = 2**20


def memory_is_counted_per_gpu_and_given_back() -> str:
    before = torch.cuda.memory_allocated(1)
    held = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == before + MIB
    assert torch.cuda.memory_allocated(0) == 0
    assert (held + 1).device == torch.device("cuda:1")
    assert torch.cuda.max_memory_allocated(1) == before + 2 * MIB
    del held
    assert torch.cuda.memory_allocated(1) == before
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == before
    return WELL


def a_full_gpu_raises_what_torch_raises_and_goes_on() -> str:
    torch.cuda.set_per_process_memory_fraction(MIB / torch.cuda.mem_get_info()[1])
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    half = torch.ones(MIB // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([half, half])  # the result of an operator counts as memory in use too
    assert int(half.sum()) == MIB // 2
    return WELL


def views_share_memory_and_in_place_operators_write_it() -> str:
    whole = torch.zeros(4, 6, device="cuda")
    whole.t()[1:3].add_(1)
    whole.view(-1)[::6].mul_(0).sub_(2)
    assert whole.cpu().tolist() == [[-2.0, 1.0, 1.0, 0.0, 0.0, 0.0]] * 4
    assert whole[1].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return WELL


def results_of_another_size_go_into_the_tensor_that_was_given() -> str:
    given = torch.empty(0, device="cuda")
    found = torch.arange(5, device="cuda", out=given.to(torch.int64))
    assert found.tolist() == [0, 1, 2, 3, 4]
    torch.add(torch.ones(3, 2, device="cuda"), 1, out=given)
    assert given.cpu().tolist() == [[2.0, 2.0]] * 3
    return WELL


def gradients_are_those_of_the_cpu() -> str:
    torch.manual_seed(1)
    layer, inputs = torch.nn.Linear(5, 3), torch.randn(4, 5)
    layer(inputs).square().sum().backward()
    expected = layer.weight.grad.clone()
    other = torch.nn.Linear(5, 3, device="cuda")
    other.load_state_dict(layer.state_dict())
    other(inputs.cuda()).square().sum().backward()
    assert other.weight.grad.device.type == "cuda"
    assert torch.equal(other.weight.grad.cpu(), expected)
    return WELL


def copies_to_and_from_the_host_are_copies() -> str:
    host = torch.zeros(3)
    there = host.to("cuda")
    host.add_(1)
    assert there.cpu().tolist() == [0.0] * 3
    back = there.cpu()
    there.add_(2)
    assert back.tolist() == [0.0] * 3
    return WELL


def pinned_memory_is_known_as_such() -> str:
    assert torch.zeros(4).pin_memory().is_pinned()
    assert torch.zeros(4, pin_memory=True)[1:].is_pinned()
    assert not torch.zeros(4).is_pinned()
    return WELL


def a_storage_is_freed_and_filled_again() -> str:
    """FSDP frees gathered parameters by `resize_(0)`: the tensor still exists, but its memory is released."""
    tensor = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before - MIB
    tensor.untyped_storage().resize_(MIB)
    assert int(tensor.fill_(1).sum()) == MIB
    return WELL


def a_gpu_that_is_not_there_is_refused() -> str:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(torch.cuda.device_count())
    return WELL


def bf16_is_refused_where_a_gpu_has_no_kernel_for_it() -> str:
    numbers, infinite, factor = (torch.ones((), device="cuda") for _ in range(3))
    torch._amp_foreach_non_finite_check_and_unscale_([numbers.half(), numbers], infinite, factor)
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        torch._amp_foreach_non_finite_check_and_unscale_([numbers.bfloat16()], infinite, factor)
    return WELL


def events_measure_the_hosts_time() -> str:
    begin, end, bare = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with pytest.raises(RuntimeError, match="must be recorded"):
        begin.elapsed_time(end)
    begin.record()
    end.record()
    assert begin.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="enable_timing"):
        begin.elapsed_time(bare)
    return WELL


def waits_of_the_host_are_counted_by_line() -> str:
    numbers = torch.ones(3, device="cuda")
    pinned = torch.empty(3, pin_memory=True)
    with Waits() as found:
        pinned.copy_(numbers, non_blocking=True)
        numbers.add(1)
    assert not found.lines
    with Waits() as found:
        float(numbers.sum())
        numbers.cpu()
        numbers.nonzero()
        torch.empty(3).copy_(numbers, non_blocking=True)  # the host waits: its memory is not pinned
        torch.cuda.synchronize()
        torch.cuda.Event().synchronize()
    assert sorted(line.partition(":")[0] for line in found.lines) == [
        "_local_scalar_dense", "_to_copy", "copy_", "nonzero", "synchronize a GPU", "synchronize an event",
    ]  # fmt: skip
    assert all("gpu/forked.py" in line for line in found.lines)  # `lines` names no file of fake_cuda
    return WELL


def sums_over_ranks(ranks: int) -> list[list[float]]:
    """The result on each of `ranks` forked ranks of an all-reduce with the backend "nccl". Each rank contributes rank + 1."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                device = torch.device("cuda", rank)
                torch.cuda.set_device(device)
                dist.init_process_group(
                    "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device
                )
                mine = torch.full((4,), float(rank + 1), device=device)
                dist.all_reduce(mine)
                Path(folder, f"{rank}.json").write_text(json.dumps(mine.tolist()))
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
