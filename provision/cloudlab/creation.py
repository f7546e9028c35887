"""Creates an experiment at the portal, or adopts an existing experiment of this name. Stores its manifests and its lease.

Before a request is sent to the portal, a note in the workspace describes the request. If the command is killed at any moment,
the next command continues: it finds the experiment by its name, and adopts the experiment if it matches the note. Without a
note, an experiment of this name is adopted if the user of the token created it; `down` does not terminate such an experiment.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import msgspec

from provision.cloudlab import profile_request, readiness
from provision.cloudlab.portal import NoConnection, OutcomeUnknown, Portal, PortalError, http_date, nothing_changed
from provision.cloudlab.portal_answers import PortalExperiment, moment
from provision.cloudlab.profile_request import ProfileRequest
from provision.cloudlab.readiness import DOWN
from provision.cloudlab.token import DEFAULT_URL
from shardlab.cloudlab import cloudlab_experiment, cloudlab_manifest
from shardlab.cloudlab.cloudlab_experiment import ExperimentNote
from shardlab.cloudlab.cloudlab_manifest import Experiment
from shardlab.cluster import lease
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError, ShardlabError
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

CLOCK_S = 60.0  # seconds by which two clocks of the portal may differ
AGAIN = "Run the same command again: it looks for the experiment by its name, and continues."


def obtain(cluster: Cluster, workspace: Workspace, portal: Portal, output: Output) -> None:
    """Create or adopt the experiment, wait until all nodes are ready, and store its manifests. Raises ShardlabError."""
    request = profile_request.plan(cluster).request
    note = cloudlab_experiment.read(workspace.own)
    if note is not None:
        check_note(note, cluster, workspace)
    if note is None or note.uuid is None:
        with nothing_changed():
            note = _created(request, workspace, portal, output, note)
    ready = readiness.wait(note, workspace, portal, output)
    if sentence := _granted_less(request, ready):
        output.remark(f"warning: {sentence}", style="yellow")
    try:
        texts = _manifests(cluster, portal.manifests(ready.id))
    except InputError as error:  # the error is raised as ShardlabError, because InputError means that nothing was changed
        raise ShardlabError(f"{error} The experiment {note.name} still exists. To end it: {DOWN}") from None
    cloudlab_experiment.store_manifests(workspace.own, texts)
    keep_end(workspace, portal, ready)


def _granted_less(request: ProfileRequest, found: PortalExperiment) -> str:
    """A warning if the experiment got fewer hours than the cluster file requests; '' if it got all hours, or if this is not
    known."""
    born, end = moment(found.created_at), moment(found.expires_at)
    if born is None or end is None or end - born >= timedelta(hours=request.duration, seconds=-CLOCK_S):
        return ""
    return (
        f"the portal granted {moments.duration((end - born).total_seconds())} for the experiment {request.name}, and the "
        f"cluster file asks for {request.duration} h: it ends at {moments.in_words(end)}. To ask for more hours: provision "
        "CLUSTER.yaml extend --hours N --reason TEXT"
    )


def refresh(workspace: Workspace, portal: Portal) -> PortalExperiment | None:
    """Ask the portal for the experiment of this workspace, and store when the experiment ends.

    Returns None if the workspace has no note with the uuid of an experiment. Raises PortalError, and ShardlabError if the
    experiment no longer exists.
    """
    note = cloudlab_experiment.read(workspace.own)
    if note is None or note.uuid is None:
        return None
    found = readiness.existing(note, workspace, portal)
    keep_end(workspace, portal, found)
    return found


def keep_end(workspace: Workspace, portal: Portal, found: PortalExperiment) -> None:
    """Store when the experiment ends, if the portal states it. Warn if the clock of this machine differs from the portal's."""
    portal.compare_clocks()
    if (end := moment(found.expires_at)) is not None:
        lease.keep(workspace.own, end)


