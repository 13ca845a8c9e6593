"""Late binding at one instance: offers others made it, pulls under way, and the choice among them and its own waiting.

Offers are bounded, expire, and are never load.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dualmap.core.binding import Bindable, BindingOptions, choose_next
from dualmap.core.blocks import Chain
from dualmap.rpc.convert_offer import OfferBatch, OfferItem, PullOrder
from services.instanceagent.request import HeldRequest

OFFER_TTL_MS = 2_000.0
"""An offer not repeated for so long is forgotten: its holder repeats it each second while it stands."""

PULL_TTL_MS = 1_000.0
"""Room kept for a pulled request that does not come."""

MAX_OFFERS_HELD = 4_096
MAX_PULLS = 4

MissOf = Callable[[Chain], tuple[int, int]]
PrefillS = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Valuation:
    """How the instance counts misses and costs."""

    miss_of: MissOf
    prefill_s: PrefillS
    charge: Callable[[int], int]


@dataclass(slots=True)
class _Offer:
    item: OfferItem
    holder: str
    heard_ms: float
    deadline_ms: float
    submitted_ms: float


@dataclass(frozen=True, slots=True)
class _Pull:
    charge_tokens: int
    until_ms: float


class OfferBook:
    """What an instance could run beside its own. ``pull`` is called with each wish, and must not block."""

    def __init__(self, valuation: Valuation, pull: Callable[[PullOrder], None], options: BindingOptions) -> None:
        self._valuation = valuation
        self._pull = pull
        self._options = options
        self._offers: OrderedDict[tuple[str, str], _Offer] = OrderedDict()
        self._pulls: dict[tuple[str, int], _Pull] = {}

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def window(self) -> int:
        """How many of an instance's own are looked at."""
        return self._options.window

    @property
    def offered_s(self) -> float:
        """Seconds of work on offer, as their holders count it; shown, never load."""
        return sum(self._valuation.prefill_s(o.item.miss_tokens, o.item.prompt_tokens) for o in self._offers.values())

    def take(self, batch: OfferBatch, now_ms: float) -> int:
        """Note a holder's offers; gives how many of them are kept."""
        holder = batch.holder_instance_id
        for request_id in batch.withdrawn:
            self._offers.pop((holder, request_id), None)
        for item in batch.offers:
            key = (holder, item.request_id)
            self._offers.pop(key, None)
            deadline_ms, submitted_ms = now_ms + item.deadline_ms, now_ms - item.age_ms
            self._offers[key] = _Offer(item, holder, now_ms, deadline_ms, submitted_ms)
        while len(self._offers) > MAX_OFFERS_HELD:
            self._offers.popitem(last=False)
        return sum((holder, item.request_id) in self._offers for item in batch.offers)

    def pulling_tokens(self, now_ms: float) -> int:
        """Room kept for pulls under way."""
        for identity in [identity for identity, pull in self._pulls.items() if pull.until_ms < now_ms]:
            del self._pulls[identity]
        return sum(pull.charge_tokens for pull in self._pulls.values())

    @property
    def pulls(self) -> int:
        """Pulls under way."""
        return len(self._pulls)

    def arrived(self, request_id: str, attempt: int) -> bool:
        """A request came by Accept; True when it was pulled and its room is kept."""
        return self._pulls.pop((request_id, attempt), None) is not None

    def refused(self, order: PullOrder) -> None:
        """The holder keeps the request, or it is gone: neither offer nor room stands any more."""
        self._pulls.pop((order.request_id, order.attempt), None)
        self._offers.pop((order.holder_instance_id, order.request_id), None)

    def choose(
        self, own: Iterable[HeldRequest], now_ms: float, room_tokens: int, rest_s: float, *, foreign: bool = True
    ) -> HeldRequest | PullOrder | None:
        """What to run next: one of ``own``, or a wish to be sent to a holder. None: nothing, or it does not fit.

        ``foreign`` False: offers are left alone.
        """
        self._expire(now_ms)
        earliest = heapq.nsmallest(self._options.window, own, key=lambda request: request.waiting.deadline_ms)
        by_identity = {request.identity: request for request in earliest}
        entries = [self._own(request) for request in earliest]
        if foreign and len(self._pulls) < MAX_PULLS:
            entries += [self._offered(offer) for offer in self._offers.values()]
        chosen = choose_next(entries, self._options, now_ms, room_tokens, rest_s)
        if chosen is None:
            return None
        if chosen.holder is None:
            return by_identity[(chosen.request_id, chosen.attempt)]
        order = PullOrder(chosen.holder, "", chosen.request_id, chosen.attempt)
        self._offers.pop((chosen.holder, chosen.request_id), None)
        charge_tokens = self._valuation.charge(chosen.miss_tokens)
        self._pulls[(chosen.request_id, chosen.attempt)] = _Pull(charge_tokens, now_ms + PULL_TTL_MS)
        self._pull(order)
        return order

    def _expire(self, now_ms: float) -> None:
        while self._offers:
            oldest = next(iter(self._offers.values()))
            if now_ms - oldest.heard_ms <= OFFER_TTL_MS:
                return
            self._offers.popitem(last=False)

    def _own(self, request: HeldRequest) -> Bindable:
        waiting = request.waiting
        best_s = waiting.prefill_s
        ticket = request.submission.ticket
        for promise in (ticket.chosen, ticket.backup) if ticket is not None else ():
            if promise is not None and promise.instance_id != request.instance_id:
                miss_tokens = max(0, waiting.prompt_tokens - promise.hit_tokens)
                best_s = min(best_s, self._valuation.prefill_s(miss_tokens, waiting.prompt_tokens))
        return Bindable(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=waiting.deadline_ms,
            submitted_ms=waiting.submitted_ms,
            miss_tokens=waiting.miss_tokens,
            prefill_s=waiting.prefill_s,
            best_prefill_s=best_s,
            priority=request.submission.priority,
        )

    def _offered(self, offer: _Offer) -> Bindable:
        item = offer.item
        miss_tokens = item.miss_tokens if item.chain is None else self._valuation.miss_of(item.chain)[0]
        prefill_s = self._valuation.prefill_s(miss_tokens, item.prompt_tokens)
        there_s = self._valuation.prefill_s(item.holder_miss_tokens, item.prompt_tokens)
        return Bindable(
            request_id=item.request_id,
            attempt=item.attempt,
            deadline_ms=offer.deadline_ms,
            submitted_ms=offer.submitted_ms,
            miss_tokens=miss_tokens,
            prefill_s=prefill_s,
            best_prefill_s=min(prefill_s, there_s),
            priority=item.priority,
            holder=offer.holder,
        )
