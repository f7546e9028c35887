"""cluster.yaml is validated: all problems of the file are reported together, each with its line and the allowed values."""

from pathlib import Path

import pytest

from shardlab.cluster import cluster
from shardlab.errors import InputError


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_the_examples_of_sites_are_clusters():
    """Other tests load the other examples."""
    examples = sorted(Path("examples/sites").glob("*.yaml"))
    assert len(examples) > 1
    assert [path for path in examples if cluster.load_cluster(path).provider != "slurm"] == []


A100 = "{name: a, gpus: {per_node: 4, type: a100}}"
SITE = "schema: 1\nname: site\nprovider: slurm\nslurm: {partition: gpu}\nstorage: {shared: /scratch/a}\n"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (SITE.replace("slurm: {partition: gpu}\n", ""), "3:11: provider: provider slurm needs the key slurm."),
        (SITE.replace("storage: {shared: /scratch/a}\n", ""), "3:11: provider: provider slurm needs storage.shared."),
        (SITE + "nodes: [{name: a}]\n", "nodes: not allowed with provider slurm"),
        (SITE + "release: sid\n", "release: not allowed with provider slurm"),
        ("schema: 1\nname: a\nprovider: local\nrelease: sid\n", "release: not allowed with provider local"),
        (
            "schema: 1\nname: a\nprovider: ssh\nnodes: [{name: a, host: b}]\nrelease: sid\n",
            "release: not allowed with provider ssh, whose machines already exist.",
        ),
        (SITE.replace("shared: /scratch/a", "shared: /scratch/a, disk: /dev/sdb"), "disk: not allowed with provider slurm"),
        (
            SITE.replace("partition: gpu", "partitions: [{name: a, gpus: {per_node: 4}}]"),
            "slurm.partitions[0].gpus: the key type is missing",
        ),
        (
            SITE.replace("partition: gpu", f"partitions: [{A100}, {A100}]"),
            "slurm.partitions[1].gpus.type: another partition has the type a100",
        ),
        (
            SITE.replace("partition: gpu", f'partitions: [{A100[:-1]}, max_time: "00:30:00"}}]'),
            "found 00:30:00. Allowed: slurm.time, 01:00:00, or more",
        ),
        (
            SITE.replace("partition: gpu", 'partition: gpu, time: "03:00:00", max_time: "02:00:00"'),
            "at most max_time, which is 02:00:00",
        ),
        (SITE.replace("partition: gpu", "partition: gpu, setup: ['']"), "one line of shell with printable characters"),
        (
            SITE.replace("partition: gpu", "partition: gpu, extra: {gpus: '4'}"),
            "gpus is not allowed, because `jobs` controls it",
        ),
        *(
            (
                SITE.replace("gpu}", f"gpu, extra: {{{name}: cm4}}}}"),
                f"slurm.extra.{name}: {name} is not allowed, because `jobs` controls it. Allowed: the key slurm.cluster.",
            )
            for name in ("clusters", "cluster", "M")
        ),
        *(
            (SITE.replace("gpu}", f"gpu, cluster: {name!r}}}"), "4:34: slurm.cluster: found ")
            for name in ("cm4,inter", "all", "$(id)", "-x", "")
        ),
        (
            SITE.replace("provider: slurm", "provider: virtual").replace("gpu}", "gpu, cluster: cm4}")
            + "nodes: [{name: a, roles: [controller]}, {name: b}]\n",
            "slurm.cluster: not allowed with provider virtual, whose Slurm has one cluster",
        ),
        (
            SITE.replace("provider: slurm", "provider: virtual") + "login: {host: a}\nnodes: [{name: a}]\n",
            "only with provider slurm",
        ),
        (SITE + "environment: {container: /a.sif}\n", "environment: container and runtime belong together"),
        (SITE + "environment: {runtime: pyxis}\n", "environment: container and runtime belong together"),
        (
            SITE + "environment: {container: /a.sif, runtime: docker}\n",
            "runtime: found the text 'docker'. Allowed: apptainer, pyxis",
        ),
        (
            SITE + "environment: {container: 'docker://a', runtime: apptainer}\n",
            "environment.container: found docker://a. Allowed with the runtime apptainer: the absolute path of an image",
        ),
        (SITE + "environment: {container: /a, runtime: apptainer, use: /b}\n", "environment.use: not allowed with container"),
        (SITE + "environment: {container: '/a,b', runtime: apptainer}\n", "environment.container: "),
        (
            SITE + "environment: {container: /a, runtime: pyxis}\ndata: {path: '/b,/etc:/etc'}\n",
            "data.path: found /b,/etc:/etc. Allowed with a container",
        ),
        (
            SITE.replace("provider: slurm", "provider: virtual") + "environment: {runtime: pyxis}\nnodes: [{name: a}]\n",
            "environment.runtime: not allowed with provider virtual",
        ),
    ],
)
def test_contradicting_keys_of_a_site_are_refused(tmp_path, changed, why):
    """Keys of a site that contradict each other are refused."""
    with pytest.raises(InputError) as caught:
        cluster.load_cluster(write(tmp_path, changed))
    assert why in str(caught.value)


