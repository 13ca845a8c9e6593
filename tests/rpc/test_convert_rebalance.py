"""Queue lists, batches and outcomes as the rebalancer sees them."""

from __future__ import annotations

import pytest

from dualmap.core.errors import InvalidRequest
from dualmap.core.rebalance import Cause, Move
from dualmap.rpc.convert_rebalance import (
    MigrateBatch,
    PlannedMove,
    migrate_message,
    outcomes_of,
    planned_move_message,
    queue_list_of,
)
from dualmap.rpc.request_events import MoveOutcome
from dualmap.v1 import agent_pb2, rebalancer_pb2, types_pb2

MOVES = (Move("r1", 1, "a/0", "b/0", 1.5, Cause.OVERLOAD), Move("r2", 3, "a/0", "c/0", 0.5, Cause.STALLED))


def listed(prompt_tokens: int = 300) -> agent_pb2.ListQueueResponse:
    item = agent_pb2.QueueItem(
        request_id="r1",
        deadline_ms=-5,
        age_ms=10,
        priority=-1,
        miss_tokens=44,
        blocks=types_pb2.BlockHashes(hashes=[1, 2], prompt_tokens=prompt_tokens, block_tokens=128),
        candidate_instance_ids=["a/0", "b/0"],
        key=1,
        moved_ago_ms=-1,
    )
    return agent_pb2.ListQueueResponse(list_token=b"t", items=[item], waiting_requests=9, rest_s=2, stalled_ms=3)


def test_a_list_becomes_the_planners_picture() -> None:
    """Order, deadlines, chains and candidates as the agent told them."""
    got = queue_list_of(listed(), "a/0", suspect=True)

    item = got.picture.items[0]
    assert (got.token, got.waiting_requests) == (b"t", 9)
    assert (got.picture.instance_id, got.picture.rest_s, got.picture.suspect) == ("a/0", 2, True)
    assert (item.attempt, item.deadline_ms, item.moved_ago_ms) == (1, -5, None)
    assert (tuple(item.chain.hashes), item.chain.prompt_tokens, item.candidates) == ((1, 2), 300, ("a/0", "b/0"))


def test_a_list_no_plan_can_rest_on_is_refused_by_name() -> None:
    """More full blocks than the prompt holds."""
    with pytest.raises(InvalidRequest) as refused:
        queue_list_of(listed(prompt_tokens=100), "a/0", suspect=False)

    assert refused.value.field == "items[0].blocks.prompt_tokens"


def test_a_batch_carries_what_the_source_checks() -> None:
    """Token, fence, trace, and each move with its attempt."""
    message = migrate_message(MigrateBatch("a/0", b"t", MOVES, 7, "00-1-2-01"))

    assert (message.instance_id, message.list_token, message.fencing_epoch) == ("a/0", b"t", 7)
    assert message.traceparent == "00-1-2-01"
    assert [(item.request_id, item.attempt, item.target_instance_id) for item in message.items] == [
        ("r1", 1, "b/0"),
        ("r2", 3, "c/0"),
    ]


def test_outcomes_are_told_by_request_not_by_place() -> None:
    """An answer that lacks one, or says what we do not know, leaves that one open."""
    answer = agent_pb2.MigrateResponse(
        results=[
            agent_pb2.MigrateItemResult(request_id="r2", outcome=rebalancer_pb2.MOVE_OUTCOME_MOVED),
            agent_pb2.MigrateItemResult(request_id="r9", outcome=rebalancer_pb2.MOVE_OUTCOME_REFUSED),
        ]
    )

    assert outcomes_of(answer, MOVES) == (None, MoveOutcome.MOVED)


def test_a_planned_move_is_shown_with_what_came_of_it() -> None:
    """Milliseconds, cause and outcome; not sent is UNSPECIFIED."""
    sent = planned_move_message(PlannedMove(MOVES[0], MoveOutcome.REFUSED))
    kept = planned_move_message(PlannedMove(MOVES[1]))

    assert (sent.gain_ms, sent.cause, sent.outcome) == (1_500, "overload", rebalancer_pb2.MOVE_OUTCOME_REFUSED)
    assert kept.outcome == rebalancer_pb2.MOVE_OUTCOME_UNSPECIFIED
