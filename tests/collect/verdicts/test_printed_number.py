"""Numbers in the notations that studies use: each text has exactly one meaning, or it is refused with a message."""

import contextlib

import pytest
import support_collect as support
from hypothesis import given
from hypothesis import strategies as st

from collect.reading import load
from collect.verdicts.printed_number import parse_number
from collect.verdicts.selection import Measurements
from shardlab.matrix import matrix

EMPTY = support.Expansion(schema=1, name="m", title="", path="", cells=[], excluded=[])
PRINTED = [
    ("58.3s", None, "s", 58.3),
    ("3,076 MB", None, "bytes", 3076e6),
    ("3,076 MiB", None, "bytes", 3076 * 2**20),
    ("~12GB", None, "bytes", 12e9),
    ("~800-900 MB", None, "bytes", 850e6),
    ("75–80%", None, "%", 77.5),
    ("peaking near 75–80%", None, "%", 77.5),
    ("around 85%", None, "%", 85),
    ("4.2x", None, "x", 4.2),
    ("1.93×", None, "x", 1.93),
    ("0.92", None, "%", 92),
    ("0.90*", None, "%", 90),
    ("47.6", "%", "%", 47.6),
    ("774,439,808", None, "", 774439808),
    ("774 439 808", None, "", 774439808),
    ("44.5 million", None, "", 44.5e6),
    ("1.3B parameters", None, "", 1.3e9),
    ("125M", None, "", 125e6),
    ("398μs", None, "ms", 0.398),
    ("2,887\u00b5s", None, "ms", 2.887),
    ("7,020.7", "ms", "ms", 7020.7),
    ("112.3 s", None, "ms", 112300),
    ("95 tok/ms", None, "units/s", 95000),
    ("32,582 tokens/sec", None, "units/s", 32582),
    ("32.6k tok/s", None, "units/s", 32600),
    ("620 img/s", None, "units/s", 620),
    ("1.5e3 tokens per second", None, "units/s", 1500),
    ("3.1 x 10^6", None, "", 3.1e6),
    ("\u22125.2%", None, "%", -5.2),
    ("58.3\u00a0s", None, "s", 58.3),
    ("2 to 3x", None, "x", 2.5),
    ("1.5 kWh", None, "J", 5.4e6),
]


@pytest.mark.parametrize(("text", "unit", "metric_unit", "value"), PRINTED)
def test_printed_numbers_are_read(text, unit, metric_unit, value):
    assert parse_number(text, unit, metric_unit).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit", "metric_unit"),
    [
        *(
            (text, None, "s")
            for text in ("", "n/a", "-", "fast", "58,3s", "58.3.1s", "58.3", "58.3 furlongs", "12 MB", "inf s")
        ),
        *((text, None, "bytes") for text in ("9-5 MB", "1 MB-2 GB", "0.92", "12 B/s")),
        *((text, None, "units/s") for text in ("+13%", "12 img", "12 img/GB", "12 s")),
        ("12s 30ms", None, "s"),
        ("1,23,456", None, ""),
        ("5 s", "ms", "ms"),
        ("1" * 400 + "x", None, "s"),
        ("nan%", None, "%"),
    ],
)
def test_an_ambiguous_printed_number_is_refused(text, unit, metric_unit):
    with pytest.raises(ValueError, match=r"\.$"):
        parse_number(text, unit, metric_unit)


def test_the_digits_of_a_printed_number_give_its_precision():
    assert (parse_number("58.3s", None, "s").low, parse_number("58.3s", None, "s").high) == (
        pytest.approx(58.25),
        pytest.approx(58.35),
    )
    assert (parse_number("58.3 ± 0.2 s", None, "s").low, parse_number("58.3 ± 0.2 s", None, "s").high) == (
        pytest.approx(58.1), pytest.approx(58.5),
    )  # fmt: skip
    bound = parse_number(">3000", "s", "s")
    assert (bound.relation, bound.value, bound.low, bound.high) == (">", 3000, 3000, None)
    assert (parse_number("<5%", None, "%").relation, parse_number("up to 30%", None, "%").relation) == ("<", "<")
    assert parse_number("~12GB", None, "bytes").approximate
    assert parse_number("OOM", None, "").state == parse_number("out of memory", None, "bytes").state == "oom"
    assert "7.4 % more" in parse_number("12GB", None, "bytes").remark
    assert parse_number("12GiB", None, "bytes").remark == ""


@given(st.floats(0.01, 1e6).map(lambda value: round(value, 3)), st.sampled_from(["", "~", ">", "about "]))
def test_a_number_is_parsed_to_its_written_value(value, before):
    assert parse_number(f"{before}{value:,.3f} s", None, "s").value == pytest.approx(value)
    assert parse_number(f"{before}{value:,.3f}", "s", "ms").value == pytest.approx(1000 * value)


@given(st.text(max_size=40), st.sampled_from(["s", "bytes", "%", "x", "", "units/s", "J"]))
def test_any_text_gives_a_number_or_our_error(text, metric_unit):
    with contextlib.suppress(ValueError):
        found = parse_number(text, None, metric_unit)
        assert found.state or found.value is not None


def test_every_number_of_the_shipped_studies_can_be_read():
    unread = []
    metrics = Measurements(load.LoadedMatrix(EMPTY, []), []).metrics
    for path in matrix.find_shipped_matrices().values():
        for entry in matrix.load_matrix(path).file.reported:
            assert entry.metric in metrics or entry.metric == "state", entry
            of = metrics.get(entry.metric)
            try:
                parse_number(entry.printed, entry.unit, of.unit if of else "", is_change=bool(of and of.of_cells))
            except ValueError as error:
                unread.append(str(error))
    assert unread == []
