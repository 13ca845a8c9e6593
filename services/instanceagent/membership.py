"""Keeps the agent's instances on the ring: join, renew, join again, leave once drained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from dualmap.core.errors import DualMapError
from dualmap.core.membership import InstanceState, Member
from dualmap.rpc.convert_ring import Join, Renew, Renewal
from dualmap.rpc.ring_calls import Joined, Renewed, RingCallError, RingCalls
from dualmap.runtime.clock import Clock
from dualmap.runtime.health import Component
from dualmap.runtime.logs import get_log
from services.instanceagent.agent import Agent
from services.instanceagent.instance import Instance
from services.instanceagent.ring_follower import RingFollower
from services.instanceagent.ring_managers import RingManagers

CALL_TIMEOUT_S = 0.5
FIRST_LEASE_MS = 3_000
NOT_JOINED_S = 0.25

T = TypeVar("T")
Call = Callable[[RingCalls], Awaitable[T]]

_log = get_log("membership")


@dataclass(slots=True)
class _Standing:
    """How one instance stands with the ring managers; ``drained_from_ms`` is when its drain was first seen."""

    joined: bool = False
    left: bool = False
    draining_from_ms: float | None = None


class Membership:
    """Leases of one agent; `turn` is called three times a lease."""

    def __init__(
        self,
        agent: Agent,
        member: Member,
        managers: RingManagers,
        follower: RingFollower,
        component: Component,
    ) -> None:
        self.lease_ms = FIRST_LEASE_MS
        self.drain_timeout_s = 60.0
        self._agent = agent
        self._member = member
        self._managers = managers
        self._follower = follower
        self._component = component
        self._ending = False
        self._standing = {instance_id: _Standing() for instance_id in agent.instances}

    async def run(self, stop: asyncio.Event, clock: Clock) -> None:
        """A turn three times a lease, oftener until all have joined, until ``stop``."""
        while not stop.is_set():
            await self.turn()
            settled = all(standing.joined or standing.left for standing in self._standing.values())
            await clock.wait(stop, self.lease_ms / 3_000 if settled else NOT_JOINED_S)

    async def turn(self) -> None:
        """Renew, join what has to be joined, leave what is drained."""
        try:
            # First: a join that is refused must not cost the others their leases.
            await self._renew()
            for instance_id, standing in self._standing.items():
                if not standing.joined and not standing.left:
                    await self._join(instance_id, standing)
            for instance_id, standing in self._standing.items():
                await self._leave_if_drained(instance_id, standing)
        except (DualMapError, RingCallError) as error:
            self._component.fail(str(error))
        else:
            self._component.ok()

    async def drain_all(self) -> None:
        """The process ends: ask for a drain, stop admitting whether or not anyone hears it."""
        self._ending = True
        for instance in self._agent.instances.values():
            instance.draining = True
        try:
            for instance_id, standing in self._standing.items():
                if standing.joined:
                    await self._managers.call(_drain(instance_id))
        except (DualMapError, RingCallError) as error:
            _log.warning("drain_not_announced", problem=str(error))

    async def leave_all(self) -> None:
        """Take every instance off the ring; a lease ends it anyway where no ring manager answers."""
        for instance_id, standing in self._standing.items():
            if standing.joined:
                standing.joined, standing.left = False, True
                try:
                    await self._managers.call(_leave(instance_id, self._agent.facts.agent_epoch))
                except (DualMapError, RingCallError) as error:
                    _log.warning("leave_not_announced", instance=instance_id, problem=str(error))

    async def _join(self, instance_id: str, standing: _Standing) -> None:
        ring = self._agent.ring
        join = Join(
            wish=replace(self._member, instance_id=instance_id),
            highest_epoch_seen=self._follower.epoch,
            parameters_digest=ring.parameters.digest() if ring is not None else 0,
            parameters=ring.parameters if ring is not None else None,
        )
        joined = await self._managers.call(_join(join))
        standing.joined = True
        self.lease_ms = joined.lease_ms or self.lease_ms
        _log.info("joined", instance=instance_id, state=joined.state.name)
        if joined.ring is not None:
            self._follower.adopt(joined.ring)

    async def _renew(self) -> None:
        joined = [instance_id for instance_id, standing in self._standing.items() if standing.joined]
        if not joined:
            return
        renewals = tuple(Renewal(instance_id, self._agent.instances[instance_id].suspect) for instance_id in joined)
        renewed = await self._managers.call(
            _renew(Renew(self._agent.facts.agent_epoch, renewals, self._follower.epoch))
        )
        self.lease_ms = renewed.lease_ms or self.lease_ms
        self._follower.heard_of(renewed.ring_epoch)
        for instance_id, state in zip(joined, renewed.states, strict=False):
            self.told(self._agent.instances[instance_id], state)

    def told(self, instance: Instance, state: InstanceState) -> None:
        """The ring managers' word on an instance, by Renew or by the ring itself."""
        standing = self._standing[instance.instance_id]
        if state is InstanceState.LEFT:
            standing.joined = False
            return
        draining = state is InstanceState.DRAINING
        if draining and standing.draining_from_ms is None:
            standing.draining_from_ms = instance.now_ms
            _log.info("draining", instance=instance.instance_id)
        elif not draining and standing.draining_from_ms is not None:
            standing.draining_from_ms = None
            _log.info("undrained", instance=instance.instance_id)
        instance.draining = draining or self._ending

    async def _leave_if_drained(self, instance_id: str, standing: _Standing) -> None:
        instance = self._agent.instances[instance_id]
        if standing.draining_from_ms is None or not standing.joined:
            return
        over_ms = instance.now_ms - standing.draining_from_ms
        if instance.empty or over_ms > self.drain_timeout_s * 1_000:
            standing.joined, standing.left = False, True
            await self._managers.call(_leave(instance_id, self._agent.facts.agent_epoch))
            _log.info("left", instance=instance_id, drained=instance.empty)


def _join(join: Join) -> Call[Joined]:
    return lambda manager: manager.join(join, CALL_TIMEOUT_S)


def _renew(renew: Renew) -> Call[Renewed]:
    return lambda manager: manager.renew(renew, CALL_TIMEOUT_S)


def _drain(instance_id: str) -> Call[None]:
    return lambda manager: manager.drain(instance_id, CALL_TIMEOUT_S)


def _leave(instance_id: str, agent_epoch: int) -> Call[None]:
    return lambda manager: manager.leave(instance_id, agent_epoch, CALL_TIMEOUT_S)
