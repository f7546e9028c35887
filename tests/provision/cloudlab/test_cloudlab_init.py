"""`provision init --cloudlab` writes a cluster file from the manifests of an experiment, and asks for keys that they lack."""

import pytest
from support_cloudlab import lan, manifest, node

from provision import cli
from provision.facts import mkextrafs
from shardlab.cluster import cluster
from shardlab.cluster.slurm_keys import Gpus
from shardlab.errors import InputError

STORE = '<emulab:blockstore name="bs" mountpoint="/mydata" class="local" size="0GB"/>'


@pytest.fixture
def alice(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "alice")


def experiment(*nodes: str, **keys: object) -> str:
    return manifest(*nodes, lan(["gpu0", "gpu1"]), **keys)


TWO = experiment(node("gpu0", 1, more=STORE), node("gpu1", 2, more=STORE))


def proposed(tmp_path, capsys, *manifests: str) -> tuple[str, cluster.Cluster]:
    """Run `provision init --cloudlab` on manifests. Returns the cluster file that it prints, as text and as a Cluster."""
    names = []
    for place, text in enumerate(manifests):
        names.append(str(tmp_path / f"manifest{place}.xml"))
        (tmp_path / f"manifest{place}.xml").write_text(text)
    assert cli.main(["init", "--workspace", str(tmp_path), "--cloudlab", *names]) == 0
    text = capsys.readouterr().out
    (tmp_path / "cluster.yaml").write_text(text)
    return text, cluster.load_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize("words", ["a.xml b.xml", "a.xml,b.xml", "a.xml, b.xml"])
@pytest.mark.parametrize("line", ["init --cloudlab {}", "--cloudlab {} init"])
def test_manifests_are_separated_by_spaces_or_commas_and_a_verb_is_no_manifest(line, words):
    arguments = cli.parser().parse_args(line.format(words).split())
    assert (arguments.verb.name, arguments.cloudlab) == ("init", ["a.xml", "b.xml"])


def test_a_manifest_becomes_a_cluster_file(tmp_path, capsys, alice):
    text, made = proposed(tmp_path, capsys, TWO)
    assert (made.name, made.provider) == ("bench", "cloudlab")
    assert (made.ssh.user, made.ssh.host_keys) == ("alice", "accept-new")
    assert [(one.name, one.host, one.address, one.mac, one.control) for one in made.nodes] == [
        ("gpu0", "d8545-sample1.wisc.cloudlab.us", "10.10.1.2", "0a:0b:0c:0d:00:01", "192.0.2.2"),
        ("gpu1", "d8545-sample2.wisc.cloudlab.us", "10.10.1.3", "0a:0b:0c:0d:00:02", "192.0.2.3"),
    ]
    assert made.gpus == Gpus(4, "a100", 40)
    assert (made.storage.shared, made.storage.server) == ("/mydata/shardlab", "gpu0")
    assert made.slurm.partition == "gpu"
    assert "# The experiment ends at 2031-05-02T18:00:00Z" in text
    assert "of the members: alice, bob" in text
    assert "each experiment has new host keys" in text
    assert "gpu1: d8545-sample2.wisc.cloudlab.us, d8545 at wisc.cloudlab.us, 4 x A100, trains on 10.10.1.3" in text


def test_a_user_who_is_no_member_is_asked_to_choose_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    (tmp_path / "m.xml").write_text(TWO)
    assert cli.main(["init", "--workspace", str(tmp_path), "--cloudlab", str(tmp_path / "m.xml")]) == 0
    text = capsys.readouterr().out
    assert "user: CHANGE-ME             # choose your login: alice, bob\n" in text
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(InputError, match=r"CHANGE-ME has no login on every node. Set .* alice, bob"):
        cluster.load_cluster(tmp_path / "cluster.yaml")


