"""Provider cloudlab: the nodes of a CloudLab experiment. A manifest describes them, or the portal creates the experiment."""

from __future__ import annotations

from datetime import UTC, datetime

from provision.cloudlab import creation, extension, own_manifest, profile_request, request, termination, token
from provision.cloudlab.portal import Portal, PortalError
from provision.cloudlab.profile_request import ProfilePlan
from provision.cloudlab.request import ExperimentRequest
from provision.cloudlab.token import DEFAULT_URL, Token
from provision.provider import Confirmation, Provider, ToCreate
from provision.providers import ssh
from shardlab.cloudlab import cloudlab_experiment
from shardlab.cloudlab.cloudlab_experiment import ExperimentNote
from shardlab.cluster import cluster as cluster_file
from shardlab.cluster import lease
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace


def rspec(cluster: Cluster, workspace: Workspace) -> str:
    """The request for the experiment that the cluster file describes, as an RSpec. Raises InputError."""
    return request.rspec(_planned(cluster))


def profile(cluster: Cluster, workspace: Workspace) -> str:
    """The request for the experiment that the cluster file describes, as a profile. Raises InputError."""
    return request.profile(_planned(cluster))


def _planned(cluster: Cluster) -> ExperimentRequest:
    planned = request.plan(cluster)
    for sentence in planned.unknown:
        Output().remark(f"warning: {sentence}.", style="yellow")
    return planned


def present(cluster: Cluster, workspace: Workspace) -> Cluster | ToCreate:
    """The cluster with the nodes of its experiment, or what would be requested if it has no experiment. Raises InputError."""
    note = _note(cluster, workspace)
    if cluster.nodes:
        return cluster
    found = _stored_token(cluster)
    if _takes_own_manifest(cluster, found):
        return cluster_file.with_manifests(cluster, [(" ".join(own_manifest.COMMAND), own_manifest.read())])
    without_token = (
        f"{cluster.name}: there is no experiment yet. Allowed: cloudlab.manifest, the file of a manifest; a token of the "
        f"portal, with which provision creates the experiment; or this command on a node of the experiment. {token.HOW}"
    )
    if note is not None:
        without_token = (
            f"{cluster.name}: an earlier command asked the portal for the experiment {note.name}, and there is no token of the "
            f"portal to continue with it. {token.HOW}"
        )
    assert cluster.cloudlab is not None
    if found is None and cluster.cloudlab.project is None:  # the portal cannot be asked, so there is nothing to plan
        raise InputError(without_token)
    return _to_create(cluster, profile_request.plan(cluster), note, without_token if found is None else None)


def obtain(cluster: Cluster, workspace: Workspace) -> None:
    """Create the experiment if there is none; otherwise read again when the experiment ends. Raises ShardlabError."""
    assert cluster.cloudlab is not None
    if cluster.nodes:
        note = _note(cluster, workspace)
        if note is not None:
            _refresh(cluster, workspace, note)
        return
    if _takes_own_manifest(cluster, _stored_token(cluster)):
        own_manifest.store(cluster, workspace)
        return
    output = Output()
    for sentence in profile_request.plan(cluster).warnings:
        output.remark(f"warning: {sentence}.", style="yellow")
    with _portal(cluster, _token(cluster), output) as portal:
        creation.obtain(cluster, workspace, portal, output)


def _note(cluster: Cluster, workspace: Workspace) -> ExperimentNote | None:
    """The note of this workspace about its experiment; None if there is no note, or if the cluster file names manifests.

    Raises InputError if the note describes another experiment than the cluster file.
    """
    assert cluster.cloudlab is not None
    note = None if cluster.cloudlab.manifests else cloudlab_experiment.read(workspace.own)
    if note is not None:
        creation.check_note(note, cluster, workspace)
    return note


def _takes_own_manifest(cluster: Cluster, found: Token | None) -> bool:
    """Whether the manifest of this machine is used: this machine is a node of an experiment, and none is to be created.

    No experiment is created without a token, or if the cluster file names no project.
    found: the token of the portal; None if there is no token.
    """
    assert cluster.cloudlab is not None
    return own_manifest.is_node() and (found is None or cluster.cloudlab.project is None)


