"""Predict the next byte with GPT-2 of the transformers library, from random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlab.cell import Cell, Optimizer
from shardlab.errors import InputError
from shardlab.registry import Option
from trainers import vision_library
from trainers.data import stdlib_text
from trainers.data.tokens import TokenFile
from trainers.workload import Batch, DataSource, Task, Workload

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from trainers.plans.plan import Plan

SEQ_LEN, N_LAYER, N_EMBD, N_HEAD = 64, 4, 64, 4
PARAMETERS = 220_544
FLOPS_SOURCE = (
    "per token 6N + 12*L*d*T (Chowdhery et al., PaLM, 2022, appendix B): N parameters, L layers, width d, sequence length T"
)


def flops_per_token(parameters: int, n_layer: int, n_embd: int, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token, by FLOPS_SOURCE; a multiply-add counts as 2.

    6N: each weight multiplies once in forward and twice in backward. 12*L*d*T: attention's two products with all T
    positions (what a causal kernel may skip is counted), again three times.
    """
    return 6.0 * parameters + 12.0 * n_layer * n_embd * seq_len


class Gpt2Task(Task):
    def __init__(self, cell: Cell, data_path: Path) -> None:
        self._shape = {name: cast("int", cell.options[name]) for name in ("n_layer", "n_embd", "n_head")}
        self._seq_len = cell.seq_len or SEQ_LEN
        if self._shape["n_embd"] % self._shape["n_head"]:
            raise InputError("n_embd: {n_embd} does not divide among {n_head} heads (n_head).".format(**self._shape))
        self.units_per_item = self._seq_len
        path = stdlib_text.ready(data_path)
        self._text = TokenFile(path)
        self.source = DataSource(
            name=path.stem, sha256=self._text.sha256, synthetic=False, items=self._text.sequences(self._seq_len)
        )

    def model(self) -> nn.Module:
        vision_library.load()
        from transformers import GPT2Config, GPT2LMHeadModel

        return cast("nn.Module", GPT2LMHeadModel(GPT2Config(
            vocab_size=stdlib_text.VOCABULARY,
            n_positions=self._seq_len,
            resid_pdrop=0.0,  # with dropout, two ways to spread the same work would no longer agree
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **self._shape,
        )))  # fmt: skip

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast("Any", model).transformer.h)

    def plan(self) -> Plan:
        from trainers.plans.gpt2 import Gpt2Plan

        return Gpt2Plan(self._seq_len, self._shape["n_embd"])

    def fetch(self, indices: np.ndarray, device: torch.device) -> Batch:
        import torch

        sample = torch.from_numpy(self._text.sample(indices, self._seq_len)).to(device)
        return Batch(inputs=sample[:, :-1], targets=sample[:, 1:])

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return cast("torch.Tensor", model(input_ids=batch.inputs).logits)

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.float().flatten(0, 1), targets.flatten())


VARIANTS = (
    Workload(
        name="gpt2-tiny",
        summary="GPT-2 of 4 layers and width 64 on the bytes of Python's standard library",
        parameters=PARAMETERS,
        unit="tokens",
        flops_per_unit=flops_per_token(PARAMETERS, N_LAYER, N_EMBD, SEQ_LEN),
        flops_source=FLOPS_SOURCE,
        optimizer=Optimizer(name="adamw", lr=1e-3),
        build=Gpt2Task,
        seq_len=SEQ_LEN,
        options=(
            Option("n_layer", N_LAYER, "transformer blocks"),
            Option("n_embd", N_EMBD, "width"),
            Option("n_head", N_HEAD, "attention heads; they divide the width"),
        ),
        heads="n_head",
        blocks="n_layer",
    ),
)
