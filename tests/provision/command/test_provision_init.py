"""`provision init`: the output of a Slurm site becomes a cluster file that `provision` can read."""

import json
import re
import subprocess

import pytest

import templates
from provision import cli
from provision.command import init
from provision.facts import associations, modules, node_types, partitions, pythons, quotas, shared_folders, slurm_settings
from provision.facts.node_types import GpuGres
from provision.facts.quotas import Quota, Quotas
from provision.facts.rdma import RdmaLink
from provision.site import proposal
from provision.site.proposal import RequestKeys as K
from provision.site.survey import Survey
from shardlab.cluster import cluster
from shardlab.cluster.cluster_keys import CardBandwidth, Login, Network
from shardlab.cluster.slurm_time import parse_duration_s

CONFIG = """\
Configuration data as of 2026-05-04T10:00:00
AccountingStorageEnforce = associations,limits,qos,safe
ClusterName             = Perl/Mutter
GresTypes               = gpu
JobSubmitPlugins        = lua
SelectType              = select/cons_tres
SLURM_VERSION           = 24.05.1
"""
PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES DefaultTime=00:10:00 MaxNodes=UNLIMITED \
MaxTime=7-00:00:00 OverSubscribe=NO State=UP TotalNodes=100
PartitionName=gpu-a100 AllowGroups=ALL AllowAccounts=abc,abc_g AllowQos=normal,high Default=NO DefaultTime=NONE MaxNodes=8 \
MaxTime=2-00:00:00 OverSubscribe=NO State=UP TotalNodes=40
PartitionName=old State=DOWN MaxTime=UNLIMITED MaxNodes=1 AllowAccounts=ALL OverSubscribe=EXCLUSIVE
PartitionName=closed State=UP MaxTime=01:00:00 MaxNodes=1 AllowAccounts=others
PartitionName=$(reboot) State=UP MaxTime=01:00:00 MaxNodes=1 AllowAccounts=ALL
"""
NODE_TYPES = """\
cpu|100|128|515000|(null)|(null)|c[001-100]
gpu-a100|38|64|256000|gpu:a100:4(S:0-1)|hbm40g,gpu|g[01-38]
gpu-a100|2|64|256000|gpu:a100:4(S:0-1),nvme:1|hbm80g,gpu|g[39-40]
"""
ACCOUNTS = "abc||normal|normal\nabc_g||normal,high|normal\nother|cpu||\n"
MODULES = "/apps/modules:\npython/3.9.1\npython/3.12.4(default)\ncuda/12.6\nfoo/1\npython/3.11.2\npython/$(id)\n"
FOLDERS = "HOME /home/alice nfs4 10737418240 1000\nSCRATCH /scratch/alice lustre 5497558138880 9000000\nTMP /tmp/x tmpfs 1 -\n"
OLD_PYTHON = "/usr/bin/python3 3.9.18\n"


def site(**changes: object) -> Survey:
    given = {
        "settings": slurm_settings.parse(CONFIG),
        "partitions": partitions.parse(PARTITIONS),
        "node_types": node_types.parse(NODE_TYPES),
        "associations": associations.parse(ACCOUNTS),
        "modules": modules.parse(MODULES),
        "folders": shared_folders.parse(FOLDERS),
        "pythons": pythons.parse(OLD_PYTHON),
    }
    return Survey(**(given | changes))


def described(tmp_path, survey: Survey, rejected: dict[str, str | None], login: Login | None = None):
    """Returns the text of the cluster file, and the cluster read from this text."""
    text = init.render_site_file(login, survey, proposal.propose_partition(survey), rejected)
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return text, cluster.load_cluster(path)


def test_a_site_becomes_a_cluster_file(tmp_path):
    rejected = {K("gpus-per-node"): None, K("gres"): None, K("gpus"): "Batch job submission failed: use --gpus-per-node"}
    text, made = described(tmp_path, site(), rejected, Login("login1.example.edu", "alice"))
    assert made.provider == "slurm"
    assert made.name == "perl-mutter"
    assert made.login == Login("login1.example.edu", "alice")
    assert made.slurm is not None
    assert (made.slurm.partition, made.slurm.account, made.slurm.gpu_request) == ("gpu-a100", "abc_g", "gpus-per-node")
    assert (made.slurm.max_time, made.slurm.max_nodes) == ("2-00:00:00", 8)
    assert (made.slurm.exclusive, made.slurm.cpus_per_rank) == (False, 16)
    assert made.gpus is not None
    assert (made.gpus.per_node, made.gpus.type) == (4, "a100")
    assert made.storage.shared == "/scratch/alice/shardlab"
    assert made.environment.modules == ["python/3.12.4"]
    assert "gpus: rejected: Batch job submission failed: use --gpus-per-node" in text
    assert "#   cpu: 100 x 128 CPUs, 502 GiB; at most 7-00:00:00\n" in text  # 515,000 MiB
    a100 = "#   gpu-a100: 38 x 64 CPUs, 250 GiB, 4 GPUs a100; 2 x 64 CPUs, 250 GiB, 4 GPUs a100; at most 2-00:00:00\n"
    assert a100 in text  # 256,000 MiB
    assert "$(" not in text


def test_keys_that_a_site_leaves_open_are_left_for_the_user(tmp_path):
    unknown = {"accounts": "login1: the fact 'accounts' is not known, as its command failed: sacctmgr: not permitted"}
    text, made = described(tmp_path, site(associations=(), modules=(), pythons={}, folders=(), unknown=unknown), {})
    assert made.slurm is not None
    assert made.slurm.account is None
    assert re.search(r"account: null +# ask: .*not permitted", text)
    assert re.search(r"modules: \[\] +# ask: which module provides Python 3.11", text)
    assert re.search(r"shared: /CHANGE/ME +# ask:", text)


def test_the_first_request_that_slurm_accepts_is_proposed(tmp_path):
    _, made = described(tmp_path, site(), {K("gpus-per-node"): "Invalid generic resource", K("gres"): None, K("gpus"): None})
    assert made.slurm is not None
    assert made.slurm.gpu_request == "gres"
    asked = proposal.propose_requests(proposal.propose_partition(site()))
    words = "--partition=gpu-a100 --account=abc_g --nodes=1 --ntasks-per-node=1 --time=5 --export=NONE --cpus-per-task=64"
    assert asked[K("gres")] == [*words.split(), "--gres=gpu:a100:4"]
    assert list(asked) == [K("gpus-per-node"), K("gres"), K("gpus"), K("none")]  # without exclusive, mem is not sent


def test_a_partition_that_accepts_none_of_the_users_accounts_is_not_proposed():
    only_others = site(associations=associations.parse("nobody||normal|normal\n"))
    made = proposal.propose_partition(only_others)
    assert made.partition is not None
    assert made.partition.name == "cpu"
    assert list(map(str, proposal.propose_requests(made))) == [
        "no GPU",
        "omit: [mem]",
        "omit: [exclusive]",
        "omit: [mem, exclusive]",
    ]


def test_an_account_that_the_partition_denies_is_not_proposed(tmp_path):
    denies = PARTITIONS.replace("AllowAccounts=abc,abc_g AllowQos", "AllowAccounts=ALL DenyAccounts=abc_g,visitors AllowQos")
    text, made = described(tmp_path, site(partitions=partitions.parse(denies)), {})
    assert made.slurm is not None
    assert (made.slurm.partition, made.slurm.account) == ("gpu-a100", "abc")
    assert "abc_g" not in text
    all_denied = denies.replace("DenyAccounts=abc_g,visitors", "DenyAccounts=abc,abc_g")
    assert proposal.find_valid_accounts(site(), partitions.parse(all_denied)[1]) is None


def test_names_that_are_no_plain_words_are_left_out():
    assert [partition.name for partition in partitions.parse(PARTITIONS)] == ["cpu", "gpu-a100", "old", "closed"]
    assert modules.parse(MODULES) == ("python/3.9.1", "python/3.12.4", "cuda/12.6", "python/3.11.2")


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("gpu:a100:4(S:0-1)", (GpuGres("a100", 4),)),
        ("gpu:2", (GpuGres(None, 2),)),
        ("gpu", (GpuGres(None, 1),)),
        ("gpu:tesla,shard:tesla:8,mps:400", (GpuGres("tesla", 1),)),
        ("gpu:nv1080:1,gpu:nv1080:1,gpu:nv1080:1(IDX:2,3),gpu:k80:no_consume:2", (GpuGres("nv1080", 3), GpuGres("k80", 2))),
        ("gpu:h100:4,gpu:h100_1g.10gb:14,nvme:1", (GpuGres("h100", 4), GpuGres("h100_1g.10gb", 14))),
        ("mps:100,gpu:0", ()),
        ("gpu:$(id):4", ()),
    ],
)
def test_gpus_are_counted_by_type(gres, gpus):
    assert node_types.parse_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("01:00:00", 3600),
        ("2-00:00:00", 172_800),
        ("30", 1800),
        ("30:15", 1815),
        ("1-12", 129_600),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_times_are_read_as_slurm_writes_them(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("fact", "stdout"),
    [
        (partitions, "slurm_load_partitions error\n"),
        (node_types, "a|b\n"),
        (slurm_settings, "nothing\n"),
        (associations, "a|b\n"),
    ],
)
def test_other_output_is_refused(fact, stdout):
    with pytest.raises(ValueError):  # noqa: PT011 (each fact raises another message)
        fact.parse(stdout)


def test_this_machine_is_described_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "is_login_node", lambda: False)
    assert cli.main(["init", "--workspace", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "cluster.yaml").write_text(text)
    assert cluster.load_cluster(tmp_path / "cluster.yaml").provider == "local"
    assert cli.main(["init", "--json", "--workspace", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["cluster_yaml"] == text


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ("init --ssh node0", ["node0"]),
        ("init --ssh node0 node1", ["node0", "node1"]),
        ("init --ssh node0,node1", ["node0", "node1"]),
        ("init --ssh node0,node1 alice@node2, node3:22 --json", ["node0", "node1", "alice@node2", "node3:22"]),
        ("init --ssh=node0 node1", ["node0", "node1"]),
        ("--ssh node0 node1 init", ["node0", "node1"]),
        ("--ssh node0 node1 --json init", ["node0", "node1"]),
    ],
)
def test_hosts_are_separated_by_spaces_or_commas_and_a_verb_is_no_host(words, hosts):
    arguments = cli.parser().parse_args(words.split())
    assert (arguments.cluster, arguments.verb.name, arguments.ssh) == (None, "init", hosts)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["init", "cluster.yaml"], "found the word cluster.yaml after the verb init, which takes none"),
        (["plan", "other.yaml"], "the cluster file comes before the verb: provision other.yaml plan."),
        (["extend", "24"], "found the word 24 after the verb extend, which takes none. See: provision --help"),
        (["--ssh", "node0", "node1", "init", "plan"], "found two verbs, init and plan"),
        (["other.yaml", "plan"], "other.yaml: no such file. To get a cluster file, run: provision init > cluster.yaml"),
        (["cluster.yaml", "init"], "init takes no cluster file"),
        (["init", "--site", "a b"], "found 'a b'. Allowed: HOST or USER@HOST"),
        (["init", "--site=-oProxyCommand=x"], "found '-oProxyCommand=x'. Allowed"),
        (["init", "--site", "x", "--ssh", "y"], "describe different clusters"),
        (["plan", "--ssh", "y"], "--ssh belongs to the verb init"),
        (["plan"], "provision init > cluster.yaml"),
    ],
)
def test_wrong_words_are_refused(tmp_path, capsys, words, why):
    try:
        code = cli.main([*words, "--workspace", str(tmp_path)])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


QUOTA = """\
Welcome to the site
== quota
Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nas1.example.edu:/export/vol/a/very/long/name/home
               20971520*  10485760 31457280       0   40000       0       0       0
