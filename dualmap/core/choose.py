"""Where a request goes: the pair of its key, cache first, load when the SLO is threatened, and a bounded escape.

Its cost does not grow with the number of instances. It refuses to read a clock, to draw at random and to change
anything; only `book` writes, into the chosen instance's bookings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from dualmap.core.blocks import Chain
from dualmap.core.errors import NoInstance, Overloaded
from dualmap.core.instance_view import InstanceView
from dualmap.core.keys import SplitTable, key_of, request_key
from dualmap.core.load import drain_s, priority_class, slack_bucket
from dualmap.core.membership import RingParameters
from dualmap.core.ring import Ring

MIN_RETRY_MS = 50
MAX_RETRY_MS = 10_000
NO_INSTANCE_RETRY_MS = 1_000
"""One second: a third of a lease, after which a new member may be there."""

Select = Literal["dualmap", "cache_first", "min_ttft", "cache", "load"]
_OF_THE_PAIR = frozenset({"pair_1", "pair_2"})
_ESCAPES = frozenset({"escape_1", "escape_2"})
Role = Literal["pair_1", "pair_2", "previous_1", "previous_2", "escape_1", "escape_2"]


class Reason(IntEnum):
    """Rule that decided; numbers equal those of the contract."""

    CACHE_HIT = 1
    LESS_LOADED = 2
    SLO_THREAT = 3
    ESCAPE = 4
    ESCAPE_STAYED = 5
    PREVIOUS_PAIR = 6
    NO_KEY = 7
    ONLY_CANDIDATE = 8
    DEGRADED = 9


# An enum's member is looked up ten times as slowly as a global.
_CACHE_HIT = Reason.CACHE_HIT
_LESS_LOADED = Reason.LESS_LOADED
_ESCAPE_STAYED = Reason.ESCAPE_STAYED


@dataclass(frozen=True, slots=True)
class ChooseOptions:
    """Limits of the decision as shares of the request's SLO, and switches for ablation.

    ``dualmap``: of the instances looked at whose prediction keeps ``affinity_slo_fraction`` of the SLO, the least
    prediction plus ``work_weight`` x own prefill: what a request computes, all behind it wait for too. None keeps it:
    the least prediction. ``looks`` bounds the instances looked at; beyond the key's own they are looked at when all of
    those are predicted above ``escape_slo_fraction``. ``choices`` is how many of the key's candidates count as full
    ones (2: the pair; 1: ring 1 alone; 3 and 4 add the next different instance of each ring).
    ``select`` replaces the rule: ``cache_first`` is the published one, the higher hit unless it threatens the SLO.
    ``unknown_after_ms`` is the age from which a state is unknown and the decision DEGRADED.
    """

    affinity_slo_fraction: float = 0.9
    escape_slo_fraction: float = 0.2
    work_weight: float = 4.0
    looks: int = 4
    select: Select = "dualmap"
    escape: bool = True
    choices: int = 2
    unknown_after_ms: float = 3_000.0


class RouteQuery(NamedTuple):
    """A request to be placed. ``ttft_slo_s`` None: the pool's default."""

    request_id: str
    chain: Chain
    ttft_slo_s: float | None = None
    priority: int = 0
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RingPicture:
    """All of the ring that a decision needs. ``previous`` is given in a grace period only."""

    ring: Ring
    splits: SplitTable
    parameters: RingParameters
    epoch: int = 0
    default_slo_s: float = 5.0
    previous: tuple[Ring, SplitTable] | None = None


class Candidate(NamedTuple):
    """One instance looked at. ``state_age_ms`` is negative where nothing was ever heard."""

    instance_id: str
    role: Role
    indexed_hit_tokens: int
    hit_tokens: int
    miss_tokens: int
    work_ahead_s: float
    booked_s: float
    prefill_s: float
    predicted_ttft_s: float
    state_age_ms: float
    admitting: bool


_new_candidate = tuple.__new__
"""A named tuple's own constructor is a call more, for each look."""


class Decision(NamedTuple):
    """Where to, why, and all that was looked at, in the order of looking."""

    chosen: Candidate
    backup: Candidate | None
    reason: Reason
    key: int
    key_blocks: int
    candidates: tuple[Candidate, ...]
    slack_bucket: int
    priority_class: int


