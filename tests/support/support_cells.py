"""One resolved cell, for tests that need any cell, whatever its values are."""

from shardlab.matrix.cell import Cell, Optimizer

CELL = Cell(
    workload="gpt2-tiny",
    strategy="ddp",
    gpus=2,
    dp=2,
    global_batch_size=16,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    seq_len=64,
    steps=10,
    optimizer=Optimizer("sgd", 0.1),
)
