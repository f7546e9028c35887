"""`provision init` at complicated sites: rules about QOS, several types of GPUs, long lists, and hostile answers."""

import os
import pwd
import random
import re
import subprocess

import pytest
from support_e2e import HANG_S
from support_long import LONG

from provision import cli
from provision.facts import associations, modules, node_types, partitions, pythons, quotas, shared_folders, slurm_settings
from provision.facts.shared_folders import SharedFolder
from provision.providers import slurm
from provision.site import proposal, requests, survey
from provision.site.proposal import RequestKeys
from shardlab.cluster import cluster
from shardlab.remote.remote import CommandOutput
from shardlab.workspace.workspace import Workspace
from tests.provision.command.test_provision_init import (
    ACCOUNTS,
    CONFIG,
    FOLDERS,
    MODULES,
    NODE_TYPES,
    OLD_PYTHON,
    PARTITIONS,
    QUOTA,
    described,
    site,
)

GPUS = RequestKeys("gpus")
GPU_PARTITION = "AllowQos=normal,high Default=NO DefaultTime=NONE"


def changed(old: str, new: str):
    """Returns the partitions of the site, parsed after replacing one text."""
    assert old in PARTITIONS
    return partitions.parse(PARTITIONS.replace(old, new))


def test_a_partition_that_does_not_allow_the_default_qos_gets_one_that_it_allows(tmp_path):
    with_qos = changed(GPU_PARTITION, "AllowQos=high,urgent Default=NO")
    text, made = described(tmp_path, site(partitions=with_qos), {})
    assert made.slurm is not None
    assert (made.slurm.partition, made.slurm.account, made.slurm.qos) == ("gpu-a100", "abc_g", "high")
    asked = proposal.propose_requests(proposal.propose_partition(site(partitions=with_qos)))
    assert asked[RequestKeys("gres")][:3] == ["--partition=gpu-a100", "--account=abc_g", "--qos=high"]
    assert "the partition does not allow the default QOS of the account; it allows: high\n" in text
    denies = changed(GPU_PARTITION, "AllowQos=ALL DenyQos=normal Default=NO")
    assert proposal.propose_partition(site(partitions=denies)).needed_qos == "high"


def test_accounts_without_an_allowed_qos_are_not_proposed(tmp_path):
    only_high = changed(GPU_PARTITION, "AllowQos=high Default=NO")
    assert proposal.find_valid_accounts(site(partitions=only_high), only_high[1]) == ("abc_g",)
    urgent = site(partitions=changed(GPU_PARTITION, "AllowQos=urgent Default=NO"))
    assert proposal.propose_partition(urgent).partition.name == "cpu"


def test_a_partition_of_root_is_not_proposed():
    made = proposal.propose_partition(site(partitions=changed(GPU_PARTITION, f"{GPU_PARTITION} RootOnly=YES")))
    assert made.partition is not None
    assert made.partition.name == "cpu"


def test_partitions_of_several_gpu_types_are_proposed_for_matrices_with_types(tmp_path):
    more = (
        "gpu-h100|4|96|1000000|gpu:h100:8(S:0-1)|x|h[1-4]\ngpu-a100|3|64|1000|gpu:v100:2|x|v[1-3]\nshort|1|8|9|gpu:t4:1|x|t1\n"
    )
    line = "PartitionName={} AllowAccounts=ALL State=UP MaxTime={} MaxNodes={}\n"
    more_partitions = line.format("gpu-h100", "1-00:00:00", 4) + line.format("short", "00:10:00", 1)
    answers = site(node_types=node_types.parse(NODE_TYPES + more), partitions=partitions.parse(PARTITIONS + more_partitions))
    text, made = described(tmp_path, answers, {})
    assert made.slurm is not None
    assert made.slurm.partitions == []
    block = re.search(r"  # partitions:\n(?:  #   - .*\n)+", text)
    assert block is not None
    (tmp_path / "cluster.yaml").write_text(text.replace(block[0], block[0].replace("# ", "")))
    known = cluster.load_cluster(tmp_path / "cluster.yaml")
    assert [(one.name, one.gpus.type, one.gpus.per_node, one.max_nodes) for one in known.slurm.partitions] == [
        ("gpu-a100", "a100", 4, 8),
        ("gpu-a100", "v100", 2, 8),
        ("gpu-h100", "h100", 8, 4),  # the partition `short` is missing, because its limit is below slurm.time
    ]
    assert "# partitions:" not in described(tmp_path, site(), {})[0]


def test_limits_that_no_run_reaches_are_left_out(tmp_path):
    wide = changed("MaxNodes=8 MaxTime=2-00:00:00", "MaxNodes=4294967294 MaxTime=3650-00:00:00")
    _, made = described(tmp_path, site(partitions=wide), {})
    assert made.slurm is not None
    assert (made.slurm.partition, made.slurm.max_time, made.slurm.max_nodes) == ("gpu-a100", None, None)


