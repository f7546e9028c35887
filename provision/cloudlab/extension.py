"""Asks the portal for more hours when a person says so (`provision extend`); nothing is extended by itself.

The portal may grant fewer hours than requested, or none. When users are reminded of the end: shardlab/cluster/lease.py.
"""

from __future__ import annotations

from datetime import timedelta

from provision.cloudlab import creation
from provision.cloudlab.portal import OutcomeUnknown, Portal, refusal_as_input_error
from provision.cloudlab.portal_answers import parse_portal_time
from shardlab.errors import InputError, ShardlabError
from shardlab.terminal import moments
from shardlab.workspace.workspace import Workspace

MOST_HOURS = 24 * 365
MOST_REASON = 2000  # the most characters of the reason
CLOCK_TOLERANCE = timedelta(minutes=1)


class PartialGrant(ShardlabError):
    """The portal granted fewer hours than requested, or it is not known how many hours the portal granted."""


def extend_experiment(workspace: Workspace, portal: Portal, hours: int, reason: str) -> str:
    """Ask for more hours. Returns a sentence that says how many hours were granted.

    reason: for the administrators of the portal. Raises InputError, PortalError, and PartialGrant.
    """
    with refusal_as_input_error():
        experiment = creation.refresh_experiment(workspace, portal)
    if experiment is None:
        raise InputError(
            f"{workspace.path}: this workspace uses no experiment of the portal that could be extended. Allowed: extend the "
            "experiment of a manifest on its page at the portal."
        )
    old_end = parse_portal_time(experiment.expires_at)
    doubt_text = ""
    try:
        with refusal_as_input_error():
            portal.request_extension(experiment.id, hours, reason)
    except OutcomeUnknown as error:  # the request is not repeated: that could add the hours twice
        doubt_text = f" {error}"
    extended_experiment = creation.refresh_experiment(workspace, portal) or experiment
    new_end = parse_portal_time(extended_experiment.expires_at)
    experiment_text = f"the experiment {experiment.name or experiment.id}"
    if old_end is None or new_end is None:
        end_text = f"ends at {moments.format_time(new_end)}" if new_end else "has no end that the portal states"
        raise PartialGrant(f"{experiment_text} {end_text}; what was granted is not known.{doubt_text}")
    granted_time = new_end - old_end
    end_text = f"it ends at {moments.format_time(new_end)}"
    if granted_time >= timedelta(hours=hours) - CLOCK_TOLERANCE:
        return f"the portal granted {_format_hours(granted_time)} h for {experiment_text}: {end_text}."
    granted_text = f"{_format_hours(granted_time)} of {hours} h" if granted_time > CLOCK_TOLERANCE else f"none of {hours} h"
    raise PartialGrant(
        f"the portal granted {granted_text} for {experiment_text}: {end_text}.{doubt_text} An administrator may grant the rest "
        "later, which the portal tells by email."
    )


def check_extend_options(hours: int | None, reason: str | None) -> tuple[int, str]:
    """Check the options of the verb extend and return them. Raises InputError."""
    if hours is None or not 1 <= hours <= MOST_HOURS:
        raise InputError(f"extend needs --hours: found {hours}. Allowed: 1 to {MOST_HOURS}.")
    if reason is None or not reason.strip() or len(reason) > MOST_REASON:
        raise InputError(f"extend needs --reason TEXT, which administrators read. Allowed: 1 to {MOST_REASON} characters.")
    return hours, reason.strip()


def _format_hours(granted_time: timedelta) -> str:
    return f"{granted_time.total_seconds() / 3600:.1f}".removesuffix(".0")
