"""Which waiting requests to move, and where: one sorted pass, one ledger of what each target was given this round.

It refuses to touch anything: a plan is moves, and a move is a wish that the source checks. What the engine has is
never in a queue picture, so nothing started moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dualmap.core.blocks import Chain
from dualmap.core.choose import RingPicture
from dualmap.core.instance_view import InstanceView
from dualmap.core.load import priority_class, slack_bucket, work_due_before


class Cause(StrEnum):
    """Why a request moves, as the contract spells it."""

    OVERLOAD = "overload"
    STALLED = "stalled"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class RebalanceOptions:
    """Limits of a round.

    ``settle_ms``: nobody moves twice within it. ``handover_s``: what a move itself costs the request.
    ``stalled_after_ms``: silence of staged work from which an instance counts as stalled (the agent reports only
    stalls beyond its own, longer measure where a step is slow). ``stall_s``: how long a stall is taken to last on.
    ``max_moves``: most in a round. ``further_looks``: next hash candidates tried when the pair does not do.
    """

    settle_ms: float = 1_000.0
    handover_s: float = 0.05
    stalled_after_ms: float = 500.0
    stall_s: float = 30.0
    max_moves: int = 1_024
    further_looks: int = 2


@dataclass(frozen=True, slots=True)
class QueueItem:
    """One waiting request. ``deadline_ms`` from now, negative: missed. ``moved_ago_ms`` None: never moved."""

    request_id: str
    attempt: int
    deadline_ms: float
    chain: Chain
    miss_tokens: int
    age_ms: float = 0.0
    priority: int = 0
    candidates: tuple[str, ...] = ()
    key: int = 0
    moved_ago_ms: float | None = None


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """The queue of one instance in its own order."""

    instance_id: str
    items: tuple[QueueItem, ...]
    rest_s: float = 0.0
    stalled_ms: float = 0.0
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One move. ``gain_s``: predicted time to first token if it stays, minus there."""

    request_id: str
    attempt: int
    source: str
    target: str
    gain_s: float
    cause: Cause


@dataclass(slots=True)
class _Source:
    """A queue with prefix sums; what leaves it is kept in a Fenwick tree, so that those behind see it in O(log q)."""

    picture: QueuePicture
    cause: Cause
    costs: list[float]
    finish: list[float]
    left: list[float]
    by_key: dict[int, list[int]]
    gone: set[int] = field(default_factory=set)

    def leave(self, position: int) -> None:
        self.gone.add(position)
        index = position + 1
        while index <= len(self.costs):
            self.left[index] += self.costs[position]
            index += index & -index

    def stay_s(self, position: int) -> float:
        """Predicted time to first token of the item if it stays, with what has left before it gone."""
        freed = 0.0
        index = position
        while index > 0:
            freed += self.left[index]
            index -= index & -index
        return self.finish[position] - freed


@dataclass(slots=True)
class _Wish:
    """An item, or items sharing a prefix cold at the target, that would do better there."""

    source: _Source
    positions: list[int]
    target: str
    costs: list[float]
    gain_s: float


