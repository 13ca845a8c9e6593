"""A deterministic LLM engine in virtual time: LRU KV cache, prefill in order, continuous-batching decode.

The simulator and the wall-clock simulated engine both run it. It refuses to know a clock: every call brings the time
in seconds, never falling. Nothing happens per token: a decode is a mark on a shared progress line.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dualmap.core.state import PrefillCost, Tier


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine can do.

    ``cost``: prefill alone. ``kv_tokens``: device cache (1.2 M: 64 GB at 57,344 B a token).
    ``decode_tokens_per_s``: one sequence alone; with k running each gets that divided by
    1 + ``decode_batch_slowdown`` (k - 1), times ``decode_share_in_prefill`` while a prefill runs; a prefill takes
    1 + ``prefill_slowdown_per_running`` k times as long. ``host_tier_tokens``: slower tier that takes what the device
    evicts; loading from it costs
    ``host_load_s_per_token``. ``stream_step_s``: least time between Tokens events of a streaming request.
    """

    cost: PrefillCost = field(default_factory=PrefillCost)
    kv_tokens: int = 1_200_000
    decode_tokens_per_s: float = 50.0
    decode_batch_slowdown: float = 0.01
    decode_share_in_prefill: float = 0.5
    prefill_slowdown_per_running: float = 0.001
    max_running: int = 256
    host_tier_tokens: int = 0
    host_load_s_per_token: float = 0.000_02
    stream_step_s: float = 0.05


class Started(NamedTuple):
    """Prefill of a request begins."""

    request_id: str
    at_s: float


class FirstToken(NamedTuple):
    """Prefill is over; ``hit_tokens`` were found cached in some tier, ``prefill_s`` went by since Started."""

    request_id: str
    at_s: float
    hit_tokens: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """More tokens of a request that streams, the first one not counted."""

    request_id: str
    at_s: float
    count: int


class Done(NamedTuple):
    """The request left the engine, all ``output_tokens`` out."""

    request_id: str
    at_s: float
    output_tokens: int


class BlocksStored(NamedTuple):
    """Blocks now held in ``tier``, root first, because of ``request_id`` (empty: moved there by eviction)."""

    request_id: str
    at_s: float
    hashes: tuple[int, ...]
    tier: Tier
    block_tokens: int


class BlocksRemoved(NamedTuple):
    """Blocks no longer held in any tier, leaves first."""

    at_s: float
    hashes: tuple[int, ...]


EngineEvent = Started | FirstToken | Tokens | Done | BlocksStored | BlocksRemoved


class _Request:
    __slots__ = (
        "block_tokens", "cancelled", "emitted", "estimate_s", "hashes", "hit_tokens", "joined", "output", "prompt",
        "request_id", "running", "started_s", "stream",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - private record
        self, request_id: str, hashes: Sequence[int], block_tokens: int, prompt: int, output: int, stream: bool
    ) -> None:
        self.request_id = request_id
        self.hashes = hashes
        self.block_tokens = block_tokens
        self.prompt = prompt
        self.output = output
        self.stream = stream
        self.cancelled = False
        self.running = False
        self.estimate_s = 0.0
        self.started_s = 0.0
        self.hit_tokens = 0
        self.joined = 0.0
        self.emitted = 0


class BlockCache:
    """LRU over chain blocks, leaves first: a chain is touched leaf to root, so a parent is never older than its child.

    Evicted device blocks go to the host tier where there is one. Blocks of running requests are not pinned: they are
    the youngest, which is the same while the running fit the cache.
    """

    def __init__(self, device_tokens: int, host_tokens: int) -> None:
        self.device_tokens = device_tokens
        self.host_tokens = host_tokens
        self.used = 0
        self.host_used = 0
        self._device: OrderedDict[int, int] = OrderedDict()
        self._host: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._device) + len(self._host)

    def leading(self, hashes: Sequence[int]) -> tuple[int, int]:
        """Blocks of the leading run held in any tier, and how many of them only on the host. O(run)."""
        device, host = self._device, self._host
        run = on_host = 0
        for block in hashes:
            if block in device:
                run += 1
            elif block in host:
                run += 1
                on_host += 1
            else:
                break
        return run, on_host

    def store(self, hashes: Sequence[int], block_tokens: int) -> tuple[list[int], list[int], list[int]]:
        """Touch a whole chain; returns (new on the device, moved to the host, gone), each in order of happening."""
        device, host = self._device, self._host
        stored: list[int] = []
        for block in reversed(hashes):
            if block in device:
                device.move_to_end(block)
                continue
            device[block] = block_tokens
            self.used += block_tokens
            stored.append(block)
            if host and block in host:
                self.host_used -= host.pop(block)
        moved: list[int] = []
        gone: list[int] = []
        while self.used > self.device_tokens and device:
            block, tokens = device.popitem(last=False)
            self.used -= tokens
            if self.host_tokens:
                host[block] = tokens
                self.host_used += tokens
                moved.append(block)
            else:
                gone.append(block)
        while self.host_used > self.host_tokens and host:
            block, tokens = host.popitem(last=False)
            self.host_used -= tokens
            gone.append(block)
        stored.reverse()
        return stored, moved, gone

    def clear(self) -> list[int]:
        """Drop all; returns what was held, leaves first."""
        gone = list(self._device) + list(self._host)
        self._device.clear()
        self._host.clear()
        self.used = self.host_used = 0
        return gone


