"""Which waiting requests to move, and where: one sorted pass, one ledger of what each target was given this round.

It refuses to touch anything: a plan is moves, and a move is a wish that the source checks. What the engine has is
never in a queue picture, so nothing started moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dualmap.core.blocks import Chain
from dualmap.core.choose import RingPicture
from dualmap.core.instance_view import InstanceView
from dualmap.core.load import priority_class, slack_bucket


class Cause(StrEnum):
    """Why a request moves, as the contract spells it."""

    OVERLOAD = "overload"
    STALLED = "stalled"
    SUSPECT = "suspect"


_OVERLOAD = Cause.OVERLOAD
"""Here because an enum's member is looked up slowly."""


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


class Move(NamedTuple):
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
    deadline_s: list[float]
    places: list[tuple[int, int]]
    """Slack bucket and priority class of each."""
    movable: list[bool]
    """Whether each has settled since its last move."""
    by_key: dict[int, list[int]]
    gone: set[int] = field(default_factory=set)
    companies: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Positions by depth and hash of the first block that they would fill together."""

    def leave(self, position: int) -> None:
        self.gone.add(position)
        index = position + 1
        while index <= len(self.costs):
            self.left[index] += self.costs[position]
            index += index & -index

    def stay_s(self, position: int) -> float:
        """Predicted time to first token of the item if it stays, with what has left before it gone."""
        if not self.gone:
            return self.finish[position]
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
    target: _Target
    costs: list[float]
    gain_s: float


class _Target:
    """One instance that may be given work: what it has before a request, and all that this round gave it."""

    __slots__ = ("_due_s", "_held", "cost", "given_s", "instance_id", "least_s", "view")

    def __init__(self, view: InstanceView) -> None:
        self.instance_id = view.instance_id
        self.view = view
        self.cost = view.load.cost
        self.least_s = self.cost.a_s
        self.given_s = 0.0
        self._due_s: dict[tuple[int, int], float] = {}
        self._held: dict[int, int] = {}

    def ahead_s(self, place: tuple[int, int]) -> float:
        """Work before a request of this slack bucket and class: reported, booked, and all that this round gave.

        Given work counts whatever its deadline: two moved in one round must not each count on going first.
        """
        try:
            return self._due_s[place] + self.given_s
        except KeyError:
            due = self._due_s[place] = self.view.load.rest_s + self.view.work_due_s(*place)
            return due + self.given_s

    def held_blocks(self, item: QueueItem) -> int:
        """Leading blocks of the item that the target holds or was promised; looked up once a round."""
        try:
            return self._held[id(item)]
        except KeyError:
            chain = item.chain
            held = self._held[id(item)] = self.view.hit_tokens(chain)[1] // chain.block_tokens
            return held

    def cost_s(self, item: QueueItem, held_blocks: int) -> float:
        """Prefill of the item there."""
        chain = item.chain
        prompt = chain.prompt_tokens
        return self.cost.seconds(max(0, prompt - held_blocks * chain.block_tokens), prompt)


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
        self._known: dict[str, _Target | None] = {}
        self._targets: dict[tuple[int, tuple[str, ...], str], tuple[_Target, ...]] = {}

    def open(self, instance_id: str) -> _Target | None:
        """The instance when work may be given to it, else None."""
        try:
            return self._known[instance_id]
        except KeyError:
            view = self.views.get(instance_id)
            admits = view is not None and view.eligible and view.load.admitting and instance_id not in self.closed
            target = self._known[instance_id] = _Target(view) if view is not None and admits else None
            return target

    def targets(self, item: QueueItem, source: str) -> tuple[_Target, ...]:
        """The rest of its pair, then the next hash candidates; distinct, open. Many share a prefix: kept for them."""
        place = (item.key, item.candidates, source)
        targets = self._targets.get(place)
        if targets is None:
            targets = self._targets[place] = tuple(self._find_targets(item, source))
        return targets

    def _find_targets(self, item: QueueItem, source: str) -> Iterator[_Target]:
        seen = {source}
        for instance_id in item.candidates:
            if instance_id not in seen and (target := self.open(instance_id)) is not None:
                seen.add(instance_id)
                yield target
        left = self.options.further_looks
        for ring_no in (2, 1):
            for instance_id in self.picture.ring.walk(ring_no, item.key):
                if left <= 0:
                    return
                if instance_id not in seen and (target := self.open(instance_id)) is not None:
                    seen.add(instance_id)
                    left -= 1
                    yield target
                    break


def _source(
    picture: QueuePicture, views: Mapping[str, InstanceView], options: RebalanceOptions, default_slo_s: float
) -> _Source | None:
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
    seconds = view.load.cost.seconds
    for item in picture.items:
        cost = seconds(item.miss_tokens, item.chain.prompt_tokens)
        at += cost
        costs.append(cost)
        finish.append(at)
    deadline_s = [item.deadline_ms / 1_000 for item in picture.items]
    places = [
        (slack_bucket(left_s, default_slo_s), priority_class(item.priority))
        for left_s, item in zip(deadline_s, picture.items, strict=True)
    ]
    by_key: dict[int, list[int]] = {}
    for position, item in enumerate(picture.items):
        by_key.setdefault(item.key, []).append(position)
    movable = [item.moved_ago_ms is None or _movable(item, options) for item in picture.items]
    return _Source(picture, cause, costs, finish, [0.0] * (len(costs) + 1), deadline_s, places, movable, by_key)


def _movable(item: QueueItem, options: RebalanceOptions) -> bool:
    return item.moved_ago_ms is None or item.moved_ago_ms < 0 or item.moved_ago_ms >= options.settle_ms


def _in_need(source: _Source, position: int) -> bool:
    """Predicted to miss here, with what has already left counted out; at a stalled source everybody is."""
    if position in source.gone or not source.movable[position]:
        return False
    return source.cause is not _OVERLOAD or source.stay_s(position) > source.deadline_s[position]


def _first_in_need(source: _Source, positions: Sequence[int]) -> int | None:
    for position in positions:  # no generator: asked for every wish, and most are of one
        if _in_need(source, position):
            return position
    return None


def _company(source: _Source, position: int, held: int) -> list[int]:
    """All that wait here and share the first block that the target does not hold."""
    item = source.picture.items[position]
    hashes = item.chain.hashes
    if held >= len(hashes):
        return [position]
    first_cold = hashes[held]
    company = source.companies.get((held, first_cold))
    if company is None:
        items = source.picture.items
        company = source.companies[held, first_cold] = [
            other
            for other in source.by_key[item.key]
            if len(items[other].chain.hashes) > held and items[other].chain.hashes[held] == first_cold
        ]
    return company


def _group_costs(source: _Source, positions: Sequence[int], target: _Target) -> list[float]:
    """Cost of each at the target when they go in order: the first fills the shared prefix for those behind it."""
    filled: set[int] = set()
    costs: list[float] = []
    for position in positions:
        item = source.picture.items[position]
        hashes = item.chain.hashes
        held = target.held_blocks(item)
        while held < len(hashes) and hashes[held] in filled:
            held += 1
        filled.update(hashes[held:])
        costs.append(target.cost_s(item, held))
    return costs


def _fits(
    source: _Source, positions: Sequence[int], target: _Target, costs: Sequence[float], options: RebalanceOptions
) -> float | None:
    """Sum of the gains when all of them go to the target; None when one in need would not meet its deadline there."""
    gain = 0.0
    before = options.handover_s
    for position, cost in zip(positions, costs, strict=True):
        if position in source.gone or not source.movable[position]:
            return None
        there = target.ahead_s(source.places[position]) + before + cost
        late = there > source.deadline_s[position]
        if late and source.cause is _OVERLOAD:
            return None
        stay = source.stay_s(position)
        if late and there >= stay:
            return None
        gain += stay - there
        before += cost
    return gain if gain > 0.0 else None


def _wish(rnd: _Round, source: _Source, position: int) -> _Wish | None:
    """The first target in hash order that does; inside the pair before outside it."""
    item = source.picture.items[position]
    overloaded = source.cause is _OVERLOAD
    source_id, hashes = source.picture.instance_id, item.chain.hashes
    place, deadline_s, handover_s = source.places[position], source.deadline_s[position], rnd.options.handover_s
    for target in rnd.targets(item, source_id):
        # Late there even if all of it were cached: no need to count its hits.
        if overloaded and target.ahead_s(place) + (target.least_s + handover_s) > deadline_s:
            continue
        held = target.held_blocks(item)
        positions = [position]
        group = (source_id, target.instance_id, hashes[held] if held < len(hashes) else 0)
        if overloaded:
            if group in rnd.refused:
                continue
            positions = _company(source, position, held)
        costs = [target.cost_s(item, held)] if len(positions) == 1 else _group_costs(source, positions, target)
        gain = _fits(source, positions, target, costs, rnd.options)
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
            if position in spoken_for or not _in_need(source, position):
                continue
            wish = _wish(rnd, source, position)
            if wish is not None:
                spoken_for.update(wish.positions)
                wishes.append(wish)
    return wishes


def _grant(rnd: _Round, wish: _Wish) -> list[Move]:
    """Look again with what the round has given out so far; empty when it no longer pays."""
    source = wish.source
    if _first_in_need(source, wish.positions) is None:
        return []
    target, options = wish.target, rnd.options
    if _fits(source, wish.positions, target, wish.costs, options) is None:
        return []
    moves: list[Move] = []
    for position, cost in zip(wish.positions, wish.costs, strict=True):
        item = source.picture.items[position]
        there = target.ahead_s(source.places[position]) + options.handover_s + cost
        gain = source.stay_s(position) - there
        name = source.picture.instance_id
        moves.append(Move(item.request_id, item.attempt, name, target.instance_id, gain, source.cause))
        target.given_s += cost
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
    read = (_source(queue, views, options, picture.default_slo_s) for queue in sources)
    built = [source for source in read if source is not None]
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
    first = _first_in_need(source, wish.positions)
    if first is None:
        return []
    other = _wish(rnd, source, first)
    return [] if other is None else _grant(rnd, other)
