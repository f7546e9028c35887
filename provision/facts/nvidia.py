"""The NVIDIA devices of a machine and the state of their driver. The command of this fact needs only a shell on the machine."""

from __future__ import annotations

import re

import msgspec

from provision.fact import FactQuery

SMI_COLUMNS = "driver_version,persistence_mode,mig.mode.current,ecc.mode.current,name,uuid"
# If mokutil is not installed, the last byte of the firmware's variable SecureBoot says whether Secure Boot is on.
DESCRIBE_NVIDIA = f"""\
say() {{ printf '%s=%s\\n' "$1" "$2"; }}
for device in /sys/bus/pci/devices/*; do
    test "$(cat "$device/vendor" 2>/dev/null)" = 0x10de || continue
    say pci "${{device##*/}} $(cat "$device/class") $(cat "$device/device")"
done
say loaded "$(head -n 1 /proc/driver/nvidia/version 2>/dev/null)"
say module "$(modinfo -F version nvidia 2>/dev/null)"
said=$(nvidia-smi --query-gpu={SMI_COLUMNS} --format=csv,noheader,nounits 2>&1)
test $? = 0 || say why_no_nvml "$(printf '%s\\n' "$said" | head -n 1)"
printf '%s\\n' "$said" | sed 's/^/gpu=/'    # whatever the code: 14 is a warning, and the rows of other GPUs may be complete
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
_VERSION_PATTERN = re.compile(r"^[0-9][0-9.]*\Z")
# nvidia-smi's words for a GPU that does not answer; [N/A] and [Not Supported] only mean that the GPU lacks a setting.
_FAULT_WORDS = re.compile(
    r"ERR!|Unknown Error|GPU is lost|requires reset|Unable to determine the device handle|fallen off the bus", re.I
)
_LOADED_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9.]+)")


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
    fault: str | None = None
    """What nvidia-smi shows in place of a value if the GPU does not answer; None: the GPU answers."""


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
    remarks: list[str] = []
    """Lines of nvidia-smi beside the rows of GPUs, such as the warning that an infoROM is corrupted."""
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
    def faults(self) -> list[str]:
        """Each GPU that does not answer, with nvidia-smi's words."""
        fault_lines = [f"GPU {index} ({gpu.uuid}): {gpu.fault}" for index, gpu in enumerate(self.seen) if gpu.fault is not None]
        return fault_lines + [remark for remark in self.remarks if _FAULT_WORDS.search(remark)]

    @property
    def versions(self) -> str:
        """The versions of the loaded module, the module on disk and NVML, as text for a message."""
        return f"loaded {self.loaded or 'none'}, on disk {self.module or 'none'}, NVML {self.nvml or 'none'}"


def build_command(python: str) -> list[str]:
    """The command that describes the NVIDIA devices. It needs only a shell, and uses nvidia-smi if it is installed."""
    return ["sh", "-c", DESCRIBE_NVIDIA]


def parse(stdout: str) -> Nvidia:
    """The devices and the driver, from the output of DESCRIBE_NVIDIA. Raises ValueError."""
    key_value_pairs = [line.split("=", 1) for line in stdout.splitlines() if "=" in line]
    value_by_key = dict(key_value_pairs)
    pci_devices = [_parse_pci(value) for key, value in key_value_pairs if key == "pci"]
    # The reason is one of the lines, and a complete row if nvidia-smi printed its warning last.
    smi_lines = dict.fromkeys(value for key, value in key_value_pairs if key in ("why_no_nvml", "gpu"))
    gpu_rows = [line.split(", ", 5) for line in smi_lines if _is_row(line)]
    remarks = ["".join(char if char.isprintable() else "?" for char in line)[:200] for line in smi_lines if not _is_row(line)]
    if not gpu_rows and remarks and "why_no_nvml" not in value_by_key:
        raise ValueError(f"a line of nvidia-smi does not have the columns {SMI_COLUMNS}: {remarks[0]!r}.")
    smi_versions = {row_columns[0] for row_columns in gpu_rows if _VERSION_PATTERN.match(row_columns[0])}
    if len(smi_versions) > 1:
        raise ValueError(f"NVML reports several driver versions: {', '.join(sorted(smi_versions))}.")
    loaded_match = _LOADED_VERSION.search(value_by_key.get("loaded", ""))
    return Nvidia(
        gpus=[device for device in pci_devices if device.kind in (0x0300, 0x0302)],
        switches=[device for device in pci_devices if device.kind == 0x0680],
        loaded=loaded_match[1] if loaded_match else None,
        module=value_by_key.get("module") or None,
        nvml=smi_versions.pop() if smi_versions else None,
        why_no_nvml=None if gpu_rows else value_by_key.get("why_no_nvml") or None,
        remarks=[remark for remark in remarks if gpu_rows and remark],
        seen=[_parse_row(row_columns) for row_columns in gpu_rows],
        nouveau="nouveau" in value_by_key,
        secure_boot={"0": False, "1": True}.get(value_by_key.get("secure_boot", "")),
        held=sorted(value for key, value in key_value_pairs if key == "held"),
    )


def _is_row(line: str) -> bool:
    """Whether a line of nvidia-smi is the row of a GPU, which has all columns."""
    columns = line.split(", ", 5)
    return len(columns) == 6 and bool(_VERSION_PATTERN.match(columns[0]) or _FAULT_WORDS.search(columns[0]))


def _parse_row(row_columns: list[str]) -> GpuSettings:
    persistence, mig, ecc = (_parse_switch(switch_word) for switch_word in row_columns[1:4])
    fault_text = next((row_column for row_column in row_columns if _FAULT_WORDS.search(row_column)), None)
    return GpuSettings(row_columns[4], row_columns[5], persistence, mig, ecc, fault_text)


def _parse_pci(pci_text: str) -> PciDevice:
    address, pci_class, device_id = pci_text.split()
    return PciDevice(address, int(pci_class, 16) >> 8, int(device_id, 16))


def _parse_switch(switch_word: str) -> bool | None:
    """The value of a setting that nvidia-smi prints: True for Enabled, False for Disabled, None for others such as [N/A]."""
    return {"Enabled": True, "Disabled": False}.get(switch_word)


# Without persistence mode, nvidia-smi takes seconds per GPU.
NVIDIA = FactQuery("nvidia", build_command, parse, timeout_s=90, root=True)
