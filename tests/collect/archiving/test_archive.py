"""`collect archive`, `collect open` and archives in `collect compare`, also with hostile and damaged archives."""

import contextlib
import gzip
import hashlib
import json
import tracemalloc
import zipfile
from pathlib import Path

import msgspec
import pytest
import support_collect as support

from collect import cli
from collect.archiving import staging
from collect.archiving.anonymous import Pseudonyms
from collect.archiving.contents import ArchiveSource
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files
from shardlab.transfer import manifest
from shardlab.workspace import archive
from shardlab.workspace.workspace import Workspace

USER, HOST, ACCOUNT, FOLDER = "zebra_user", "quokka17.cluster.example.edu", "okapi_g", "/scratch/okapi/zebra_user/study"
NAMES = (USER, HOST, "quokka17", ACCOUNT, "cluster.example.edu", FOLDER, "okapi", "10.77.12.13", "52:54:00:aa:bb:cc")
METRIC = """\
from collect.metric import Metric
open({witness!r}, "w").write("executed")
METRICS = (Metric(name="twice", unit="", direction="higher", definition="2", run=lambda run: 2.0),)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return support.matrix(tmp_path_factory.mktemp("study") / "their work")


@pytest.fixture(scope="module")
def file(workspace, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "study.shardlab.zip"
    assert collect("archive", "--out", str(path), workspace=workspace) == 0
    return path


def collect(*words: str, workspace: Workspace | None = None) -> int:
    return cli.main([*words, *(["--workspace", str(workspace.path)] if workspace is not None else [])])


def document(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_an_opened_archive_has_the_same_runs_and_the_same_report(workspace, file, tmp_path, capsys):
    assert collect("open", str(file), "--out", str(tmp_path / "ours"), "--json") == 0
    said = document(capsys)
    ours = Workspace(tmp_path / "ours")
    assert (said["same_report"], said["runs"]) == (True, len(workspace.list_run_ids()))
    assert ours.list_run_ids() == workspace.list_run_ids()
    for run in workspace.list_run_dirs():
        for name in manifest.list_files(run.path).status_by_file:
            assert (ours.runs / run.run_id / name).read_bytes() == (run.path / name).read_bytes()
    assert (ours.report / "index.html").exists()
    assert not (ours.path / "cluster.yaml").exists()
    assert collect("fetch", "--json", workspace=ours) == 0
    assert not any(run.get("problems") for run in document(capsys))
    assert collect("summarize", workspace=ours) == 0


def test_a_changed_record_makes_another_report(file, tmp_path, capsys):
    """`collect open` prints `same_report: false` if the report in an archive was not made from the records in the archive."""
    changed = rewritten(file, tmp_path, {"workspace/report/summary.json": b'{"rows": [], "created_s": 1}'})
    assert collect("open", str(changed), "--out", str(tmp_path / "ours"), "--json") == 0
    assert document(capsys)["same_report"] is False


def test_an_archive_is_compared_like_a_workspace(workspace, file, capsys):
    assert collect("compare", str(file), str(workspace.path), "--json") == 0
    pairs = document(capsys)["pairs"]
    assert pairs
    assert {metric["verdict"] for pair in pairs for metric in pair.get("metrics", [])} <= {"equal", "not to be told apart"}


def test_equal_content_gives_equal_members_and_the_archive_is_replaced(workspace, file, capsys):
    before = archive.read_index(file)
    assert collect("archive", "--out", str(file), workspace=workspace) == 0
    after = archive.read_index(file)
    runs = {name: one for name, one in before.files.items() if name.startswith("workspace/runs/") and "manifest" not in name}
    assert runs == {name: after.files[name] for name in runs}
    other = file.with_name("notes.txt")
    other.write_text("mine")
    assert collect("archive", "--out", str(other), workspace=workspace) == 2
    assert "is there already and is not an archive" in capsys.readouterr().err
    assert other.read_text() == "mine"


def test_running_runs_checkpoints_and_links_are_left_out_of_an_archive(tmp_path, capsys):
    theirs = support.matrix(tmp_path / "work")
    run = next(one for one in theirs.list_run_dirs() if one.result.exists())
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / "weights.bin").write_bytes(bytes(1000))
    (run.path / "link").symlink_to("/etc/passwd")
    support.prepare(theirs, support.cell("ddp", 2), 9)
    assert collect("archive", "--out", str(tmp_path / "a.shardlab.zip"), "--json", workspace=theirs) == 0
    left_out = {one["name"]: one["why"] for one in document(capsys)["left_out"]}
    assert left_out[f"runs/{run.run_id}/checkpoints/weights.bin"] == "checkpoints are never archived"
    assert left_out[f"runs/{run.run_id}/link"] == "it is a symlink"
    assert "the run is planned" in left_out.values()
    kept = archive.read_index(tmp_path / "a.shardlab.zip").files
    assert not {name for name in kept if name.removeprefix("workspace/") in left_out}


def test_columns_of_an_older_version_do_no_harm_in_an_archive(workspace, tmp_path, capsys):
    run = workspace.list_run_dirs()[0]
    columns = run.samples_file(support.HOST).with_suffix(".columns")
    columns.write_bytes(b'\n{"schema":1,"sha256":"' + bytes(1000))
    out = tmp_path / "older.shardlab.zip"
    assert collect("archive", "--out", str(out), workspace=workspace) == 0
    columns.unlink()
    capsys.readouterr()
    assert collect("open", str(out), "--out", str(tmp_path / "ours"), "--json") == 0
    assert document(capsys)["same_report"] is True


def test_telemetry_is_left_out_last_and_the_limit_is_kept(workspace, tmp_path, capsys):
    for run in workspace.list_run_dirs()[:1]:
        files.make_folder(run.trace_file(0).parent)
        run.trace_file(0).write_bytes(gzip.compress(hashlib.sha512().digest() * 50_000, 0))
    most = 2**21
    out = tmp_path / "small.shardlab.zip"
    assert collect("archive", "--out", str(out), "--max-gib", str(most / 2**30), "--json", workspace=workspace) == 0
    why = {one["why"] for one in document(capsys)["left_out"]}
    workspace.list_run_dirs()[0].trace_file(0).unlink()
    assert any(text.startswith("profiler traces were left out") for text in why)
    assert not any("telemetry" in text for text in why)
    assert collect("archive", "--out", str(out), "--max-gib", "1e-7", workspace=workspace) == 1
    assert "Set a higher limit with --max-gib" in capsys.readouterr().err
    assert collect("archive", "--max-gib", "0", workspace=workspace) == 2


def test_no_name_is_in_an_anonymous_archive(tmp_path, monkeypatch, capsys):
    support.log_in(monkeypatch, USER)
    theirs = support.matrix(tmp_path / "zebra_user-work")
    (theirs.path / "cluster.yaml").write_text(
        f"schema: 1\nname: okapi\nprovider: slurm\nlogin: {{host: login.cluster.example.edu, user: {USER}}}\nslurm: "
        f"{{partition: gpu, account: {ACCOUNT}, time: '01:00:00'}}\nstorage: {{shared: {FOLDER}}}\nssh: "
        f"{{identity: ~/.ssh/id_zebra_user}}\n"
    )
    for run in theirs.list_run_dirs():
        named_after(run.path, HOST)
    run = next(one for one in theirs.list_run_dirs() if one.result.exists())
    files.make_folder(run.log)
    run.rank_log(0).write_text(
        f"{HOST}:117:117 NCCL INFO Bootstrap : Using ib0:10.77.12.13<0>\nFile '{FOLDER}/venv/lib/a.py', by {USER} of "
        f"{ACCOUNT} at QUOKKA17, 52:54:00:aa:bb:cc\n"
    )
    with gzip.open(files.make_folder(run.trace_file(0).parent) or run.trace_file(0), "wb") as trace:
        trace.write(json.dumps({"traceEvents": [], "hostname": HOST}).encode())
    (run.path / "blob.bin").write_bytes(b"\xff\xfe" + USER.encode())
    out = tmp_path / "x.shardlab.zip"
    assert collect("archive", "--anonymous", "--out", str(out), "--json", workspace=theirs) == 0
    said = document(capsys)
    assert said["remaining"] == {}
    assert [one["why"] for one in said["left_out"] if one["name"].endswith("blob.bin")] == [
        "it is not text, so names in it cannot be found"
    ]
    with zipfile.ZipFile(out) as zipped:
        for name in zipped.namelist():
            content = zipped.read(name)
            content = gzip.decompress(content) if name.endswith(".gz") else content
            for secret in (*NAMES, str(theirs.path), str(tmp_path)):
                assert secret.lower() not in name.lower(), name
                assert secret.lower().encode() not in content.lower(), (name, secret)
    assert collect("open", str(out), "--out", str(tmp_path / "ours"), "--json") == 0
    assert (opened := document(capsys))["same_report"] is True
    assert opened["anonymous"] is True
    summary = json.loads((tmp_path / "ours/report/summary.json").read_text())
    assert sum(row["states"].get("completed", 0) for row in summary["rows"]) > 1


def test_no_name_is_in_the_reason_why_an_anonymous_archive_lacks_a_file(tmp_path, monkeypatch):
    support.log_in(monkeypatch, USER)
    theirs = support.matrix(tmp_path / "work")
    (expansion,) = (theirs.shardlab_folder / "matrices").glob("*.json")
    expansion.write_text(json.dumps(json.loads(expansion.read_text()) | {"path": f"{FOLDER}/gone.yaml"}))
    out = tmp_path / "x.shardlab.zip"
    assert collect("archive", "--anonymous", "--out", str(out), workspace=theirs) == 0
    with zipfile.ZipFile(out) as zipped:
        index = zipped.read("archive.json").decode()
    assert "the matrix file cannot be read any more" in index
    assert [secret for secret in (*NAMES, FOLDER, str(tmp_path)) if secret.lower() in index.lower()] == []


def named_after(run: Path, host: str) -> None:
    """Replace the name of the host in the records of a run, and in the names of their files. run: the run folder."""
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.suffix in (".json", ".jsonl"):
            path.write_text(path.read_text().replace(f'"{support.HOST}"', f'"{host}"'))
            path.rename(path.with_name(path.name.replace(support.HOST, host)))


def test_a_name_that_is_also_a_word_of_the_records_is_refused():
    with pytest.raises(InputError, match="the account 'strategy' has the same name as a key"):
        Pseudonyms([("account", "strategy")])
    with pytest.raises(InputError, match="the host 'ddp'"):
        Pseudonyms([("host", "ddp")], {"ddp"})


def test_pseudonyms_are_the_same_everywhere_and_respect_the_borders_of_words():
    named = Pseudonyms(
        [("host", "node1"), ("host", "node1.site.edu"), ("user", "root"), ("path", "/home/ada"), ("user", "ada")]
    )
    text = b'"node1", NODE1-ib0, node1.site.edu, node12, root, -I/home/ada/x, /home/adam, ada, adapter, "canada"'
    assert named.replace_names(text) == (
        b'"host1", host1-ib0, host1, node12, root, -I/path1/x, /home/adam, user1, adapter, "canada"'
    )
    assert named.find_remaining(b"node12 canada") == {
        "node1"
    }  # `ada` in `canada` is not reported: it has fewer than five letters
    assert named.count_by_kind == {"host": 1, "path": 1, "user": 1}


def test_code_of_an_archive_is_executed_only_with_trust(tmp_path, capsys):
    theirs, witness = support.matrix(tmp_path / "work"), tmp_path / "witness"
    (theirs.path / "metrics").mkdir()
    (theirs.path / "metrics" / "twice.py").write_text(METRIC.format(witness=str(witness)))
    out = tmp_path / "a.shardlab.zip"
    assert collect("archive", "--out", str(out), workspace=theirs) == 0
    assert not witness.exists()  # `collect archive` executed no metric: the workspace is not trusted
    capsys.readouterr()
    assert collect("open", str(out), "--out", str(tmp_path / "one")) == 0
    assert "1 file(s) with code of the author were not executed" in capsys.readouterr().err
    assert not witness.exists()
    assert collect("open", str(out), "--out", str(tmp_path / "two"), "--trust") == 0
    assert witness.read_text() == "executed"


def rewritten(file: Path, folder: Path, changes: dict[str, bytes], *, honest: bool = True, **index: object) -> Path:
    """Copy an archive with changed or added members.

    changes: maps the name of a member to its new content. honest: archive.json has the new sizes and checksums of the members.
    index: values that replace keys of archive.json.
    """
    out = folder / "changed.shardlab.zip"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w") as new:
        members = {name: old.read(name) for name in old.namelist()} | changes
        listed = json.loads(members.pop("archive.json"))
        if honest:
            for name, content in changes.items():
                listed["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        new.writestr("archive.json", json.dumps(listed | index))
        for name, content in members.items():
            new.writestr(name, content)
    return out


@pytest.mark.parametrize(
    "name",
    [
        "workspace/../outside",
        "/etc/outside",
        "workspace/cluster.yaml",
        "workspace/templates/launch/local.sh.j2",
        "workspace/.shardlab/trusted.json",
        "workspace/runs/a/.hidden",
        "workspace/runs/a//b",
        "workspace/runs/\x1b[31m",
        "workspace/runs/a\\b",
        f"workspace/runs/{'a/' * 40}b",
        "elsewhere",
    ],
)
def test_a_path_that_an_archive_may_not_contain_is_refused(file, tmp_path, capsys, name):
    changed = rewritten(file, tmp_path, {name: b"x"})
    assert collect("open", str(changed), "--out", str(tmp_path / "ours")) == 2
    said = capsys.readouterr().err
    assert "which is not a valid path in an archive" in said
    assert "\x1b" not in said
    assert [path.name for path in tmp_path.iterdir()] == [changed.name]


@pytest.mark.parametrize("folders", [28, 300])
def test_the_memory_to_open_an_archive_is_bounded_by_its_size(tmp_path, folders):
    """Archives of up to 1,000 files with long paths. The folders of all files as texts would need 300 or 8 times their size."""
    width = 900 // folders - 1
    names = [f"workspace/runs/{'/'.join(f'{file:0{width}}' for _ in range(folders))}" for file in range(0, 10**width, 1)[:1000]]
    index = {
        "schema": 1, "shardlab": "1", "created": "", "matrix": "m", "matrix_file": None, "anonymous": False, "runs": [],
        "files": {name: {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()} for name in names}, "left_out": [],
    }  # fmt: skip
    path = tmp_path / "long.shardlab.zip"
    with zipfile.ZipFile(path, "w") as zipped:
        for name, content in {"archive.json": json.dumps(index), **dict.fromkeys(names, b"")}.items():
            zipped.writestr(name, content)
    tracemalloc.start()
    try:
        with contextlib.nullcontext() if folders < 32 else pytest.raises(InputError, match="not a valid path"):
            assert len(archive.read_index(path).files) == len(names)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * path.stat().st_size


@pytest.mark.parametrize("pseudonyms", [None, Pseudonyms([("host", support.HOST)])], ids=["plain", "anonymous"])
@pytest.mark.parametrize("name", ["rank-00000.log", "trace.json.gz"])
def test_a_long_file_is_archived_without_reading_it_as_a_whole(tmp_path, pseudonyms, name):
    text = (f"step 1 on {support.HOST}\n" + f"loss {'2.5 ' * 200}\n" * 10).encode() * 1200
    content = gzip.compress(text, 1) if name.endswith(".gz") else text
    (tmp_path / name).write_bytes(content)
    (tmp_path / "staged").mkdir()
    source = ArchiveSource(f"runs/a/log/{name}", tmp_path / name, len(content))
    tracemalloc.start()
    try:
        assert staging.copy_files(tmp_path / "staged", [source], pseudonyms) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(text) / 3
    archived = (tmp_path / "staged" / source.archive_path).read_bytes()
    expected = text if pseudonyms is None else text.replace(support.HOST.encode(), b"host1")
    assert (gzip.decompress(archived) if name.endswith(".gz") else archived) == expected


def test_a_small_archive_with_a_large_index_is_refused(file, tmp_path, capsys):
    path = rewritten(file, tmp_path, {}, left_out=[{"name": "a", "bytes": 1, "why": "x" * 1000}] * 60_000)
    with zipfile.ZipFile(path) as large, zipfile.ZipFile(tmp_path / "small.zip", "w", zipfile.ZIP_DEFLATED) as small:
        for name in large.namelist():
            small.writestr(name, large.read(name))
    assert archive.read_index(path).left_out
    assert collect("open", str(tmp_path / "small.zip"), "--out", str(tmp_path / "ours")) == 2
    assert "archive.json: has more than" in capsys.readouterr().err


def test_damaged_and_changed_archives_are_refused(file, tmp_path, capsys):
    name = next(name for name in archive.read_index(file).files if name.endswith("result.json"))
    extra = "workspace/runs/unlisted"
    cases = {
        "has not the size and the SHA-256": rewritten(file, tmp_path, {name: b"{}"}, honest=False).read_bytes(),
        "are not those that archive.json lists": rewritten(file, tmp_path, {extra: b"x"}, honest=False).read_bytes(),
        "is not of this version": rewritten(file, tmp_path, {}, schema=2).read_bytes(),
        "is both a file and a folder": rewritten(file, tmp_path, {f"{name}/x": b""}).read_bytes(),
        "- at `$.runs[0]`": rewritten(file, tmp_path, {}, runs=["../x"]).read_bytes(),
        "is not an archive, or is damaged": file.read_bytes()[:-500],
        "contains no archive.json": b"PK\x05\x06" + bytes(18),
    }
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    cases["damaged"] = bytes(content)
    for said, damaged in cases.items():
        path = tmp_path / "damaged.shardlab.zip"
        path.write_bytes(damaged)
        assert collect("open", str(path), "--out", str(tmp_path / "ours")) == 2, said
        assert said in capsys.readouterr().err
        assert not (tmp_path / "ours").exists()
    assert collect("open", str(tmp_path / "none.zip")) == 2
    assert collect("open", str(file), "--out", str(tmp_path)) == 2
    assert not list(tmp_path.glob(".*.tmp"))


def test_reading_ends_at_the_stated_size(file, tmp_path):
    """If a member of an archive unzips to more bytes than archive.json states, the rest is not written to the disk."""
    index = archive.read_index(file)
    name = next(name for name in index.files if name.endswith("result.json"))
    bomb = tmp_path / "bomb.shardlab.zip"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            new.writestr(member, bytes(50_000_000) if member == name else old.read(member))
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="has not the size"):
        archive.unpack_archive(bomb, tmp_path / "out", lambda member: member.endswith("result.json"))
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert written < 1_000_000


def test_a_file_that_cannot_be_written_is_an_error_of_the_workspace(file, tmp_path):
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    first = next(name for name in archive.read_index(file).files if name.startswith("workspace/runs/"))
    target = out / first.removeprefix("workspace/")
    target.parent.mkdir(parents=True)
    target.write_text("there")
    with pytest.raises(WorkspaceError):
        archive.unpack_archive(file, out, lambda name: name.startswith("runs/"))


def test_the_index_is_a_document_of_its_type(file):
    with zipfile.ZipFile(file) as zipped:
        assert zipped.namelist()[0] == "archive.json"
        index = msgspec.json.decode(zipped.read("archive.json"), type=archive.ArchiveIndex, strict=True)
    assert index.matrix_file is None or f"workspace/{index.matrix_file}" in index.files
    assert sum(one.bytes for one in index.files.values()) > 0


@pytest.mark.parametrize(("size", "fits"), [(2**53, True), (2**53 + 1, False)])
def test_the_size_of_a_file_in_an_archive_has_a_bound(size, fits):
    with contextlib.nullcontext() if fits else pytest.raises(msgspec.ValidationError, match="<= 9007199254740992"):
        msgspec.convert({"bytes": size, "sha256": "0" * 64}, archive.ArchivedFile)
