"""What is left of an account's GPU hours, by `sshare`. Many sites limit other resources or nothing, and some have no sshare."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import msgspec

from jobs.slurm.commands import call
from shardlab import shared_connection
from shardlab.remote import Address, ssh_command

ANSWER_S = 10.0
COLUMNS = "Account,User,GrpTRESMins,GrpTRESRaw"  # both in minutes
GPU = "gres/gpu"


class Share(msgspec.Struct, frozen=True):
    """The GPU hours that an account has left, and its limit. Slurm may count older use with less weight."""

    account: str  # name of the account
    left: float  # GPU hours that are left
    limit: float  # GPU hours in all


def of(account: str | None) -> Share | None:
    """The share with the fewest GPU hours left; None if sshare does not answer or limits no GPU hours.

    account: null: all accounts of the user.
    """
    if shutil.which("sshare") is None:
        return None
    answer = call(_words(account), limit_s=ANSWER_S)
    return parse(answer.stdout, account) if answer.code == 0 else None


def of_site(address: Address, account: str | None) -> Share | None:
    """The same from another machine, over the shared connection; None also if it is not open, as this asks no one to log in."""
    ssh = ssh_command(address)
    if not shared_connection.is_open(ssh):
        return None
    words = [*ssh, shlex.join(["bash", "-lc", shlex.join(_words(account))])]
    try:
        answer = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return None
    return parse(answer.stdout.decode("utf-8", "replace"), account) if answer.returncode == 0 else None


def _words(account: str | None) -> list[str]:
    accounts = [f"--accounts={account}"] if account is not None else []
    return ["sshare", "--parsable2", "--noheader", f"--format={COLUMNS}", *accounts]


def parse(text: str, account: str | None) -> Share | None:
    """The share with the fewest GPU hours left, from what sshare printed."""
    shares = []
    for line in text.splitlines():
        columns = line.split("|")
        if len(columns) != len(COLUMNS.split(",")):
            continue
        name = columns[0].strip()  # indented by its depth in the tree of accounts
        limit, used = (_gpu_minutes(column) for column in columns[2:])
        if limit is not None and account in (None, name):
            shares.append(Share(name, max(0.0, limit - (used or 0.0)) / 60, limit / 60))
    return min(shares, key=lambda share: share.left, default=None)


def _gpu_minutes(column: str) -> float | None:
    """The number of `gres/gpu` in a list such as `cpu=60,gres/gpu=120`."""
    for word in column.split(","):
        name, _, value = word.partition("=")
        if name == GPU and value.isdigit():
            return float(value)
    return None
