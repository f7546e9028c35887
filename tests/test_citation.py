"""CITATION.cff has the keys that CFF 1.2.0 requires, and agrees with the package."""

import tomllib
from pathlib import Path

import yaml

import shardlab

ROOT = Path(__file__).parents[1]


def test_the_citation_agrees_with_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (shardlab.__version__, project["license"])
    assert citation["authors"] == [{"name": "shardlab contributors"}]
    assert citation["title"].startswith(project["name"])
