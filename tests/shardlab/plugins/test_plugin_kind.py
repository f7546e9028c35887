"""Workloads, strategies and metrics of a workspace: which names a file may define, and which names are taken."""

from pathlib import Path

import pytest

from collect.reading.own_metrics import METRIC_PLUGINS
from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.plugins.plugin_kind import STRATEGIES, WORKLOADS

FILE = Path("/w/my_way.py")


@pytest.mark.parametrize(
    ("kind", "allowed", "refused"),
    [
        (WORKLOADS, ["my_way", "my_way-tiny"], ["my-way", "my_way-large", "my_way-tiny\n", "my_wa", "xmy_way"]),
        (STRATEGIES, ["my-way", "my-way-2", "my-way-tp-2"], ["my_way", "my-way2", "my-way-\n", "my-wa", "xmy-way"]),
    ],
)
def test_a_file_defines_only_names_that_begin_with_its_name(kind, allowed, refused):
    assert [kind.may_define(FILE, name) for name in allowed] == [True] * len(allowed)
    assert [kind.may_define(FILE, name) for name in refused] == [False] * len(refused)


@pytest.mark.parametrize("kind", [WORKLOADS, STRATEGIES, METRIC_PLUGINS], ids=lambda kind: kind.noun)
def test_a_plugin_cannot_replace_a_shipped_one_or_one_of_another_file(kind):
    kind.refuse_used_name(FILE, "free", {"shipped"}, {"taken": "/w/other.py"})
    with pytest.raises(InputError) as raised:
        kind.refuse_used_name(FILE, "shipped", {"shipped"}, {})
    assert str(raised.value) == (
        f"/w/my_way.py: the {kind.noun} shipped ships with shardlab and cannot be replaced. Allowed: another name."
    )
    with pytest.raises(InputError) as raised:
        kind.refuse_used_name(FILE, "taken", {"shipped"}, {"taken": "/w/other.py"})
    assert str(raised.value) == (
        f"/w/my_way.py: the {kind.noun} taken is defined by /w/other.py as well. Allowed: another name."
    )


def test_the_folder_of_each_kind_steers_commands():
    assert [kind.folder for kind in (WORKLOADS, STRATEGIES, METRIC_PLUGINS)] == [*plugin_source.CODE_FOLDERS]
    assert [kind.folder for kind in (WORKLOADS, STRATEGIES)] == [*plugin_source.CARRIED_FOLDERS]
