"""Each key of a cluster file, and each of its allowed values, changes a login, a command, a script, a record, a prediction or a
request, or is refused."""

import copy
import functools
import json
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from support_cluster_effects import EFFECTS

from provision.practice import base
from shardlab.cluster import cluster
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import DataSetName, LinkName
from shardlab.errors import InputError
from shardlab.hardware import host
from shardlab.matrix.cell import Draft
from shardlab.matrix.matrix import MatrixFile
from shardlab.matrix.model_file import ModelByConfiguration, ModelFile
from shardlab.workspace.workspace import Workspace

NODES = [{"name": "head", "host": "10.0.0.1", "roles": ["controller"]}, {"name": "work1", "host": "10.0.0.2"}]
GPUS = {"per_node": 4, "type": "a100"}
SITE = {
    "provider": "slurm", "login": {"host": "login.example.edu"}, "slurm": {}, "gpus": GPUS,
    "storage": {"shared": "/srv/shared"},
}  # fmt: skip
MACHINES = {"provider": "ssh", "nodes": NODES, "slurm": {}, "gpus": GPUS}
TWO_WORKERS = MACHINES | {"nodes": [*NODES, {"name": "work2", "host": "10.0.0.3"}]}
PRACTICE = {"provider": "virtual", "nodes": [{"name": "head", "roles": ["controller"]}, {"name": "work1"}], "slurm": {}}
LAB = {"provider": "cloudlab", "cloudlab": {"project": "us", "hardware": "d7525", "site": "wisc", "nodes": 2}}
SHARED = {"storage.shared": "/srv/shared"}
DISK = {"storage.disk": "/dev/nvme9n1", "storage.mount": "/srv/disk"}
IMAGE = {"environment.container": "/opt/torch.sif", "environment.runtime": "apptainer"}
H100 = {"name": "big", "gpus": {"per_node": 8, "type": "h100"}}
REFUSED = "refused"
DIFFERS = "(any difference)"
SHA = "0123456789abcdef" * 4


class Case(msgspec.Struct):
    """A value of a key and its effect.

    value: the value. file: the cluster file into which the value is written; for a key of a list, into its last entry. effect:
    a name of EFFECTS, or REFUSED. text: a text that the effect has with the value, and does not have without it; if it begins
    with "- ", only without it; DIFFERS: the effect is another one. also: further keys that are written together with the key.
    """

    value: Any
    file: dict[str, Any]
    effect: str
    text: str
    also: dict[str, Any] = {}