def test_if_slurm_rejects_each_request_for_gpus_the_administrators_are_asked(tmp_path):
    text, _ = described(tmp_path, site(), dict.fromkeys(map(RequestKeys, proposal.GPU_REQUESTS), "not now"))
    assert "gpu_request: gpus-per-node # ask: " in text


def test_the_words_of_a_submit_plugin_are_found_between_its_lines_and_those_of_slurm():
    said = (
        "sbatch: =======================\n"
        "sbatch: error: jobs need --gpus-per-node\n"
        "sbatch: error: see the \x1b[1mdocs\n"
        "sbatch: =======================\n"
        "sbatch: error: Batch job submission failed: Unspecified error\n"
    )

    class Login:
        def run(self, argv, *, timeout_s):
            return CommandOutput(1, "", said)

    assert survey.find_rejections(Login(), {GPUS: []}) == {GPUS: "jobs need --gpus-per-node; see the ?[1mdocs"}


class AnsweringLogin:
    """A login node whose sbatch rejects requests with certain options, and whose scontrol prints a text."""

    def __init__(self, rejects, why="Batch job submission failed: rejected", nodes=""):
        self.rejects, self.why, self.nodes, self.tests = rejects, why, nodes, 0

    def run(self, argv, *, timeout_s):
        if argv[0] == "scontrol":
            return CommandOutput(0, self.nodes, "")
        self.tests += 1
        options = [word.partition("=")[0] for word in argv if word.startswith("--")]
        is_rejected = any(option in self.rejects for option in options)
        return CommandOutput(int(is_rejected), "", f"sbatch: error: {self.why}" if is_rejected else "")


GPU_OPTIONS = ("--gpus", "--gres", "--gpus-per-node")
WHOLE_NODES = changed("OverSubscribe=NO", "OverSubscribe=EXCLUSIVE")


@pytest.mark.parametrize(
    ("rejects", "lines"),
    [
        (("--gpus-per-node",), ["  gpu_request: gres"]),
        (GPU_OPTIONS, ["  gpu_request: none"]),
        (("--mem",), ["  gpu_request: gpus-per-node", "  omit: [mem] "]),
        (("--exclusive", "--mem", *GPU_OPTIONS), ["  gpu_request: none", "  omit: [mem, exclusive] "]),
    ],
)
def test_the_keys_without_an_option_that_slurm_rejects_are_written(rejects, lines, tmp_path):
    answers = site(partitions=WHOLE_NODES)
    requests = proposal.propose_requests(proposal.propose_partition(answers))
    text, made = described(tmp_path, answers, survey.find_rejections(AnsweringLogin(rejects), requests))
    assert all(f"\n{line}" in text for line in lines)
    assert made.slurm.exclusive  # the keys are read back
    assert ("omit:" in text) == (len(lines) == 2)


def test_a_rejected_account_is_not_answered_by_requests_with_other_options():
    requests = proposal.propose_requests(proposal.propose_partition(site(partitions=WHOLE_NODES)))
    login = AnsweringLogin(("--export",), "Invalid account or account/partition combination specified")
    assert None not in survey.find_rejections(login, requests).values()
    assert login.tests == 3


@pytest.mark.parametrize(
    ("words", "cpus"),
    [
        ("CPUTot=64 CPUEfctv=60 ThreadsPerCore=2 CoreSpecCount=2", 60),
        ("CPUTot=64 ThreadsPerCore=2 CoreSpecCount=4 MemSpecLimit=1024", 56),
        ("CPUTot=64 ThreadsPerCore=1 CPUSpecList=0-1,32", 61),
        ("CPUTot=64", 64),
        ("State=IDLE", None),
    ],
)
def test_processors_that_slurm_reserves_are_not_proposed_for_ranks(words, cpus):
    nodes = f"NodeName=g1 {words}\nNodeName=g2 CPUTot=64\n" if cpus is not None else f"NodeName=g1 {words}\n"
    assert survey.count_job_cpus(AnsweringLogin((), nodes=nodes), "g[1-2]") == cpus
    assert survey.count_job_cpus(AnsweringLogin((), nodes=nodes), "") is None


