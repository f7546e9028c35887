"""One resolved cell for tests that need any."""

from shardlab.cell import Cell, Optimizer, Schedule

CELL = Cell(
    workload="gpt2-tiny",
    strategy="ddp",
    gpus=2,
    nnodes=1,
    dp=2,
    tp=1,
    pp=1,
    servers=0,
    launcher="torchrun",
    global_batch_size=16,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    seq_len=64,
    steps=10,
    epochs=None,
    warmup_steps=0,
    precision="fp32",
    activation_checkpointing="none",
    compile=False,
    max_grad_norm=None,
    prove="auto",
    optimizer=Optimizer("sgd", 0.1),
    schedule=Schedule(),
    seed=42,
    time_limit_s=None,
    expect=[],
    options={},
)
