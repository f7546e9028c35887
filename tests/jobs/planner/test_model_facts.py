"""What the planner knows about models, compared with what torch counts in them on the meta device."""

import numpy as np
import pytest
import torch
from support_planner import cell
from torch.utils.flop_counter import FlopCounterMode

from jobs.planner import model_facts
from trainers import menu
from trainers.task import Batch

ATTENTION = torch.ops.aten.bmm  # on the meta device, attention is products of one matrix per head, and nothing else is


@pytest.mark.parametrize(
    ("workload", "outside"),
    [("gpt2-tiny", ("lm_head",)), ("llm-1.3b-tiny", ("lm_head",)), ("vit-tiny", ("classifier", "vit.embeddings"))],
)
def test_the_operations_of_attention_and_outside_of_blocks_are_what_torch_counts(workload, outside):
    one = cell(workload, "single", options={"data": "synthetic"})
    task = menu.find_workload(workload).build(one, None)
    items = task.fetch(np.arange(1), torch.device("cpu"))
    with torch.device("meta"):
        model = task.model().eval()
    batch = Batch(items.inputs.to("meta"), items.targets.to("meta"))
    with FlopCounterMode(display=False) as counter:
        task.criterion(task.outputs(model, batch), batch.targets).backward()
    counts = counter.get_flop_counts()
    facts = model_facts.find_model_facts(one)
    assert facts.attention_flops_per_item == counts["Global"][ATTENTION]
    assert facts.head_flops_per_item == sum(sum(counts[f"{type(model).__name__}.{name}"].values()) for name in outside)
    assert facts.width == 64
