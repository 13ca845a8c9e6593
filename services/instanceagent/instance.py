"""The queue before one engine: admits, orders, feeds, cancels, and says how it is. Hands nothing over by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import islice

from dualmap.core.binding import offerable
from dualmap.core.blocks import Chain
from dualmap.core.errors import DualMapError, Overloaded, Unavailable
from dualmap.core.feed import FeedRule
from dualmap.core.load import due_before, priority_class, slack_bucket
from dualmap.core.state import LoadReport, PrefillCost
from dualmap.core.tickets import TicketLedger
from dualmap.core.waiting import QueueBounds, WaitingQueue
from dualmap.rpc import route_values
from dualmap.rpc.request_events import AcceptOutcome, Returned
from dualmap.runtime.logs import get_log
from services.instanceagent import engine as engines
from services.instanceagent.engine import Engine, Job, KvChange, KvCleared, KvRemoved, KvStored
from services.instanceagent.instance_values import Counters, Held, InstanceOptions, InstanceParts
from services.instanceagent.late_binding import OfferBook
from services.instanceagent.measured_cost import MeasuredCost
from services.instanceagent.outcomes import done_event, first_token_event, first_token_facts, promised
from services.instanceagent.progress import Progress, StagedJob
from services.instanceagent.request import HeldRequest, Phase

TICK_S = 0.1
"""How often time alone is looked at: waits that end, engines that stall, work that shrinks."""

MAX_FAILURES = 2
"""Times an engine may fail a request before its first token until its client hears of it."""

RECOUNTED_A_TURN, RECOUNT_TURNS = 64, 8
"""Waiting requests whose hits are counted anew after the index changed: half a millisecond a turn, so often a tick."""

AHEAD_S, AHEAD_STEP_TOKENS = 0.1, 512
LONG_QUEUE, WAITING_AGE_MS = 256, 20.0
NO_BOUND = 1 << 62
_LEAST_RETRY_MS, _MOST_RETRY_MS, _RETRY_JITTER = 50, 10_000, 0.2
_DRAINING_RETRY_MS = 1_000

_log = get_log("instance")


class Instance:
    """One KV cache, its queue, its engine."""

    def __init__(self, options: InstanceOptions, engine: Engine, parts: InstanceParts, default_slo_ms: int) -> None:
        self.engine = engine
        self.state = parts.state
        self.metrics = parts.metrics
        self.counters = Counters()
        self.tickets = TicketLedger()
        self.held = Held()
        self.offers: OfferBook | None = None
        self.draining = False
        self.default_slo_ms = default_slo_ms
        self._options = options
        self._parts = parts
        self._queue = WaitingQueue(
            options.queue_policy, QueueBounds(NO_BOUND, NO_BOUND, max_wait_ms=options.max_wait_ms)
        )
        self._progress = Progress(options.suspect_after_ms)
        self._feed_rule = FeedRule()
        self._cost = MeasuredCost(PrefillCost())
        self._kick = asyncio.Event()
        self._last_waiting: tuple[float, tuple[float, ...]] = (0.0, ())
        self._job_number = 0
        self._index_changes = self._recount_of = self._recounted = self._recount_from = 0
        self._suspect = False
        self._tickets_told: tuple[object, ...] = ()

    @property
    def instance_id(self) -> str:
        """Its id: agent/rank."""
        return self.state.instance_id

    @property
    def now_ms(self) -> float:
        """Monotonic milliseconds."""
        return self._parts.clock.now_s() * 1_000

    @property
    def suspect(self) -> bool:
        """Whether the engine is taken for wedged."""
        return self._suspect

    @property
    def eligible(self) -> bool:
        """Whether it may take work."""
        return not self.draining and not self._suspect

    @property
    def empty(self) -> bool:
        """Whether nothing waits, runs or is relayed."""
        return not (self.held.waiting or self.held.jobs or self.held.away)

    async def start(self) -> None:
        """Start the engine and learn what it is. Raises StartError."""
        await self.engine.start(self)
        self._cost = MeasuredCost(self.engine.facts.cost)

    # Admission

    def refusal(self, prompt_tokens: int = 0) -> DualMapError | None:
        """Why a request cannot be taken now; None when it can."""
        if self.draining:
            return Unavailable(f"instance {self.instance_id} is draining and", _DRAINING_RETRY_MS)
        # Those away may come back at any moment: they keep their places.
        held = len(self._queue) + len(self.held.away)
        if held >= self._options.max_waiting_requests:
            return Overloaded(self._retry_ms(), f"{held} requests wait")
        if held and self._queue.tokens + prompt_tokens > self._options.max_waiting_tokens:
            return Overloaded(self._retry_ms(), f"{self._queue.tokens} tokens wait")
        return None

    def admit(self, request: HeldRequest) -> None:
        """Queue a new request. Raises Overloaded or Unavailable."""
        error = self.refusal(request.submission.chain.prompt_tokens)
        if error is not None:
            self.metrics.refused(error.reason)
            raise error
        self.count_hits(request)
        predicted_ms = self.predict_ms(request)
        self._enqueue(request)
        position = self._queue.rank(request.waiting)
        self.emit(request, route_values.Queued(self.instance_id, position, predicted_ms))

    def hold_for_others(self, request: HeldRequest) -> None:
        """Hold a new request that is handed over before it was ever queued here; no bound refuses it."""
        self.count_hits(request)
        request.phase = Phase.HANDING_OVER
        self.held.away.add(request)
        self._changed()

    def put_back(self, request: HeldRequest, reason: str) -> None:
        """Queue a request again, in its old place; no bound refuses it."""
        self.held.away.discard(request)
        self.counters.put_back += 1
        self.metrics.put_back(reason)
        self.count_hits(request)
        self._enqueue(request)

    def _enqueue(self, request: HeldRequest) -> None:
        request.phase = Phase.WAITING
        prompt_tokens = request.submission.chain.prompt_tokens
        request.spans.enter("queue wait", prompt_tokens=prompt_tokens, priority=request.submission.priority)
        self.held.waiting[request.identity] = request
        self._queue.push(request.waiting)
        self._changed()

    def predict_ms(self, request: HeldRequest) -> float:
        """Predicted milliseconds from now to its first token, were it to come now."""
        now_ms = self.now_ms
        slack_s = (request.waiting.deadline_ms - now_ms) / 1_000
        bucket = slack_bucket(slack_s, self.default_slo_ms / 1_000)
        pclass = priority_class(request.submission.priority)
        due_s = due_before(self._waiting_lately(), self._options.queue_policy, bucket, pclass) if self._queue else 0.0
        return 1_000 * (self._progress.rest_s(now_ms) + due_s + request.waiting.prefill_s)

    def miss_of(self, chain: Chain) -> tuple[int, int]:
        """Tokens of a prompt not held here, and tokens held, the slower tiers at their discount."""
        kv, prefix_closed = self.state.kv, self.engine.facts.prefix_closed
        blocks = kv.leading_blocks(chain.hashes, prefix_closed)
        if kv.slow and blocks:
            discounts = self._options.host_discount, self._options.remote_discount
            blocks -= kv.lost_blocks(chain.hashes, blocks, *discounts, prefix_closed)
        hit_tokens = chain.covered_tokens(blocks)
        return chain.prompt_tokens - hit_tokens, hit_tokens

    def prefill_s(self, miss_tokens: int, prompt_tokens: int) -> float:
        """Predicted seconds of a prefill here."""
        return self._cost.cost(self._progress.running).seconds(miss_tokens, prompt_tokens)

    def charge(self, miss_tokens: int) -> int:
        """What a staged request of that miss counts for."""
        return self.feed_rule.charge(miss_tokens)

    def count_hits(self, request: HeldRequest) -> None:
        """Count the request's hits as the index is now."""
        chain, waiting = request.submission.chain, request.waiting
        miss_tokens, hit_tokens = self.miss_of(chain)
        prefill_s = self.prefill_s(miss_tokens, chain.prompt_tokens)
        if not self._queue.update(request.request_id, request.attempt, miss_tokens, hit_tokens, prefill_s):
            waiting.miss_tokens, waiting.hit_tokens, waiting.prefill_s = miss_tokens, hit_tokens, prefill_s

    # Leaving the queue

    def withdraw(self, request: HeldRequest) -> None:
        """Take a waiting request out of the queue, to be handed over."""
        self._unqueue(request)
        request.phase = Phase.HANDING_OVER
        self.held.away.add(request)
        self._changed()

    def give_back(self, request: HeldRequest, returned: Returned) -> None:
        """End a request that came by Accept: its origin places it anew."""
        self._drop(request)
        self.counters.moved_out += 1
        request.outlet.put(returned)
        self.finish(request, None, ended=False)

    def cancel(self, request: HeldRequest, error: DualMapError | None, *, ended: bool) -> None:
        """Take a request out of whatever it is in; ``error`` goes to its follower."""
        if request.phase is Phase.DONE:
            return
        self._drop(request)
        if request.relay is not None:
            request.relay.cancel()
        self.finish(request, error, ended=ended)

    def finish(self, request: HeldRequest, error: DualMapError | None, *, ended: bool) -> None:
        """The request is done here. ``ended``: done for its client too, never to run again."""
        if request.phase is Phase.DONE:
            return
        request.phase = Phase.DONE
        self.held.away.discard(request)
        # What came by Accept and failed is not over for its client: its origin has it still.
        ended = ended and (request.came is None or error is None)
        request.spans.leave(problem=error.reason if error is not None else "")
        if error is not None:
            self.metrics.failed(error.reason)
        request.outlet.end(error)
        self._parts.done(request, ended)
        self._changed()

    def _drop(self, request: HeldRequest) -> None:
        if request.phase is Phase.WAITING:
            self._unqueue(request)
        elif request.phase in (Phase.STAGED, Phase.RUNNING):
            self.held.jobs.pop(request.job_number, None)
            self.engine.cancel(request.job_number)
            self._progress.gone(request.job_number, self.now_ms, progress=False)
            self._cost.gone(request.job_number)

    def _unqueue(self, request: HeldRequest) -> None:
        self._queue.remove(request.request_id, request.attempt)
        del self.held.waiting[request.identity]

    # Feeding the engine

    async def run(self, stop: asyncio.Event) -> None:
        """Feed the engine whenever something changed, and look at time every tick, until ``stop``."""
        due_s = self._parts.clock.now_s() + TICK_S
        stopped = asyncio.ensure_future(stop.wait())
        stopped.add_done_callback(lambda _: self._kick.set())
        try:
            while not stop.is_set():
                if await self._parts.clock.wait(self._kick, due_s - self._parts.clock.now_s()):
                    self._kick.clear()
                now_s = self._parts.clock.now_s()
                if now_s >= due_s:
                    due_s = now_s + TICK_S
                    self.tick()
                    for _ in range(RECOUNT_TURNS):
                        if not self._recount():
                            break
                        await asyncio.sleep(0)
                self.feed()
        finally:
            stopped.cancel()

    def feed(self) -> None:
        """Release what the engine may have now."""
        while not self._suspect and self.engine.problem is None:
            request = self._next_early() if self.offers is None else self._next_late(self.offers)
            if request is None:
                return
            self.stage(request)

    def _next_early(self) -> HeldRequest | None:
        now_ms = self.now_ms
        head = self._queue.peek(now_ms, self._progress.rest_s(now_ms)) if self._queue else None
        if head is None:
            return None
        request = self.held.waiting[head.identity]
        self.count_hits(request)
        progress = self._progress
        fits = self.feed_rule.admits(head.miss_tokens, progress.staged_tokens, progress.staged, progress.running)
        return request if fits else None

    def _next_late(self, offers: OfferBook) -> HeldRequest | None:
        now_ms = self.now_ms
        progress = self._progress
        while self._queue or (offers and not self.draining):
            staged_tokens = progress.staged_tokens + offers.pulling_tokens(now_ms)
            room_tokens = self.feed_rule.room_tokens(staged_tokens, progress.staged + offers.pulls, progress.running)
            if room_tokens < self.feed_rule.block_tokens:
                return None
            # The plan takes out what is beyond saving: it would fill the window, and nobody in time would be seen.
            self._queue.peek(now_ms, progress.rest_s(now_ms))
            own = [self.held.waiting[waiting.identity] for waiting in self._queue.earliest(offers.window)]
            chosen = offers.choose(own, now_ms, room_tokens, progress.rest_s(now_ms), foreign=not self.draining)
            if chosen is None or isinstance(chosen, HeldRequest):
                return chosen
        return None

    @property
    def feed_rule(self) -> FeedRule:
        """Limits of what the engine is given."""
        facts, options = self.engine.facts, self._options
        rule = self._feed_rule
        feed_tokens = options.feed_tokens or facts.batch_tokens + self._ahead_tokens()
        max_sequences = options.max_sequences or facts.max_sequences
        if (rule.feed_tokens, rule.max_sequences) != (feed_tokens, max_sequences):
            rule = self._feed_rule = FeedRule(feed_tokens, max_sequences)
        return rule

    def _ahead_tokens(self) -> int:
        """Tokens beyond one batch, so that an engine's next step does not begin with the first that comes after one.

        No more than it prefills in a moment: what is staged can be neither reordered nor moved.
        """
        token_s = self._cost.cost(0).b_s_per_token
        batch_tokens = self.engine.facts.batch_tokens
        ahead = batch_tokens if token_s <= 0 else min(batch_tokens, int(AHEAD_S / token_s))
        return ahead - ahead % AHEAD_STEP_TOKENS

    def stage(self, request: HeldRequest) -> None:
        """Release a waiting request to the engine."""
        now_ms = self.now_ms
        waiting = request.waiting
        self._queue.release(waiting)
        del self.held.waiting[request.identity]
        self._job_number += 1
        request.job_number = self._job_number
        request.phase = Phase.STAGED
        request.staged_ms = now_ms
        self.held.jobs[request.job_number] = request
        job = StagedJob(self.feed_rule.charge(waiting.miss_tokens), waiting.miss_tokens, waiting.prefill_s)
        self._progress.stage(request.job_number, job, now_ms)
        self._cost.staged(request.job_number, now_ms)
        request.spans.enter("prefill", miss_tokens=waiting.miss_tokens, expected_hit_tokens=waiting.hit_tokens)
        self.emit(request, route_values.Started(self.instance_id, request.since_submission_ms(now_ms)))
        self.engine.stage(Job(request.job_number, request.submission))
        self._changed()

    # What the engine tells

    def engine_event(self, job_number: int, event: engines.EngineEvent) -> None:
        """One event of one job."""
        request = self.held.jobs.get(job_number)
        if request is None:
            return
        now_ms = self.now_ms
        if isinstance(event, engines.HttpChunk):  # not among the cases: nearly all events are these
            self._progress.moved(now_ms)
            request.passed_on = True
            self.emit(request, route_values.HttpChunk(event.status, event.headers, event.data))
            return
        match event:
            case engines.Started():
                self._progress.started(now_ms)
            case engines.FirstToken():
                self._first_token(request, event, now_ms)
            case engines.Tokens():
                self._progress.moved(now_ms)
                request.output_tokens += event.count
                self.emit(request, route_values.Tokens(event.count, event.data))
            case engines.Done():
                self._served(request, event, now_ms)
            case engines.Failed():
                self._failed(request, event, now_ms)

    def kv_changed(self, changes: Sequence[KvChange]) -> None:
        """Changes of the cache, in order."""
        for change in changes:
            match change:
                case KvStored():
                    self.state.store(change.hashes, int(change.tier))
                case KvRemoved():
                    self.state.remove(change.hashes)
                case KvCleared():
                    self.state.renew(self._parts.new_incarnation())
        self._index_changes += 1
        self._progress.moved(self.now_ms)

    def prefilled(self, miss_tokens: float, busy_s: float) -> None:
        """The engine's own counters of prefill since their last reading."""
        self._cost.counted(miss_tokens, busy_s)

    def _first_token(self, request: HeldRequest, event: engines.FirstToken, now_ms: float) -> None:
        job = self._progress.first_token(request.job_number, now_ms)
        chain = request.submission.chain
        predicted_hits = chain.prompt_tokens - (job.miss_tokens if job is not None else 0)
        request.hit_tokens = predicted_hits if event.hit_tokens is None else event.hit_tokens
        prefill_s = (now_ms - request.staged_ms) / 1_000 if event.prefill_s is None else event.prefill_s
        request.prefill_ms = prefill_s * 1_000
        request.first_token_ms = now_ms
        request.phase = Phase.RUNNING
        request.passed_on = True
        request.output_tokens = 1
        miss_tokens = chain.prompt_tokens - request.hit_tokens
        self.metrics.prefilled(self.prefill_s(miss_tokens, chain.prompt_tokens), prefill_s)
        self._cost.runs(self._progress.running - 1)
        self._cost.first_token(request.job_number, (miss_tokens, chain.prompt_tokens), event.prefill_s, now_ms)
        ttft_ms = request.since_submission_ms(now_ms)
        self.metrics.first_token(ttft_ms / 1_000, promised(request), request.hit_tokens)
        request.spans.leave(first_token_facts(request))
        request.spans.enter("decode")
        self.emit(request, first_token_event(request, event))
        self._changed()

    def _served(self, request: HeldRequest, event: engines.Done, now_ms: float) -> None:
        del self.held.jobs[request.job_number]
        self._progress.gone(request.job_number, now_ms, progress=True)
        if event.hit_tokens is not None:
            request.hit_tokens = event.hit_tokens
        if not request.first_token_ms:
            self._refused(request, event, now_ms)
            return
        prompt_tokens = request.submission.chain.prompt_tokens
        in_slo = request.first_token_ms <= request.waiting.deadline_ms
        self.counters.finished += 1
        self.counters.finished_in_slo += in_slo
        self.counters.prompt_tokens += prompt_tokens
        self.counters.cached_tokens += request.hit_tokens
        self.metrics.finished(prompt_tokens, request.hit_tokens, in_slo=in_slo)
        done = done_event(request, event, now_ms)
        self.emit(request, done)
        request.spans.leave({"output_tokens": event.output_tokens})
        self.finish(request, None, ended=True)

    def _refused(self, request: HeldRequest, event: engines.Done, now_ms: float) -> None:
        """An end without a token: the engine's own error went to the client. Not served, whatever its deadline."""
        self._cost.gone(request.job_number)
        self.metrics.failed("ENGINE_REFUSED")
        self.emit(request, done_event(request, event, now_ms))
        request.spans.leave(problem="engine refused")
        self.finish(request, None, ended=True)

    def _failed(self, request: HeldRequest, event: engines.Failed, now_ms: float) -> None:
        del self.held.jobs[request.job_number]
        self._progress.gone(request.job_number, now_ms, progress=False)
        self._cost.gone(request.job_number)
        request.failures += 1
        _log.warning("engine_failed_request", instance=self.instance_id, problem=event.problem)
        request.spans.leave(problem="engine failed")
        if not event.retryable or request.passed_on or request.failures > MAX_FAILURES:
            self.finish(request, Unavailable(f"the engine of {self.instance_id}", _DRAINING_RETRY_MS), ended=True)
        else:
            self.put_back(request, "engine_failed")

    def emit(self, request: HeldRequest, event: AcceptOutcome) -> None:
        """Tell the request's follower; one too slow to hear it is cut off."""
        if not request.outlet.put(event):
            self.cancel(request, Overloaded(_LEAST_RETRY_MS, "the events are read too slowly"), ended=True)

    # How it is

    def tick(self) -> None:
        """What time alone brings: waits that ended, an engine that stalled or came back, hits to be counted anew."""
        now_ms = self.now_ms
        for waiting in self._queue.shed(now_ms):
            request = self.held.waiting.pop(waiting.identity)
            error = Overloaded(self._retry_ms(), f"waited {request.since_submission_ms(now_ms):.0f} ms in vain")
            self.finish(request, error, ended=True)
        self._cost.settle(now_ms)
        suspect = self._progress.suspect(now_ms) or self.engine.problem is not None
        if suspect is not self._suspect:
            self._suspect = suspect
            _log.warning("suspect" if suspect else "suspect_over", instance=self.instance_id)
            self._changed()
        tickets = self.tickets.report(now_ms)
        if self._progress.busy or self._queue or tickets != self._tickets_told:
            self._tickets_told = tickets
            self.state.advance()
        self.metrics.show(self.load(), len(self.state.kv))
        self.metrics.show_refused_samples(self._cost.refused)

    def _recount(self) -> bool:
        """Count some of the waiting anew, where the index changed; whether more are left."""
        if self._recounted == self._index_changes:
            return False
        if not self._recount_from:
            self._recount_of = self._index_changes
        waiting = list(islice(self.held.waiting.values(), self._recount_from, self._recount_from + RECOUNTED_A_TURN))
        for request in waiting:
            self.count_hits(request)
        if len(waiting) == RECOUNTED_A_TURN:
            self._recount_from += RECOUNTED_A_TURN
            return True
        # What changed since this round began is for the next one.
        self._recounted, self._recount_from = self._recount_of, 0
        return False

    def load(self) -> LoadReport:
        """The load now."""
        now_ms = self.now_ms
        counters, facts = self.counters, self.engine.facts
        rest_s = self._progress.rest_s(now_ms)
        return LoadReport(
            waiting_s=self._queue.waiting_s(now_ms, self.default_slo_ms / 1_000, rest_s),
            rest_s=rest_s,
            queue_policy=self._options.queue_policy,
            admitting=self.refusal() is None,
            waiting_requests=len(self._queue),
            waiting_miss_tokens=self._queue.miss_tokens,
            running_requests=len(self.held.jobs),
            staged_miss_tokens=self._progress.staged_miss_tokens,
            kv_use=self.engine.kv_use,
            cost=self._cost.cost(self._progress.running),
            tickets=self.tickets.report(now_ms),
            stalled_ms=self._progress.stalled_ms(now_ms),
            suspect=self._suspect,
            moved_out=counters.moved_out,
            moved_in=counters.moved_in,
            put_back=counters.put_back,
            relays=sum(request.phase is Phase.RELAYED for request in self.held.away),
            finished=counters.finished,
            finished_in_slo=counters.finished_in_slo,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            offered_s=self.offers.offered_s if self.offers is not None else 0.0,
            prefix_closed=facts.prefix_closed,
            modelled=facts.modelled,
            host_discount=self._options.host_discount,
            remote_discount=self._options.remote_discount,
        )

    def _waiting_lately(self) -> tuple[float, ...]:
        """Seconds waiting by class and slack, in a long queue up to 20 ms old: it is asked for each that comes."""
        now_ms = self.now_ms
        at_ms, waiting_s = self._last_waiting
        if not waiting_s or len(self._queue) < LONG_QUEUE or now_ms - at_ms > WAITING_AGE_MS:
            waiting_s = self._queue.waiting_s(now_ms, self.default_slo_ms / 1_000, self._progress.rest_s(now_ms))
            self._last_waiting = (now_ms, waiting_s)
        return waiting_s

    def ordered(self, limit: int | None = None) -> list[HeldRequest]:
        """What waits, in the order of the queue; the first ``limit`` of it."""
        now_ms = self.now_ms
        order = self._queue.order(now_ms, self._progress.rest_s(now_ms), limit)
        return [self.held.waiting[waiting.identity] for waiting in order]

    def offerable(self) -> list[HeldRequest]:
        """What another candidate may take, earliest deadline first: the given up, or all behind a stalled engine."""
        now_ms = self.now_ms
        stalled_ms = self.stalled_ms or float(self._suspect)
        found = offerable(self._queue, now_ms, self._progress.rest_s(now_ms), stalled_ms)
        return [self.held.waiting[waiting.identity] for waiting in found]

    @property
    def rest_s(self) -> float:
        """Rest of what is staged, seconds."""
        return self._progress.rest_s(self.now_ms)

    @property
    def ready_in_s(self) -> float:
        """Seconds of work staged and waiting."""
        return self.rest_s + self._queue.prefill_s

    @property
    def stalled_ms(self) -> float:
        """Milliseconds without progress; 0 while it moves."""
        return self._progress.stalled_ms(self.now_ms)

    def saw_ticket(self, router_id: int, sequence: int) -> bool:
        """Note a ticket addressed here; False: not a believable one."""
        believed = self.tickets.saw(router_id, sequence, self.now_ms)
        self.state.advance()
        return believed

    def kick(self) -> None:
        """Look at the queue again soon."""
        self._kick.set()

    def _changed(self) -> None:
        self.state.advance()
        self._kick.set()

    def _retry_ms(self) -> int:
        bounded = min(_MOST_RETRY_MS, max(_LEAST_RETRY_MS, self.ready_in_s * 1_000))
        return int(bounded * random.uniform(1 - _RETRY_JITTER, 1 + _RETRY_JITTER))
