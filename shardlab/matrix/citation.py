"""How to cite shardlab and a study, as BibTeX.

The facts about shardlab are in shardlab/CITATION.cff, which is part of the package. The file CITATION.cff at the root of the
repository, where GitHub and Zenodo look for it, is a copy that tests compare.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from shardlab.terminal import printable

FILE = "CITATION.cff"
_AND = re.compile(r"\band\b")
_MARKS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''",
}  # fmt: skip
_BY_CODE = str.maketrans(_MARKS)


class Citation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a study, for its entry in a bibliography. A fact that is not known is left out."""

    title: Annotated[str, msgspec.Meta(min_length=1)]
    """The title of the study."""
    authors: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    """The authors in order, each as `First Last` or `Last, First`."""
    year: Annotated[int, msgspec.Meta(ge=1900, le=2200)] | None = None
    """The year in which the study was published."""
    published: str = ""
    """Where the study was published, such as the name of a journal or a conference."""
    doi: Annotated[str, msgspec.Meta(pattern=r"^(10\.[0-9]{4,9}/[^\s{}\\%#]+)?\Z")] = ""
    """The DOI, without an address before it."""
    url: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s{}\\]+)?\Z")] = ""
    """The address of the study."""


def of_shardlab() -> str:
    """The BibTeX entry of shardlab."""
    from importlib import resources

    import yaml  # imported only here: every command imports this module, and few need PyYAML

    facts = yaml.safe_load((resources.files("shardlab") / FILE).read_bytes())
    authors = ["{" + author["name"] + "}" for author in facts["authors"]]  # names of groups, which BibTeX must not take apart
    fields = {"author": " and ".join(authors), "title": f"{{{_text(facts['title'])}}}", "note": f"Version {facts['version']}"}
    return _entry("shardlab", fields)


def of_study(key: str, study: Citation) -> str:
    """The BibTeX entry of a study. key: its key in the bibliography, such as the name of the matrix."""
    fields = {"author": " and ".join(map(_author, study.authors)), "title": f"{{{_text(study.title)}}}"}
    fields |= {"year": "" if study.year is None else str(study.year), "howpublished": _text(study.published)}
    return _entry(key, fields | {"doi": printable.one_line(study.doi), "url": printable.one_line(study.url)})


def _author(name: str) -> str:
    return "{" + _text(name) + "}" if _AND.search(name) else _text(name)


def _text(text: str) -> str:
    """A text in one line, in which no character has a meaning for TeX or BibTeX."""
    return " ".join(printable.one_line(text).split()).translate(_BY_CODE)


def _entry(key: str, fields: dict[str, str]) -> str:
    """An entry of the type misc, which every BibTeX style has (only biblatex has @software). Empty fields are left out."""
    known = {name: value for name, value in fields.items() if value}
    width = max(map(len, known))
    return "\n".join([f"@misc{{{key},", *(f"  {name:<{width}} = {{{value}}}," for name, value in known.items()), "}"])
