"""Provider cloudlab: the nodes of a CloudLab experiment. A manifest describes them, or the portal creates the experiment."""

from __future__ import annotations

from datetime import UTC, datetime

from provision.cloudlab import creation, extension, own_manifest, profile_request, request, termination, token
from provision.cloudlab.portal import Portal, PortalError
from provision.cloudlab.profile_request import ProfilePlan
from provision.cloudlab.request import ExperimentRequest
from provision.cloudlab.token import DEFAULT_URL, Token
from provision.provider import Confirmation, MachinesToCreate, Provider
from provision.providers import ssh
from shardlab.cloudlab import cloudlab_experiment
from shardlab.cloudlab.cloudlab_experiment import ExperimentNote
from shardlab.cluster import cluster as cluster_file
from shardlab.cluster import lease
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace


def render_rspec_request(cluster: Cluster, workspace: Workspace) -> str:
    """The request for the experiment that the cluster file describes, as an RSpec. Raises InputError."""
    return request.render_rspec(_plan_request(cluster))


def render_profile_request(cluster: Cluster, workspace: Workspace) -> str:
    """The request for the experiment that the cluster file describes, as a profile. Raises InputError."""
    return request.render_profile(_plan_request(cluster))


def _plan_request(cluster: Cluster) -> ExperimentRequest:
    experiment_request = request.plan_experiment(cluster)
    for sentence in experiment_request.unchecked:
        Output().print_remark(f"warning: {sentence}.", style="yellow")
    return experiment_request


def find_present_cluster(cluster: Cluster, workspace: Workspace) -> Cluster | MachinesToCreate:
    """The cluster with the nodes of its experiment, or what would be requested if it has no experiment. Raises InputError."""
    note = _read_note(cluster, workspace)
    if cluster.nodes:
        return cluster
    portal_token = _read_stored_token(cluster)
    if _uses_own_manifest(cluster, portal_token):
        return cluster_file.add_manifest_nodes(
            cluster, [(" ".join(own_manifest.MANIFEST_COMMAND), own_manifest.read_own_manifest())]
        )
    why = (
        f"{cluster.name}: there is no experiment yet. Allowed: cloudlab.manifest, the file of a manifest; a token of the "
        f"portal, with which provision creates the experiment; or this command on a node of the experiment. {token.TOKEN_HELP}"
    )
    if note is not None:
        why = (
            f"{cluster.name}: an earlier command asked the portal for the experiment {note.name}, and there is no token of the "
            f"portal to continue with it. {token.TOKEN_HELP}"
        )
    assert cluster.cloudlab is not None
    if portal_token is None and cluster.cloudlab.project is None:  # the portal cannot be asked, so there is nothing to plan
        raise InputError(why)
    return _plan_creation(cluster, profile_request.plan_profile_request(cluster), note, why if portal_token is None else None)


def obtain_machines(cluster: Cluster, workspace: Workspace) -> None:
    """Create the experiment if there is none; otherwise read again when the experiment ends. Raises ShardlabError."""
    assert cluster.cloudlab is not None
    if cluster.nodes:
        note = _read_note(cluster, workspace)
        if note is not None:
            _refresh_lease(cluster, workspace, note)
        return
    if _uses_own_manifest(cluster, _read_stored_token(cluster)):
        own_manifest.store_own_manifest(cluster, workspace)
        return
    output = Output()
    for sentence in profile_request.plan_profile_request(cluster).warnings:
        output.print_remark(f"warning: {sentence}.", style="yellow")
    with _open_portal(cluster, _require_token(cluster), output) as portal:
        creation.obtain_experiment(cluster, workspace, portal, output)


def _read_note(cluster: Cluster, workspace: Workspace) -> ExperimentNote | None:
    """The note of this workspace about its experiment; None if there is no note, or if the cluster file names manifests.

    Raises InputError if the note describes another experiment than the cluster file.
    """
    assert cluster.cloudlab is not None
    note = None if cluster.cloudlab.manifests else cloudlab_experiment.read_note(workspace.shardlab_folder)
    if note is not None:
        creation.check_note(note, cluster, workspace)
    return note


def _uses_own_manifest(cluster: Cluster, portal_token: Token | None) -> bool:
    """Whether the manifest of this machine is used: this machine is a node of an experiment, and none is to be created.

    No experiment is created without a token, or if the cluster file names no project.
    portal_token: the token of the portal; None if there is no token.
    """
    assert cluster.cloudlab is not None
    return own_manifest.is_experiment_node() and (portal_token is None or cluster.cloudlab.project is None)


