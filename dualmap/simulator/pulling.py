"""Offers of waiting requests to their backups, and an instance's choice among its own and what it is offered."""

from __future__ import annotations

from collections.abc import Mapping

from dualmap.core.binding import Bindable, BindingOptions, choose_next
from dualmap.simulator.instance import SimInstance
from dualmap.simulator.requests import SimRequest


class Offers:
    """Who is offered what. An offer ends when it is pulled, or found no longer waiting."""

    def __init__(self, options: BindingOptions) -> None:
        self._options = options
        self._offered: dict[str, dict[str, SimRequest]] = {}
        self._known: dict[str, str] = {}

    def new(self, request: SimRequest) -> bool:
        """Note an offer about to be sent; False when this holder has sent it already."""
        sent = f"{request.instance}>{request.backup}"
        if self._known.get(request.request_id) == sent:
            return False
        self._known[request.request_id] = sent
        return True

    def add(self, request: SimRequest) -> None:
        """The offer has arrived."""
        if request.started_s is None:
            self._offered.setdefault(request.backup, {})[request.request_id] = request

    def drop(self, request: SimRequest) -> None:
        """The backup forgets the offer."""
        self._offered.get(request.backup, {}).pop(request.request_id, None)
        self._known.pop(request.request_id, None)

    def choose(
        self, instance: SimInstance, instances: Mapping[str, SimInstance], now_s: float, room_tokens: int
    ) -> SimRequest | None:
        """The offer that should run here next, before everything of the instance's own; None: its own goes on."""
        offered = self._offered.get(instance.instance_id)
        if not offered:
            return None
        entries = []
        rest_s = instance.rest_s(now_s)
        for request in list(offered.values()):
            holder = instances[request.instance]
            if (request.request_id, request.attempt) not in holder.queue or holder is instance:
                del offered[request.request_id]
                self._known.pop(request.request_id, None)
                continue
            cost_s = instance.cost_s(request.chain)
            if now_s + rest_s + cost_s <= request.deadline_s:
                entries.append(self._bindable(request, instance, holder, cost_s))
        if not entries:
            return None
        entries += [
            Bindable(
                waiting.request_id,
                waiting.attempt,
                waiting.deadline_ms,
                waiting.submitted_ms,
                waiting.miss_tokens,
                waiting.prefill_s,
                waiting.prefill_s,
            )
            for waiting in instance.queue
        ]
        best = choose_next(entries, self._options, now_s * 1_000, room_tokens, rest_s)
        return None if best is None or best.holder is None else offered[best.request_id]

    def _bindable(self, request: SimRequest, instance: SimInstance, holder: SimInstance, cost_s: float) -> Bindable:
        waiting = holder.queue.get(request.request_id, request.attempt)
        there_s = waiting.prefill_s if waiting is not None else cost_s
        return Bindable(
            request.request_id,
            request.attempt,
            request.deadline_s * 1_000,
            request.arrival_s * 1_000,
            instance.hit_and_miss(request.chain)[1],
            cost_s,
            min(cost_s, there_s),
            holder=holder.instance_id,
        )
