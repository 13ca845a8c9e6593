"""An engine behind OpenAI's HTTP API as the agent's `Engine`: its life, its jobs, its load. It knows no queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

import stamina

from dualmap.runtime.clock import Clock
from dualmap.runtime.lifetime import StartError
from dualmap.runtime.logs import get_log
from services.instanceagent.engine import (
    Done,
    EngineEvent,
    EngineFacts,
    EngineListener,
    Failed,
    FirstToken,
    Job,
    KvChange,
)
from services.instanceagent.engine_cache import CacheRules, EngineCache
from services.instanceagent.engine_dialect import EngineDialect, EngineLoad, HttpEngineOptions, Learnt
from services.instanceagent.engine_http import EngineCallFailed, EngineHttp, HttpTarget
from services.instanceagent.engine_job import EngineJob, Outcome
from services.instanceagent.engine_metrics import InstanceEngineMetrics
from services.instanceagent.engine_request import EngineRequest, NoRequest, request_of
from services.instanceagent.engine_tokens import EngineTokens
from services.instanceagent.kv_events import FollowTimes, KvEventFollower
from services.instanceagent.learnt_scopes import ScopeBook
from services.instanceagent.load_socket import follow_load
from services.instanceagent.modelled_index import Belief
from services.instanceagent.parity import ParityProbe, parity_failure

FAILED_POLLS = 2
"""Polls in a row that fail until the engine counts as away."""

PARITY_TRIES = 2
"""A subscription takes effect a moment after its connection stands: the first events may go unheard."""

ENGINE_BLOCK_TOKENS = 16
"""Tokens of an engine's block where it does not say."""

_log = get_log("http_engine")


@dataclass(frozen=True, slots=True)
class HttpEngineParts:
    """What the adapter is given. ``block_tokens``: the ring's, asked again whenever the index begins anew."""

    metrics: InstanceEngineMetrics
    clock: Clock
    block_tokens: Callable[[], int]
    follow: FollowTimes = field(default_factory=FollowTimes)


@dataclass(slots=True)
class _Running:
    """A job under way. ``belief`` is None where events tell what is cached."""

    job: Job
    belief: Belief | None
    task: asyncio.Task[None] | None = None


