"""State messages: what goes in comes out, and an agent's nonsense is refused by field."""

from __future__ import annotations

import pytest

from dualmap.core.errors import InvalidRequest
from dualmap.core.state import KvSnapshot, LoadReport, PrefillCost, QueuePolicy, StateUpdate, TicketsSeen
from dualmap.rpc.convert_state import (
    MAX_CHANGES,
    InstanceFacts,
    StateQuery,
    facts_of,
    load_message,
    load_of,
    page_size_of,
    query_message,
    query_of,
    summary_message,
    update_message,
    update_of,
)
from dualmap.v1 import agent_pb2, state_pb2

BIG = 2**64 - 1
LOAD = LoadReport(
    waiting_s=tuple(float(number) for number in range(24)),
    rest_s=1.5,
    queue_policy=QueuePolicy.HIT_FIRST,
    admitting=False,
    waiting_requests=3,
    kv_use=0.5,
    cost=PrefillCost(0.1, 0.2, 0.3, 4),
    tickets=(TicketsSeen(BIG, 5, 2**255 + 1), TicketsSeen(1, 2)),
    suspect=True,
    prefix_closed=False,
    modelled=True,
    finished=BIG,
)


@pytest.mark.parametrize(
    "update",
    [
        StateUpdate("a/0", BIG, BIG, BIG, 0, LOAD, KvSnapshot(b"\1" * 8, b"\2"), b"", BIG, 1),
        StateUpdate("a/0", 1, 1, 6, 5, None, None, b"\1" * 8 + b"\3", 7, 2),
        StateUpdate("a/0", 1, 1, 6, 6, LoadReport(), None, b"", 0, 0),
        StateUpdate("a/0", 1, 1, 6, 0, None, KvSnapshot(), b"", 0, 0),
    ],
)
def test_an_update_survives_the_wire(update: StateUpdate) -> None:
    """Whole or as changes, with or without load, at the edges of 64 bits."""
    assert update_of(update_message(update)) == update


def test_queries_and_summaries_survive_the_wire() -> None:
    """What is asked of an agent and what an operator is told arrive as they were."""
    query = StateQuery("a/0", BIG, 2, 3, full=True, wait_ms=1_000)
    facts = InstanceFacts("a/0", 1, 2, 3, 4, BIG, LOAD, reachable=False, polled_ago_ms=-1.0, collector="c")

    assert query_of(query_message(query)) == query
    assert facts_of(summary_message(facts)) == facts


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("instance_id", state_pb2.StateUpdate(incarnation=1, agent_epoch=1)),
        ("incarnation", state_pb2.StateUpdate(instance_id="a", agent_epoch=1)),
        ("agent_epoch", state_pb2.StateUpdate(instance_id="a", incarnation=1)),
        ("snapshot", state_pb2.StateUpdate(instance_id="a", incarnation=1, agent_epoch=1, full=True)),
        ("changes", state_pb2.StateUpdate(instance_id="a", incarnation=1, agent_epoch=1)),
    ],
)
def test_an_update_that_contradicts_itself_is_refused(field: str, message: state_pb2.StateUpdate) -> None:
    """Missing identity, half a record, an unknown tier: INVALID, naming the field."""
    if field == "snapshot":
        message.snapshot.hashes = b"\1" * 8
    if field == "changes":
        message.changes.changes = b"\1" * 8 + b"\4"

    with pytest.raises(InvalidRequest) as refused:
        update_of(message)

    assert refused.value.field == field


def test_more_changes_than_an_agent_keeps_are_refused() -> None:
    """Whoever lacks more is told everything: a list without end would hold up who reads it."""
    message = state_pb2.StateUpdate(instance_id="a/0", incarnation=1, agent_epoch=1)
    message.changes.changes = bytes(9 * MAX_CHANGES)
    assert len(update_of(message).changes) == 9 * MAX_CHANGES
    message.changes.changes = bytes(9 * (MAX_CHANGES + 1))

    with pytest.raises(InvalidRequest, match="at most 65536"):
        update_of(message)


def test_half_a_record_is_refused() -> None:
    """Changes come as whole records."""
    message = state_pb2.StateUpdate(instance_id="a", incarnation=1, agent_epoch=1)
    message.changes.changes = b"\1" * 10

    with pytest.raises(InvalidRequest, match="whole 9-byte records"):
        update_of(message)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("load.rest_s", state_pb2.Load(rest_s=float("nan"))),
        ("load.kv_use", state_pb2.Load(kv_use=-1)),
        ("load.stalled_ms", state_pb2.Load(stalled_ms=float("inf"))),
        ("load.waiting", state_pb2.Load(waiting=[state_pb2.SlackBuckets()] * 4)),
        ("load.waiting", state_pb2.Load(waiting=[state_pb2.SlackBuckets(waiting_s=[0.0] * 9)])),
        ("load.waiting.waiting_s", state_pb2.Load(waiting=[state_pb2.SlackBuckets(waiting_s=[-1.0])])),
        ("load.cost.a_s", state_pb2.Load(cost=state_pb2.CostModel(a_s=-1))),
        ("load.tickets.seen", state_pb2.Load(tickets=[state_pb2.TicketsSeen(seen=b"\1" * 33)])),
        ("load.tickets", state_pb2.Load(tickets=[state_pb2.TicketsSeen()] * 1_025)),
        ("load.queue_policy", state_pb2.Load(queue_policy=9)),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_load_is_refused(field: str, message: state_pb2.Load) -> None:
    """Numbers that would poison a prediction, and lists without end, do not get in."""
    with pytest.raises(InvalidRequest) as refused:
        load_of(message)

    assert refused.value.field == field


def test_an_empty_load_is_an_idle_one() -> None:
    """Absent fields mean what the contract says: nothing waits, policy slo, cost from configuration."""
    load = load_of(state_pb2.Load(admitting=True, prefix_closed=True))

    assert load == LoadReport()
    assert load_of(load_message(load)) == load


def test_bounds_of_queries() -> None:
    """A longer wait, a longer id or a bigger page than the contract allows is refused."""
    with pytest.raises(InvalidRequest, match="wait_ms"):
        query_of(agent_pb2.GetStateRequest(wait_ms=1_001))
    with pytest.raises(InvalidRequest, match="instance_id"):
        query_of(agent_pb2.GetStateRequest(instance_id="a" * 513))
    with pytest.raises(InvalidRequest, match="page_size"):
        page_size_of(state_pb2.ListInstancesRequest(page_size=1_001))
    assert page_size_of(state_pb2.ListInstancesRequest()) == 100
