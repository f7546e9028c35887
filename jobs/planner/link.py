"""A link between GPUs in the alpha-beta model: a message of S bytes takes alpha + S / bandwidth (Hockney, 1994)."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Literal

import msgspec

from shardlab.cluster.cluster_keys import CardBandwidth, Network
from shardlab.hardware.gpu_models import GpuModel
from shardlab.runs.prediction import PredictedRange

RangeOfThree = tuple[float, float, float]


class StudyRating(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The row of a link in study 4's table of interconnects."""

    viable: Literal["yes", "marginal", "no"]
    """Whether the study recommends the link for tensor parallelism."""
    printed: str
    """The bandwidth that the study prints."""


class LinkEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of links.yaml: one kind of link between GPUs. The comments of that file explain the fields."""

    gb_per_s: float | None
    achieved: RangeOfThree
    alpha_us: RangeOfThree
    study4: StudyRating | None
    source: str


class PlannedLink(msgspec.Struct, frozen=True):
    """A link that collectives use.

    In both ranges, `low` belongs to the slowest case.
    """

    name: str
    bytes_per_s: PredictedRange
    """Bus bandwidth in bytes/s."""
    alpha_s: PredictedRange
    """Latency in seconds per hop."""
    how: str
    """The end of a sentence that says where the two values come from."""


@functools.cache
def read_link_entries() -> dict[str, LinkEntry]:
    """The entries of links.yaml, which are kinds of links between GPUs, by name."""
    yaml_bytes = resources.files("jobs.planner").joinpath("links.yaml").read_bytes()
    return msgspec.yaml.decode(yaml_bytes, type=dict[str, LinkEntry])


def find_link(link_name: str, gpu: GpuModel | None) -> PlannedLink | None:
    """The link with this name in links.yaml; None if its bandwidth is not known.

    gpu: the GPU model, whose data sheet has the bandwidth of NVLink and Infinity Fabric. Without a GPU model, the
    bandwidth of `nvlink` and `infinity-fabric` is not known.
    """
    entry = read_link_entries()[link_name]
    line_gb_per_s = entry.gb_per_s if entry.gb_per_s is not None else gpu.link_gb_per_s / 2 if gpu is not None else None
    return None if line_gb_per_s is None else _make_link(link_name, line_gb_per_s, entry)


# the entry whose latency and achieved share a network gets of which only the bandwidth is known
FALLBACK_NETWORK = "ethernet-100"


def find_network_link(network_keys: Network, gpu: GpuModel | None) -> PlannedLink | None:
    """The network between nodes by the keys of a cluster file; None if they do not name it, or if its bandwidth is not known.
    Its bandwidth is that of all network cards of a node together."""
    if network_keys.between_nodes is None:
        return None
    if isinstance(network_keys.between_nodes, CardBandwidth):
        fallback_entry = read_link_entries()[FALLBACK_NETWORK]
        card_link: PlannedLink | None = _make_link(
            f"network of {network_keys.between_nodes.gb_per_s:g} GB/s", network_keys.between_nodes.gb_per_s, fallback_entry
        )
    else:
        card_link = find_link(network_keys.between_nodes, gpu)
    if card_link is None:
        return None
    cards_clause = (
        f"{network_keys.cards_per_node} cards per node" if network_keys.cards_per_node else "one card per node assumed"
    )
    bandwidth = card_link.bytes_per_s.times(network_keys.cards_per_node or 1)
    return msgspec.structs.replace(card_link, bytes_per_s=bandwidth, how=f"{card_link.how}, {cards_clause}")


def make_data_sheet_link(gpu: GpuModel) -> PlannedLink:
    """The link between GPUs of one node, by the data sheet of the GPU."""
    maker_word, _, generation = gpu.link.partition(" ")
    entry_name = {"NVLink": "nvlink", "Infinity": "infinity-fabric"}.get(maker_word, f"pcie-{generation[0]}")
    if gpu.link.endswith("through the host"):
        entry_name += "-host"
    return _make_link(gpu.link, gpu.link_gb_per_s / 2, read_link_entries()[entry_name])


def _make_link(link_name: str, line_gb_per_s: float, entry: LinkEntry) -> PlannedLink:
    low_rate, likely_rate, high_rate = (line_gb_per_s * 1e9 * achieved_share for achieved_share in entry.achieved)
    return PlannedLink(
        link_name, PredictedRange(low_rate, likely_rate, high_rate), _make_latency_range(entry), "by its data sheet"
    )


def _make_latency_range(entry: LinkEntry) -> PredictedRange:
    fast_s, likely_s, slow_s = (1e-6 * alpha_us for alpha_us in entry.alpha_us)
    return PredictedRange(slow_s, likely_s, fast_s)