def extend(cluster: Cluster, workspace: Workspace, hours: int | None, reason: str | None) -> str:
    """Ask the portal for more hours. Returns a sentence that says how many hours were granted. Raises ShardlabError."""
    hours_and_reason = extension.check_extend_options(hours, reason)
    _read_note(cluster, workspace)
    output = Output()
    with _open_portal(cluster, _require_token(cluster), output) as portal:
        return extension.extend_experiment(workspace, portal, *hours_and_reason)


def find_confirmation(cluster: Cluster, workspace: Workspace) -> Confirmation | None:
    """What the user has to confirm before `down`; None if this workspace created no experiment. Raises InputError."""
    note = _read_note(cluster, workspace)
    if note is None or not note.created_by_us:
        return None
    _require_token(cluster)  # a missing token raises an error before the user is asked
    losses = [f"down terminates the experiment {note.name} of the project {note.project}; all data on its nodes is lost."]
    if (last_lease := lease.read_newest_lease(workspace.shardlab_folder, [])) is not None:
        losses.append(last_lease.describe(datetime.now(UTC)))
    return Confirmation(note.name, [*losses, *filter(None, [termination.describe_unfetched_runs(workspace)])])


def down(cluster: Cluster, workspace: Workspace) -> str:
    """Terminate the experiment if this workspace created it. Returns a sentence on what was done. Raises ShardlabError."""
    note = _read_note(cluster, workspace)
    if note is None:
        return f"{workspace.path}: this workspace created no experiment, so there is nothing to terminate."
    if not note.created_by_us:
        return termination.leave_experiment(cluster, workspace, note)
    output = Output()
    with _open_portal(cluster, _require_token(cluster), output) as portal:
        return termination.terminate_experiment(cluster, workspace, portal, output)


def _plan_creation(cluster: Cluster, plan: ProfilePlan, note: ExperimentNote | None, blocked: str | None) -> MachinesToCreate:
    assert cluster.cloudlab is not None
    request = plan.request
    url = cluster.cloudlab.portal_url or DEFAULT_URL
    title = f"create or adopt the experiment {request.name} in the project {request.project} for {request.duration} h at {url}"
    if note is not None:
        title = (
            f"continue with the experiment {note.name} of the project {note.project}, which was asked for at {note.asked_at}"
        )
    binding_lines = [f"{name} = {value}" for name, value in request.bindings.items()]
    return MachinesToCreate([title, f"profile {request.profile}", *binding_lines, *plan.warnings], request.body, blocked)


def _refresh_lease(cluster: Cluster, workspace: Workspace, note: ExperimentNote) -> None:
    """Ask the portal again when the experiment ends, and store this time. If the portal does not answer, the time that was
    stored before is kept. Raises ShardlabError."""
    if note.uuid is None:
        if not note.created_by_us and own_manifest.is_experiment_node():
            own_manifest.store_own_manifest(cluster, workspace)
        return
    output = Output()
    try:
        with _open_portal(cluster, _require_token(cluster), output) as portal:
            creation.refresh_experiment(workspace, portal)
    except (PortalError, InputError) as error:
        output.print_remark(f"warning: the end of the lease was not read anew: {error}", style="yellow")


def _open_portal(cluster: Cluster, portal_token: Token, output: Output) -> Portal:
    assert cluster.cloudlab is not None
    return Portal(cluster.cloudlab.portal_url, portal_token, output.print_remark)


def _read_stored_token(cluster: Cluster) -> Token | None:
    return token.read_token(cluster.cloudlab.portal_url if cluster.cloudlab is not None else None)


def _require_token(cluster: Cluster) -> Token:
    portal_token = _read_stored_token(cluster)
    if portal_token is None:
        raise InputError(f"there is no token of the portal. {token.TOKEN_HELP}")
    return portal_token


PROVIDER = Provider(
    "cloudlab",
    "CloudLab lends its machines",
    ssh.list_nodes,
    present=find_present_cluster,
    obtain=obtain_machines,
    request=render_rspec_request,
    profile=render_profile_request,
    extend=extend,
    confirmation=find_confirmation,
    down=down,
    additional=frozenset({"extra-disks", "experiment_network"}),
)