class _Round:
    """What one round works on."""

    def __init__(
        self,
        views: Mapping[str, InstanceView],
        picture: RingPicture,
        options: RebalanceOptions,
        closed: set[str],
    ) -> None:
        self.views = views
        self.picture = picture
        self.options = options
        self.closed = closed
        self.refused: set[tuple[str, str, int]] = set()
        """Groups that do not fit a target; what the round gives out only makes it worse, so nobody asks again."""
        self._given: dict[str, float] = {}
        self._due: dict[tuple[str, int, int], float] = {}
        self._open: dict[str, bool] = {}
        self._targets: dict[tuple[int, tuple[str, ...], str], tuple[str, ...]] = {}
        self._held: dict[tuple[str, int], int] = {}

    def open(self, instance_id: str) -> bool:
        known = self._open.get(instance_id)
        if known is None:
            view = self.views.get(instance_id)
            known = view is not None and view.eligible and view.load.admitting and instance_id not in self.closed
            self._open[instance_id] = known
        return known

    def held_blocks(self, target: str, item: QueueItem) -> int:
        """Leading blocks of the item that the target holds or was promised; looked up once a round."""
        place = (target, id(item))
        held = self._held.get(place)
        if held is None:
            held = self.views[target].hit_tokens(item.chain)[1] // item.chain.block_tokens
            self._held[place] = held
        return held

    def cost_s(self, target: str, item: QueueItem, held_blocks: int) -> float:
        prompt = item.chain.prompt_tokens
        miss = max(0, prompt - held_blocks * item.chain.block_tokens)
        return self.views[target].load.cost.seconds(miss, prompt)

    def ahead_s(self, target: str, item: QueueItem) -> float:
        """Work before the item at the target: reported, booked, and all that this round gave it.

        Given work counts whatever its deadline: two moved in one round must not each count on going first.
        """
        bucket = slack_bucket(item.deadline_ms / 1_000, self.picture.default_slo_s)
        place = (target, bucket, priority_class(item.priority))
        due = self._due.get(place)
        if due is None:
            view = self.views[target]
            booked = view.bookings.waiting_s if len(view.bookings) else None
            due = view.load.rest_s + work_due_before(view.load, booked, place[1], place[2])
            self._due[place] = due
        return due + self._given.get(target, 0.0)

    def hopeless(self, target: str, item: QueueItem) -> bool:
        """Whether the item would be late there if all of it were cached: no need to count its hits."""
        least = self.views[target].load.cost.a_s + self.options.handover_s
        return self.ahead_s(target, item) + least > item.deadline_ms / 1_000

    def give(self, target: str, cost_s: float) -> None:
        self._given[target] = self._given.get(target, 0.0) + cost_s

    def targets(self, item: QueueItem, source: str) -> tuple[str, ...]:
        """The rest of its pair, then the next hash candidates; distinct, open. Many share a prefix: kept for them."""
        place = (item.key, item.candidates, source)
        targets = self._targets.get(place)
        if targets is None:
            targets = self._targets[place] = tuple(self._find_targets(item, source))
        return targets

    def _find_targets(self, item: QueueItem, source: str) -> Iterator[str]:
        seen = {source}
        for instance_id in item.candidates:
            if instance_id not in seen and self.open(instance_id):
                seen.add(instance_id)
                yield instance_id
        left = self.options.further_looks
        for ring_no in (2, 1):
            for instance_id in self.picture.ring.walk(ring_no, item.key):
                if left <= 0:
                    return
                if instance_id not in seen and self.open(instance_id):
                    seen.add(instance_id)
                    left -= 1
                    yield instance_id
                    break


def _source(picture: QueuePicture, views: Mapping[str, InstanceView], options: RebalanceOptions) -> _Source | None:
    view = views.get(picture.instance_id)
    if view is None:
        return None
    cause = Cause.OVERLOAD
    if picture.stalled_ms >= options.stalled_after_ms:
        cause = Cause.STALLED
    if picture.suspect:
        cause = Cause.SUSPECT
    at = picture.rest_s + (options.stall_s if cause is not Cause.OVERLOAD else 0.0)
    costs: list[float] = []
    finish: list[float] = []
    for item in picture.items:
        cost = view.load.cost.seconds(item.miss_tokens, item.chain.prompt_tokens)
        at += cost
        costs.append(cost)
        finish.append(at)
    by_key: dict[int, list[int]] = {}
    for position, item in enumerate(picture.items):
        by_key.setdefault(item.key, []).append(position)
    return _Source(picture, cause, costs, finish, [0.0] * (len(costs) + 1), by_key)


def _movable(item: QueueItem, options: RebalanceOptions) -> bool:
    return item.moved_ago_ms is None or item.moved_ago_ms < 0 or item.moved_ago_ms >= options.settle_ms


def _in_need(source: _Source, position: int, options: RebalanceOptions) -> bool:
    """Predicted to miss here, with what has already left counted out; at a stalled source everybody is."""
    item = source.picture.items[position]
    if position in source.gone or not _movable(item, options):
        return False
    return source.cause is not Cause.OVERLOAD or source.stay_s(position) > item.deadline_ms / 1_000


def _company(source: _Source, position: int, held: int) -> list[int]:
    """All that wait here and share the first block that the target does not hold."""
    item = source.picture.items[position]
    hashes = item.chain.hashes
    if held >= len(hashes):
        return [position]
    first_cold = hashes[held]
    items = source.picture.items
    return [
        other
        for other in source.by_key[item.key]
        if len(items[other].chain.hashes) > held and items[other].chain.hashes[held] == first_cold
    ]


def _group_costs(rnd: _Round, source: _Source, positions: Sequence[int], target: str) -> list[float]:
    """Cost of each at the target when they go in order: the first fills the shared prefix for those behind it."""
    filled: set[int] = set()
    costs: list[float] = []
    for position in positions:
        item = source.picture.items[position]
        hashes = item.chain.hashes
        held = rnd.held_blocks(target, item)
        while held < len(hashes) and hashes[held] in filled:
            held += 1
        filled.update(hashes[held:])
        costs.append(rnd.cost_s(target, item, held))
    return costs


