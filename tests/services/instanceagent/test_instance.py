"""One queue before a hand-written engine: what is fed, what frees room, what a failing engine costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from dualmap.core.binding import BindingOptions
from dualmap.core.errors import DualMapError, Overloaded, Unavailable
from dualmap.core.membership import RingParameters
from dualmap.core.state import SLACK_BUCKETS, PrefillCost, QueuePolicy, Tier
from dualmap.core.waiting import WaitingRequest
from dualmap.rpc.convert_agent import SubmissionDefaults, submission_of
from dualmap.rpc.route_values import FirstToken as FirstTokenTold
from dualmap.runtime.clock import SystemClock
from services.instanceagent import engine as engines
from services.instanceagent.engine import EngineFacts, EngineListener, Job, KvChange, KvCleared, KvRemoved, KvStored
from services.instanceagent.instance import MAX_FAILURES, Instance
from services.instanceagent.instance_values import InstanceOptions, InstanceParts
from services.instanceagent.late_binding import OfferBook, Valuation
from services.instanceagent.metrics import AgentMetrics
from services.instanceagent.outlet import MAX_PENDING_EVENTS
from services.instanceagent.request import HeldRequest, Phase
from services.instanceagent.spans import RequestSpans
from services.instanceagent.state_log import StateLog
from tests.services.instanceagent.cluster import submission

DEFAULTS = SubmissionDefaults("default", 5_000, RingParameters())


class HandEngine:
    """An engine that does nothing until the test says what it tells."""

    def __init__(self) -> None:
        self.facts = EngineFacts(10_000, 4, 1_000, PrefillCost(0.0, 0.001))
        self.problem: str | None = None
        self.kv_use = 0.0
        self.jobs: list[Job] = []
        self.cancelled: list[int] = []
        self.listener: EngineListener | None = None

    async def start(self, listener: EngineListener) -> None:
        self.listener = listener

    async def stop(self) -> None:
        """Nothing runs."""

    def stage(self, job: Job) -> None:
        self.jobs.append(job)

    def cancel(self, job_number: int) -> None:
        self.cancelled.append(job_number)

    def clear_cache(self) -> None:
        self.kv([KvCleared()])

    def tell(self, number: int, *events: engines.EngineEvent) -> None:
        assert self.listener is not None
        for event in events:
            self.listener.engine_event(number, event)

    def kv(self, changes: Sequence[KvChange]) -> None:
        assert self.listener is not None
        self.listener.kv_changed(changes)

    @property
    def staged_ids(self) -> list[str]:
        return [job.submission.request_id for job in self.jobs]


class Bench:
    """An instance, its engine, and who was done with."""

    def __init__(self, **options: object) -> None:
        self.engine = HandEngine()
        self.done: dict[str, bool] = {}
        self.incarnation = 1
        clock = SystemClock()
        parts = InstanceParts(
            StateLog("a/0", 1, 1),
            AgentMetrics(CollectorRegistry(), "default").of("a/0"),
            clock,
            self._new_incarnation,
            self._note,
        )
        self.instance = Instance(InstanceOptions(**options), self.engine, parts, 5_000)  # type: ignore[arg-type]

    def _new_incarnation(self) -> int:
        self.incarnation += 1
        return self.incarnation

    def _note(self, request: HeldRequest, ended: bool) -> None:
        self.done[request.request_id] = ended

    async def start(self) -> Bench:
        await self.instance.start()
        return self

    def admit(self, request_id: str, seed: int, count: int = 256) -> HeldRequest:
        value = submission_of(submission(request_id, seed=seed, count=count), DEFAULTS)
        now_ms = self.instance.now_ms
        waiting = WaitingRequest(request_id, 1, now_ms + 5_000, now_ms, 0, count, count, hashes=value.chain.hashes)
        request = HeldRequest(value, "a/0", waiting, RequestSpans(NoOpTracer(), Context(), instance="a/0"))
        self.instance.admit(request)
        self.instance.feed()
        return request


async def _heard(request: HeldRequest) -> tuple[list[object], DualMapError | None]:
    events: list[object] = []
    try:
        async for event in request.outlet.follow(1):
            events.append(event)  # noqa: PERF401  (kept also where the stream ends in an error)
    except DualMapError as error:
        return events, error
    return events, None


async def test_the_engine_gets_its_batch_and_more_on_each_first_token() -> None:
    """1,000 tokens of feed take three of 300; a first token frees room, whole completions are not waited for."""
    bench = await Bench().start()
    requests = [bench.admit(f"r{i}", seed=i, count=300) for i in range(5)]
    assert bench.engine.staged_ids == ["r0", "r1", "r2"]
    bench.engine.tell(1, engines.Started(), engines.FirstToken(0, 0.3))
    bench.instance.feed()
    assert bench.engine.staged_ids == ["r0", "r1", "r2", "r3"]
    assert [request.phase for request in requests] == [
        Phase.RUNNING,
        Phase.STAGED,
        Phase.STAGED,
        Phase.STAGED,
        Phase.WAITING,
    ]


async def test_a_prompt_above_the_budget_enters_when_nothing_else_prefills() -> None:
    """It neither waits for ever nor lets others starve behind it."""
    bench = await Bench(queue_policy=QueuePolicy.FIFO).start()
    bench.admit("small", seed=1)
    bench.admit("big", seed=2, count=5_000)
    bench.admit("after", seed=3)
    assert bench.engine.staged_ids == ["small"]
    bench.engine.tell(1, engines.FirstToken(0, 0.2))
    bench.instance.feed()
    assert bench.engine.staged_ids == ["small", "big"]


async def test_a_waiting_request_profits_from_what_was_stored_meanwhile() -> None:
    """Its miss is counted anew when it is released: ten with one new prefix are not ten misses."""
    bench = await Bench(max_sequences=1).start()
    first, second = bench.admit("r1", seed=1), bench.admit("r2", seed=1)
    assert second.waiting.miss_tokens == 256
    bench.engine.kv([KvStored(first.submission.chain.hashes)])
    bench.engine.tell(1, engines.FirstToken(0, 0.2), engines.Done(1))
    bench.instance.feed()
    assert bench.engine.staged_ids == ["r1", "r2"]
    assert second.waiting.miss_tokens == 0
    bench.engine.tell(2, engines.FirstToken(None, None))
    assert second.hit_tokens == 256
    bench.engine.kv([KvRemoved(first.submission.chain.hashes)])
    assert len(bench.instance.state.kv) == 0


async def test_an_engine_that_fails_before_the_first_token_is_tried_again_then_told() -> None:
    """Retryable: back in the queue; too often: UNAVAILABLE, and the attempt is spent."""
    bench = await Bench().start()
    request = bench.admit("r1", seed=1)
    for number in range(1, MAX_FAILURES + 2):
        assert request.phase is Phase.STAGED
        bench.engine.tell(number, engines.Failed("out of memory"))
        bench.instance.feed()
    assert len(bench.engine.jobs) == MAX_FAILURES + 1
    _, error = await _heard(request)
    assert isinstance(error, Unavailable)
    assert bench.done == {"r1": True}
    assert bench.instance.counters.put_back == MAX_FAILURES


async def test_an_engine_that_fails_after_the_first_token_is_told_at_once() -> None:
    """What a client has heard is never said again."""
    bench = await Bench().start()
    request = bench.admit("r1", seed=1)
    bench.engine.tell(1, engines.FirstToken(0, 0.1), engines.Failed("crashed"))
    events, error = await _heard(request)
    assert isinstance(error, Unavailable)
    assert sum(isinstance(event, FirstTokenTold) for event in events) == 1
    assert len(bench.engine.jobs) == 1


async def test_a_follower_too_slow_is_cut_off_and_its_job_cancelled() -> None:
    """Memory is bounded by the events that may wait."""
    bench = await Bench().start()
    request = bench.admit("r1", seed=1)
    bench.engine.tell(1, engines.FirstToken(0, 0.1))
    for _ in range(MAX_PENDING_EVENTS + 1):
        bench.engine.tell(1, engines.HttpChunk(b"x", 200))
    assert request.phase is Phase.DONE
    assert bench.engine.cancelled == [1]
    assert isinstance((await _heard(request))[1], Overloaded)


async def test_what_is_late_from_the_engine_after_a_cancel_is_not_heard() -> None:
    """A job's number is never used twice."""
    bench = await Bench().start()
    request = bench.admit("r1", seed=1)
    bench.instance.cancel(request, None, ended=True)
    bench.engine.tell(1, engines.FirstToken(0, 0.1), engines.Done(1))
    assert bench.instance.counters.finished == 0
    assert bench.instance.empty


