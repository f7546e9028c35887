"""Trains a small model on the CPU and records it with torch's profiler: stacks, modules, shapes, memory and FLOPs.

python tests/support/support_detailed_torch.py TRACE.json.gz
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile, record_function

BATCH, WIDTH, STEPS = 8, 64, 2
HEADS, TOKENS, HEAD = 4, 16, 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, data):
        return self.down(torch.relu(self.up(data)))


class Checkpointed(torch.nn.Module):
    """Computes the activations of its block again in backward."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, data):
        return torch.utils.checkpoint.checkpoint(self.block, data, use_reentrant=False)


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(Block(), Checkpointed(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters())
    data = torch.ones(BATCH, WIDTH)
    query = torch.randn(2, HEADS, TOKENS, HEAD, requires_grad=True)
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True, "with_modules": True, "with_flops": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        kept = torch.ones(1000)  # is never freed while the profiler records
        for step in range(STEPS):
            with record_function(f"ProfilerStep#{step}"):
                model(data).sum().backward()
                torch.baddbmm(torch.zeros(3, 4, 6), torch.ones(3, 4, 5), torch.ones(3, 5, 6))
                torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert kept.numel() == 1000
    profiler.export_chrome_trace(sys.argv[1])


if __name__ == "__main__":
    main()
