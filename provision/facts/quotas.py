"""The user's quota in bytes and in files, from `quota`, `lfs quota` (Lustre) or `mmlsquota` (Storage Scale)."""

from __future__ import annotations

import re

import msgspec

from provision.fact import Fact
from shardlab.remote.login_shell import login_shell_argv

# Commands by which sites show quotas in a form of their own. Their output is not read; only their names are shown to the user.
SITE_COMMANDS = ("myquota", "quotas", "showquota", "diskquota", "mmlsquota-all", "check-quota", "cquota")
ANSWER_S = 5  # the time limit of each command; all commands run at the same time
# The output of each command begins with a line `== NAME`. All commands print sizes in KiB.
PROGRAM = rf"""
folder=$(mktemp -d) || exit 0
trap 'rm -rf -- "$folder"' EXIT
user=$(id -un)
if command -v quota > /dev/null 2>&1; then
    {{ echo '== quota'; timeout {ANSWER_S} quota -wp; }} > "$folder/1" 2> /dev/null < /dev/null &
fi
if command -v lfs > /dev/null 2>&1; then
    number=2
    for mount in $(awk '$3 == "lustre" {{print $2}}' /proc/mounts | sort -u | head -n 8); do
        {{ echo "== lfs $mount"; timeout {ANSWER_S} lfs quota -q -u "$user" "$mount"; }} \
            > "$folder/$number" 2> /dev/null < /dev/null &
        number=$((number + 1))
    done
fi
command -v mmlsquota > /dev/null 2>&1 || PATH=$PATH:/usr/lpp/mmfs/bin
if command -v mmlsquota > /dev/null 2>&1; then
    {{ echo '== mmlsquota'; timeout {ANSWER_S} mmlsquota -Y; }} > "$folder/90" 2> /dev/null < /dev/null &
fi
wait
cat "$folder"/* 2> /dev/null
for name in {" ".join(SITE_COMMANDS)}; do command -v "$name" > /dev/null 2>&1 && echo "== site $name"; done
exit 0
"""
_PLACE = re.compile(r"^[A-Za-z0-9._/:@-]{1,200}\Z")
_NUMBER = re.compile(r"^\[?(\d{1,18})\]?\*?\Z")  # * marks a number above the quota; [ ] means that not all servers answered
KIB = 1024


class Quota(msgspec.Struct, frozen=True):
    """The quota of this user in one place. None: no limit, or not known. Without a soft limit, the hard limit is the limit."""

    place: str
    """A folder, a file system, or SERVER:FOLDER."""
    used_bytes: int | None
    most_bytes: int | None
    used_files: int | None
    most_files: int | None


class Quotas(msgspec.Struct, frozen=True):
    """All quotas that were found."""

    quotas: tuple[Quota, ...] = ()
    site_commands: tuple[str, ...] = ()
    """The names of commands of this site that show quotas in their own form."""


def command(python: str) -> list[str]:
    return login_shell_argv(PROGRAM)


def parse(stdout: str) -> Quotas:
    """The quotas in the output of PROGRAM. Lines that cannot be read as the output of a known command are skipped."""
    quota_by_place: dict[str, Quota] = {}
    command_names: list[str] = []
    kind, lines = "", list[str]()
    for line in [*stdout.splitlines(), "== end"]:
        if not line.startswith("== "):
            lines.append(line)
            continue
        quota_by_place |= {quota.place: quota for quota in _parse_quotas(kind, lines)}
        kind, lines = line.removeprefix("== "), []
        if kind.startswith("site ") and (name := kind.removeprefix("site ")) in SITE_COMMANDS:
            command_names.append(name)
    return Quotas(tuple(quota_by_place.values()), tuple(command_names))


def _parse_quotas(kind: str, lines: list[str]) -> list[Quota]:
    if kind == "mmlsquota":
        return _parse_scale_quotas(lines)
    if kind != "quota" and not kind.startswith("lfs "):
        return []
    # A long name of a file system stands on a line of its own, so the words of all lines after the header are joined.
    words = " ".join(line for line in lines if "Disk quotas" not in line and "Filesystem" not in line).split()
    quotas = []
    while len(words) >= 9:
        place, numbers = words[0], words[1:9]
        if _PLACE.match(place) and _NUMBER.match(numbers[0]) and _NUMBER.match(numbers[4]):
            where = kind.removeprefix("lfs ") if kind.startswith("lfs ") else place
            quotas += _make_quota(where, numbers[0:3], numbers[4:7])
            words = words[9:]
        else:
            words = words[1:]
    return quotas


def _parse_scale_quotas(lines: list[str]) -> list[Quota]:
    """The quotas in the output of mmlsquota -Y: fields between colons, whose names are in lines with the word HEADER."""
    names: list[str] = []
    quotas = []
    for line in lines:
        fields = line.split(":")
        if "HEADER" in fields[:3]:
            names = fields
            continue
        entry = dict(zip(names, fields, strict=False))
        if entry.get("quotaType", "USR") == "USR" and _PLACE.match(entry.get("filesystemName", "")):
            sizes = [entry.get(name, "") for name in ("blockUsage", "blockQuota", "blockLimit")]
            files = [entry.get(name, "") for name in ("filesUsage", "filesQuota", "filesLimit")]
            quotas += _make_quota(entry["filesystemName"], sizes, files)
    return quotas


def _make_quota(place: str, sizes: list[str], files: list[str]) -> list[Quota]:
    """The quota of one place as a list; empty if nothing is limited there.

    sizes: used, soft limit and hard limit in KiB. files: used, soft limit and hard limit as numbers of files.
    """
    used_kib, *limits = (_parse_count(text) for text in sizes)
    used_files, *file_limits = (_parse_count(text) for text in files)
    most_kib, most_files = (next((limit for limit in group if limit), None) for group in (limits, file_limits))
    if most_kib is None and most_files is None:
        return []
    in_bytes = [None if number is None else number * KIB for number in (used_kib, most_kib)]
    return [Quota(place, in_bytes[0], in_bytes[1], used_files, most_files)]


def _parse_count(text: str) -> int | None:
    match = _NUMBER.match(text)
    return int(match[1]) if match else None


QUOTAS = Fact("quotas", command, parse, timeout_s=30)