def extend(cluster: Cluster, workspace: Workspace, hours: int | None, reason: str | None) -> str:
    """Ask the portal for more hours. Returns a sentence that says how many hours were granted. Raises ShardlabError."""
    asked = extension.check(hours, reason)
    _note(cluster, workspace)
    output = Output()
    with _portal(cluster, _token(cluster), output) as portal:
        return extension.extend(workspace, portal, *asked)


def confirmation(cluster: Cluster, workspace: Workspace) -> Confirmation | None:
    """What the user has to confirm before `down`; None if this workspace created no experiment. Raises InputError."""
    note = _note(cluster, workspace)
    if note is None or not note.created_by_us:
        return None
    _token(cluster)  # a missing token raises an error before the user is asked
    says = [f"down terminates the experiment {note.name} of the project {note.project}; all data on its nodes is lost."]
    if (lent := lease.newest(workspace.own, [])) is not None:
        says.append(lent.in_words(datetime.now(UTC)))
    return Confirmation(note.name, [*says, *filter(None, [termination.unfetched(workspace)])])


def down(cluster: Cluster, workspace: Workspace) -> str:
    """Terminate the experiment if this workspace created it. Returns a sentence on what was done. Raises ShardlabError."""
    note = _note(cluster, workspace)
    if note is None:
        return f"{workspace.path}: this workspace created no experiment, so there is nothing to terminate."
    if not note.created_by_us:
        return termination.leave(cluster, workspace, note)
    output = Output()
    with _portal(cluster, _token(cluster), output) as portal:
        return termination.terminate(cluster, workspace, portal, output)


def _to_create(cluster: Cluster, planned: ProfilePlan, note: ExperimentNote | None, blocked: str | None) -> ToCreate:
    assert cluster.cloudlab is not None
    asked = planned.request
    url = cluster.cloudlab.portal_url or DEFAULT_URL
    first = f"create or adopt the experiment {asked.name} in the project {asked.project} for {asked.duration} h at {url}"
    if note is not None:
        first = (
            f"continue with the experiment {note.name} of the project {note.project}, which was asked for at {note.asked_at}"
        )
    bindings = [f"{name} = {value}" for name, value in asked.bindings.items()]
    return ToCreate([first, f"profile {asked.profile}", *bindings, *planned.warnings], asked.body, blocked)


def _refresh(cluster: Cluster, workspace: Workspace, note: ExperimentNote) -> None:
    """Ask the portal again when the experiment ends, and store this time. If the portal does not answer, the time that was
    stored before is kept. Raises ShardlabError."""
    if note.uuid is None:
        if not note.created_by_us and own_manifest.is_node():
            own_manifest.store(cluster, workspace)
        return
    output = Output()
    try:
        with _portal(cluster, _token(cluster), output) as portal:
            creation.refresh(workspace, portal)
    except (PortalError, InputError) as error:
        output.remark(f"warning: the end of the lease was not read anew: {error}", style="yellow")


def _portal(cluster: Cluster, found: Token, output: Output) -> Portal:
    assert cluster.cloudlab is not None
    return Portal(cluster.cloudlab.portal_url, found, output.remark)


def _stored_token(cluster: Cluster) -> Token | None:
    return token.read(cluster.cloudlab.portal_url if cluster.cloudlab is not None else None)


def _token(cluster: Cluster) -> Token:
    found = _stored_token(cluster)
    if found is None:
        raise InputError(f"there is no token of the portal. {token.HOW}")
    return found


PROVIDER = Provider(
    "cloudlab",
    "CloudLab lends its machines",
    ssh.nodes,
    present=present,
    obtain=obtain,
    request=rspec,
    profile=profile,
    extend=extend,
    confirmation=confirmation,
    down=down,
    own=frozenset({"extra-disks", "experiment_network"}),
)
