"""Guarantees of the mapping that need a whole cluster to be seen."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.binding import offerable
from dualmap.simulator.cluster import Cluster, run_cluster
from dualmap.simulator.options import AS_BUILT, EXACT, ClusterOptions, TimetableEntry, simulated_engine
from dualmap.simulator.registry import POLICIES
from dualmap.simulator.requests import SimRequest, chains_of, sim_requests
from dualmap.simulator.trace import TraceRequest

PREFIX_BLOCKS = 4
BLOCK = 512
PLENTY = simulated_engine(kv_tokens=1 << 40)


def sharing(count: int, gap_s: float, prefixes: int = 1) -> list[SimRequest]:
    """Requests that share their first blocks with every ``prefixes``-th other, and nothing more."""
    made = [
        TraceRequest(
            n, n * gap_s, (PREFIX_BLOCKS + 1) * BLOCK, 2,
            (*(n % prefixes * 100 + b for b in range(PREFIX_BLOCKS)), 10_000 + n), BLOCK,
        )
        for n in range(count)
    ]  # fmt: skip
    return sim_requests(made, chains_of(made), 5.0)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.floats(1.0, 4.0), st.integers(2, 16), st.integers(1, 5))
def test_of_m_requests_sharing_a_prefix_at_most_two_miss_it(m: int, gap_s: float, n: int, prefixes: int) -> None:
    """Hit rate at least 1 - 2 / m, with unlimited caches, no overload and a key that stays: one miss a candidate."""
    options = ClusterOptions(instances=n, engine=PLENTY, control=replace(EXACT, heat_s=0.0))
    result = run_cluster(sharing(m * prefixes, gap_s / prefixes, prefixes), POLICIES["dualmap"](), options)

    for first in range(prefixes):
        group = result.requests[first::prefixes]
        assert sum(request.hit_tokens < PREFIX_BLOCKS * BLOCK for request in group) <= 2
        assert len({request.instance for request in group}) <= 2


def test_what_is_moved_while_it_arrives_is_where_it_was_moved_to() -> None:
    """Rebalancing far more often than messages travel: every request has one place, and its first token came there."""
    control = replace(AS_BUILT, rebalance_s=0.002, message_s=0.02, poll_s=0.02)
    table = [TimetableEntry(at_s, "stall", number, 2.0) for number, at_s in enumerate((1.0, 3.0, 5.0))]
    options = ClusterOptions(instances=3, engine=PLENTY, control=control, timetable=table)
    cluster = Cluster(sharing(240, 0.03, 12), POLICIES["dualmap"](), options)
    result = cluster.run()

    assert sum(request.moves + request.pulls for request in result.requests) > 10
    assert result.counts.get("not_waiting", 0) > 0, "some moves came too late or too early and changed nothing"
    for request in result.requests:
        assert request.first_token_s is not None
        assert request.done_s is not None
    for instance in cluster.instances.values():
        assert not len(instance.queue)
        assert not instance.staged
        assert offerable(instance.queue, cluster.now_s * 1_000, 0.0, 1.0) == []
