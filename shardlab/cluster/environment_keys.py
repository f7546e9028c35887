"""The key `environment` of a cluster file: the Python of the nodes, and the container image in which ranks run."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from shardlab.files import document
from shardlab.record_types import AbsolutePath, limit_text

Runtime = Literal["apptainer", "pyxis", "charliecloud"]
ModuleName = Annotated[
    str, limit_text(r"^[A-Za-z0-9][A-Za-z0-9_.+/-]{0,100}\Z", "a module, such as cuda/12.6, with letters, digits and _ . + / -")
]
PythonPath = Annotated[
    str, limit_text(r"^/[A-Za-z0-9._/+-]+\Z", "a path that begins with / and has only letters, digits and the signs . _ / + -")
]
ImageName = Annotated[
    str,
    limit_text(
        r"^[A-Za-z0-9/][A-Za-z0-9._/:@#+-]{0,400}\Z",
        "a path or the name of an image, with letters, digits and the signs . _ / : @ # + -",
    ),
]
PinnedPackage = Annotated[
    str,
    limit_text(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}==[A-Za-z0-9][A-Za-z0-9.+!]{0,99}\Z", "NAME==VERSION, such as einops==0.8.1"),
]


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Python environment of the nodes."""

    modules: list[ModuleName] = []
    """Environment modules that are loaded before any command of shardlab runs (provider slurm)."""
    python: PythonPath | None = None
    """The interpreter from which the environment is made (provider slurm); null: python3 after the modules are loaded."""
    build: Literal["auto", "job", "login"] = "auto"
    """Where the packages are downloaded and installed (provider slurm). job: both in a job. login: both on the login node.
    auto: installed in a job; downloaded on the login node or, if no package index answers there, on the machine where
    `provision` runs."""
    use: PythonPath | None = None
    """An existing virtual or conda environment that is used as it is (provider slurm); null: `provision` makes one."""
    container: ImageName | None = None
    """The image in which ranks run (provider slurm), with all packages that ranks need; null: no container. Apptainer: the
    path of an image file. Charliecloud: the path of a folder or a SquashFS file. Pyxis: a path, or an image of a registry."""
    runtime: Runtime | None = None
    """The program that starts the container; required with `container`."""
    wheelhouse: AbsolutePath | None = None
    """A folder of wheels on every node, from which pip installs without a network; null: pip uses its index. With practice
    nodes, it is a folder of this machine, which the nodes can only read; null: `provision` makes this folder."""
    packages: list[PinnedPackage] = []
    """Further packages, such as einops==0.8.1, that `provision` installs beside the tested packages. A package in this list
    replaces the tested version of the same package. Not allowed with `use` and `container`, whose packages are used as they
    are."""

    def compute_digest(self) -> str:
        """A digest of all keys: 12 hexadecimal digits. The inventory records it, so that `jobs` finds out whether the cluster
        file changed after `provision`."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def check_site(cluster_document: document.Document, environment: Environment, key_path: document.KeyPath) -> None:
    """Check the keys for a managed Slurm site. Raises InputError with file:line:column if keys contradict each other.

    key_path: the place of the environment in the cluster file.
    """
    if environment.packages and (environment.use or environment.container):
        raise cluster_document.error(
            (*key_path, "packages"), "not allowed with use or container. Install the packages there, and remove this key."
        )
    if (environment.container is None) != (environment.runtime is None):
        raise cluster_document.error(
            key_path,
            "container and runtime belong together. Allowed: both, such as `container: /project/torch.sif` and `runtime: "
            "apptainer`, or neither.",
        )
    if environment.container is None:
        return
    if environment.use is not None:
        raise cluster_document.error(
            (*key_path, "use"), "not allowed with container, because ranks use the packages of the image. Remove one."
        )
    if environment.runtime != "pyxis" and not is_image_path(environment.container):
        raise cluster_document.error(
            (*key_path, "container"),
            f"found {environment.container}. Allowed with the runtime {environment.runtime}: the absolute path of an image.",
        )


def check_local_environment(cluster_document: document.Document, environment: Environment, key_path: document.KeyPath) -> None:
    """Check the keys for provider local, which installs nothing. Raises InputError with file:line:column.

    key_path: the place of the environment in the cluster file.
    """
    if environment != Environment(use=environment.use) or environment.use is None:
        raise cluster_document.error(
            key_path,
            "found other keys than use. Allowed with provider local: use, the folder of an environment that has shardlab.",
        )


def check_installed_environment(
    doc: document.Document, environment: Environment, provider: str, key_path: document.KeyPath
) -> None:
    """Check that no key of the environment is only for provider slurm. Raises InputError with file:line:column.

    provider: the provider of the cluster, not slurm. key_path: the place of the environment in the cluster file.
    """
    for key in ("modules", "python", "use", "container", "runtime"):
        if getattr(environment, key):
            raise doc.error((*key_path, key), f"not allowed with provider {provider}. Allowed: only with provider slurm.")
    if environment.build != "auto":
        raise doc.error((*key_path, "build"), f"not allowed with provider {provider}. Allowed: only with provider slurm.")


def is_image_path(container_image: str) -> bool:
    """Whether the container image is a file or folder at the site. False: it is the name of an image in a registry."""
    return container_image.startswith("/")
