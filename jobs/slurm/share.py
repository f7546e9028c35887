"""Asks `sshare` how much of its limits a Slurm account has left. Many sites set no limit, and some have no sshare."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import msgspec

from jobs.slurm.commands import call_slurm
from shardlab.cluster.address import Address
from shardlab.cluster.slurm_cluster import address_cluster
from shardlab.remote import shared_connection
from shardlab.remote.login_shell import login_shell_argv
from shardlab.remote.ssh_command import ssh_command, wrap_for_any_shell
from shardlab.terminal.notation import format_amount

ANSWER_S = 10.0
COLUMNS = "Account,User,GrpTRESMins,GrpTRESRaw"  # the limit (GrpTRESMins) and the use (GrpTRESRaw) are in minutes
# names with other characters are not printed, because the text comes from another machine
ACCOUNT = re.compile(r"[A-Za-z0-9_.@+-]{1,128}")
# The names of resources in sshare's output, and what an hour of each is called. `billing` is Slurm's unit for charges.
HOUR_NAMES = {"gres/gpu": "GPU hours", "billing": "billing hours", "node": "node hours", "cpu": "processor hours"}
GPU_OF_A_TYPE = re.compile(r"gres/gpu:([A-Za-z0-9_.-]{1,64})")


class AccountShare(msgspec.Struct, frozen=True):
    """What an account has left of its limit on one resource. Slurm may count older use with less weight."""

    account: str
    """Name of the account."""
    resource: str
    """Name of the resource in Slurm, such as gres/gpu, gres/gpu:a100, billing, node or cpu."""
    left: float
    """Hours of the resource that are left."""
    limit: float
    """Hours of the resource in all."""

    def describe_remaining_hours(self) -> str:
        """A sentence without its subject, such as `75 of 100 GPU hours left`."""
        of_a_type = GPU_OF_A_TYPE.fullmatch(self.resource)
        hours = HOUR_NAMES[self.resource] if of_a_type is None else f"GPU hours of the type {of_a_type[1]}"
        return f"{format_amount(self.left)} of {format_amount(self.limit)} {hours} left"


def read_shares(account: str | None, cluster: str | None) -> list[AccountShare]:
    """For each resource that is limited, the share with the fewest hours left; empty if sshare does not answer.

    account: the name of a Slurm account; None: all accounts of the user. cluster: as in `call_slurm`.
    """
    if shutil.which("sshare") is None:
        return []
    answer = call_slurm(_sshare_argv(account), cluster=cluster, limit_s=ANSWER_S)
    return parse_shares(answer.stdout, account) if answer.code == 0 else []


def read_site_shares(address: Address, account: str | None, cluster: str | None) -> list[AccountShare]:
    """As `read_shares`, but `sshare` is called on the site's machine at `address`, over an SSH connection that is already open.
    If no connection is open, returns an empty list, so that nobody is asked to log in."""
    ssh = ssh_command(address)
    if not shared_connection.is_connection_open(ssh):
        return []
    command = shlex.join(address_cluster(_sshare_argv(account), cluster))
    words = [*ssh, wrap_for_any_shell(shlex.join(login_shell_argv(command)))]
    try:
        answer = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return []
    return parse_shares(answer.stdout.decode("utf-8", "replace"), account) if answer.returncode == 0 else []


def _sshare_argv(account: str | None) -> list[str]:
    accounts = [f"--accounts={account}"] if account is not None else []
    return ["sshare", "--parsable2", "--noheader", f"--format={COLUMNS}", *accounts]


def parse_shares(text: str, account: str | None) -> list[AccountShare]:
    """For each resource that is limited, the share with the fewest hours left, from the text that sshare printed."""
    fewest: dict[str, AccountShare] = {}
    for line in text.splitlines():
        columns = line.split("|")
        if len(columns) != len(COLUMNS.split(",")):
            continue
        name = columns[0].strip()  # sshare indents the name by its depth in the tree of accounts
        if ACCOUNT.fullmatch(name) is None or account not in (None, name):
            continue
        limits, used_minutes = (_parse_minutes(column) for column in columns[2:])
        for resource, limit in limits.items():
            share = AccountShare(name, resource, max(0.0, limit - used_minutes.get(resource, 0.0)) / 60, limit / 60)
            if resource not in fewest or share.left < fewest[resource].left:
                fewest[resource] = share
    gpu_types = sorted(fewest.keys() - HOUR_NAMES.keys())
    return [fewest[resource] for resource in [*HOUR_NAMES, *gpu_types] if resource in fewest]


def _parse_minutes(column: str) -> dict[str, float]:
    """Parse the minutes of each resource from a list such as `cpu=60,gres/gpu=120`. Resources that runs do not use are left
    out."""
    minutes = {}
    for word in column.split(","):
        name, _, value = word.partition("=")
        if (name in HOUR_NAMES or GPU_OF_A_TYPE.fullmatch(name)) and value.isdecimal() and value.isascii():
            minutes[name] = float(value)
    return minutes
