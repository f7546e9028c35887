"""Settings of a Slurm cluster that decide how GPUs are requested and which jobs are accepted."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery


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


FIELD_BY_SETTING = {
    "ClusterName": "cluster",
    "SLURM_VERSION": "version",
    "SelectType": "select",
    "GresTypes": "gres",
    "JobSubmitPlugins": "submit_plugins",
    "AccountingStorageEnforce": "enforces",
}


def build_command(python: str) -> list[str]:
    return ["scontrol", "show", "config"]


def parse(stdout: str) -> SlurmSettings:
    """The settings in the output of `scontrol show config`. Raises ValueError if the output contains none of the settings."""
    value_by_field: dict[str, str] = {}
    for line in stdout.splitlines():
        setting_name, _, value = line.partition("=")
        settings_field = FIELD_BY_SETTING.get(setting_name.strip())
        if settings_field is not None and value.strip() not in ("(null)", "none", "N/A"):
            value_by_field[settings_field] = "".join(character for character in value.strip() if character.isprintable())[:200]
    if "cluster" not in value_by_field and "version" not in value_by_field:
        raise ValueError("it shows neither ClusterName nor SLURM_VERSION.")
    return SlurmSettings(
        cluster=value_by_field.get("cluster", ""),
        version=value_by_field.get("version", ""),
        select=value_by_field.get("select", ""),
        gres=_split_words(value_by_field.get("gres", "")),
        submit_plugins=_split_words(value_by_field.get("submit_plugins", "")),
        enforces=_split_words(value_by_field.get("enforces", "")),
    )


def _split_words(comma_list: str) -> tuple[str, ...]:
    return tuple(list_word.strip() for list_word in comma_list.split(",") if list_word.strip())


SLURM_SETTINGS = FactQuery("Slurm's settings", build_command, parse, timeout_s=60)
