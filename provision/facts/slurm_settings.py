"""Settings of a Slurm cluster that decide how GPUs are requested and which jobs are accepted."""

from __future__ import annotations

import msgspec

from provision.fact import Fact


class SlurmSettings(msgspec.Struct, frozen=True):
    """Settings of a Slurm cluster. A setting that Slurm's controller does not show is empty."""

    cluster: str = ""
    version: str = ""
    select: str = ""
    """The plugin that chooses nodes; only select/cons_tres knows the option --gpus-per-node."""
    gres: tuple[str, ...] = ()
    """The kinds of generic resources (GRES) of the cluster, such as gpu."""
    submit_plugins: tuple[str, ...] = ()
    """Programs of the site that may change or reject a job."""
    enforces: tuple[str, ...] = ()
    """Slurm's AccountingStorageEnforce: what a job must have, such as an association."""


KEYS = {
    "ClusterName": "cluster",
    "SLURM_VERSION": "version",
    "SelectType": "select",
    "GresTypes": "gres",
    "JobSubmitPlugins": "submit_plugins",
    "AccountingStorageEnforce": "enforces",
}


def command(python: str) -> list[str]:
    return ["scontrol", "show", "config"]


def parse(stdout: str) -> SlurmSettings:
    """The settings in the output of `scontrol show config`. Raises ValueError if the output contains none of the settings."""
    values: dict[str, str] = {}
    for line in stdout.splitlines():
        key, _, value = line.partition("=")
        field = KEYS.get(key.strip())
        if field is not None and value.strip() not in ("(null)", "none", "N/A"):
            values[field] = "".join(char for char in value.strip() if char.isprintable())[:200]
    if "cluster" not in values and "version" not in values:
        raise ValueError("it shows neither ClusterName nor SLURM_VERSION.")
    return SlurmSettings(
        cluster=values.get("cluster", ""),
        version=values.get("version", ""),
        select=values.get("select", ""),
        gres=_split_words(values.get("gres", "")),
        submit_plugins=_split_words(values.get("submit_plugins", "")),
        enforces=_split_words(values.get("enforces", "")),
    )


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


SLURM_SETTINGS = Fact("Slurm's settings", command, parse, timeout_s=60)
