"""The key `network` of a cluster file: the links that the planner calculates with."""

from __future__ import annotations

from typing import Literal

import msgspec

LinkName = Literal[
    "nvlink", "pcie-3", "pcie-4", "pcie-5",
    "infiniband-edr", "infiniband-hdr", "infiniband-ndr",
    "ethernet-1", "ethernet-10", "ethernet-25", "ethernet-40", "ethernet-100",
]  # fmt: skip


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links between GPUs. `jobs plan` and `jobs advise` calculate with them; runs do not use them."""

    link: LinkName | None = None
    """The link between the GPUs of one node; null: the link that the data sheet of the GPU model names."""
    between_nodes: LinkName | None = None
    """The link between two nodes; null: not known, so that no time is predicted for runs on several nodes."""
