"""cluster.yaml: every problem of a file at once, each with its place and what is allowed."""

from pathlib import Path

import pytest

from shardlab import cluster
from shardlab.errors import InputError


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_the_example_is_a_cluster():
    assert cluster.load(Path("examples/local.yaml")).provider == "local"


def test_all_problems_come_together(tmp_path):
    path = write(tmp_path, "schema: 2\nname: Foo Bar\nprovider: slurn\nproivder: local\ndata: {path: 7}\n")
    with pytest.raises(InputError) as caught:
        cluster.load(path)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(f"{path}:").split(": ")[0:2] for line in lines] == [
        ["1:9", "schema"],
        ["2:7", "name"],
        ["3:11", "provider"],
        ["4:1", "proivder"],
        ["5:14", "data.path"],
    ]
    assert "Allowed: 1." in lines[0]
    assert "Allowed: local." in lines[2]
    assert "Did you mean 'provider'? Allowed here: data, name, provider, schema." in lines[3]
    assert "expected text, found the number 7" in lines[4]


def test_missing_keys_and_wrong_kinds_of_value(tmp_path):
    with pytest.raises(InputError, match="the key 'provider' is missing"):
        cluster.load(write(tmp_path, "schema: 1\nname: a\n"))
    with pytest.raises(InputError, match="expected a mapping, found a list"):
        cluster.load(write(tmp_path, "- 1\n"))
    with pytest.raises(InputError, match="expected a mapping, found nothing"):
        cluster.load(write(tmp_path, ""))
    with pytest.raises(InputError, match="found an empty path"):
        cluster.load(write(tmp_path, "schema: 1\nname: a\nprovider: local\ndata: {path: ' '}\n"))


def test_without_a_file_the_cluster_is_this_machine(tmp_path):
    assert cluster.find(None, tmp_path) == cluster.THIS_MACHINE
    write(tmp_path, "schema: 1\nname: mine\nprovider: local\n")
    assert cluster.find(None, tmp_path).name == "mine"


def test_a_dangling_link_is_not_taken_for_absence(tmp_path):
    (tmp_path / "cluster.yaml").symlink_to(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="a link to a file that is not there"):
        cluster.find(None, tmp_path)
