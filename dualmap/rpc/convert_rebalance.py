"""Rebalancer messages, and an agent's queue list and batched moves as the rebalancer sees them, <-> values.

Refuses a list that no plan can rest on, naming the field; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dualmap.core.errors import InvalidRequest
from dualmap.core.rebalance import Move, QueueItem, QueuePicture
from dualmap.rpc.convert_prompt import chain_of_listed
from dualmap.rpc.request_events import MoveOutcome
from dualmap.v1 import agent_pb2, rebalancer_pb2

LIST_LIMIT = 1_024
"""Most that an agent lists."""


@dataclass(frozen=True, slots=True)
class QueueList:
    """What waits at one instance; ``token`` goes back with the moves and is good for 2 s."""

    picture: QueuePicture
    token: bytes
    waiting_requests: int


@dataclass(frozen=True, slots=True)
class MigrateBatch:
    """All moves of one source in a round."""

    instance_id: str
    token: bytes
    moves: tuple[Move, ...]
    fencing_epoch: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A move and what came of it; None: not sent."""

    move: Move
    outcome: MoveOutcome | None = None


@dataclass(frozen=True, slots=True)
class RebalancerStatus:
    """How a rebalancer does. ``fencing_epoch`` 0: it never led."""

    ring_epoch: int
    leader: bool
    fencing_epoch: int
    period_ms: int
    rounds: int
    failed_rounds: int
    planned: int
    moved: int
    last_plan_ms: float
    last_moves: tuple[PlannedMove, ...]
    dry_run: bool


def list_request(instance_id: str, limit: int) -> agent_pb2.ListQueueRequest:
    """Asks for what waits, at most ``limit``."""
    return agent_pb2.ListQueueRequest(instance_id=instance_id, limit=min(limit, LIST_LIMIT))


def queue_list_of(message: agent_pb2.ListQueueResponse, instance_id: str, suspect: bool) -> QueueList:
    """What waits. Raises InvalidRequest naming the item."""
    items = tuple(_item_of(item, f"items[{index}]") for index, item in enumerate(message.items))
    picture = QueuePicture(instance_id, items, max(0.0, message.rest_s), max(0.0, message.stalled_ms), suspect)
    return QueueList(picture, message.list_token, message.waiting_requests)


def migrate_message(batch: MigrateBatch) -> agent_pb2.MigrateRequest:
    """One batch."""
    return agent_pb2.MigrateRequest(
        instance_id=batch.instance_id,
        list_token=batch.token,
        items=[
            agent_pb2.MigrateItem(request_id=move.request_id, attempt=move.attempt, target_instance_id=move.target)
            for move in batch.moves
        ],
        fencing_epoch=batch.fencing_epoch,
        traceparent=batch.traceparent,
    )


def outcomes_of(message: agent_pb2.MigrateResponse, moves: Iterable[Move]) -> tuple[MoveOutcome | None, ...]:
    """What came of each move, in the order asked; None where the answer does not say."""
    by_id = {result.request_id: _outcome_of(result.outcome) for result in message.results}
    return tuple(by_id.get(move.request_id) for move in moves)


def planned_move_message(planned: PlannedMove) -> rebalancer_pb2.PlannedMove:
    """One move."""
    move = planned.move
    return rebalancer_pb2.PlannedMove(
        request_id=move.request_id,
        source_instance_id=move.source,
        target_instance_id=move.target,
        gain_ms=move.gain_s * 1_000,
        cause=str(move.cause),
        outcome=rebalancer_pb2.MoveOutcome.ValueType(int(planned.outcome or 0)),
    )


def status_message(status: RebalancerStatus) -> rebalancer_pb2.GetStatusResponse:
    """The answer of GetStatus."""
    return rebalancer_pb2.GetStatusResponse(
        ring_epoch=status.ring_epoch,
        leader=status.leader,
        fencing_epoch=status.fencing_epoch,
        period_ms=status.period_ms,
        rounds=status.rounds,
        failed_rounds=status.failed_rounds,
        planned=status.planned,
        moved=status.moved,
        last_plan_ms=status.last_plan_ms,
        last_moves=[planned_move_message(planned) for planned in status.last_moves],
        dry_run=status.dry_run,
    )


def plan_message(
    ring_epoch: int, moves: Iterable[Move], listed: Iterable[str], plan_ms: float
) -> rebalancer_pb2.PlanOnceResponse:
    """The answer of PlanOnce."""
    return rebalancer_pb2.PlanOnceResponse(
        ring_epoch=ring_epoch,
        moves=[planned_move_message(PlannedMove(move)) for move in moves],
        listed_instance_ids=list(listed),
        plan_ms=plan_ms,
    )


def _item_of(message: agent_pb2.QueueItem, field: str) -> QueueItem:
    if not message.request_id:
        raise InvalidRequest(f"{field}.request_id", "is required")
    return QueueItem(
        request_id=message.request_id,
        attempt=message.attempt or 1,
        deadline_ms=message.deadline_ms,
        chain=chain_of_listed(message.blocks, f"{field}.blocks"),
        miss_tokens=message.miss_tokens,
        age_ms=max(0.0, message.age_ms),
        priority=message.priority,
        candidates=tuple(message.candidate_instance_ids),
        key=message.key,
        moved_ago_ms=message.moved_ago_ms if message.moved_ago_ms >= 0 else None,
    )


def _outcome_of(value: int) -> MoveOutcome | None:
    return MoveOutcome(value) if value in set(MoveOutcome) else None
