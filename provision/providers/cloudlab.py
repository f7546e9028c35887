"""The machines of a CloudLab experiment, with the logins and addresses of its manifest."""

from __future__ import annotations

from provision.cloudlab import creation, experiment_request, extension, own_manifest, termination, token
from provision.cloudlab.portal import DEFAULT_URL, Portal
from provision.cloudlab.portal_answers import moment
from provision.cloudlab.token import Token
from provision.provider import Confirmation, Provider, ToCreate
from provision.providers import ssh
from shardlab import cloudlab_experiment
from shardlab import cluster as cluster_file
from shardlab.cloudlab_experiment import ExperimentNote
from shardlab.cluster import Cluster
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.workspace import Workspace


def obtain(cluster: Cluster, workspace: Workspace, dry: bool) -> Cluster | ToCreate:
    """The cluster with the nodes of its experiment, which is created if there is none. Raises ShardlabError.

    dry: ask no portal and store nothing; if an experiment has to be created, return what would be requested.
    """
    assert cluster.cloudlab is not None
    if cluster.cloudlab.manifests:
        return cluster
    found = token.read()
    note = cloudlab_experiment.read(workspace)
    if cluster.nodes:
        if not dry and note is not None:
            _refresh(cluster, workspace, note, found)
        return cluster
    if found is None and own_manifest.is_node():
        if dry:
            return cluster_file.with_manifests(cluster, [(" ".join(own_manifest.COMMAND), own_manifest.read())])
        return cluster_file.with_experiment(cluster, own_manifest.store(cluster, workspace))
    request = experiment_request.request(cluster)
    if note is not None:
        creation.check_note(note, request, workspace)
    if found is None:
        raise InputError(
            f"{cluster.name}: there is no experiment yet. Allowed: cloudlab.manifest, the file of a manifest; a token of the "
            f"portal, with which provision creates the experiment; or this command on a node of the experiment. {token.HOW}"
        )
    if dry:
        return _to_create(cluster, note)
    output = Output()
    with _portal(cluster, found, output) as portal:
        return cluster_file.with_experiment(cluster, creation.obtain(cluster, workspace, portal, output))


def extend(cluster: Cluster, workspace: Workspace, hours: int | None, reason: str | None) -> str:
    """Ask the portal for more hours; returns what was granted. Raises ShardlabError."""
    asked = extension.check(hours, reason)
    output = Output()
    with _portal(cluster, _token(), output) as portal:
        return extension.extend(workspace, portal, *asked)


def confirmation(cluster: Cluster, workspace: Workspace) -> Confirmation | None:
    """What the user confirms before `down`; None if this workspace created no experiment."""
    note = cloudlab_experiment.read(workspace)
    if note is None or not note.created_by_us:
        return None
    end = f", which would end at {note.expires_at}" if note.expires_at else ""
    says = [f"down terminates the experiment {note.name} of the project {note.project}{end}; all data on its nodes is lost."]
    return Confirmation(note.name, [*says, *filter(None, [termination.unfetched(workspace)])])


def down(cluster: Cluster, workspace: Workspace) -> str:
    """Terminate the experiment if this workspace created it; returns what was done. Raises ShardlabError."""
    note = cloudlab_experiment.read(workspace)
    if note is None:
        return f"{workspace.path}: this workspace created no experiment, so there is nothing to terminate."
    if not note.created_by_us:
        return f"provision did not create the experiment {note.name}, so it is not terminated."
    output = Output()
    with _portal(cluster, _token(), output) as portal:
        return termination.terminate(cluster, workspace, portal, output)


def _to_create(cluster: Cluster, note: ExperimentNote | None) -> ToCreate:
    assert cluster.cloudlab is not None
    request = experiment_request.request(cluster)
    url = cluster.cloudlab.portal_url or DEFAULT_URL
    if note is not None:
        says = [
            f"continue with the experiment {note.name} of the project {note.project}, which was asked for at {note.asked_at}"
        ]
    else:
        says = [f"create the experiment {request.name} in the project {request.project} for {request.duration} h at {url}"]
    says.append(f"profile {request.profile}")
    says += [f"{name} = {value}" for name, value in request.bindings.items()]
    if experiment_request.cannot_choose_site(cluster):
        says.append(
            f"{request.profile} cannot choose the site, which the hardware type decides: if the nodes are not at "
            f"{cluster.cloudlab.site}, the command fails after the experiment was created"
        )
    return ToCreate(says, request.body)


def _refresh(cluster: Cluster, workspace: Workspace, note: ExperimentNote, found: Token | None) -> None:
    """Read the end of the experiment anew, or say how old the known one is."""
    output = Output()
    if found is not None and note.created_by_us:
        with _portal(cluster, found, output) as portal:
            note = creation.refresh(workspace, portal) or note
    end = moment(note.expires_at)
    if end is not None:
        output.remark(f"the experiment {note.name} ends at {end:%Y-%m-%d %H:%M %Z} (read at {note.read_at}).")


def _portal(cluster: Cluster, found: Token, output: Output) -> Portal:
    assert cluster.cloudlab is not None
    return Portal(cluster.cloudlab.portal_url, found, output.remark)


def _token() -> Token:
    found = token.read()
    if found is None:
        raise InputError(f"there is no token of the portal. {token.HOW}")
    return found


PROVIDER = Provider(
    "cloudlab",
    "CloudLab lends its machines",
    ssh.nodes,
    obtain=obtain,
    extend=extend,
    confirmation=confirmation,
    down=down,
)