class HttpEngine:
    """One data-parallel rank of one engine."""

    def __init__(self, dialect: EngineDialect, options: HttpEngineOptions, parts: HttpEngineParts) -> None:
        self._dialect = dialect
        self._options = options
        self._parts = parts
        self._metrics = parts.metrics
        self._http = EngineHttp(HttpTarget(options.url, options.api_key, options.http))
        scopes = ScopeBook(options.model, options.hash_key)
        rules = CacheRules(parts.block_tokens, options.tiers)
        self.cache = EngineCache(scopes, rules, parts.metrics, parts.clock, self._tell)
        self._served_model = options.served_model
        self.tokens = EngineTokens(self._http, lambda: self._served_model)
        self._jobs: dict[int, _Running] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._listener: EngineListener | None = None
        self._follower: KvEventFollower | None = None
        self._stop = asyncio.Event()
        self._look = asyncio.Event()
        self._failed_polls = 0
        self._parity_tried_s = 0.0
        self._started_s: float | None = None
        self.load = EngineLoad()
        self.learnt = Learnt("")
        self.parity_problem: str | None = None
        """Why the last self-test failed; None: it passed, or the engine gives no events."""

        self.problem: str | None = "not started"
        self.prefill_tokens_per_s: float | None = None
        """Measured by the engine's own counters; None where it has none, or before two readings."""

        self.facts = self._facts()

    @property
    def kv_use(self) -> float:
        """Share of the cache in use, as last heard."""
        return self.load.kv_use

    # Life

    async def start(self, listener: EngineListener) -> None:
        """Wait for the engine, learn what it is, follow its events, test parity. Raises StartError."""
        self._listener = listener
        await self._http.open()
        try:
            await self._learn()
        except EngineCallFailed as error:
            await self._http.close()
            raise StartError(f"the engine at {self._http.url} does not answer: {error.reason}") from error
        except asyncio.CancelledError:
            await self._http.close()
            raise
        self.problem = None
        learnt = self.learnt
        if learnt.events is not None:
            self._follower = KvEventFollower(learnt.events, self.cache, self._parts.follow)
            self._spawn(self._follower.run(self._stop), "kv-events")
            await self._test_parity()
        if learnt.load_endpoint is not None:
            follow = follow_load(learnt.load_endpoint, self.heard_load, self._metrics.call_failed, self._stop)
            self._spawn(follow, "engine-load")
        self._metrics.show_modelled(modelled=self.facts.modelled)
        self._spawn(self._poll_forever(), "engine-poll")

    async def stop(self) -> None:
        """Let go of everything."""
        self._stop.set()
        self._look.set()
        tasks = [running.task for running in self._jobs.values() if running.task is not None]
        self._jobs.clear()
        tasks += self._background
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()
        self.problem = "stopped"

    async def _learn(self) -> None:
        options = self._options
        attempts = stamina.retry_context(
            on=EngineCallFailed, attempts=None, timeout=options.start_timeout_s, wait_initial=0.1, wait_max=5.0
        )
        async for attempt in attempts:
            if attempt.num == 2:
                _log.info("engine_awaited", timeout_s=options.start_timeout_s)
            with attempt:
                if not self._served_model:
                    self._served_model = await self._first_model()
                self.learnt = await self._dialect.learn(self._http, options)
                self.load = await self._dialect.load(self._http, options)
        self._started_s = self.load.started_s
        self.cache.trusts_events = self.learnt.events is not None
        self.facts = self._facts()
        self.cache.resize(self.facts.kv_tokens, self.learnt.block_tokens or ENGINE_BLOCK_TOKENS)
        self.cache.begin_anew()
        events = self.learnt.events is not None
        _log.info("engine_learnt", dialect=self._dialect.name, version=self.learnt.version, events=events)

    async def _first_model(self) -> str:
        listed = (await self._http.get_json("/v1/models")).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("id") if isinstance(first, dict) else None
        if not isinstance(name, str):
            raise EngineCallFailed("no_model")
        return name

    def _facts(self) -> EngineFacts:
        options, learnt, modelled = self._options, self.learnt, not self.cache.trusts_events
        return EngineFacts(
            kv_tokens=self.load.kv_tokens or learnt.kv_tokens or options.kv_tokens,
            max_sequences=learnt.max_sequences or options.max_sequences,
            batch_tokens=options.batch_tokens,
            cost=options.cost,
            prefix_closed=self._dialect.prefix_closed or modelled,
            modelled=modelled,
        )

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.problem = f"{task.get_name()} failed"
            _log.error("engine_task_failed", task=task.get_name(), exc_info=task.exception())

    def _tell(self, changes: Sequence[KvChange]) -> None:
        if self._listener is not None:
            self._listener.kv_changed(changes)

    # Jobs

    def stage(self, job: Job) -> None:
        """Send a job; its events follow."""
        running = self._jobs[job.number] = _Running(job, self.cache.sent(job.submission))
        running.task = asyncio.create_task(self._run(running), name=f"job-{job.number}")
        running.task.add_done_callback(lambda task: self._job_ended(running, task))

    def cancel(self, job_number: int) -> None:
        """Close the job's connection; the engine frees what it had."""
        running = self._jobs.pop(job_number, None)
        if running is not None and running.task is not None:
            # Kept until it has closed its connection.
            self._background.add(running.task)
            running.task.add_done_callback(self._background.discard)
            running.task.cancel()

    async def _run(self, running: _Running) -> None:
        try:
            request = request_of(running.job.submission, self._served_model)
        except NoRequest as error:
            self._emit(running, Failed(error.problem, retryable=False))
            return
        self._place(request)
        outcome = await EngineJob(self._http, request, lambda event: self._emit(running, event)).run()
        self._heed(running.belief, outcome)

    def _place(self, request: EngineRequest) -> None:
        if self._options.rank is not None:
            self._dialect.place(request, self._options.rank)

    def _emit(self, running: _Running, event: EngineEvent) -> None:
        number = running.job.number
        if self._jobs.get(number) is not running or self._listener is None:
            return
        if isinstance(event, FirstToken) and running.belief is not None:
            self.cache.computed(running.job.submission.chain)
        if isinstance(event, (Done, Failed)):
            del self._jobs[number]
        self._listener.engine_event(number, event)

    def _job_ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("engine_job_failed", exc_info=error)
            self._emit(running, Failed(f"{type(error).__name__} in the adapter", retryable=False))

    def _heed(self, belief: Belief | None, outcome: Outcome) -> None:
        if outcome.trouble:
            self._metrics.call_failed(f"job_{outcome.trouble}")
            self._look.set()
            if outcome.trouble == "not_connected":
                # At once, lest all that waits is sent to where nobody is; the next poll may take it back.
                self.problem = "the engine takes no connection"
        usage = outcome.usage
        if belief is not None and usage is not None and usage.cached_tokens is not None:
            self.cache.reported(belief, usage.cached_tokens)

    # Cache

    def clear_cache(self) -> None:
        """Begin the index anew, by the ring's block size; the engine's cache stays and is learnt again by replay."""
        self.cache.begin_anew()
        if self._follower is not None:
            self._follower.resync()

    async def _test_parity(self) -> None:
        """Whether what the engine says is what we hash; where not, the index is modelled."""
        self._parity_tried_s = self._parts.clock.now_s()
        timeout_s = self._options.parity_timeout_s
        problem: str | None = "no_events"
        if self._follower is not None and await self._parts.clock.wait(self._follower.connected, timeout_s):
            for _ in range(PARITY_TRIES):
                problem = await parity_failure(self._probe(), timeout_s)
                if problem != "no_events":
                    break
        self.parity_problem = problem
        if problem is not None:
            self._metrics.parity_failed(problem)
            _log.warning("parity_failed", url=self._http.url, reason=problem)
        if (problem is None) != self.cache.trusts_events:
            self.cache.trusts_events = problem is None
            self.facts = self._facts()
            self.clear_cache()
        self._metrics.show_modelled(modelled=self.facts.modelled)

    def _probe(self) -> ParityProbe:
        cache = self.cache
        return ParityProbe(
            tokenize=self.tokens.of_text,
            complete=self._complete,
            batches=lambda: cache.batches,
            seen=cache.tier_by_events,
            heard=cache.heard,
            root=cache.scopes.plain.root,
            block_tokens=self._parts.block_tokens(),
        )

    async def _complete(self, token_ids: list[int]) -> dict[str, object]:
        body: dict[str, object] = {"model": self._served_model, "prompt": token_ids, "max_tokens": 1}
        request = EngineRequest("/v1/completions", body, {})
        self._place(request)
        return await self._http.post_json(request.path, body, request.headers, self._options.parity_timeout_s)

    # Load

    async def _poll_forever(self) -> None:
        clock = self._parts.clock
        while not self._stop.is_set():
            await clock.wait(self._look, self._options.poll_s)
            self._look.clear()
            await self._poll()
            retry_due = clock.now_s() - self._parity_tried_s >= self._options.parity_retry_s
            if self.parity_problem is not None and self.problem is None and retry_due:
                await self._test_parity()

    async def _poll(self) -> None:
        try:
            load = await self._dialect.load(self._http, self._options)
        except EngineCallFailed as error:
            self._failed_polls += 1
            self._metrics.call_failed(f"load_{error.reason}")
            if self.problem is None and self._failed_polls >= FAILED_POLLS:
                self.problem = f"the engine does not answer: {error.reason}"
                _log.warning("engine_away", url=self._http.url, reason=error.reason)
            return
        if self.problem is not None:
            _log.info("engine_back", url=self._http.url)
        self._failed_polls = 0
        self.problem = None
        self.heard_load(load)

    def heard_load(self, load: EngineLoad) -> None:
        """A reading of the load, polled or pushed."""
        before, self.load = self.load, load
        if load.started_s is not None:
            restarted = self._started_s not in (None, load.started_s)
            self._started_s = load.started_s
            if restarted and self.facts.modelled:
                self.cache.kv_lost("restart")
        if load.kv_tokens is not None and load.kv_tokens != self.facts.kv_tokens:
            self.facts = replace(self.facts, kv_tokens=load.kv_tokens)
            self.cache.resize(load.kv_tokens, self.learnt.block_tokens or ENGINE_BLOCK_TOKENS)
        rate = load.prefill_rate_since(before)
        if rate is not None:
            self.prefill_tokens_per_s = rate
            self._tell_prefilled(before, load)

    def _tell_prefilled(self, before: EngineLoad, load: EngineLoad) -> None:
        counters = (before.prefill_tokens, load.prefill_tokens, before.prefill_busy_s, load.prefill_busy_s)
        if self._listener is None or any(counter is None for counter in counters):
            return
        tokens_before, tokens, busy_before_s, busy_s = (counter or 0.0 for counter in counters)
        self._listener.prefilled(tokens - tokens_before, busy_s - busy_before_s)
