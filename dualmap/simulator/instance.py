"""One instance in virtual time: the agent's queue, index, tickets and feed before the engine model of core.

It decides nothing about other instances; offers and hand-overs are the cluster's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dualmap.core.blocks import Chain
from dualmap.core.cost import CostFit
from dualmap.core.engine_model import BlocksRemoved, BlocksStored, Done, EngineEvent, EngineModel, FirstToken, Started
from dualmap.core.feed import FeedRule
from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.core.state import LoadReport, PrefillCost, QueuePolicy, StateUpdate
from dualmap.core.tickets import TicketLedger
from dualmap.core.waiting import QueueBounds, WaitingQueue, WaitingRequest
from dualmap.simulator.options import ClusterOptions
from dualmap.simulator.requests import SimRequest

_SUSPECT_AFTER_MS = 2_000.0
"""An engine that held staged work so long without progress is SUSPECT."""

_WAITING_FRESH_S = 0.05
"""Within this time an unchanged queue's table is not made again: work does not change its slack bucket so fast."""


class SimInstance:
    """An agent with one engine."""

    def __init__(self, number: int, options: ClusterOptions, policy: QueuePolicy) -> None:
        speed = options.speeds[number] if number < len(options.speeds) else 1.0
        cost = options.engine.cost
        scaled = PrefillCost(cost.a_s / speed, cost.b_s_per_token / speed, cost.c_s_per_token2 / speed)
        self.number = number
        self.instance_id = f"i{number:03d}/0"
        self.engine = EngineModel(replace(options.engine, cost=scaled))
        self.feed = FeedRule(feed_tokens=options.feed_tokens, max_sequences=options.engine.max_running)
        bounds = QueueBounds(max_wait_ms=options.max_wait_s * 1_000)
        self.queue = WaitingQueue(policy, bounds, options.order)
        self.kv = KvIndex()
        self.tickets = TicketLedger()
        self.held: dict[str, SimRequest] = {}
        """Requests that wait here or are in the engine."""
        self.fit = CostFit(cost) if options.control.fit_cost else None
        self.known_cost = cost if self.fit is not None else scaled
        self._slowdown_term = options.control.slowdown_term
        self.version = 1
        self.incarnation = 1
        self.alive = True
        self.staged: dict[str, int] = {}
        self._staged_s: dict[str, float] = {}
        """What each staged request was predicted to take when it was released."""
        self.staged_tokens = 0
        self.staged_prompt_tokens = 0
        self.progress_s = 0.0
        self.paused_until_s = 0.0
        self._pause_s = 0.0
        self._slo_s = options.ttft_slo_s
        self._changes: list[bytes] = []
        self._reported_version = 0
        self._waiting: tuple[float, ...] = ()
        self._waiting_version = -1
        self._waiting_at_s = 0.0
        self._full = True

    @property
    def pending_prompt_tokens(self) -> int:
        """Input tokens of all requests here that have no first token yet."""
        return self.queue.tokens + self.staged_prompt_tokens

    @property
    def pending_miss_tokens(self) -> int:
        """Uncached input tokens of all requests here that have no first token yet."""
        return self.queue.miss_tokens + self.staged_tokens

    def rest_s(self, now_s: float) -> float:
        """Seconds of prefill left in the engine, a pause the agent cannot see not counted; advance it to now first.

        With a learnt cost as an agent reckons it: what was predicted at the release, less the time of the current one.
        """
        if self.fit is None or not self._staged_s:
            return self.engine.rest_s
        oldest_s = next(iter(self._staged_s.values()))
        return sum(self._staged_s.values()) - min(max(0.0, now_s - self.progress_s), oldest_s)

    def waiting_request(self, request: SimRequest) -> WaitingRequest:
        """The request as the queue holds it, its cost by what the index holds now."""
        hit, miss = self.hit_and_miss(request.chain)
        return WaitingRequest(
            request.request_id,
            request.attempt,
            request.deadline_s * 1_000,
            request.arrival_s * 1_000,
            0,
            request.prompt_tokens,
            miss,
            hit,
            self.known_cost.seconds(miss, request.prompt_tokens),
            request.chain.hashes,
        )

    def hit_and_miss(self, chain: Chain) -> tuple[int, int]:
        """Cached and uncached prompt tokens of a chain by this instance's index."""
        hit = min(chain.prompt_tokens, self.kv.leading_blocks(chain.hashes) * chain.block_tokens)
        return hit, chain.prompt_tokens - hit

    def cost_s(self, chain: Chain) -> float:
        """Prefill seconds of a chain here, as far as the agent knows."""
        return self.known_cost.seconds(self.hit_and_miss(chain)[1], chain.prompt_tokens)

    def room_tokens(self) -> int:
        """Largest charge that may be released to the engine now."""
        return self.feed.room_tokens(self.staged_tokens, len(self.staged), self.engine.running_requests)

    def stage(self, request: SimRequest, now_s: float) -> None:
        """Release a request to the engine."""
        chain = request.chain
        miss = self.hit_and_miss(chain)[1]
        charge = self.feed.charge(miss)
        if not self.staged:
            self.progress_s = now_s
        if self.fit is not None:
            self._staged_s[request.request_id] = self.known_cost.seconds(miss, chain.prompt_tokens)
        self.staged[request.request_id] = charge
        self.staged_tokens += charge
        self.staged_prompt_tokens += chain.prompt_tokens
        self.engine.stage(
            request.request_id, chain.hashes, chain.block_tokens, chain.prompt_tokens, request.output_tokens, now_s
        )
        self.version += 1

    def take(self, events: Iterable[EngineEvent]) -> list[SimRequest]:
        """Note what the engine did; returns the requests that got their first token."""
        first: list[SimRequest] = []
        for event in events:
            self.version += 1
            if isinstance(event, Started):
                self.held[event.request_id].started_s = event.at_s
                self.progress_s = event.at_s
            elif isinstance(event, FirstToken):
                first.append(self._first_token(event))
            elif isinstance(event, Done):
                self.held.pop(event.request_id).done_s = event.at_s
                self._learnt()
            elif isinstance(event, BlocksStored):
                for block in event.hashes:
                    self.kv.set(block, int(event.tier))
                self._note([pack_change(block, int(event.tier)) for block in event.hashes])
                self._recost(set(event.hashes), stored=True)
            elif isinstance(event, BlocksRemoved):
                for block in event.hashes:
                    self.kv.discard(block)
                self._note([pack_change(block, 0) for block in event.hashes])
                self._recost(set(event.hashes), stored=False)
        return first

    def _first_token(self, event: FirstToken) -> SimRequest:
        request = self.held[event.request_id]
        request.first_token_s = event.at_s
        request.hit_tokens = event.hit_tokens
        self.progress_s = event.at_s
        self.staged_tokens -= self.staged.pop(event.request_id)
        self.staged_prompt_tokens -= request.prompt_tokens
        if self.fit is not None:
            del self._staged_s[event.request_id]
            beside = max(0, self.engine.running_requests - 1) if self._slowdown_term else 0
            miss = request.prompt_tokens - event.hit_tokens
            self.fit.observe(miss, request.prompt_tokens, event.prefill_s, beside)
            self._learnt()
        return request

    def _learnt(self) -> None:
        """The cost beside what decodes now."""
        if self.fit is not None:
            beside = self.engine.running_requests if self._slowdown_term else 0
            self.known_cost = self.fit.cost_beside(beside)

    def _note(self, changes: list[bytes]) -> None:
        if not self._full:
            self._changes += changes

    def _recost(self, blocks: set[int], *, stored: bool) -> None:
        """Correct the cost of those waiting whose leading run ends, or ended, at one of these blocks."""
        stale = []
        for waiting in self.queue:
            hashes = waiting.hashes
            run = waiting.hit_tokens // self.held[waiting.request_id].chain.block_tokens
            if (run < len(hashes) and hashes[run] in blocks) if stored else (run and hashes[run - 1] in blocks):
                stale.append(waiting)
        for waiting in stale:
            hit, miss = self.hit_and_miss(self.held[waiting.request_id].chain)
            cost_s = self.known_cost.seconds(miss, waiting.prompt_tokens)
            self.queue.update(waiting.request_id, waiting.attempt, miss, hit, cost_s)

    def report(self, now_s: float) -> LoadReport:
        """The load as it travels; the engine must have been advanced to ``now_s``."""
        if self._waiting_version != self.version or now_s - self._waiting_at_s > _WAITING_FRESH_S:
            self._waiting = self.queue.waiting_s(now_s * 1_000, self._slo_s, self.rest_s(now_s))
            self._waiting_version = self.version
            self._waiting_at_s = now_s
        stalled_ms = self.stalled_ms(now_s)
        return LoadReport(
            waiting_s=self._waiting,
            rest_s=self.rest_s(now_s),
            queue_policy=self.queue.policy,
            waiting_requests=len(self.queue),
            waiting_miss_tokens=self.queue.miss_tokens,
            running_requests=self.engine.running_requests,
            staged_miss_tokens=self.staged_tokens,
            kv_use=self.engine.kv_use,
            cost=self.known_cost,
            tickets=self.tickets.report(now_s * 1_000),
            stalled_ms=stalled_ms,
            suspect=stalled_ms > _SUSPECT_AFTER_MS,
        )

    def stalled_ms(self, now_s: float) -> float:
        """How much longer than its current prefill should take the engine has made no progress."""
        if not self.staged or self.paused_until_s <= self.progress_s:
            return 0.0
        return max(0.0, now_s - max(self.progress_s, self.paused_until_s - self._pause_s)) * 1_000

    def pause(self, now_s: float, until_s: float) -> None:
        """The engine accepts and does not answer until then."""
        self._pause_s = until_s - now_s
        self.paused_until_s = until_s
        self.engine.pause(until_s)

    def changes(self, now_s: float) -> StateUpdate:
        """What changed since the last call, the whole at the first call and in a new life."""
        since = self._reported_version
        self._reported_version = self.version
        snapshot = self.kv.snapshot() if self._full else None
        changes = b"" if self._full else b"".join(self._changes)
        self._changes = []
        self._full = False
        return StateUpdate(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            agent_epoch=self.incarnation,
            version=self.version,
            since=since,
            load=self.report(now_s),
            snapshot=snapshot,
            changes=changes,
            kv_digest=self.kv.digest,
            kv_blocks=len(self.kv),
        )

    def whole(self, now_s: float) -> StateUpdate:
        """The whole state, for a reader that lost its place."""
        return StateUpdate(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            agent_epoch=self.incarnation,
            version=self.version,
            since=0,
            load=self.report(now_s),
            snapshot=self.kv.snapshot(),
            kv_digest=self.kv.digest,
            kv_blocks=len(self.kv),
        )

    def fail(self, now_s: float) -> list[SimRequest]:
        """Die: everything held is lost to it; returns what it held without a first token."""
        lost = [request for request in self.held.values() if request.first_token_s is None]
        for request in self.held.values():
            if request.first_token_s is not None:
                request.failed = True
        for waiting in list(self.queue):
            self.queue.remove(waiting.request_id, waiting.attempt)
        for request_id in list(self.held):
            self.engine.cancel(request_id, now_s)
        self.engine.clear_cache(now_s)
        self.engine.advance(now_s)
        self.held.clear()
        self.staged.clear()
        self._staged_s.clear()
        self.staged_tokens = self.staged_prompt_tokens = 0
        self.kv = KvIndex()
        self.tickets = TicketLedger()
        self.incarnation += 1
        self.version += 1
        self._full = True
        self.alive = False
        return lost