class EngineModel:
    """One engine. Staged requests prefill in order, one at a time; those past it decode together.

    A fully cached prompt costs ``a`` alone. Blocks become visible at the first token, full blocks of the prompt only;
    a request's hits are counted when its prefill begins.
    """

    def __init__(self, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.cache = BlockCache(self.options.kv_tokens, self.options.host_tier_tokens)
        self._clock = 0.0
        self._paused_until = 0.0
        self._staged: deque[_Request] = deque()
        self._requests: dict[str, _Request] = {}
        self._waiting = 0
        self._staged_s = 0.0
        self._current: _Request | None = None
        self._left_s = 0.0
        self._running = 0
        self._streaming: dict[str, _Request] = {}
        self._streamed_s = 0.0
        self._finish: list[tuple[float, int, _Request]] = []
        self._order = 0
        self._progress = 0.0
        self._events: list[EngineEvent] = []

    @property
    def staged_requests(self) -> int:
        """Requests accepted and not past their first token."""
        return self._waiting + (self._current is not None)

    @property
    def running_requests(self) -> int:
        """Requests past their first token."""
        return self._running

    @property
    def kv_use(self) -> float:
        """Share of the device cache that is filled."""
        return self.cache.used / self.options.kv_tokens

    @property
    def rest_s(self) -> float:
        """Seconds of prefill left in the engine as of the last advance, a pause not counted."""
        return self._left_s * self._prefill_stretch() + self._staged_s

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def stage(  # noqa: PLR0917 - fixed interface, called once a request
        self,
        request_id: str,
        hashes: Sequence[int],
        block_tokens: int,
        prompt_tokens: int,
        max_output: int,
        now_s: float,
        stream: bool = False,
    ) -> None:
        """Accept a request that will give ``max_output`` tokens (0 and 1: it ends at its first token)."""
        if request_id in self._requests:
            raise ValueError(f"{request_id} is in the engine already")
        self._run_to(now_s)
        request = _Request(request_id, hashes, block_tokens, prompt_tokens, max_output, stream)
        hit = min(prompt_tokens, self.cache.leading(hashes)[0] * block_tokens)
        request.estimate_s = self.options.cost.seconds(prompt_tokens - hit, prompt_tokens)
        self._requests[request_id] = request
        self._staged.append(request)
        self._waiting += 1
        self._staged_s += request.estimate_s
        self._start_next()

    def cancel(self, request_id: str, now_s: float) -> bool:
        """Drop a request wherever it is; no event follows for it. False: not in the engine."""
        self._run_to(now_s)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.cancelled = True
        if request is self._current:
            self._current = None
            self._left_s = 0.0
            self._start_next()
        elif request.running:
            self._leave(request)
        else:
            self._unstage(request)
        return True

    def pause(self, until_s: float) -> None:
        """Make no progress from the last advance until then (infinite: until another call); 0 ends a pause."""
        self._paused_until = until_s

    def clear_cache(self, now_s: float) -> None:
        """Forget every block; requests in the engine go on."""
        self._run_to(now_s)
        gone = self.cache.clear()
        if gone:
            self._events.append(BlocksRemoved(now_s, tuple(gone)))

    def next_event_s(self) -> float | None:
        """When something happens next, if nothing is added; None when nothing will."""
        if self._events:
            return self._clock
        due = self._next_internal_s()
        if self._streaming:
            step = max(self._clock, self._paused_until, self._streamed_s + self.options.stream_step_s)
            due = min(due, step)
        return None if math.isinf(due) else due

    def advance(self, now_s: float) -> list[EngineEvent]:
        """Let time pass up to ``now_s`` and hand out all that happened, in order."""
        self._run_to(now_s)
        if self._streaming and self._clock >= self._streamed_s + self.options.stream_step_s:
            self._emit_tokens()
        events, self._events = self._events, []
        return events

    def _prefill_stretch(self) -> float:
        return 1.0 + self.options.prefill_slowdown_per_running * self._running

    def _decode_rate(self) -> float:
        options = self.options
        rate = options.decode_tokens_per_s / (1.0 + options.decode_batch_slowdown * max(0, self._running - 1))
        return rate * options.decode_share_in_prefill if self._current is not None else rate

    def _prefill_due_s(self) -> float:
        """Seconds of progress until the first token of the current prefill."""
        return math.inf if self._current is None else self._left_s * self._prefill_stretch()

    def _decode_due_s(self) -> float:
        """Seconds of progress until the next running request ends."""
        finish = self._finish
        while finish and finish[0][2].cancelled:
            heapq.heappop(finish)
        return max(0.0, finish[0][0] - self._progress) / self._decode_rate() if finish else math.inf

    def _next_internal_s(self) -> float:
        return max(self._clock, self._paused_until) + min(self._prefill_due_s(), self._decode_due_s())

    def _run_to(self, now_s: float) -> None:
        while True:
            due = self._next_internal_s()
            if due > now_s:
                break
            self._drift(due)
            self._happen()
        if now_s > self._clock:
            self._drift(now_s)

    def _drift(self, to_s: float) -> None:
        """Progress without an event between."""
        moved = to_s - max(self._clock, min(self._paused_until, to_s))
        if moved > 0.0:
            if self._running:
                self._progress += moved * self._decode_rate()
            if self._current is not None:
                self._left_s = max(0.0, self._left_s - moved / self._prefill_stretch())
        self._clock = max(self._clock, to_s)

    def _happen(self) -> None:
        """The event due now. The nearer one happens whatever rounding left of it, so time never stands still."""
        if self._current is not None and self._prefill_due_s() <= self._decode_due_s():
            self._first_token(self._current)
        else:
            self._end(heapq.heappop(self._finish)[2])
        self._start_next()

    def _start_next(self) -> None:
        if self._current is not None or self._running >= self.options.max_running:
            return
        while self._staged:
            request = self._staged.popleft()
            if request.cancelled:
                continue
            self._waiting -= 1
            self._staged_s = self._staged_s - request.estimate_s if self._waiting else 0.0
            run, on_host = self.cache.leading(request.hashes)
            request.hit_tokens = min(request.prompt, run * request.block_tokens)
            request.started_s = self._clock
            self._current = request
            self._left_s = (
                self.options.cost.seconds(request.prompt - request.hit_tokens, request.prompt)
                + on_host * request.block_tokens * self.options.host_load_s_per_token
            )
            self._events.append(Started(request.request_id, self._clock))
            return

    def _first_token(self, request: _Request) -> None:
        self._current = None
        self._left_s = 0.0
        now = self._clock
        stored, moved, gone = self.cache.store(request.hashes, request.block_tokens)
        events = self._events
        if stored:
            events.append(BlocksStored(request.request_id, now, tuple(stored), Tier.DEVICE, request.block_tokens))
        if moved:
            events.append(BlocksStored("", now, tuple(moved), Tier.HOST, request.block_tokens))
        if gone:
            events.append(BlocksRemoved(now, tuple(gone)))
        events.append(FirstToken(request.request_id, now, request.hit_tokens, now - request.started_s))
        if request.output <= 1:
            del self._requests[request.request_id]
            events.append(Done(request.request_id, now, request.output))
            return
        self._running += 1
        request.running = True
        request.joined = self._progress
        request.emitted = 0
        if request.stream:
            if not self._streaming:
                self._streamed_s = now
            self._streaming[request.request_id] = request
        self._order += 1
        heapq.heappush(self._finish, (self._progress + request.output - 1, self._order, request))

    def _end(self, request: _Request) -> None:
        left = request.output - 1 - request.emitted
        if request.stream and left:
            self._events.append(Tokens(request.request_id, self._clock, left))
        del self._requests[request.request_id]
        self._leave(request)
        self._events.append(Done(request.request_id, self._clock, request.output))

    def _leave(self, request: _Request) -> None:
        self._running -= 1
        self._streaming.pop(request.request_id, None)
        if not self._running:
            # Nobody is on the progress line: start it anew, so that it never loses precision.
            self._progress = 0.0
            self._finish.clear()
        self._start_next()

    def _unstage(self, request: _Request) -> None:
        self._waiting -= 1
        self._staged_s = self._staged_s - request.estimate_s if self._waiting else 0.0

    def _emit_tokens(self) -> None:
        for request in self._streaming.values():
            out = min(request.output - 1, int(self._progress - request.joined + 1e-7))
            if out > request.emitted:
                self._events.append(Tokens(request.request_id, self._clock, out - request.emitted))
                request.emitted = out
        self._streamed_s = self._clock
