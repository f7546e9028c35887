"""DistributedDataParallel: each rank has the whole model, and gradients are averaged in buckets while backward still runs."""

from __future__ import annotations

import msgspec

from shardlab.matrix.cell import Cell
from shardlab.matrix.gradient_sync import LAST_PASS
from shardlab.registry import Option
from trainers.model.precision import ALL, scales_loss
from trainers.strategy import SWITCHES, Strategy
from trainers.theory.whole_models import POWERSGD_RANK, divide_ddp, list_ddp_terms, list_powersgd_terms

MOST_MIB = 2**43 - 1  # the largest bucket: torch stores its number of bytes in 64 bits
WITHOUT_GPU = "torch supports SyncBatchNorm on GPUs only, and the ranks of this run compute on a CPU. Allowed: false."


def refuse(cell: Cell) -> str | None:
    if cell.options.get("comm_hook", "none") == "bf16" and cell.precision not in ("bf16", "bf16-autocast"):
        return (
            f"comm_hook: found bf16 with precision {cell.precision}; the hook is only for the fp32 gradients of bf16 and "
            "bf16-autocast. Allowed: none."
        )
    if cell.options["sync_batch_norm"] is True and cell.launcher == "fork":
        return f"sync_batch_norm: {WITHOUT_GPU}"
    if cell.options.get("static_graph") is True and cell.gradient_accumulation_steps > 1:
        return (
            "static_graph: torch records the graph in the first pass, and this pass must exchange gradients. "
            "Allowed: gradient_accumulation_steps of 1, or false."
        )
    if cell.options.get("join") is True and (why := _refuse_join(cell)) is not None:
        return why
    return None


def _refuse_join(cell: Cell) -> str | None:
    if cell.epochs != 1:
        length_text = f"steps: {cell.steps}" if cell.epochs is None else f"epochs: {cell.epochs}"
        return (
            "join: a rank without data makes no optimizer step in the short step, so no other step may follow: "
            f"found {length_text}. Allowed: epochs: 1."
        )
    if cell.options.get("comm_hook", "none") != "none" or cell.options.get("static_graph") is True:
        return "join: torch's join supports neither comm_hook nor static_graph. Allowed: leave both out, or join: false."
    return None


OPTIONS = (
    Option("bucket_cap_mb", 25, "approximate size of a gradient bucket, in MiB", least=1, most=MOST_MIB),
    Option("static_graph", False, "tell DDP that every step uses the same parameters in the same order"),
    Option("sync_batch_norm", False, "compute BatchNorm's statistics over the micro-batches of all ranks together"),
    Option("gradient_as_bucket_view", True, "store gradients in the buckets themselves, without copies into and out of them"),
)
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
    options=(
        *OPTIONS,
        Option("comm_hook", "none", "round gradients to this dtype before they are sent", ("none", "bf16")),
        Option("join", False, "train also on the items left at the end of the epoch, on as many ranks as they fill"),
    ),
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
        options=OPTIONS,
        other_work=lambda _: "PowerSGD approximates gradients, so its computation differs from that of one process",
        communication_period=lambda _: None,  # a callback, which is not counted, starts PowerSGD's second all-reduce
    ),
)
