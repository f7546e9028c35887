"""A data set is staged completely or not at all, only once, from the source in cluster.yaml. Malicious archives are refused."""

import gzip
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support_datasets import (
    CIFAR,
    Server,
    cifar_members,
    cifar_records,
    idx,
    imagenet_members,
    mnist_members,
    put,
    sha256,
    tar,
)
from support_e2e import HANG_S

from provision.cli import main
from provision.datasets import archive, download, stage
from provision.datasets.stage import StageRequest
from provision.fact import FactAnswers, Unanswered
from provision.nodes.login_node import LocalLoginNode
from provision.operation import Site, Target
from provision.operations import datasets
from shardlab.cluster import cluster as cluster_file
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.cluster_keys import Data, DataSet, Storage
from shardlab.cluster.environment_keys import Environment
from shardlab.cluster.slurm_keys import Slurm
from shardlab.errors import InputError, ShardlabError
from shardlab.remote import remote_workspace
from shardlab.remote.remote import CommandOutput
from shardlab.workspace.workspace import Workspace


def wanted(folder, name="cifar10", source=None, sha256=None):
    return StageRequest(str(folder / "data"), name, None if source is None else str(source), sha256)


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "members", "kept"),
    [
        ("cifar10", cifar_members(), f"{CIFAR}/"),
        ("mnist", mnist_members(), ""),
        ("mnist", {f"./raw/{name}": content for name, content in mnist_members(zipped=False).items()}, "./raw/"),
        ("imagenet", imagenet_members(), ""),
        ("imagenet", {f"./mine/{name}": content for name, content in imagenet_members().items()}, "./mine/"),
    ],
)
def test_an_archive_becomes_the_set_and_a_second_time_there_is_nothing_to_do(tmp_path, name, members, kept, zipped):
    made = tar(tmp_path / "set.tar", members, zipped=zipped)
    want = wanted(tmp_path, name, made, sha256(made))
    assert stage.inspect_data_set(want).says.startswith("unpack ")
    assert not (tmp_path / "data").exists()
    assert stage.stage_data_set(want).ready
    folder = tmp_path / "data" / {"cifar10": CIFAR}.get(name, name)
    assert tree(folder) == {path.removeprefix(kept): content for path, content in members.items()}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    assert stage.stage_data_set(want) == stage.inspect_data_set(want) == stage.DataSetState(True, True, f"{folder} is staged")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before
    assert {path.name for path in (tmp_path / "data" / ".staging").iterdir()} == {f"{name}.lock", f"{name}.json"}


def member(name, kind=tarfile.REGTYPE, **keys):
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in keys.items():
        setattr(info, key, value)
    return info