SBATCH_TIMES = {"90": 93, "2-12": 3603, "5:30": 9, "1-01:30": 1533}  # with the margin of a run, in minutes
CASES: dict[str, list[Case]] = {
    "schema": [Case(2, SITE, REFUSED, "Allowed: 1.")],
    "name": [Case("other", SITE, "job", '"name":"other"')],
    "provider": [
        Case("local", SITE, REFUSED, "login: not allowed with provider local"),
        Case("ssh", SITE, REFUSED, "login: not allowed with provider ssh"),
        Case("virtual", MACHINES, REFUSED, "practice nodes get their addresses from lan.subnet"),
        Case("slurm", MACHINES, REFUSED, "nodes: not allowed with provider slurm"),
        Case("cloudlab", MACHINES, REFUSED, "provider cloudlab needs the key cloudlab"),
    ],
    "login.host": [Case("other.example.edu", SITE, "logins", "other.example.edu")],
    "login.user": [Case("bob", SITE, "logins", "bob")],
    "login.port": [Case(2222, SITE, "logins", "2222")],
    "cloudlab.manifest": [Case("gone.xml", LAB, REFUSED, "gone.xml")],
    "cloudlab.project": [Case("others", LAB, "request", '"project":"others"')],
    "cloudlab.hardware": [Case("d8545", LAB, "request", '"phystype":"d8545"')],
    "cloudlab.site": [Case("clemson", LAB, "request", "clemson.cloudlab.us")],
    "cloudlab.nodes": [Case(3, LAB, "request", '"nodeCount":"3"')],
    "cloudlab.image": [Case("UBUNTU26-64-STD", LAB, "request", "emulab-ops//UBUNTU26-64-STD")],
    "cloudlab.hours": [Case(5, LAB, "request", '"duration":5')],
    "cloudlab.profile": [Case("mine", LAB, "request", '"profile_name":"mine"')],
    "cloudlab.profile_project": [Case("Mine", LAB, "request", '"profile_project":"Mine"')],
    "cloudlab.bindings": [Case({"note": "text"}, LAB, "request", '"note":"text"')],
    "cloudlab.lan_mbps": [Case(25_000, LAB, "request", '"linkSpeed":"25000000"')],
    "cloudlab.blockstore_gib": [
        Case(100, LAB, "request", '"tempFileSystemSize":"108"'),  # in GB
        Case(0, LAB, "request", '"tempFileSystemMax":"true"'),
    ],
    "cloudlab.portal_url": [Case("https://portal.example.org/api", LAB, "address_of_portal", "https://portal.example.org/api")],
    "nodes.name": [Case("work2", MACHINES, "logins", "work2 10.0.0.2")],
    "nodes.host": [Case("10.0.0.9", MACHINES, "logins", "work1 10.0.0.9")],
    "nodes.address": [Case("192.168.0.9", MACHINES, "changes", "192.168.0.9")],
    "nodes.mac": [Case("0a:00:00:00:00:01", MACHINES, REFUSED, "mac and control are not allowed with provider ssh")],
    "nodes.control": [Case("10.0.0.8", MACHINES, REFUSED, "mac and control are not allowed with provider ssh")],
    "nodes.port": [Case(2222, MACHINES, "logins", "work1 10.0.0.2 port=2222")],
    "nodes.user": [Case("bob", MACHINES, "logins", "user='bob'")],
    "nodes.roles": [
        Case(["controller"], MACHINES, REFUSED, "2 nodes have the role controller"),
        Case(["worker"], MACHINES | {"nodes": [NODES[1], NODES[0]]}, REFUSED, "0 nodes have the role controller"),
    ],
    "ssh.user": [
        Case("bob", MACHINES, "logins", "user='bob'"),
        Case("bob", PRACTICE, REFUSED, "ssh.user: not allowed with provider virtual"),
    ],
    "ssh.identity": [
        Case("/keys/id", MACHINES, "logins", "/keys/id"),
        Case("/keys/id", SITE, "logins", "/keys/id"),
        Case("/keys/id", PRACTICE, REFUSED, "ssh.identity: not allowed with provider virtual"),
    ],
    "ssh.host_keys": [
        Case("accept-new", MACHINES, "logins", "host_keys='accept-new'"),
        Case("accept-new", SITE, "logins", "host_keys='accept-new'"),
    ],
    "ssh.between_nodes": [Case(True, MACHINES, "changes", "openssh-client")],
    "ssh.sudo": [Case(False, MACHINES, "states", "administrator", SHARED)],
    "lan.subnet": [Case("10.99.0.0/24", PRACTICE, "practice", "10.99.0.")],
    "lan.mbps": [
        Case(500, PRACTICE, "practice", "mbps=500"),
        Case(500, MACHINES, REFUSED, "lan: not allowed with provider ssh"),
        Case(500, LAB, REFUSED, "lan: not allowed with provider cloudlab"),
    ],
    "release": [Case(name, PRACTICE, "practice", DIFFERS) for name in get_args(cluster.DebianRelease)],
    "gpus.per_node": [Case(8, SITE, "prediction", "gpus_per_node=8")],
    "gpus.type": [Case("h100", SITE, "job", "--gpus-per-node=h100:4"), Case("h100", SITE, "site", "--gpus-per-node=h100:4")],
    "gpus.memory_gib": [Case(1, SITE, "prediction", str(2**30))],
    "storage.shared": [Case("/srv/other", SITE, "site", "/srv/other/python-")],
    "storage.server": [Case("head", MACHINES, "changes", "nfs-kernel-server", SHARED)],
    "storage.disk": [Case("/dev/nvme9n1", MACHINES, "changes", "mkfs.ext4", DISK)],
    "storage.mount": [Case("/srv/disk", MACHINES, "changes", "/srv/disk", DISK)],
    "environment.modules": [Case(["python/3.12"], SITE, "site", "module load python/3.12")],
    "environment.python": [Case("/opt/bin/python3", SITE, "site", "/opt/bin/python3")],
    "environment.build": [
        Case("job", SITE, "site", "- download"),
        Case("login", SITE, "site", "install the packages on the login node"),
        Case("login", MACHINES, REFUSED, "environment.build: not allowed with provider ssh"),
    ],
    "environment.use": [Case("/opt/conda", SITE, "site", "/opt/conda/bin/python")],
    "environment.container": [Case("/opt/torch.sif", SITE, "site", "environment.container: /opt/torch.sif", IMAGE)],
    "environment.runtime": [
        Case("apptainer", SITE, "site", "apptainer exec", IMAGE),
        Case("charliecloud", SITE, "site", "ch-run", IMAGE),
        Case("pyxis", SITE, "job", "--container-image=/opt/torch.sif", IMAGE),
    ],
    "environment.wheelhouse": [
        Case("/opt/wheels", SITE, "site", "/opt/wheels"),
        Case("/opt/wheels", MACHINES, "changes", "/opt/wheels"),
        Case("/opt/wheels", PRACTICE, "practice", "wheelhouse='/opt/wheels'"),
    ],
    "environment.packages": [
        Case(["einops==0.8.1"], SITE, "site", "einops==0.8.1"),
        Case(["einops==0.8.1"], MACHINES, "changes", "einops==0.8.1"),
        Case(["torch==2.12.0"], MACHINES, "changes", "- torch==2.13.0"),
        Case(["einops==0.8.1"], SITE, REFUSED, "environment.packages: not allowed with use", {"environment.use": "/opt/conda"}),
        Case(["einops"], SITE, REFUSED, "environment.packages"),
    ],
    "environments": [
        Case({"other": {"modules": ["python/3.12"]}}, SITE, "site", "environment other: make a Python environment"),
        Case({"other": {}}, MACHINES, "changes", "environment other: install the packages"),
        Case({"other": {"runtime": "pyxis"}}, SITE, REFUSED, "environments.other: container and runtime belong together"),
        Case({"other": {"python": "/opt/bin/python3"}}, MACHINES, REFUSED, "environments.other.python: not allowed with"),
        Case({"other": {"wheelhouse": "/opt/wheels"}}, PRACTICE, REFUSED, "environments.other.wheelhouse: not allowed with"),
        Case({"other": {"wheelhouse": "/proj/wheels"}}, LAB, REFUSED, "environments.other.wheelhouse: found /proj/wheels"),
        Case({"other": {"packages": ["einops==0.8.1"]}}, {"provider": "local"}, REFUSED, "Allowed with provider local: use"),
        Case(
            {"Other": {"use": "/opt/other"}}, {"provider": "local"}, REFUSED,
            "environments.Other: found the text 'Other'. Allowed: up to 31 small letters, digits and hyphens",
        ),
    ],
    "slurm.partition": [
        Case("gpu,gpu-long", SITE, "job", "--partition=gpu,gpu-long"),
        Case("a,b", MACHINES, REFUSED, "one name"),
        Case("gpu", SITE, "job", "--partition=gpu"),
        Case("gpu", SITE, "site", "--partition=gpu"),
    ],
    "slurm.account": [Case("lab", SITE, "job", "--account=lab"), Case("lab", SITE, "site", "--account=lab")],
    "slurm.qos": [Case("high", SITE, "job", "--qos=high"), Case("high", SITE, "site", "--qos=high")],
    "slurm.cluster": [Case("cm4", SITE, "job", "--clusters=cm4"), Case("cm4", SITE, "site", "--clusters=cm4")],
    "slurm.constraint": [
        *(Case(text, SITE, "job", f"--constraint={text}\n") for text in ("[a5000|a6000]", "(a|b)&ib", "-x", "a*2")),
        *(Case(text, SITE, REFUSED, "printable ASCII") for text in ("a b", "a\nb", "$(x)", "`x`", "a\\b", "")),
        Case("hbm", SITE, "job", "--constraint=hbm"),
        Case("hbm", SITE, "site", "--constraint=hbm"),
    ],
    "slurm.licenses": [Case("fs", SITE, "job", "--licenses=fs"), Case("fs", SITE, "site", "--licenses=fs")],
    "slurm.gpu_request": [
        Case("gres", SITE, "job", "--gres=gpu:a100:4"),
        Case("gres", SITE, "site", "--gres=gpu:a100:4"),
        Case("gpus", SITE, "job", "--gpus=a100:8"),
        Case("gpus", SITE, "site", "--gpus=a100:8"),
        Case("none", SITE, "job", "- --gpus-per-node"),
        Case("none", SITE, "site", "- --gpus-per-node"),
    ],
    "slurm.omit": [
        *(Case([name], SITE, "job", f"- --{name}") for name in ("exclusive", "mem", "export", "open-mode", "requeue")),
        *(Case([name], SITE, "site", f"- --{name}") for name in ("exclusive", "mem", "export", "ntasks-per-node")),
        Case(["cpus-per-task"], SITE | {"slurm": {"exclusive": False}}, "job", "- --cpus-per-task"),
    ],
    "slurm.provision.partition": [Case("compil", SITE, "site", "#SBATCH --partition=compil")],
    "slurm.provision.account": [Case("free", SITE, "site", "#SBATCH --account=free")],
    "slurm.provision.qos": [
        Case("debug", SITE, "site", "#SBATCH --qos=debug"),
        Case("debug", SITE, "site", "batch --qos=debug --nodes=2"),
    ],
    "slurm.provision.constraint": [Case("cpu", SITE, "site", "#SBATCH --constraint=cpu")],
    "slurm.provision.gpus": [Case(0, SITE, "site", "- #SBATCH --gpus-per-node"), Case(2, SITE, "site", "=a100:2\n")],
    "slurm.provision.time": [Case("00:07:00", SITE, "site", "#SBATCH --time=7\n")],
    "slurm.provision.extra": [Case({"reservation": "r"}, SITE, "site", "#SBATCH --reservation=r")],
    "slurm.time": [
        *(Case(text, SITE, "job", f"--time={minutes}") for text, minutes in SBATCH_TIMES.items()),
        Case("UNLIMITED", SITE, REFUSED, "a run needs an end"),
        Case("soon", SITE, REFUSED, "as sbatch reads it"),
        Case("0", SITE, REFUSED, "one second"),
        Case("02:00:00", SITE, "job", "--time=123")],
    "slurm.max_time": [
        Case("UNLIMITED", SITE | {"slurm": {"max_time": "01:00:00"}}, "job", "--time=63"),
        Case("01:00:00", SITE, "job", "--time=60"),
        Case("01:00:00", SITE, "prediction", "limit_s=3600"),
    ],
    "slurm.max_nodes": [Case(3, SITE, "prediction", "nodes=3"), Case(1, TWO_WORKERS, "prediction", "nodes=1")],
    "slurm.partitions.name": [Case("huge", SITE, "typed_job", "--partition=huge", {"slurm.partitions": [H100]})],
    "slurm.partitions.gpus.per_node": [Case(16, SITE, "prediction", "gpus_per_node=16", {"slurm.partitions": [H100]})],
    "slurm.partitions.gpus.type": [Case("h100", SITE, "typed_job", "=h100:4", {"slurm.partitions": [H100]})],
    "slurm.partitions.gpus.memory_gib": [Case(1, SITE, "prediction", str(2**30), {"slurm.partitions": [H100]})],
    "slurm.partitions.max_time": [Case("01:00:00", SITE, "typed_job", "--time=60", {"slurm.partitions": [H100]})],
    "slurm.partitions.max_nodes": [Case(7, SITE, "prediction", "nodes=7", {"slurm.partitions": [H100]})],
    "slurm.exclusive": [Case(False, SITE, "job", "--cpus-per-task=32"), Case(False, SITE, "site", "- --exclusive")],
    "slurm.cpus_per_rank": [Case(6, SITE, "job", "--cpus-per-task=24", {"slurm.exclusive": False})],
    "slurm.mem": [
        Case("1.5T", SITE, REFUSED, "Slurm reads no 1.5T"),
        Case("120g", SITE, "job", "--mem=120g"),
        Case("120G", SITE, "job", "--mem=120G"),
        Case("120G", SITE, "site", "--mem=120G"),
    ],
    "slurm.exclude": [
        Case(["gpu[01-04]"], SITE, "job", "--exclude=gpu[01-04]"),
        Case(["n7", "n8"], SITE, "job", "--exclude=n7,n8"),
        Case(["n7"], SITE, "site", "--exclude=n7"),
    ],
    "slurm.setup": [
        Case(["source /etc/x"], SITE, "site", "source /etc/x"),
        Case(["source /etc/x"], MACHINES, REFUSED, "slurm.setup: not allowed with provider ssh"),
    ],
    "slurm.requeue": [Case(7, SITE, "job", '"requeues":7')],
    "slurm.extra": [
        Case({"reservation": "r"}, SITE, "job", "--reservation=r"),
        Case({"reservation": "r"}, SITE, "site", "--reservation=r"),
        Case({"spread-job": None}, SITE, "job", "--spread-job\n"),
        Case({"spread-job": None}, SITE, "site", "--spread-job"),
        Case({"nice": 100}, SITE, "job", "--nice=100\n"),
        Case({"comment": "two words"}, SITE, "job", '--comment="two words"\n'),
        Case({"container-mounts": "/fsx:/fsx"}, SITE, "job", "--container-mounts=/fsx:/fsx\n"),
        Case({"mem-per-cpu": "4G"}, SITE, "job", "- --mem=0"),
        Case({"exclusive": "user"}, SITE, "job", "--exclusive=user", {"slurm.omit": ["exclusive"]}),
        Case({"exclusive": "user"}, SITE, REFUSED, "or this one together with `omit: [exclusive]`"),
        Case({"gres": "gpu:2,nvme:1"}, SITE, "job", "--gres=gpu:2,nvme:1", {"slurm.gpu_request": "none"}),
        Case({"comment": "a\n#SBATCH --wait"}, SITE, REFUSED, "without quotes and the signs"),
        Case({"comment": '"'}, SITE, REFUSED, "without quotes and the signs"),
        Case({"comment": "a #b"}, SITE, REFUSED, "without quotes and the signs"),
        Case({"Spread_job": None}, SITE, REFUSED, "slurm.extra.Spread_job: found the text 'Spread_job'"),
    ],
    "data.path": [Case("/srv/data", SITE, "job", '"data_path":"/srv/data"')],
    "data.sets": [Case([name], SITE, "sets", f'"{name}"') for name in get_args(DataSetName)],
    "data.sets.name": [Case(name, SITE, "sets", f'"{name}"', {"data.sets": [{}]}) for name in get_args(DataSetName)],
    "data.sets.archive": [Case("/srv/a.tar", SITE, "sets", "/srv/a.tar", {"data.sets": [{"name": "mnist"}]})],
    "data.sets.sha256": [Case(SHA, SITE, "sets", SHA, {"data.sets": [{"name": "mnist", "archive": "https://a.example/x"}]})],
    "data.stage": [Case("node", SITE, "job", '"data_stage":"node"')],
    "network.link": [Case(name, SITE, "prediction", f"'{name}'") for name in get_args(LinkName)],
    "network.between_nodes": [Case(name, SITE, "prediction", f"'{name}']") for name in get_args(LinkName)],
    "network.between_nodes.gb_per_s": [Case(11.5, SITE, "prediction", "network of 11.5 GB/s", {"network.between_nodes": {}})],
    "network.cards_per_node": [Case(8, SITE, "prediction", "8 cards per node", {"network.between_nodes": "infiniband-ndr"})],
    "price_per_gpu_hour": [Case(2.5, SITE, "prediction", "cost=PredictedRange", {"network.between_nodes": "ethernet-100"})],
}  # fmt: skip
TABLE = [(key, case) for key, cases in CASES.items() for case in cases]


