"""Limits of the package provision: a value exactly at the limit passes, and the next value is refused or cut."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from support_bounds import check_limit, is_allowed, refusal

from provision.checks import network
from provision.clock import NodeClockOffset
from provision.cloudlab import creation, extension, portal, token
from provision.command import command_line, init
from provision.facts import nodes
from tests.provision.cloudlab.test_request import planned
from tests.provision.site.test_site_proof import judged, proof, summed

NOW = datetime(2031, 5, 2, 18, 0, tzinfo=UTC)
CONTROL = ("node0", "eth0")


def passes(**changes):
    """Whether a node passes its proof with these changes of the result."""
    return judged(proof(**changes), proof("g2")).passed


def hours(count):
    return is_allowed(extension.check_extend_options, count, "reason", says="Allowed: 1 to 8760.")


def reason(length):
    return is_allowed(extension.check_extend_options, 1, "x" * length, says="Allowed: 1 to 2000 characters.")


def rated_nodes(count):
    keys = f"hardware: c220g5, site: wisc, lan_mbps: 1000, nodes: {count}"
    return is_allowed(planned, keys, says=f"is set for {count} nodes. Allowed: up to 100 nodes")


def granted(seconds_less):
    """Whether an extension by 24 hours counts as granted if the experiment ends so many seconds earlier than asked."""
    found = [SimpleNamespace(id="1", name="bench", expires_at=NOW.isoformat())]
    found.append(
        SimpleNamespace(id="1", name="bench", expires_at=(NOW + timedelta(hours=24, seconds=-seconds_less)).isoformat())
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(creation, "refresh_experiment", lambda *_: found.pop(0))
        asked = SimpleNamespace(request_extension=lambda *_: None)
        return refusal(extension.extend_experiment, None, asked, 24, "reason", of=extension.PartialGrant) is None


# What is limited: (whether a value passes, values up to the limit, values beyond it).
LIMITS = {
    "free bytes of the shared folder": (lambda size: passes(free_bytes=size), (10 * 2**30,), (10 * 2**30 - 1,)),
    "free inodes of the shared folder": (lambda count: passes(free_inodes=count), (20_000, None), (19_999,)),
    "difference of the clocks of a job": (lambda s: passes(together=summed(spread=s)), (1.0,), (1.001,)),
    "wrong sums of an all-reduce": (lambda count: passes(together=summed(wrong=count)), (0,), (1,)),
    "offset of a clock with its uncertainty": (lambda s: NodeClockOffset(s, 0.25).agrees, (0.75, -0.75), (0.76, -0.76)),
    "offset that is surely too large": (
        lambda s: not NodeClockOffset(s, 0.25).is_exact_enough,
        (1.25, -1.25, 0.76),
        (1.26, -1.26),
    ),
    "share of data on the control network": (
        lambda sent: not network._describe_control_traffic([CONTROL], [{"eth0": sent}], 1000.0), (0, 20), (21,),
    ),
    "hours of an extension": (hours, (1, 8760), (0, 8761, None)),
    "characters of a reason": (reason, (1, 2000), (0, 2001)),
    "seconds that an extension may lack": (granted, (0, 60), (61,)),
    "characters of a token": (
        lambda length: is_allowed(token._check_token, "x" * length, "file", says="holds no token"), (1, 16_384), (0, 16_385),
    ),
    "nodes of a request with a rate": (rated_nodes, (100,), (101,)),
    "--parallel and --hours": (lambda text: is_allowed(command_line.parse_count, text, says="1 or more"), ("1",), ("0", "-1")),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
def test_the_values_at_a_limit_pass_and_the_next_do_not(what):
    check_limit(*LIMITS[what])


@pytest.mark.parametrize(
    ("header", "waits_s"), [("1", 2.0), ("2", 2.0), ("3", 3.0), ("120", 120.0), ("121", 120.0), (None, 2.0)]
)
def test_the_portal_decides_about_a_pause_up_to_two_minutes(header, waits_s):
    answer = SimpleNamespace(retry_after=header, date=None)
    assert portal._choose_pause_s(answer, 2.0) == waits_s


def test_a_reason_of_slurm_is_cut_after_200_characters():
    parsed = nodes.parse(f"a|drain|root|{'x' * 200}\nb|drain|root|{'x' * 201}\n")
    assert [len(node.reason) for node in parsed.values()] == [200, 200]
    assert len(nodes.parse(f"a|drain|root|{'x' * 199}\n")["a"].reason) == 199


def test_the_file_of_init_names_up_to_24_modules_and_counts_the_rest():
    names = [f"gcc/{number}" for number in range(25)]
    assert init._list_module_lines(names[:24]) == [f"other modules: {', '.join(names[:24])}"]
    assert init._list_module_lines(names) == [f"other modules: {', '.join(names[1:])} and 1 more"]
