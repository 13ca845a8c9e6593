"""An operator's questions to running services, in values: each one try, with its deadline.

Changes nothing but by drain and undrain. Whom to ask next is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Self, TypeVar

import grpc
import grpc.aio

from dualmap.core.errors import InvalidRequest
from dualmap.rpc.clients import aio_channel
from dualmap.rpc.convert_client import route_message
from dualmap.rpc.convert_explain import ViewFacts
from dualmap.rpc.convert_operator import (
    DrainOutcome,
    Explanation,
    RingFacts,
    explanation_of,
    rebalancer_status_of,
    ring_facts_of,
    view_of,
)
from dualmap.rpc.convert_rebalance import RebalancerStatus
from dualmap.rpc.convert_ring import state_of
from dualmap.rpc.convert_state import MAX_PAGE_SIZE, InstanceFacts, facts_of
from dualmap.rpc.route_calls import CallFailed
from dualmap.rpc.route_values import Request
from dualmap.rpc.status import Problem, problem_of
from dualmap.v1 import (
    rebalancer_pb2,
    rebalancer_pb2_grpc,
    ring_pb2,
    ring_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)

M = TypeVar("M")
V = TypeVar("V")

_LEAST_TIMEOUT_S = 0.001


@dataclass(frozen=True, slots=True)
class StateList:
    """All instances of a pool as one collector knows them, by id."""

    ring_epoch: int
    instances: tuple[InstanceFacts, ...]


class _Calls:
    """One server at one address; ``async with`` closes the channel. ``role`` is how failures name it."""

    role = "service"

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = aio_channel(address)

    async def close(self) -> None:
        """Close the channel; calls under way end."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, call: Awaitable[M], read: Callable[[M], V]) -> V:
        target = f"{self.role} {self.address}"
        try:
            return read(await call)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(target, problem_of(error)) from error
        except InvalidRequest as error:
            problem = Problem(grpc.StatusCode.DATA_LOSS, f"its answer contradicts the contract: {error.message}")
            raise CallFailed(target, problem) from error


class RouterOperatorCalls(_Calls):
    """One router. Every call raises CallFailed."""

    role = "router"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    async def view(self, timeout_s: float) -> ViewFacts:
        """What the router knows of each instance."""
        return await self._ask(self._stub.GetView(router_pb2.GetViewRequest(), timeout=timeout_s), view_of)

    async def explain(self, request_id: str, timeout_s: float) -> Explanation:
        """Why a recent request went where it went; NOT_FOUND when this router did not place it lately."""
        message = router_pb2.ExplainRequest(request_id=request_id)
        return await self._ask(self._stub.Explain(message, timeout=timeout_s), explanation_of)

    async def what_if(self, request: Request, timeout_s: float) -> Explanation:
        """Where the request would go; nothing is booked."""
        message = router_pb2.ExplainRequest(what_if=route_message(request))
        return await self._ask(self._stub.Explain(message, timeout=timeout_s), explanation_of)


class CollectorOperatorCalls(_Calls):
    """One state collector, about one pool; an empty name is the collector's own. Every call raises CallFailed."""

    role = "state collector"

    def __init__(self, address: str, pool: str = "") -> None:
        super().__init__(address)
        self._pool = pool
        self._stub = state_pb2_grpc.StateCollectorStub(self._channel)

    async def instances(self, timeout_s: float) -> StateList:
        """All instances, page by page; ``timeout_s`` bounds the whole."""
        deadline_s = monotonic() + timeout_s
        found: list[InstanceFacts] = []
        token = ""
        while True:
            message = state_pb2.ListInstancesRequest(pool=self._pool, page_size=MAX_PAGE_SIZE, page_token=token)
            left_s = max(_LEAST_TIMEOUT_S, deadline_s - monotonic())
            page, epoch, token = await self._ask(self._stub.ListInstances(message, timeout=left_s), _page_of)
            found.extend(page)
            if not token:
                return StateList(epoch, tuple(found))


class RingOperatorCalls(_Calls):
    """One ring manager, about one pool; an empty name is the ring manager's own. Every call raises CallFailed."""

    role = "ring manager"

    def __init__(self, address: str, pool: str = "") -> None:
        super().__init__(address)
        self._pool = pool
        self._stub = ring_pb2_grpc.RingManagerStub(self._channel)

    async def ring(self, timeout_s: float) -> RingFacts:
        """The ring known there, and whether it leads."""
        return await self._ask(
            self._stub.GetRing(ring_pb2.GetRingRequest(pool=self._pool), timeout=timeout_s), ring_facts_of
        )

    async def drain(self, instance_id: str, timeout_s: float) -> DrainOutcome:
        """Stop new work for an instance; a standby answers UNAVAILABLE with reason NOT_LEADER."""
        message = ring_pb2.DrainRequest(pool=self._pool, instance_id=instance_id)
        return await self._ask(
            self._stub.Drain(message, timeout=timeout_s),
            lambda answer: DrainOutcome(answer.ring_epoch, state_of(answer.state), answer.moved_share),
        )

    async def undrain(self, instance_id: str, timeout_s: float) -> DrainOutcome:
        """Take a drain back; a standby answers UNAVAILABLE with reason NOT_LEADER."""
        message = ring_pb2.UndrainRequest(pool=self._pool, instance_id=instance_id)
        return await self._ask(
            self._stub.Undrain(message, timeout=timeout_s),
            lambda answer: DrainOutcome(answer.ring_epoch, state_of(answer.state)),
        )


class RebalancerOperatorCalls(_Calls):
    """One rebalancer, about one pool; an empty name is the rebalancer's own. Every call raises CallFailed."""

    role = "rebalancer"

    def __init__(self, address: str, pool: str = "") -> None:
        super().__init__(address)
        self._pool = pool
        self._stub = rebalancer_pb2_grpc.RebalancerStub(self._channel)

    async def status(self, timeout_s: float) -> RebalancerStatus:
        """How it does, and the moves of its last round that had any."""
        message = rebalancer_pb2.GetStatusRequest(pool=self._pool)
        return await self._ask(self._stub.GetStatus(message, timeout=timeout_s), rebalancer_status_of)


def _page_of(message: state_pb2.ListInstancesResponse) -> tuple[list[InstanceFacts], int, str]:
    return [facts_of(summary) for summary in message.instances], message.ring_epoch, message.next_page_token
