"""Asks holders for offered requests one instance chose to run; what is pulled arrives by Accept."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from dualmap.rpc.agent_calls import AgentCalls, PeerLostError
from dualmap.rpc.convert_offer import PullOrder
from dualmap.rpc.request_events import MoveOutcome
from dualmap.runtime.logs import get_log
from services.instanceagent.candidates import Candidates
from services.instanceagent.instance import Instance

CALL_TIMEOUT_S = 0.5

_log = get_log("puller")


class Puller:
    """Pulls for one instance, each in a task of its own; at most as many as its offer book allows."""

    def __init__(self, instance: Instance, candidates: Candidates, calls: AgentCalls) -> None:
        self._instance = instance
        self._candidates = candidates
        self._calls = calls
        self._tasks: set[asyncio.Task[None]] = set()

    def pull(self, order: PullOrder) -> None:
        """Start a pull; a refused one frees its room again."""
        task = asyncio.get_running_loop().create_task(self._pull(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give up what is under way."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self, order: PullOrder) -> None:
        member = self._candidates.member(order.holder_instance_id)
        outcome = MoveOutcome.UNKNOWN
        try:
            if member is not None:
                wish = replace(order, target_instance_id=self._instance.instance_id)
                outcome = await self._calls.pull(member.grpc_address, wish, CALL_TIMEOUT_S)
        except PeerLostError as error:
            outcome = MoveOutcome.FAILED
            _log.info("pull_failed", holder=order.holder_instance_id, problem=str(error))
        self._instance.metrics.offer(f"pull_{outcome.name.lower()}")
        if outcome is not MoveOutcome.MOVED and self._instance.offers is not None:
            self._instance.offers.refused(order)
            self._instance.kick()
