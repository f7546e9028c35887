"""YAML files are read strictly: a value that other YAML parsers change silently is refused, with its place in the file."""

import pytest

from shardlab.errors import InputError
from shardlab.files import document


def parse(text: str) -> object:
    return document.parse_document(text.encode(), "f.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 3e-4", 3e-4),
        ("a: 3E4", 3e4),
        ("a: .5", 0.5),
        ("a: -12", -12),
        ("a: 0", 0),
        ("a: '3.10'", "3.10"),
        ("a: 3.10", 3.1),
        ("a: true", True),
        ("a: ~", None),
        ("a:", None),
        ("a: 2026-01-02", "2026-01-02"),
        ("a: 'on'", "on"),
        ('a: "1:30:00"', "1:30:00"),
        ("a: ddp", "ddp"),
        ("a: 1.2.3", "1.2.3"),
    ],
)
def test_plain_scalars_mean_what_they_look_like(text, value):
    found = parse(text)["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "3:1", "found this key twice, first at 1:1"),
        ("a: &x 1\nb: *x\n", "1:4", "an anchor (&x)"),
        ("a: *x\n", "1:4", "an alias (*x)"),
        ("a: !!python/object:os.system ls\n", "1:4", "a tag"),
        ("a: !x 1\n", "1:4", "a tag (!x)"),
        ("a:\n  <<: {b: 1}\n", "2:3", "a merge key"),
        ("time: 1:30:00\n", "1:7", 'Allowed: a number, or "1:30:00" if it is a time'),
        ("time: 12:00\n", "1:7", 'or "12:00" if it is a time'),
        ("{a: 1, b: 2, a: 3}\n", "1:14", "found this key twice, first at 1:2"),
        ("a: on\n", "1:4", "true or false to some YAML parsers"),
        ("a: No\n", "1:4", "true or false to some YAML parsers"),
        ("a: 010\n", "1:4", "read differently"),
        ("a: 089\n", "1:4", "read differently"),
        ("a: 01.5\n", "1:4", "read differently"),
        ("a: 0o17\n", "1:4", "read differently"),
        ("a: 0b11\n", "1:4", "read differently"),
        ("a: 0x1F\n", "1:4", "read differently"),
        ("a: 1_000\n", "1:4", "read differently"),
        ("a: .nan\n", "1:4", "read differently"),
        ("a: -.inf\n", "1:4", "read differently"),
        ("a: 1\n---\nb: 2\n", "2:1", "a second document"),
        ("? [1, 2]\n: 3\n", "1:3", "a key that is not plain text"),
        ("a: [1, 2\n", "2:1", "not valid YAML"),
        ("a: b: c\n", "1:5", "not valid YAML"),
        ("a:\t\x00\n", "1:1", "not valid YAML"),
        (
            "a:\n  b: 1\n  c: 2\n d: 3\n",
            "4:2",
            "line 4 is indented by 1, the line above by 2, the block that begins in line 1",
        ),
        ("a:\n  b: 1\n   c: 2\n", "3:5", "line 3 is indented by 3, the line above by 2. Allowed"),
        ("a:\n    b: 1\n  c: 2\n", "3:3", "line above by 4, the block that begins in line 1 by 0"),
        ("a:\n  b: 1\n  c 2\n", "4:1", "line 3, 'c 2', has no colon. Allowed: `key: value`"),
        ("a:\n  b 1\n  c: 2\n", "3:4", "line 2, 'b 1', has no colon"),
        ("a:\n\tb: 1\n", "2:1", "a tab. Allowed: spaces"),
    ],
)
def test_ambiguous_yaml_is_refused_with_its_place(text, place, words):
    with pytest.raises(InputError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"f.yaml:{place}: ")
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["064cbb" + 29 * "a1", "0a1f", "0badcafe", "0b12", "0xfg", "1a_b", "0-3", "007th"])
def test_a_value_that_only_begins_like_a_number_is_text(text):
    assert parse(f"a: {text}\n") == {"a": text}


def test_bytes_that_are_not_text_are_refused_with_their_line():
    with pytest.raises(InputError, match=r"f\.yaml:2:1: byte 5 is not UTF-8"):
        document.parse_document(b"a: 1\n\xff\xfe", "f.yaml")


def test_deep_nesting_ends_in_a_sentence_and_not_in_a_stack():
    with pytest.raises(InputError, match="nested deeper than 32 levels"):
        parse("[" * 500 + "]" * 500)


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_bytes(b"# " + b"x" * document.MAX_BYTES)
    with pytest.raises(InputError, match="larger than 4 MiB"):
        document.load_document(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        document.load_document(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a folder"):
        document.load_document(tmp_path)


def test_every_value_keeps_its_place():
    found = document.parse_document(b"a:\n  - {b: 1}\n  - c: x\n", "f.yaml")
    assert found.position_by_value_path[("a", 1, "c")] == document.Position(3, 8)
    assert found.position_by_key_path[("a", 0, "b")] == document.Position(2, 6)
    assert str(found.error(("a", 1, "c"), "is wrong.")) == "f.yaml:3:8: a[1].c: is wrong."


@pytest.mark.parametrize("line_break", ["\r", "\u2028", "\x85", "\r\n"])
def test_lines_are_counted_as_yaml_counts_them(line_break):
    text = line_break.join(["schema: 1", "name: mine", "  title: a: b", ""])
    with pytest.raises(InputError, match="line 3 is indented by 2, the line above by 0"):
        document.parse_document(text.encode(), "m.yaml")