def with_keys(file: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """A copy of the content of a file with these dotted keys; a key of a list is written into its last entry."""
    made = copy.deepcopy(file)
    for key, value in keys.items():
        *parents, last = key.split(".")
        place = made
        for parent in parents:
            place = place.setdefault(parent, {})
            place = place[-1] if isinstance(place, list) else place
        place[last] = value
    return made


def effect(name: str, file: dict[str, Any], folder: Any) -> str:
    """The effect of a cluster file as text; for REFUSED the message, or an empty text if the file is accepted."""
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({"schema": 1, "name": "bench"} | file))
    if name != REFUSED:
        return EFFECTS[name](cluster.load_cluster(path), Workspace(folder))
    try:
        cluster.load_cluster(path)
    except InputError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def a_machine(monkeypatch):
    """This machine has another release of Debian than all releases that a cluster file may name. The commit and the packages
    of each record of a run are not searched again, which takes long."""
    monkeypatch.setattr(base, "read_os_release", lambda: {"ID": "debian", "VERSION_CODENAME": "other"})
    monkeypatch.setattr(host, "read_git_commit", lambda: None)
    monkeypatch.setattr(host, "read_package_versions", dict)


@pytest.mark.parametrize("name", [*EFFECTS, REFUSED])
def test_keys_of_a_cluster_file_have_their_effects(tmp_path, name):
    without = functools.cache(lambda file: effect(name, json.loads(file), tmp_path))
    wrong = []
    for key, case in TABLE:
        if case.effect == name:
            changed = effect(name, with_keys(case.file, case.also | {key: case.value}), tmp_path)
            text, goes = case.text.removeprefix("- "), case.text.startswith("- ")
            before = without(json.dumps(case.file))
            if before == changed or (text != DIFFERS and (text in before, text in changed) != (goes, not goes)):
                wrong.append((key, case.value, case.text, changed))
    assert wrong == []


