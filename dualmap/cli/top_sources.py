"""What `dualmap top` asks: every service once a turn, all at the same time. Silence is an answer too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

from dualmap.rpc.convert_explain import ViewFacts
from dualmap.rpc.convert_operator import RingFacts
from dualmap.rpc.convert_rebalance import RebalancerStatus
from dualmap.rpc.convert_state import InstanceFacts
from dualmap.rpc.operator_calls import (
    CollectorOperatorCalls,
    RebalancerOperatorCalls,
    RingOperatorCalls,
    RouterOperatorCalls,
    StateList,
)
from dualmap.rpc.route_calls import CallFailed

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Answer(Generic[V]):
    """What one address said, or why not."""

    address: str
    value: V | None = None
    failure: CallFailed | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of a running system, by role."""

    routers: tuple[str, ...]
    collectors: tuple[str, ...]
    ring_managers: tuple[str, ...]
    rebalancers: tuple[str, ...]
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """All answers of one turn; ``at_s`` is the monotonic clock's."""

    at_s: float
    routers: tuple[Answer[ViewFacts], ...]
    collectors: tuple[Answer[StateList], ...]
    ring_managers: tuple[Answer[RingFacts], ...]
    rebalancers: tuple[Answer[RebalancerStatus], ...]

    @property
    def answered(self) -> bool:
        """Whether anybody said anything."""
        return any(
            answer.value is not None
            for answers in (self.routers, self.collectors, self.ring_managers, self.rebalancers)
            for answer in answers
        )

    @property
    def failures(self) -> tuple[CallFailed, ...]:
        """Why those that did not answer did not."""
        return tuple(
            answer.failure
            for answers in (self.routers, self.collectors, self.ring_managers, self.rebalancers)
            for answer in answers
            if answer.failure is not None
        )

    @property
    def ring(self) -> RingFacts | None:
        """The leader's ring, else the newest that a standby knows."""
        known = [answer.value for answer in self.ring_managers if answer.value is not None]
        return max(known, key=lambda facts: (facts.leader, facts.ring.epoch), default=None)

    @property
    def instances(self) -> dict[str, InstanceFacts]:
        """Instances of all collectors' lists, each from the collector that polls it where that one answered."""
        found: dict[str, InstanceFacts] = {}
        for answer in self.collectors:
            for facts in answer.value.instances if answer.value is not None else ():
                if facts.instance_id not in found or facts.polled_ago_ms >= 0:
                    found[facts.instance_id] = facts
        return found


class Sources:
    """Channels to all of a system's services, open while ``async with`` is."""

    def __init__(self, places: Places, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._routers = [RouterOperatorCalls(address) for address in places.routers]
        self._collectors = [CollectorOperatorCalls(address, places.pool) for address in places.collectors]
        self._ring_managers = [RingOperatorCalls(address, places.pool) for address in places.ring_managers]
        self._rebalancers = [RebalancerOperatorCalls(address, places.pool) for address in places.rebalancers]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for calls in (*self._routers, *self._collectors, *self._ring_managers, *self._rebalancers):
            self._stack.push_async_callback(calls.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def sample(self) -> Sample:
        """Ask everybody; over within the timeout."""
        limit_s = self._timeout_s
        routers, collectors, ring_managers, rebalancers = await asyncio.gather(
            asyncio.gather(*(_answer(calls.address, calls.view(limit_s)) for calls in self._routers)),
            asyncio.gather(*(_answer(calls.address, calls.instances(limit_s)) for calls in self._collectors)),
            asyncio.gather(*(_answer(calls.address, calls.ring(limit_s)) for calls in self._ring_managers)),
            asyncio.gather(*(_answer(calls.address, calls.status(limit_s)) for calls in self._rebalancers)),
        )
        return Sample(monotonic(), tuple(routers), tuple(collectors), tuple(ring_managers), tuple(rebalancers))


async def _answer(address: str, call: Awaitable[V]) -> Answer[V]:
    try:
        return Answer(address, value=await call)
    except CallFailed as error:
        return Answer(address, failure=error)