def test_slices_of_gpus_are_named_and_whole_gpus_are_preferred(tmp_path):
    def of(gres):
        return site(node_types=node_types.parse(f"gpu-a100|2|128|1000000|{gres}|x|d[1-2]\n"))

    text, made = described(tmp_path, of("gpu:a100_1g.5gb:14(S:0-1)"), {})
    assert (made.gpus.per_node, made.gpus.type, made.gpus.are_slices) == (14, "a100_1g.5gb", True)
    assert "slices of GPUs (MIG)" in text
    text, made = described(tmp_path, of("gpu:a100_1g.5gb:14,gpu:a100:6"), {})
    assert (made.gpus.per_node, made.gpus.type) == (6, "a100")
    assert "MIG" not in text


def test_nodes_without_counted_gpus_lead_to_a_question(tmp_path):
    text, made = described(tmp_path, site(node_types=node_types.parse("gpu-a100|9|40|1000|(null)|x|c[1-9]\n")), {})
    assert made.gpus is None
    assert "# gpus: {per_node: 4}    # ask: do the nodes have GPUs?" in text


def test_a_long_list_of_modules_does_not_hide_those_with_python(tmp_path):
    names = [f"gcc/{number}.1" for number in range(40)] + ["lang/python3/3.12.1"]
    known = modules.parse("\n".join(names))
    text, made = described(tmp_path, site(modules=known), {})
    assert made.environment.modules == ["lang/python3/3.12.1"]
    assert "#   modules with Python: lang/python3/3.12.1\n" in text
    assert "gcc/39.1 and 16 more\n" in text


