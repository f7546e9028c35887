"""Characters that control a terminal or hide other text: shardlab removes or escapes them in each kind of output, and keeps the
rest of the text."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_hostile import steering

from shardlab.terminal import printable
from shardlab.terminal.rich_console import CleanConsole, draw_table
from shardlab.terminal.table import make_text_table

ESCAPES = [
    ("plain\n two", "plain\n two"),
    ("a \x1b[1;31mred\x1b[0m b", "a red b"),
    ("\x9b31mred", "red"),
    ("\x1b]0;owned\x07", "?]0;owned?"),
    ("\x1b[2Jclear\x1b[1;1H", "clear"),
    ("\u202eevil\u2066", "?evil?"),
    ("hi\u200bd\ufeff\xad", "hi?d??"),
    ("sur\ud800rogate", "sur?rogate"),
    ("a\u2028b\u0085c", "a?b?c"),
    ("progress 1\rprogress 2\r\nend", "progress 1\nprogress 2\nend"),
    ("a\tb", "a       b"),
    ("10\u202f000\xa0km", "10 000 km"),
    ("日本 é ± 😀", "日本 é ± 😀"),
    ("\x1b", "?"),
    ("[bold]not markup[/bold]", "[bold]not markup[/bold]"),
]


@pytest.mark.parametrize(("text", "shown"), ESCAPES)
def test_control_characters_of_a_text_are_replaced_as_the_table_says(text, shown):
    """`clean` replaces the control characters of a text as the table ESCAPES says."""
    assert printable.clean_text(text) == shown


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_no_text_keeps_a_terminal_sequence(text):
    assert steering(printable.clean_text(text)) == []
    assert steering(printable.clean_to_one_line(text), allowed="") == []
    assert printable.clean_text(printable.clean_text(text)) == printable.clean_text(text)


def test_a_line_without_end_is_cut_and_the_text_says_so():
    shown = printable.clean_text(f"short\n{'x' * 5000}\nshort")
    assert shown == f"short\n{'x' * 4000} ... (1,000 more characters)\nshort"


def test_every_text_of_a_value_is_changed_keys_too():
    """`mapped` applies a function to every text in a nested value, also to the keys of dicts."""
    value = {"a\x1b": ["b\x07", {"c": "d\n"}, 1, None, 2.5], "t": ("\u202e",)}
    assert printable.map_texts(value, printable.clean_to_one_line) == {"a?": ["b?", {"c": "d "}, 1, None, 2.5], "t": ["?"]}


@given(st.text() | st.text(alphabet='\x1b\x07\x7f\x9b\u202e\u200b\U000e0041\n"\\é'))
def test_json_keeps_the_value_and_shows_no_terminal_sequence(text):
    document = printable.encode_printable_json({text: [text]})
    assert json.loads(document) == {text: [text]}
    assert steering(document.decode(), allowed="") == []


def test_json_of_a_file_name_that_is_no_utf8():
    assert json.loads(printable.encode_printable_json({"why": "name \udc9b.txt"})) == {"why": "name ?.txt"}


@given(st.lists(st.binary(max_size=40)), st.binary(max_size=20))
def test_a_log_shows_no_terminal_sequence_wherever_its_parts_end(parts, last):
    log = printable.LogCleaner()
    parts = [*parts, b"\x1b]0;", b"owned\x07\x1b", b"[2J\xc2", b"\x9b31m", last]
    assert steering("".join(log.clean_part(part) for part in parts)) == []


def test_a_log_is_decoded_across_parts_and_its_long_lines_are_cut():
    log = printable.LogCleaner()
    raw = "é\n".encode() + b"y" * 6000 + b"\nend"
    shown = "".join(log.clean_part(raw[place : place + 1]) for place in range(len(raw)))
    assert shown == f"é\n{'y' * 4000} ... (the log file has the rest of this line)\nend"


def test_a_table_stays_aligned_for_every_text():
    drawn = io.StringIO()
    console = CleanConsole(file=drawn, width=60)
    console.print(draw_table(make_text_table("", ["name", "state"], [["\u200b\u202e\u200b\u200b", "x"], ["plain", "x"]])))
    _, _, steered, plain = drawn.getvalue().splitlines()
    assert steered.index("x") == plain.index("x")