def test_all_mistakes_of_a_cluster_file_are_reported_at_once(tmp_path):
    path = write(tmp_path, "schema: 2\nname: Foo Bar\nprovider: slurn\nproivder: local\ndata: {path: 7}\n")
    with pytest.raises(InputError) as caught:
        cluster.load_cluster(path)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(f"{path}:").split(": ")[0:2] for line in lines] == [
        ["1:9", "schema"],
        ["2:7", "name"],
        ["3:11", "provider"],
        ["4:1", "proivder"],
        ["5:14", "data.path"],
    ]
    assert "Allowed: 1." in lines[0]
    assert "Allowed: local, ssh, virtual, slurm, cloudlab." in lines[2]
    assert "Did you mean 'provider'? Allowed here: cloudlab, data, environment, environments, gpus, lan," in lines[3]
    assert "expected text, found the number 7" in lines[4]


def test_missing_keys_and_values_of_a_wrong_type_are_refused(tmp_path):
    with pytest.raises(InputError, match="the key 'provider' is missing"):
        cluster.load_cluster(write(tmp_path, "schema: 1\nname: a\n"))
    with pytest.raises(InputError, match="expected a mapping, found a list"):
        cluster.load_cluster(write(tmp_path, "- 1\n"))
    for nothing in ("", "\n", "# only a comment\n"):  # the shell leaves an empty file if `provision init > cluster.yaml` fails
        with pytest.raises(InputError, match=r"cluster.yaml: the file has no keys\. To get .* init > cluster\.yaml$"):
            cluster.load_cluster(write(tmp_path, nothing))
    with pytest.raises(InputError, match=r"gone\.yaml: no such file\. To get a .*, run: provision init > cluster\.yaml$"):
        cluster.load_cluster(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="found an empty path"):
        cluster.load_cluster(write(tmp_path, "schema: 1\nname: a\nprovider: local\ndata: {path: ' '}\n"))


def test_without_a_file_the_cluster_is_this_machine(tmp_path):
    assert cluster.find_cluster(None, tmp_path) == cluster.THIS_MACHINE
    write(tmp_path, "schema: 1\nname: mine\nprovider: local\n")
    assert cluster.find_cluster(None, tmp_path).name == "mine"


def test_a_dangling_link_is_not_taken_for_absence(tmp_path):
    (tmp_path / "cluster.yaml").symlink_to(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="is a symlink to a file that does not exist"):
        cluster.find_cluster(None, tmp_path)


SHA = "0" * 64


def test_data_sets_are_named_shortly_or_with_where_they_come_from(tmp_path):
    sets = f"[mnist, {{name: cifar10, archive: 'https://a.org/x', sha256: {SHA!r}}}, {{name: imagenet, archive: ~/in}}]"
    found = cluster.load_cluster(
        write(tmp_path, f"schema: 1\nname: a\nprovider: local\ndata: {{sets: {sets}}}\n")
    ).data.list_data_sets()
    assert [(one.name, one.archive, one.sha256, one.is_url) for one in found] == [
        ("mnist", None, None, False),
        ("cifar10", "https://a.org/x", SHA, True),
        ("imagenet", "~/in", None, False),
    ]


