"""The answers of the CloudLab portal, in the shapes that its OpenAPI document publishes. Unknown fields are ignored."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import msgspec

from shardlab.terminal import moments

PortalText = Annotated[str, msgspec.Meta(max_length=4096)]
UUID_PATTERN = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
READY_VALUES = {"status": "ready", "state": "started", "rawstate": "ISUP"}
# Values of `startup_status` of a node that has no startup service, or whose service has ended without an error. In published
# answers, only null was seen.
STARTUP_ENDED = {None, "", "0", "done", "exited", "finished", "ready"}
ENDED_STATES = {"failed", "canceled", "terminating", "terminated"}  # an experiment or a node never leaves these states


class PortalVersion(msgspec.Struct, frozen=True):
    """The portal's answer to GET /version."""

    version: PortalText


class PortalFault(msgspec.Struct, frozen=True):
    """The body of an answer with which the portal refuses a request."""

    error: PortalText | None = None
    errors: list[PortalText] | None = None

    @property
    def message(self) -> str:
        """All sentences of the errors in one line, which may be long; empty if there are none."""
        sentences = [self.error, *(self.errors or [])]
        return " ".join(" ".join(sentence.split()) for sentence in sentences if sentence)


class TokenOwner(msgspec.Struct, frozen=True):
    """The portal's answer to GET /tokens/this: the user of the token."""

    user: PortalText | None = None


class PortalNode(msgspec.Struct, frozen=True):
    """A node of an experiment, as the portal sees it."""

    client_id: PortalText | None = None
    status: PortalText | None = None
    state: PortalText | None = None
    rawstate: PortalText | None = None
    startup_status: PortalText | None = None

    @property
    def missing(self) -> str:
        """The states of the node that are not ready yet, as text such as `rawstate BOOTING`; empty if the node is ready."""
        state_phrases = [
            f"{name} {getattr(self, name) or 'unknown'}" for name, value in READY_VALUES.items() if getattr(self, name) != value
        ]
        if self.startup_status not in STARTUP_ENDED:
            state_phrases.append(f"startup_status {self.startup_status}")
        return ", ".join(state_phrases)

    @property
    def has_failed(self) -> bool:
        """Whether the node has failed or ended, so that it never becomes ready by itself."""
        return self.status in ENDED_STATES or self.startup_status == "failed"


class PortalAggregate(msgspec.Struct, frozen=True):
    """The part of an experiment at one site."""

    status: PortalText | None = None
    nodes: list[PortalNode] | None = None


class PortalExperiment(msgspec.Struct, frozen=True):
    """An experiment, as the portal describes it. Fields that the portal left out are None."""

    id: Annotated[str, msgspec.Meta(pattern=rf"^{UUID_PATTERN.pattern}\Z".replace("a-f", "A-Fa-f"))]
    name: PortalText | None = None
    project: PortalText | None = None
    profile_name: PortalText | None = None
    profile_project: PortalText | None = None
    creator: PortalText | None = None
    created_at: PortalText | None = None
    expires_at: PortalText | None = None
    status: PortalText | None = None
    url: PortalText | None = None
    aggregates: dict[PortalText, PortalAggregate] | None = None

    @property
    def nodes(self) -> list[PortalNode]:
        """The nodes of the experiment at all its sites."""
        return [node for aggregate in (self.aggregates or {}).values() for node in aggregate.nodes or []]


def parse_portal_time(time_text: str | None) -> datetime | None:
    """A time that the portal states; None if it cannot be read. A time without a zone is read as UTC, which the portal uses."""
    return moments.parse_time_as_utc(time_text or "")