async def test_a_restarted_engine_begins_a_new_incarnation() -> None:
    """The old index is dropped first."""
    bench = await Bench().start()
    bench.engine.kv([KvStored([1, 2, 3])])
    bench.engine.kv([KvCleared(), KvStored([9])])
    assert (bench.instance.state.incarnation, len(bench.instance.state.kv)) == (2, 1)


async def test_an_engine_with_a_problem_is_fed_nothing_and_makes_the_instance_suspect() -> None:
    """Until it is well again."""
    bench = await Bench().start()
    bench.engine.problem = "does not answer"
    bench.admit("r1", seed=1)
    bench.instance.tick()
    assert bench.instance.suspect
    assert bench.engine.jobs == []
    bench.engine.problem = None
    bench.instance.tick()
    bench.instance.feed()
    assert bench.engine.staged_ids == ["r1"]


async def test_the_load_says_what_waits_what_is_staged_and_what_it_costs() -> None:
    """Seconds of prefill by slack, misses in tokens, the fitted cost."""
    bench = await Bench(max_sequences=1).start()
    bench.admit("r1", seed=1)
    bench.admit("r2", seed=2)
    load = bench.instance.load()
    assert (load.waiting_requests, load.waiting_miss_tokens, load.running_requests) == (1, 256, 1)
    assert load.staged_miss_tokens == 256
    assert abs(sum(load.waiting_s) - 0.256) < 1e-6
    assert 0 < load.rest_s <= 0.256
    bench.engine.tell(1, engines.FirstToken(0, 0.256))
    assert bench.instance.load().cost.samples == 1