@pytest.mark.parametrize(
    ("sets", "where", "why"),
    [
        ("[cifar]", "4:15: data.sets[0]", "found the text 'cifar'. Allowed: cifar10, mnist, imagenet."),
        ("[7]", "4:15: data.sets[0]", "found the number 7. Allowed: cifar10"),
        ("[{name: cifar}]", "4:22: data.sets[0].name", "Allowed: cifar10, mnist, imagenet."),
        ("[{archive: x}]", "4:15: data.sets[0]", "the key 'name' is missing."),
        ("[{name: mnist, url: x}]", "4:29: data.sets[0].url", "unknown key. Allowed here: archive, name, sha256."),
        ("[mnist, {name: mnist, archive: x}]", "4:22: data.sets[1]", "the data set mnist is listed twice."),
        ("[{name: mnist, archive: ' '}]", "4:38: data.sets[0].archive", "found an empty path."),
        ("[{name: mnist, archive: 'https://a.org/x'}]", "4:15: data.sets[0]", "a URL without a checksum."),
        ("[{name: mnist, archive: 'ftp://a.org/x'}]", "4:38: data.sets[0].archive", "Allowed: http://, https://, or a path."),
        ("[{name: mnist, archive: 'file:///etc/x'}]", "4:38: data.sets[0].archive", "Allowed: http://, https://, or a path."),
        ("[{name: mnist, archive: 'https://me:pw@a.org/x'}]", "4:38: data.sets[0].archive", "a user or password in it"),
        ("[{name: mnist, archive: x, sha256: beef}]", "4:49: data.sets[0].sha256", "64 hexadecimal digits"),
        (f"[{{name: mnist, sha256: {SHA!r}}}]", "4:37: data.sets[0].sha256", "a checksum without an archive."),
    ],
)
def test_data_sets_that_cannot_be_staged_are_refused_at_their_place(tmp_path, sets, where, why):
    path = write(tmp_path, f"schema: 1\nname: a\nprovider: local\ndata: {{sets: {sets}}}\n")
    with pytest.raises(InputError) as refusal:
        cluster.load_cluster(path)
    assert str(refusal.value).startswith(f"{path}:{where}: ")
    assert why in str(refusal.value)


REMOTE = "schema: 1\nname: bench\nprovider: PROVIDER\nnodes: [{name: head, host: 10.0.0.1}]\nstorage: STORAGE\n"


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ("{disk: /dev/sdb}", "disk and mount belong together"),
        ("{mount: /mydata}", "disk and mount belong together"),
        ("{server: head}", "a server without a folder"),
        ("{shared: /mydata, server: tail}", "no node is called tail"),
        ("{disk: /dev/sdb, mount: /usr/share}", "found /usr/share. Allowed: a path outside the system's folders"),
        ("{disk: /dev/sdb, mount: /my/../etc}", "found /my/../etc"),
        ("{disk: /dev/sdb, mount: //etc}", "found //etc"),
        ("{shared: /etc/, server: head}", "found /etc/"),
        ("{disk: '/dev/sdb; rm', mount: /mydata}", "storage.disk"),
        ("{disk: sdb, mount: /mydata}", "storage.disk"),
    ],
)
def test_contradicting_keys_of_storage_are_refused(tmp_path, storage, says):
    """Wrong or dangerous values below the key `storage` are refused."""
    path = write(tmp_path, REMOTE.replace("STORAGE", storage).replace("PROVIDER", "ssh"))
    with pytest.raises(InputError) as caught:
        cluster.load_cluster(path)
    assert says in str(caught.value)


def test_all_keys_of_storage_together_are_accepted(tmp_path):
    """All keys of `storage` together are accepted, but the provider `virtual` refuses disks."""
    text = REMOTE.replace("STORAGE", "{shared: /mydata/bench, server: head, disk: /dev/disk/by-id/nvme-x, mount: /mydata}")
    assert cluster.load_cluster(write(tmp_path, text.replace("PROVIDER", "ssh"))).storage.server == "head"
    practice = text.replace("PROVIDER", "virtual").replace(", host: 10.0.0.1", "")
    with pytest.raises(InputError, match="provider virtual has no disks"):
        cluster.load_cluster(write(tmp_path, practice))
