"""Creates an experiment at the portal, or adopts an existing experiment of this name. Stores its manifests and its lease.

Before a request is sent to the portal, a note in the workspace describes the request. If the command is killed at any moment,
the next command continues: it finds the experiment by its name, and adopts the experiment if it matches the note. Without a
note, an experiment of this name is adopted if the user of the token created it; `down` does not terminate such an experiment.
While the nodes become ready, their states are shown.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import msgspec

from provision.cloudlab import profile_request, waiting
from provision.cloudlab.portal import NoConnection, OutcomeUnknown, Portal, PortalError, parse_http_date, refusal_as_input_error
from provision.cloudlab.portal_answers import ENDED_STATES, PortalExperiment, parse_portal_time
from provision.cloudlab.profile_request import ProfileRequest
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

POLL_S = 15.0
MOST_WAIT_S = 3600.0
DOWN_COMMAND = "provision CLUSTER.yaml down"


CLOCK_S = 60.0  # seconds by which two clocks of the portal may differ
AGAIN_ADVICE = "Run the same command again: it looks for the experiment by its name, and continues."


def obtain_experiment(cluster: Cluster, workspace: Workspace, portal: Portal, output: Output) -> None:
    """Create or adopt the experiment, wait until all nodes are ready, and store its manifests. Raises ShardlabError."""
    experiment_request = profile_request.plan_profile_request(cluster).request
    note = cloudlab_experiment.read_note(workspace.shardlab_folder)
    if note is not None:
        check_note(note, cluster, workspace)
    if note is None or note.uuid is None:
        with refusal_as_input_error():
            note = _create_or_adopt(experiment_request, workspace, portal, output, note)
    experiment = wait_until_ready(note, workspace, portal, output)
    if grant_warning := _describe_short_grant(experiment_request, experiment):
        output.print_remark(f"warning: {grant_warning}", style="yellow")
    try:
        checked_manifests = _check_manifests(cluster, portal.fetch_manifests(experiment.id))
    except InputError as error:  # the error is raised as ShardlabError, because InputError means that nothing was changed
        raise ShardlabError(f"{error} The experiment {note.name} still exists. To end it: {DOWN_COMMAND}") from None
    cloudlab_experiment.store_manifests(workspace.shardlab_folder, checked_manifests)
    store_experiment_end(workspace, portal, experiment)


def _describe_short_grant(request: ProfileRequest, experiment: PortalExperiment) -> str:
    """A warning if the experiment got fewer hours than the cluster file requests; '' if it got all hours, or if this is not
    known."""
    created_at, end = parse_portal_time(experiment.created_at), parse_portal_time(experiment.expires_at)
    if created_at is None or end is None or end - created_at >= timedelta(hours=request.duration, seconds=-CLOCK_S):
        return ""
    return (
        f"the portal granted {moments.format_duration((end - created_at).total_seconds())} for the experiment "
        f"{request.name}, and the "
        f"cluster file asks for {request.duration} h: it ends at {moments.format_time(end)}. To ask for more hours: provision "
        "CLUSTER.yaml extend --hours N --reason TEXT"
    )


def refresh_experiment(workspace: Workspace, portal: Portal) -> PortalExperiment | None:
    """Ask the portal for the experiment of this workspace, and store when the experiment ends.

    Returns None if the workspace has no note with the uuid of an experiment. Raises PortalError, and ShardlabError if the
    experiment no longer exists.
    """
    note = cloudlab_experiment.read_note(workspace.shardlab_folder)
    if note is None or note.uuid is None:
        return None
    experiment = fetch_experiment(note, workspace, portal)
    store_experiment_end(workspace, portal, experiment)
    return experiment


def store_experiment_end(workspace: Workspace, portal: Portal, experiment: PortalExperiment) -> None:
    """Store when the experiment ends, if the portal states it. Warn if the clock of this machine differs from the portal's."""
    portal.compare_clocks()
    if (expires_at := parse_portal_time(experiment.expires_at)) is not None:
        lease.store_portal_lease(workspace.shardlab_folder, expires_at)


