"""The pages in docs/ that describe JSON documents are up to date, and documents of commands have exactly the described keys."""

import ast
import json
import re
from pathlib import Path

import pytest
import support_collect
import support_documents_page as page
import support_ranks
from support_document_keys import NAMED, wrong
from support_golden import same_as_golden
from support_reference import COMMANDS, MAINS
from support_trust import make_own

from shardlab.files import field_docs

ROOT = Path(__file__).parents[2]
# Maps the name of a description in support_documents.py to (the command whose JSON output it describes, its exit code).
# `{run}` stands for the name of a run with traces, `{other}` for another such run, `{folder}` for the workspace and
# `{archive}` for an archive of the workspace.
PRINTED = {
    "provision init": ("provision init", 0),
    "provision hardware": ("provision hardware", 0),
    "jobs plan": ("jobs plan --matrix quickstart --scale-out 4", 0),
    "jobs render": ("jobs render --matrix quickstart --out {folder}/rendered", 0),
    "jobs submit --dry-run": ("jobs submit --matrix quickstart --dry-run", 0),
    "jobs status": ("jobs status", 0),
    "jobs cancel": ("jobs cancel --all", 0),
    "jobs advise": ("jobs advise --workload gpt2 --gpus 8 --gpu a100", 0),
    "jobs strategies": ("jobs strategies", 0),
    "jobs workloads": ("jobs workloads", 0),
    "jobs launchers": ("jobs launchers", 0),
    "jobs matrices": ("jobs matrices", 0),
    "collect fetch": ("collect fetch", 0),
    "collect summarize": ("collect summarize", 0),
    "collect verdicts": ("collect verdicts", 0),
    "collect compare": ("collect compare {folder} {folder}", 0),
    "collect explain": ("collect explain {run} throughput_per_s", 0),
    "collect history": ("collect history", 0),
    "collect archive": ("collect archive --out {folder}/study.shardlab.zip", 0),
    "collect open": ("collect open {archive} --out {folder}/opened", 0),
    "collect metrics": ("collect metrics", 0),
    "collect export": ("collect export --to csv", 0),
    "collect track": ("collect track {run} --to tensorboard", 0),
    "collect trace": ("collect trace {run} --against {other}", 0),
    "collect timeline": ("collect timeline {run} --perfetto {folder}/timeline.json", 0),
}
# Maps the name of each document that this file does not test to the test file that compares its keys.
ELSEWHERE = {
    "provision": "test_pretend.py",
    "jobs submit, jobs retry, jobs trace": "test_tutorial_e2e.py",
    "collect watch": "support_watch.py",
    "collect sample": "test_collect_sampler.py",
    "collect import": "test_import.py",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A workspace of completed runs on two ranks, each of which has a trace per rank."""
    made = make_own(tmp_path_factory.mktemp("documents"))
    cells = [support_collect.cell("ddp", 2), support_collect.cell("fsdp2", 2)]
    support_collect.keep(made, cells, 2)
    for cell in cells:
        for repeat in (1, 2):
            folder = support_collect.completed(made, cell, repeat)
            (folder.path / "trace").mkdir()
            for rank in support_ranks.run(repeat, size=2):
                rank.write(folder.path / "trace", gz=True)
    archive = made.path.with_name("archive") / "study.shardlab.zip"
    assert MAINS["collect"](["archive", "--out", str(archive), "--workspace", str(made.path)]) == 0
    return made


def document(workspace, capsys, line, code):
    """The document that a command prints with --json. line: the command line. code: its expected exit code."""
    run, *_, other = workspace.list_run_ids()
    line = line.replace("{run}", run).replace("{other}", other).replace("{folder}", str(workspace.path))
    line = line.replace("{archive}", f"{workspace.path.with_name('archive')}/study.shardlab.zip")
    program, *words = line.split(" ")
    assert MAINS[program]([*words, "--json", "--workspace", str(workspace.path)]) == code
    return json.loads(capsys.readouterr().out)


def test_the_pages_are_current():
    same_as_golden("../../docs/reference/json-files.md", page.files())
    same_as_golden("../../docs/reference/json-output.md", page.output())
    same_as_golden("../../docs/reference/json-types.md", page.types())


def test_each_key_is_on_a_page():
    text = page.files() + page.output() + page.types() + (ROOT / "docs/reference/matrix-file.md").read_text()
    keys = {line.name for kind in page.all_types().values() for line in page.key_lines(kind)}
    assert len(keys) > 500
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_a_short_text_keeps_the_unit_of_a_number():
    """The pages have the first sentence about a key; no unit may stand only in what they leave out."""
    lost = []
    for name, kind in page.all_types().items():
        texts = field_docs.read_field_docs(kind)
        for line in page.key_lines(kind):
            shown = f"{line.name} {line.text}".lower()
            units = {unit for unit in re.findall(page.UNIT, texts.get(line.name, "")) if unit.lower() not in shown}
            if units and not page.has_unit(line.name) and line.value.startswith(("integer", "number")):
                lost.append(f"{name}.{line.name}: {units}")
    assert lost == []


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_document_has_the_keys_that_are_described(name, workspace, capsys):
    assert wrong(name, document(workspace, capsys, *PRINTED[name])) == []


def test_every_described_output_is_compared():
    parts = {name for name in NAMED if " of " in name}
    files = {one.name for one in page.FILES}
    assert set(NAMED) - parts - files == {*PRINTED, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        (path,) = (ROOT / "tests").rglob(test)
        assert f'"{name}"' in path.read_text()


def test_every_verb_has_a_description():
    """Each verb has a description of its JSON document, except `jobs logs`, which prints logs and no document. The verbs of
    `provision` share a description."""
    verbs = [command for command in COMMANDS if " " in command and not command.startswith(("shardlab ", "provision "))]
    described = " ".join(NAMED)
    assert [verb for verb in verbs if verb not in described] == ["jobs logs"]


def test_a_key_that_is_missing_or_not_described_is_found(workspace, capsys):
    status = document(workspace, capsys, *PRINTED["jobs status"])
    del status["runs"][0]["state"]
    status["runs"][1]["surprise"] = 1
    assert wrong("jobs status", status) == ["Status: state is missing", "Status: surprise is not described"]


def test_each_kind_of_event_is_in_the_code():
    texts = {
        node.value
        for folder in ("shardlab", "jobs", "trainers", "collect")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(page.EVENTS) <= texts
