"""DistributedDataParallel: each rank has the whole model, and gradients are averaged in buckets while backward still runs."""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import LAST_PASS
from trainers.model.precision import ALL, scales_loss
from trainers.strategy import SWITCHES, Strategy
from trainers.strategy_options import DdpOptions
from trainers.theory.whole_models import POWERSGD_RANK, divide_ddp, list_ddp_terms, list_powersgd_terms

WITHOUT_GPU = "torch supports SyncBatchNorm on GPUs only, and the ranks of this run compute on a CPU. Allowed: false."


def refuse(cell: Cell) -> str | None:
    options = DdpOptions(cell.options)
    if options.comm_hook == "bf16" and cell.precision not in ("bf16", "bf16-autocast"):
        return (
            f"comm_hook: found bf16 with precision {cell.precision}; the hook is only for the fp32 gradients of bf16 and "
            "bf16-autocast. Allowed: none."
        )
    if options.sync_batch_norm and cell.launcher == "fork":
        return f"sync_batch_norm: {WITHOUT_GPU}"
    if options.static_graph and cell.gradient_accumulation_steps > 1:
        return (
            "static_graph: torch records the graph in the first pass, and this pass must exchange gradients. "
            "Allowed: gradient_accumulation_steps of 1, or false."
        )
    if options.join and (why := _refuse_join(cell, options)) is not None:
        return why
    return None


def _refuse_join(cell: Cell, options: DdpOptions) -> str | None:
    if cell.epochs != 1:
        length_text = f"steps: {cell.steps}" if cell.epochs is None else f"epochs: {cell.epochs}"
        return (
            "join: a rank without data makes no optimizer step in the short step, so no other step may follow: "
            f"found {length_text}. Allowed: epochs: 1."
        )
    if options.comm_hook != "none" or options.static_graph:
        return "join: torch's join supports neither comm_hook nor static_graph. Allowed: leave both out, or join: false."
    return None


_DDP = Strategy(
    name="ddp",
    summary="a whole model on every rank, gradients averaged by all-reduce (PyTorch DistributedDataParallel)",
    precisions=ALL,
    refuse=refuse,
    engine="trainers.engines.ddp",
    switches=SWITCHES,
    sync=lambda _: LAST_PASS,
    cuts=(),
    theory_of_memory=divide_ddp,
    theory_of_communication=list_ddp_terms,
    options=DdpOptions.list_options(),
)
VARIANTS = (
    _DDP,
    msgspec.structs.replace(
        _DDP,
        name="ddp-powersgd",
        summary=f"DDP with gradients compressed to matrices of rank {POWERSGD_RANK}, with error feedback (PowerSGD)",
        precisions=tuple(name for name in ALL if not scales_loss(name)),
        reasons=dict.fromkeys(
            filter(scales_loss, ALL), "the compression error of a step is added to the next gradient, even after an overflow"
        ),
        settings={"powersgd": True},
        theory_of_communication=list_powersgd_terms,
        options=tuple(option for option in _DDP.options if option.name not in ("comm_hook", "join")),
        other_work=lambda _: "PowerSGD approximates gradients, so its computation differs from that of one process",
        communication_period=lambda _: None,  # a callback, which is not counted, starts PowerSGD's second all-reduce
    ),
)
