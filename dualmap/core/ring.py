"""Two consistent-hash rings and the candidate pair of a key (design: deciding a route).

Immutable: a change of members builds a new ring. It knows neither load nor epochs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh64_intdigest

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import Member, RingParameters

REMEMBERED_KEYS = 4_096
"""Pairs kept by key, about 600 KB at most; a key beyond them costs two bisections again."""

_SAMPLE_STEP = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True)
class _Points:
    """One ring: point hashes ascending and, beside each, the index of its owner."""

    seed: int
    hashes: Sequence[int]
    owners: Sequence[int]

    def start(self, key: int) -> int:
        """Position of the first point at or after the key's hash, one past the end when it wraps: O(log points)."""
        return bisect_left(self.hashes, xxh64_intdigest(key.to_bytes(8, "little"), self.seed))


class Ring:
    """Both rings of one pool over the members that own points."""

    __slots__ = ("_first", "_nearest_pairs", "_second", "instance_ids", "parameters")

    def __init__(self, parameters: RingParameters, instance_ids: tuple[str, ...], first: _Points, second: _Points):
        self.parameters = parameters
        self.instance_ids = instance_ids
        self._first = first
        self._second = second
        self._nearest_pairs: dict[int, tuple[str | None, str | None]] = {}

    @classmethod
    def build(cls, members: Iterable[Member], parameters: RingParameters) -> Ring:
        """Rings of those members that are on the ring; their order does not matter. O(points log points).

        Raises:
            InvalidRequest: two members share an id.
        """
        on_ring = sorted((m for m in members if m.state.on_ring), key=lambda member: member.instance_id)
        ids = tuple(member.instance_id for member in on_ring)
        if len(set(ids)) != len(ids):
            raise InvalidRequest("members", "two members share an instance id")
        counts = [max(1, round(parameters.virtual_nodes * member.weight)) for member in on_ring]
        return cls(
            parameters,
            ids,
            _build_points(ids, counts, parameters.seed_1),
            _build_points(ids, counts, parameters.seed_2),
        )

    def pair(self, key: int, eligible: Callable[[str], bool]) -> tuple[str | None, str | None]:
        """The key's two candidates: nearest eligible on ring 1, nearest *different* eligible on ring 2.

        None stands where there is none. O(log points) and about one step more for each ineligible owner met.
        """
        nearest = self._nearest_pairs.get(key)
        if nearest is None:
            nearest = self._remember(key)
        first, second = nearest
        if first is not None and second is not None and eligible(first) and eligible(second):
            return nearest
        return self._pair(key, eligible)

    def _remember(self, key: int) -> tuple[str | None, str | None]:
        """The pair were everyone eligible: the same keys come again and again, and a ring never changes."""
        if len(self._nearest_pairs) >= REMEMBERED_KEYS:
            self._nearest_pairs.clear()
        pair = self._nearest_pairs[key] = self._pair(key, _everyone)
        return pair

    def _pair(self, key: int, eligible: Callable[[str], bool]) -> tuple[str | None, str | None]:
        raw = key.to_bytes(8, "little")
        first = self._nearest(self._first, raw, key, eligible, None)
        if first is None:
            return None, None
        return first, self._nearest(self._second, raw, key, eligible, first)

    def walk(self, ring_no: int, key: int) -> Iterator[str]:
        """Distinct owners clockwise from the key on ring 1 or 2, each once; lazy, so stop early."""
        points = self._first if ring_no == 1 else self._second
        owners = points.owners
        position = points.start(key)
        ids, size = self.instance_ids, len(owners)
        left = len(ids)
        seen: set[int] = set()
        while left:
            if position >= size:
                position = 0
            owner = owners[position]
            if owner not in seen:
                seen.add(owner)
                left -= 1
                yield ids[owner]
            position += 1

    def _nearest(
        self, points: _Points, raw: bytes, key: int, eligible: Callable[[str], bool], taken: str | None
    ) -> str | None:
        owners = points.owners
        if not owners:
            return None
        position = bisect_left(points.hashes, xxh64_intdigest(raw, points.seed))
        nearest = self.instance_ids[owners[position if position < len(owners) else 0]]
        if nearest != taken and eligible(nearest):
            return nearest
        walk = self.walk(1 if points is self._first else 2, key)
        next(walk)
        return next((owner for owner in walk if owner != taken and eligible(owner)), None)


def moved_share(before: Ring, after: Ring, samples: int = 4096) -> float:
    """Share of keys whose candidates differ between two rings, everyone eligible, over fixed evenly mixed keys."""
    moved = 0
    for key in _sampled_keys(samples):
        moved += set(before.pair(key, _everyone)) != set(after.pair(key, _everyone))
    return moved / samples


def pair_shares(ring: Ring, samples: int = 4096) -> dict[str, float]:
    """Share of the same keys whose pair each instance is in: those that change their pair when it alone leaves."""
    counts: Counter[str] = Counter()
    for key in _sampled_keys(samples):
        counts.update(instance_id for instance_id in ring.pair(key, _everyone) if instance_id is not None)
    return {instance_id: count / samples for instance_id, count in counts.items()}


def _sampled_keys(samples: int) -> Iterator[int]:
    return (number * _SAMPLE_STEP & 0xFFFF_FFFF_FFFF_FFFF for number in range(1, samples + 1))


def _everyone(_instance_id: str) -> bool:
    return True


def _build_points(ids: tuple[str, ...], counts: list[int], seed: int) -> _Points:
    # Sorting by (hash, owner index) breaks a tie of two hashes by id, the same everywhere.
    points = sorted(
        (xxh64_intdigest(prefix + number.to_bytes(4, "little"), seed), owner)
        for owner, (prefix, count) in enumerate(zip((i.encode() for i in ids), counts, strict=True))
        for number in range(count)
    )
    return _Points(seed, array("Q", (point for point, _ in points)), array("I", (owner for _, owner in points)))
