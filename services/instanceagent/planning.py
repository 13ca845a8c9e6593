"""What others plan with an agent's queue: listed, moved in batches, offered, pulled. The agent has the last word."""

from __future__ import annotations

import asyncio
import struct

from dualmap.core.errors import BindingIsEarly
from dualmap.rpc.convert_agent import MigrationOrder, MoveOrder, MoveResult, QueueEntry, QueueListing
from dualmap.rpc.convert_offer import OfferBatch, PullOrder
from dualmap.rpc.request_events import HandoverCause, MoveOutcome
from services.instanceagent.agent import Agent
from services.instanceagent.candidates import Candidates
from services.instanceagent.fence import Fence
from services.instanceagent.handover import Handovers
from services.instanceagent.instance import Instance

LIST_TOKEN_MS = 2_000.0
"""A plan made from an older list is stale (design: rebalancer)."""

LIST_DEFAULT, LIST_MOST = 256, 1_024
_TOKEN = struct.Struct("<Qd")


class Planning:
    """ListQueue, Migrate, Offer and Pull of one agent."""

    def __init__(self, agent: Agent, candidates: Candidates, handovers: Handovers) -> None:
        self._agent = agent
        self._candidates = candidates
        self._handovers = handovers
        self._fence = Fence()

    @property
    def ring_epoch(self) -> int:
        """Epoch of the ring known here; 0: none yet."""
        return self._candidates.epoch

    def list_queue(self, instance_id: str, limit: int) -> QueueListing:
        """What waits, in order. Raises UnknownInstance."""
        instance = self._agent.instance(instance_id)
        now_ms = instance.now_ms
        entries = tuple(
            QueueEntry(
                submission=request.submission,
                deadline_ms=request.waiting.deadline_ms - now_ms,
                age_ms=request.since_submission_ms(now_ms),
                miss_tokens=request.waiting.miss_tokens,
                moved_ago_ms=-1.0 if request.moved_ms is None else now_ms - request.moved_ms,
            )
            for request in instance.ordered(min(limit or LIST_DEFAULT, LIST_MOST))
        )
        return QueueListing(
            ring_epoch=self.ring_epoch,
            list_token=_TOKEN.pack(self._agent.facts.agent_epoch, now_ms),
            entries=entries,
            waiting_requests=len(instance.held.waiting),
            rest_s=instance.rest_s,
            stalled_ms=instance.stalled_ms,
        )

    async def migrate(self, order: MigrationOrder) -> list[MoveResult]:
        """Hand a batch over, all at once; one outcome each. Raises UnknownInstance, StaleLeader."""
        instance = self._agent.instance(order.instance_id)
        self._fence.pass_in(order.fencing_epoch, instance.now_ms)
        problem = self._stale(order.list_token, instance.now_ms)
        if problem is not None:
            return [MoveResult(move.request_id, MoveOutcome.STALE_PLAN, problem) for move in order.moves]
        moves = [self._move(instance, move, order.traceparent) for move in order.moves]
        return list(await asyncio.gather(*moves))

    async def _move(self, instance: Instance, move: MoveOrder, linked: str) -> MoveResult:
        request = self._agent.identities.find(move.request_id, move.attempt, instance.instance_id)
        if request is None:
            return MoveResult(move.request_id, MoveOutcome.UNKNOWN, "not held here")
        return await self._handovers.hand_over(request, move.target_instance_id, HandoverCause.MIGRATE, linked)

    def _stale(self, token: bytes, now_ms: float) -> str | None:
        if len(token) != _TOKEN.size:
            return "no list token of this agent"
        agent_epoch, listed_ms = _TOKEN.unpack(token)
        if agent_epoch != self._agent.facts.agent_epoch:
            return "listed in another life of the agent"
        # A token from the future is nobody's.
        return None if 0 <= now_ms - listed_ms <= LIST_TOKEN_MS else "listed too long ago"

    def offer(self, batch: OfferBatch) -> int:
        """Note offers made to an instance here; gives how many are kept. Raises BindingIsEarly, UnknownInstance."""
        instance = self._agent.instance(batch.target_instance_id)
        if instance.offers is None:
            raise BindingIsEarly(instance.instance_id)
        kept = instance.offers.take(batch, instance.now_ms)
        instance.kick()
        return kept

    async def pull(self, order: PullOrder) -> MoveOutcome:
        """Hand a request that still waits to the instance that asks. Raises BindingIsEarly, UnknownInstance."""
        instance = self._agent.instance(order.holder_instance_id)
        if instance.offers is None:
            raise BindingIsEarly(instance.instance_id)
        request = self._agent.identities.find(order.request_id, order.attempt, instance.instance_id)
        if request is None:
            return MoveOutcome.UNKNOWN
        result = await self._handovers.hand_over(request, order.target_instance_id, HandoverCause.PULL)
        return result.outcome
