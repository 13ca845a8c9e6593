"""Late binding: an instance about to have room chooses among its own waiting and what others offer it.

It refuses to move anything: the answer is a wish, the holder decides whether the request still waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dualmap.core.queue_order import feasible, lot_of
from dualmap.core.waiting import WaitingQueue, WaitingRequest


@dataclass(frozen=True, slots=True)
class BindingOptions:
    """The rule of choice.

    ``rule`` ``spare``: holders offer only what they have given up; an offer is taken where it can be met here and
    nobody of this instance's own who can be kept misses for it; the earliest deadline goes first. ``score``: offers of
    anything; the least of ``extra_weight`` x extra work + slack among those in time. Measured in docs/decisions.
    ``feasible``, of ``score``: ``set`` keeps the largest set that can meet its deadlines here, ``each`` all that could
    if they went next. ``pull_s``: what fetching a request from its holder takes. ``max_extra_s``: an offer that would
    cost more extra work is left alone. ``window``: earliest deadlines looked at.
    """

    rule: Literal["spare", "score"] = "spare"
    extra_weight: float = 4.0
    feasible: Literal["set", "each"] = "set"
    pull_s: float = 0.02
    max_extra_s: float = float("inf")
    window: int = 1_024


@dataclass(frozen=True, slots=True)
class Bindable:
    """One request that could run here. Times: milliseconds of the local clock, seconds of prefill.

    ``prefill_s`` is the cost here, ``best_prefill_s`` at the best cache of its candidates. ``holder``: None when it
    waits here, else the instance that offers it.
    """

    request_id: str
    attempt: int
    deadline_ms: float
    submitted_ms: float
    miss_tokens: int
    prefill_s: float
    best_prefill_s: float
    priority: int = 0
    holder: str | None = None

    @property
    def extra_s(self) -> float:
        """Work that running here causes beyond what the best cache would need."""
        return max(0.0, self.prefill_s - self.best_prefill_s)


def offerable(queue: WaitingQueue, now_ms: float, rest_s: float, stalled_ms: float) -> list[WaitingRequest]:
    """What a holder offers its backups under ``spare``: what it has given up; all that waits while its engine stalls.

    Earliest deadline first. An order without deadlines gives nothing up, so offers nothing but behind a stall.
    """
    found = list(queue) if stalled_ms > 0 else queue.given_up(now_ms, rest_s)
    return sorted(found, key=lambda waiting: (waiting.deadline_ms, waiting.request_id))


def _need_s(entry: Bindable, options: BindingOptions) -> float:
    return entry.prefill_s + (options.pull_s if entry.holder is not None else 0.0)


def in_time(entries: Sequence[Bindable], options: BindingOptions, now_ms: float, rest_s: float = 0.0) -> list[Bindable]:
    """Those that can still meet their deadlines here, earliest first; the engine is free in ``rest_s``."""
    now_s = now_ms / 1_000
    start_s = now_s + rest_s
    ordered = [e for e in entries if e.deadline_ms / 1_000 >= start_s + _need_s(e, options)]
    ordered.sort(key=lambda entry: (entry.deadline_ms, entry.request_id))
    del ordered[options.window :]
    if options.feasible == "each":
        return ordered
    jobs = [(entry.deadline_ms / 1_000, _need_s(entry, options)) for entry in ordered]
    return [ordered[position] for position in feasible(jobs, start_s)[0]]


def score_s(entry: Bindable, options: BindingOptions, now_ms: float) -> float:
    """Lower goes first: extra work against the best cache, weighted, plus slack."""
    slack_s = entry.deadline_ms / 1_000 - now_ms / 1_000 - _need_s(entry, options)
    return options.extra_weight * entry.extra_s + slack_s


def spare(entries: Sequence[Bindable], options: BindingOptions, now_ms: float, rest_s: float = 0.0) -> list[Bindable]:
    """Own entries that are kept here, and the offers that can be met beside them, cheapest first; by deadline."""
    start_s = now_ms / 1_000 + rest_s
    live = [e for e in entries if e.deadline_ms / 1_000 >= start_s + _need_s(e, options)]
    live.sort(key=lambda entry: (entry.deadline_ms, entry.request_id))
    own = [entry for entry in live if entry.holder is None][: options.window]
    offers = [entry for entry in live if entry.holder is not None]
    jobs = [(entry.deadline_ms / 1_000, entry.prefill_s) for entry in own]
    kept = [own[place] for place in feasible(jobs, start_s, [lot_of(entry.request_id) for entry in own])[0]]
    for offer in sorted(offers, key=lambda entry: (entry.prefill_s, entry.request_id)):
        wider = sorted([*kept, offer], key=lambda entry: (entry.deadline_ms, entry.request_id))
        clock_s = start_s
        for entry in wider:
            clock_s += _need_s(entry, options)
            if clock_s > entry.deadline_ms / 1_000:
                break
        else:
            kept = wider
    return kept


def choose_next(
    entries: Sequence[Bindable], options: BindingOptions, now_ms: float, room_tokens: int, rest_s: float = 0.0
) -> Bindable | None:
    """What to run next: of the highest class the first by the rule of those in time, else the oldest of its own.

    Offers that cannot meet their deadline here stay with their holder. None: nothing to run, or the best does not fit.
    """
    allowed = [e for e in entries if e.holder is None or e.extra_s <= options.max_extra_s]
    if options.rule == "spare":
        kept = spare(allowed, options, now_ms, rest_s)
    else:
        kept = in_time(allowed, options, now_ms, rest_s)
    if kept and options.rule == "spare":
        best = min(kept, key=lambda e: (-e.priority, e.deadline_ms, e.request_id))
    elif kept:
        best = min(kept, key=lambda e: (-e.priority, score_s(e, options, now_ms), e.submitted_ms, e.request_id))
    else:
        own = [entry for entry in entries if entry.holder is None]
        if not own:
            return None
        best = min(own, key=lambda entry: (-entry.priority, entry.submitted_ms, entry.request_id))
    return best if best.miss_tokens <= room_tokens else None
