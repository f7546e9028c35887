"""The options of the strategies on the menu, with their types. `Cell` itself reads `stages_per_rank`, `sync` and `replicas`."""

from __future__ import annotations

from shardlab.registry import TypedOptions, declare

MOST_MIB = 2**43 - 1  # the largest bucket: torch stores its number of bytes in 64 bits


class DdpOptions(TypedOptions):
    bucket_cap_mb: int = declare(25, "approximate size of a gradient bucket, in MiB", least=1, most=MOST_MIB)
    static_graph: bool = declare(False, "tell DDP that every step uses the same parameters in the same order")
    sync_batch_norm: bool = declare(False, "compute BatchNorm's statistics over the micro-batches of all ranks together")
    gradient_as_bucket_view: bool = declare(
        True, "store gradients in the buckets themselves, without copies into and out of them"
    )
    comm_hook: str = declare("none", "round gradients to this dtype before they are sent", ("none", "bf16"))
    join: bool = declare(False, "train also on the items left at the end of the epoch, on as many ranks as they fill")


class Fsdp2Options(TypedOptions):
    prefetch: int = declare(
        0, "number of blocks that are gathered before their use; 0: torch's default, the next block", least=0
    )
    offload: str = declare("none", "where to keep parameter shards, their gradients and optimizer state", ("none", "cpu"))


class Fsdp1Options(TypedOptions):
    wrap: str = declare(
        "block", "block: one FSDP unit per block and one for the rest; none: one unit for all", ("block", "none")
    )
    backward_prefetch: str = declare(
        "pre",
        "in backward, gather the next unit before (pre) or after (post) the gradients of the current unit are computed",
        ("pre", "post", "none"),
    )
    forward_prefetch: bool = declare(False, "in forward, gather the next unit while the current unit computes")
    limit_all_gathers: bool = declare(True, "make the CPU wait, so that at most two units are gathered at a time")
    offload: str = Fsdp2Options.offload


class ZeroOptions(TypedOptions):  # of the stages 0, which has only the first option, to 2
    communication_dtype: str = declare(
        "fp32", "dtype of sent gradients in a bf16 run (DeepSpeed's default: bf16)", ("fp32", "bf16")
    )
    reduce_bucket_size: int | None = declare(
        None,
        "elements of a bucket; null: as many as the model has, at most 50 million (DeepSpeed's default: 500 million)",
        kind="int",
        least=1,
    )
    allgather_bucket_size: int | None = declare(
        None, "elements of a bucket; null: as for reduce_bucket_size", kind="int", least=1
    )
    overlap_comm: bool = declare(False, "reduce gradients while backward still runs")
    offload_optimizer: str = declare("none", "where optimizer state is kept and updated", ("none", "cpu"))


class Zero3Options(TypedOptions):
    communication_dtype: str = ZeroOptions.communication_dtype
    reduce_bucket_size: int | None = ZeroOptions.reduce_bucket_size
    overlap_comm: bool = declare(True, "reduce gradients while backward still runs")
    prefetch_bucket_size: int = declare(50_000_000, "number of elements that are gathered before their use", least=0)
    param_persistence_threshold: int = declare(100_000, "parameters of at most this many elements are not sharded", least=0)
    max_reuse_distance: int = declare(
        1_000_000_000, "a parameter that is needed again within this number of elements stays gathered; 0: never", least=0
    )
    max_live_parameters: int = declare(
        1_000_000_000, "maximum number of gathered elements; at this limit, none are gathered before their use", least=0
    )
    offload_optimizer: str = declare(
        "none", "where optimizer state is kept; offloaded state is updated on the CPU", ("none", "cpu", "nvme")
    )
    offload_param: str = declare("none", "where sharded parameters are kept", ("none", "cpu", "nvme"))
    nvme_path: str | None = declare(None, "for nvme: a folder on a local disk of each node", kind="str")
    hpz_partition_size: int = declare(
        1,
        "ranks over which a second copy of the parameters is sharded, for repeated gathers in a step; 1: no copy (ZeRO++)",
        least=1,
    )
    quantized_weights: bool = declare(False, "send parameters as 8-bit integers (ZeRO++)")
    quantized_gradients: bool = declare(False, "send gradients as 4-bit integers (ZeRO++)")


class LocalSgdOptions(TypedOptions):
    # as in the example of torch's PostLocalSGDOptimizer
    averaging_period: int = declare(4, "optimizer steps between two averages of the parameters", least=1)


class AsynchronousOptions(TypedOptions):  # of asynchronous parameter servers
    pull_interval: int = declare(1, "a worker pulls parameters once in this many pushes", least=1)


class StalenessOptions(TypedOptions):  # further options of servers with bounded staleness
    staleness_bound: int = declare(4, "maximum number of steps that a worker may be ahead of the slowest worker", least=0)
    staleness_weighted: bool = declare(True, "weight a gradient by 1 / (1 + updates since its worker pulled parameters)")


class TensorOptions(TypedOptions):
    sequence_parallel: bool = declare(False, "between split layers, each rank keeps only a slice of the positions")
