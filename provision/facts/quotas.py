"""The user's quota in bytes and in files, from `quota`, `lfs quota` (Lustre) or `mmlsquota` (Storage Scale)."""

from __future__ import annotations

import re

import msgspec

from provision.fact import FactQuery
from shardlab.remote.login_shell import make_login_argv

# Commands by which sites show quotas in a form of their own. Their output is not read; only their names are shown to the user.
SITE_COMMANDS = ("myquota", "quotas", "showquota", "diskquota", "mmlsquota-all", "check-quota", "cquota")
ANSWER_S = 5  # the time limit of each command; all commands run at the same time
# The output of each command begins with a line `== NAME`. All commands print sizes in KiB.
PRINT_QUOTAS = rf"""
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
_QUOTA_PLACE = re.compile(r"^[A-Za-z0-9._/:@-]{1,200}\Z")
# * marks a number above the quota; [ ] means that not all servers answered
_QUOTA_NUMBER = re.compile(r"^\[?(\d{1,18})\]?\*?\Z")
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


def build_command(python: str) -> list[str]:
    return make_login_argv(PRINT_QUOTAS)


def parse(stdout: str) -> Quotas:
    """The quotas in the output of PRINT_QUOTAS. Lines that cannot be read as the output of a known command are skipped."""
    quota_by_place: dict[str, Quota] = {}
    command_names: list[str] = []
    section_heading, section_lines = "", list[str]()
    for line in [*stdout.splitlines(), "== end"]:
        if not line.startswith("== "):
            section_lines.append(line)
            continue
        quota_by_place |= {quota.place: quota for quota in _parse_quotas(section_heading, section_lines)}
        section_heading, section_lines = line.removeprefix("== "), []
        if section_heading.startswith("site ") and (site_command := section_heading.removeprefix("site ")) in SITE_COMMANDS:
            command_names.append(site_command)
    return Quotas(tuple(quota_by_place.values()), tuple(command_names))


def _parse_quotas(section_heading: str, section_lines: list[str]) -> list[Quota]:
    if section_heading == "mmlsquota":
        return _parse_scale_quotas(section_lines)
    if section_heading != "quota" and not section_heading.startswith("lfs "):
        return []
    # A long name of a file system stands on a line of its own, so the words of all lines after the header are joined.
    quota_words = " ".join(line for line in section_lines if "Disk quotas" not in line and "Filesystem" not in line).split()
    quotas = []
    while len(quota_words) >= 9:
        first_word, quota_numbers = quota_words[0], quota_words[1:9]
        if _QUOTA_PLACE.match(first_word) and _QUOTA_NUMBER.match(quota_numbers[0]) and _QUOTA_NUMBER.match(quota_numbers[4]):
            quota_place = section_heading.removeprefix("lfs ") if section_heading.startswith("lfs ") else first_word
            quotas += _make_quota(quota_place, quota_numbers[0:3], quota_numbers[4:7])
            quota_words = quota_words[9:]
        else:
            quota_words = quota_words[1:]
    return quotas


def _parse_scale_quotas(lines: list[str]) -> list[Quota]:
    """The quotas in the output of mmlsquota -Y: fields between colons, whose names are in lines with the word HEADER."""
    column_names: list[str] = []
    quotas = []
    for line in lines:
        line_fields = line.split(":")
        if "HEADER" in line_fields[:3]:
            column_names = line_fields
            continue
        field_by_column = dict(zip(column_names, line_fields, strict=False))
        if field_by_column.get("quotaType", "USR") == "USR" and _QUOTA_PLACE.match(field_by_column.get("filesystemName", "")):
            size_texts = [field_by_column.get(column_name, "") for column_name in ("blockUsage", "blockQuota", "blockLimit")]
            file_texts = [field_by_column.get(column_name, "") for column_name in ("filesUsage", "filesQuota", "filesLimit")]
            quotas += _make_quota(field_by_column["filesystemName"], size_texts, file_texts)
    return quotas


def _make_quota(place: str, size_texts: list[str], file_texts: list[str]) -> list[Quota]:
    """The quota of one place as a list; empty if nothing is limited there.

    size_texts: used, soft limit and hard limit in KiB. file_texts: used, soft limit and hard limit as numbers of files.
    """
    used_kib, *byte_limits = (_parse_count(number_text) for number_text in size_texts)
    used_files, *file_limits = (_parse_count(number_text) for number_text in file_texts)
    most_kib, file_limit = (next((limit for limit in limit_group if limit), None) for limit_group in (byte_limits, file_limits))
    if most_kib is None and file_limit is None:
        return []
    quota_bytes = [None if kib_number is None else kib_number * KIB for kib_number in (used_kib, most_kib)]
    return [Quota(place, quota_bytes[0], quota_bytes[1], used_files, file_limit)]


def _parse_count(number_text: str) -> int | None:
    number_match = _QUOTA_NUMBER.match(number_text)
    return int(number_match[1]) if number_match else None


QUOTAS = FactQuery("quotas", build_command, parse, timeout_s=30)
