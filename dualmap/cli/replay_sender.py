"""Sends the requests of a trace, open loop: each at its time, whatever came of those before. Judges nothing.

Two ways: through a router (`DualMapSender`), and in turn to the agents without one (`RoundRobinSender`), the baseline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from dualmap.cli.replay_prompts import PromptForm, prompt_of
from dualmap.cli.replay_report import Outcome
from dualmap.client import (
    Address,
    CallFailed,
    Done,
    DualMapClient,
    Event,
    FirstToken,
    OnRoute,
    Queued,
    Request,
    Route,
)
from dualmap.simulator.trace import TraceRequest

Events = AsyncGenerator[Event, None]


class Sender(Protocol):
    """Runs one request; tells each route with the seconds it took, yields the events until Done."""

    def run(self, request: Request, timeout_s: float, on_route: OnRoute) -> Events:
        """Raises CallFailed."""
        ...


@dataclass(frozen=True, slots=True)
class DualMapSender:
    """Through the routers: route, submit, retry on the backup."""

    client: DualMapClient

    def run(self, request: Request, timeout_s: float, on_route: OnRoute) -> Events:
        """As `DualMapClient.run`."""
        return self.client.run(request, timeout_s, on_route=on_route)


class RoundRobinSender:
    """To the agents in turn, without a ticket and without a second attempt."""

    def __init__(self, client: DualMapClient, instances: Sequence[Address]) -> None:
        self._client = client
        self._turn = itertools.cycle(instances)

    def run(self, request: Request, timeout_s: float, on_route: OnRoute) -> Events:
        """Submit to the next instance."""
        route = Route(
            request_id=request.request_id,
            attempt=1,
            instance=next(self._turn),
            backup=None,
            ticket=b"",
            reason="ROUND_ROBIN",
            predicted_ttft_ms=0.0,
            hit_tokens=0,
            key_blocks=0,
            ring_epoch=0,
            state_age_ms=-1.0,
        )
        on_route(route, 0.0)
        return self._client.submit(route, request, timeout_s)


@dataclass(frozen=True, slots=True)
class Pace:
    """How trace time becomes wall time, and how long one request may take, in seconds of the trace."""

    speed: float
    timeout_s: float
    prefix: str
    prompts: PromptForm = "ids"


async def send_all(
    requests: Sequence[TraceRequest], sender: Sender, pace: Pace, on_end: Callable[[Outcome], None]
) -> list[Outcome]:
    """Send every request at its time and wait for all of them; one outcome each, in the order of the trace."""
    loop = asyncio.get_running_loop()
    start_s = loop.time() + 0.05
    outcomes: list[Outcome] = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            due_s = start_s + request.timestamp_s / pace.speed
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            outcome = Outcome(index=request.index, prompt_tokens=request.input_tokens)
            outcomes.append(outcome)
            group.create_task(_send(request, outcome, sender, pace, due_s, on_end))
    return outcomes


async def _send(  # noqa: PLR0917  (one request's life in one place)
    request: TraceRequest,
    outcome: Outcome,
    sender: Sender,
    pace: Pace,
    due_s: float,
    on_end: Callable[[Outcome], None],
) -> None:
    now = asyncio.get_running_loop().time
    sent_s = now()
    outcome.send_lag_s = (sent_s - due_s) * pace.speed

    def routed(route: Route, seconds: float) -> None:
        outcome.attempts = max(outcome.attempts, route.attempt)
        outcome.route_s = seconds
        outcome.reason = route.reason
        outcome.instance_id = route.instance.instance_id

    try:
        async with aclosing(sender.run(_message(request, pace), pace.timeout_s / pace.speed, routed)) as events:
            async for event in events:
                if isinstance(event, Queued):
                    # Elsewhere than routed: at the backup, one attempt more. A hand-over is not told as Queued.
                    outcome.attempts += event.instance_id != outcome.instance_id
                elif isinstance(event, FirstToken):
                    outcome.first_token = True
                    outcome.ttft_s = (now() - sent_s) * pace.speed
                    outcome.hit_tokens = event.hit_tokens
                    outcome.instance_id = event.instance_id
                elif isinstance(event, Done):
                    outcome.status = "done"
                    outcome.total_s = (now() - sent_s) * pace.speed
                    outcome.handovers = event.handovers
    except CallFailed as error:
        outcome.status = "shed" if error.code == "RESOURCE_EXHAUSTED" else "failed"
        outcome.error = f"{error.code} {error.reason}".strip()
    on_end(outcome)


def _message(request: TraceRequest, pace: Pace) -> Request:
    return Request(
        request_id=f"{pace.prefix}-{request.index}",
        prompt=prompt_of(request, pace.prompts),
        max_output_tokens=max(1, request.output_tokens),
    )