def check_note(note: ExperimentNote, cluster: Cluster, workspace: Workspace) -> None:
    """Check that the note of the workspace has the name, the project and the portal of the cluster file. Raises InputError."""
    cloudlab_keys = cluster.cloudlab
    assert cloudlab_keys is not None
    path = cloudlab_experiment.find_note_path(workspace.shardlab_folder)
    if note.name != cluster.name or (note.project and cloudlab_keys.project and note.project != cloudlab_keys.project):
        raise InputError(
            f"{path}: this workspace uses the experiment {note.name} of the project {note.project}, and the cluster file asks "
            f"for {cluster.name} of {cloudlab_keys.project}. Allowed: the same names, or another workspace. To end the first "
            f"experiment, run with its cluster file: {DOWN_COMMAND}."
        )
    cluster_portal_host = urlsplit(cloudlab_keys.portal_url or DEFAULT_URL).netloc
    if note.portal_url and (note_host := urlsplit(note.portal_url).netloc) != cluster_portal_host:
        raise InputError(
            f"{path}: the experiment {note.name} was created at the portal {note_host}, and the cluster file names "
            f"{cluster_portal_host}, which does not have it. Allowed: cloudlab.portal_url: {note.portal_url}"
        )


def _store_experiment(workspace: Workspace, note: ExperimentNote, experiment: PortalExperiment) -> ExperimentNote:
    """Add the experiment's uuid, time of creation and page to the note, and store the note. Returns the new note."""
    note_changes = {"uuid": experiment.id, "created_at": experiment.created_at, "page": experiment.url}
    return cloudlab_experiment.write_note(workspace.shardlab_folder, msgspec.structs.replace(note, **note_changes))


def find_created(note: ExperimentNote, workspace: Workspace, portal: Portal) -> PortalExperiment | None:
    """The experiment that an earlier, interrupted command created; None if no experiment of this name exists.

    Raises InputError if the experiment of this name does not match the note; the note is then removed.
    """
    existing = portal.find_experiment(f"{note.project},{note.name}")
    if existing is None:
        return None
    created_at, requested_at = parse_portal_time(existing.created_at), parse_portal_time(note.asked_at)
    contradictions = [
        f"its creator is {existing.creator}" if existing.creator and note.user and existing.creator != note.user else "",
        _describe_other_profile(note, existing),
        ""
        if (existing.creator and note.user) or (created_at and requested_at)
        else "neither its creator nor when it was created is known",
        f"it was created at {existing.created_at}"
        if created_at and requested_at and created_at < requested_at - timedelta(seconds=CLOCK_S)
        else "",
    ]
    if any(contradictions):
        _remove_note(workspace)
        raise _make_name_taken_error(note.project, note.name, ", ".join(filter(None, contradictions)))
    return existing


def _create_or_adopt(
    api_request: ProfileRequest, workspace: Workspace, portal: Portal, output: Output, note: ExperimentNote | None
) -> ExperimentNote:
    """Create or adopt the experiment. Returns its note; the nodes may not be ready yet.

    note: the note of an earlier command that was interrupted; None: there is no note.
    """
    was_requested_before = note is not None
    if note is None:
        planned_note = _plan_note(api_request, portal)
        if (existing_experiment := portal.find_experiment(f"{api_request.project},{api_request.name}")) is not None:
            return _adopt_experiment(planned_note, existing_experiment, workspace, output)
        note = cloudlab_experiment.write_note(workspace.shardlab_folder, planned_note)
    elif (experiment := find_created(note, workspace, portal)) is not None:
        output.print_remark(f"an earlier command created the experiment {note.name}; this command continues with it.")
        return _store_experiment(workspace, note, experiment)
    output.print_remark(f"creating the experiment {api_request.name} in the project {api_request.project} at {portal.url}.")
    try:
        return _store_experiment(workspace, note, portal.create_experiment(api_request.body))
    except OutcomeUnknown as error:
        output.print_remark(f"{error} Looking for the experiment by its name.")
        if (experiment := find_created(note, workspace, portal)) is None:
            raise ShardlabError(f"{error} The experiment {note.name} is not there. {AGAIN_ADVICE}") from None
        return _store_experiment(workspace, note, experiment)
    except NoConnection:  # the note is kept: a request of an earlier command may have created the experiment
        raise
    except PortalError:
        if was_requested_before and (experiment := find_created(note, workspace, portal)) is not None:
            return _store_experiment(workspace, note, experiment)  # an earlier command had created the experiment
        _remove_note(workspace)  # the portal refused the request, so no experiment belongs to the note
        if (existing_experiment := portal.find_experiment(f"{api_request.project},{api_request.name}")) is not None:
            return _adopt_experiment(note, existing_experiment, workspace, output)  # it was created during this command
        raise


