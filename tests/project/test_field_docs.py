"""Fields are documented in one way: by a docstring below the field, which schemas, pages and editors show."""

import ast
import re

from tests.project.test_house import ROOT, SOURCES


def texts_elsewhere(source):
    """`line: field` of each field of a class with a text in a comment beside or above it, or in the docstring of the class."""
    lines = source.splitlines()
    for definition in ast.walk(ast.parse(source)):
        if not isinstance(definition, ast.ClassDef):
            continue
        docstring = ast.get_docstring(definition) or ""
        for field in definition.body:
            if not isinstance(field, ast.AnnAssign):
                continue
            name = field.target.id
            comments = [line for line in lines[field.lineno - 1 : field.end_lineno] if re.search(r"  # (?!noqa|type:)", line)]
            if comments or re.search(rf"(?m)(?:^|[.;] |, ){name}(?:, \w+)*: ", docstring):
                yield f"{field.lineno}: {name}"


def test_texts_beside_a_field_or_in_the_docstring_of_its_class_are_found():
    source = '''
class Node:
    """A node. host: its name.

    port, user: for the login.
    """

    host: str
    port: int
    role: str  # what it does
    cores: int = 0
    """The number of its cores."""
'''
    assert list(texts_elsewhere(source)) == ["8: host", "9: port", "10: role"]


def test_each_text_about_a_field_is_below_the_field():
    places = [f"{path.relative_to(ROOT)}:{text}" for path in SOURCES for text in texts_elsewhere(path.read_text())]
    assert places == []
