"""What waits before an engine: bounded, ordered by policy, cheap at ten thousand waiting.

It refuses to know the engine: the caller says how much room there is, and takes the requests it gives out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from dualmap.core.errors import Overloaded
from dualmap.core.load import BUCKET_LIMITS, priority_class
from dualmap.core.queue_order import OrderOptions, feasible_by_class, fifo_rank, hit_first_rank, lot_of, rest_rank
from dualmap.core.state import PRIORITY_CLASSES, SLACK_BUCKETS, QueuePolicy


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that waits. Times are milliseconds of the holder's own clock; ``prefill_s`` is the cost of its miss."""

    request_id: str
    attempt: int
    deadline_ms: float
    submitted_ms: float
    priority: int
    prompt_tokens: int
    miss_tokens: int
    hit_tokens: int = 0
    prefill_s: float = 0.0
    hashes: Sequence[int] = ()
    lot: float = field(init=False)
    """Fixed by the id, in (0, 1]: who gives way is drawn with it, alike at every holder."""

    def __post_init__(self) -> None:
        self.lot = lot_of(self.request_id)

    @property
    def identity(self) -> tuple[str, int]:
        """(request id, attempt)."""
        return (self.request_id, self.attempt)


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Most that may wait. ``max_wait_ms``: who waited longer is shed."""

    max_requests: int = 10_000
    max_tokens: int = 200_000_000
    max_wait_ms: float = 120_000.0


_Key = tuple[float, float, int]
_Item = tuple[float, float, int, WaitingRequest, float]
"""Sort key of three numbers (the last is unique), the request, its cost in ms: a plan or a report reads a thousand."""

_HIGHEST_FIRST = tuple(reversed(range(PRIORITY_CLASSES)))
_NS_PER_S = 1_000_000_000


class _Entry:
    """Where a request stands: its place list and its key there."""

    __slots__ = ("aged_key", "due_key", "key", "place", "prefill_ns", "request")

    def __init__(self, request: WaitingRequest, place: list[_Item], keys: tuple[_Key, _Key, _Key]) -> None:
        self.request = request
        self.place = place
        self.key, self.due_key, self.aged_key = keys
        # Whole numbers: what is added and taken away ten thousand times must end at nothing.
        self.prefill_ns = round(request.prefill_s * _NS_PER_S)


def _take(place: list[_Item], key: _Key) -> None:
    index = bisect_left(place, key)
    del place[index]


def _rank_of(item: tuple[float, int, WaitingRequest]) -> tuple[float, int]:
    return item[:2]


class WaitingQueue:
    """A queue under one policy.

    ``slo``: in a class the earliest deadlines that can still be met (Moore-Hodgson over the window), then everything
    else, oldest first. Pushing and removing cost a binary search and a memory move; the plan is made at most every
    ``recompute_ms`` and only over the window.
    """

    def __init__(
        self,
        policy: QueuePolicy = QueuePolicy.SLO,
        bounds: QueueBounds | None = None,
        options: OrderOptions | None = None,
    ) -> None:
        self.policy = policy
        self.bounds = bounds or QueueBounds()
        self.options = options or OrderOptions()
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._live: tuple[list[_Item], ...] = tuple([] for _ in range(PRIORITY_CLASSES))
        self._due = self._live
        if policy is not QueuePolicy.SLO:
            # Reports sort by deadline whatever the order.
            self._due = tuple([] for _ in range(PRIORITY_CLASSES))
        self._late: list[_Item] = []
        self._late_ns = [0] * PRIORITY_CLASSES
        self._prefill_ns = 0
        self._aged: list[_Item] = []
        self._sequence = 0
        self._tokens = 0
        self._miss_tokens = 0
        self._plan: deque[WaitingRequest] = deque()
        self._dropped: list[tuple[float, int, WaitingRequest]] = []
        self._dropped_due: list[list[float]] = [[] for _ in range(PRIORITY_CLASSES)]
        self._windowed: list[int] = [0] * PRIORITY_CLASSES
        self._planned_ms: float | None = None
        self._dirty = True
        self._since_aged = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, identity: tuple[str, int]) -> bool:
        return identity in self._entries

    def __iter__(self) -> Iterator[WaitingRequest]:
        """All that waits, in no order that means anything."""
        return (entry.request for entry in self._entries.values())

    @property
    def tokens(self) -> int:
        """Prompt tokens waiting."""
        return self._tokens

    @property
    def miss_tokens(self) -> int:
        """Uncached prompt tokens waiting."""
        return self._miss_tokens

    @property
    def prefill_s(self) -> float:
        """Seconds of prefill waiting. O(1)."""
        return self._prefill_ns / _NS_PER_S

    def get(self, request_id: str, attempt: int) -> WaitingRequest | None:
        """The request, if it waits."""
        entry = self._entries.get((request_id, attempt))
        return None if entry is None else entry.request

    def push(self, request: WaitingRequest) -> None:
        """Add a request, or put one back: its own submission time and deadline give it its old place.

        Raises:
            Overloaded: a bound would be passed; the delay is the wait that the bound stands for.
        """
        if request.identity in self._entries:
            raise ValueError(f"{request.identity} waits already")
        if len(self._entries) >= self.bounds.max_requests:
            raise Overloaded(self._retry_ms(), f"{len(self._entries)} requests wait")
        if self._entries and self._tokens + request.prompt_tokens > self.bounds.max_tokens:
            raise Overloaded(self._retry_ms(), f"{self._tokens} tokens wait")
        self._sequence += 1
        self._insert(request, self._sequence)
        self._tokens += request.prompt_tokens
        self._miss_tokens += request.miss_tokens

    def remove(self, request_id: str, attempt: int) -> WaitingRequest | None:
        """Take a request out; None when it does not wait here."""
        entry = self._entries.pop((request_id, attempt), None)
        if entry is None:
            return None
        self._unplace(entry)
        self._tokens -= entry.request.prompt_tokens
        self._miss_tokens -= entry.request.miss_tokens
        self._dirty = True
        return entry.request

    def update(self, request_id: str, attempt: int, miss_tokens: int, hit_tokens: int, prefill_s: float) -> bool:
        """Correct what a waiting request will cost, after the index changed; False when it does not wait here."""
        entry = self._entries.get((request_id, attempt))
        if entry is None:
            return False
        request = entry.request
        if request.miss_tokens == miss_tokens and request.hit_tokens == hit_tokens:
            return True
        self._unplace(entry)
        self._miss_tokens += miss_tokens - request.miss_tokens
        request.miss_tokens, request.hit_tokens, request.prefill_s = miss_tokens, hit_tokens, prefill_s
        self._insert(request, entry.key[2])
        return True

    def peek(self, now_ms: float, rest_s: float = 0.0) -> WaitingRequest | None:
        """The request that goes next, left in its place. ``rest_s``: seconds of staged work before it."""
        if not self._entries:
            return None
        if self.policy is not QueuePolicy.SLO:
            return self._live[0][0][3]
        self._refresh(now_ms, rest_s)
        head = self._planned()
        if head is None and self._dirty:
            self._compute(now_ms, rest_s)
            head = self._planned()
        return self._aged_turn(now_ms, rest_s) or head or self._first_of_rest()

    def _planned(self) -> WaitingRequest | None:
        """The first of the plan that still waits."""
        while self._plan:
            request = self._plan[0]
            if self._waits(request):
                return request
            self._plan.popleft()
        return None

    def pick(self, now_ms: float, room_tokens: int, rest_s: float = 0.0) -> WaitingRequest | None:
        """Take out the request that goes next, if its uncached tokens fit the room.

        None when nothing waits or the next one does not fit: nobody smaller overtakes it, or long prompts would starve.
        """
        request = self.peek(now_ms, rest_s)
        if request is None or request.miss_tokens > room_tokens:
            return None
        self.release(request)
        return request

    def release(self, request: WaitingRequest) -> None:
        """Take out what goes to the engine, as `pick` does; the caller chose it, by `peek` or otherwise."""
        was_late = self._entries[request.identity].place is self._late
        dirty = self._dirty
        self.remove(request.request_id, request.attempt)
        # Releasing the planned head does not change the plan behind it.
        self._dirty = dirty
        self._since_aged = 0 if was_late else self._since_aged + 1

    def rank(self, request: WaitingRequest) -> int:
        """How many of those that wait would go before it, by the plan as it was last made. O(log n)."""
        entry = self._entries[request.identity]
        if self.policy is not QueuePolicy.SLO:
            return bisect_left(entry.place, entry.key)
        kept = [len(live) - len(dropped) for live, dropped in zip(self._live, self._dropped_due, strict=True)]
        pclass = priority_class(request.priority)
        dropped = self._dropped_due[pclass]
        earlier = bisect_left(dropped, request.deadline_ms)
        given_up = earlier < len(dropped) and dropped[earlier] == request.deadline_ms
        if given_up or entry.place is self._late:
            place = (self._rank(request), entry.key[2])
            late = bisect_left(self._late, (place[0], 0.0, place[1]))
            return max(0, sum(kept)) + late + bisect_left(self._dropped, place, key=_rank_of)
        return max(0, sum(kept[pclass + 1 :]) + bisect_left(entry.place, entry.key) - earlier)

    def order(self, now_ms: float, rest_s: float = 0.0, limit: int | None = None) -> list[WaitingRequest]:
        """What waits, in the order it would be released if nothing came; the first ``limit`` of it."""
        if self.policy is not QueuePolicy.SLO:
            return [item[3] for item in islice(self._live[0], limit)]
        self._compute(now_ms, rest_s)
        beyond = (
            item[3] for live, size in zip(reversed(self._live), self._windowed, strict=True) for item in live[size:]
        )
        late = ((rank, sequence, request) for rank, _, sequence, request, _ in self._late)
        rest = (item[2] for item in heapq.merge(self._dropped, late, key=_rank_of))
        return list(islice(chain(self._plan, beyond, rest), limit))

    def earliest(self, limit: int) -> list[WaitingRequest]:
        """The earliest deadlines of what was not found beyond saving, at most ``limit``, and the oldest of the rest."""
        found = [item[3] for item in islice(heapq.merge(*self._due), limit)]
        return found + [item[3] for item in self._late[:1]]

    def given_up(self, now_ms: float, rest_s: float = 0.0) -> list[WaitingRequest]:
        """What cannot meet its deadline here as things stand, oldest first; nothing under the other policies."""
        if self.policy is not QueuePolicy.SLO or not self._entries:
            return []
        if self._dirty:
            self._compute(now_ms, rest_s)
        else:
            self._refresh(now_ms, rest_s)
        dropped = [item for item in self._dropped if self._waits(item[2])]
        late = ((rank, sequence, request) for rank, _, sequence, request, _ in self._late)
        return [item[2] for item in heapq.merge(dropped, late, key=_rank_of)]

    def shed(self, now_ms: float) -> list[WaitingRequest]:
        """Take out all that waited longer than ``max_wait_ms``; the caller answers them RESOURCE_EXHAUSTED."""
        bound = now_ms - self.bounds.max_wait_ms
        expired = self._aged[: bisect_left(self._aged, (bound,))]
        for item in expired:
            self.remove(item[3].request_id, item[3].attempt)
        return [item[3] for item in expired]

    def waiting_s(self, now_ms: float, default_slo_s: float, rest_s: float = 0.0) -> tuple[float, ...]:
        """Seconds of waiting prefill, flat by class and slack bucket, as a load report carries them.

        ``rest_s``: seconds of staged work before it, which decide what is given up.
        """
        slo = self.policy is QueuePolicy.SLO
        if slo:
            self._refresh(now_ms, rest_s)
        limits = [now_ms + limit * default_slo_s * 1_000 for limit in BUCKET_LIMITS]
        table = [0.0] * (PRIORITY_CLASSES * SLACK_BUCKETS)
        for pclass, due in enumerate(self._due):
            _fill(table, pclass * SLACK_BUCKETS, due, now_ms, limits)
            table[pclass * SLACK_BUCKETS] += self._late_ns[pclass] / _NS_PER_S * 1_000
        for _, _, request in self._dropped if slo else ():
            if self._waits(request):
                base = priority_class(request.priority) * SLACK_BUCKETS
                deadline_ms, prefill_ms = request.deadline_ms, request.prefill_s * 1_000
                table[base if deadline_ms <= now_ms else base + 1 + bisect_right(limits, deadline_ms)] -= prefill_ms
                table[base] += prefill_ms
        return tuple([value / 1_000 if value > 1e-9 else 0.0 for value in table])

    def _retry_ms(self) -> int:
        return int(min(10_000, max(50, self.prefill_s * 1_000)))

    def _insert(self, request: WaitingRequest, sequence: int) -> None:
        pclass = priority_class(request.priority)
        due_key: _Key = (request.deadline_ms, 0.0, sequence)
        place, key = self._due[pclass], due_key
        if self.policy is QueuePolicy.HIT_FIRST:
            place, key = self._live[0], (*hit_first_rank(request.hit_tokens, request.submitted_ms), sequence)
        elif self.policy is QueuePolicy.FIFO:
            place, key = self._live[0], (*fifo_rank(request.submitted_ms), sequence)
        aged_key: _Key = (request.submitted_ms, 0.0, sequence)
        cost = (request, request.prefill_s * 1_000)
        insort(place, (*key, *cost))
        if self._due is not self._live:
            insort(self._due[pclass], (*due_key, *cost))
        insort(self._aged, (*aged_key, *cost))
        entry = self._entries[request.identity] = _Entry(request, place, (key, due_key, aged_key))
        self._prefill_ns += entry.prefill_ns
        self._dirty = True

    def _unplace(self, entry: _Entry) -> None:
        """Out of every list and sum but the table of entries."""
        _take(entry.place, entry.key)
        _take(self._aged, entry.aged_key)
        if self._due is not self._live:
            _take(self._due[priority_class(entry.request.priority)], entry.due_key)
        if entry.place is self._late:
            self._late_ns[priority_class(entry.request.priority)] -= entry.prefill_ns
        self._prefill_ns -= entry.prefill_ns

    def _waits(self, request: WaitingRequest) -> bool:
        entry = self._entries.get(request.identity)
        return entry is not None and entry.request is request and entry.place is not self._late

    def _refresh(self, now_ms: float, rest_s: float) -> None:
        planned = self._planned_ms
        if planned is None or now_ms - planned >= self.options.recompute_ms:
            self._compute(now_ms, rest_s)

    def _window(self) -> list[list[_Item]]:
        """The earliest deadlines of all classes, at most ``window``, by class, highest first."""
        size = self.options.window
        heads = [live[:size] for live in self._live]
        if sum(map(len, heads)) > size:
            # Three sorted runs: merged, not sorted.
            last = sorted(chain(*heads))[size - 1]
            heads = [head[: bisect_left(head, (last[0], last[1], last[2] + 1))] for head in heads]
        return heads[::-1]

    def _compute(self, now_ms: float, rest_s: float) -> None:
        """Make the plan: who is beyond saving leaves the window for good, then Moore-Hodgson over the rest."""
        classes: list[list[_Item]] = []
        hopeless: list[_Item] = []
        for live, head in zip(reversed(self._live), self._window(), strict=True):
            kept = [item for item in head if item[0] >= now_ms + item[4]]
            if len(kept) < len(head):
                hopeless += [item for item in head if item[0] < now_ms + item[4]]
                live[: len(head)] = kept
            classes.append(kept)
        if hopeless:
            self._to_late(hopeless)
        self._windowed = [len(kept) for kept in classes]
        jobs = [[(item[0], item[4]) for item in kept] for kept in classes]
        self._plan.clear()
        self._dropped = []
        lots = [[item[3].lot for item in kept] for kept in classes] if self.options.even_drops else None
        start_ms = now_ms + rest_s * 1_000
        planned = feasible_by_class(jobs, start_ms, lots)
        for pclass, kept, (kept_at, dropped_at) in zip(_HIGHEST_FIRST, classes, planned, strict=True):
            self._plan.extend([kept[position][3] for position in kept_at])
            above = rest_rank(0.0, pclass, self.options)
            lost = [kept[position] for position in dropped_at]
            self._dropped_due[pclass] = [item[0] for item in lost]
            self._dropped += [(item[3].submitted_ms + above, item[2], item[3]) for item in lost]
        self._dropped.sort()
        self._planned_ms = now_ms
        self._dirty = False

    def _rank(self, request: WaitingRequest) -> float:
        return rest_rank(request.submitted_ms, priority_class(request.priority), self.options)

    def _to_late(self, items: list[_Item]) -> None:
        """All at once: one by one, a thousand memory moves would stall the release."""
        for _, _, sequence, request, cost_ms in items:
            entry = self._entries[request.identity]
            entry.key = (self._rank(request), 0.0, sequence)
            entry.place = self._late
            self._late.append((*entry.key, request, cost_ms))
            self._late_ns[priority_class(request.priority)] += entry.prefill_ns
        self._late.sort()

    def _first_of_rest(self) -> WaitingRequest | None:
        best: tuple[float, int, WaitingRequest] | None = None
        for rank, sequence, request in self._dropped:
            if self._waits(request):
                best = (rank, sequence, request)
                break
        if self._late:
            rank, _, sequence, request, _ = self._late[0]
            if best is None or (rank, sequence) < best[:2]:
                return request
        if best is not None:
            return best[2]
        for live in reversed(self._live):
            if live:
                return live[0][3]
        return None

    def _aged_turn(self, now_ms: float, rest_s: float) -> WaitingRequest | None:
        """The oldest given up, when its turn among the feasible has come and none of them misses for it."""
        if not self._late or self._since_aged + 1 < self.options.aged_every:
            return None
        request = self._late[0][3]
        if now_ms - request.submitted_ms < self.options.aged_after_ms:
            return None
        clock = now_ms / 1_000 + rest_s + request.prefill_s
        for planned in self._plan:
            clock += planned.prefill_s
            if clock > planned.deadline_ms / 1_000:
                return None
        return request


def _fill(table: list[float], base: int, due: list[_Item], now_ms: float, limits: list[float]) -> None:
    """Add milliseconds of work by slack bucket; ``due`` by deadline, ``limits`` the upper ones of bucket 1 and on."""
    stops = [bisect_right(due, now_ms, key=_deadline_of), *(bisect_left(due, (limit,)) for limit in limits), len(due)]
    start = 0
    for bucket, stop in enumerate(stops):
        if stop > start:
            table[base + bucket] += sum([item[4] for item in islice(due, start, stop)])
            start = stop


def _deadline_of(item: _Item) -> float:
    return item[0]
