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
from shardlab.remote.login_shell import make_login_argv
from shardlab.remote.ssh_command import make_ssh_command, wrap_for_any_shell
from shardlab.terminal.notation import format_amount

SSHARE_LIMIT_S = 10.0
SSHARE_COLUMNS = "Account,User,GrpTRESMins,GrpTRESRaw"  # the limit (GrpTRESMins) and the use (GrpTRESRaw) are in minutes
# names with other characters are not printed, because the text comes from another machine
ACCOUNT_PATTERN = re.compile(r"[A-Za-z0-9_.@+-]{1,128}")
# The names of resources in sshare's output, and what an hour of each is called. `billing` is Slurm's unit for charges.
HOUR_NAMES = {"gres/gpu": "GPU hours", "billing": "billing hours", "node": "node hours", "cpu": "processor hours"}
GPU_TYPE_PATTERN = re.compile(r"gres/gpu:([A-Za-z0-9_.-]{1,64})")


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
        gpu_type_match = GPU_TYPE_PATTERN.fullmatch(self.resource)
        hours_phrase = HOUR_NAMES[self.resource] if gpu_type_match is None else f"GPU hours of the type {gpu_type_match[1]}"
        return f"{format_amount(self.left)} of {format_amount(self.limit)} {hours_phrase} left"


def read_shares(account: str | None, cluster: str | None) -> list[AccountShare]:
    """For each resource that is limited, the share with the fewest hours left; empty if sshare does not answer.

    account: the name of a Slurm account; None: all accounts of the user. cluster: as in `call_slurm`.
    """
    if shutil.which("sshare") is None:
        return []
    output = call_slurm(_make_sshare_argv(account), cluster=cluster, limit_s=SSHARE_LIMIT_S)
    return parse_shares(output.stdout, account) if output.exit_code == 0 else []


def read_shares_over_ssh(address: Address, account: str | None, cluster: str | None) -> list[AccountShare]:
    """As `read_shares`, but `sshare` is called on the site's machine at `address`, over an SSH connection that is already open.
    If no connection is open, returns an empty list, so that nobody is asked to log in."""
    ssh_words = make_ssh_command(address)
    if not shared_connection.is_connection_open(ssh_words):
        return []
    sshare_command = shlex.join(address_cluster(_make_sshare_argv(account), cluster))
    ssh_argv = [*ssh_words, wrap_for_any_shell(shlex.join(make_login_argv(sshare_command)))]
    try:
        ssh_result = subprocess.run(
            ssh_argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SSHARE_LIMIT_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return []
    return parse_shares(ssh_result.stdout.decode("utf-8", "replace"), account) if ssh_result.returncode == 0 else []


def _make_sshare_argv(account: str | None) -> list[str]:
    accounts = [f"--accounts={account}"] if account is not None else []
    return ["sshare", "--parsable2", "--noheader", f"--format={SSHARE_COLUMNS}", *accounts]


def parse_shares(sshare_output: str, account: str | None) -> list[AccountShare]:
    """For each resource that is limited, the share with the fewest hours left, from the text that sshare printed."""
    fewest_by_resource: dict[str, AccountShare] = {}
    for line in sshare_output.splitlines():
        columns = line.split("|")
        if len(columns) != len(SSHARE_COLUMNS.split(",")):
            continue
        account_name = columns[0].strip()  # sshare indents the name by its depth in the tree of accounts
        if ACCOUNT_PATTERN.fullmatch(account_name) is None or account not in (None, account_name):
            continue
        limit_minutes, used_minutes = (_parse_minutes(column) for column in columns[2:])
        for resource, resource_minutes in limit_minutes.items():
            share = AccountShare(
                account_name, resource, max(0.0, resource_minutes - used_minutes.get(resource, 0.0)) / 60, resource_minutes / 60
            )
            if resource not in fewest_by_resource or share.left < fewest_by_resource[resource].left:
                fewest_by_resource[resource] = share
    gpu_types = sorted(fewest_by_resource.keys() - HOUR_NAMES.keys())
    return [fewest_by_resource[resource] for resource in [*HOUR_NAMES, *gpu_types] if resource in fewest_by_resource]


def _parse_minutes(column_text: str) -> dict[str, float]:
    """Parse the minutes of each resource from a list such as `cpu=60,gres/gpu=120`. Resources that runs do not use are left
    out."""
    minutes_by_resource = {}
    for resource_word in column_text.split(","):
        resource, _, value = resource_word.partition("=")
        if (resource in HOUR_NAMES or GPU_TYPE_PATTERN.fullmatch(resource)) and value.isdecimal() and value.isascii():
            minutes_by_resource[resource] = float(value)
    return minutes_by_resource
