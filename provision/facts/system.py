"""The operating system of a machine: the first fact that is asked. Its command needs only a shell, and runs as root,
which shows whether sudo works."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery
from shardlab.files.decoders import get_decoder

DESCRIBE_SYSTEM = """\
. /etc/os-release
say() { printf '%s=%s\\n' "$1" "$2"; }
say id "$ID"
say codename "${VERSION_CODENAME:-}"
say pretty "$PRETTY_NAME"
say kernel "$(uname -r)"
say arch "$(uname -m)"
say hostname "$(hostname)"
say virt "$(systemd-detect-virt 2>/dev/null || true)"
say boot_id "$(cat /proc/sys/kernel/random/boot_id)"
say cpus "$(nproc --all)"
say memory_kib "$(sed -n 's/^MemTotal: *\\([0-9]*\\) kB$/\\1/p' /proc/meminfo)"
say cgroup "$(stat -fc %T /sys/fs/cgroup)"
say user "${SUDO_USER:-$(id -un)}"
"""


class System(msgspec.Struct, frozen=True):
    """The operating system of a machine, and the size of the machine."""

    id: str
    """The id of the distribution, such as debian."""
    codename: str
    """The code name of the distribution's release, such as bookworm."""
    pretty: str
    """The full name of the distribution."""
    kernel: str
    arch: str
    hostname: str
    virt: str
    """The kind of virtualization, as systemd-detect-virt reports it; `none`: a physical machine."""
    boot_id: str
    cpus: int
    memory_kib: int
    cgroup: str
    """The type of the file system at /sys/fs/cgroup; cgroup2fs: only the unified hierarchy exists."""
    user: str
    """The user who logs in."""

    @property
    def is_container(self) -> bool:
        """Whether the machine is a container, which shares the kernel, the clock and the devices of its host."""
        return self.virt in ("systemd-nspawn", "lxc", "lxc-libvirt", "docker", "podman")


get_decoder(System)  # msgspec prepares the type here, before several threads call `parse`


def build_command(python: str) -> list[str]:
    """The command that describes the system. It needs only a shell."""
    return ["sh", "-c", DESCRIBE_SYSTEM]


def parse(stdout: str) -> System:
    """The system in the output of DESCRIBE_SYSTEM. Raises ValueError."""
    value_by_name = dict(line.split("=", 1) for line in stdout.splitlines() if "=" in line)
    try:
        return msgspec.convert(value_by_name, System, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


SYSTEM = FactQuery("system", build_command, parse, timeout_s=30, root=True)