def check_note(note: ExperimentNote, cluster: Cluster, workspace: Workspace) -> None:
    """Check that the note of the workspace has the name, the project and the portal of the cluster file. Raises InputError."""
    keys = cluster.cloudlab
    assert keys is not None
    path = cloudlab_experiment.path_of(workspace.own)
    if note.name != cluster.name or (note.project and keys.project and note.project != keys.project):
        raise InputError(
            f"{path}: this workspace uses the experiment {note.name} of the project {note.project}, and the cluster file asks "
            f"for {cluster.name} of {keys.project}. Allowed: the same names, or another workspace. To end the first "
            f"experiment, run with its cluster file: {DOWN}."
        )
    here = urlsplit(keys.portal_url or DEFAULT_URL).netloc
    if note.portal_url and (there := urlsplit(note.portal_url).netloc) != here:
        raise InputError(
            f"{path}: the experiment {note.name} was created at the portal {there}, and the cluster file names {here}, which "
            f"does not have it. Allowed: cloudlab.portal_url: {note.portal_url}"
        )


def _keep(workspace: Workspace, note: ExperimentNote, found: PortalExperiment) -> ExperimentNote:
    """Add the experiment's uuid, time of creation and page to the note, and store the note. Returns the new note."""
    changes = {"uuid": found.id, "created_at": found.created_at, "page": found.url}
    return cloudlab_experiment.write(workspace.own, msgspec.structs.replace(note, **changes))


def adopted(note: ExperimentNote, workspace: Workspace, portal: Portal) -> PortalExperiment | None:
    """The experiment that an earlier, interrupted command created; None if no experiment of this name exists.

    Raises InputError if the experiment of this name does not match the note; the note is then removed.
    """
    found = portal.experiment(f"{note.project},{note.name}")
    if found is None:
        return None
    born, asked = moment(found.created_at), moment(note.asked_at)
    contradictions = [
        f"its creator is {found.creator}" if found.creator and note.user and found.creator != note.user else "",
        _other_profile(note, found),
        "" if (found.creator and note.user) or (born and asked) else "neither its creator nor when it was created is known",
        f"it was created at {found.created_at}" if born and asked and born < asked - timedelta(seconds=CLOCK_S) else "",
    ]
    if any(contradictions):
        _remove_note(workspace)
        raise _taken(note.project, note.name, ", ".join(filter(None, contradictions)))
    return found


def _created(
    request: ProfileRequest, workspace: Workspace, portal: Portal, output: Output, note: ExperimentNote | None
) -> ExperimentNote:
    """Create or adopt the experiment. Returns its note; the nodes may not be ready yet.

    note: the note of an earlier command that was interrupted; None: there is no note.
    """
    was_asked_before = note is not None
    if note is None:
        intent = _intent(request, portal)
        if (other := portal.experiment(f"{request.project},{request.name}")) is not None:
            return _adopted_of_user(intent, other, workspace, output)
        note = cloudlab_experiment.write(workspace.own, intent)
    elif (found := adopted(note, workspace, portal)) is not None:
        output.remark(f"an earlier command created the experiment {note.name}; this command continues with it.")
        return _keep(workspace, note, found)
    output.remark(f"creating the experiment {request.name} in the project {request.project} at {portal.url}.")
    try:
        return _keep(workspace, note, portal.create(request.body))
    except OutcomeUnknown as error:
        output.remark(f"{error} Looking for the experiment by its name.")
        if (found := adopted(note, workspace, portal)) is None:
            raise ShardlabError(f"{error} The experiment {note.name} is not there. {AGAIN}") from None
        return _keep(workspace, note, found)
    except NoConnection:  # the note is kept: a request of an earlier command may have created the experiment
        raise
    except PortalError:
        if was_asked_before and (found := adopted(note, workspace, portal)) is not None:
            return _keep(workspace, note, found)  # the request of an earlier command had created the experiment
        _remove_note(workspace)  # the portal refused the request, so no experiment belongs to the note
        if (other := portal.experiment(f"{request.project},{request.name}")) is not None:
            return _adopted_of_user(note, other, workspace, output)  # the experiment was created during this command
        raise


