"""When the requests of a trace arrive, and what no policy can beat: the bound by work, the ceiling of the hit rate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from dualmap.core.state import PrefillCost
from dualmap.simulator.trace import TraceRequest


def poisson_arrivals(requests: Sequence[TraceRequest], rate: float, seed: int) -> list[TraceRequest]:
    """The same requests in the same order with independent exponential gaps of mean 1 / ``rate`` seconds.

    Raises:
        ValueError: ``rate`` is not positive.
    """
    if not rate > 0:
        raise ValueError(f"rate: {rate} is not positive")
    source = random.Random(seed)
    at_s = 0.0
    arrived = []
    for request in requests:
        at_s += source.expovariate(rate)
        arrived.append(replace(request, timestamp_s=at_s))
    return arrived


def own_arrivals(
    requests: Sequence[TraceRequest], rate: float | None = None, *, spread: bool = True, seed: int = 0
) -> list[TraceRequest]:
    """The trace's own timing, scaled to a mean of ``rate`` requests a second when one is given.

    Args:
        requests: in order of time.
        rate: mean arrivals a second over the whole; None keeps the trace's.
        spread: requests of one recorded instant are spread evenly at random until the next; else the burst is kept.
        seed: of the spreading.
    """
    source = random.Random(seed)
    times = [request.timestamp_s for request in requests]
    if spread:
        times = _spread(times, source)
    factor = 1.0
    if rate is not None and times and times[-1] > 0:
        if not rate > 0:
            raise ValueError(f"rate: {rate} is not positive")
        factor = len(times) / rate / times[-1]
    return [replace(request, timestamp_s=at_s * factor) for request, at_s in zip(requests, times, strict=True)]


def _spread(times: Sequence[float], source: random.Random) -> list[float]:
    spread: list[float] = []
    start = 0
    gap_s = 0.0
    while start < len(times):
        end = start
        while end < len(times) and times[end] == times[start]:
            end += 1
        if end < len(times):
            gap_s = times[end] - times[start]
        inside = [source.random() for _ in range(end - start)] if end - start > 1 else [0.0]
        spread.extend(times[start] + gap_s * part for part in sorted(inside))
        start = end
    return spread


def capacity_bound(requests: Sequence[TraceRequest], instances: int, cost: PrefillCost) -> float:
    """Requests a second if every block were computed once and the work balanced perfectly: no policy sustains more.

    The fixed part of ``cost`` is left out: one batch pays it once for many requests.
    """
    held: set[int] = set()
    work_s = 0.0
    for request in requests:
        hit_tokens = _take(request, held)
        work_s += cost.seconds(request.input_tokens - hit_tokens, request.input_tokens) - cost.a_s
    return instances * len(requests) / work_s if work_s > 0 else float("inf")


def ceiling_hit_rate(requests: Sequence[TraceRequest], warmup: int = 0) -> float:
    """Share of the input tokens after ``warmup`` requests that one cache without limit would hold already."""
    held: set[int] = set()
    tokens = 0
    hits = 0
    for place, request in enumerate(requests):
        hit_tokens = _take(request, held)
        if place >= warmup:
            hits += hit_tokens
            tokens += request.input_tokens
    return hits / tokens if tokens else 0.0


def _take(request: TraceRequest, held: set[int]) -> int:
    blocks = request.full_blocks
    run = 0
    for block in blocks:
        if block not in held:
            break
        run += 1
    held.update(blocks[run:])
    return run * request.block_tokens
