"""Computes how fast a host sends or receives data, in bytes per second, from two consecutive telemetry samples."""

from __future__ import annotations

from typing import Literal

from shardlab.runs.record import Sample


class NetworkRate:
    """Computes the bytes per second of one host, over its physical interfaces or, if it has none, its virtual interfaces.

    counter: which bytes are counted: `tx_bytes` for sent bytes, `rx_bytes` for received bytes.
    """

    def __init__(self, counter: Literal["tx_bytes", "rx_bytes"]) -> None:
        self._counter = counter
        self._t_s, self._boot_id = 0.0, ""
        self._counts: dict[str, int] = {}

    def compute_rate(self, sample: Sample) -> float | None:
        """The rate since the previous sample, in bytes per second.

        None for the first sample, after a reboot of the host, and if a counter was reset.
        """
        by_kind: dict[str, dict[str, int]] = {}
        for nic in sample.nics or ():
            if (count := getattr(nic, self._counter)) is not None:
                by_kind.setdefault(nic.kind, {})[nic.name] = count
        counts = by_kind.get("physical") or by_kind.get("virtual") or {}
        growths = [count - self._counts[name] for name, count in counts.items() if name in self._counts]
        elapsed_s, same_boot = sample.t_s - self._t_s, sample.boot_id == self._boot_id
        self._t_s, self._boot_id, self._counts = sample.t_s, sample.boot_id, counts
        return sum(growths) / elapsed_s if same_boot and elapsed_s > 0 and growths and min(growths) >= 0 else None
