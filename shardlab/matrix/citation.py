"""How to cite shardlab and a study, as BibTeX.

The facts about shardlab are in shardlab/CITATION.cff, which is part of the package. The file CITATION.cff at the root of the
repository, where GitHub and Zenodo look for it, is a copy that tests compare.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from shardlab.record_types import limit_text
from shardlab.terminal import printable

CITATION_FILE = "CITATION.cff"
_AND_WORD = re.compile(r"\band\b")
_TEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''",
}  # fmt: skip
_ESCAPE_TABLE = str.maketrans(_TEX_ESCAPES)


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
    doi: Annotated[str, limit_text(r"^(10\.[0-9]{4,9}/[^\s{}\\%#]+)?\Z", "a DOI, such as 10.1145/3458817.3476209")] = ""
    """The DOI, without an address before it."""
    url: Annotated[str, limit_text(r"^(https?://[^\s{}\\]+)?\Z", "an address that begins with https:// or http://")] = ""
    """The address of the study."""


def make_shardlab_bibtex() -> str:
    """The BibTeX entry of shardlab."""
    from importlib import resources

    import yaml  # imported only here: every command imports this module, and few need PyYAML

    citation_facts = yaml.safe_load((resources.files("shardlab") / CITATION_FILE).read_bytes())
    # names of groups, which BibTeX must not take apart
    bibtex_authors = ["{" + author["name"] + "}" for author in citation_facts["authors"]]
    bibtex_fields = {
        "author": " and ".join(bibtex_authors),
        "title": f"{{{_escape_tex(citation_facts['title'])}}}",
        "note": f"Version {citation_facts['version']}",
    }
    return _format_entry("shardlab", bibtex_fields)


def make_study_bibtex(entry_key: str, study: Citation) -> str:
    """The BibTeX entry of a study. entry_key: its key in the bibliography, such as the name of the matrix."""
    bibtex_fields = {"author": " and ".join(map(_format_author, study.authors)), "title": f"{{{_escape_tex(study.title)}}}"}
    bibtex_fields |= {"year": "" if study.year is None else str(study.year), "howpublished": _escape_tex(study.published)}
    return _format_entry(
        entry_key,
        bibtex_fields | {"doi": printable.clean_to_one_line(study.doi), "url": printable.clean_to_one_line(study.url)},
    )


def _format_author(author_name: str) -> str:
    return "{" + _escape_tex(author_name) + "}" if _AND_WORD.search(author_name) else _escape_tex(author_name)


def _escape_tex(plain_text: str) -> str:
    """A text in one line, in which no character has a meaning for TeX or BibTeX."""
    return " ".join(printable.clean_to_one_line(plain_text).split()).translate(_ESCAPE_TABLE)


def _format_entry(entry_key: str, bibtex_fields: dict[str, str]) -> str:
    """An entry of the type misc, which every BibTeX style has (only biblatex has @software). Empty fields are left out."""
    known_fields = {name: value for name, value in bibtex_fields.items() if value}
    name_width = max(map(len, known_fields))
    return "\n".join(
        [f"@misc{{{entry_key},", *(f"  {name:<{name_width}} = {{{value}}}," for name, value in known_fields.items()), "}"]
    )
