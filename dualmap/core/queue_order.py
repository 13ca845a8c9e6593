"""Orders of a waiting queue as pure functions: which set can meet its deadlines, and how the rest ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

_LOTS = 1_000_003


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Bounds of the ``slo`` order.

    ``window``: earliest deadlines looked at. ``recompute_ms``: least time between two computations.
    ``class_age_ms``: a class higher counts as so much older among what was given up.
    ``aged_after_ms``, ``aged_every``: of so many releases one may be the oldest given up, once it has waited so long,
    where nobody planned misses for it. It is paid for: one of 16 costs 4 % of the hybrid's goodput, one of 8 7 %.
    ``even_drops``: who gives way is drawn by length x lot instead of length alone, so that not every long prompt does.
    """

    window: int = 1_024
    recompute_ms: float = 20.0
    class_age_ms: float = 10_000.0
    aged_after_ms: float = 60_000.0
    aged_every: int = 64
    even_drops: bool = True


def lot_of(request_id: str) -> float:
    """A request's lot, in (0, 1]: fixed by its id, so alike at every holder."""
    return (xxh3_64_intdigest(request_id.encode()) % _LOTS + 1) / _LOTS


def feasible(
    jobs: Iterable[tuple[float, float]], start_s: float, lots: Sequence[float] | None = None
) -> tuple[list[int], list[int], float]:
    """Moore-Hodgson: the largest set that meets its deadlines on one machine free at ``start_s``.

    ``jobs`` are (deadline, cost) in seconds of one clock, earliest deadline first. Where jobs together are late the
    longest gives way; with ``lots`` the one of the highest cost x lot, and the set is then not the largest.
    Returns the positions kept, the positions dropped (both ascending) and the time the kept are done. O(n log n).
    """
    clock = start_s
    heap: list[tuple[float, int, float]] = []
    push, pop = heapq.heappush, heapq.heappop
    dropped: list[int] = []
    count = 0
    for position, (deadline, cost) in enumerate(jobs):
        count += 1
        clock += cost
        push(heap, (-cost if lots is None else -cost * lots[position], position, cost))
        while clock > deadline and heap:
            _, loser, freed = pop(heap)
            clock -= freed
            dropped.append(loser)
    dropped.sort()
    if not dropped:
        return list(range(count)), dropped, clock
    lost = set(dropped)
    return [position for position in range(count) if position not in lost], dropped, clock


def feasible_by_class(
    classes: Sequence[Sequence[tuple[float, float]]], start_s: float, lots: Sequence[Sequence[float]] | None = None
) -> list[tuple[list[int], list[int]]]:
    """`feasible` for each class in turn, highest first: a class gets only the time the higher ones leave."""
    answer: list[tuple[list[int], list[int]]] = []
    clock = start_s
    for place, jobs in enumerate(classes):
        kept, dropped, clock = feasible(jobs, clock, None if lots is None else lots[place])
        answer.append((kept, dropped))
    return answer


def rest_rank(submitted_ms: float, pclass: int, options: OrderOptions) -> float:
    """Rank among what was given up, lowest first: oldest first, a higher class as if older by ``class_age_ms``."""
    return submitted_ms - pclass * options.class_age_ms


def hit_first_rank(hit_tokens: int, submitted_ms: float) -> tuple[float, float]:
    """Rank of the ``hit_first`` order: longest cached prefix, then arrival."""
    return (-float(hit_tokens), submitted_ms)


def fifo_rank(submitted_ms: float) -> tuple[float, float]:
    """Rank of the ``fifo`` order: arrival."""
    return (submitted_ms, 0.0)