class _Looks:
    """The looks of one decision: distinct, eligible, bounded."""

    __slots__ = ("_bucket", "_chain", "_now_ms", "_pclass", "_query", "_views", "found", "limit")

    def __init__(  # noqa: PLR0917 - private, made once a decision on the hot path
        self, query: RouteQuery, views: Mapping[str, InstanceView], bucket: int, pclass: int, limit: int, now_ms: float
    ) -> None:
        self._query = query
        self._chain = query.chain
        self._views = views
        self._bucket = bucket
        self._pclass = pclass
        self._now_ms = now_ms
        self.limit = limit
        self.found: list[Candidate] = []

    def eligible(self, instance_id: str) -> bool:
        view = self._views.get(instance_id)
        return view is not None and view.eligible and instance_id not in self._query.exclude

    def seen(self, instance_id: str) -> bool:
        for candidate in self.found:  # noqa: SIM110 - a generator costs more than the two or three looks
            if candidate.instance_id == instance_id:
                return True
        return False

    def look(self, instance_id: str | None, role: Role) -> None:
        found = self.found
        if instance_id is None or (found and (len(found) >= self.limit or self.seen(instance_id))):
            return
        view = self._views[instance_id]
        chain = self._chain
        load = view.load
        indexed, hit = view.hit_tokens(chain)
        prompt = chain.prompt_tokens
        miss = prompt - hit if hit < prompt else 0
        due = load.rest_s + view.work_due_s(self._bucket, self._pclass)
        prefill_s = load.cost.seconds(miss, prompt)
        heard = view.heard_at_ms
        age = -1.0 if heard is None else self._now_ms - heard
        booked_s = view.bookings.booked_s
        found.append(
            _new_candidate(
                Candidate,
                (instance_id, role, indexed, hit, miss, due, booked_s, prefill_s, due + prefill_s, age, load.admitting),
            )
        )

    def look_on(self, owners: Iterator[str], role: Role) -> None:
        """Look at the first eligible owner not seen yet."""
        if len(self.found) >= self.limit:
            return
        for instance_id in owners:
            if self.eligible(instance_id) and not self.seen(instance_id):
                self.look(instance_id, role)
                return


def _prediction(candidate: Candidate) -> float:
    return candidate.predicted_ttft_s


def _full_candidates(looks: _Looks, key: int, query: RouteQuery, picture: RingPicture, options: ChooseOptions) -> None:
    """The key's own candidates, then in a grace period those of the previous mapping."""
    first, second = picture.ring.pair(key, looks.eligible)
    looks.look(first, "pair_1")
    if options.choices > 1:
        looks.look(second, "pair_2")
    if options.choices > 2:
        looks.look_on(picture.ring.walk(1, key), "pair_1")
    if options.choices > 3:
        looks.look_on(picture.ring.walk(2, key), "pair_2")
    if picture.previous is not None:
        ring, splits = picture.previous
        before, blocks = key_of(query.chain.hashes, picture.parameters.start_depth, splits)
        if not blocks:
            before = key
        first, second = ring.pair(before, looks.eligible)
        looks.look(first, "previous_1")
        looks.look(second, "previous_2")


def _by_cache(
    usable: list[Candidate], slo_s: float, block_tokens: int, options: ChooseOptions
) -> tuple[Candidate, Reason]:
    """Design step 4: the higher hit unless it threatens the SLO; equal within one block, the lower prediction."""
    # Plain loops: `min` with a key and list building cost a sixth of the whole decision.
    best_hit = 0
    fastest = usable[0]
    for candidate in usable:
        if candidate.hit_tokens > best_hit:  # noqa: PLR1730 - a call costs more
            best_hit = candidate.hit_tokens
        if candidate.predicted_ttft_s < fastest.predicted_ttft_s:
            fastest = candidate
    equal_from = best_hit - block_tokens
    warm: Candidate | None = None
    all_warm = True
    for candidate in usable:
        if candidate.hit_tokens < equal_from:
            all_warm = False
        elif warm is None or candidate.predicted_ttft_s < warm.predicted_ttft_s:
            warm = candidate
    if all_warm or warm is None:
        return fastest, Reason.LESS_LOADED
    if warm.predicted_ttft_s <= options.affinity_slo_fraction * slo_s:
        return warm, Reason.CACHE_HIT
    return fastest, Reason.SLO_THREAT


def _by_work(
    usable: list[Candidate], slo_s: float, block_tokens: int, options: ChooseOptions
) -> tuple[Candidate, Reason]:
    """Least prediction plus weighted own work among those that keep the SLO; none does: the least prediction."""
    limit = options.affinity_slo_fraction * slo_s
    weight = options.work_weight
    chosen = None
    least = 0.0
    best_hit = least_hit = usable[0].hit_tokens
    for candidate in usable:
        # Plain comparisons: lists of hits with `min` and `max` cost more than all the rest here.
        hit = candidate.hit_tokens
        if hit > best_hit:
            best_hit = hit
        elif hit < least_hit:
            least_hit = hit
        predicted = candidate.predicted_ttft_s
        if predicted <= limit:
            score = predicted + weight * candidate.prefill_s
            if chosen is None or score < least:
                chosen, least = candidate, score
    if chosen is None:
        return min(usable, key=_prediction), _ESCAPE_STAYED
    if chosen.hit_tokens >= best_hit - block_tokens:
        return chosen, _CACHE_HIT if least_hit < best_hit - block_tokens else _LESS_LOADED
    for candidate in usable:
        if candidate.hit_tokens == best_hit and candidate.predicted_ttft_s > limit:
            return chosen, Reason.SLO_THREAT
    return chosen, _LESS_LOADED


