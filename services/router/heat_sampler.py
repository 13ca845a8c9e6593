"""Samples of routed chains for the heat tree: bounded a report, each standing for as many requests as it was one of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualmap.rpc.convert_ring import HeatSampleValue

BEYOND_KEY_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """What was seen since the last report."""

    samples: tuple[HeatSampleValue, ...]
    requests: int


class HeatSampler:
    """A reservoir: every keyed request of a period has the same chance. Not safe by itself: the decider locks."""

    def __init__(self, most: int, draw: Callable[[], float]) -> None:
        """``most`` samples a report; ``draw`` gives numbers in 0 to 1."""
        self._most = most
        self._draw = draw
        self._kept: list[tuple[Sequence[int], int, int]] = []
        self._keyed = 0
        self._requests = 0

    def observe(self, hashes: Sequence[int], key_blocks: int, miss_tokens: int) -> None:
        """One routed request: its chain from the present key to 64 blocks beyond. O(1), at most 65 hashes copied."""
        self._requests += 1
        if not key_blocks:
            return
        self._keyed += 1
        kept = self._kept
        if len(kept) < self._most:
            kept.append((hashes[key_blocks - 1 : key_blocks + BEYOND_KEY_BLOCKS], key_blocks, miss_tokens))
            return
        place = int(self._draw() * self._keyed)
        if place < self._most:
            kept[place] = (hashes[key_blocks - 1 : key_blocks + BEYOND_KEY_BLOCKS], key_blocks, miss_tokens)

    def take(self) -> tuple[list[tuple[Sequence[int], int, int]], int, int]:
        """(kept chains, keyed requests, requests) since the last take, unweighted; O(1), so it can be called locked."""
        taken = self._kept, self._keyed, self._requests
        self._kept, self._keyed, self._requests = [], 0, 0
        return taken


def weighted(kept: list[tuple[Sequence[int], int, int]], keyed: int, requests: int) -> Samples:
    """The samples, their requests summing to the keyed requests exactly."""
    if not kept:
        return Samples((), requests)
    each, rest = divmod(keyed, len(kept))
    samples = []
    for position, (hashes, first_depth, miss_tokens) in enumerate(kept):
        stands_for = each + (position < rest)
        samples.append(HeatSampleValue(tuple(hashes), first_depth, stands_for, miss_tokens * stands_for))
    return Samples(tuple(samples), requests)
