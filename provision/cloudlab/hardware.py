"""The hardware catalogue: the machines of CloudLab that have GPUs, by site and type. Reads hardware.yaml."""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from provision import gpu_generations
from provision.gpu_generations import GpuGeneration
from shardlab.errors import InputError


class HardwareType(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The machines of one type at one site. A field is None if no source states its value."""

    site: str
    """The short name of the aggregate, such as wisc."""
    type: str
    """The name of the type, such as d8545; another site may use the same name for other machines."""
    source: str
    """Where the values of this entry come from, such as the manual of CloudLab."""
    nodes: int | None = None
    """The number of machines, whether they are in use or not."""
    gpus: int | None = None
    """The number of GPUs of each machine."""
    gpu: str | None = None
    """The GPU model, such as A100."""
    generation: str | None = None
    """The generation of the GPU, as `gpu_generations` names it."""
    gpu_memory_gib: int | None = None
    """Memory of a GPU."""
    arch: str | None = None
    """The architecture of the processors as `uname -m` names it, such as x86_64."""
    processors: str | None = None
    """Number and name of the processors."""
    memory_gb: int | None = None
    """Memory of the machine, in 1e9 bytes."""
    disks: str | None = None
    """The disks of the machine, as text."""
    network: str | None = None
    """The network cards of the machine, as text."""

    @property
    def name(self) -> str:
        """The name of the type with its site, as text for messages."""
        return f"{self.type} at {self.site}"


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of hardware.yaml."""

    sites: dict[str, str]
    """The short name of a site -> its aggregate, such as wisc -> wisc.cloudlab.us."""
    types: tuple[HardwareType, ...]

    def find_types(self, type_name: str) -> list[HardwareType]:
        """All types with this name, at any site."""
        return [hardware_type for hardware_type in self.types if hardware_type.type == type_name]

    def find_type(self, site: str, type_name: str) -> HardwareType | None:
        """The type at a site, or None if the catalogue does not list it. site: its short name or its aggregate."""
        return next((entry for entry in self.find_types(type_name) if site in (entry.site, self.sites[entry.site])), None)

    def find_aggregate(self, site: str) -> str:
        """The aggregate of a site. site: its short name, or an aggregate such as wisc.cloudlab.us. Raises InputError."""
        if site in self.sites:
            return self.sites[site]
        if "." not in site:
            site_names = ", ".join(self.sites)
            raise InputError(
                f"cloudlab.site is {site}. Allowed: {site_names}, or the name of an aggregate such as wisc.cloudlab.us."
            )
        return site


@functools.cache
def load_catalogue() -> Catalogue:
    """The hardware catalogue that ships with shardlab."""
    catalogue_bytes = resources.files("provision.cloudlab").joinpath("hardware.yaml").read_bytes()
    return msgspec.yaml.decode(catalogue_bytes, type=Catalogue)


def find_type_generation(hardware_type: HardwareType) -> GpuGeneration | None:
    """The generation of the GPUs of this hardware type; None if it is not known."""
    return next((generation for generation in gpu_generations.GENERATIONS if generation.name == hardware_type.generation), None)


def list_cuda_builds(hardware_type: HardwareType) -> list[str] | None:
    """The CUDA releases for which there is a build of torch that supports the GPUs and the processor of this type; None if the
    GPUs or the processor are not known."""
    gpu_generation = find_type_generation(hardware_type)
    if gpu_generation is None or hardware_type.arch is None:
        return None
    return [
        cuda_release
        for (arch, cuda_release), generation_names in gpu_generations.GENERATIONS_BY_BUILD.items()
        if arch == hardware_type.arch and gpu_generation.name in generation_names
    ]


CATALOGUE_COLUMNS = (
    "site",
    "type",
    "nodes",
    "GPUs",
    "GPU",
    "GiB",
    "torch for CUDA",
    "machine",
    "processors",
    "GB",
    "network",
    "disks",
    "source",
)


def make_catalogue_rows() -> list[list[str]]:
    """The catalogue as rows of text, in the order of CATALOGUE_COLUMNS; an unknown value is empty."""
    return [
        [
            _format_catalogue_value(catalogue_value)
            for catalogue_value in (
                entry.site, entry.type, entry.nodes, entry.gpus, entry.gpu, entry.gpu_memory_gib, _format_builds(entry),
                entry.arch, entry.processors, entry.memory_gb, entry.network, entry.disks, entry.source,
            )
        ]
        for entry in load_catalogue().types
    ]  # fmt: skip


def make_catalogue_document() -> dict[str, object]:
    """The catalogue as a document for JSON; an unknown value is null."""
    return {
        "schema": 1,
        "sites": load_catalogue().sites,
        "types": [{**msgspec.to_builtins(entry), "cuda_builds": list_cuda_builds(entry)} for entry in load_catalogue().types],
    }


def _format_builds(hardware_type: HardwareType) -> str | None:
    cuda_releases = list_cuda_builds(hardware_type)
    return None if cuda_releases is None else ", ".join(cuda_releases) or "none"


def _format_catalogue_value(catalogue_value: object) -> str:
    return "" if catalogue_value is None else str(catalogue_value)