async def test_what_is_staged_counts_in_who_is_given_up() -> None:
    """4 s staged, then 2 s due in 5 s: the report says given up, as the queue will treat it."""
    bench = await Bench().start()
    bench.admit("first", 1, 4_000)
    bench.admit("second", 2, 2_000)

    load = bench.instance.load()

    assert load.rest_s > 3.5
    assert load.waiting_s[SLACK_BUCKETS] == pytest.approx(2.0)


async def test_a_slower_tier_is_worth_its_credit_to_the_agent_too() -> None:
    """Two blocks held on the host at half: one block is to be computed, and the report says the discount."""
    bench = await Bench(host_discount=0.5).start()
    chain = submission_of(submission("r", count=256), DEFAULTS).chain
    bench.engine.kv([KvStored(chain.hashes, Tier.HOST)])

    assert bench.instance.miss_of(chain) == (128, 128)
    load = bench.instance.load()
    assert (load.host_discount, load.remote_discount) == (0.5, 0.0)


async def test_late_binding_sees_who_is_in_time_behind_many_beyond_saving() -> None:
    """Six that cannot be met come first by deadline, the window holds four: the one in time still goes next."""
    bench = await Bench().start()
    instance = bench.instance
    valuation = Valuation(instance.miss_of, instance.prefill_s, instance.charge)
    instance.offers = OfferBook(valuation, lambda order: None, BindingOptions(window=4))
    bench.admit("first", 1)
    for number in range(6):
        bench.admit(f"long{number}", 10 + number, 6_000)
    assert bench.engine.staged_ids == ["first"]

    bench.admit("good", 2)

    assert bench.engine.staged_ids == ["first", "good"]
