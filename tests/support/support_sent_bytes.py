"""Bytes that rank 0 of 4 sends in a step, worked out by hand for each strategy from what the ring of each collective sends.

All numbers are for gpt2-tiny in fp32 and a batch of 8 sequences. test_bytes.py compares the trainers with them, and
test_exchanges.py the planner.
"""

PSI = 882_176  # bytes of the 220,544 parameters, and of their gradients: BLOCKS in the blocks, REST outside of them
BLOCKS, REST = 799_744, 82_432
HIDDEN = 131_072  # bytes of the hidden state between two blocks: 8 sequences x 64 positions x 64 numbers x 4 bytes

ALL_REDUCED = 1_323_264  # an all-reduce of psi: 2 x 3/4 of psi
GATHERED = 661_632  # an all-gather or a reduce-scatter of psi: 3/4 of psi
IN_TURNS = 196_608  # an all-reduce of HIDDEN: 2 x 3/4 of HIDDEN
# No step of DDP is made here, because its reducer waits for a result that a fake group never gives; proofs with real ranks
# count DDP.
BY_HAND = [
    # (strategy, keys, bytes sent, bytes according to textbooks, whether the bytes of a step are counted)
    ("single", {}, 0, 0, False),
    ("ddp", {}, ALL_REDUCED, 2 * PSI, False),
    ("ddp", {"accumulation": 2}, ALL_REDUCED, 2 * PSI, False),
    ("ddp", {"options": {"comm_hook": "bf16"}, "precision": "bf16"}, ALL_REDUCED / 2, 2 * PSI, False),
    # Local SGD all-reduces its parameters, which have as many bytes as the gradients, once in a period.
    ("local-sgd", {"options": {"averaging_period": 1}}, ALL_REDUCED, 2 * PSI, True),
    ("local-sgd", {}, ALL_REDUCED / 4, PSI / 2, False),
    ("fsdp1-no-shard", {}, ALL_REDUCED, 2 * PSI, True),
    # Blocks are gathered for forward and again for backward, the REST only once; all gradients are reduce-scattered.
    ("fsdp1-full-shard", {}, 2 * 599_808 + 61_824 + GATHERED, 3 * PSI, True),
    ("fsdp1-full-shard", {"accumulation": 2}, 4 * 599_808 + 2 * 61_824 + GATHERED, 3 * PSI, True),
    ("fsdp1-shard-grad-op", {}, 2 * GATHERED, 2 * PSI, True),
    ("fsdp2", {}, 2 * 599_808 + 61_824 + GATHERED, 3 * PSI, True),
    ("fsdp2-zero2", {}, 2 * GATHERED, 2 * PSI, True),
    # Two replicas of two ranks: gathering sends half of psi instead of 3/4. The half of a rank is all-reduced over two
    # replicas.
    ("fsdp1-hybrid-shard", {}, 2 * 399_872 + 41_216 + 441_088 + 441_088, 3 * PSI, True),
    ("fsdp1-hybrid-shard-zero2", {}, 3 * 441_088, 2 * PSI, True),
    ("fsdp2-hsdp", {}, 2 * 399_872 + 41_216 + 441_088 + 441_088, 3 * PSI, True),
    ("fsdp2-hsdp-zero2", {}, 3 * 441_088, 2 * PSI, True),
    # Each of the 4 blocks all-reduces the hidden state twice in forward (Megatron-LM, section 3) and twice in backward. So do
    # the split embedding in forward and the split head in backward. Of each of 512 rows of logits, the loss all-reduces the
    # largest, the sum of exponentials and the target's: 3 x 4 bytes.
    ("tp", {"tp": 4}, 18 * IN_TURNS + 9_216, None, True),
    # A reduce-scatter and an all-gather replace each all-reduce; together they send as many bytes. The input of the first block
    # and the output of the last block need one more pair. The gradients of 2 norms (256 numbers) in each of 4 blocks, 4,096
    # bytes, are all-reduced. The gradients of biases need no collective: they are computed from a gathered gradient.
    ("tp", {"tp": 4, "options": {"sequence_parallel": True}}, 19 * IN_TURNS + 6_144 + 9_216, None, True),
    # Half the batch and two ranks per all-reduce: 18 x 65,536. A rank holds 25,184 numbers of a block (half of the matrices
    # with 12 x 64 x 64 numbers, half of 448 biases, all of 384 others): 402,944 bytes in 4 blocks. FSDP2 shards them over 2
    # ranks. So a rank sends half of them in each of two all-gathers, half of the rest in one, and half of both to
    # reduce-scatter. The rest is half of the embedding of tokens, 32,768 bytes, and 16,896 bytes of positions and a norm.
    ("tp-fsdp2", {"tp": 2}, 18 * 65_536 + 3_072 + 2 * 201_472 + 24_832 + 226_304, None, True),
    ("zero0", {}, ALL_REDUCED, 2 * PSI, True),
    # Gradients are all-reduced in whole buckets, and the updated parameters are gathered.
    ("zero1", {}, ALL_REDUCED + GATHERED, 2 * PSI, True),
    ("zero2", {}, ALL_REDUCED + GATHERED, 2 * PSI, True),
    # ZeRO-2 reduces gradients in each pass.
    ("zero1", {"accumulation": 2}, ALL_REDUCED + GATHERED, 2 * PSI, True),
    ("zero2", {"accumulation": 2}, 2 * ALL_REDUCED + GATHERED, 2 * PSI, True),
    # DeepSpeed does not shard parameters of less than 100,000 elements. All parameters of this model are smaller, so each
    # parameter is gathered once.
    ("zero3", {}, 2 * GATHERED, 3 * PSI, True),
]  # fmt: skip

