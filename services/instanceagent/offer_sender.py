"""Tells the other candidate what this instance has given up, or holds behind a stall (late binding, holder's side).

It never offers what can still be met here: `dualmap.core.binding` says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dualmap.rpc.agent_calls import AgentCalls, PeerLostError
from dualmap.rpc.convert_offer import MAX_OFFERS, OfferBatch, OfferItem
from dualmap.runtime.logs import get_log
from services.instanceagent.candidates import Candidates
from services.instanceagent.instance import Instance
from services.instanceagent.request import HeldRequest, Phase

REPEAT_MS = 1_000.0
"""How often an offer that stands is said again; its receiver forgets it after twice that."""

CALL_TIMEOUT_S = 0.5
MAX_OFFERED = 1_024
"""Waiting requests on offer from one instance, the earliest deadlines."""

_log = get_log("offers")


@dataclass(slots=True)
class _Told:
    """What one target was told, by request id: when."""

    at_ms: dict[str, float] = field(default_factory=dict)


class OfferSender:
    """Offers of one instance; `turn` is called every few milliseconds."""

    def __init__(self, instance: Instance, candidates: Candidates, calls: AgentCalls) -> None:
        self._instance = instance
        self._candidates = candidates
        self._calls = calls
        self._told: dict[str, _Told] = {}

    async def turn(self) -> None:
        """Send what is new, what has to be repeated, and what no longer stands."""
        now_ms = self._instance.now_ms
        wanted: dict[str, list[HeldRequest]] = {}
        for request in self._earliest():
            target = self._candidates.other(request, avoid=frozenset({request.instance_id}))
            if target is not None:
                wanted.setdefault(target, []).append(request)
        for target in set(wanted) | set(self._told):
            batch = self._batch(target, wanted.get(target, []), now_ms)
            if batch is not None:
                await self._send(batch, now_ms)

    def _earliest(self) -> Iterable[HeldRequest]:
        return [request for request in self._instance.offerable() if request.phase is Phase.WAITING][:MAX_OFFERED]

    def _batch(self, target: str, requests: list[HeldRequest], now_ms: float) -> OfferBatch | None:
        told = self._told.setdefault(target, _Told())
        standing = {request.request_id for request in requests}
        withdrawn = tuple(request_id for request_id in told.at_ms if request_id not in standing)[:MAX_OFFERS]
        due = [r for r in requests if now_ms - told.at_ms.get(r.request_id, -REPEAT_MS) >= REPEAT_MS][:MAX_OFFERS]
        if not due and not withdrawn:
            if not told.at_ms:
                del self._told[target]
            return None
        items = tuple(self._item(request, target, now_ms) for request in due)
        return OfferBatch(self._instance.instance_id, target, items, withdrawn)

    def _item(self, request: HeldRequest, target: str, now_ms: float) -> OfferItem:
        waiting, ticket = request.waiting, request.submission.ticket
        promised = 0
        for promise in (ticket.chosen, ticket.backup) if ticket is not None else ():
            if promise is not None and promise.instance_id == target:
                promised = promise.hit_tokens
        return OfferItem(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=waiting.deadline_ms - now_ms,
            age_ms=request.since_submission_ms(now_ms),
            priority=request.submission.priority,
            prompt_tokens=waiting.prompt_tokens,
            miss_tokens=max(0, waiting.prompt_tokens - promised),
            holder_miss_tokens=waiting.miss_tokens,
            version=0,
            chain=request.submission.chain,
        )

    async def _send(self, batch: OfferBatch, now_ms: float) -> None:
        told = self._told[batch.target_instance_id]
        address = self._candidates.address_of(batch.target_instance_id)
        if address is None:
            self._told.pop(batch.target_instance_id, None)
            return
        try:
            await self._calls.offer(address, batch, CALL_TIMEOUT_S)
        except PeerLostError as error:
            self._instance.metrics.offer("unsent")
            _log.info("offers_unsent", target=batch.target_instance_id, problem=str(error))
            # It is told again in a while, not at every turn.
        for request_id in batch.withdrawn:
            told.at_ms.pop(request_id, None)
        for item in batch.offers:
            told.at_ms[item.request_id] = now_ms
