"""Where a request of the OpenAI port goes: as its ticket says, else as a router says, else into the own queue.

A router that does not answer in time is no error: the request is served here, DEGRADED, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dualmap.client.routers import Routers
from dualmap.core.errors import DualMapError, Overloaded, ParameterMismatch, Unavailable
from dualmap.rpc.own_submission import own_submission, ticket_facts, with_ticket
from dualmap.rpc.route_calls import CallFailed
from dualmap.rpc.route_values import Prompt, Request, Route
from dualmap.rpc.submission import Submission
from dualmap.runtime.clock import Clock
from dualmap.runtime.logs import get_log
from services.instanceagent.agent import Agent
from services.instanceagent.handover import Handovers
from services.instanceagent.instance import Instance
from services.instanceagent.openai_call import ModelNames, OpenAiCall
from services.instanceagent.prompts import Prompts
from services.instanceagent.request import HeldRequest

DEGRADED = "DEGRADED"
_ABOUT_THE_REQUEST = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "ABORTED", "RESOURCE_EXHAUSTED"})
"""Answers of a router that the client must hear: no other place would do better."""

_log = get_log("front_door")


@dataclass(slots=True)
class Placement:
    """A request taken, and why it is where it is; the reason may still change before the first token."""

    request: HeldRequest
    reason: str


@dataclass(frozen=True, slots=True)
class DoorParts:
    """What the front door is given. ``routers`` None: there are none. ``count`` hears what became of each request.

    ``route_within_s``: the routers' time; then the own queue.
    """

    routers: Routers | None
    prompts: Prompts
    names: ModelNames
    clock: Clock
    count: Callable[[str], None]
    route_within_s: float = 0.2


class FrontDoor:
    """Takes requests for one agent."""

    def __init__(self, agent: Agent, handovers: Handovers, parts: DoorParts) -> None:
        self._agent = agent
        self._handovers = handovers
        self._parts = parts

    async def take(self, call: OpenAiCall) -> Placement:
        """Place a request; it must be followed at once. Raises DualMapError or CallFailed."""
        parts = self._parts
        request = call.request(await parts.prompts.of(call), parts.names)
        if call.ticket:
            return self._routed(call, request)
        request = replace(request, attempt=request.attempt or 1)
        # Names first: an unknown model needs no router to be refused.
        self._agent.check_model(request.model)
        defaults = self._agent.defaults
        submission = own_submission(request, b"", "", defaults)
        route = await self._route(call, request, submission)
        if defaults is not self._agent.defaults:
            # Another ring meanwhile: its blocks may be others.
            submission = own_submission(request, b"", "", self._agent.defaults)
        if route is None:
            return self._own_queue(call, submission)
        try:
            return self._as_routed(call, with_ticket(submission, route.ticket), route)
        except ParameterMismatch:
            # The ring changed between the router and here: hints of another ring are worth nothing.
            parts.count("other_parameters")
            return self._own_queue(call, own_submission(request, b"", "", self._agent.defaults))

    def _routed(self, call: OpenAiCall, request: Request) -> Placement:
        facts = ticket_facts(call.ticket)
        request = replace(request, attempt=request.attempt or facts.attempt)
        submission = own_submission(request, call.ticket, call.instance_id, self._agent.defaults)
        return Placement(self._agent.take(submission, call.traceparent, self._age_ms(call)), facts.reason)

    async def _route(self, call: OpenAiCall, request: Request, submission: Submission) -> Route | None:
        """Where a router sends it; None: no router says so in time. Raises CallFailed for what the client must hear."""
        parts = self._parts
        if parts.routers is None:
            parts.count("no_router_known")
            return None
        asked = replace(request, prompt=self._hashed(request, submission), openai=None)
        metadata = (("traceparent", call.traceparent),) if call.traceparent else ()
        try:
            async with asyncio.timeout(parts.route_within_s):
                return await parts.routers.route(asked, parts.clock.now_s() + parts.route_within_s, metadata)
        except TimeoutError:
            problem = "TIMEOUT"
        except CallFailed as error:
            if error.reason and error.code in _ABOUT_THE_REQUEST:
                parts.count("refused_by_router")
                raise
            problem = error.reason or error.code
        parts.count("no_router")
        _log.debug("no_router", problem=problem)
        return None

    def _hashed(self, request: Request, submission: Submission) -> Prompt:
        """The prompt as hashes: routers need no tokens, and the message stays small."""
        if request.prompt.token_ids is None or self._agent.ring is None:
            return request.prompt
        chain = submission.chain
        return Prompt.of_hashes(chain.hashes, chain.prompt_tokens, chain.block_tokens)

    def _as_routed(self, call: OpenAiCall, submission: Submission, route: Route) -> Placement:
        """At the chosen, else at the backup, else here; what is elsewhere is handed over."""
        instances = self._agent.instances
        wanted = [place.instance_id for place in (route.instance, route.backup) if place is not None]
        elsewhere: list[str] = []
        refusal: DualMapError | None = None
        for instance_id in wanted:
            if instance_id not in instances:
                elsewhere.append(instance_id)
            elif elsewhere:
                return self._hand_over(call, submission, instances[instance_id], elsewhere, route.reason)
            else:
                try:
                    return self._here(call, submission, instance_id, "here" if not refusal else "backup", route.reason)
                except (Overloaded, Unavailable) as error:
                    refusal = error
        if not elsewhere and refusal is not None:
            raise refusal
        return self._hand_over(call, submission, self._best(), elsewhere, route.reason)

    def _here(self, call: OpenAiCall, submission: Submission, instance_id: str, how: str, reason: str) -> Placement:
        placed = replace(submission, instance_id=instance_id)
        request = self._agent.take(placed, self._traceparent(call, submission), self._age_ms(call))
        self._parts.count(how)
        return Placement(request, reason)

    def _hand_over(
        self, call: OpenAiCall, submission: Submission, holder: Instance, target_ids: Sequence[str], reason: str
    ) -> Placement:
        traceparent = self._traceparent(call, submission)
        request = self._agent.take_for_others(holder, submission, traceparent, self._age_ms(call))
        placement = Placement(request, reason)

        def placed(target_id: str | None) -> None:
            if target_id is None:
                placement.reason = DEGRADED
                self._parts.count("own_queue")
            else:
                self._parts.count("handed_over" if target_id == target_ids[0] else "backup")

        self._handovers.send_on(request, target_ids, placed)
        return placement

    def _own_queue(self, call: OpenAiCall, submission: Submission) -> Placement:
        submission = replace(submission, instance_id=self._best().instance_id)
        return Placement(self._agent.take(submission, call.traceparent, self._age_ms(call)), DEGRADED)

    def _best(self) -> Instance:
        """The own instance that is ready soonest, those that take work before all others."""
        return min(
            self._agent.instances.values(),
            key=lambda instance: (not instance.eligible, instance.refusal() is not None, instance.ready_in_s),
        )

    def _traceparent(self, call: OpenAiCall, submission: Submission) -> str:
        """Route's span is the parent where it was traced, else the client's."""
        return "" if submission.ticket is not None and submission.ticket.traceparent else call.traceparent

    def _age_ms(self, call: OpenAiCall) -> float:
        return self._parts.clock.now_s() * 1_000 - call.arrived_ms
