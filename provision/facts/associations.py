"""The accounts and QOS with which the user may submit jobs, from Slurm's accounting. Some sites do not show them to users."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery
from provision.facts.slurm_text import is_name, parse_names

SACCTMGR_FIELDS = "Account,Partition,QOS,DefaultQOS"
# The program asks only about this cluster, because several clusters may share the accounting database, and an account of
# another cluster is not valid here.
PRINT_ASSOCIATIONS = f"""\
cluster=$(scontrol show config 2>/dev/null | sed -n 's/^ClusterName *= *//p')
sacctmgr --noheader --parsable2 show associations user="$(id -un)" ${{cluster:+cluster="$cluster"}} format={SACCTMGR_FIELDS}
"""


class Association(msgspec.Struct, frozen=True):
    """An account of the user."""

    account: str
    partition: str | None = None
    """The only partition in which the account is valid; None: all partitions."""
    qos: tuple[str, ...] = ()
    default_qos: str | None = None


def build_command(python: str) -> list[str]:
    return ["sh", "-c", PRINT_ASSOCIATIONS]


def parse(stdout: str) -> tuple[Association, ...]:
    """The accounts of the user, from the output of PRINT_ASSOCIATIONS. Raises ValueError if a line has another form."""
    associations = []
    for line in stdout.splitlines():
        line_fields = line.split("|")
        if len(line_fields) != 4:
            raise ValueError(f"found {line[:80]!r}. Allowed: {SACCTMGR_FIELDS.replace(',', '|')}.")
        account, partition, qos_text, default_qos = line_fields
        if is_name(account):
            associations.append(
                Association(
                    account,
                    partition if is_name(partition) else None,
                    parse_names(qos_text) or (),
                    default_qos if is_name(default_qos) else None,
                )
            )
    return tuple(associations)


ASSOCIATIONS = FactQuery("accounts", build_command, parse, timeout_s=60)
