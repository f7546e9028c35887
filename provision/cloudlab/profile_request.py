"""The request that creates an experiment from a profile. The portal's API accepts a profile with parameters, but no RSpec.

The parameters are strings, which the API calls bindings. This module knows the parameters of the profile `small-lan`. For any
other profile only the user knows the parameters, so only `cloudlab.bindings` are sent.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from provision.cloudlab import request
from provision.cloudlab.request import ExperimentRequest
from shardlab.cluster.cloudlab_keys import EXTRA_DISK, Cloudlab
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError

SMALL_LAN = "small-lan"
EXPERIMENT_NAME = re.compile(r"[a-z][a-z0-9-]{1,15}")  # Emulab allows at most 16 characters in the name of an experiment
KEY_OF_PARAMETER = {  # parameter of small-lan -> key under `cloudlab` that sets this parameter instead of the key `bindings`
    "nodeCount": "nodes",
    "phystype": "hardware",
    "osImage": "image",
    "linkSpeed": "lan_mbps",
    "tempFileSystemSize": "blockstore_gib",
    "tempFileSystemMax": "blockstore_gib",
    "tempFileSystemMount": "blockstore_gib",
}
LINK_MBPS = (100, 1_000, 10_000, 25_000, 100_000)
MOST_DISK_GB = 200
BYTES_PER_GIB, BYTES_PER_GB = 2**30, 10**9
OWN_PROFILE_ADVICE = (
    "Or print a profile with `provision CLUSTER.yaml request --profile`, store it at the portal, and name it in "
    "cloudlab.profile and cloudlab.profile_project"
)


class ProfileRequest(msgspec.Struct, frozen=True):
    """The body of the request POST /experiments, which creates an experiment from a profile."""

    name: str
    project: str
    profile_name: str
    profile_project: str
    duration: int
    """The duration of the experiment in hours."""
    bindings: dict[str, str]

    @property
    def profile(self) -> str:
        """The profile with its project, as PROJECT/PROFILE."""
        return f"{self.profile_project}/{self.profile_name}"

    @property
    def body(self) -> dict[str, Any]:
        """The fields of the request, for JSON."""
        return msgspec.structs.asdict(self)


class ProfilePlan(msgspec.Struct, frozen=True):
    """The request for the portal, with warnings that the user should see before it is sent."""

    request: ProfileRequest
    warnings: list[str]
    """Sentences without a full stop: about values that are not checked, and about keys of the cluster file that the profile
    does not use."""


def plan_profile_request(cluster: Cluster) -> ProfilePlan:
    """The request for this cluster file. Raises InputError for a key that the portal or the profile cannot express."""
    cloudlab_keys = cluster.cloudlab
    assert cloudlab_keys is not None  # the provider cloudlab requires the key `cloudlab`
    if cloudlab_keys.project is None:
        raise _make_refusal("project: null", "the project in which the experiment is created")
    if not EXPERIMENT_NAME.fullmatch(cluster.name):
        raise InputError(
            f"the cluster file: name: {cluster.name} becomes the name of the experiment. Allowed: a letter, then letters, "
            "digits and -, at most 16 characters."
        )
    is_small_lan = cloudlab_keys.profile == SMALL_LAN
    experiment = request.plan_experiment(cluster) if is_small_lan or cloudlab_keys.hardware is not None else None
    value_by_parameter = _make_small_lan_bindings(cloudlab_keys, experiment) if is_small_lan and experiment is not None else {}
    profile_request = ProfileRequest(
        cluster.name,
        cloudlab_keys.project,
        cloudlab_keys.profile,
        cloudlab_keys.profile_project,
        cloudlab_keys.hours,
        {**value_by_parameter, **cloudlab_keys.bindings},
    )
    return ProfilePlan(
        profile_request,
        [*(experiment.unchecked if experiment is not None else ()), *_list_unsent_keys(cloudlab_keys, profile_request)],
    )


def _list_unsent_keys(cloudlab_keys: Cloudlab, profile_request: ProfileRequest) -> list[str]:
    if cloudlab_keys.profile != SMALL_LAN:
        return [f"the parameters of {profile_request.profile} are not known here, so only cloudlab.bindings are sent to it"]
    if cloudlab_keys.site is None:
        return []
    failure_sentence = f"if the nodes are not at {cloudlab_keys.site}, the command fails after the experiment was created"
    return [f"{profile_request.profile} cannot choose the site, which the hardware type decides: {failure_sentence}"]


def _make_small_lan_bindings(cloudlab_keys: Cloudlab, experiment: ExperimentRequest) -> dict[str, str]:
    for parameter, key in KEY_OF_PARAMETER.items():
        if parameter in cloudlab_keys.bindings:
            raise _make_refusal(f"bindings: {parameter}", f"cloudlab.{key}, which is checked and converted")
    value_by_parameter = {"nodeCount": str(len(experiment.nodes)), "phystype": experiment.hardware, "osImage": experiment.image}
    if experiment.lan_kbps is not None:
        if cloudlab_keys.lan_mbps not in LINK_MBPS:
            allowed_mbps = ", ".join(map(str, LINK_MBPS))
            raise _make_refusal(
                f"lan_mbps: {cloudlab_keys.lan_mbps}",
                f"{allowed_mbps} with the profile {SMALL_LAN}, or null. {OWN_PROFILE_ADVICE}",
            )
        value_by_parameter["linkSpeed"] = str(experiment.lan_kbps)
    if (disk_gb := experiment.blockstore_gb) is not None:
        if disk_gb > MOST_DISK_GB:
            max_disk_gib = MOST_DISK_GB * BYTES_PER_GB // BYTES_PER_GIB
            raise _make_refusal(
                f"blockstore_gib: {cloudlab_keys.blockstore_gib}",
                f"1 to {max_disk_gib} with the profile {SMALL_LAN}, 0 for all free space, or null. {OWN_PROFILE_ADVICE}",
            )
        value_by_parameter["tempFileSystemMount"] = EXTRA_DISK
        value_by_parameter |= {"tempFileSystemSize": str(disk_gb)} if disk_gb else {"tempFileSystemMax": "true"}
    return value_by_parameter


def _make_refusal(setting_text: str, allowed_text: str) -> InputError:
    return InputError(f"the cluster file: cloudlab.{setting_text} cannot be requested. Allowed: {allowed_text}.")
