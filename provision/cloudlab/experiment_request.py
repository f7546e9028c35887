"""The request that creates an experiment from a profile, and what the profile cannot express, before anything is created.

The API takes a profile and its bindings, which are strings, and no RSpec. The parameters of `small-lan` are known here. Of any
other profile only the user knows the parameters, so only `cloudlab.bindings` are sent.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from shardlab.cloudlab_keys import Cloudlab
from shardlab.cluster import Cluster
from shardlab.errors import InputError

SMALL_LAN = "small-lan"
NAME = re.compile(r"[a-z][a-z0-9-]{1,15}")  # Emulab names experiments with at most 16 characters
LINK_MBPS = (100, 1_000, 10_000, 25_000, 100_000)
MOST_DISK_GB = 200
BYTES_PER_GIB, BYTES_PER_GB = 2**30, 10**9
OWN_PROFILE = (
    "Or print a profile with `provision CLUSTER.yaml request --profile`, store it at the portal, and name it in "
    "cloudlab.profile and cloudlab.profile_project"
)


class ExperimentRequest(msgspec.Struct, frozen=True):
    """The body of POST /experiments."""

    name: str
    project: str
    profile_name: str
    profile_project: str
    duration: int
    """In hours."""
    bindings: dict[str, str]

    @property
    def profile(self) -> str:
        """The profile with its project."""
        return f"{self.profile_project}/{self.profile_name}"

    @property
    def body(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return msgspec.structs.asdict(self)


def request(cluster: Cluster) -> ExperimentRequest:
    """What is sent for this cluster file. Raises InputError for what the portal or the profile cannot express."""
    wanted = cluster.cloudlab
    assert wanted is not None  # provider cloudlab has it
    if wanted.project is None:
        raise _refused("project: null", "the project in which the experiment is created")
    if not NAME.fullmatch(cluster.name):
        raise InputError(
            f"the cluster file: name: {cluster.name} becomes the name of the experiment. Allowed: a letter, then letters, "
            "digits and -, at most 16 characters."
        )
    bindings = _small_lan(wanted) if wanted.profile == SMALL_LAN else {}
    return ExperimentRequest(
        cluster.name, wanted.project, wanted.profile, wanted.profile_project, wanted.hours, {**bindings, **wanted.bindings}
    )


def cannot_choose_site(cluster: Cluster) -> bool:
    """Whether the cluster file names a site that the profile cannot request; the manifest says which site it became."""
    wanted = cluster.cloudlab
    return wanted is not None and wanted.profile == SMALL_LAN and wanted.site is not None


def _small_lan(wanted: Cloudlab) -> dict[str, str]:
    if wanted.hardware is None:
        raise _refused("hardware: null", f"a hardware type, because {SMALL_LAN} would take any machine")
    image = wanted.image if wanted.image.startswith("urn:") else _image_urn(wanted.image)
    bindings = {"nodeCount": str(wanted.nodes), "phystype": wanted.hardware, "osImage": image}
    if wanted.lan_mbps is not None:
        if wanted.lan_mbps not in LINK_MBPS:
            rates = ", ".join(map(str, LINK_MBPS))
            raise _refused(f"lan_mbps: {wanted.lan_mbps}", f"{rates} with the profile {SMALL_LAN}, or null. {OWN_PROFILE}")
        bindings["linkSpeed"] = str(wanted.lan_mbps * 1000)  # kbit/s
    if wanted.blockstore_gib is not None:
        size_gb = math.ceil(wanted.blockstore_gib * BYTES_PER_GIB / BYTES_PER_GB)
        if size_gb > MOST_DISK_GB:
            most = MOST_DISK_GB * BYTES_PER_GB // BYTES_PER_GIB
            raise _refused(
                f"blockstore_gib: {wanted.blockstore_gib}",
                f"1 to {most} with the profile {SMALL_LAN}, 0 for all free space, or null. {OWN_PROFILE}",
            )
        bindings["tempFileSystemMount"] = "/mydata"
        bindings |= {"tempFileSystemSize": str(size_gb)} if size_gb else {"tempFileSystemMax": "true"}
    return bindings


def _image_urn(image: str) -> str:
    """The URN of an image that is named as UBUNTU24-64-STD or emulab-ops:UBUNTU24-64-STD."""
    project, _, name = image.rpartition(":")
    return f"urn:publicid:IDN+emulab.net+image+{project or 'emulab-ops'}//{name}"


def _refused(found: str, allowed: str) -> InputError:
    return InputError(f"the cluster file: cloudlab.{found} cannot be requested. Allowed: {allowed}.")
