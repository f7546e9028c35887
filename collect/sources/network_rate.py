"""Computes how fast a host sends or receives data, in bytes per second, from two consecutive telemetry samples."""

from __future__ import annotations

from typing import Literal

from shardlab.runs.record import Sample


class NetworkRate:
    """Computes the bytes per second of one host, over its physical interfaces or, if it has none, its virtual interfaces.

    counter: which bytes are counted: `tx_bytes` for sent bytes, `rx_bytes` for received bytes.
    """

    def __init__(self, counter: Literal["tx_bytes", "rx_bytes"]) -> None:
        self._counter_field = counter
        self._previous_t_s, self._previous_boot_id = 0.0, ""
        self._previous_counts: dict[str, int] = {}

    def compute_rate(self, sample: Sample) -> float | None:
        """The rate since the previous sample, in bytes per second.

        None for the first sample, after a reboot of the host, and if a counter was reset.
        """
        counts_by_kind: dict[str, dict[str, int]] = {}
        for nic in sample.nics or ():
            if (count := getattr(nic, self._counter_field)) is not None:
                counts_by_kind.setdefault(nic.kind, {})[nic.name] = count
        counts = counts_by_kind.get("physical") or counts_by_kind.get("virtual") or {}
        growths = [count - self._previous_counts[name] for name, count in counts.items() if name in self._previous_counts]
        elapsed_s, is_same_boot = sample.t_s - self._previous_t_s, sample.boot_id == self._previous_boot_id
        self._previous_t_s, self._previous_boot_id, self._previous_counts = sample.t_s, sample.boot_id, counts
        return sum(growths) / elapsed_s if is_same_boot and elapsed_s > 0 and growths and min(growths) >= 0 else None
