"""`provision plan --pretend FACTS.json`: makes a plan for machines that a file describes, and reaches no machine."""

import json
from pathlib import Path

import pytest
from support_document_keys import wrong

from provision.cli import main
from shardlab.remote.remote import Remote

FACTS = Path(__file__).parents[2] / "recorded/practice_facts.json"
CLUSTER = """
schema: 1
name: practice
provider: virtual
nodes:
  - {name: head, roles: [controller]}
  - {name: work1}
slurm: {partition: batch}
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A workspace with a cluster file. Any command on a machine raises an error."""

    def run(self, argv, **options):
        raise AssertionError(f"a machine was reached: {argv}")

    monkeypatch.setattr(Remote, "run", run)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def plan(workspace, facts, *words):
    return main(["plan", "--pretend", str(facts), "--workspace", str(workspace), *words])


def changed(workspace, **of_head):
    """Writes a facts file in which some facts of the node head are replaced. None removes the fact."""
    document = json.loads(FACTS.read_text())
    known = document["nodes"][0]["facts"]
    known |= of_head
    document["nodes"][0]["facts"] = {name: answer for name, answer in known.items() if answer is not None}
    path = workspace / "facts.json"
    path.write_text(json.dumps(document))
    return path


def operations(printed):
    return {(node["name"], step["name"]): step for node in json.loads(printed)["nodes"] for step in node["operations"]}


def test_an_installation_is_shown_without_a_machine_and_nothing_is_written(workspace, capsys):
    before = sorted(workspace.rglob("*"))
    assert plan(workspace, FACTS, "--only", "packages,hosts,slurm-controller", "--json") == 0
    steps = operations(capsys.readouterr().out)
    assert steps["work1", "packages"]["says"] == [
        "update the package lists", "install munge, python3-venv, slurm-client, slurmd",
    ]  # fmt: skip
    assert steps["work1", "hosts"]["says"][0] == "set the hostname work1 (now localhost)"
    assert "write /etc/slurm/slurm.conf" in steps["head", "slurm-controller"]["says"]
    assert sorted(workspace.rglob("*")) == before


def test_a_fact_missing_from_the_file_leaves_only_its_operations_unplanned(workspace, capsys):
    assert plan(workspace, changed(workspace, packages=None), "--only", "packages,hosts", "--json") == 1
    printed = capsys.readouterr().out
    steps = operations(printed)
    assert steps["head", "packages"]["state"] == "failed"
    assert steps["head", "hosts"]["state"] == steps["work1", "packages"]["state"] == "would change"
    (head, _) = json.loads(printed)["nodes"]
    assert head["unanswered"]["packages"].endswith("facts.json does not have the fact 'packages'")


def test_an_operation_that_needs_a_command_to_be_planned_says_so(workspace, capsys):
    assert plan(workspace, FACTS, "--only", "clock", "--json") == 1
    step = operations(capsys.readouterr().out)["head", "clock"]
    assert step["says"] == ["head: with --pretend, no command is run on this machine."]


def test_the_output_of_plan_is_a_facts_file_that_gives_the_same_plan(workspace, capsys):
    """The JSON document of `provision plan` is accepted as a facts file and gives the same plan."""
    words = ("--only", "munge-user,hosts", "--skip", "hosts", "--json")
    assert plan(workspace, FACTS, *words) == 0
    printed = capsys.readouterr().out
    assert wrong("provision", json.loads(printed)) == []
    (workspace / "again.json").write_text(printed)
    assert plan(workspace, workspace / "again.json", *words) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        ("", "Input data was truncated"),
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"nodes": [{"name": 1}]}', "Expected `str`, got `int`"),
        ('{"nodes": []}', "describes no node. Allowed: each node of the cluster file once: head, work1."),
        ('{"nodes": [{"name": "head"}]}', "describes head. Allowed: each node"),
        ('{"nodes": [{"name": "head"}, {"name": "work1"}, {"name": "work1"}]}', "describes head, work1, work1."),
        ('{"nodes": [{"name": "head"}, {"name": "gpu7"}]}', "describes head, gpu7."),
        ('{"nodes": ' + "[" * 100_000, "Expected `object`, got `array`"),
    ],
)
def test_a_file_that_does_not_describe_the_nodes_is_refused_in_a_sentence(content, says, workspace, capsys):
    path = workspace / "facts.json"
    if content is not None:
        path.write_text(content)
    assert plan(workspace, path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {path}: ")
    assert says in said.err
    assert len(said.err.splitlines()) == 1


def test_a_fact_of_another_type_is_refused_in_a_sentence(workspace, capsys):
    path = changed(workspace, packages={"versions": ["chrony"], "interrupted": False})
    assert plan(workspace, path, "--only", "packages") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (f"error: {path}: node head: the fact 'packages': Expected `object`, got `array` - at `$.versions`.")


@pytest.mark.parametrize("verb", ["apply", "verify", "facts", "down", None])
def test_only_the_verb_plan_pretends(verb, workspace, capsys):
    words = [verb] if verb else []
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--pretend", str(FACTS), "--workspace", str(workspace)])
    assert (
        f"--pretend belongs to the verb plan and cannot be combined with the verb '{verb or 'apply'}'"
        in capsys.readouterr().err
    )
