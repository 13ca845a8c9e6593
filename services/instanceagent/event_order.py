"""Which frame of a publisher may be applied now: sequences, duplicates, gaps, and publishers that began anew."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from xxhash import xxh3_64_intdigest

PAYLOADS_KEPT = 16_384
"""Digests of past payloads; engines replay their last 10,000 batches."""

NOTHING_YET = -1


class Verdict(Enum):
    """What a frame is."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"
    RESTART = "restart"


class EventOrder:
    """The last sequence applied (``watermark``) of one life of one publisher, and what its payloads were."""

    def __init__(self) -> None:
        self.watermark = NOTHING_YET
        self._digests: OrderedDict[int, int] = OrderedDict()

    @property
    def fresh(self) -> bool:
        """Whether nothing was applied yet: any sequence may come first."""
        return self.watermark == NOTHING_YET

    def judge(self, sequence: int, payload: bytes) -> Verdict:
        """What this frame is; changes nothing.

        A sequence at or below the watermark is the same frame again only with the same payload (each carries the time
        of its making): with another one it comes from a publisher that began anew.
        """
        if self.fresh or sequence == self.watermark + 1:
            return Verdict.NEXT
        if sequence > self.watermark:
            return Verdict.GAP
        return Verdict.DUPLICATE if self.knows(sequence, payload) else Verdict.RESTART

    def knows(self, sequence: int, payload: bytes) -> bool:
        """Whether exactly this frame was applied."""
        return self._digests.get(sequence) == xxh3_64_intdigest(payload)

    def applied(self, sequence: int, payload: bytes) -> None:
        """The frame was applied."""
        self.watermark = sequence
        self._digests[sequence] = xxh3_64_intdigest(payload)
        if len(self._digests) > PAYLOADS_KEPT:
            self._digests.popitem(last=False)

    def forget(self) -> None:
        """Begin anew."""
        self.watermark = NOTHING_YET
        self._digests.clear()