def _describe_other_profile(note: ExperimentNote, experiment: PortalExperiment) -> str:
    """A phrase that names the experiment's profile if the note names another profile; empty if they agree or are not known."""
    if not experiment.profile_name or not experiment.profile_project or note.profile is None:
        return ""
    profile_path = f"{experiment.profile_project}/{experiment.profile_name}"
    # users write names of profiles in upper or lower case
    return f"its profile is {profile_path}" if profile_path.lower() != note.profile.lower() else ""


def _adopt_experiment(note: ExperimentNote, existing: PortalExperiment, workspace: Workspace, output: Output) -> ExperimentNote:
    """Adopt an experiment, which no command of this workspace created. Returns the note about the experiment.

    note: the note for the experiment that this command wanted to create. Raises InputError if the user of the token did not
    create the experiment, or created the experiment from another profile than the cluster file names: the nodes then have
    another purpose.
    """
    if existing.creator is None or existing.creator != note.user:
        raise _make_name_taken_error(note.project, note.name, f"its creator is {existing.creator or 'unknown'}")
    if other_profile := _describe_other_profile(note, existing):
        raise _make_name_taken_error(note.project, note.name, other_profile)
    output.print_remark(
        f"the project {note.project} already has your experiment {note.name}: this command uses it as it is, and "
        "`provision CLUSTER.yaml down` will not terminate it."
    )
    return _store_experiment(workspace, msgspec.structs.replace(note, created_by_us=False, profile=None), existing)


def _plan_note(experiment_request: ProfileRequest, portal: Portal) -> ExperimentNote:
    """The note about the experiment that a request will create. It is written before the request is sent to the portal."""
    return ExperimentNote(
        schema=cloudlab_experiment.SCHEMA,
        name=experiment_request.name,
        created_by_us=True,
        project=experiment_request.project,
        profile=experiment_request.profile,
        portal_url=portal.url,
        user=portal.fetch_user_name(),
        asked_at=_format_portal_time(portal.last_date_header),
    )


def _remove_note(workspace: Workspace) -> None:
    cloudlab_experiment.find_note_path(workspace.shardlab_folder).unlink(missing_ok=True)


def _check_manifests(cluster: Cluster, manifest_by_urn: dict[str, str]) -> dict[str, bytes]:
    """Check the manifests of the portal. Returns the manifests by name of the aggregate.

    manifest_by_urn: the manifests by URN of the aggregate.
    Raises InputError for a manifest that cannot be used, and ShardlabError if the nodes are not as the cluster file says.
    """
    manifests: dict[str, bytes] = {}
    for urn, manifest_text in manifest_by_urn.items():
        manifests[cloudlab_manifest.aggregate_name(f"a manifest of the portal for {urn[:100]!r}", urn)] = manifest_text.encode()
    experiment = cloudlab_manifest.parse_manifests(
        (f"the portal's manifest of {aggregate_name}", manifest_text) for aggregate_name, manifest_text in manifests.items()
    )
    _check_nodes(cluster, experiment)
    return manifests


def _check_nodes(cluster: Cluster, experiment: Experiment) -> None:
    """Raises ShardlabError if the nodes are at another site than the cluster file says, or if there are too few nodes."""
    keys = cluster.cloudlab
    assert keys is not None
    sites = {node.site for node in experiment.nodes}
    if keys.site is not None and any(site.split(".")[0] != keys.site.split(".")[0] for site in sites):
        raise ShardlabError(
            f"the nodes are at {', '.join(sorted(sites))}, and the cluster file says cloudlab.site: {keys.site}. The profile "
            f"{keys.profile} cannot choose the site. To end the experiment: {DOWN_COMMAND}"
        )
    if len(experiment.nodes) < keys.nodes:
        raise ShardlabError(
            f"the manifests have {len(experiment.nodes)} node(s), and the cluster file asks for {keys.nodes}. {AGAIN_ADVICE} "
            f"To use them as they are, set cloudlab.nodes to {len(experiment.nodes)}; to end the experiment: {DOWN_COMMAND}"
        )


