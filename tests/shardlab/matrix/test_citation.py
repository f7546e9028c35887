"""CITATION.cff agrees with the package, and the report cites shardlab and the study in BibTeX."""

import re
import tomllib
from pathlib import Path

import pytest
import support_collect as support
import yaml

import shardlab
from collect.cli import main
from shardlab.errors import InputError
from shardlab.matrix import citation, matrix
from shardlab.workspace.workspace import Workspace

ROOT = Path(__file__).parents[3]


def test_the_citation_agrees_with_the_package():
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (ROOT / "CITATION.cff").read_text() == (ROOT / "shardlab/CITATION.cff").read_text(), "copy shardlab/CITATION.cff"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= facts.keys()
    assert facts["cff-version"] == "1.2.0"
    assert (facts["version"], facts["license"]) == (shardlab.__version__, project["license"])
    assert facts["authors"] == [{"name": "shardlab contributors"}]
    assert facts["title"].startswith(project["name"])


def fields_of(entry):
    """(key, fields) of a BibTeX entry with one field per line."""
    head, *lines, end = entry.splitlines()
    assert (head[:6], head[-1], end) == ("@misc{", ",", "}")
    return head[6:-1], dict(re.fullmatch(r"  (\w+) += \{(.*)\},", line).groups() for line in lines)


def test_shardlab_is_cited_with_the_facts_of_its_file():
    key, fields = fields_of(citation.make_shardlab_bibtex())
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert key == "shardlab"
    assert fields == {
        "author": "{shardlab contributors}",
        "title": f"{{{facts['title']}}}",
        "note": f"Version {shardlab.__version__}",
    }


def test_a_study_is_cited_with_its_known_fields():
    known = matrix.load_matrix(matrix.find_matrix_file("paper1")).file.citation
    key, fields = fields_of(citation.make_study_bibtex("paper1", known))
    assert (key, fields["author"]) == ("paper1", "Dev Mehrotra and Sai Krishna Ponnam and Rachael Lang")
    assert fields["year"] == "2025"
    assert fields_of(citation.make_study_bibtex("m", citation.Citation("A"))) == ("m", {"title": "{A}"})
    whole = citation.Citation("A", ["B"], 2026, "C", "10.1234/ab_c", "https://example.org/a_b")
    assert set(fields_of(citation.make_study_bibtex("m", whole))[1]) == {
        "author",
        "title",
        "year",
        "howpublished",
        "doi",
        "url",
    }


def test_special_characters_of_bibtex_are_escaped_in_an_entry():
    study = citation.Citation("100 % of {it} \\input{x}\n@misc{y, $a_b$", ["Sand and Sea Ltd.", "A & B"])
    entry = citation.make_study_bibtex("m", study)
    assert entry.count("\n") == 3
    fields = fields_of(entry)[1]
    assert fields["author"] == r"{Sand and Sea Ltd.} and A \& B"
    assert r"100 \% of \{it\} \textbackslash{}input\{x\} @misc\{y, \$a\_b\$" in fields["title"]
    bare = entry.replace(r"\{", "").replace(r"\}", "")
    assert bare.count("{") == bare.count("}")


@pytest.mark.parametrize(
    ("written", "place", "said"),
    [
        ("{authors: [A]}", "citation", "title"),
        ("{title: A, years: 2025}", "citation.years", "years"),
        ("{title: A, year: '2025'}", "citation.year", "int"),
        ("{title: A, doi: 'https://doi.org/10.1/a'}", "citation.doi", "10"),
        ("{title: A, url: 'javascript:alert(1)'}", "citation.url", "http"),
    ],
)
def test_a_wrong_citation_is_refused_with_its_place(tmp_path, written, place, said):
    file = tmp_path / "m.yaml"
    file.write_text(f"schema: 1\nname: m\ncitation: {written}\ndefaults: {{workload: resnet50}}\naxes: {{strategy: [ddp]}}\n")
    with pytest.raises(InputError) as refused:
        matrix.load_matrix(file)
    assert "m.yaml:3:" in str(refused.value)
    assert place in str(refused.value)
    assert said in str(refused.value)


def test_the_report_has_both_entries(tmp_path):
    workspace = Workspace(tmp_path)
    study = {"title": "A <b>study</b>", "authors": ["B"], "year": 2026}
    for kept in ({"citation": study}, {}):
        support.keep(workspace, [support.cell()], repeats=1, **kept)
        assert main(["summarize", "--workspace", str(workspace.path)]) == 0
        text = (workspace.report / "index.html").read_text()
        section = text[text.index('<section id="cite">') :]
        assert "@misc{shardlab," in section
        assert ("@misc{quickstart," in section) is bool(kept)
        assert ("A &lt;b&gt;study&lt;/b&gt;" in section) is bool(kept)
        assert "<b>study" not in section
