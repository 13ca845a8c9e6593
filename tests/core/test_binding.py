"""Late binding: what an instance with room takes, its own or an offer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.binding import Bindable, BindingOptions, choose_next, in_time, offerable, score_s
from dualmap.core.state import QueuePolicy
from dualmap.core.waiting import WaitingQueue, WaitingRequest

OPTIONS = BindingOptions(rule="score")
SPARE = BindingOptions()
ROOM = 100_000


def _entry(
    name: str, deadline_ms: float = 5_000, prefill_s: float = 1.0, best_s: float = 1.0, holder: str | None = None
) -> Bindable:
    return Bindable(name, 1, deadline_ms, 0.0, 1_000, prefill_s, best_s, holder=holder)


def _next(*entries: Bindable, options: BindingOptions = OPTIONS, room: int = ROOM) -> str | None:
    chosen = choose_next(entries, options, 0.0, room)
    return None if chosen is None else chosen.request_id


def test_the_urgent_goes_first_where_no_work_is_wasted() -> None:
    """Equal extra work: the least slack, own or offered."""
    assert _next(_entry("own", 4_000), _entry("offer", 2_000, holder="b")) == "offer"
    assert _next(_entry("own", 2_000), _entry("offer", 4_000, holder="b")) == "own"


def test_extra_work_weighs_four_times_slack() -> None:
    """A second of work that the best cache would not need outweighs up to four seconds of urgency."""
    cold = _entry("cold", 3_000, prefill_s=1.0, best_s=0.0, holder="b")

    assert _next(cold, _entry("own", 6_900)) == "own"
    assert _next(cold, _entry("own", 7_100)) == "cold"
    assert score_s(cold, OPTIONS, 0.0) == pytest.approx(4.0 + 3.0 - 1.02)


def test_extra_is_measured_against_the_best_cache_of_all() -> None:
    """Never negative; holding the best cache here means no extra work."""
    assert _entry("a", prefill_s=0.2, best_s=0.5).extra_s == 0


def test_the_feasible_set_goes_before_all_others() -> None:
    """Who cannot be saved is left for later; the set is the largest that meets its deadlines."""
    lost = _entry("lost", 500)
    long = _entry("long", 2_500, prefill_s=2.4, best_s=2.4)

    assert _next(lost, long, _entry("a", 2_600), _entry("b", 3_000)) == "a"
    assert [e.request_id for e in in_time([lost, long, _entry("a", 2_600), _entry("b", 3_000)], OPTIONS, 0.0)] == [
        "a",
        "b",
    ]
    each = BindingOptions(rule="score", feasible="each")
    assert _next(lost, long, _entry("a", 2_600), _entry("b", 3_000), options=each) == "long"


def test_without_a_feasible_one_the_oldest_of_its_own_runs() -> None:
    """An offer that would miss here stays with its holder."""
    own = Bindable("own", 1, 100.0, 5.0, 1_000, 1.0, 1.0)
    older = Bindable("older", 1, 100.0, 3.0, 1_000, 1.0, 1.0)

    assert _next(own, older, _entry("offer", 100, holder="b")) == "older"
    assert _next(_entry("offer", 100, holder="b")) is None
    assert _next() is None


def test_a_higher_class_goes_first() -> None:
    """Priority orders classes here as in the queue."""
    high = Bindable("high", 1, 9_000.0, 0.0, 1_000, 1.0, 1.0, priority=1)

    assert _next(_entry("own", 2_000), high) == "high"


def test_bounds_of_room_and_extra_work() -> None:
    """What does not fit waits; an offer above the bound of extra work is left alone."""
    assert _next(_entry("a"), room=999) is None
    wasteful = _entry("offer", 2_000, prefill_s=1.0, best_s=0.0, holder="b")
    assert _next(wasteful, options=BindingOptions(rule="score", max_extra_s=0.5)) is None
    assert _next(wasteful) == "offer"


def test_an_offer_is_taken_only_where_no_own_one_misses_for_it() -> None:
    """Spare time is given away, nobody's deadline is."""
    offer = _entry("offer", 2_000, holder="b")

    assert _next(_entry("own", 4_000), offer, options=SPARE) == "offer"
    assert _next(_entry("own", 1_900), offer, options=SPARE) == "own"
    assert (
        _next(_entry("own", 1_900), _entry("other", 2_900), _entry("offer", 2_950, holder="b"), options=SPARE) == "own"
    )
    assert _next(_entry("offer", 900, holder="b"), options=SPARE) is None


@given(
    st.lists(
        st.tuples(st.integers(-100, 9_000), st.floats(0, 3), st.floats(0, 3), st.booleans()), min_size=1, max_size=12
    ),
    st.sampled_from((OPTIONS, SPARE)),
)
def test_an_own_request_always_leaves_something_to_run(
    rows: list[tuple[int, float, float, bool]], options: BindingOptions
) -> None:
    """With anything of its own waiting an instance with room never idles; an offer taken is one that meets."""
    entries = [
        Bindable(str(n), 1, float(d), 0.0, 10, cost, best, holder="b" if offered else None)
        for n, (d, cost, best, offered) in enumerate(rows)
    ]
    chosen = choose_next(entries, options, 0.0, ROOM)

    if any(entry.holder is None for entry in entries):
        assert chosen is not None
    if chosen is not None and chosen.holder is not None:
        assert chosen.deadline_ms / 1_000 >= chosen.prefill_s


def _waiting(policy: QueuePolicy) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for name, deadline_ms in (("roomy", 9_000.0), ("soon", 2_000.0), ("missed", -1.0)):
        queue.push(WaitingRequest(name, 1, deadline_ms, -5_000.0, 0, 1_000, 1_000, 0, 1.0, ()))
    return queue


def test_only_what_was_given_up_is_offered() -> None:
    """What a working holder can still meet is nobody else's to take; staged work ahead makes it give up more."""
    queue = _waiting(QueuePolicy.SLO)

    assert [r.request_id for r in offerable(queue, 0.0, 0.0, 0.0)] == ["missed"]
    assert [r.request_id for r in offerable(queue, 30.0, 1.5, 0.0)] == ["missed", "soon"]


@pytest.mark.parametrize("policy", list(QueuePolicy))
def test_behind_a_stall_all_is_offered_earliest_deadline_first(policy: QueuePolicy) -> None:
    """Whatever the order of the queue: nothing here moves, so nothing is held back."""
    assert [r.request_id for r in offerable(_waiting(policy), 0.0, 0.0, 600.0)] == ["missed", "soon", "roomy"]


def test_an_order_without_deadlines_gives_nothing_up() -> None:
    """First in, first out: no prediction says who is lost."""
    assert offerable(_waiting(QueuePolicy.FIFO), 0.0, 0.0, 0.0) == []
