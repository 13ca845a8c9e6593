"""Requests through `dualmap.client`, open loop, while parts of the cluster die; and what each of them saw.

Judges three promises: Route never fails, what had not begun is not lost, nothing is answered twice.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field

from dualmap.client import CallFailed, Done, DualMapClient, FirstToken, Prompt, Request, Route, Tokens
from dualmap.simulator.synthetic import synthetic_trace
from dualmap.simulator.trace import TraceRequest

REQUEST_TIMEOUT_S = 60.0
"""Far longer than any fault: who is not served within it is lost."""

LONGEST_OUTPUT = 64
"""Tokens; short answers end soon after the last fault, when the views are compared."""


@dataclass(slots=True)
class Seen:
    """What one request's client saw."""

    request_id: str
    wanted_tokens: int
    route_s: list[float] = field(default_factory=list)
    first_tokens: int = 0
    tokens: int = 0
    done: int = 0
    output_tokens: int = 0
    handovers: int = 0
    attempts: int = 0
    sent_to: str = ""
    error: str = ""
    by_router: bool = False
    ended: bool = False

    @property
    def begun(self) -> bool:
        """Whether its client has had a first token."""
        return self.first_tokens > 0

    def problem(self) -> str | None:
        """The broken promise, None when all were kept."""
        if self.by_router:
            return f"Route failed: {self.error}"
        if not self.ended:
            return "neither an end nor an error"
        if self.error and not self.begun:
            return f"lost before it began: {self.error}"
        if self.first_tokens > 1 or self.done > 1:
            return f"answered twice: {self.first_tokens} first tokens, {self.done} ends"
        # The first token is one of them.
        if self.done and self.tokens + 1 != self.output_tokens:
            return f"{self.tokens + 1} tokens came, {self.output_tokens} were made"
        return None


class Load:
    """Sends until told to stop; `finish` waits for what is under way."""

    def __init__(self, client: DualMapClient, seed: int, rate: float, prefix: str) -> None:
        """``rate``: requests in a wall second."""
        self.seen: list[Seen] = []
        self._client = client
        self._rate = rate
        self._prefix = prefix
        self._draw = random.Random(seed)
        self._trace = synthetic_trace("skew", 2_000, seed)
        self._running: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        """Requests under way."""
        return len(self._running)

    async def run(self, stop: asyncio.Event) -> None:
        """Send at Poisson times until ``stop``."""
        number = 0
        while not stop.is_set():
            self._send(self._trace[number % len(self._trace)], number)
            number += 1
            try:
                async with asyncio.timeout(self._draw.expovariate(self._rate)):
                    await stop.wait()
            except TimeoutError:
                continue

    async def finish(self) -> None:
        """Wait for all that is under way; each ends within its own time."""
        while self._running:
            await asyncio.wait(self._running)

    def _send(self, request: TraceRequest, number: int) -> None:
        wanted = max(1, min(LONGEST_OUTPUT, request.output_tokens))
        seen = Seen(f"{self._prefix}-{number}", wanted)
        self.seen.append(seen)
        prompt = Prompt.of_caller_ids(request.full_blocks, request.input_tokens, request.block_tokens)
        task = asyncio.create_task(self._one(Request(seen.request_id, prompt, max_output_tokens=wanted), seen))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _one(self, request: Request, seen: Seen) -> None:
        def routed(route: Route, seconds: float) -> None:
            seen.route_s.append(seconds)
            seen.attempts = route.attempt
            seen.sent_to = route.instance.instance_id

        try:
            async with aclosing(self._client.run(request, REQUEST_TIMEOUT_S, on_route=routed)) as events:
                async for event in events:
                    if isinstance(event, FirstToken):
                        seen.first_tokens += 1
                    elif isinstance(event, Tokens):
                        seen.tokens += event.count
                    elif isinstance(event, Done):
                        seen.done += 1
                        seen.output_tokens, seen.handovers = event.output_tokens, event.handovers
                        # Served elsewhere without a hand-over: its client went to the backup.
                        seen.attempts += not event.handovers and event.instance_id != seen.sent_to
        except CallFailed as error:
            seen.error = f"{error.target} {error.code} {error.reason}".strip()
            seen.by_router = error.target.startswith("router")
        seen.ended = True
