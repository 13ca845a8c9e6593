"""Hand-over, the origin's side: Accept at the target, the relay of its events, and what follows when it breaks.

The origin's view is the truth: a first token it has not passed on never existed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dualmap.core.errors import Superseded, Unavailable
from dualmap.rpc.agent_calls import AcceptCall, AgentCalls, PeerLostError
from dualmap.rpc.convert_agent import MoveResult
from dualmap.rpc.request_events import Accepted, AcceptOutcome, GaveWay, HandoverCause, MoveOutcome, Returned
from dualmap.rpc.route_values import Done, FirstToken, HttpChunk, Pulse, Queued, Tokens
from dualmap.rpc.submission import Handover
from dualmap.runtime.logs import get_log
from services.instanceagent.candidates import Candidates
from services.instanceagent.instance import Instance
from services.instanceagent.request import HeldRequest, Phase

ACCEPT_WITHIN_S = 0.2
"""ACCEPTED within this, else the request is back in its old place (design: hand-over 1)."""

SILENCE_S = 3.0
"""Silence that counts as death (design: hand-over 4)."""

AT_ONCE = 16
"""Accepts opened at a time: more would spend their 200 ms waiting for each other."""

RETRY_MS = 100

T = TypeVar("T")
OnPlaced = Callable[[str | None], None]
"""Told the target that accepted; None: none did."""

_log = get_log("handover")


class Handovers:
    """Hands over what waits at the agent's instances and relays what is elsewhere."""

    def __init__(self, instances: Mapping[str, Instance], candidates: Candidates, calls: AgentCalls) -> None:
        self._instances = instances
        self._candidates = candidates
        self._calls = calls
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opening = asyncio.Semaphore(AT_ONCE)

    async def hand_over(
        self, request: HeldRequest, target_id: str, cause: HandoverCause, linked: str = ""
    ) -> MoveResult:
        """Move a waiting request; ends well or badly whatever becomes of the caller. ``linked``: a traceparent."""
        return await asyncio.shield(self._spawn(self._in_turn(request, target_id, cause, linked)))

    def send_on(self, request: HeldRequest, target_ids: Sequence[str], ended: OnPlaced) -> None:
        """Give a request that never waited here to the first target that accepts it, else queue it here.

        ``ended`` hears which of them took it, or None. Its follower hears of all else.
        """
        instance = self._instances[request.instance_id]
        request.relay = self._spawn(self._send_on(instance, request, target_ids, ended))
        request.relay.add_done_callback(lambda task: _end_with(task, instance, request))

    async def _send_on(
        self, instance: Instance, request: HeldRequest, target_ids: Sequence[str], ended: OnPlaced
    ) -> None:
        for target_id in target_ids:
            async with self._opening:
                opened = await self._open(request, target_id, HandoverCause.FRONT_DOOR)
            if isinstance(opened, AcceptCall):
                ended(target_id)
                await self._relay(instance, request, opened, target_id)
                return
            if request.in_phase(Phase.DONE):
                return
        ended(None)
        request.relay = None
        # It asks for a place like any other, but must not count itself among those away.
        instance.held.away.discard(request)
        error = instance.refusal(request.submission.chain.prompt_tokens)
        if error is not None:
            instance.metrics.refused(error.reason)
            instance.finish(request, error, ended=True)
        else:
            instance.put_back(request, "front_door")

    async def stop(self) -> None:
        """Cancel every relay; their clients are told by whoever stops."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_turn(self, request: HeldRequest, target_id: str, cause: HandoverCause, linked: str) -> MoveResult:
        async with self._opening:
            return await self._hand_over(request, target_id, cause, linked)

    async def _hand_over(self, request: HeldRequest, target_id: str, cause: HandoverCause, linked: str) -> MoveResult:
        instance = self._instances[request.instance_id]
        if not request.in_phase(Phase.WAITING):
            return MoveResult(request.request_id, MoveOutcome.NOT_WAITING, f"it is {request.phase.value}")
        if target_id == request.instance_id:
            return MoveResult(request.request_id, MoveOutcome.REFUSED, "it waits there already")
        if request.came is not None:
            return self._return(instance, request, target_id, cause)
        instance.withdraw(request)
        try:
            opened = await self._open(request, target_id, cause, linked)
        finally:
            if request.in_phase(Phase.HANDING_OVER):
                instance.put_back(request, "not_moved")
        if isinstance(opened, MoveResult):
            return opened
        request.relay = self._spawn(self._relay(instance, request, opened, target_id))
        request.relay.add_done_callback(lambda task: _end_with(task, instance, request))
        return MoveResult(request.request_id, MoveOutcome.MOVED)

    def _return(self, instance: Instance, request: HeldRequest, target_id: str, cause: HandoverCause) -> MoveResult:
        if not self._candidates.eligible(target_id):
            return MoveResult(request.request_id, MoveOutcome.REFUSED, f"{target_id} is not eligible")
        instance.give_back(request, Returned(target_id, cause))
        instance.metrics.moved("returned")
        return MoveResult(request.request_id, MoveOutcome.MOVED)

    async def _open(
        self, request: HeldRequest, target_id: str, cause: HandoverCause, linked: str = ""
    ) -> AcceptCall | MoveResult:
        """Open Accept; the request is relayed after it, or still being handed over where it failed."""
        instance = self._instances[request.instance_id]
        address = self._candidates.address_of(target_id)
        if address is None:
            return self._failed(instance, request, MoveOutcome.REFUSED, f"{target_id} is not eligible")
        request.handover += 1
        request.spans.enter("hand over", linked, handover=request.handover, target=target_id, cause=cause.name.lower())
        letter = self._letter(instance, request, target_id, cause)
        call = self._calls.accept(address, request.submission, letter)
        opened = False
        try:
            first = await call.next(ACCEPT_WITHIN_S)
            opened = isinstance(first, Accepted)
        except PeerLostError as error:
            refused = error.problem is not None and bool(error.problem.reason)
            outcome = MoveOutcome.REFUSED if refused else MoveOutcome.FAILED
            return self._failed(instance, request, outcome, str(error))
        finally:
            if not opened:
                call.cancel()
        if not opened:
            return self._failed(instance, request, MoveOutcome.FAILED, "the first event was not ACCEPTED")
        if not request.in_phase(Phase.HANDING_OVER):
            call.cancel()
            return self._failed(instance, request, MoveOutcome.UNKNOWN, "its client is gone")
        request.phase = Phase.RELAYED
        request.handovers += 1
        request.moved_ms = instance.now_ms
        instance.counters.moved_out += 1
        instance.metrics.moved(cause.name.lower())
        instance.state.advance()
        return call

    def _letter(self, instance: Instance, request: HeldRequest, target_id: str, cause: HandoverCause) -> Handover:
        now_ms = instance.now_ms
        return Handover(
            target_instance_id=target_id,
            origin_instance_id=instance.instance_id,
            number=request.handover,
            deadline_left_ms=request.waiting.deadline_ms - now_ms,
            age_ms=request.since_submission_ms(now_ms),
            cause=cause,
            traceparent=request.spans.traceparent(),
        )

    def _failed(self, instance: Instance, request: HeldRequest, outcome: MoveOutcome, detail: str) -> MoveResult:
        request.spans.leave(problem=outcome.name)
        instance.metrics.moved(outcome.name.lower())
        _log.info("handover_failed", instance=instance.instance_id, outcome=outcome.name, detail=detail)
        return MoveResult(request.request_id, outcome, detail)

    async def _relay(self, instance: Instance, request: HeldRequest, call: AcceptCall, target_id: str) -> None:
        """Pass events on until the end; open the next Accept where the target gives the request back."""
        while True:
            try:
                end = await self._follow(instance, request, call)
            finally:
                call.cancel()
            if end is None or request.in_phase(Phase.DONE):
                return
            if isinstance(end, GaveWay):
                instance.finish(request, Superseded(request.request_id, request.attempt), ended=True)
                return
            if request.passed_on:
                _log.warning("relay_lost", instance=instance.instance_id, target=target_id)
                instance.finish(request, Unavailable(f"{target_id}, which ran it,", RETRY_MS), ended=True)
                return
            placed = await self._place_again(instance, request, end, target_id)
            if placed is None:
                request.relay = None
                return
            call, target_id = placed

    async def _follow(
        self, instance: Instance, request: HeldRequest, call: AcceptCall
    ) -> Returned | GaveWay | PeerLostError | None:
        """Relay until the request ends (None), comes back, gives way, or its stream is lost."""
        try:
            while request.in_phase(Phase.RELAYED):
                outcome = await call.next(SILENCE_S)
                if isinstance(outcome, Returned | GaveWay):
                    return outcome
                self._pass_on(instance, request, outcome)
        except PeerLostError as error:
            return error
        return None

    def _pass_on(self, instance: Instance, request: HeldRequest, outcome: AcceptOutcome) -> None:
        if isinstance(outcome, Accepted | Queued | Pulse):
            return
        if isinstance(outcome, FirstToken | Tokens | HttpChunk):
            request.passed_on = True
        if isinstance(outcome, Done):
            instance.emit(request, replace(outcome, handovers=request.handovers))
            instance.finish(request, None, ended=True)
            return
        instance.emit(request, outcome)

    async def _place_again(
        self, instance: Instance, request: HeldRequest, end: Returned | PeerLostError, left_id: str
    ) -> tuple[AcceptCall, str] | None:
        """Where the target wanted it, else the own queue if eligible, else the other of the pair. None: own queue."""
        request.phase = Phase.HANDING_OVER
        own_id = instance.instance_id
        wanted, cause, reason = "", HandoverCause.MIGRATE, "relay_lost"
        if isinstance(end, Returned):
            wanted, cause, reason = end.wanted_instance_id, end.cause, "returned"
        else:
            _log.info("relay_broken", instance=own_id, target=left_id, problem=str(end))
        targets = [wanted] if wanted not in {"", own_id} else []
        if not instance.eligible and wanted != own_id:
            other = self._candidates.other(request, avoid=frozenset({own_id, left_id, wanted}))
            targets += [other] if other is not None else []
        for target_id in targets:
            opened = await self._open(request, target_id, cause)
            if isinstance(opened, AcceptCall):
                return opened, target_id
            if request.in_phase(Phase.DONE):
                return None
        instance.put_back(request, reason)
        return None

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _end_with(task: asyncio.Task[None], instance: Instance, request: HeldRequest) -> None:
    """A relay that fails by a defect must not leave its client waiting for ever."""
    if task.cancelled() or task.exception() is None:
        return
    _log.error("relay_failed", instance=instance.instance_id, error=type(task.exception()).__name__)
    instance.cancel(request, Unavailable("the relay", RETRY_MS), ended=True)