# With several passes, each pass gathers, and the option sync says which passes reduce gradients: among the ranks that shard one
# copy of the model, and among replicas. What SHARD_GRAD_OP gathers stays until gradients are reduced.
# Strategy -> (bytes that a pass gathers, bytes of one reduction among shards, of one among replicas, textbook).
PARTS = {
    "fsdp1-no-shard": (0, ALL_REDUCED, 0, 2 * PSI),
    "fsdp1-full-shard": (2 * 599_808 + 61_824, GATHERED, 0, 3 * PSI),
    "fsdp1-shard-grad-op": (GATHERED, GATHERED, 0, 2 * PSI),
    "fsdp1-hybrid-shard": (2 * 399_872 + 41_216, 441_088, 441_088, 3 * PSI),
    "fsdp2": (2 * 599_808 + 61_824, GATHERED, 0, 3 * PSI),
    "fsdp2-zero2": (GATHERED, GATHERED, 0, 2 * PSI),
    "fsdp2-hsdp": (2 * 399_872 + 41_216, 441_088, 441_088, 3 * PSI),
    # Beside gathers, a pass sends hidden states of 4 sequences.
    "tp-fsdp2": (18 * 65_536 + 3_072 + 2 * 201_472 + 24_832, 226_304, 0, None),
}


def add_up_passes(strategy, sync, passes):
    """The row of BY_HAND for this strategy, value of sync and number of passes, each with 8 sequences on all ranks."""
    gathered, reduced, among_replicas, textbook = PARTS[strategy]
    gathers = 1 if (strategy, sync) == ("fsdp1-shard-grad-op", "last_pass") else passes
    reductions, of_replicas = 1 if sync == "last_pass" else passes, passes if sync == "every_pass" else 1
    mesh = {"tp": 2} if strategy == "tp-fsdp2" else {}
    keys = {**mesh, "accumulation": passes, "options": {"sync": sync}, "global_batch_size": 8 * passes}
    return strategy, keys, gathers * gathered + reductions * reduced + of_replicas * among_replicas, textbook, True


BY_HAND += [
    add_up_passes(strategy, sync, passes)
    for strategy in PARTS
    for sync in ("last_pass", "every_pass", *(["shard_every_pass"] if strategy == "fsdp2-hsdp" else []))
    for passes in ((1, 2, 4) if strategy in ("fsdp1-full-shard", "fsdp2-hsdp") else (2,))
]
