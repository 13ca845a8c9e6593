"""What `dualmap top` makes of samples: windows, shares, changes; pure, so no server is needed."""

from __future__ import annotations

import pytest

from dualmap.cli.top_picture import WINDOW_S, Counts, History, ring_changes
from dualmap.cli.top_sources import Answer, Sample
from dualmap.core.membership import InstanceState, RingSnapshot, Split
from dualmap.core.state import EMPTY_WAITING, LoadReport
from dualmap.rpc.convert_explain import InstanceFacts as Seen
from dualmap.rpc.convert_explain import ViewFacts
from dualmap.rpc.convert_operator import RingFacts
from dualmap.rpc.convert_rebalance import PlannedMove, RebalancerStatus
from dualmap.rpc.convert_state import InstanceFacts
from dualmap.rpc.operator_calls import StateList
from dualmap.rpc.request_events import MoveOutcome
from tests.cli.services import EPOCH, before, facts, member, move, ring, status


def load(finished: int, prompt: int = 0, cached: int = 0, in_slo: int = 0) -> LoadReport:
    return LoadReport(finished=finished, finished_in_slo=in_slo, prompt_tokens=prompt, cached_tokens=cached)


def sample(
    at_s: float,
    instances: tuple[InstanceFacts, ...] = (),
    known: RingSnapshot | None = None,
    rebalancer: RebalancerStatus | None = None,
    view: ViewFacts | None = None,
) -> Sample:
    return Sample(
        at_s,
        (Answer("r", view),),
        (Answer("c", StateList(EPOCH, instances)),),
        (Answer("m", RingFacts(known, leader=True, last_moved_share=0.0) if known is not None else None),),
        (Answer("b", rebalancer),),
    )


def test_one_sample_counts_since_the_agents_start() -> None:
    """Shares of all that was ever finished; an even cluster has a CV of 0."""
    picture = History().take(
        sample(5.0, (facts("a/0", load(30, 100, 40, 15)), facts("b/0", load(30))), ring(member("a/0"), member("b/0")))
    )

    assert [row.share for row in picture.rows] == [0.5, 0.5]
    assert (picture.window_s, picture.share_cv) == (0.0, 0.0)
    assert picture.total == Counts(60, 15, 100, 40)
    assert (picture.total.hit_rate, picture.total.attainment) == (0.4, 0.25)


def test_more_samples_count_what_came_within_the_window() -> None:
    """Only what was finished since the oldest sample kept; older ones go."""
    history = History()
    history.take(sample(0.0, (facts("a/0", load(100)), facts("b/0", load(0)))))
    history.take(sample(20.0, (facts("a/0", load(101)), facts("b/0", load(3)))))
    near = history.take(sample(25.0, (facts("a/0", load(101)), facts("b/0", load(3)))))
    far = history.take(sample(25.0 + WINDOW_S, (facts("a/0", load(101)), facts("b/0", load(7)))))

    assert [row.counts.finished for row in near.rows] == [1, 3]
    assert near.window_s == 25.0
    assert [row.counts.finished for row in far.rows] == [0, 4]
    assert far.window_s == WINDOW_S


def test_a_restarted_agent_is_counted_on() -> None:
    """Its counters fall to zero; what it finished since then still counts, and nothing negative."""
    history = History()
    history.take(sample(0.0, (facts("a/0", load(100)),)))
    history.take(sample(1.0, (facts("a/0", load(104)),)))
    picture = history.take(sample(2.0, (facts("a/0", load(2), agent_epoch=2),)))

    assert picture.rows[0].counts.finished == 6