def _select(
    usable: list[Candidate], slo_s: float, block_tokens: int, options: ChooseOptions
) -> tuple[Candidate, Reason]:
    if options.select == "dualmap":
        return _by_work(usable, slo_s, block_tokens, options)
    if options.select == "cache_first":
        return _by_cache(usable, slo_s, block_tokens, options)
    if options.select == "cache":
        return max(usable, key=lambda candidate: candidate.hit_tokens), Reason.CACHE_HIT
    if options.select == "load":
        return min(usable, key=lambda candidate: candidate.work_ahead_s), Reason.LESS_LOADED
    return min(usable, key=_prediction), Reason.LESS_LOADED


def _retry_ms(found: list[Candidate], views: Mapping[str, InstanceView]) -> int:
    drains = [drain_s(views[c.instance_id].load, c.booked_s) for c in found]
    return int(min(MAX_RETRY_MS, max(MIN_RETRY_MS, min(drains) * 1_000)))


def _backup(chosen: Candidate, usable: list[Candidate], found: list[Candidate]) -> Candidate | None:
    """The other of the pair, or the next distinct instance looked at; one that admits before one that does not."""
    for candidate in usable:
        if candidate is not chosen:
            return candidate
    for candidate in found:
        if candidate is not chosen:
            return candidate
    return None


def _final_reason(reason: Reason, chosen: Candidate, only: bool, key_blocks: int, options: ChooseOptions) -> Reason:
    """What tells most about the answer: old state, then a lone candidate, then where outside the pair it went."""
    age = chosen.state_age_ms
    if age < 0.0 or age > options.unknown_after_ms:
        return Reason.DEGRADED
    if only:
        return Reason.ONLY_CANDIDATE
    role = chosen.role
    if role not in _OF_THE_PAIR:
        if role in _ESCAPES:
            return Reason.ESCAPE
        if reason is not _ESCAPE_STAYED:
            return Reason.PREVIOUS_PAIR
    if reason is _ESCAPE_STAYED:
        return reason
    return reason if key_blocks else Reason.NO_KEY


def choose(
    query: RouteQuery,
    picture: RingPicture,
    views: Mapping[str, InstanceView],
    options: ChooseOptions,
    now_ms: float,
) -> Decision:
    """Decide where a request goes (design: deciding a route). Equal inputs give equal answers.

    Raises:
        NoInstance: nobody is eligible.
        Overloaded: none of the instances looked at admits new work; the delay is their least predicted drain.
    """
    slo_s = query.ttft_slo_s or picture.default_slo_s
    bucket = slack_bucket(slo_s, picture.default_slo_s)
    pclass = priority_class(query.priority)
    key, key_blocks = key_of(query.chain.hashes, picture.parameters.start_depth, picture.splits)
    if not key_blocks:
        key = request_key(query.request_id)
    looks = _Looks(query, views, bucket, pclass, options.looks, now_ms)
    _full_candidates(looks, key, query, picture, options)
    found = looks.found
    if not found:
        raise NoInstance(NO_INSTANCE_RETRY_MS)
    usable = [candidate for candidate in found if candidate.admitting]
    limit = options.escape_slo_fraction * slo_s
    escaped = options.escape and _all_above(usable, limit)
    if escaped:
        looks.look_on(picture.ring.walk(1, key), "escape_1")
        looks.look_on(picture.ring.walk(2, key), "escape_2")
        usable = [candidate for candidate in found if candidate.admitting]
    if not usable:
        raise Overloaded(_retry_ms(found, views), "none of the instances looked at admits new work")
    if escaped and options.select != "dualmap":
        chosen, reason = min(usable, key=_prediction), Reason.ESCAPE_STAYED
    else:
        chosen, reason = _select(usable, slo_s, query.chain.block_tokens, options)
    reason = _final_reason(reason, chosen, len(found) == 1 and options.choices > 1, key_blocks, options)
    backup = _backup(chosen, usable, found) or _next_distinct(looks, picture.ring, key)
    return Decision(chosen, backup, reason, key, key_blocks, tuple(found), bucket, pclass)


def _all_above(usable: list[Candidate], limit_s: float) -> bool:
    for candidate in usable:  # noqa: SIM110 - a generator costs more than the two looks
        if candidate.predicted_ttft_s <= limit_s:
            return False
    return True


def _next_distinct(looks: _Looks, ring: Ring, key: int) -> Candidate | None:
    """A backup where only one candidate was looked at: the next different eligible instance, if there is one."""
    before = len(looks.found)
    looks.limit = before + 1
    looks.look_on(ring.walk(2, key), "pair_2")
    return looks.found.pop() if len(looks.found) > before else None


def book(decision: Decision, view: InstanceView, query: RouteQuery, now_ms: float) -> int:
    """Book the decision at once, so that the next one sees it; returns the ticket's sequence at that instance."""
    chosen = decision.chosen
    bookings = view.bookings
    bookings.expire(now_ms, view.booking_ttl_ms)
    sequence = bookings.next_sequence()
    chain = query.chain
    bookings.add(
        sequence,
        chosen.prefill_s,
        decision.slack_bucket,
        decision.priority_class,
        chain.hashes[chosen.indexed_hit_tokens // chain.block_tokens :],
        chosen.miss_tokens,
        now_ms,
    )
    return sequence
