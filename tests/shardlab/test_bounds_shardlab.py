"""Limits of the package shardlab: a value exactly at the limit is allowed, and the next value is refused or cut."""

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support_bounds import is_allowed, refusal
from support_cloudlab import manifest, node

from shardlab.cloudlab import cloudlab_manifest
from shardlab.cluster.lease import Lease
from shardlab.files import document, files, plugin_source
from shardlab.matrix import expression, matrix, model_file
from shardlab.remote import shared_connection
from shardlab.runs import lease_cutoff
from shardlab.runs.state import JudgedState
from shardlab.terminal import printable
from shardlab.workspace import archive, workspace_trust
from shardlab.workspace.workspace import Workspace

NOW = datetime(2031, 5, 2, 18, 0, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
MATRIX = "schema: 1\nname: m\ntitle: t\ndefaults: {{workload: gpt2-tiny}}\naxes: {{seed: {seeds}, steps: {steps}}}\n"


def nested(levels):
    return document.parse_document(("[" * levels + "1" + "]" * levels).encode(), "f")


def expression_of(length):
    return is_allowed(expression.Expression, "gpus" + " " * (length - 4), says="more than 2000 characters")


def name_in_archive(length):
    """Whether an archive may have a path with so many characters, each of whose folders is short."""
    start = f"{archive.WORKSPACE_PREFIX}runs/"
    rest = "/".join(["x" * 99] * 20)[: length - len(start)].rstrip("/")
    return archive._is_allowed_name(start + rest + "y" * (length - len(start) - len(rest)))


def is_allowed_in_runs(name):
    return archive._is_allowed_name(f"{archive.WORKSPACE_PREFIX}runs/{name}")


def configuration(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    model_file._check_keys("f has", value, 0)


def lease(expires=NOW + 9 * HOUR, read=NOW):
    return Lease(expires, read, "manifest")


def ended(last_record):
    """The state of a run whose lease has just ended, by the time of its last record."""
    return lease_cutoff.judge_by_records(JudgedState("running", ""), lease(NOW, NOW), last_record, NOW + HOUR).state


# What is limited: (whether a value is allowed, the value at the limit, the next value).
LIMITS = {
    "levels of a YAML file": (lambda levels: is_allowed(nested, levels, says="deeper than 32 levels"), 32, 33),
    "characters of an expression": (expression_of, 2000, 2001),
    "characters of a path in an archive": (name_in_archive, 1000, 1001),
    "folders of a path in an archive": (lambda n: is_allowed_in_runs("/".join("x" * (n - 1))), 32, 33),
    "bytes of a name in an archive": (lambda n: is_allowed_in_runs("x" * n), 255, 256),
    "levels of a model's configuration": (lambda n: is_allowed(configuration, n, says="deeper than 32 levels"), 32, 33),
    "age of a lease": (lambda age: not lease(read=NOW - age).is_stale(NOW), 6 * HOUR, 6 * HOUR + SECOND),
    "a lease that was read in the future": (
        lambda ahead: not lease(read=NOW + ahead).was_read_in_future(NOW), 5 * MINUTE, 5 * MINUTE + SECOND,
    ),
    "time before the end of a lease without a reminder": (
        lambda left: lease(expires=NOW + left).make_copy_reminder(NOW) is not None, 2 * HOUR, 2 * HOUR + SECOND,
    ),
    "last record before the end of a lease": (lambda age: ended(NOW - age) == "node_fail", 10 * MINUTE, 10 * MINUTE + SECOND),
    "last record after the end of a lease": (lambda after: ended(NOW - after) == "running", 0 * SECOND, SECOND),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
def test_the_value_at_a_limit_is_allowed_and_the_next_is_not(what):
    allows, limit, beyond = LIMITS[what]
    assert allows(limit)
    assert not allows(beyond)


@pytest.mark.parametrize(("size", "is_read"), [(64, True), (65, False)])
def test_a_file_of_the_largest_size_is_read_and_a_larger_one_is_not(tmp_path, monkeypatch, size, is_read):
    for module, name in ((document, "MAX_BYTES"), (plugin_source, "MOST_BYTES")):
        monkeypatch.setattr(module, name, 64)
    path = tmp_path / "file"
    path.write_bytes(b"#" * size)
    assert is_allowed(document.load_document, path, says="larger than") is is_read
    assert is_allowed(plugin_source.read_plugin_file, path, says="longer than") is is_read
    assert (refusal(files.read, path, 64, of=files.TooLarge) is None) is is_read


@pytest.mark.parametrize(("combinations", "is_expanded"), [(6, True), (7, False)])
def test_a_matrix_may_have_the_largest_number_of_combinations(tmp_path, monkeypatch, combinations, is_expanded):
    monkeypatch.setattr(matrix, "MAX_CELLS", 6)
    seeds = [1, 2] if is_expanded else [1]
    steps = list(range(1, combinations // len(seeds) + 1))
    path = tmp_path / "m.yaml"
    path.write_text(MATRIX.format(seeds=seeds, steps=steps))
    assert is_allowed(matrix.load_matrix, path, says="found 7 combinations. Allowed: 6 or fewer") is is_expanded


def test_a_line_of_the_largest_length_is_shown_whole_and_a_longer_one_is_cut():
    assert printable.clean_text("x" * 4000) == "x" * 4000
    assert printable.clean_text("x" * 4001) == "x" * 4000 + " ... (1 more characters)"
    assert printable.LogCleaner().clean_part(b"x" * 4000 + b"\n") == "x" * 4000 + "\n"
    cleaned = printable.LogCleaner().clean_part(b"x" * 4001 + b"\n")
    assert cleaned == "x" * 4000 + " ... (the log file has the rest of this line)\n"


def test_the_name_of_a_model_has_at_most_forty_characters():
    assert model_file._make_model_name(Path("m" * 40 + ".json")) == "m" * 40
    assert model_file._make_model_name(Path("m" * 41 + ".json")) == "m" * 40


@pytest.mark.parametrize(("length", "is_used"), [(49, True), (50, False)])
def test_sockets_of_ssh_are_in_the_users_cache_unless_its_path_is_too_long(tmp_path, monkeypatch, length, is_used):
    monkeypatch.setattr(shared_connection, "SHORT_FOLDER", tmp_path)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        cache = Path(short, "x" * (length - len(f"{short}//shardlab/ssh")))
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        folder = shared_connection.make_socket_folder()
    assert len(f"{cache}/shardlab/ssh") == length
    assert folder.is_relative_to(cache) is is_used
    assert folder.is_relative_to(tmp_path) is not is_used


@pytest.mark.parametrize(("count", "more"), [(5, "."), (6, " and 1 more.")])
def test_a_refusal_names_five_files_of_somebody_else_and_counts_the_rest(tmp_path, count, more):
    (tmp_path / "workloads").mkdir()
    for number in range(count):
        (tmp_path / "workloads" / f"w{number}.py").write_text("")
    message = refusal(workspace_trust.must_be_allowed, Workspace(tmp_path), "start runs")
    names = ", ".join(f"workloads/w{number}.py" for number in range(5))
    assert f"Not allowed yet: {names}{more} If you wrote" in message


@pytest.mark.parametrize(("nodes", "is_read"), [(2, True), (3, False)])
def test_a_manifest_may_have_the_largest_number_of_nodes(monkeypatch, nodes, is_read):
    monkeypatch.setattr(cloudlab_manifest, "MOST_NODES", 2)
    text = manifest(*(node(f"gpu{number}", number + 1) for number in range(nodes)))
    content = [("m.xml", text.encode())]
    assert (
        is_allowed(cloudlab_manifest.parse_manifests, content, says="more than 2 nodes. Allowed: the manifest of one")
        is is_read
    )
