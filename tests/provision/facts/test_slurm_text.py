"""Pairs, lists and limits in the output of Slurm's commands."""

import pytest

from provision.facts.slurm_text import is_name, parse_limit, parse_names, parse_pairs


def test_pairs_of_a_line_are_read_by_their_keys():
    line = "PartitionName=gpu AllowAccounts=lab,phys TRES=cpu=8,gres/gpu=2"
    assert parse_pairs(line) == {"PartitionName": "gpu", "AllowAccounts": "lab,phys", "TRES": "cpu=8,gres/gpu=2"}


@pytest.mark.parametrize(
    ("text", "names"),
    [("ALL", None), ("(null)", None), ("", None), ("lab,phys", ("lab", "phys")), ("lab,$(x),a b", ("lab",))],
)
def test_a_list_of_names_has_only_names(text, names):
    assert parse_names(text) == names


@pytest.mark.parametrize(
    ("text", "limit"), [("12", 12), ("UNLIMITED", None), ("-1", None), ("1" * 16, None), ("\N{ARABIC-INDIC DIGIT THREE}", None)]
)
def test_a_limit_is_a_whole_number_or_unknown(text, limit):
    assert parse_limit(text) == limit


def test_a_name_has_no_signs_with_a_meaning_in_a_shell():
    assert [is_name(text) for text in ("gpu-a100_80.g", "a;b", "-x", "")] == [True, False, False, False]
