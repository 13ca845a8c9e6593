"""The agent: takes requests from clients and from other agents for its instances. Plans nothing, owns no loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from dualmap.core.errors import (
    DualMapError,
    InvalidRequest,
    ParameterMismatch,
    Superseded,
    Unavailable,
    UnknownInstance,
    UnknownModel,
)
from dualmap.core.membership import RingParameters, RingSnapshot
from dualmap.core.waiting import WaitingRequest
from dualmap.rpc.convert_agent import SubmissionDefaults
from dualmap.rpc.request_events import Accepted, AcceptOutcome, GaveWay, HandoverCause
from dualmap.rpc.submission import Handover, Submission
from services.instanceagent.identities import Identities
from services.instanceagent.instance import Instance
from services.instanceagent.request import HeldRequest, Phase
from services.instanceagent.spans import RequestSpans, parent_of

PULSE_S = 0.8
"""Submit and Accept carry an event at least each second; a little less, so that it also arrives within it."""

SUSPECT_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the agent is: its life, the model names of its pool (the first by default), how prompts are hashed."""

    agent_epoch: int
    models: tuple[str, ...]
    ttft_slo_ms: int
    hash_key: bytes = b""
    late_binding: bool = False


class Agent:
    """All instances of one process, and what they hold."""

    def __init__(
        self, facts: AgentFacts, instances: Mapping[str, Instance], identities: Identities, tracer: Tracer
    ) -> None:
        self.facts = facts
        self.instances = instances
        self.identities = identities
        self.defaults = SubmissionDefaults(facts.models[0], facts.ttft_slo_ms, RingParameters(), facts.hash_key)
        self.ring: RingSnapshot | None = None
        self.tracer = tracer

    def adopt(self, ring: RingSnapshot) -> None:
        """Go by this ring from now on: its parameters, its SLO, and who drains."""
        old = self.defaults
        self.ring = ring
        self.defaults = SubmissionDefaults(old.model, ring.default_ttft_slo_ms, ring.parameters, old.hash_key)
        for instance in self.instances.values():
            instance.default_slo_ms = ring.default_ttft_slo_ms
            if ring.parameters != old.parameters:
                # Hashes of another block size or version mean nothing any more.
                instance.engine.clear_cache()

    def instance(self, instance_id: str) -> Instance:
        """The instance of that id; "" names the only one. Raises InvalidRequest or UnknownInstance."""
        if not instance_id and len(self.instances) == 1:
            return next(iter(self.instances.values()))
        if not instance_id:
            raise InvalidRequest("instance_id", f"is required: one of {', '.join(self.instances)}")
        if instance_id not in self.instances:
            raise UnknownInstance(instance_id)
        return self.instances[instance_id]

    async def submit(self, submission: Submission, traceparent: str) -> AsyncIterator[AcceptOutcome]:
        """Take a client's request and tell what happens to it. Its end, early or not, is the request's end.

        Raises AlreadyExists, Superseded, Overloaded, Unavailable, UnknownModel, UnknownInstance, ParameterMismatch.
        """
        async with aclosing(self.follow(self.take(submission, traceparent))) as events:
            async for event in events:
                yield event

    async def follow(self, request: HeldRequest) -> AsyncGenerator[AcceptOutcome]:
        """What happens to a client's request that was taken. Its end, early or not, is the request's end."""
        with self.while_client_stays(request):
            async with aclosing(request.outlet.follow(PULSE_S)) as events:
                async for event in events:
                    yield event

    @contextmanager
    def while_client_stays(self, request: HeldRequest) -> Iterator[None]:
        """Around what follows a request's outlet: leaving it, early or not, is the request's end."""
        try:
            yield
        finally:
            self.instances[request.instance_id].cancel(request, None, ended=True)

    async def accept(self, submission: Submission, handover: Handover) -> AsyncIterator[AcceptOutcome]:
        """Take another agent's request: ACCEPTED first, then its events. A broken stream drops it.

        Raises as `submit` does; then the origin still has it.
        """
        request = self._open_accept(submission, handover)
        try:
            async with aclosing(request.outlet.follow(PULSE_S)) as events:
                async for event in events:
                    yield event
        finally:
            self.instances[request.instance_id].cancel(request, None, ended=False)

    def take(self, submission: Submission, traceparent: str, age_ms: float = 0.0) -> HeldRequest:
        """Queue a client's request, which came ``age_ms`` ago; it must be followed. Raises as `submit` does."""
        instance = self._place(submission)
        request = self._from_client(instance, submission, traceparent, age_ms)
        self._admit(instance, request)
        instance.metrics.submitted()
        return request

    def take_for_others(
        self, instance: Instance, submission: Submission, traceparent: str, age_ms: float
    ) -> HeldRequest:
        """Take a client's request that is to be handed over at once, past the queue; it must be followed.

        Raises as `submit` does, but neither Overloaded nor Unavailable.
        """
        request = self._from_client(instance, submission, traceparent, age_ms)
        instance.hold_for_others(request)
        self._hold(request)
        instance.metrics.submitted()
        return request

    def _from_client(self, instance: Instance, submission: Submission, traceparent: str, age_ms: float) -> HeldRequest:
        self._note_ticket(instance, submission)
        self._check(submission)
        self.identities.check_submit(submission.request_id, submission.attempt, instance.now_ms)
        ticket = submission.ticket
        parent = parent_of(traceparent, ticket.traceparent if ticket is not None else "")
        # Its place among what was given up and its longest wait begin anew, its deadline does not.
        deadline_left_ms = submission.ttft_slo_ms - age_ms - submission.age_ms
        return self._request(instance, submission, parent, deadline_left_ms, age_ms)

    def _open_accept(self, submission: Submission, handover: Handover) -> HeldRequest:
        instance = self.instance(handover.target_instance_id)
        self._note_ticket(instance, submission)
        self._check(submission)
        if instance.suspect:
            raise Unavailable(f"the engine of {instance.instance_id}", SUSPECT_RETRY_MS)
        identities, now_ms = self.identities, instance.now_ms
        request_id, attempt = submission.request_id, submission.attempt
        identities.check_accept(request_id, attempt, instance.instance_id, handover.number, now_ms)
        older = identities.find(request_id, attempt, instance.instance_id)
        if older is not None:
            # Its origin gave that stream up before this agent noticed.
            instance.cancel(older, None, ended=False)
        parent = parent_of("", handover.traceparent)
        request = self._request(instance, submission, parent, handover.deadline_left_ms, handover.age_ms)
        request.came = handover
        request.moved_ms = now_ms
        request.outlet.put(Accepted(self.facts.agent_epoch))
        self._admit(instance, request)
        instance.counters.moved_in += 1
        instance.metrics.accepted(handover.cause.name.lower())
        pulled = instance.offers is not None and instance.offers.arrived(request_id, attempt)
        if pulled and handover.cause is HandoverCause.PULL:
            instance.stage(request)
        return request

    def _admit(self, instance: Instance, request: HeldRequest) -> None:
        instance.admit(request)
        self._hold(request)

    def _hold(self, request: HeldRequest) -> None:
        for lower in self.identities.lower(request.request_id, request.attempt):
            self._give_way(lower, request.attempt)
        self.identities.hold(request)

    def _give_way(self, lower: HeldRequest, attempt: int) -> None:
        instance = self.instances[lower.instance_id]
        error: DualMapError | None = Superseded(lower.request_id, lower.attempt)
        if lower.came is not None:
            lower.outlet.put(GaveWay(attempt))
            error = None
        instance.cancel(lower, error, ended=True)

    def _place(self, submission: Submission) -> Instance:
        """Where a submission goes: as it says, else as its ticket says, else to the only instance."""
        if submission.instance_id:
            return self.instance(submission.instance_id)
        ticket = submission.ticket
        if ticket is not None:
            # A retry comes to the backup with the ticket of the chosen.
            for instance_id in (ticket.instance_id, *ticket.candidate_ids):
                if instance_id in self.instances:
                    return self.instances[instance_id]
        return self.instance("")

    def check_model(self, name: str) -> None:
        """Raises UnknownModel for a name that the pool does not answer to; "" is its first."""
        if name and name not in self.facts.models:
            raise UnknownModel(name, self.facts.models)

    def _check(self, submission: Submission) -> None:
        self.check_model(submission.model)
        ticket = submission.ticket
        ours = self.defaults.parameters.digest()
        if self.ring is not None and ticket is not None and ticket.parameters_digest not in (0, ours):
            raise ParameterMismatch("ticket.parameters_digest", f"{ours:016x}", f"{ticket.parameters_digest:016x}")

    def _note_ticket(self, receiver: Instance, submission: Submission) -> None:
        """Whichever call brings a ticket, it counts for the instance and life it names, and for no other."""
        ticket = submission.ticket
        if ticket is None:
            return
        instance = self.instances.get(ticket.instance_id)
        if instance is None:
            # Normal for a hand-over, and for a retry at the backup.
            receiver.metrics.void_ticket("other_instance")
        elif ticket.agent_epoch != self.facts.agent_epoch:
            receiver.metrics.void_ticket("other_life")
        elif not instance.saw_ticket(ticket.router_id, ticket.sequence):
            receiver.metrics.void_ticket("not_believable")

    def _request(
        self, instance: Instance, submission: Submission, parent: Context, deadline_left_ms: float, age_ms: float
    ) -> HeldRequest:
        now_ms = instance.now_ms
        chain = submission.chain
        waiting = WaitingRequest(
            request_id=submission.request_id,
            attempt=submission.attempt,
            deadline_ms=now_ms + deadline_left_ms,
            submitted_ms=now_ms - age_ms,
            priority=submission.priority,
            prompt_tokens=chain.prompt_tokens,
            miss_tokens=chain.prompt_tokens,
            hashes=chain.hashes,
        )
        spans = RequestSpans(
            self.tracer,
            parent,
            instance=instance.instance_id,
            request_id=submission.request_id,
            attempt=submission.attempt,
            model=submission.model or self.defaults.model,
        )
        return HeldRequest(submission, instance.instance_id, waiting, spans)

    def end_all(self, error: DualMapError) -> int:
        """End what is still held, at stop; gives how many there were."""
        held = [request for request in self.identities.all_held() if request.phase is not Phase.DONE]
        for request in held:
            # What came by Accept goes back to its origin, which still has the client.
            self.instances[request.instance_id].cancel(request, error, ended=request.came is None)
        return len(held)