def test_a_folder_of_the_user_in_a_network_file_system_needs_no_variable(tmp_path):
    """Runs the program on a table of mounts in which folders of this machine are network file systems."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    for name in ("scratch", "nobody", "disk"):
        (tmp_path / name).mkdir()
    for name in ("scratch", "disk"):
        (tmp_path / name / user).mkdir()
    lines = [
        f"server:/x {tmp_path}/{name} {kind} rw 0 0\n"
        for name, kind in [("scratch", "lustre"), ("nobody", "nfs4"), ("disk", "ext4")]
    ]
    (tmp_path / "mounts").write_text("".join(lines) + "server:/y /nowhere\\040else nfs rw 0 0\n")
    words = ["bash", "-c", shared_folders.LIST_SHARED_FOLDERS, "program", str(tmp_path / "mounts")]
    environment = {"PATH": "/usr/bin:/bin", "DATA": str(tmp_path), "SCRATCH_DIR": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    known = shared_folders.parse(done.stdout)
    assert [(folder.variable, folder.path) for folder in known] == [("DATA", str(tmp_path)), ("", f"{tmp_path}/scratch/{user}")]
    assert all((folder.free_bytes or 0) > 0 for folder in known)
    shown = SharedFolder("", "/lustre/scratch/alice", "lustre", 2**40, None)
    text, made = described(tmp_path, site(folders=(*site().folders[:1], shown)), {})
    assert made.storage.shared == "/lustre/scratch/alice/shardlab"
    assert "# lustre, 1,024 GiB free\n" in text
    assert "#   /lustre/scratch/alice: lustre, 1,024 GiB free\n" in text


@pytest.fixture
def login(tmp_path, monkeypatch):
    """A login node on which Slurm's commands print the answers of the site, and sbatch records its options."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    for name, answer in (("config", CONFIG), ("partition", PARTITIONS), ("nodes", NODE_TYPES), ("accounts", ACCOUNTS)):
        (folder / name).write_text(answer)
    scripts = {
        "scontrol": f'cat "{folder}/$2"',
        "sinfo": f'test -z "$SLURM_CLUSTERS" || echo "CLUSTER: $SLURM_CLUSTERS"\ntest "$SINFO_PARTITION" || cat {folder}/nodes',
        "sacctmgr": f'cat {folder}/accounts || {{ echo "accounting is disabled" >&2; exit 1; }}',
        "sbatch": f'echo "$SBATCH_PARTITION $*" >> {folder}/asked; echo "$SLURM_CLUSTERS" >> {folder}/clusters',
    }
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=os.pathsep)
    for name in ("SINFO_PARTITION", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "cpu")
    for name in ("SLURMD_NODENAME", "SLURM_CLUSTERS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_the_login_node_is_asked_and_nothing_is_submitted_or_written(tmp_path, login, capsys):
    (tmp_path / "desk").mkdir()
    words = ["init", "--site", "--workspace", str(tmp_path / "desk")]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    asked = (login / "asked").read_text().splitlines()
    assert len(asked) == 3
    assert all(line.startswith(" --test-only ") for line in asked)
    (tmp_path / "cluster.yaml").write_text(text)
    made = cluster.load_cluster(tmp_path / "cluster.yaml")
    assert made.slurm is not None
    assert (made.provider, made.slurm.partition, made.slurm.account) == ("slurm", "gpu-a100", "abc_g")
    (login / "accounts").unlink()
    assert cli.main(words) == 0
    assert re.search(r"account: null +# ask: .*accounting is disabled", capsys.readouterr().out)
    (login / "partition").unlink()
    assert cli.main(words) == 2
    assert "this machine: Slurm shows no partition" in capsys.readouterr().err
    assert list((tmp_path / "desk").iterdir()) == []


@pytest.mark.parametrize(
    ("shell", "login_shell", "proposed"),
    [("cm4", "", "cm4"), ("", "cm4", "cm4"), ("cm4,inter", "", "cm4"), ("", "", None), ("$(id)", "", None)],
)
def test_the_cluster_that_the_users_shell_chooses_is_asked_and_proposed(
    tmp_path, login, monkeypatch, capsys, shell, login_shell, proposed
):
    if shell:
        monkeypatch.setenv("SLURM_CLUSTERS", shell)
    monkeypatch.setenv("HOME", str(tmp_path))
    noise = "echo welcome\nprintf 'quota: '\ntrap 'echo goodbye' EXIT\n"
    (tmp_path / ".bash_profile").write_text(noise + (f"export SLURM_CLUSTERS={login_shell}\n" if login_shell else ""))
    assert cli.main(["init", "--site", "--workspace", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    (tmp_path / "cluster.yaml").write_text(text)
    made = cluster.load_cluster(tmp_path / "cluster.yaml")
    assert made.slurm is not None
    assert (made.slurm.cluster, made.gpus is not None) == (proposed, True)
    assert ("one file per cluster: cm4, inter" in text) == ("," in shell)
    if proposed is not None:
        assert set((login / "clusters").read_text().split()) == {proposed}


def test_a_file_is_not_proposed_for_all_clusters_together(tmp_path, login, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_CLUSTERS", "all")
    assert cli.main(["init", "--site", "--workspace", str(tmp_path)]) == 2
    assert "SLURM_CLUSTERS is 'all'. Allowed: the name of one cluster." in capsys.readouterr().err


@pytest.mark.parametrize("with_login", [True, False])
def test_provision_addresses_the_cluster_of_the_file(tmp_path, monkeypatch, with_login):
    monkeypatch.setenv("SLURM_CLUSTERS", "inter")
    login = "login: {host: login1}\n" if with_login else ""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"schema: 1\nname: c\nprovider: slurm\n{login}slurm: {{cluster: cm4}}\nstorage: {{shared: /s}}\n")
    described_site = cluster.load_cluster(file)
    (node,) = slurm.list_nodes(described_site, Workspace(tmp_path))
    assert node.variables == {"SLURM_CLUSTERS": "cm4"}
    if not with_login:
        answer = node.run(["sh", "-c", f"{requests.WITHOUT_VARIABLES} echo $SLURM_CLUSTERS"], timeout_s=HANG_S)
        assert answer.stdout == "cm4\n"
    assert requests.list_sbatch_options(described_site, node_count=1, minutes=1)[0] == "--clusters=cm4"


HOSTILE = [
    "\x1b[31m", "$(id)", "`x`", '"', "'", "\\", "\n", "|", "=", ",", ":", "%", "{", "}", "#", "é", "٤", "²",
    "9" * 30, "9" * 5000,
    "\u2028", "\x85", "\x00", "-", "..", "/", "UNLIMITED", "(null)", "*", "+", "- ", "null", "true", "1e5", "0", ": a", "~",
    "{{ 1 }}",
]  # fmt: skip
ANSWERS = {
    "settings": (slurm_settings, CONFIG),
    "partitions": (partitions, PARTITIONS),
    "node_types": (node_types, NODE_TYPES),
    "associations": (associations, ACCOUNTS),
    "modules": (modules, MODULES),
    "folders": (shared_folders, FOLDERS),
    "pythons": (pythons, OLD_PYTHON),
    "quotas": (quotas, QUOTA),
}


@pytest.mark.parametrize("seed", range(40 if LONG else 4))
def test_hostile_answers_become_a_file_that_can_be_read_or_no_answer(tmp_path, seed):
    generator = random.Random(seed)
    for _ in range(50):
        known = {}
        for name, (fact, answer) in ANSWERS.items():
            for _ in range(generator.choice([0, 0, 1, 2, 5])):
                place = generator.randrange(len(answer))
                answer = answer[:place] + generator.choice(HOSTILE) + answer[place + generator.choice([0, 1, 3, 10]) :]
            try:
                known[name] = fact.parse(answer)
            except ValueError:
                continue  # `provision init` treats it as missing
        rejected = {RequestKeys("gres"): generator.choice(HOSTILE), GPUS: generator.choice([None, *HOSTILE])}
        text, _ = described(tmp_path, survey.Survey(**known), rejected)
        assert all(char.isprintable() or char == "\n" for char in text)