def test_rows_join_what_each_part_knows() -> None:
    """The ring's state, the collector's load, the routers' bookings; unreachable comes before the ring's word."""
    waiting = (0.5, *EMPTY_WAITING[1:])
    busy = LoadReport(waiting_s=waiting, rest_s=0.25)
    seen = Seen(
        "a/0", int(InstanceState.ACTIVE), 1, 1, 1, 9, 0, 50.0, reachable=True, bookings=2, booked_s=0.7, kv_bytes=0
    )
    other = Seen(
        "b/0", int(InstanceState.SUSPECT), 1, 1, 1, 4, 0, 80.0, reachable=True, bookings=0, booked_s=0, kv_bytes=0
    )
    view = ViewFacts(1, EPOCH, 1, (seen, other), degraded=False, splits=0)
    known = ring(member("a/0", InstanceState.DRAINING), member("a/2"), member("a/10"))
    lost = facts("a/2", LoadReport(), reachable=False)

    rows = {
        row.instance_id: row for row in History().take(sample(1.0, (facts("a/0", busy), lost), known, view=view)).rows
    }

    assert list(rows) == ["a/0", "a/2", "a/10", "b/0"]
    assert [row.state for row in rows.values()] == ["DRAINING", "UNREACHABLE", "ACTIVE", "SUSPECT"]
    assert rows["a/0"].backlog_s == pytest.approx(0.75)
    assert (rows["a/0"].booked_s, rows["a/0"].kv_blocks, rows["b/0"].kv_blocks) == (0.7, 42, 4)
    assert (rows["a/10"].load, rows["a/10"].backlog_s, rows["a/10"].kv_blocks) == (None, None, None)


def test_the_polling_collectors_word_comes_first() -> None:
    """Of two lists, the one whose collector polls the instance knows its age."""
    mine, others = facts("a/0", load(1), polled_ago_ms=30.0), facts("a/0", load(1), polled_ago_ms=-1.0)
    for first, second in ((mine, others), (others, mine)):
        both = Sample(0.0, (), (Answer("1", StateList(1, (first,))), Answer("2", StateList(1, (second,)))), (), ())
        assert both.instances["a/0"].polled_ago_ms == 30.0


def test_ring_changes_are_told_each_in_a_line() -> None:
    """Who came, left, changed state, weight or life, and the split table."""
    old = [member("a/0"), member("b/0"), member("c/0"), member("d/0")]
    heavier = ring(member("c/0")).members[0]
    new = ring(
        member("a/0", InstanceState.DRAINING),
        type(heavier)("c/0", "x:1", state=InstanceState.ACTIVE, weight=2.0, agent_epoch=1),
        type(heavier)("d/0", "x:1", state=InstanceState.ACTIVE, agent_epoch=9),
        member("e/0", InstanceState.WARMING),
    )

    assert ring_changes(old, (Split(1, 1, 2),), new) == [
        "+ e/0 WARMING",
        "- b/0 left",
        "a/0 ACTIVE → DRAINING",
        "c/0 weight 1 → 2",
        "d/0 started again",
        "split table: 1 prefixes (+1, −1)",
    ]


def test_events_are_kept_once_with_their_moment() -> None:
    """The grace period tells what was before the first sample; each later epoch is compared with the one before."""
    first = before(ring(member("a/0"), member("b/0")), member("a/0"))
    later = ring(member("a/0"), epoch=EPOCH + 1)
    history = History()
    for at_s, known in ((1.0, first), (2.0, first), (3.0, later), (4.0, later)):
        history.take(sample(at_s, (), known))
    picture = history.take(sample(5.0, (), first))

    assert [(event.at_s, event.text) for event in picture.ring_events] == [(None, "+ b/0 ACTIVE"), (3.0, "- b/0 left")]


def test_moves_are_kept_once_with_their_outcome() -> None:
    """A round's moves are told when they are new, also by a leader asked for the first time."""
    history = History()
    history.take(sample(1.0, rebalancer=status(move("r-1"))))
    history.take(sample(2.0, rebalancer=status(move("r-1"))))
    history.take(sample(3.0))
    refused: PlannedMove = move("r-2", MoveOutcome.REFUSED)
    picture = history.take(sample(4.0, rebalancer=status(refused, move("r-3", None))))

    assert [(event.at_s, event.text) for event in picture.moves] == [
        (None, "agent-1/0 → agent-2/0  MOVED, overload, gain 1.2 s  r-1"),
        (4.0, "agent-1/0 → agent-2/0  REFUSED, overload, gain 1.2 s  r-2"),
        (4.0, "agent-1/0 → agent-2/0  not sent, overload, gain 1.2 s  r-3"),
    ]