def _make_name_taken_error(project: str | None, name: str, conflict: str) -> InputError:
    return InputError(
        f"the project {project} already has an experiment {name}, which this workspace did not create ({conflict}). Allowed: "
        "another name in the cluster file, or the nodes of that experiment, with cloudlab.manifest. Nothing was created."
    )


def _format_portal_time(date_header: str | None) -> str:
    """The time in the header of the portal's last answer, in ISO format; the time of this machine if the header has none."""
    return (parse_http_date(date_header) or datetime.now(UTC).replace(microsecond=0)).isoformat()


def wait_until_ready(note: ExperimentNote, workspace: Workspace, portal: Portal, output: Output) -> PortalExperiment:
    """Wait until all nodes of the experiment are ready, and return the experiment.

    Raises ShardlabError if the experiment fails, ends, or is not ready after MOST_WAIT_S.
    """
    deadline = time.monotonic() + MOST_WAIT_S
    with waiting.show_waiting(output, f"waiting for the nodes of the experiment {note.name}") as show_text:
        while True:
            experiment = fetch_experiment(note, workspace, portal)
            not_ready = {node.client_id or "a node without a name": node.missing for node in experiment.nodes if node.missing}
            failed_names = [node.client_id or "a node without a name" for node in experiment.nodes if node.has_failed]
            if experiment.status in ENDED_STATES or failed_names:
                raise ShardlabError(
                    f"the experiment {note.name} has failed: its status is {experiment.status}"
                    + (f", and these nodes failed: {', '.join(failed_names)}" if failed_names else "")
                    + f". The portal says why{f' at {experiment.url}' if experiment.url else ''}, such as too few free nodes, "
                    f"or no such image. To end it: {DOWN_COMMAND}"
                )
            if experiment.status == "ready" and experiment.nodes and not not_ready:
                return experiment
            if time.monotonic() > deadline:
                state_text = _describe_state(experiment, not_ready)
                raise ShardlabError(
                    f"the experiment {note.name} is not ready after {MOST_WAIT_S / 60:.0f} min: {state_text}. It still exists. "
                    f" To wait on, run the same command again; to end it: {DOWN_COMMAND}"
                )
            show_text(_describe_state(experiment, not_ready))
            portal.pause(POLL_S)


def fetch_experiment(note: ExperimentNote, workspace: Workspace, portal: Portal) -> PortalExperiment:
    """Ask the portal for the experiment of the note. Raises PortalError, and ShardlabError if the experiment is gone."""
    assert note.uuid is not None
    experiment = portal.find_experiment(note.uuid)
    if experiment is None:
        last_lease = lease.read_newest_lease(workspace.shardlab_folder, [])
        end_text = f" It was to end at {moments.format_time(last_lease.expires)}." if last_lease is not None else ""
        raise ShardlabError(
            f"the experiment {note.name} ({note.uuid}) no longer exists at the portal.{end_text} To remove its note and its "
            f"manifests from this workspace: {DOWN_COMMAND}"
        )
    return experiment


def _describe_state(experiment: PortalExperiment, unready: dict[str, str]) -> str:
    """The state of the experiment in a line, such as `experiment provisioning, 1 of 2 nodes ready; gpu1: rawstate BOOTING`.

    unready: for each node that is not ready, by name, the states that are not ready yet.
    """
    node_texts = [f"{name}: {missing}" for name, missing in list(unready.items())[:3]] + (["..."] if len(unready) > 3 else [])
    node_count = len(experiment.nodes)
    ready_text = f"{node_count - len(unready)} of {node_count} nodes ready" if node_count else "no nodes yet"
    return "; ".join([f"experiment {experiment.status or 'unknown'}, {ready_text}", *node_texts])
