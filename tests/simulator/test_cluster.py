"""The simulated cluster: repeatable, complete, and shaped as the decisions promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.core.state import QueuePolicy
from dualmap.simulator.arrivals import ceiling_hit_rate, poisson_arrivals
from dualmap.simulator.cluster import Cluster, RunResult, run_cluster
from dualmap.simulator.options import AS_BUILT, EXACT, ClusterOptions, ControlOptions, TimetableEntry
from dualmap.simulator.registry import POLICIES
from dualmap.simulator.report import measure
from dualmap.simulator.requests import SimRequest, chains_of, sim_requests
from dualmap.simulator.synthetic import synthetic_trace

SMALL = ClusterOptions(instances=4)


def requests_of(kind: str, count: int, rate: float) -> list[SimRequest]:
    made = poisson_arrivals(synthetic_trace(kind, count, 1), rate, 1)
    return sim_requests(made, chains_of(made), 5.0)


def run(
    policy: str = "dualmap", options: ClusterOptions = SMALL, kind: str = "skew", count: int = 300, rate: float = 6.0
) -> RunResult:
    return run_cluster(requests_of(kind, count, rate), POLICIES[policy](), options)


def fates(result: RunResult) -> list[tuple[object, ...]]:
    return [
        (r.instance, r.first_token_s, r.done_s, r.hit_tokens, r.moves, r.pulls, r.attempt, r.failed)
        for r in result.requests
    ]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_equal_inputs_give_equal_runs_bit_for_bit(policy: str) -> None:
    """Whatever the policy, the same seed gives the same fate of every request."""
    assert fates(run(policy)) == fates(run(policy))
    assert fates(run(policy, replace(SMALL, control=AS_BUILT))) == fates(run(policy, replace(SMALL, control=AS_BUILT)))


@pytest.mark.parametrize("control", [EXACT, AS_BUILT])
@pytest.mark.parametrize("binding", ["early", "late"])
def test_nothing_is_lost_through_stalls_failures_joins_and_drains(control: ControlOptions, binding: str) -> None:
    """Every request ends, once: a first token before its end, or counted as failed."""
    table = [
        TimetableEntry(5.0, "stall", 1, 6.0),
        TimetableEntry(10.0, "fail", 0),
        TimetableEntry(15.0, "join", 4),
        TimetableEntry(20.0, "drain", 2),
        TimetableEntry(25.0, "restart", 0),
    ]
    options = replace(SMALL, control=control, binding=binding, timetable=table)  # type: ignore[arg-type]
    result = run(options=options, rate=9.0)

    for request in result.requests:
        assert request.failed or (request.first_token_s is not None and request.done_s is not None)
        if request.first_token_s is not None and request.done_s is not None:
            assert request.arrival_s < request.first_token_s <= request.done_s
    assert result.counts["retries"] > 0
    assert sum(request.failed for request in result.requests) < 20


def test_views_follow_their_instances_without_a_gap() -> None:
    """Polled changes leave every reader with the instance's own index."""
    cluster = Cluster(requests_of("skew", 200, 6.0), POLICIES["dualmap"](), replace(SMALL, control=AS_BUILT))
    cluster.run()
    for instance in cluster.instances.values():
        update = instance.changes(cluster.now_s)
        for watcher in cluster.watchers:
            assert watcher.heard(update, 0, cluster.now_s)
            view = watcher.view_of(instance.instance_id)
            assert view is not None
            assert view.kv.digest == instance.kv.digest
    assert cluster.result.counts["reloads"] == 0


def test_a_dead_instance_attracts_nothing() -> None:
    """It fails fast and looks idle and warm; nobody is sent there once two polls have failed."""
    table = [TimetableEntry(10.0, "fail", 0)]
    result = run(options=replace(SMALL, control=AS_BUILT, timetable=table), rate=6.0)

    late = [request for request in result.requests if request.arrival_s > 10.5]
    assert late
    assert all(request.instance != "i000/0" for request in late)


