"""Hands a draining instance's queue over, a few at a time, again until each is taken; what nobody takes runs here."""

from __future__ import annotations

import asyncio

from dualmap.rpc.request_events import HandoverCause, MoveOutcome, Returned
from services.instanceagent.candidates import Candidates
from services.instanceagent.handover import Handovers
from services.instanceagent.instance import Instance
from services.instanceagent.request import HeldRequest

AT_ONCE = 64
AGAIN_MS = 250.0
"""How long a request that was refused is left alone."""


class Drainer:
    """Works for one instance; `turn` is called ten times a second."""

    def __init__(self, instance: Instance, candidates: Candidates, handovers: Handovers) -> None:
        self._instance = instance
        self._candidates = candidates
        self._handovers = handovers
        self._refused_ms: dict[tuple[str, int], float] = {}

    async def turn(self) -> None:
        """Hand over what waits, if the instance drains."""
        if not self._instance.draining or not self._instance.held.waiting:
            self._refused_ms.clear()
            return
        now_ms = self._instance.now_ms
        waiting = self._instance.held.waiting
        self._refused_ms = {key: at_ms for key, at_ms in self._refused_ms.items() if key in waiting}
        due = [
            request
            for request in self._instance.ordered()
            if now_ms - self._refused_ms.get(request.identity, -AGAIN_MS) >= AGAIN_MS
        ]
        await asyncio.gather(*(self._hand_over(request) for request in due[:AT_ONCE]))

    async def _hand_over(self, request: HeldRequest) -> None:
        if request.came is not None:
            # Its origin knows better where it goes, and holds the client.
            self._instance.give_back(request, Returned("", HandoverCause.DRAIN))
            return
        own_id = self._instance.instance_id
        tried = frozenset({own_id})
        for _ in range(2):
            target_id = self._candidates.other(request, tried)
            if target_id is None:
                break
            result = await self._handovers.hand_over(request, target_id, HandoverCause.DRAIN)
            if result.outcome not in (MoveOutcome.REFUSED, MoveOutcome.FAILED):
                return
            tried |= {target_id}
        self._refused_ms[request.identity] = self._instance.now_ms
