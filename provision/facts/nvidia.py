"""The NVIDIA devices of a machine and the state of their driver. The command of this fact needs only a shell on the machine."""

from __future__ import annotations

import re

import msgspec

from provision.fact import Fact

SMI = "driver_version,persistence_mode,mig.mode.current,ecc.mode.current,name,uuid"
# If mokutil is not installed, the last byte of the firmware's variable SecureBoot says whether Secure Boot is on.
PROGRAM = f"""\
say() {{ printf '%s=%s\\n' "$1" "$2"; }}
for device in /sys/bus/pci/devices/*; do
    test "$(cat "$device/vendor" 2>/dev/null)" = 0x10de || continue
    say pci "${{device##*/}} $(cat "$device/class") $(cat "$device/device")"
done
say loaded "$(head -n 1 /proc/driver/nvidia/version 2>/dev/null)"
say module "$(modinfo -F version nvidia 2>/dev/null)"
if said=$(nvidia-smi --query-gpu={SMI} --format=csv,noheader,nounits 2>&1); then
    printf '%s\\n' "$said" | sed 's/^/gpu=/'
else
    say why_no_nvml "$(printf '%s\\n' "$said" | head -n 1)"
fi
grep -q '^nouveau ' /proc/modules && say nouveau 1
if ! test -d /sys/firmware/efi; then
    say secure_boot 0
elif said=$(mokutil --sb-state 2>/dev/null); then
    case "$said" in *enabled*) say secure_boot 1 ;; *) say secure_boot 0 ;; esac
else
    say secure_boot "$(od -An -t u1 -j 4 -N 1 /sys/firmware/efi/efivars/SecureBoot-* 2>/dev/null | tr -d ' ')"
fi
apt-mark showhold 2>/dev/null | sed 's/^/held=/'
"""
_LOADED = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9.]+)")


class PciDevice(msgspec.Struct, frozen=True):
    """A device on the PCI bus."""

    address: str
    """The address on the bus, as lspci -D writes it."""
    kind: int
    """The PCI class and subclass, such as 0x0302."""
    device: int
    """The PCI device id."""


class GpuSettings(msgspec.Struct, frozen=True):
    """A GPU and its settings, as NVML reports them."""

    name: str
    uuid: str
    persistence: bool | None
    """None if the GPU does not have this setting."""
    mig: bool | None
    """None if the GPU does not have this setting."""
    ecc: bool | None
    """None if the GPU does not have this setting."""


class Nvidia(msgspec.Struct, frozen=True):
    """The NVIDIA devices and the driver of a machine."""

    gpus: list[PciDevice] = []
    """GPUs on the PCI bus."""
    switches: list[PciDevice] = []
    """NVSwitches on the PCI bus."""
    loaded: str | None = None
    """The version of the running kernel module. None if it is missing."""
    module: str | None = None
    """The version of the kernel module on disk, for the running kernel. None if it is missing."""
    nvml: str | None = None
    """The version of the library NVML. None if it is missing."""
    why_no_nvml: str | None = None
    seen: list[GpuSettings] = []
    """The GPUs that the driver sees."""
    nouveau: bool = False
    """Whether the driver nouveau is loaded."""
    secure_boot: bool | None = None
    """Whether Secure Boot is on; None: not known."""
    held: list[str] = []
    """The packages that the user told apt to keep at their versions (apt-mark hold)."""

    @property
    def works(self) -> bool:
        """Whether kernel module, module on disk and NVML have the same version, and nouveau is not loaded."""
        return self.loaded is not None and self.loaded == self.module == self.nvml and not self.nouveau

    @property
    def versions(self) -> str:
        """The versions of the loaded module, the module on disk and NVML, as text for a message."""
        return f"loaded {self.loaded or 'none'}, on disk {self.module or 'none'}, NVML {self.nvml or 'none'}"


def command(python: str) -> list[str]:
    """The command that describes the NVIDIA devices. It needs only a shell, and uses nvidia-smi if it is installed."""
    return ["sh", "-c", PROGRAM]


def parse(stdout: str) -> Nvidia:
    """The devices and the driver, from the output of PROGRAM. Raises ValueError."""
    pairs = [line.split("=", 1) for line in stdout.splitlines() if "=" in line]
    values = dict(pairs)
    devices = [_parse_pci(value) for key, value in pairs if key == "pci"]
    rows = [value.split(", ", 5) for key, value in pairs if key == "gpu"]
    if any(len(row) != 6 for row in rows):
        raise ValueError(f"a line of nvidia-smi does not have the columns {SMI}: {rows[0]!r}.")
    versions = {row[0] for row in rows}
    if len(versions) > 1:
        raise ValueError(f"NVML reports several driver versions: {', '.join(sorted(versions))}.")
    loaded = _LOADED.search(values.get("loaded", ""))
    return Nvidia(
        gpus=[device for device in devices if device.kind in (0x0300, 0x0302)],
        switches=[device for device in devices if device.kind == 0x0680],
        loaded=loaded[1] if loaded else None,
        module=values.get("module") or None,
        nvml=versions.pop() if versions else None,
        why_no_nvml=values.get("why_no_nvml") or None,
        seen=[GpuSettings(row[4], row[5], *(_parse_switch(word) for word in row[1:4])) for row in rows],
        nouveau="nouveau" in values,
        secure_boot={"0": False, "1": True}.get(values.get("secure_boot", "")),
        held=sorted(value for key, value in pairs if key == "held"),
    )


def _parse_pci(text: str) -> PciDevice:
    address, kind, device = text.split()
    return PciDevice(address, int(kind, 16) >> 8, int(device, 16))


def _parse_switch(word: str) -> bool | None:
    """The value of a setting that nvidia-smi prints: True for Enabled, False for Disabled, None for others such as [N/A]."""
    return {"Enabled": True, "Disabled": False}.get(word)


NVIDIA = Fact("nvidia", command, parse, timeout_s=90, root=True)  # without persistence mode, nvidia-smi takes seconds per GPU