/dev/sdb1              4       0       0       0       1       0       0       0
== lfs /scratch
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
       /scratch [5368709120]  0  10737418240       -   45678  900000 1000000       -
== mmlsquota
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:blockInDoubt:\
blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:
mmlsquota::0:1:::work:USR:1000:alice:1048576:104857600:115343360:0:none:77:0:0:0:none:
mmlsquota::0:1:::$(id):USR:1000:alice:1:2:3:0:none:77:0:0:0:none:
== site myquota
== site $(id)
"""


def test_quotas_are_read_from_the_standard_commands(tmp_path):
    found = quotas.parse(QUOTA)
    assert found.site_commands == ("myquota",)
    assert found.quotas == (
        Quota("nas1.example.edu:/export/vol/a/very/long/name/home", 20 * 2**30, 10 * 2**30, 40000, None),
        Quota("/scratch", 5 * 2**40, 10 * 2**40, 45678, 900000),
        Quota("work", 2**30, 100 * 2**30, 77, None),
    )
    text, _ = described(tmp_path, site(quotas=found), {})
    assert "#   /scratch: 5,120 of 10,240 GiB used, 45,678 of 900,000 files" in text
    assert "#   work: 1 of 100 GiB used, no limit of files" in text


def test_an_unknown_quota_is_left_for_the_user(tmp_path):
    text, _ = described(tmp_path, site(), {})
    assert "# ask: your quota in bytes and in files (" in text
    text, _ = described(tmp_path, site(quotas=Quotas((), ("myquota",))), {})
    assert "# ask: your quota in bytes and in files, which myquota shows" in text


@pytest.mark.parametrize("text", ["", "Disk quotas for user root (uid 0): none\n", "== quota\nDisk quotas for user a: none\n"])
def test_no_quota_is_no_error(text):
    assert quotas.parse(text) == Quotas()


def test_a_quota_command_that_is_missing_or_hangs_is_skipped(tmp_path):
    """The program of the fact gets stand-ins: `quota` never answers, `lfs` answers, and `mmlsquota` does not exist."""
    scripts = {
        "quota": "exec sleep 1000",
        "lfs": 'echo "       $5 1024 0 2048 - 5 0 10 -"',
        "awk": "echo /scratch",  # stands in for the list of this machine's mounts
        "myquota": "exec sleep 1000",
        "timeout": 'shift; case $1 in quota) exit 124 ;; esac; exec "$@"',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", quotas.PRINT_QUOTAS], env=environment, capture_output=True, text=True, check=True)
    assert quotas.parse(done.stdout) == Quotas((Quota("/scratch", 2**20, 2 * 2**20, 5, 10),), ("myquota",))


def test_nodes_that_are_all_down_decide_nothing_about_the_request_for_gpus(tmp_path):
    why = "Requested node configuration is not available"
    text, made = described(tmp_path, site(), {K("gpus-per-node"): "use gres", K("gres"): why, K("gpus"): why})
    assert made.slurm is not None
    assert made.slurm.gpu_request == "gres"
    assert f"gres: ask: {why}; are all nodes down now?" in text
    assert "gpus-per-node: rejected: use gres" in text


def rdma_links(*ports):
    """The RDMA links of a node. ports: (state, layer, Gbit/s) of each link."""
    return [RdmaLink(f"mlx5_{i}", 1, state, layer, None, [], gbit) for i, (state, layer, gbit) in enumerate(ports)]


NDR, HDR = ("ACTIVE", "InfiniBand", 400.0), ("ACTIVE", "InfiniBand", 200.0)


@pytest.mark.parametrize(
    ("nodes", "network"),
    [
        ([rdma_links(*[NDR] * 8, ("ACTIVE", "Ethernet", 100.0))] * 2, Network(None, "infiniband-ndr", 8)),
        ([rdma_links(HDR)], Network(None, "infiniband-hdr", 1)),
        ([rdma_links(HDR, ("DOWN", "InfiniBand", 400.0))], Network(None, "infiniband-hdr", 1)),
        ([rdma_links(*[("ACTIVE", "Ethernet", 200.0)] * 4)], Network(None, CardBandwidth(25), 4)),
        ([rdma_links(("ACTIVE", "InfiniBand", None))], Network()),
        ([rdma_links(HDR), rdma_links(NDR)], Network()),
        ([rdma_links(HDR), []], Network()),
    ],
)
def test_the_network_of_a_cluster_file_is_that_of_the_active_rdma_cards(nodes, network, tmp_path):
    text = templates.render(
        "cluster/ssh.yaml.j2",
        cluster_name="bench",
        nodes=[
            {"name": f"node{i}", "host": f"10.0.0.{i}", "user": None, "port": None, "remark": ""} for i, _ in enumerate(nodes)
        ],
        gpus=8,
        network=init.propose_network(nodes),
        shared="/srv/shared",
    )
    (tmp_path / "cluster.yaml").write_text(text)
    assert cluster.load_cluster(tmp_path / "cluster.yaml").network == network
