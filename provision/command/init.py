"""`provision init`: asks a Slurm site, SSH hosts or this machine, or reads the manifests of a CloudLab experiment, and prints a
commented cluster file. It changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

import templates
from provision.cloudlab import cluster_file
from provision.fact import FactAnswers, FactQuery
from provision.facts.nvidia import NVIDIA
from provision.facts.partitions import SitePartition
from provision.facts.pythons import OLDEST_PYTHON
from provision.facts.quotas import Quota
from provision.facts.rdma import RDMA, RdmaLink
from provision.facts.shared_folders import SHARED_FOLDERS, SharedFolder
from provision.facts.system import SYSTEM, System
from provision.nodes.local_node import LocalNode
from provision.nodes.login_node import make_login_address, make_login_node
from provision.nodes.ssh_node import SshNode
from provision.site import proposal, requests, survey
from provision.site.proposal import Proposal, RequestKeys, TypedPartition
from provision.site.survey import Survey
from shardlab.cluster.address import Address
from shardlab.cluster.cluster_keys import Login
from shardlab.cluster.login_node import is_login_node
from shardlab.cluster.slurm_keys import MOST_NODES, is_slice
from shardlab.errors import InputError
from shardlab.matrix.cell_sizes import format_seconds
from shardlab.remote.remote import Remote
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

_LOGIN_PATTERN = re.compile(r"^(?:([A-Za-z0-9._-]+)@)?([A-Za-z0-9][A-Za-z0-9._-]{0,252})(?::(\d{1,5}))?\Z")
GIB = 1 << 30
# words of `network`, by Gbit/s
INFINIBAND_BY_GBIT: dict[float, str] = {100: "infiniband-edr", 200: "infiniband-hdr", 400: "infiniband-ndr"}
MOST_MODULES = 24  # the most modules that one line of the printed file names
# The facts SYSTEM and NVIDIA, whose commands run without root here, so that `init` works without sudo.
_SYSTEM = FactQuery("system", SYSTEM.command, SYSTEM.parse, SYSTEM.timeout_s)
_NVIDIA = FactQuery("nvidia", NVIDIA.command, NVIDIA.parse, NVIDIA.timeout_s)


def print_cluster_file(
    output: Output, workspace: Workspace, site_login: str | None, logins: Sequence[str], manifests: Sequence[Path] | None = None
) -> int:
    """Print a commented cluster file for the cluster that the arguments describe.

    Without arguments, the cluster is this machine, or the Slurm site of which this machine is a login node.
    site_login: USER@HOST:PORT of a login node; empty if this machine is the login node; None if no Slurm site is described.
    logins: the logins of the machines of a cluster of SSH hosts; empty if no such cluster is described.
    manifests: the manifest files of a CloudLab experiment; empty if this machine is a node of the experiment; None if no
    experiment is described.

    Raises InputError, or Unreachable if a login fails.
    """
    if sum((site_login is not None, bool(logins), manifests is not None)) > 1:
        raise InputError("--site, --ssh and --cloudlab describe different clusters. Allowed: one of them.")
    if manifests is not None:
        file_text = cluster_file.propose_cluster_file(manifests)
    elif logins:
        file_text = _make_ssh_file(output, workspace, [_parse_login(host, "--ssh") for host in logins])
    elif site_login is not None or is_login_node():
        login = _parse_login(site_login, "--site") if site_login else None
        file_text = _make_site_file(output, login)
    else:
        file_text = _make_local_file()
    output.print_document({"schema": 1, "cluster_yaml": file_text})
    if not output.json:
        output.results.file.write(file_text)
    output.print_remark("Save this text as cluster.yaml, read its comments, and run: provision plan", style="dim")
    return 0


def _parse_login(login_text: str, option: str) -> Login:
    login_match = _LOGIN_PATTERN.match(login_text)
    if login_match is None:
        raise InputError(f"{option}: found {login_text!r}. Allowed: HOST or USER@HOST, with :PORT if it is not 22.")
    return Login(host=login_match[2], user=login_match[1], port=int(login_match[3]) if login_match[3] else None)


def _make_site_file(output: Output, login: Login | None) -> str:
    node = LocalNode() if login is None else make_login_node(make_login_address(login.host, login.user, login.port))
    machine_name = "this machine" if login is None else login.host
    output.print_remark(f"asking {machine_name} for its partitions, accounts, modules and folders", style="dim")
    slurm_clusters = survey.list_chosen_clusters(node)
    node.variables = requests.list_cluster_variables(next(iter(slurm_clusters), None))
    answers = msgspec.structs.replace(survey.survey_site(node), clusters=slurm_clusters)
    for sentence in answers.unknown.values():
        output.print_remark(sentence, style="yellow")
    if not answers.partitions:
        raise InputError(
            f"{machine_name}: Slurm shows no partition "
            f"({answers.unknown.get('partitions', 'none is visible to this user')}). Allowed: a login node of a Slurm cluster."
        )
    proposed = proposal.propose_partition(answers)
    kind = proposed.node_type
    if kind is not None and (job_cpus := survey.count_job_cpus(node, kind.names)) is not None and 0 < job_cpus < kind.cpus:
        proposed = msgspec.structs.replace(proposed, node_type=msgspec.structs.replace(kind, cpus=job_cpus))
    return render_site_file(login, answers, proposed, survey.find_rejections(node, proposal.propose_requests(proposed)))


def render_site_file(
    login: Login | None, site_survey: Survey, proposal_values: Proposal, rejection_by_request: dict[RequestKeys, str | None]
) -> str:
    """The cluster file of a Slurm site. rejection_by_request: for each request that was tried, why Slurm would reject it, or
    None."""
    partition, node_type = proposal_values.partition, proposal_values.node_type
    accepted_requests = [request for request, why in rejection_by_request.items() if why is None]
    undecided_requests = [
        request for request, why in rejection_by_request.items() if why is not None and survey.UNDECIDED_ANSWER.search(why)
    ]
    request_keys = next(iter([*accepted_requests, *undecided_requests]), None)
    gpus = proposal.choose_gpus(node_type) if node_type is not None else None
    return templates.render(
        "cluster/slurm.yaml.j2",
        cluster_name=_make_cluster_name(site_survey.settings.cluster or (login.host if login else "site")),
        login=login,
        clusters=site_survey.clusters,
        partition=partition,
        partition_table=_describe_partitions(site_survey),
        account=proposal_values.account,
        accounts=proposal_values.accounts,
        qos=proposal_values.qos,
        needed_qos=proposal_values.needed_qos,
        gpu_request=request_keys.gpu_request if request_keys is not None else None,
        omit=request_keys.omit if request_keys is not None else (),
        has_slices=gpus is not None and is_slice(gpus.type or ""),
        request_table=[f"{request}: {_describe_answer(why)}" for request, why in rejection_by_request.items()],
        time=format_seconds(proposal.propose_time_s(partition)),
        limits=_list_partition_limits(partition) if partition is not None else {},
        typed_partitions=_make_typed_partition_entries(proposal.propose_typed_partitions(site_survey, proposal_values)),
        exclusive=proposal.must_use_whole_nodes(proposal_values),
        cpus_per_rank=proposal.count_cpus_per_rank(node_type) if node_type and gpus else None,
        gpus=gpus,
        folder=proposal_values.folder,
        free=_describe_free_space(proposal_values.folder) if proposal_values.folder is not None else None,
        folder_table=[_describe_folder(folder) for folder in site_survey.folders],
        quota_table=[_describe_quota(quota) for quota in site_survey.quotas.quotas],
        quota_commands=site_survey.quotas.site_commands,
        module=proposal_values.module,
        python=proposal_values.python,
        has_python=proposal_values.has_python,
        oldest=".".join(map(str, OLDEST_PYTHON)),
        module_table=_list_module_lines(site_survey.modules),
        unknown=site_survey.unknown,
    )


def _describe_partitions(site_survey: Survey) -> list[str]:
    partition_lines = []
    for partition in site_survey.partitions:
        node_types = [node_type for node_type in site_survey.node_types if node_type.partition == partition.name]
        nodes_text = "; ".join(
            f"{node_type.count} x {node_type.cpus} CPUs, {node_type.memory_mib // 1024} GiB"
            + "".join(f", {gpu.count} GPUs {gpu.type or ''}".rstrip() for gpu in node_type.gpus)
            for node_type in node_types
        )
        limit_text = f"at most {format_seconds(partition.max_time_s)}" if partition.max_time_s else "no time limit"
        state_note = "" if partition.is_up else " (not up)"
        partition_lines.append(f"{partition.name}{state_note}: {nodes_text or 'no nodes shown'}; {limit_text}")
    return partition_lines


def _list_partition_limits(partition: SitePartition) -> dict[str, str | int]:
    """The time and node limits of a partition, by the keys of the cluster file. Limits that no run can reach are left out."""
    limit_by_key: dict[str, str | int] = {}
    if partition.max_time_s and partition.max_time_s <= proposal.LONGEST_S:
        limit_by_key["max_time"] = format_seconds(partition.max_time_s)
    if partition.max_nodes and partition.max_nodes <= MOST_NODES:
        limit_by_key["max_nodes"] = partition.max_nodes
    return limit_by_key


def _make_typed_partition_entries(typed_partitions: Sequence[TypedPartition]) -> list[str]:
    """The entries of `slurm.partitions` in the cluster file, as YAML; empty if the site has fewer than two types of GPUs."""
    if len(typed_partitions) < 2:
        return []
    yaml_entries = [
        {
            "name": typed_partition.partition.name,
            "gpus": {"type": typed_partition.gpus.type, "per_node": typed_partition.gpus.count},
            **_list_partition_limits(typed_partition.partition),
        }
        for typed_partition in typed_partitions
    ]
    return [json.dumps(typed_partition) for typed_partition in yaml_entries]


def _list_module_lines(module_names: Sequence[str]) -> list[str]:
    """The modules of the site as lines of text. Modules with a Python come first, as a site may have hundreds of others."""
    python_modules = [module_name for module_name in module_names if proposal.is_python_module(module_name)]
    other_modules = [module_name for module_name in module_names if module_name not in python_modules]
    module_lines = []
    for group_heading, group_modules in (("modules with Python", python_modules), ("other modules", other_modules)):
        rest_text = f" and {len(group_modules) - MOST_MODULES} more" if len(group_modules) > MOST_MODULES else ""
        module_lines += [f"{group_heading}: {', '.join(group_modules[-MOST_MODULES:])}{rest_text}"] if group_modules else []
    return module_lines


def _describe_folder(shared_folder: SharedFolder) -> str:
    variable_prefix = f"{shared_folder.variable}=" if shared_folder.variable else ""
    return f"{variable_prefix}{shared_folder.path}: {shared_folder.file_system}, {_describe_free_space(shared_folder)}"


def _make_local_file() -> str:
    facts = FactAnswers(LocalNode())
    system_facts = facts[_SYSTEM]
    return templates.render(
        "cluster/local.yaml.j2",
        cluster_name=_make_cluster_name(system_facts.hostname.partition(".")[0]),
        machine=_describe_machine(system_facts),
        gpus=_list_gpu_names(facts),
    )


def _describe_answer(refusal: str | None) -> str:
    """Slurm's answer to one way to request GPUs, as text. refusal: why Slurm would reject the job; None if it would accept
    it."""
    if refusal is None:
        return "accepted"
    return f"ask: {refusal}; are all nodes down now?" if survey.UNDECIDED_ANSWER.search(refusal) else f"rejected: {refusal}"


def _make_ssh_file(output: Output, workspace: Workspace, logins: Sequence[Login]) -> str:
    nodes: list[dict[str, object]] = []
    gpu_names_by_node: list[list[str]] = []
    folders_by_node: list[set[str]] = []
    links_by_node: list[list[RdmaLink]] = []
    for index, login in enumerate(logins):
        output.print_remark(f"asking {login.host}", style="dim")
        facts = FactAnswers(_make_ssh_node(workspace, login))
        system_facts = facts[_SYSTEM]
        gpu_names_by_node.append(_list_gpu_names(facts))
        links_by_node.append(facts[RDMA])
        folders_by_node.append({shared_folder.path for shared_folder in facts[SHARED_FOLDERS] if shared_folder.is_network})
        remark = ", ".join([_describe_machine(system_facts), *gpu_names_by_node[-1]])
        nodes.append({"name": f"node{index}", "host": login.host, "user": login.user, "port": login.port, "remark": remark})
    common_folders = sorted(set.intersection(*folders_by_node))
    return templates.render(
        "cluster/ssh.yaml.j2",
        cluster_name=_make_cluster_name(logins[0].host.partition(".")[0]),
        nodes=nodes,
        gpus=min(map(len, gpu_names_by_node)),
        network=propose_network(links_by_node),
        shared=f"{common_folders[0]}/shardlab" if common_folders else None,
    )


def propose_network(links_by_node: Sequence[Sequence[RdmaLink]]) -> str | None:
    """The value of the key `network`, as YAML, from the active RDMA links of each node; None if the nodes do not have the same.

    A node uses its fastest links together. Slower ones, such as those of a storage network, are left out."""
    node_networks = set()
    for rdma_links in links_by_node:
        rated = [(link.gbit_per_s, link.layer) for link in rdma_links if link.state == "ACTIVE" and link.gbit_per_s is not None]
        fastest_network = max(rated, default=None)
        node_networks.add(None if fastest_network is None else (*fastest_network, rated.count(fastest_network)))
    if len(node_networks) != 1 or (node_network := node_networks.pop()) is None:
        return None
    gbit_per_s, link_layer, card_count = node_network
    network_word = INFINIBAND_BY_GBIT.get(gbit_per_s) if link_layer == "InfiniBand" else None
    return f"{{between_nodes: {network_word or f'{{gb_per_s: {gbit_per_s / 8:g}}}'}, cards_per_node: {card_count}}}"


def _make_ssh_node(workspace: Workspace, login: Login) -> SshNode:
    workspace_trust.begin_workspace(workspace)  # a login writes the host key into .shardlab
    ssh_address = Address(login.host, login.port, login.user, known_hosts=workspace.shardlab_folder / "known_hosts")
    return SshNode(login.host, login.host, login.port, login.user, None, "python3", remote=Remote(ssh_address))


def _list_gpu_names(facts: FactAnswers) -> list[str]:
    """A text for each GPU of a node, even if the driver is not installed there."""
    nvidia = facts[_NVIDIA]
    if nvidia.seen:
        return [gpu.name if gpu.fault is None else f"a GPU that does not answer ({gpu.fault})" for gpu in nvidia.seen]
    return [f"NVIDIA GPU {gpu.device:#06x} (without a driver)" for gpu in nvidia.gpus]


def _describe_machine(system_facts: System) -> str:
    return f"{system_facts.cpus} CPUs, {system_facts.memory_kib / (1 << 20):.0f} GiB memory, {system_facts.pretty}"


def _describe_free_space(shared_folder: SharedFolder) -> str:
    inode_text = f", {shared_folder.free_inodes:,} inodes" if shared_folder.free_inodes else ""
    if shared_folder.free_bytes is None:
        return "free space not known"
    return f"{shared_folder.free_bytes / GIB:,.0f} GiB free{inode_text}"


def _describe_quota(quota: Quota) -> str:
    """A quota in one line, such as `/scratch: 120 of 1,000 GiB used, 40,000 of 1,000,000 files`."""
    used_text, limit_text = (None if size is None else f"{size / GIB:,.0f}" for size in (quota.used_bytes, quota.most_bytes))
    used_files_text, file_limit = (None if count is None else f"{count:,}" for count in (quota.used_files, quota.most_files))
    size_text = f"{used_text or 'unknown'} of {limit_text} GiB used" if limit_text else "no limit of bytes"
    count_text = f"{used_files_text or 'unknown'} of {file_limit} files" if file_limit else "no limit of files"
    return f"{quota.place}: {size_text}, {count_text}"


def _make_cluster_name(source_text: str) -> str:
    """A name for the cluster, made from `source_text`, with only the characters that a cluster file allows in a name."""
    cluster_name = re.sub(r"[^a-z0-9-]+", "-", source_text.lower()).strip("-")[:31]
    return cluster_name if re.match(r"^[a-z0-9]", cluster_name) else "site"