def _fits(rnd: _Round, source: _Source, positions: Sequence[int], target: str, costs: Sequence[float]) -> float | None:
    """Sum of the gains when all of them go to the target; None when one in need would not meet its deadline there."""
    gain = 0.0
    before = rnd.options.handover_s
    for position, cost in zip(positions, costs, strict=True):
        item = source.picture.items[position]
        if not _movable(item, rnd.options) or position in source.gone:
            return None
        there = rnd.ahead_s(target, item) + before + cost
        stay = source.stay_s(position)
        late = there > item.deadline_ms / 1_000
        if late and source.cause is Cause.OVERLOAD:
            return None
        if late and there >= stay:
            return None
        gain += stay - there
        before += cost
    return gain if gain > 0.0 else None


def _wish(rnd: _Round, source: _Source, position: int) -> _Wish | None:
    """The first target in hash order that does; inside the pair before outside it."""
    item = source.picture.items[position]
    for target in rnd.targets(item, source.picture.instance_id):
        if source.cause is Cause.OVERLOAD and rnd.hopeless(target, item):
            continue
        held = rnd.held_blocks(target, item)
        positions = [position]
        group = (source.picture.instance_id, target, item.chain.hashes[held] if held < item.chain.blocks else 0)
        if source.cause is Cause.OVERLOAD:
            if group in rnd.refused:
                continue
            positions = _company(source, position, held)
        if len(positions) == 1:
            costs = [rnd.cost_s(target, item, held)]
        else:
            costs = _group_costs(rnd, source, positions, target)
        gain = _fits(rnd, source, positions, target, costs)
        if gain is not None:
            return _Wish(source, positions, target, costs, gain)
        if len(positions) > 1:
            rnd.refused.add(group)
    return None


def _wishes(rnd: _Round, sources: Iterable[_Source]) -> list[_Wish]:
    wishes: list[_Wish] = []
    for source in sources:
        spoken_for: set[int] = set()
        for position in range(len(source.picture.items)):
            if position in spoken_for or not _in_need(source, position, rnd.options):
                continue
            wish = _wish(rnd, source, position)
            if wish is not None:
                spoken_for.update(wish.positions)
                wishes.append(wish)
    return wishes


def _grant(rnd: _Round, wish: _Wish) -> list[Move]:
    """Look again with what the round has given out so far; empty when it no longer pays."""
    source = wish.source
    if not any(_in_need(source, position, rnd.options) for position in wish.positions):
        return []
    if _fits(rnd, source, wish.positions, wish.target, wish.costs) is None:
        return []
    moves: list[Move] = []
    for position, cost in zip(wish.positions, wish.costs, strict=True):
        item = source.picture.items[position]
        there = rnd.ahead_s(wish.target, item) + rnd.options.handover_s + cost
        gain = source.stay_s(position) - there
        moves.append(Move(item.request_id, item.attempt, source.picture.instance_id, wish.target, gain, source.cause))
        rnd.give(wish.target, cost)
    for position in wish.positions:
        source.leave(position)
    return moves


def plan(
    sources: Sequence[QueuePicture],
    views: Mapping[str, InstanceView],
    picture: RingPicture,
    options: RebalanceOptions,
    now_ms: float,  # noqa: ARG001 - part of the interface; ages and deadlines already come relative to now
) -> list[Move]:
    """Plan a round (design: rebalancer): the largest gain first, each granted against one ledger. O(q log q)."""
    built = [source for source in (_source(queue, views, options) for queue in sources) if source is not None]
    closed = {source.picture.instance_id for source in built if source.cause is not Cause.OVERLOAD}
    rnd = _Round(views, picture, options, closed)
    wishes = _wishes(rnd, built)
    wishes.sort(key=lambda wish: -wish.gain_s)
    moves: list[Move] = []
    for wish in wishes:
        if len(moves) + len(wish.positions) > options.max_moves:
            continue
        granted = _grant(rnd, wish) or _second_try(rnd, wish)
        moves.extend(granted)
    return moves


def _second_try(rnd: _Round, wish: _Wish) -> list[Move]:
    """The target is taken by now: another of the hash candidates may do, once."""
    source = wish.source
    first = next((p for p in wish.positions if _in_need(source, p, rnd.options)), None)
    if first is None:
        return []
    other = _wish(rnd, source, first)
    return [] if other is None else _grant(rnd, other)
