"""A link between GPUs in the alpha-beta model: a message of S bytes takes alpha + S / bandwidth (Hockney, 1994)."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Literal

import msgspec

from shardlab.cluster.cluster_keys import CardBandwidth, Network
from shardlab.hardware.gpu_models import GpuModel
from shardlab.runs.prediction import PredictedRange

LowLikelyHigh = tuple[float, float, float]


class StudyRating(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The row of a link in study 4's table of interconnects."""

    viable: Literal["yes", "marginal", "no"]
    """Whether the study recommends the link for tensor parallelism."""
    printed: str
    """The bandwidth that the study prints."""


class LinkEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of links.yaml: one kind of link between GPUs. The comments of that file explain the fields."""

    gb_per_s: float | None
    achieved: LowLikelyHigh
    alpha_us: LowLikelyHigh
    study4: StudyRating | None
    source: str


class PlannedLink(msgspec.Struct, frozen=True):
    """A link that collectives use.

    In both ranges, `low` belongs to the slowest case.
    """

    name: str
    bandwidth: PredictedRange
    """Bus bandwidth in bytes/s."""
    alpha_s: PredictedRange
    """Latency in seconds per hop."""
    how: str
    """The end of a sentence that says where the two values come from."""


@functools.cache
def link_entries() -> dict[str, LinkEntry]:
    """The entries of links.yaml, which are kinds of links between GPUs, by name."""
    content = resources.files("jobs.planner").joinpath("links.yaml").read_bytes()
    return msgspec.yaml.decode(content, type=dict[str, LinkEntry])


def find_link(name: str, gpu: GpuModel | None) -> PlannedLink | None:
    """The link with this name in links.yaml; None if its bandwidth is not known.

    gpu: the GPU model, whose data sheet has the bandwidth of NVLink and Infinity Fabric. Without a GPU model, the bandwidth of
    `nvlink` and `infinity-fabric` is not known.
    """
    entry = link_entries()[name]
    line_gb_per_s = entry.gb_per_s if entry.gb_per_s is not None else gpu.link_gb_per_s / 2 if gpu is not None else None
    return None if line_gb_per_s is None else _make_link(name, line_gb_per_s, entry)


OTHER_NETWORK = "ethernet-100"  # the entry whose latency and achieved share a network gets of which only the bandwidth is known


def find_network(keys: Network, gpu: GpuModel | None) -> PlannedLink | None:
    """The network between nodes by the keys of a cluster file; None if they do not name it, or if its bandwidth is not known.
    Its bandwidth is that of all network cards of a node together."""
    if keys.between_nodes is None:
        return None
    if isinstance(keys.between_nodes, CardBandwidth):
        entry = link_entries()[OTHER_NETWORK]
        card: PlannedLink | None = _make_link(
            f"network of {keys.between_nodes.gb_per_s:g} GB/s", keys.between_nodes.gb_per_s, entry
        )
    else:
        card = find_link(keys.between_nodes, gpu)
    if card is None:
        return None
    cards = f"{keys.cards_per_node} cards per node" if keys.cards_per_node else "one card per node assumed"
    bandwidth = card.bandwidth.times(keys.cards_per_node or 1)
    return msgspec.structs.replace(card, bandwidth=bandwidth, how=f"{card.how}, {cards}")


def make_data_sheet_link(gpu: GpuModel) -> PlannedLink:
    """The link between GPUs of one node, by the data sheet of the GPU."""
    maker, _, generation = gpu.link.partition(" ")
    family = {"NVLink": "nvlink", "Infinity": "infinity-fabric"}.get(maker, f"pcie-{generation[0]}")
    if gpu.link.endswith("through the host"):
        family += "-host"
    return _make_link(gpu.link, gpu.link_gb_per_s / 2, link_entries()[family])


def _make_link(name: str, line_gb_per_s: float, entry: LinkEntry) -> PlannedLink:
    low, likely, high = (line_gb_per_s * 1e9 * share for share in entry.achieved)
    return PlannedLink(name, PredictedRange(low, likely, high), _latency_range(entry), "by its data sheet")


def _latency_range(entry: LinkEntry) -> PredictedRange:
    fast, likely, slow = (1e-6 * value for value in entry.alpha_us)
    return PredictedRange(slow, likely, fast)
