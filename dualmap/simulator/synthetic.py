"""Made-up workloads for runs without a trace: skewed shared prefixes, bursts of one prefix, short multi-turn chats."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dualmap.simulator.trace import TraceRequest

BLOCK_TOKENS = 128
MEAN_GAP_S = 0.2
"""Mean time between arrivals before any scaling."""


@dataclass(slots=True)
class _Ids:
    """Hands out block ids; a prefix once made keeps its ids."""

    next_id: int = 1
    made: dict[object, tuple[int, ...]] = field(default_factory=dict)

    def new(self, blocks: int) -> tuple[int, ...]:
        first = self.next_id
        self.next_id += blocks
        return tuple(range(first, first + blocks))

    def prefix(self, name: object, blocks: int) -> tuple[int, ...]:
        if name not in self.made:
            self.made[name] = self.new(blocks)
        return self.made[name]


def synthetic_trace(kind: str, count: int, seed: int) -> list[TraceRequest]:
    """A workload of ``count`` requests; equal arguments give equal requests.

    Args:
        kind: ``skew``: 200 prefixes of 8 to 48 blocks chosen by Zipf's law, each with a tail of its own.
            ``bursts``: the same, and every 20 s one prefix comes 40 times within a second.
            ``chat``: conversations of 1 to 12 turns that share a system prompt of two blocks; a turn repeats all
            before it.
        count: requests.
        seed: of everything drawn.

    Raises:
        ValueError: an unknown kind.
    """
    makers: dict[str, Callable[[int, random.Random], list[TraceRequest]]] = {
        "skew": _skew,
        "bursts": _bursts,
        "chat": _chat,
    }
    if kind not in makers:
        raise ValueError(f"synthetic: {kind!r} is none of {', '.join(makers)}")
    return makers[kind](count, random.Random(seed))


def _skew(count: int, source: random.Random, burst_every_s: float = 0.0) -> list[TraceRequest]:
    ids = _Ids()
    weights = [1 / (rank + 1) for rank in range(200)]
    depths = [source.randint(8, 48) for _ in weights]
    found: list[TraceRequest] = []
    at_s = 0.0
    burst_at_s = burst_every_s or float("inf")

    def add(when_s: float, prefix: int) -> None:
        blocks = ids.prefix(prefix, depths[prefix]) + ids.new(source.randint(1, 16))
        tokens = len(blocks) * BLOCK_TOKENS + source.randrange(BLOCK_TOKENS)
        found.append(TraceRequest(len(found), when_s, tokens, source.randint(16, 256), blocks, BLOCK_TOKENS))

    while len(found) < count:
        at_s += source.expovariate(1 / MEAN_GAP_S)
        if at_s >= burst_at_s:
            hot = source.randrange(200)
            for step in range(min(40, count - len(found))):
                add(burst_at_s + step / 40, hot)
            at_s = burst_at_s + 1
            burst_at_s += burst_every_s
        elif len(found) < count:
            add(at_s, source.choices(range(200), weights)[0])
    return found


def _bursts(count: int, source: random.Random) -> list[TraceRequest]:
    return _skew(count, source, burst_every_s=20.0)


def _chat(count: int, source: random.Random) -> list[TraceRequest]:
    """Sessions start at random and run side by side; a turn adds a question and the answer before it."""
    ids = _Ids()
    system = ids.new(2)
    turns: list[tuple[float, int, int, tuple[int, ...], str]] = []
    start_s = 0.0
    session = 0
    while len(turns) < count * 2:
        start_s += source.expovariate(1 / (MEAN_GAP_S * 6))
        at_s = start_s
        tokens = len(system) * BLOCK_TOKENS
        blocks = system
        for _ in range(source.randint(1, 12)):
            tokens += source.randint(30, 300)
            blocks = blocks + ids.new(tokens // BLOCK_TOKENS - len(blocks))
            answer = source.randint(30, 400)
            turns.append((at_s, tokens, answer, blocks, f"chat-{session}"))
            tokens += answer
            at_s += source.uniform(5, 40)
        session += 1
    turns.sort(key=lambda turn: turn[0])
    return [
        TraceRequest(index, at_s, tokens, answer, blocks, BLOCK_TOKENS, name)
        for index, (at_s, tokens, answer, blocks, name) in enumerate(turns[:count])
    ]
