"""Identity: nothing runs twice, what has not ended may come again with a higher number."""

from __future__ import annotations

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer

from dualmap.core.errors import AlreadyExists, Superseded
from dualmap.core.membership import RingParameters
from dualmap.core.waiting import WaitingRequest
from dualmap.rpc.convert_agent import SubmissionDefaults, submission_of
from dualmap.rpc.request_events import HandoverCause
from dualmap.rpc.submission import Handover
from services.instanceagent.identities import Identities
from services.instanceagent.request import HeldRequest
from services.instanceagent.spans import RequestSpans
from tests.services.instanceagent.cluster import submission

DEFAULTS = SubmissionDefaults("default", 5_000, RingParameters())


def _held(attempt: int, came: bool = False) -> HeldRequest:
    value = submission_of(submission("r", attempt=attempt), DEFAULTS)
    waiting = WaitingRequest("r", attempt, 5_000, 0, 0, 256, 256)
    letter = Handover("a/0", "b/0", 1, 5_000, 0, HandoverCause.MIGRATE, "") if came else None
    return HeldRequest(value, "a/0", waiting, RequestSpans(NoOpTracer(), Context(), instance="a/0"), came=letter)


def test_an_ended_attempt_is_refused_for_its_time_and_lower_ones_with_it() -> None:
    """60 s, then forgotten; a higher attempt is free at once."""
    identities = Identities(kept_ms=60_000)
    request = _held(2)
    identities.hold(request)
    identities.release(request, ended=True, now_ms=1_000)
    with pytest.raises(AlreadyExists):
        identities.check_submit("r", 2, 61_000)
    with pytest.raises(Superseded):
        identities.check_submit("r", 1, 2_000)
    identities.check_submit("r", 3, 2_000)
    identities.check_submit("r", 2, 61_001)


def test_what_has_not_ended_may_come_again_with_a_higher_number_only() -> None:
    """Returned or dropped: the next hand-over has to count up."""
    identities = Identities()
    identities.check_accept("r", 1, "a/0", 4, 0)
    request = _held(1, came=True)
    identities.hold(request)
    identities.release(request, ended=False, now_ms=10)
    for number in (3, 4):
        with pytest.raises(AlreadyExists):
            identities.check_accept("r", 1, "a/0", number, 20)
    identities.check_accept("r", 1, "a/0", 5, 20)


def test_what_a_client_submitted_here_is_not_taken_in_by_accept() -> None:
    """Its origin is this agent: a copy of it elsewhere is a mistake."""
    identities = Identities()
    identities.hold(_held(1))
    with pytest.raises(AlreadyExists):
        identities.check_accept("r", 1, "a/0", 9, 0)
    identities.hold(_held(3))
    with pytest.raises(Superseded):
        identities.check_accept("r", 2, "a/0", 9, 0)


def test_memory_is_bounded_and_overflow_counted() -> None:
    """No more entries than the bound, whatever comes within the time."""
    identities = Identities(kept_ms=60_000, max_kept=10)
    for number in range(1, 30):
        identities.check_accept(f"r{number}", 1, "a/0", 1, 0)
    assert len(identities._handovers) == 10
    assert identities.overflowed == 19
