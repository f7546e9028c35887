"""The real parsers accept every command that a page, a message or a help text prints, with the words as they are printed.

What is not tried: a drawing whose lines begin with the name of a package (DRAWING); the rest of a command after `...`; in a
sentence, words that a command requires and that the sentence does not name, as in `jobs submit --wait`; the value of an
option if it is a word in capitals, such as N; docs/reference/commands.md, which repeats the help. No command runs.
"""

import re

import pytest
from support_printed_commands import (
    PAGES,
    PROGRAMS,
    ROOT,
    Printed,
    commands,
    help_commands,
    page_commands,
    product_commands,
    refusal,
    verbs_of,
)

import collect.cli
import jobs.cli
import provision.cli
from shardlab.matrix import matrix

DRAWING = (
    "provision   jobs   collect        never import each other",
    "shardlab                 imports nothing of ours, never torch",
)
BY_PAGE = {page: list(page_commands(page)) for page in PAGES}
EVERY = [printed for page in PAGES for printed in BY_PAGE[page]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_parsers_accept_the_commands_of_the_page(page):
    refused = [refusal(printed) for printed in BY_PAGE[page] if printed.line not in DRAWING]
    assert [why for why in refused if why is not None] == []


def test_the_parsers_accept_the_commands_of_messages_and_docstrings():
    tried = list(product_commands())
    assert len(tried) > 250
    assert [why for why in map(refusal, tried) if why is not None] == []


def test_the_parsers_accept_the_examples_of_the_help():
    tried = list(help_commands())
    tops = (provision.cli.parser(), jobs.cli.parser(), collect.cli.parser())
    verbs = {f"{top.prog} {verb}" for top in tops for verb in verbs_of(top)}
    assert {printed.place for printed in tried} == {
        f"{name} --help" for name in ("shardlab", "provision", "jobs", "collect", *verbs)
    }
    assert [why for why in map(refusal, tried) if why is not None] == []


def test_the_pages_have_many_commands():
    """If a rule above skipped too much, these numbers would fall. At first: 81 pages, 222 lines to type, 551 mentions."""
    assert len([page for page in PAGES if BY_PAGE[page]]) > 70
    assert len([printed for printed in EVERY if printed.whole]) > 200
    assert len([printed for printed in EVERY if not printed.whole]) > 450
    words = [words for printed in EVERY for words in commands(printed.line)]
    assert {command[0] for command in words} == set(PROGRAMS)
    assert [printed for printed in EVERY if not commands(printed.line)] == []
    assert sorted(printed.line for printed in EVERY if printed.line in DRAWING) == sorted(DRAWING)


@pytest.mark.parametrize(
    "line",
    [
        "provision init node0 node1 > cluster.yaml",
        "provision plan cluster.yaml",
        "provision cluster.yaml --ssh node0 node1",
        "provision cluster.yaml vrify",
        "$ sudo provision examples/virtual.yaml wram",
        "jobs submit --matrx quickstart",
        "jobs submit",
        "jobs plan --matrix quickstart --repeats two",
        "collect fetch && collect sumarize",
        "collect summarize --json | collect shwo",
        'eval "$(shardlab shell-intit)" && shardlab jbos status',
        "shardlab jobs stats",
        "make quikstart",
        "PYTHON=python3 make mutants SEED=15",
        "TERM=dumb jobs status --wach   # a comment",
        "cd ../mine && time .venv/bin/jobs lgos RUN",
    ],
)
def test_a_wrong_command_is_refused_with_its_place(line):
    (why,) = filter(None, [refusal(Printed("page.md:7", line, whole=True))])
    assert why.startswith(f"page.md:7: {line}: ")


def test_commands_are_read_from_blocks_and_sentences_of_a_page(tmp_path, monkeypatch):
    """Each way in which a page prints a command, with the line where it is printed."""
    monkeypatch.setattr("support_printed_commands.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "Run `jobs status` or `jobs\nlogs RUN`, not `jobs`.\n\n    make test   # or: jobs plan --matrix a; then rest\n\n"
        "```text\njobs of output\nerror: nothing. Run first: provision CLUSTER.yaml\n```\n\n"
        "```sh\n. .venv/bin/activate && provision\n```\n\n    $ collect fetch\n    collect of output\n"
    )
    assert sorted((printed.line, printed.whole, printed.place) for printed in page_commands(tmp_path / "page.md")) == [
        ("$ collect fetch", True, "page.md:15"),
        (". .venv/bin/activate && provision", True, "page.md:12"),
        ("jobs logs RUN", False, "page.md:1"),
        ("jobs plan --matrix a", False, "page.md:4"),
        ("jobs status", False, "page.md:1"),
        ("make test", True, "page.md:4"),
        ("provision CLUSTER.yaml", False, "page.md:8"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_matrices_that_commands_name_exist(page):
    """A path of the repository exists. A name after --matrix is a matrix that ships, or one whose file the page names, or
    `imported`, which `collect import` makes. A folder
    that the page enters with `cd` is made by the page."""
    folders, text = {path.name for path in ROOT.iterdir() if path.is_dir()}, page.read_text()
    missing = []
    for words in (words for printed in BY_PAGE[page] for words in commands(printed.line)):
        paths = [word for word in words[1:] if "/" in word and word.partition("/")[0] in folders]
        missing += [path for path in paths if not (ROOT / path).exists()]
        name = words[words.index("--matrix") + 1] if "--matrix" in words[:-1] else "quickstart"
        ships = name in matrix.find_shipped_matrices() or "/" in name or name.endswith(".yaml")
        missing += [name] if not ships and name not in ("NAME", "mine", "imported") and f"{name}.yaml" not in text else []
    missing += [folder for folder in re.findall(r"^ .*\bcd (\.\./\w+)", text, re.MULTILINE) if f"mkdir {folder}" not in text]
    assert missing == []
