"""`collect archive --anonymous` keeps the words of shardlab's own formats, whatever the user's name is."""

import contextlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import support_collect as support

from collect import cli
from collect.archiving import anonymous, contents
from collect.reading.load import LoadedMatrix, load_matrix
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.workspace.workspace import Workspace

REFUSED = r"--anonymous: the \w+ '[^']+' has the same name as a key or value in the records, so it cannot be replaced"
# Keys of records whose values are texts of people or of machines. No command looks for a word in them.
FREE = {
    "boot_id",
    "cpu_model",
    "data",
    "git_commit",
    "gpu_why_absent",
    "packages",
    "strategy_code",
    "system",
    "templates",
    "versions",
}
FREE |= {"why", "workload_code"}
REPLACED = ("max", "norm", "grad", "alice", "admin", "root", "tom", "user", "fail", "time")
REFUSED_LOGINS = ("rank", "step", "mean", "loss", "tiny")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = support.matrix(tmp_path_factory.mktemp("study"))
    event = {"ph": "X", "cat": "kernel", "tid": 7, "ts": 1.5, "dur": 2, "args": {"Process Group Name": "0"}}
    for run in made.list_run_dirs():
        if run.result.exists():
            files.make_folder(run.trace_file(0).parent)
            run.trace_file(0).with_suffix("").write_text(json.dumps({"traceEvents": [event]}))
    return made


@pytest.fixture(scope="module")
def loaded(workspace) -> LoadedMatrix:
    return load_matrix(workspace, None)


def archived(workspace, out, capsys):
    """Write an anonymous archive. Returns (the exit code, what the command printed)."""
    code = cli.main(["archive", "--anonymous", "--out", str(out), "--json", "--workspace", str(workspace.path)])
    return code, capsys.readouterr()


@pytest.mark.parametrize("name", REFUSED_LOGINS)
def test_an_anonymous_archive_is_refused_if_the_login_is_a_word_of_the_records(workspace, tmp_path, monkeypatch, capsys, name):
    support.log_in(monkeypatch, name)
    code, printed = archived(workspace, tmp_path / "a.shardlab.zip", capsys)
    assert code == 2
    assert re.search(REFUSED, printed.err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", REPLACED)
def test_an_anonymous_archive_does_not_depend_on_the_login(workspace, tmp_path, monkeypatch, capsys, name):
    support.log_in(monkeypatch, name)
    out = tmp_path / "a.shardlab.zip"
    code, printed = archived(workspace, out, capsys)
    assert (code, json.loads(printed.out)["remaining"]) == (0, {}), printed.err
    assert cli.main(["open", str(out), "--out", str(tmp_path / "opened"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same_report"] is True
    opened = json.loads((tmp_path / "opened/report/summary.json").read_text())
    assert sum(row["states"].get("completed", 0) for row in opened["rows"]) > 1
    with zipfile.ZipFile(out) as zipped:
        assert not [member for member in zipped.namelist() if str(tmp_path).encode() in zipped.read(member)]


def test_an_anonymous_archive_replaces_the_name_of_slurms_cluster(tmp_path):
    (tmp_path / "c.yaml").write_text("schema: 1\nname: c\nprovider: slurm\nslurm: {cluster: cm4}\nstorage: {shared: /s}\n")
    assert ("site", "cm4") in anonymous._list_cluster_names(cluster.load_cluster(tmp_path / "c.yaml"))
    folder = SimpleNamespace(list_hosts=lambda: ["gpu1"], read_run=lambda: SimpleNamespace(slurm_cluster="cm4"))
    events = [SimpleNamespace(data={"job": "7", "cluster": "inter"}), SimpleNamespace(data={})]
    names = anonymous._list_run_names(SimpleNamespace(runs=[SimpleNamespace(folder=folder, events=events)]))
    assert {("site", "cm4"), ("site", "inter")} <= set(names)


def test_a_login_equal_to_a_word_of_the_records_changes_no_record(workspace, loaded, monkeypatch):
    """Each word in the records, and each part of such a word, is tried as a login."""
    sources, _ = contents.choose_files(workspace, loaded, 2**30)
    runs = {run.verdict.state: run.folder.path for run in loaded.runs}.values()  # one run of each state
    chosen = [one for one in sources if "json" in one.path.suffix and any(one.path.is_relative_to(run) for run in runs)]
    texts = {one.archive_path: one.path.read_text() for one in chosen}
    fixed = {name: fixed_words(text) for name, text in texts.items()}
    words = {word for name in texts for word in (*fixed[name], *Path(name).parts)}
    parts = {
        part for word in words for part in (word, *re.split(r"[^A-Za-z0-9]", word)) if re.fullmatch(r"[A-Za-z_]{2,}", part)
    }
    assert {"max", "grad", "rank", "attempt", "started", "constant", "Group"} <= parts
    changed = []
    for part in sorted(parts - {"lo"}):
        support.log_in(monkeypatch, part)
        try:
            pseudonyms = anonymous.make_pseudonyms(workspace, loaded, cluster.find_cluster(None, workspace.path))
        except InputError as error:
            refusal = str(error)
            assert re.match(REFUSED, refusal) or refusal.startswith("--anonymous: the name of the matrix"), refusal
            continue
        for name, text in texts.items():
            replaced = [
                pseudonyms.replace_names(piece.encode()).decode().replace("host1", support.HOST) for piece in (name, text)
            ]
            if [replaced[0], fixed_words(replaced[1])] != [name, fixed[name]]:
                changed.append((part, replaced[0], set(fixed_words(replaced[1])) - set(fixed[name])))
    assert changed == []


def fixed_words(text: str) -> list[str]:
    """The words of a JSON document, or of lines of JSON, that a reader needs unchanged: all keys, and all texts that are values
    of other keys than FREE. Lines that are no JSON are skipped."""
    documents = []
    for line in [text] if text.startswith("{\n") else text.splitlines():
        with contextlib.suppress(ValueError):
            documents.append(json.loads(line))
    return [word for document in documents for word in words_in(document)]


def words_in(value: object) -> Iterator[str]:
    """All texts in a JSON value, except the values of the keys FREE."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from words_in(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from () if key in FREE else words_in(part)