def keys_of(kind: Any, path: str = "") -> dict[str, set[Any]]:
    """Each key below a type of the cluster file, with the values that a Literal or bool allows, without the default."""
    keys: dict[str, set[Any]] = {}
    for part in (kind, *get_args(kind)):
        if get_origin(part) is Literal:
            keys.setdefault(path, set()).update(get_args(part))
        elif part is bool:
            keys.setdefault(path, set()).update((True, False))
        elif isinstance(part, type) and issubclass(part, msgspec.Struct):
            for field in msgspec.structs.fields(part):
                for key, values in keys_of(field.type, f"{path}.{field.encode_name}".lstrip(".")).items():
                    keys.setdefault(key, set()).update(value for value in values if value != field.default)
        elif get_args(part) and part is not kind:
            for key, values in keys_of(part, path).items():
                keys.setdefault(key, set()).update(values)
    return keys or {path: set()}


def test_each_key_and_each_allowed_value_of_a_cluster_file_is_in_the_table():
    keys = {key: values for key, values in keys_of(Cluster).items() if not key.startswith("environments.")}
    keys["environments"] = set()  # its values are of the same type as `environment`
    assert set(CASES) == set(keys)
    written = {key: {value for case in cases for value in values_of(case)} for key, cases in CASES.items()}
    lacking = {key: values - written[key] for key, values in keys.items() if values - written[key]}
    assert lacking == {"schema": {1}}  # each file of the table has this value


def metas_of(kind: Any) -> list[msgspec.Meta]:
    """The rules for the values below a type of a file."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [meta for field in msgspec.structs.fields(kind) for meta in metas_of(field.type)]
    return [kind] if isinstance(kind, msgspec.Meta) else [meta for part in get_args(kind) for meta in metas_of(part)]


@pytest.mark.parametrize("kind", [Cluster, MatrixFile, Draft, ModelFile, ModelByConfiguration])
def test_each_text_that_must_match_a_pattern_has_words_that_say_what_is_allowed(kind):
    assert [meta.pattern for meta in metas_of(kind) if meta.pattern is not None and not (meta.extra or {}).get("allowed")] == []


def values_of(case: Case) -> list[Any]:
    """The values that a case writes; for a list, its entries."""
    values = case.value if isinstance(case.value, list) else [case.value]
    return [value for value in values if isinstance(value, (str, int, float))]