def test_the_only_member_is_the_user(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    _, made = proposed(tmp_path, capsys, manifest(node("gpu0", 1, users=("carol",))))
    assert made.ssh.user == "carol"


def test_keys_that_the_manifest_leaves_open_are_left_for_the_user(tmp_path, capsys, alice):
    nameless = [
        node(name, at, hardware="g893").replace(f"{name}.bench.", "other.") for at, name in enumerate(["gpu0", "gpu1"], 1)
    ]
    text, made = proposed(tmp_path, capsys, experiment(*nameless, expires=None))
    assert 'name: "experiment"          # choose:' in text
    assert "does not say when the experiment ends" in text
    assert "does not know the GPUs of g893 at wisc.cloudlab.us" in text
    assert made.gpus is None
    assert made.storage.shared == "/srv/shardlab"


def test_gpus_that_the_default_torch_does_not_support_are_reported(tmp_path, capsys, alice):
    text, made = proposed(tmp_path, capsys, manifest(node("gpu0", 1, hardware="c240g5")))
    assert made.gpus == Gpus(1, "p100", 12)
    assert "does not support its P100 GPUs; it needs wheels of torch for CUDA 12.6" in text
    kepler = manifest(node("gpu0", 1, hardware="c4130", site="clemson.cloudlab.us"))
    assert "does not support its K40m GPUs; and no other build does" in proposed(tmp_path, capsys, kepler)[0]


def test_nodes_of_two_sites_have_the_gpus_that_all_of_them_have(tmp_path, capsys, alice):
    wisc = experiment(node("gpu0", 1))
    clemson = experiment(node("gpu1", 2, site="clemson.cloudlab.us", hardware="r7525"), expires="2031-05-01T18:00:00Z")
    text, made = proposed(tmp_path, capsys, wisc, clemson)
    assert made.gpus == Gpus(2, None, None)
    assert len(made.cloudlab.manifests) == 2
    assert "ends at 2031-05-01T18:00:00Z" in text


def test_a_host_name_or_mount_point_with_shell_code_is_refused(tmp_path, capsys, alice):
    """A name in a manifest that contains shell code is refused, because the name is used in commands."""
    hostile = TWO.replace("gpu0.bench.", "gpu0.$(reboot).")
    (tmp_path / "m.xml").write_text(hostile)
    assert cli.main(["init", "--workspace", str(tmp_path), "--cloudlab", str(tmp_path / "m.xml")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "gpu0: the name of the host is" in said.err
    (tmp_path / "m.xml").write_text(TWO.replace('mountpoint="/mydata"', 'mountpoint="/mydata; reboot"'))
    assert cli.main(["init", "--workspace", str(tmp_path), "--cloudlab", str(tmp_path / "m.xml")]) == 2
    assert "the mount point of a blockstore is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["init", "--ssh", "a", "--cloudlab", "m.xml"], "describe different clusters"),
        (["plan", "--cloudlab", "m.xml"], "--cloudlab belongs to the verb init"),
        (["init", "--cloudlab", "none.xml"], "No such file"),
    ],
)
def test_contradicting_options_of_init_are_refused(words, says, tmp_path, capsys):
    try:
        code = cli.main(["--workspace", str(tmp_path), *words])
    except SystemExit as ended:  # argparse raises it for wrong words
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err


FOLDERS = "schema: 1\nname: bench\nprovider: cloudlab\ncloudlab: {hardware: d8545}\n"


@pytest.mark.parametrize("path", ["/proj/myproj/x", "/users/alice", "/users", "/local/../users/alice", "//proj/x"])
@pytest.mark.parametrize(
    "key",
    [
        "storage: {shared: PATH}",
        "data: {path: PATH}",
        "environment: {wheelhouse: PATH}",
        "storage: {disk: /dev/sdb, mount: PATH}",
    ],
)
def test_folders_on_the_control_network_are_refused(path, key, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(FOLDERS + key.replace("PATH", path) + "\n")
    with pytest.raises(
        InputError, match=r"cluster.yaml:5.*/proj and /users, where home folders are, are NFS over the control network"
    ):
        cluster.load_cluster(file)
    file.write_text(FOLDERS + key.replace("PATH", "/projects/x") + "\n")
    cluster.load_cluster(file)


def test_a_data_path_below_the_home_folder_is_refused(tmp_path):
    """On CloudLab, home folders are on the control network, so a data path below `~` is refused too."""
    (tmp_path / "cluster.yaml").write_text(FOLDERS + "data: {path: ~/data}\n")
    with pytest.raises(InputError, match=r"found ~/data\. On CloudLab"):
        cluster.load_cluster(tmp_path / "cluster.yaml")


def test_addresses_of_an_experiment_belong_to_its_provider(tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        "schema: 1\nname: bench\nprovider: ssh\nnodes: [{name: a, host: a, control: 10.0.0.1}]\n"
    )
    with pytest.raises(InputError, match="mac and control are not allowed with provider ssh"):
        cluster.load_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(("text", "there"), [("yes\n", True), ("no\n", False)])
def test_the_fact_about_the_program_for_unused_space_is_parsed(text, there):
    """The answer of the fact about the program mkextrafs.pl is parsed."""
    assert mkextrafs.parse(text) is there


def test_an_unknown_answer_about_the_program_for_unused_space_is_refused():
    with pytest.raises(ValueError, match="not yes or no"):
        mkextrafs.parse("sh: not found")