def test_a_stalled_instance_loses_its_waiting_to_others() -> None:
    """The rebalancer moves what waits behind an engine that accepts and never answers."""
    table = [TimetableEntry(8.0, "stall", 0, 10.0)]
    moved = run(options=replace(SMALL, timetable=table, binding="early"), rate=8.0)
    left = run(
        options=replace(SMALL, timetable=table, binding="early", control=replace(EXACT, rebalance_s=0.0)), rate=8.0
    )

    assert sum(request.moves for request in moved.requests) > 0
    assert measure(moved, 0).attainment >= measure(left, 0).attainment


def test_the_other_candidate_pulls_from_behind_a_stall() -> None:
    """Without a rebalancer too: the holder offers all that waits as soon as the stall is seen."""
    table = [TimetableEntry(8.0, "stall", 0, 10.0)]
    control = replace(EXACT, rebalance_s=0.0)
    pulled = run(options=replace(SMALL, timetable=table, control=control), rate=8.0)
    left = run(options=replace(SMALL, timetable=table, control=control, binding="early"), rate=8.0)

    assert sum(request.pulls for request in pulled.requests) > 0
    assert measure(pulled, 0).attainment >= measure(left, 0).attainment


def test_single_mappings_trade_hits_for_balance_and_ours_has_both() -> None:
    """The paper's figure 1: affinity has the hits, least loaded the balance, DualMap near both."""
    found = {
        name: measure(run(name, count=600, rate=7.0), 100) for name in ("dualmap", "cache_affinity", "least_loaded")
    }

    assert found["cache_affinity"].hit_rate > found["least_loaded"].hit_rate + 0.1
    assert found["cache_affinity"].load_cv > found["least_loaded"].load_cv
    assert found["dualmap"].hit_rate > found["least_loaded"].hit_rate + 0.1
    assert found["dualmap"].attainment >= max(one.attainment for one in found.values())


def test_short_chats_keep_their_home_as_they_grow() -> None:
    """Start depth of one block: a chat's turns meet their cache, 0.9 of what one endless cache would hold."""
    made = synthetic_trace("chat", 800, 1)
    result = run(kind="chat", count=800, rate=10.0)

    assert measure(result, 100).hit_rate >= 0.9 * ceiling_hit_rate(made, 100)


def test_a_root_that_all_share_is_split_within_seconds() -> None:
    """A cold tree learns the system prompt of every chat before the cluster suffers."""
    cluster = Cluster(requests_of("chat", 300, 10.0), POLICIES["dualmap"](), SMALL)
    cluster.run()

    assert cluster.mapping.picture.splits.splits
    shallow = sum(count for depth, count in cluster.mapping.key_blocks.items() if depth == 1)
    assert shallow < 60


def test_scale_out_brings_attainment_back() -> None:
    """2 to 4 instances under a load that 2 cannot bear."""
    table = [TimetableEntry(30.0, "join", 2), TimetableEntry(30.0, "join", 3)]
    result = run(options=replace(SMALL, instances=2, timetable=table), count=600, rate=7.0)
    after = [request for request in result.requests if request.arrival_s > 60]

    assert sum(request.in_time for request in after) / len(after) > 0.9
    assert {request.instance for request in after} == {"i000/0", "i001/0", "i002/0", "i003/0"}


def test_a_queue_order_can_be_given_to_every_policy() -> None:
    """The confound of the published comparison can be taken away."""
    cluster = Cluster(requests_of("skew", 10, 5.0), POLICIES["min_ttft"](), replace(SMALL, queue=QueuePolicy.SLO))

    assert all(instance.queue.policy is QueuePolicy.SLO for instance in cluster.instances.values())


def test_bookings_keep_routers_from_herding_on_old_state() -> None:
    """With state a second old, what a router sent itself is what saves it."""
    old = replace(AS_BUILT, poll_s=1.0, routers=1)
    kept = measure(run(options=replace(SMALL, control=old), rate=8.0), 50)
    blind = measure(run(options=replace(SMALL, control=replace(old, bookings=False)), rate=8.0), 50)

    assert kept.prediction_error_p90_s < blind.prediction_error_p90_s
