"""What is on a disk: partitions, signatures, mounts, and whether its beginning is blank. The disk is only read."""

from __future__ import annotations

from typing import Any

import msgspec

from provision.fact import FactQuery, decode_last_line

# The label of file systems that `provision` makes, by which it recognizes them before they are mounted
FILE_SYSTEM_LABEL = "shardlab"
# DESCRIBE_DISK uses wipefs, which lists all signatures of file systems, RAID, LVM and encryption that libblkid finds. lsblk
# is not used for file systems, because it prints the information of udev, which may be old.
DESCRIBE_DISK = """\
disk=$1
if ! test -b "$disk"; then echo '{"there": false}'; exit 0; fi
tree=$(lsblk --json --output PATH,TYPE,MOUNTPOINTS -- "$disk" | tr -d '\\n')
signs=$(wipefs --no-act --noheadings --output TYPE -- "$disk")  # in no pipe, which would hide that it failed
held=$(ls "/sys/class/block/$(basename "$(readlink -f -- "$disk")")/holders")
blank=false
if cmp -s -n 1048576 -- "$disk" /dev/zero; then blank=true; fi
made=false
test "$(blkid --probe --match-tag LABEL --output value -- "$disk" || true)" != "$2" || made=true
printf '{"there": true, "tree": %s, "signs": "%s", "held": "%s", "blank": %s, "made": %s}\\n' \\
    "$tree" "$(echo $signs)" "$(echo $held)" "$blank" "$made"
"""


class _DiskReport(msgspec.Struct):
    there: bool
    tree: dict[str, Any] = {}
    signs: str = ""
    held: str = ""
    blank: bool = False
    made: bool = False


class Disk(msgspec.Struct, frozen=True):
    """A disk of a machine."""

    path: str | None = None
    """The kernel's present name of the disk, such as /dev/sdb; None: the disk does not exist."""
    holds: tuple[str, ...] = ()
    """A text for each thing that is on the disk; empty: the disk is empty."""
    ours: bool = False
    """Whether the disk holds only a file system that `provision` made and that is not mounted."""


def make_disk_query(path: str) -> FactQuery[Disk]:
    """The fact about the disk at `path`. Only this disk is read, because other disks may be in sleep mode."""
    return FactQuery(
        f"disk {path}",
        lambda python: ["sh", "-euc", DESCRIBE_DISK, "disk", path, FILE_SYSTEM_LABEL],
        parse,
        timeout_s=60,
        root=True,
    )


def parse(stdout: str) -> Disk:
    """The disk, parsed from the output of DESCRIBE_DISK. Raises ValueError."""
    disk_report = decode_last_line(stdout, _DiskReport)
    if not disk_report.there:
        return Disk()
    try:
        (block_device,) = disk_report.tree["blockdevices"]
        contents = [] if block_device["type"] == "disk" else [f"it is not a whole disk but a {block_device['type']}"]
        contents += [f"the {child['type']} {child['path']}" for child in block_device.get("children", ())]
        mountpoints = [mountpoint for mountpoint in block_device["mountpoints"] if mountpoint]
        contents += [f"it is in use at {mountpoint}" for mountpoint in mountpoints]
        contents += [f"a signature of {signature}" for signature in disk_report.signs.split()]
        contents += [f"it is used by {holder}" for holder in disk_report.held.split()]
        if not disk_report.blank and not contents:
            contents.append("data of no known kind in its first MiB")
        return Disk(str(block_device["path"]), tuple(contents), disk_report.made and contents == ["a signature of ext4"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"lsblk does not say {error}.") from None