def _other_profile(note: ExperimentNote, found: PortalExperiment) -> str:
    """A phrase that names the experiment's profile if the note names another profile; empty if they agree or are not known."""
    if not found.profile_name or not found.profile_project or note.profile is None:
        return ""
    profile = f"{found.profile_project}/{found.profile_name}"
    return (
        f"its profile is {profile}" if profile.lower() != note.profile.lower() else ""
    )  # users write names of profiles in upper or lower case


def _adopted_of_user(intent: ExperimentNote, found: PortalExperiment, workspace: Workspace, output: Output) -> ExperimentNote:
    """Adopt the experiment `found`, which no command of this workspace created. Returns the note about the experiment.

    intent: the note for the experiment that this command wanted to create. Raises InputError if the user of the token did not
    create the experiment, or created the experiment from another profile than the cluster file names: the nodes then have
    another purpose.
    """
    if found.creator is None or found.creator != intent.user:
        raise _taken(intent.project, intent.name, f"its creator is {found.creator or 'unknown'}")
    if other := _other_profile(intent, found):
        raise _taken(intent.project, intent.name, other)
    output.remark(
        f"the project {intent.project} already has your experiment {intent.name}: this command uses it as it is, and "
        "`provision CLUSTER.yaml down` will not terminate it."
    )
    return _keep(workspace, msgspec.structs.replace(intent, created_by_us=False, profile=None), found)


def _intent(request: ProfileRequest, portal: Portal) -> ExperimentNote:
    """The note about the experiment that a request will create. It is written before the request is sent to the portal."""
    return ExperimentNote(
        schema=cloudlab_experiment.SCHEMA,
        name=request.name,
        created_by_us=True,
        project=request.project,
        profile=request.profile,
        portal_url=portal.url,
        user=portal.user(),
        asked_at=_portal_time(portal.date),
    )


def _remove_note(workspace: Workspace) -> None:
    cloudlab_experiment.path_of(workspace.own).unlink(missing_ok=True)


def _manifests(cluster: Cluster, texts: dict[str, str]) -> dict[str, bytes]:
    """Check the manifests of the portal. Returns the manifests by name of the aggregate.

    texts: the manifests by URN of the aggregate.
    Raises InputError for a manifest that cannot be used, and ShardlabError if the nodes are not as the cluster file says.
    """
    named: dict[str, bytes] = {}
    for urn, text in texts.items():
        named[cloudlab_manifest.aggregate(f"a manifest of the portal for {urn[:100]!r}", urn)] = text.encode()
    experiment = cloudlab_manifest.parse((f"the portal's manifest of {name}", text) for name, text in named.items())
    _check_nodes(cluster, experiment)
    return named


def _check_nodes(cluster: Cluster, experiment: Experiment) -> None:
    """Raises ShardlabError if the nodes are at another site than the cluster file says, or if there are too few nodes."""
    wanted = cluster.cloudlab
    assert wanted is not None
    sites = {node.site for node in experiment.nodes}
    if wanted.site is not None and any(site.split(".")[0] != wanted.site.split(".")[0] for site in sites):
        raise ShardlabError(
            f"the nodes are at {', '.join(sorted(sites))}, and the cluster file says cloudlab.site: {wanted.site}. The profile "
            f"{wanted.profile} cannot choose the site. To end the experiment: {DOWN}"
        )
    if len(experiment.nodes) < wanted.nodes:
        raise ShardlabError(
            f"the manifests have {len(experiment.nodes)} node(s), and the cluster file asks for {wanted.nodes}. {AGAIN} To use "
            f"them as they are, set cloudlab.nodes to {len(experiment.nodes)}; to end the experiment: {DOWN}"
        )


def _taken(project: str | None, name: str, why: str) -> InputError:
    return InputError(
        f"the project {project} already has an experiment {name}, which this workspace did not create ({why}). Allowed: "
        "another name in the cluster file, or the nodes of that experiment, with cloudlab.manifest. Nothing was created."
    )


def _portal_time(header: str | None) -> str:
    """The time in the header of the portal's last answer, in ISO format; the time of this machine if the header has none."""
    return (http_date(header) or datetime.now(UTC).replace(microsecond=0)).isoformat()
