"""A cluster in virtual time: arrivals, routers, agents, engines, hand-overs. Equal inputs give equal runs, bit for bit.

Every decision is made by the production modules of `dualmap.core`; here is only who is told what, and when.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualmap.core.binding import offerable
from dualmap.core.choose import RouteQuery
from dualmap.core.engine_model import BlockCache
from dualmap.core.errors import NoInstance, Overloaded
from dualmap.core.instance_view import InstanceView
from dualmap.core.kv_index import KvIndex
from dualmap.core.load import priority_class, slack_bucket
from dualmap.core.membership import InstanceState
from dualmap.core.state import QueuePolicy
from dualmap.simulator.central import CentralQueue
from dualmap.simulator.instance import SimInstance
from dualmap.simulator.mapping import Mapping
from dualmap.simulator.options import ClusterOptions
from dualmap.simulator.policies.placing import Follower, Placement, Policy, Sight
from dualmap.simulator.pulling import Offers
from dualmap.simulator.rebalancing import moves_of
from dualmap.simulator.requests import SimRequest
from dualmap.simulator.watching import ExactViews, Watcher, cover_bookings, set_member_state

_NO_INSTANCE_RETRY_S = 1.0
_STALL_SEEN_MS = 500.0
"""Silence after which an agent takes its engine for stalled, as the agents do."""

_GIVE_UP_S = 120.0
"""A client stops asking for an instance after this."""


@dataclass(slots=True)
class RunResult:
    """What a run left: every request, the pending prefill tokens of the instances over time, and counts."""

    requests: list[SimRequest]
    samples: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    key_blocks: dict[int, int] = field(default_factory=dict)


class Cluster:
    """One run of one policy."""

    def __init__(self, requests: Sequence[SimRequest], policy: Policy, options: ClusterOptions) -> None:
        self.options = options
        self.policy = policy
        self.now_s = 0.0
        self.instances: dict[str, SimInstance] = {}
        self.requests = {request.request_id: request for request in requests}
        self.result = RunResult(list(requests))
        self.late = policy.late and options.binding == "late"
        self.exact = options.control.poll_s <= 0
        self.offers = Offers(options.binding_options)
        self.central = CentralQueue(options) if policy.central else None
        self.mapping = Mapping(options, heat=policy.heat)
        self._random = random.Random(options.seed)
        self._follower = policy if isinstance(policy, Follower) else None
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._open = len(requests)
        self._decided: Callable[[float], bool] | None = None
        self._queue_policy = options.queue if options.queue is not None else policy.queue
        self._shared = (BlockCache(1 << 60, 0), KvIndex()) if getattr(policy, "shared_cache", False) else None
        self._due: dict[str, float | None] = {}
        self._fresh: dict[str, tuple[float, int]] = {}
        exact_views = ExactViews(self._refresh)
        readers = 1 if self.exact else options.control.routers + 1
        self.watchers = [Watcher(1 + n, exact_views if self.exact else {}) for n in range(readers)]
        """The routers' views; the last is the rebalancer's."""
        for number in range(options.instances):
            self._join(number)

    def run(self, decided: Callable[[float], bool] | None = None) -> RunResult:
        """Play all requests to their end, or until ``decided``, asked at each sample with the time, says enough."""
        self._decided = decided
        for request in self.result.requests:
            self.at(request.arrival_s + self.options.control.message_s, self._arrive, request)
        for entry in self.options.timetable:
            self.at(entry.at_s, self._happen, entry.happening, entry.instance, entry.duration_s)
        control = self.options.control
        self.at(self.options.sample_s, self._sample)
        self.at(control.heat_s or 1.0, self._tick_mapping)
        if control.rebalance_s > 0 and self.policy.rebalances:
            self.at(control.rebalance_s, self._rebalance)
        events = self._events
        while self._open > 0 and events:
            self.now_s, _, action, arguments = heapq.heappop(events)
            action(*arguments)
        self.result.key_blocks = self.mapping.key_blocks
        self.result.counts["reloads"] = sum(watcher.reloads for watcher in self.watchers)
        return self.result

    def at(self, when_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Let something happen; equal times happen in the order they were asked for."""
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, action, arguments))

    def count(self, what: str) -> None:
        """Count something for the report."""
        self.result.counts[what] = self.result.counts.get(what, 0) + 1

    # -- arrivals and routing

    def _arrive(self, request: SimRequest) -> None:
        if self.central is not None:
            self.central.push(request, self.instances.values())
            for instance in self.central.by_suitability(request, self.instances.values()):
                self.feed(instance)
                if request.instance:
                    break
            return
        self._route(request, frozenset())

    def _route(self, request: SimRequest, exclude: frozenset[str]) -> None:
        watcher = self.watchers[0 if self.exact else request.index % self.options.control.routers]
        query = RouteQuery(f"{request.request_id}", request.chain, exclude=exclude)
        try:
            placement = self.policy.place(query, request.output_tokens, self._sight(watcher))
        except NoInstance:
            if self.now_s - request.arrival_s > _GIVE_UP_S:
                self._lose(request)
            else:
                self.at(self.now_s + _NO_INSTANCE_RETRY_S, self._route, request, frozenset())
            return
        self._placed(request, placement, watcher)
        delay_s = 2 * self.options.control.message_s
        if delay_s > 0:
            self.at(self.now_s + delay_s, self._submit, request, request.instance)
        else:
            self._submit(request, request.instance)

    def _sight(self, watcher: Watcher) -> Sight:
        pending = watcher.pending_prompt_tokens
        if self.exact and self.policy.name == "least_loaded":
            pending = {name: float(one.pending_prompt_tokens) for name, one in self.instances.items()}
        return Sight(watcher.views, self.mapping.picture, self.options.choose, self._random, self.now_s, pending)

    def _placed(self, request: SimRequest, placement: Placement, watcher: Watcher) -> None:
        chosen = placement.chosen
        request.instance = chosen.instance_id
        request.backup = placement.backup
        request.candidates = placement.candidates
        request.key = placement.key
        request.router = watcher.router_id
        if request.predicted_s is None:
            request.predicted_s = chosen.predicted_s
        self.mapping.sample(tuple(request.chain.hashes), placement.key_blocks, chosen.miss_tokens)
        pending = watcher.pending_prompt_tokens
        pending[chosen.instance_id] = pending.get(chosen.instance_id, 0.0) + request.prompt_tokens
        control = self.options.control
        view = watcher.view_of(chosen.instance_id)
        request.sequence = 0
        if view is None or not control.bookings:
            return
        bookings = view.bookings
        bookings.expire(self.now_s * 1_000, view.booking_ttl_ms)
        request.sequence = bookings.next_sequence()
        bookings.add(
            request.sequence,
            chosen.prefill_s,
            slack_bucket(self.options.ttft_slo_s, self.options.ttft_slo_s),
            priority_class(0),
            request.chain.hashes[chosen.indexed_hit_tokens // request.chain.block_tokens :],
            chosen.miss_tokens,
            self.now_s * 1_000,
        )

    # -- agents

    def _submit(self, request: SimRequest, instance_id: str) -> None:
        instance = self.instances[instance_id]
        if not instance.alive:
            self.count("retries")
            request.attempt += 1
            self._route(request, frozenset({instance_id}))
            return
        if request.sequence:
            instance.tickets.saw(request.router, request.sequence, self.now_s * 1_000)
        self._enqueue(request, instance)

    def _enqueue(self, request: SimRequest, instance: SimInstance) -> None:
        self._advance(instance)
        request.instance = instance.instance_id
        try:
            instance.queue.push(instance.waiting_request(request))
        except Overloaded:
            self._lose(request)
            return
        instance.held[request.request_id] = request
        instance.version += 1
        self.feed(instance)
        self._offer(instance)

    def feed(self, instance: SimInstance) -> None:
        """Release to the engine what the feed rule allows."""
        self._advance(instance)
        while instance.alive:
            room = instance.room_tokens()
            if room <= 0:
                break
            if self.central is not None:
                request = self.central.pick(instance, self.instances, self.now_s, room)
                if request is None:
                    break
                request.instance = instance.instance_id
                instance.held[request.request_id] = request
            else:
                if self.late and self._pull(instance, room):
                    continue
                waiting = instance.queue.pick(self.now_s * 1_000, room, instance.rest_s(self.now_s))
                if waiting is None:
                    break
                request = instance.held[waiting.request_id]
            instance.stage(request, self.now_s)
            self._advance(instance)
        self._schedule(instance)

    def _schedule(self, instance: SimInstance) -> None:
        due_s = instance.engine.next_event_s()
        if due_s != self._due.get(instance.instance_id):
            self._due[instance.instance_id] = due_s
            if due_s is not None:
                self.at(due_s, self._engine_due, instance, due_s)

    def _engine_due(self, instance: SimInstance, due_s: float) -> None:
        if self._due.get(instance.instance_id) == due_s:
            self._due[instance.instance_id] = None
            if self._advance(instance):
                self.feed(instance)
                self._offer(instance)
            else:
                self._schedule(instance)

    def _advance(self, instance: SimInstance) -> bool:
        """Bring the engine to now; whether a first token came."""
        events = instance.engine.advance(self.now_s)
        if not events:
            return False
        if self._follower is not None:
            self._follower.observe(instance.instance_id, events)
        running = len(instance.held)
        first = instance.take(events)
        if self.central is not None:
            self.central.note(instance, events)
        self._open -= running - len(instance.held)
        if first and self._due.get(instance.instance_id) is not None:
            # Reached from elsewhere at the very moment of the event: its own turn still comes.
            self.at(self.now_s, self._after_first_token, instance)
        return bool(first)

    def _after_first_token(self, instance: SimInstance) -> None:
        self.feed(instance)
        self._offer(instance)

    def _refresh(self, view: InstanceView) -> None:
        instance = self.instances[view.instance_id]
        fresh = (self.now_s, instance.version)
        if self._fresh.get(view.instance_id) == fresh:
            return
        view.reachable = instance.alive
        self._advance(instance)
        self._fresh[view.instance_id] = (self.now_s, instance.version)
        view.kv = instance.kv
        view.load = instance.report(self.now_s)
        view.heard_at_ms = self.now_s * 1_000
        cover_bookings(view, self.now_s * 1_000)

    # -- hand-over

    def _offer(self, instance: SimInstance) -> None:
        """Offer to their backups what core's rule lets go; an idle backup looks at once."""
        if not self.late or not len(instance.queue):
            return
        delay_s = self.options.control.message_s
        now_s = self.now_s
        silent_ms = instance.stalled_ms(now_s)
        stalled_ms = silent_ms if silent_ms >= _STALL_SEEN_MS else 0.0
        if self.options.offer_all:
            offered = list(instance.queue)
        else:
            offered = offerable(instance.queue, now_s * 1_000, instance.rest_s(now_s), stalled_ms)
        for waiting in offered:
            request = instance.held[waiting.request_id]
            if not request.backup or not self.offers.new(request):
                continue
            if delay_s > 0:
                self.at(self.now_s + delay_s, self._offered, request)
            else:
                self._offered(request)

    def _offered(self, request: SimRequest) -> None:
        self.offers.add(request)
        backup = self.instances.get(request.backup)
        if backup is not None and backup.alive and not backup.staged:
            self.at(self.now_s, self.feed, backup)

    def _pull(self, instance: SimInstance, room: int) -> bool:
        """Fetch the best offer if it should go before everything of our own; whether it was staged here and now."""
        request = self.offers.choose(instance, self.instances, self.now_s, room)
        if request is None:
            return False
        delay_s = self.options.control.message_s
        self.offers.drop(request)
        if delay_s <= 0:
            holder = self.instances[request.instance]
            self._release(request, holder)
            instance.held[request.request_id] = request
            request.instance, request.backup = instance.instance_id, holder.instance_id
            request.pulls += 1
            instance.stage(request, self.now_s)
            self._advance(instance)
            return True
        self.at(self.now_s + delay_s, self._hand_over, request, request.instance, instance.instance_id, True)
        return False

    def _release(self, request: SimRequest, holder: SimInstance) -> bool:
        if holder.queue.remove(request.request_id, request.attempt) is None:
            return False
        del holder.held[request.request_id]
        holder.version += 1
        return True

    def _hand_over(self, request: SimRequest, source: str, target: str, pulled: bool) -> None:
        """At the holder: hand the request to the target if it still waits."""
        holder = self.instances[source]
        if request.instance != source or not holder.alive or not self._release(request, holder):
            self.count("not_waiting")
            return
        request.backup = source
        request.moved_s = self.now_s
        if pulled:
            request.pulls += 1
        else:
            request.moves += 1
        delay_s = self.options.control.message_s
        if delay_s > 0:
            self.at(self.now_s + delay_s, self._accept, request, source, target)
        else:
            self._accept(request, source, target)

    def _accept(self, request: SimRequest, source: str, target: str) -> None:
        there = self.instances[target]
        if there.alive:
            self._enqueue(request, there)
        elif self.instances[source].alive:
            self.count("put_back")
            self._enqueue(request, self.instances[source])
        else:
            self._route(request, frozenset({target, source}))

    # -- periods

    def _sample(self) -> None:
        if self._decided is not None and self._decided(self.now_s):
            self._open = 0
            return
        pending = tuple(one.pending_miss_tokens for one in self.instances.values() if one.alive)
        self.result.samples.append((self.now_s, pending))
        for instance in self.instances.values():
            for waiting in instance.queue.shed(self.now_s * 1_000):
                self.count("shed")
                self._lose(instance.held.pop(waiting.request_id))
        self.at(self.now_s + self.options.sample_s, self._sample)

    def _tick_mapping(self) -> None:
        self.mapping.tick(self.now_s)
        self.at(self.now_s + (self.options.control.heat_s or 1.0), self._tick_mapping)

    def _rebalance(self) -> None:
        control = self.options.control
        for instance in self.instances.values():
            self._advance(instance)
        watcher = self.watchers[-1]
        moves = moves_of(self.instances.values(), watcher.views, self.mapping.picture, self.options, self.now_s)
        for move in moves:
            request = self.requests[move.request_id]
            self.at(self.now_s + control.message_s, self._hand_over, request, move.source, move.target, False)
        self.at(self.now_s + control.rebalance_s, self._rebalance)

    def _poll(self, instance: SimInstance) -> None:
        if instance.alive:
            self._advance(instance)
            self._schedule(instance)
            update = instance.changes(self.now_s)
            pending = instance.pending_prompt_tokens
            self.at(self.now_s + self.options.control.message_s, self._deliver, instance, update, pending)
        else:
            for watcher in self.watchers:
                view = watcher.view_of(instance.instance_id)
                if view is not None:
                    view.reachable = False
        self.at(self.now_s + self.options.control.poll_s, self._poll, instance)

    def _deliver(self, instance: SimInstance, update: Any, pending: int) -> None:
        for watcher in self.watchers:
            if not watcher.heard(update, pending, self.now_s):
                self.count("state_gaps")
                watcher.heard(instance.whole(self.now_s), instance.pending_prompt_tokens, self.now_s)

    # -- the timetable

    def _join(self, number: int) -> None:
        instance = SimInstance(number, self.options, self._queue_policy)
        self.instances[instance.instance_id] = instance
        if self._shared is not None:
            instance.engine.cache, instance.kv = self._shared
        for watcher in self.watchers:
            watcher.join(instance)
        self.mapping.set_member(instance.instance_id, InstanceState.ACTIVE, self.now_s)
        if not self.exact:
            # Every reader starts from the whole state; then polls are spread over the period.
            self._deliver(instance, instance.changes(self.now_s), 0)
            first_s = self.now_s + self.options.control.poll_s * self._random.random()
            self.at(first_s, self._poll, instance)

    def _happen(self, happening: str, number: int, duration_s: float) -> None:
        if happening == "join":
            self._join(number)
            return
        instance = next((one for one in self.instances.values() if one.number == number), None)
        if instance is None:
            raise ValueError(f"timetable: no instance {number} to {happening}")
        self._advance(instance)
        if happening == "stall":
            instance.pause(self.now_s, self.now_s + duration_s)
            self.at(self.now_s + 1.01 * _STALL_SEEN_MS / 1_000, self._offer, instance)
        elif happening == "drain":
            self._drain(instance)
        elif happening == "fail":
            self._fail(instance)
        elif happening == "restart":
            instance.alive = True
            instance.version += 1
        self._schedule(instance)

    def _drain(self, instance: SimInstance) -> None:
        """Skipped from now on; its queue goes to the other candidates, what is staged is finished."""
        for state in (InstanceState.DRAINING, InstanceState.LEFT):
            set_member_state(self.watchers, instance.instance_id, state)
            self.mapping.set_member(instance.instance_id, state, self.now_s)
        for waiting in list(instance.queue):
            request = instance.held[waiting.request_id]
            self._release(request, instance)
            request.moves += 1
            self._route(request, frozenset({instance.instance_id}))

    def _fail(self, instance: SimInstance) -> None:
        """Dead at once: clients see it and retry; readers learn it by failed polls."""
        decoding = [one for one in instance.held.values() if one.first_token_s is not None]
        lost = instance.fail(self.now_s)
        self._open -= len(decoding)
        self._due[instance.instance_id] = None
        for request in lost:
            request.attempt += 1
            self.count("retries")
            self._route(request, frozenset({instance.instance_id}))

    def _lose(self, request: SimRequest) -> None:
        request.failed = True
        self._open -= 1


def run_cluster(
    requests: Sequence[SimRequest],
    policy: Policy,
    options: ClusterOptions,
    decided: Callable[[float], bool] | None = None,
) -> RunResult:
    """One run; a policy with a state of its own is closed after it."""
    try:
        return Cluster(requests, policy, options).run(decided)
    finally:
        if isinstance(policy, Follower):
            policy.close()


def queue_named(name: str | None) -> QueuePolicy | None:
    """A queue policy by its name in lower case; None stays None."""
    return None if name is None else QueuePolicy[name.upper()]
