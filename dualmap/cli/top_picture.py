"""What `dualmap top` shows, made of samples: rows, totals, and what changed. Pure: it asks nobody and draws nothing."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, pstdev

from dualmap.cli.top_sources import Sample
from dualmap.core.membership import InstanceState, Member, RingSnapshot, Split
from dualmap.core.state import LoadReport
from dualmap.rpc.convert_rebalance import PlannedMove
from dualmap.rpc.convert_state import InstanceFacts

WINDOW_S = 30.0
"""Rates are over so long: an operator sees a change within it, and a few requests a second still give a share."""

MAX_EVENTS = 64


@dataclass(frozen=True, slots=True)
class Counts:
    """What an instance has finished; token and request counts."""

    finished: int = 0
    in_slo: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def since(self, earlier: Counts) -> Counts:
        """What came after ``earlier``."""
        return Counts(
            self.finished - earlier.finished,
            self.in_slo - earlier.in_slo,
            self.prompt_tokens - earlier.prompt_tokens,
            self.cached_tokens - earlier.cached_tokens,
        )

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.finished + other.finished,
            self.in_slo + other.in_slo,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    @property
    def hit_rate(self) -> float | None:
        """Cached of all prompt tokens; None of none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def attainment(self) -> float | None:
        """Share finished with a first token within its SLO; None of none."""
        return self.in_slo / self.finished if self.finished else None


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance. None: nobody who answered knows. ``age_ms`` is since its last good poll, negative where unknown."""

    instance_id: str
    state: str
    load: LoadReport | None
    booked_s: float
    counts: Counts
    share: float | None
    kv_blocks: int | None
    age_ms: float

    @property
    def backlog_s(self) -> float | None:
        """Seconds of prefill that wait, and the rest of what runs."""
        return sum(self.load.waiting_s) + self.load.rest_s if self.load is not None else None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changed; ``at_s`` None: before the first sample."""

    at_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One frame's content. ``window_s`` 0: counts are since each agent's start."""

    sample: Sample
    rows: tuple[InstanceRow, ...]
    total: Counts
    window_s: float
    ring_events: tuple[Event, ...]
    moves: tuple[Event, ...]

    @property
    def share_cv(self) -> float | None:
        """Coefficient of variation of the shares of ACTIVE instances; None before anything finished."""
        shares = [row.share for row in self.rows if row.share is not None and row.state == "ACTIVE"]
        mean = fmean(shares) if shares else 0.0
        return pstdev(shares) / mean if mean else None


@dataclass(slots=True)
class History:
    """Samples of the window, and events, newest last. ``picture`` is asked after each ``take``."""

    samples: deque[tuple[float, dict[str, tuple[int, Counts]]]] = field(default_factory=deque)
    ring_events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    moves: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _sample: Sample | None = None
    _ring: RingSnapshot | None = None
    _last_moves: dict[str, tuple[PlannedMove, ...]] = field(default_factory=dict)

    def take(self, sample: Sample) -> Picture:
        """One more turn, and what is to be shown now."""
        first = self._sample is None
        self._sample = sample
        counts = {name: (facts.agent_epoch, _counts(facts.load)) for name, facts in sample.instances.items()}
        if counts:
            self.samples.append((sample.at_s, counts))
        while len(self.samples) > 2 and self.samples[1][0] <= sample.at_s - WINDOW_S:
            self.samples.popleft()
        self._take_ring(sample)
        self._take_moves(sample, None if first else sample.at_s)
        return self._picture(sample)

    def _take_ring(self, sample: Sample) -> None:
        facts = sample.ring
        if facts is None:
            return
        ring, before = facts.ring, self._ring
        if before is None and ring.previous is not None:
            texts = ring_changes(ring.previous.members, ring.previous.splits, ring)
            self.ring_events.extend(Event(None, text) for text in texts)
        elif before is not None and ring.epoch > before.epoch:
            texts = ring_changes(before.members, before.splits, ring)
            self.ring_events.extend(Event(sample.at_s, text) for text in texts)
        if before is None or ring.epoch >= before.epoch:
            self._ring = ring

    def _take_moves(self, sample: Sample, at_s: float | None) -> None:
        for answer in sample.rebalancers:
            if answer.value is None:
                continue
            known = self._last_moves.get(answer.address, ())
            if answer.value.last_moves != known:
                self.moves.extend(Event(at_s, _move_text(move)) for move in answer.value.last_moves)
                self._last_moves[answer.address] = answer.value.last_moves

    def _picture(self, sample: Sample) -> Picture:
        counts = {name: _lately(name, self.samples) for name in sample.instances}
        total = Counts()
        for one in counts.values():
            total = total.plus(one)
        window_s = self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0
        return Picture(
            sample, _rows(sample, counts, total), total, window_s, tuple(self.ring_events), tuple(self.moves)
        )


def ring_changes(members: Iterable[Member], splits: Sequence[Split], after: RingSnapshot) -> list[str]:
    """What is other in ``after``, one short text each: who came, left or changed, then the split table."""
    old = {member.instance_id: member for member in members}
    new = {member.instance_id: member for member in after.members}
    texts = [f"+ {name} {new[name].state.name}" for name in sorted(new.keys() - old.keys())]
    texts += [f"- {name} left" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        was, now = old[name], new[name]
        if was.state is not now.state:
            texts.append(f"{name} {was.state.name} → {now.state.name}")
        elif was.weight != now.weight:
            texts.append(f"{name} weight {was.weight:g} → {now.weight:g}")
        elif was.agent_epoch != now.agent_epoch:
            texts.append(f"{name} started again")
    gone, come = len(set(splits) - set(after.splits)), len(set(after.splits) - set(splits))
    if gone or come:
        texts.append(f"split table: {len(after.splits)} prefixes (+{come}, −{gone})")
    return texts


def _rows(sample: Sample, counts: dict[str, Counts], total: Counts) -> tuple[InstanceRow, ...]:
    facts = sample.instances
    ring = sample.ring
    members = {member.instance_id: member for member in ring.ring.members} if ring is not None else {}
    views = [answer.value for answer in sample.routers if answer.value is not None]
    seen = {instance.instance_id: instance for view in views for instance in view.instances}
    booked_s = dict.fromkeys(seen, 0.0)
    for view in views:
        for instance in view.instances:
            booked_s[instance.instance_id] += instance.booked_s
    rows = []
    for name in sorted(facts.keys() | members.keys() | seen.keys(), key=_by_number):
        one = facts.get(name)
        blocks = one.kv_blocks if one is not None else seen[name].kv_blocks if name in seen else None
        rows.append(
            InstanceRow(
                instance_id=name,
                state=_state(members.get(name), one, seen[name].state if name in seen else 0),
                load=one.load if one is not None else None,
                booked_s=booked_s.get(name, 0.0),
                counts=counts.get(name, Counts()),
                share=counts[name].finished / total.finished if name in counts and total.finished else None,
                kv_blocks=blocks,
                age_ms=one.polled_ago_ms if one is not None else seen[name].state_age_ms if name in seen else -1.0,
            )
        )
    return tuple(rows)


def _state(member: Member | None, facts: InstanceFacts | None, seen: int) -> str:
    """The ring's word; an instance that collectors cannot reach is that first."""
    if facts is not None and not facts.reachable:
        return "UNREACHABLE"
    if member is not None:
        return member.state.name
    return InstanceState(seen).name if seen in set(InstanceState) else "?"


def _counts(load: LoadReport) -> Counts:
    return Counts(load.finished, load.finished_in_slo, load.prompt_tokens, load.cached_tokens)


def _lately(name: str, samples: Sequence[tuple[float, dict[str, tuple[int, Counts]]]]) -> Counts:
    """Counts within the window, across restarts of its agent; of a single sample, all since the agent's start."""
    known = [counts[name] for _, counts in samples if name in counts]
    if len(samples) < 2:
        return known[-1][1] if known else Counts()
    total = Counts()
    for (old_epoch, old), (epoch, new) in pairwise(known):
        total = total.plus(new.since(old) if epoch == old_epoch else new)
    return total


def _move_text(planned: PlannedMove) -> str:
    move = planned.move
    outcome = planned.outcome.name if planned.outcome is not None else "not sent"
    return f"{move.source} → {move.target}  {outcome}, {move.cause}, gain {move.gain_s:.1f} s  {move.request_id}"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts agent-10/0 after agent-2/0."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
