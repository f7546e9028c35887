"""The state of a run follows from its events. A run is "completed" only if three independent records say so, and the state
"unknown" never counts as success."""

import pytest

from shardlab.runs.record import Event
from shardlab.runs.state import ENDED_IN_SLURM, STATE_MEANINGS, judge


def events(*told: tuple[str, dict[str, object]]) -> list[Event]:
    return [
        Event(schema=1, event=name, writer="w", wall_s=float(n), host="h", data=data) for n, (name, data) in enumerate(told)
    ]


EXITED_1 = (("exited", {"code": 1}),)
SAVED = ("timeout", {"why": "saved", "signal": "SIGTERM"})
RUN = (("rendered", {}), ("submitted", {}), ("started", {}))


def learnt(state: str, records: int) -> tuple[str, dict[str, object]]:
    """The event of a state that was learnt from Slurm when the run had recorded this many starts and ends."""
    return ENDED_IN_SLURM, {"state": state, "why": "Slurm says so", "records": records}


@pytest.mark.parametrize(
    ("told", "witnesses", "state", "words"),
    [
        ((), (False, 0, 5), "unknown", "no event"),
        (RUN[:1], (False, 0, 5), "planned", ""),
        (RUN[:2], (False, 0, 5), "pending", ""),
        ((*RUN[:2], ("cancelled", {})), (False, 0, 5), "cancelled", "before it started"),
        (RUN, (False, 2, 5), "running", ""),
        (RUN, (True, 5, 5), "running", ""),
        ((*RUN, ("exited", {"code": 0})), (True, 5, 5), "completed", ""),
        ((*RUN, ("exited", {"code": 0})), (False, 5, 5), "failed", "no result.json"),
        ((*RUN, ("exited", {"code": 0})), (True, 4, 5), "failed", "4 steps are recorded of 5"),
        ((*RUN, ("exited", {"code": 0})), (True, 4, None), "failed", "an unknown number"),
        ((*RUN, ("exited", {"code": 1})), (True, 5, 5), "failed", "exit code 1"),
        ((*RUN, ("oom", {"why": "CUDA"}), ("exited", {"code": 1})), (False, 0, 5), "oom", "CUDA"),
        ((*RUN, ("failed", {"why": "boom"}), ("exited", {"code": 1})), (False, 0, 5), "failed", "boom"),
        ((*RUN, ("oom", {}), ("failed", {"why": "peer left"}), ("exited", {"code": 1})), (False, 0, 5), "oom", "memory"),
        ((*RUN, ("exited", {"code": 143, "reason": "timeout", "why": "10 s"})), (False, 0, 5), "timeout", "10 s"),
        ((*RUN, SAVED, ("exited", {"code": 1, "reason": "told", "why": "SIGTERM"})), (False, 3, 5), "failed", "SIGTERM"),
        ((*RUN, SAVED, ("exited", {"code": 1, "reason": "timeout", "why": "10 s"})), (False, 3, 5), "timeout", "10 s"),
        ((*RUN, ("exited", {"code": 168})), (False, 0, 5), "failed", "exit code 168"),
        ((*RUN, ("exited", {"code": 139})), (False, 0, 5), "failed", "exit code 139 (SIGSEGV)"),
        ((*RUN, (ENDED_IN_SLURM, {"state": ["oom"], "records": 1})), (False, 0, 5), "running", ""),
        ((*RUN, learnt("oom", 1)), (False, 0, 5), "oom", "Slurm"),
        ((*RUN, learnt("oom", 1), *EXITED_1), (False, 0, 5), "failed", "exit code 1"),
        ((*RUN, learnt("completed", 1)), (True, 5, 5), "running", ""),
        ((*RUN, learnt("no such state", 1)), (False, 0, 5), "running", ""),
        ((*RUN, ("exited", {"code": 0, "reason": "cancelled"})), (True, 5, 5), "cancelled", ""),
        ((*RUN, ("exited", {"code": None, "reason": "node_fail"})), (False, 0, 5), "node_fail", ""),
        ((*RUN, ("exited", {"code": 0, "reason": "completed"})), (False, 0, 5), "failed", "no result.json"),
        ((*RUN, ("timeout", {"why": "saved"}), ("failed", {}), ("exited", {"code": 1})), (False, 3, 5), "timeout", "saved"),
        ((*RUN, ("timeout", {}), ("exited", {"code": 1}), ("started", {})), (False, 3, 5), "running", ""),
        ((*RUN, ("timeout", {}), *EXITED_1, ("started", {}), ("failed", {}), *EXITED_1), (False, 3, 5), "failed", ""),
    ],
)
def test_the_state_of_a_run_follows_from_its_events(told, witnesses, state, words):
    has_result, steps, asked = witnesses
    found = judge(events(*told), has_result=has_result, steps=steps, required_steps=asked)
    assert found.state == state
    assert found.state in STATE_MEANINGS
    assert words in found.why


a, b = "a.0123456789", "b.0123456789"


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ((("submitting", a), ("submitted", a), ("refused", a)), "planned"),
        # The node that refused the run recorded `refused` before `submitted` was recorded, or its clock is slow.
        ((("submitting", a), ("refused", a), ("submitted", a)), "planned"),
        # In this case, the clock of the node that recorded `refused` is fast.
        ((("submitting", b), ("submitted", b), ("refused", a)), "pending"),
        ((("refused", a), ("submitting", b), ("submitted", b)), "pending"),
        ((("submitted", None), ("refused", None)), "planned"),
        ((("refused", None), ("submitted", None)), "pending"),
        ((("submitted", a), ("refused", a), ("started", None)), "running"),
    ],
)
def test_a_refusal_counts_for_its_own_submission_whatever_the_clocks_say(told, state):
    """The event `refused` makes a run `planned` only if its token is that of the last submission."""
    with_data = events(("rendered", {}), *((name, {"token": token} if token else {}) for name, token in told))
    assert judge(with_data, has_result=False, steps=0, required_steps=5).state == state


def test_the_order_of_the_clocks_does_not_hide_an_end():
    """A run is completed even if its events are in the reverse order."""
    told = events(*RUN, ("exited", {"code": 0}))
    assert judge(told[::-1], has_result=True, steps=5, required_steps=5).state == "completed"