HOSTILE = [
    ("an absolute path", [member("/etc/passwd")], "the member '/etc/passwd' has an absolute path"),
    ("a way out", [member(f"{CIFAR}/../../x")], f"the member '{CIFAR}/../../x' leads out of its folder"),
    ("a folder that is a way out", [member("../x", tarfile.DIRTYPE)], "the member '../x' leads out of its folder"),
    ("a link", [member(f"{CIFAR}/readme.html", tarfile.SYMTYPE, linkname="/etc/passwd")], "is a symbolic link"),
    ("a hard link", [member(f"{CIFAR}/readme.html", tarfile.LNKTYPE, linkname="x")], "is a hard link"),
    ("a device", [member(f"{CIFAR}/readme.html", tarfile.BLKTYPE)], "is a block device"),
    ("a pipe", [member(f"{CIFAR}/readme.html", tarfile.FIFOTYPE)], "is a pipe"),
    ("holes", [member(f"{CIFAR}/readme.html", tarfile.GNUTYPE_SPARSE)], "is a sparse file"),
    ("a stranger", [member(f"{CIFAR}/run.sh")], f"'{CIFAR}/run.sh' does not belong to this set. Allowed: {CIFAR}/ with"),
    ("a pickle", [member("cifar-10-batches-py/data_batch_1")], "does not belong to this set"),
    ("the same twice", [member(f"{CIFAR}/test_batch.bin")], f"the member '{CIFAR}/test_batch.bin' occurs twice"),
    ("too many", [member("d", tarfile.DIRTYPE)] * 20, "has more than 16 members"),
    ("too much", [(member(f"{CIFAR}/readme.html", size=2**28), bytes(2**28))], "unpacks to more than 268435456 bytes"),
    ("a long header", [member(f"{CIFAR}/readme.html", pax_headers={"comment": "x" * 2**21})], "a header of more than 1 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "why"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path, more, why):
    made = tar(tmp_path / "bad.tar.gz", cifar_members(), *more)
    with pytest.raises(InputError) as refusal:
        stage.stage_data_set(wanted(tmp_path, source=made))
    assert str(refusal.value).startswith(f"{made}: ")
    assert why in str(refusal.value)
    assert {path.name for path in (tmp_path / "data").rglob("*")} == {".staging", "cifar10.lock"}
    assert {path.name for path in tmp_path.iterdir()} == {"bad.tar.gz", "data"}


def test_an_archive_member_larger_than_its_header_says_is_stopped(tmp_path):
    """A header in the archive unpacks to 8 GiB. Unpacking stops after 1 MiB of the header."""
    made = tmp_path / "bomb.tar.gz"
    header = member(f"{CIFAR}/readme.html", tarfile.XHDTYPE, size=2**33).tobuf(tarfile.GNU_FORMAT)
    made.write_bytes(gzip.compress(header + bytes(2**23)))
    with pytest.raises(InputError, match="header of more than 1 MiB"):
        archive.unpack_archive(made, stage.FORMATS["cifar10"], tmp_path / "folder")


DAMAGED = [
    ("cifar10", {f"{CIFAR}/test_batch.bin": None}, "in the archive: test_batch.bin: no such file"),
    ("cifar10", {f"{CIFAR}/test_batch.bin": cifar_records()[:-1]}, "found 12291 bytes. Allowed: a multiple of 3073"),
    ("cifar10", {f"{CIFAR}/test_batch.bin": b""}, "test_batch.bin: found 0 bytes"),
    ("cifar10", {f"{CIFAR}/data_batch_3.bin": cifar_records(label=10)}, "data_batch_3.bin: record 0 has the label 10."),
    ("mnist", {"t10k-labels-idx1-ubyte.gz": None}, "t10k-labels-idx1-ubyte: no such file, and no t10k-labels-idx1-ubyte.gz"),
    ("mnist", {"t10k-labels-idx1-ubyte.gz": b"no gzip"}, "t10k-labels-idx1-ubyte.gz: the gzip file is damaged"),
    ("mnist", {"t10k-labels-idx1-ubyte.gz": gzip.compress(idx(np.arange(3)))[:-3]}, "the gzip file is damaged"),
    ("mnist", {"t10k-labels-idx1-ubyte.gz": gzip.compress(b"\0\0\x0d\1" + bytes(7))}, "starts with 00 00 0d 01. Allowed:"),
    ("mnist", {"t10k-labels-idx1-ubyte.gz": gzip.compress(idx(np.arange(4)))}, "found 4 labels. Allowed: 3, one"),
    ("mnist", {"t10k-labels-idx1-ubyte.gz": gzip.compress(idx(np.arange(3)) + b"x")}, "found more than 3 bytes after"),
    ("mnist", {"t10k-labels-idx1-ubyte.gz": gzip.compress(idx(np.array([1, 2, 10])))}, "record 2 has the label 10"),
    ("mnist", {"t10k-images-idx3-ubyte.gz": gzip.compress(b"\0\0\x08\3" + b"\xff" * 12)}, "Allowed: 1 to 268435456"),
    ("mnist", {"t10k-images-idx3-ubyte.gz": gzip.compress(idx(np.zeros((3, 9, 9))))}, "images of 9 x 9 pixels"),
    ("mnist", {"t10k-images-idx3-ubyte.gz": gzip.compress(bytes(2**28))}, "starts with 00 00 00 00"),
    ("imagenet", {"train/n00000001/a.JPEG": b"MZ\x90 a program"}, "a.JPEG': starts with 4d 5a 90 20. Allowed: a JPEG"),
    ("imagenet", {"val/n00000009/a.JPEG": imagenet_members()["val/n00000001/n00000001_0.JPEG"]}, "is no class of train"),
    ("imagenet", {"train/n00000001/a.exe": b"x"}, "does not belong to this set. Allowed: train/WNID/*.JPEG"),
]  # fmt: skip
MEMBERS = {"cifar10": cifar_members(), "mnist": mnist_members(), "imagenet": imagenet_members()}


@pytest.mark.parametrize(("name", "changed", "why"), DAMAGED)
def test_a_damaged_set_is_refused_and_leaves_nothing(tmp_path, name, changed, why):
    members = {key: content for key, content in (MEMBERS[name] | changed).items() if content is not None}
    made = tar(tmp_path / "bad.tar.gz", members)
    with pytest.raises(InputError) as refusal:
        stage.stage_data_set(wanted(tmp_path, name, made))
    assert why in str(refusal.value)
    assert {path.name for path in (tmp_path / "data").rglob("*")} == {".staging", f"{name}.lock"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a whole tar file"),
        (b"PK\3\4 a zip" * 100, "is not a whole tar file"),
        (gzip.compress(b"no tar" * 1000, mtime=0), "is not a whole tar file"),
        (bytes(10240), "contains no data"),
    ],
)
def test_a_file_that_is_no_archive_is_refused(tmp_path, content, why):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match=why):
        stage.stage_data_set(wanted(tmp_path, source=tmp_path / "x"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_archive_is_refused(tmp_path, zipped):
    made = tar(tmp_path / "x", cifar_members(), zipped=zipped)
    made.write_bytes(made.read_bytes()[: made.stat().st_size // 2])
    with pytest.raises(InputError, match=r"not a whole tar file|truncated"):
        stage.stage_data_set(wanted(tmp_path, source=made))
    assert not (tmp_path / "data" / CIFAR).exists()


def test_a_wrong_checksum_is_refused(tmp_path):
    made = tar(tmp_path / "x", cifar_members())
    with pytest.raises(InputError, match=rf"its SHA-256 is {sha256(made)}\. Allowed: 0000"):
        stage.stage_data_set(wanted(tmp_path, source=made, sha256="0" * 64))


def test_folders_are_copied_linked_or_unpacked(tmp_path):
    small = put(tmp_path / "four files", mnist_members() | {"notes.txt": b"mine"})
    assert stage.stage_data_set(wanted(tmp_path, "mnist", small)).ready
    assert tree(tmp_path / "data" / "mnist") == mnist_members()
    large = put(tmp_path / "unpacked", imagenet_members())
    assert stage.stage_data_set(wanted(tmp_path, "imagenet", large)).ready
    assert (tmp_path / "data" / "imagenet").readlink() == large
    assert stage.inspect_data_set(wanted(tmp_path, "imagenet", large)).ready
    parts = tmp_path / "parts"
    parts.mkdir()
    for split in ("train", "val"):
        of_split = {name: content for name, content in imagenet_members().items() if name.startswith(split)}
        # the members of one archive have paths that begin with the name of the split, those of the other archive do not
        cut = f"{split}/" if split == "val" else ""
        tar(parts / f"{split}.tar", {name.removeprefix(cut): content for name, content in of_split.items()})
    assert stage.stage_data_set(StageRequest(str(tmp_path / "third"), "imagenet", str(parts))).ready
    assert tree(tmp_path / "third" / "imagenet") == imagenet_members()
    with pytest.raises(InputError, match="is a folder, which has no SHA-256"):
        stage.stage_data_set(StageRequest(str(tmp_path / "fourth"), "imagenet", str(parts), "0" * 64))
    bad = put(tmp_path / "bad", {"val/flat.JPEG": b"", "train/a/x.JPEG": b""})
    with pytest.raises(InputError, match="found 1 class folders"):
        stage.stage_data_set(StageRequest(str(tmp_path / "other"), "imagenet", str(bad)))


def test_an_existing_data_set_is_verified_once_and_a_changed_one_reported(tmp_path):
    folder = put(tmp_path / "data", cifar_members()) / CIFAR
    assert stage.inspect_data_set(wanted(tmp_path)) == stage.DataSetState(False, True, f"verify {folder}, which already exists")
    assert stage.stage_data_set(wanted(tmp_path)).ready
    assert stage.inspect_data_set(wanted(tmp_path)).ready
    (folder / "test_batch.bin").write_bytes(b"")
    assert (
        stage.inspect_data_set(wanted(tmp_path)).says
        == f"{folder} has changed since it was staged; remove it to stage it again"
    )
    with pytest.raises(InputError, match="has changed since it was staged"):
        stage.stage_data_set(wanted(tmp_path))
    assert "names no archive for mnist" in stage.inspect_data_set(wanted(tmp_path, "mnist")).says
    (tmp_path / "data" / "mnist").mkdir()
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte: no such file"):
        stage.stage_data_set(wanted(tmp_path, "mnist"))


def test_another_archive_does_not_replace_a_staged_data_set(tmp_path):
    made = tar(tmp_path / "x", cifar_members())
    stage.stage_data_set(wanted(tmp_path, source=made))
    found = stage.inspect_data_set(wanted(tmp_path, source=made, sha256="0" * 64))
    assert (found.ready, found.can) == (False, False)
    assert f"was made from an archive with the SHA-256 {sha256(made)}" in found.says


def test_a_broken_download_continues_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    made = tar(tmp_path / "x", cifar_members())
    whole = made.stat().st_size
    with Server(made.read_bytes(), cuts=[1000, 5000]) as server:
        assert stage.stage_data_set(wanted(tmp_path, source=server.url, sha256=sha256(made))).ready
        assert server.asked == [None, "bytes=1000-", "bytes=6000-"]
        assert sum(server.sent) == whole
        assert stage.stage_data_set(wanted(tmp_path, source=server.url, sha256=sha256(made))).ready
        assert len(server.asked) == 3
    assert {path.name for path in (tmp_path / "data" / ".staging").iterdir()} == {"cifar10.lock", "cifar10.json"}


def test_a_download_continues_where_the_last_command_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    made = tar(tmp_path / "x", cifar_members())
    with Server(made.read_bytes(), cuts=[100] * download.MOST_ATTEMPTS) as server:
        want = wanted(tmp_path, source=server.url, sha256=sha256(made))
        with pytest.raises(ShardlabError, match="the connection ended early, after 500 bytes; run the same command again"):
            stage.stage_data_set(want)
        assert not (tmp_path / "data" / CIFAR).exists()
        assert stage.stage_data_set(want).ready
        assert server.asked[-1] == "bytes=500-"


@pytest.mark.parametrize("other_tag", [True, False])
def test_a_partial_download_of_another_file_is_not_continued(tmp_path, monkeypatch, other_tag):
    monkeypatch.setattr(download, "MOST_ATTEMPTS", 1)
    made = tar(tmp_path / "x", cifar_members())
    with Server(made.read_bytes()[::-1], cuts=[100]) as server:
        want = wanted(tmp_path, source=server.url, sha256=sha256(made))
        with pytest.raises(ShardlabError, match="after 100 bytes"):
            stage.stage_data_set(want)
        server.content = made.read_bytes()
        if other_tag:
            server.etag = '"two"'
            assert stage.stage_data_set(want).ready
        else:
            with pytest.raises(InputError, match=r"its SHA-256 is .* The download was deleted\."):
                stage.stage_data_set(want)
            assert stage.stage_data_set(want).ready


def test_a_server_without_ranges_sends_all_again(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    made = tar(tmp_path / "x", cifar_members())
    with Server(made.read_bytes(), cuts=[1000], ranges=False) as server:
        assert stage.stage_data_set(wanted(tmp_path, source=server.url, sha256=sha256(made))).ready
        assert server.sent == [1000, made.stat().st_size]


def test_a_server_that_sends_too_much_or_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MOST_ATTEMPTS", 1)
    with Server(bytes(1000)) as server:
        for most in (999, 0):
            with pytest.raises(InputError, match=rf"has 1000 bytes\. Allowed: at most {most} for this set"):
                download.fetch_file(server.url, tmp_path / "x", "0" * 64, most)
        assert download.fetch_file(
            server.url, tmp_path / "x", "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53", 1000
        )
    with pytest.raises(ShardlabError, match="Connection refused, after 1000 bytes"):
        download.fetch_file(server.url, tmp_path / "x", "0" * 64, 1000)


def _stage_in_turn(want, start, results):
    start.wait()
    results.put(stage.stage_data_set(want).ready)


def test_of_two_processes_one_fetches_and_the_other_waits(tmp_path):
    made = tar(tmp_path / "x", cifar_members())
    fork = multiprocessing.get_context("fork")
    start, results = fork.Event(), fork.Queue()
    with Server(made.read_bytes()) as server:
        want = wanted(tmp_path, source=server.url, sha256=sha256(made))
        both = [fork.Process(target=_stage_in_turn, args=(want, start, results)) for _ in range(2)]
        for one in both:
            one.start()
        start.set()
        assert [results.get(timeout=HANG_S) for _ in both] == [True, True]
        for one in both:
            one.join()
        assert server.asked == [None]


def test_files_of_a_killed_process_are_removed_before_staging(tmp_path):
    put(tmp_path / "data" / ".staging" / "cifar10.unpacking", {"half": b"x"})
    made = tar(tmp_path / "x", cifar_members())
    stage.stage_data_set(wanted(tmp_path, source=made))
    assert set(tree(tmp_path / "data" / CIFAR)) == {name.removeprefix(f"{CIFAR}/") for name in cifar_members()}


def cluster(folder, sets):
    path = folder / "cluster.yaml"
    path.write_text(f"schema: 1\nname: a\nprovider: local\ndata: {{path: 'my data', sets: {sets}}}\n")
    return str(path)


def test_provision_stages_a_data_set_once_and_reports_a_missing_archive(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("provision.order.TORCH_CHECKS", [])  # skips the acceptance tests
    made = tar(tmp_path / "it's; x.tar.gz", cifar_members())
    file = cluster(tmp_path, f'[{{name: cifar10, archive: "{made.name}", sha256: {sha256(made)}}}]')
    words = [file, "--only", "datasets", "--json", "--workspace", str(tmp_path)]

    def step(*verb):
        code = main([*words, *verb])
        said = capsys.readouterr()
        assert said.out, said.err
        return code, json.loads(said.out)["nodes"][0]["operations"][0]

    code, dry = step("plan")
    assert (code, dry["state"], dry["says"]) == (0, "would change", [f"unpack {made} as {tmp_path}/my data/{CIFAR}"])
    assert not (tmp_path / "my data").exists()
    made.rename(tmp_path / "gone")
    code, gone = step("plan")
    assert (code, gone["state"]) == (1, "failed")
    assert f"{made}: no such file, so cifar10 cannot be staged." in gone["says"][0]
    (tmp_path / "gone").rename(made)
    code, first = step("apply")
    assert (code, first["state"], first["says"]) == (0, "changed", dry["says"])
    code, second = step("plan")
    assert (code, second["state"], second["says"]) == (0, "nothing to do", ["cifar10: staged and unchanged"])


@pytest.mark.parametrize("python", ["missing", "without provision"])
def test_data_sets_of_a_node_without_an_environment_are_planned_but_not_staged(tmp_path, python):
    node = LocalLoginNode(name="w1", python=str(tmp_path / "python"))
    if python != "missing":
        # the node's Python is replaced by a Python that sees no installed package
        Path(node.python).write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        Path(node.python).chmod(0o755)
    sets = [DataSet("cifar10", str(tmp_path / "set.tar"))]
    described = Cluster(schema=1, name="a", provider="ssh", data=Data(str(tmp_path / "data"), sets))
    target = Target(node, FactAnswers(node))
    (change,) = datasets.plan(Site(described, Workspace(tmp_path), [target]), target)
    assert change.description.endswith("once the Python environment is made")
    with pytest.raises(Unanswered, match=r"w1: the data sets: its Python environment is not made yet; .* without --only"):
        change.make(node)


def test_a_refused_archive_fails_the_operation_with_its_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("provision.order.TORCH_CHECKS", [])
    tar(tmp_path / "bad", cifar_members(), member("/etc/passwd"))
    file = cluster(tmp_path, "[{name: cifar10, archive: bad}]")
    assert main([file, "--only", "datasets", "--json", "--workspace", str(tmp_path)]) == 1
    step = json.loads(capsys.readouterr().out)["nodes"][0]["operations"][0]
    assert (step["state"], step["changes"]) == ("failed", 0)
    assert "has an absolute path" in step["says"][0]


def test_the_node_needs_nothing_but_python(tmp_path):
    request = json.dumps({"data_path": str(tmp_path), "name": "mnist"})
    code = (
        "import sys\nfrom provision.datasets.__main__ import main\n"
        "heavy = {'msgspec', 'yaml', 'rich', 'fabric', 'numpy'}\n"
        f"print(main('look', {request!r}), heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"


@pytest.fixture
def as_nobody(tmp_path):
    """Runs provision.datasets as a user who can write only to a home folder."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(home, 65534, 65534)
    home.chmod(0o755)

    def run(verb, request, code=0):
        done = python("-m", "provision.datasets", verb, given=json.dumps(vars(request)))
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if code == 0 else done.stderr

    def python(*words, given=""):
        return subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-P", *words],
            env={**os.environ, "HOME": str(home), "PYTHONPATH": str(Path(stage.__file__).parents[2])},
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )

    run.home, run.python = home, python
    yield run
    shutil.rmtree(home)


def test_a_copy_that_cannot_be_written_is_verified_in_place(as_nobody):
    data = as_nobody.home / "site-data"
    put(data, {f"{CIFAR}/{name.rpartition('/')[2]}": content for name, content in cifar_members().items()})
    data.chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in [data, *data.rglob("*")]}
    request = StageRequest(str(data), "cifar10", "/nowhere.tar", "a" * 64)
    looked = as_nobody("look", request)
    assert (
        looked["says"] == f"verify {data / CIFAR}, which already exists, and is read in place, as its folder cannot be written"
    )
    assert as_nobody("stage", request)["ready"]
    assert as_nobody("look", request) == {"ready": True, "can": True, "says": f"{data / CIFAR} is staged", "makes": False}
    assert {path: path.stat().st_mtime_ns for path in [data, *data.rglob("*")]} == before
    (data / CIFAR / "test_batch.bin").write_bytes(b"\x0b" + bytes(3072) * 2)
    assert "has changed since it was staged" in as_nobody("look", request)["says"]
    other = StageRequest(str(data), "mnist", "/nowhere.tar", None)
    assert as_nobody("look", other)["says"].endswith("cannot be staged there; set data.path to a folder of yours")


def test_all_paths_of_a_copy_use_the_same_folder_for_notes_and_runs(as_nobody):
    data, link = as_nobody.home / "site-data", as_nobody.home / "link"
    put(data, {f"{CIFAR}/{name.rpartition('/')[2]}": content for name, content in cifar_members().items()})
    data.chmod(0o755)
    link.symlink_to(data)
    assert as_nobody("stage", StageRequest(str(link), "cifar10"))["ready"]
    assert as_nobody("look", StageRequest(str(data), "cifar10"))["ready"]
    program = (
        "import sys; from pathlib import Path; "
        "from trainers.data.made_once import choose_writable_path; print(choose_writable_path(Path(sys.argv[1])))"
    )
    paths = [as_nobody.python("-c", program, folder / "imagenet-train.list").stdout.strip() for folder in (data, link)]
    (folder,) = (as_nobody.home / ".cache/shardlab/data").iterdir()
    assert paths == [str(folder / "imagenet-train.list")] * 2
    assert {path.name for path in folder.iterdir()} == {"cifar10.lock", "cifar10.json"}


def test_a_damaged_copy_that_cannot_be_written_is_refused(as_nobody):
    data = as_nobody.home / "site-data"
    members = {f"{CIFAR}/{name.rpartition('/')[2]}": content for name, content in cifar_members().items()}
    put(data, members | {f"{CIFAR}/data_batch_1.bin": b"123"})
    data.chmod(0o755)
    assert "a multiple of 3073" in as_nobody("stage", StageRequest(str(data), "cifar10"), code=2)


def test_a_downloaded_archive_is_unpacked_without_a_network(tmp_path):
    archive_ = tar(tmp_path / "set.tar", cifar_members(), zipped=True)
    with Server(archive_.read_bytes()) as server:
        want = wanted(tmp_path, "cifar10", server.url, sha256(archive_))
        assert "downloaded" in stage.download_archive(want).says
    assert not (tmp_path / "data" / CIFAR).exists()
    assert stage.stage_data_set(want).ready
    assert {path.name for path in (tmp_path / "data" / ".staging").iterdir()} == {"cifar10.lock", "cifar10.json"}


SBATCH = """\
#!/bin/sh
for script; do :; done
log=$(sed -n 's/^#SBATCH --output=//p' "$script")
echo "$script" >> "$(dirname "$0")/jobs"
env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" bash "$script" > "$log" 2>&1
"""


@pytest.fixture
def managed(tmp_path, monkeypatch):
    """A login node of a site whose jobs run immediately. The value is the folder of its programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "squeue": '#!/bin/sh\ncat "$(dirname "$0")/queue" 2> /dev/null\nexit 0\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(stage.__file__).parents[2]))
    node = LocalLoginNode(name="login", python=sys.executable)

    def planned(archive_, digest=None, build="auto"):
        described = Cluster(
            schema=1,
            name="site",
            provider="slurm",
            slurm=Slurm(partition="cpu"),
            storage=Storage(str(tmp_path / "shared")),
            environment=Environment(build=build),
            data=Data(str(tmp_path / "data"), [DataSet("cifar10", str(archive_), digest)]),
        )
        target = Target(node, FactAnswers(node))
        return datasets.plan(Site(described, Workspace(tmp_path), [target]), target)

    planned.node, planned.programs = node, programs
    return planned


SSH_HERE = f"{{schema: 1, name: c, provider: ssh, nodes: [{{name: {socket.gethostname().partition('.')[0]}, host: h}}], DATA}}"
SSH = "{schema: 1, name: c, provider: ssh, nodes: [{name: gpu0, host: gpu0.invalid}], DATA}"
SHARED = SSH.replace("DATA", "storage: {shared: SHARED}, DATA")
SLURM = SHARED.replace("gpu0.invalid", "h, roles: [controller, worker]").replace("DATA", "slurm: {}, DATA")


@pytest.mark.parametrize("path", ["null", "sets", "/mydata/sets"])
@pytest.mark.parametrize(
    ("text", "place", "elsewhere"),
    [(SSH_HERE, "home", False), (SSH, "home", True), (SHARED, "home", True), (SLURM, "home", True), (SLURM, "shared", False)],
    ids=["first node", "no shared folder", "shared folder", "Slurm", "Slurm, here"],
)
def test_data_sets_are_staged_where_the_runs_of_the_cluster_read_them(tmp_path, text, place, elsewhere, path):
    file = tmp_path / "cluster.yaml"
    (tmp_path / place).mkdir()
    described = text.replace("SHARED", str(tmp_path / "shared")).replace("DATA", f"data: {{path: {path}, sets: [cifar10]}}")
    file.write_text(described)
    described = cluster_file.load_cluster(file)
    asked = []

    class AskedNode(LocalLoginNode, eq=False):
        def run(self, argv, *, stdin, **_):
            asked.append(stdin)
            return CommandOutput(1, "", "")

    node = AskedNode(name="gpu0", python="python3")
    workspace = Workspace(tmp_path / place)
    with pytest.raises(Unanswered):
        datasets.plan(Site(described, workspace, []), Target(node, FactAnswers(node)))
    stored = workspace
    if elsewhere:
        workspace.shardlab_folder.mkdir()
        nodes = [{"name": "gpu0", "host": "h", "roles": ["controller"], "python": "python3"}]
        (workspace.shardlab_folder / "inventory.json").write_text(json.dumps({"schema": 1, "cluster": "c", "nodes": nodes}))
        stored = Workspace(Path(remote_workspace.find_remote_workspace(workspace, described).workspace))
    given = None if path == "null" else path
    assert msgspec.json.decode(asked[0], type=StageRequest).data_path == str(stored.find_data_folder(given))


def test_at_a_managed_site_an_archive_is_unpacked_in_a_job(tmp_path, managed):
    archive_ = tar(tmp_path / "set.tar", cifar_members(), zipped=True)
    ask, write, submit = managed(archive_)
    assert submit.description == f"unpack {archive_} as {tmp_path / 'data' / CIFAR}, in a job"
    for change in (ask, write, submit):
        assert not (tmp_path / "data" / CIFAR).exists()
        change.make(managed.node)
    script = tmp_path / "shared/datasets/cifar10.sh"
    assert (managed.programs / "jobs").read_text() == f"{script}\n"
    assert "#SBATCH --partition=cpu" in script.read_text()
    (verified,) = [managed(archive_)]
    assert verified.why == "cifar10: staged and unchanged"


def test_a_managed_site_downloads_on_the_login_node_and_unpacks_in_a_job(tmp_path, managed):
    archive_ = tar(tmp_path / "set.tar", cifar_members(), zipped=True)
    with Server(archive_.read_bytes()) as server:
        changes = managed(server.url, sha256(archive_))
        changes[0].make(managed.node)
    assert changes[0].description.endswith("on the login node")
    for change in changes[1:]:
        change.make(managed.node)
    assert (tmp_path / "data" / CIFAR / "test_batch.bin").exists()


def test_a_second_job_is_not_submitted_while_the_first_one_waits(tmp_path, managed):
    archive_ = tar(tmp_path / "set.tar", cifar_members(), zipped=True)
    (managed.programs / "queue").write_text(f"77|PENDING|Priority|{tmp_path}/shared/datasets/cifar10.sh\n")
    with pytest.raises(Unanswered, match=r"job 77 .PENDING: Priority. of an earlier command stages the data set cifar10"):
        managed(archive_)


def test_a_job_that_fails_says_why(tmp_path, managed):
    (tmp_path / "set.tar").write_bytes(b"no archive")
    *sent, submit = managed(tmp_path / "set.tar")
    for change in sent:
        change.make(managed.node)
    with pytest.raises(Unanswered, match="is not a whole tar file"):
        submit.make(managed.node)


SIGNATURE = "0123456789abcdef" * 4


@pytest.mark.parametrize("build", ["login", "job"])
def test_a_signed_url_is_not_visible_to_other_users(tmp_path, monkeypatch, managed, build):
    arguments = []
    run = LocalLoginNode.run

    def recorded(node, argv, **options):
        arguments.extend(argv)
        return run(node, argv, **options)

    monkeypatch.setattr(LocalLoginNode, "run", recorded)
    archive_ = tar(tmp_path / "set.tar", cifar_members(), zipped=True)
    mask = os.umask(0)
    try:
        with Server(archive_.read_bytes()) as server:
            changes = managed(f"{server.url}?X-Amz-Signature={SIGNATURE}", sha256(archive_), build=build)
            for change in changes:
                change.make(managed.node)
    finally:
        os.umask(mask)
    assert (tmp_path / "data" / CIFAR / "test_batch.bin").exists()
    assert not [text for text in arguments if SIGNATURE in text]
    assert not [
        change for change in changes if SIGNATURE in f"{change.description} {change.command} {change.script} {change!r}"
    ]
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and SIGNATURE.encode() in path.read_bytes()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in holding] == [("cifar10.request", 0o600)]


def test_no_error_and_no_note_of_a_download_has_the_signature_of_the_url(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MOST_ATTEMPTS", 1)
    partial = tmp_path / "x"
    content = bytes(1000)
    said = []

    def fail(server, sha256_="0" * 64, most=1000, host=None):
        url = f"{host or server.url}?X-Amz-Signature={SIGNATURE}"
        with pytest.raises(ShardlabError) as error:
            download.fetch_file(url, partial, sha256_, most)
        said.append(str(error.value))
        assert SIGNATURE not in "".join(path.read_text(errors="replace") for path in tmp_path.iterdir())

    with Server(content, cuts=[100]) as server:
        fail(server)  # the connection ends early; the note about the partial file stays
        assert {path.name for path in tmp_path.iterdir()} == {"x", "x.json"}
        fail(server, most=10)
        fail(server)  # another SHA-256
        for target in (f"file:///x?sig={SIGNATURE}", f"{server.url}?sig={SIGNATURE}"):
            server.redirect = target
            fail(server)
    fail(server)  # connection refused
    fail(server, host="http://h.invalid:9x/a")
    assert len(said) == 7
    assert SIGNATURE not in "\n".join(said)
    assert "Redirection to url 'file:///x' is not allowed" in said[3]


@pytest.mark.parametrize(
    "sets",
    [
        f"[{{name: cifar10, archive: 's3://sets/x?X-Amz-Signature={SIGNATURE}'}}]",
        f"[{{name: cifar10, archive: 'https://h/a b?x=1 2&X-Amz-Signature={SIGNATURE}', sha256: {'a' * 64}}}]",
        f"[{{name: cifar10, archive: 'https://ada:{SIGNATURE}@h/a', sha256: {'a' * 64}}}]",
        f"['https://h/a?sig={SIGNATURE}']",
        f"'https://h/a?sig={SIGNATURE}'",
    ],
)
def test_no_error_of_the_cluster_file_has_the_signature_of_a_url(tmp_path, sets):
    with pytest.raises(InputError, match=r"data\.sets") as error:
        cluster_file.load_cluster(Path(cluster(tmp_path, sets)))
    assert "Allowed" in str(error.value) or "expected" in str(error.value)
    assert SIGNATURE[:10] not in str(error.value)
