"""The view itself, filled by hand: what readers see, and what a change of ring costs."""

from __future__ import annotations

from contextlib import nullcontext

from dualmap.core.kv_index import KvIndex
from dualmap.core.membership import InstanceState, Member, PreviousRing, Split
from dualmap.core.state import LoadReport, TicketsSeen
from dualmap.view.cluster_view import ClusterView, ViewOptions, WholeState
from dualmap.view.events import ViewEvent
from tests.view.conftest import ROUTER, member, ring


class Clock:
    now_ms = 1_000.0

    def __call__(self) -> float:
        return self.now_ms


def view_of(clock: Clock, events: list[tuple[ViewEvent, str]] | None = None) -> ClusterView:
    def hook(event: ViewEvent, about: str) -> None:
        if events is not None:
            events.append((event, about))

    return ClusterView("p", nullcontext(), clock, ViewOptions(router_id=ROUTER), hook)


def state(name: str, agent_epoch: int = 1, load: LoadReport | None = None) -> WholeState:
    return WholeState(name, 1, agent_epoch, 5, KvIndex(), 5, load or LoadReport(), reachable=True, heard_at_ms=900.0)


def test_a_view_begins_empty_and_degraded() -> None:
    """Before anything was heard there is no ring, and the reader knows it."""
    view = ClusterView("p", nullcontext(), Clock())

    assert not view.ready
    assert view.degraded
    assert view.epoch == 0
    view.tick()
    view.count(ViewEvent.GAP)
    assert view.counts == {ViewEvent.GAP: 1}


def test_an_epoch_that_moves_no_points_builds_no_ring() -> None:
    """A drained instance keeps its arcs: the sorted points are the same object, the members are new."""
    view = view_of(Clock())
    view.adopt_ring(ring(1, member("a/0"), member("b/0")))
    before = view.picture

    view.adopt_ring(ring(2, member("a/0"), member("b/0", InstanceState.DRAINING), splits=(Split(7, 1, 2),)))

    assert before is not None
    assert view.picture is not None
    assert view.picture.ring is before.ring
    assert view.picture is not before
    assert not view.instances["b/0"].eligible


def test_a_heavier_instance_builds_a_ring() -> None:
    """Weight moves points, so the ring is another."""
    view = view_of(Clock())
    view.adopt_ring(ring(1, member("a/0")))
    before = view.picture

    view.adopt_ring(ring(2, Member("a/0", "h:1", state=InstanceState.ACTIVE, weight=2.0)))

    assert before is not None
    assert view.picture is not None
    assert view.picture.ring is not before.ring


def test_members_that_left_are_gone() -> None:
    """A member listed as LEFT is no instance of the view."""
    view = view_of(Clock())

    new = view.adopt_ring(ring(1, member("a/0"), member("b/0", InstanceState.LEFT)))

    assert new == ("a/0",)
    assert sorted(view.instances) == ["a/0"]


def test_the_grace_period_ends_by_the_clock() -> None:
    """The previous mapping is dropped at the first tick after its time, not before."""
    clock = Clock()
    view = view_of(clock)
    view.adopt_ring(ring(2, member("a/0"), previous=PreviousRing(1, (member("b/0"),), (), 500)))

    clock.now_ms += 499
    view.tick()
    still = view.picture
    clock.now_ms += 1
    view.tick()

    assert still is not None
    assert still.previous is not None
    assert view.picture is not None
    assert view.picture.previous is None
    assert view.picture.ring is still.ring


def test_a_loaded_state_covers_bookings_and_a_new_life_voids_them() -> None:
    """The same agent's report removes what it shows; another life of it starts with none, and sequences at 1."""
    view = view_of(Clock())
    view.adopt_ring(ring(1, member("a/0")))
    view.adopt_state(state("a/0"))
    bookings = view.instances["a/0"].bookings
    for _ in range(2):
        bookings.add(bookings.next_sequence(), 1.0, 1, 1, (), 10, 1_000.0)

    view.adopt_state(state("a/0", load=LoadReport(tickets=(TicketsSeen(ROUTER, 1), TicketsSeen(5, 2)))))
    left = len(bookings)
    view.adopt_state(state("a/0", agent_epoch=2))

    assert left == 1
    assert view.instances["a/0"].bookings is not bookings
    assert view.instances["a/0"].bookings.next_sequence() == 1


def test_the_state_of_a_stranger_is_dropped() -> None:
    """A state that arrives after its instance left makes no instance."""
    view = view_of(Clock())
    view.adopt_ring(ring(1, member("a/0")))

    view.adopt_state(state("x/0"))

    assert sorted(view.instances) == ["a/0"]


def test_a_mass_failure_is_told_once_with_its_size() -> None:
    """The hook hears it when it begins, and hears nothing while it lasts."""
    events: list[tuple[ViewEvent, str]] = []
    view = view_of(Clock(), events)
    view.adopt_ring(ring(1, member("a/0"), member("b/0"), member("c/0")))

    view.say_reachable("a/0", reachable=False)
    one_down = view.instances["a/0"].reachable
    view.say_reachable("b/0", reachable=False)
    view.say_reachable("c/0", reachable=False)

    assert not one_down
    assert events == [(ViewEvent.MASS_UNREACHABLE, "3 instances")]
    assert all(instance.eligible for instance in view.instances.values())
