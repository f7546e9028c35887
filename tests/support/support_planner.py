"""Makes cells and questions for tests of the planner, with the default options of the menus."""

import msgspec

from jobs.planner import advise
from shardlab.matrix.cell import Cell, Optimizer
from trainers import menu

ADAMW = Optimizer(name="adamw", lr=1e-4)


def cell(workload="gpt2-large", strategy="ddp", gpus=1, *, micro=1, passes=1, tp=1, pp=1, options=None, **keys):
    """A cell with this workload and strategy. micro: items in a micro-batch. passes: micro-batches of a rank in a step."""
    of_workload, of_strategy = menu.find_workload(workload), menu.find_strategy(strategy)
    defaults = {option.name: option.default for option in (*of_workload.options, *of_strategy.options)}
    dp = gpus // tp // pp
    return Cell(**{
        "workload": workload, "strategy": strategy, "gpus": gpus, "dp": dp, "tp": tp, "pp": pp,
        "global_batch_size": micro * passes * dp, "micro_batch_size": micro, "gradient_accumulation_steps": passes,
        "seq_len": of_workload.seq_len, "steps": 10, "prove": "off", "optimizer": ADAMW,
        "options": {**defaults, **(options or {})}, **keys,
    })  # fmt: skip


def make_question(workload, machine, gpus=8, *, options=None, **keys):
    """A question to `jobs advise` about a shipped workload; the global batch is the default, unless `keys` has one."""
    entry = menu.find_workload(workload)
    options = {option.name: option.default for option in entry.options} | (options or {})
    fields = {"workload": entry, "options": options, "machine": machine, "gpus": gpus, "seq_len": entry.seq_len, **keys}
    question = advise.Question(**fields)
    if "global_batch" in keys:
        return question
    return msgspec.structs.replace(question, global_batch=advise.choose_global_batch(question))
