"""What services tell operators, from messages into values. Refuses what none of our services can have sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from dualmap.core.choose import Candidate, Role
from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import InstanceState, RingSnapshot
from dualmap.core.rebalance import Cause, Move
from dualmap.rpc.convert_explain import InstanceFacts, ViewFacts
from dualmap.rpc.convert_rebalance import PlannedMove, RebalancerStatus
from dualmap.rpc.convert_ring import ring_from_message
from dualmap.rpc.request_events import MoveOutcome
from dualmap.v1 import rebalancer_pb2, ring_pb2, router_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class RingFacts:
    """The ring as one ring manager knows it. ``last_moved_share``: pairs that the last change moved, 0 to 1."""

    ring: RingSnapshot
    leader: bool
    last_moved_share: float


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """What a drain or its undoing came to. ``moved_share``: pairs that change once the instance left; 0 to 1."""

    ring_epoch: int
    state: InstanceState
    moved_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a router decided as it did. ``decided_ago_ms`` 0 is a what-if; ``key`` 0: the prompt has no full block."""

    router_id: int
    request_id: str
    attempt: int
    reason: str
    rule: str
    key: int
    key_blocks: int
    prompt_tokens: int
    ttft_slo_ms: float
    chosen: str
    candidates: tuple[Candidate, ...]
    ring_epoch: int
    decided_ago_ms: float


def ring_facts_of(message: ring_pb2.GetRingResponse) -> RingFacts:
    """The answer of GetRing. Raises InvalidRequest."""
    return RingFacts(ring_from_message(message.ring), message.leader, message.last_moved_share)


def view_of(message: router_pb2.GetViewResponse) -> ViewFacts:
    """The answer of GetView."""
    return ViewFacts(
        router_id=message.router_id,
        ring_epoch=message.ring_epoch,
        parameters_digest=message.parameters_digest,
        instances=tuple(_instance_of(instance) for instance in message.instances),
        degraded=message.degraded,
        splits=message.splits,
    )


def explanation_of(message: router_pb2.ExplainResponse) -> Explanation:
    """The answer of Explain; a reason that this version does not know is its number."""
    reason = types_pb2.Reason.DESCRIPTOR.values_by_number.get(message.reason)
    chosen = [candidate.instance_id for candidate in message.candidates if candidate.chosen]
    return Explanation(
        router_id=message.router_id,
        request_id=message.request_id,
        attempt=message.attempt,
        reason=reason.name.removeprefix("REASON_") if reason is not None else str(message.reason),
        rule=message.rule,
        key=message.key,
        key_blocks=message.key_blocks,
        prompt_tokens=message.prompt_tokens,
        ttft_slo_ms=message.ttft_slo_ms,
        chosen=chosen[0] if chosen else "",
        candidates=tuple(_candidate_of(candidate) for candidate in message.candidates),
        ring_epoch=message.ring_epoch,
        decided_ago_ms=message.decided_ago_ms,
    )


def rebalancer_status_of(message: rebalancer_pb2.GetStatusResponse) -> RebalancerStatus:
    """The answer of GetStatus. Raises InvalidRequest."""
    return RebalancerStatus(
        ring_epoch=message.ring_epoch,
        leader=message.leader,
        fencing_epoch=message.fencing_epoch,
        period_ms=message.period_ms,
        rounds=message.rounds,
        failed_rounds=message.failed_rounds,
        planned=message.planned,
        moved=message.moved,
        last_plan_ms=message.last_plan_ms,
        last_moves=tuple(_move_of(move, f"last_moves[{index}]") for index, move in enumerate(message.last_moves)),
        dry_run=message.dry_run,
    )


def _instance_of(message: router_pb2.InstanceView) -> InstanceFacts:
    return InstanceFacts(
        instance_id=message.instance_id,
        state=message.state,
        incarnation=message.incarnation,
        agent_epoch=message.agent_epoch,
        version=message.version,
        kv_blocks=message.kv_blocks,
        kv_digest=message.kv_digest,
        state_age_ms=message.state_age_ms,
        reachable=message.reachable,
        bookings=message.bookings,
        booked_s=message.booked_s,
        kv_bytes=message.kv_bytes,
    )


def _candidate_of(message: router_pb2.CandidateExplanation) -> Candidate:
    return Candidate(
        instance_id=message.instance_id,
        role=cast("Role", message.role),
        indexed_hit_tokens=message.indexed_hit_tokens,
        hit_tokens=message.hit_tokens,
        miss_tokens=message.miss_tokens,
        work_ahead_s=message.work_ahead_s,
        booked_s=message.booked_s,
        prefill_s=message.prefill_s,
        predicted_ttft_s=message.predicted_ttft_ms / 1000,
        state_age_ms=message.state_age_ms,
        admitting=message.admitting,
    )


def _move_of(message: rebalancer_pb2.PlannedMove, field: str) -> PlannedMove:
    try:
        cause = Cause(message.cause)
        outcome = MoveOutcome(message.outcome) if message.outcome else None
    except ValueError as error:
        raise InvalidRequest(field, str(error)) from error
    # The contract's list names no attempt: a reader needs none.
    move = Move(
        message.request_id, 0, message.source_instance_id, message.target_instance_id, message.gain_ms / 1000, cause
    )
    return PlannedMove(move, outcome)
