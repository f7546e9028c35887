"""Asks the portal for more hours for an experiment. The portal may grant fewer hours than requested, or none."""

from __future__ import annotations

from datetime import timedelta

from provision.cloudlab import creation
from provision.cloudlab.portal import OutcomeUnknown, Portal, nothing_changed
from provision.cloudlab.portal_answers import moment
from shardlab.errors import InputError, ShardlabError
from shardlab.terminal import moments
from shardlab.workspace.workspace import Workspace

MOST_HOURS = 24 * 365
MOST_REASON = 2000  # the most characters of the reason
CLOCK = timedelta(minutes=1)


class PartialGrant(ShardlabError):
    """The portal granted fewer hours than requested, or it is not known how many hours the portal granted."""


def extend(workspace: Workspace, portal: Portal, hours: int, reason: str) -> str:
    """Ask for more hours. Returns a sentence that says how many hours were granted.

    reason: for the administrators of the portal. Raises InputError, PortalError, and PartialGrant.
    """
    with nothing_changed():
        known = creation.refresh(workspace, portal)
    if known is None:
        raise InputError(
            f"{workspace.path}: this workspace uses no experiment of the portal that could be extended. Allowed: extend the "
            "experiment of a manifest on its page at the portal."
        )
    before = moment(known.expires_at)
    doubt = ""
    try:
        with nothing_changed():
            portal.extend(known.id, hours, reason)
    except OutcomeUnknown as error:  # the request is not repeated: that could add the hours twice
        doubt = f" {error}"
    extended = creation.refresh(workspace, portal) or known
    after = moment(extended.expires_at)
    what = f"the experiment {known.name or known.id}"
    if before is None or after is None:
        end = f"ends at {moments.in_words(after)}" if after else "has no end that the portal states"
        raise PartialGrant(f"{what} {end}; what was granted is not known.{doubt}")
    granted = after - before
    end = f"it ends at {moments.in_words(after)}"
    if granted >= timedelta(hours=hours) - CLOCK:
        return f"the portal granted {_hours(granted)} h for {what}: {end}."
    part = f"{_hours(granted)} of {hours} h" if granted > CLOCK else f"none of {hours} h"
    raise PartialGrant(
        f"the portal granted {part} for {what}: {end}.{doubt} An administrator may grant the rest "
        "later, which the portal tells by email."
    )


def check(hours: int | None, reason: str | None) -> tuple[int, str]:
    """Check the options of the verb extend and return them. Raises InputError."""
    if hours is None or not 1 <= hours <= MOST_HOURS:
        raise InputError(f"extend needs --hours: found {hours}. Allowed: 1 to {MOST_HOURS}.")
    if reason is None or not reason.strip() or len(reason) > MOST_REASON:
        raise InputError(f"extend needs --reason TEXT, which administrators read. Allowed: 1 to {MOST_REASON} characters.")
    return hours, reason.strip()


def _hours(granted: timedelta) -> str:
    return f"{granted.total_seconds() / 3600:.1f}".removesuffix(".0")
