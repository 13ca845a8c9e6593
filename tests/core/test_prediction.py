"""Queue, feed rule, engine and prediction together: what is predicted at arrival is what happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.engine_model import EngineModel, EngineOptions, FirstToken
from dualmap.core.feed import FeedRule
from dualmap.core.load import predict_ttft_s, priority_class, slack_bucket
from dualmap.core.queue_order import OrderOptions
from dualmap.core.state import LoadReport, PrefillCost, QueuePolicy
from dualmap.core.waiting import WaitingQueue, WaitingRequest
from tests.core.pool import BLOCK, run_of

OPTIONS = EngineOptions(prefill_slowdown_per_running=0.0)
COST = PrefillCost()
SLO_S = 5.0


class _Instance:
    """An agent in small: a queue before an engine, fed on first token."""

    def __init__(self, policy: QueuePolicy) -> None:
        # The largest set is kept only where the longest gives way.
        self.queue = WaitingQueue(policy, options=OrderOptions(even_drops=False))
        self.engine = EngineModel(OPTIONS)
        self.rule = FeedRule(block_tokens=BLOCK)
        self.staged: dict[str, int] = {}
        self.first: dict[str, float] = {}

    def submit(self, name: str, blocks: int, now_s: float) -> None:
        prompt = blocks * BLOCK
        prefill = COST.seconds(prompt, prompt)
        deadline_ms = (now_s + SLO_S) * 1_000
        self.queue.push(WaitingRequest(name, 1, deadline_ms, now_s * 1_000, 0, prompt, prompt, 0, prefill))
        self.feed(now_s)

    def feed(self, now_s: float) -> None:
        while True:
            room = self.rule.room_tokens(sum(self.staged.values()), len(self.staged), self.engine.running_requests)
            request = self.queue.pick(now_s * 1_000, room, self.engine.rest_s)
            if request is None:
                return
            self.staged[request.request_id] = self.rule.charge(request.miss_tokens)
            blocks = request.prompt_tokens // BLOCK
            hashes = run_of(int(request.request_id) + 1, blocks)
            self.engine.stage(request.request_id, hashes, BLOCK, request.prompt_tokens, 3, now_s)

    def run(self, until_s: float) -> None:
        while (due := self.engine.next_event_s()) is not None and due <= until_s:
            for event in self.engine.advance(due):
                if isinstance(event, FirstToken):
                    self.first[event.request_id] = event.at_s
                    del self.staged[event.request_id]
            self.feed(due)
        self.engine.advance(until_s)

    def load(self, now_s: float) -> LoadReport:
        rest = self.engine.rest_s
        return LoadReport(self.queue.waiting_s(now_s * 1_000, SLO_S, rest), rest, self.queue.policy, cost=COST)


_ARRIVALS = st.lists(st.tuples(st.floats(0, 1.0), st.integers(1, 60)), min_size=1, max_size=20)


@settings(max_examples=60)
@given(_ARRIVALS)
def test_in_arrival_order_the_prediction_is_exact(arrivals: list[tuple[float, int]]) -> None:
    """Nobody overtakes under fifo, so rest + waiting + own cost is the time to the first token."""
    instance = _Instance(QueuePolicy.FIFO)
    now = 0.0
    predicted: dict[str, float] = {}
    for number, (gap, blocks) in enumerate(arrivals):
        now += gap
        instance.run(now)
        prefill = COST.seconds(blocks * BLOCK, blocks * BLOCK)
        bucket = slack_bucket(SLO_S, SLO_S)
        predicted[str(number)] = now + predict_ttft_s(instance.load(now), None, bucket, priority_class(0), prefill)
        instance.submit(str(number), blocks, now)
    instance.run(1e6)

    assert instance.first == pytest.approx(predicted, abs=1e-6)


@settings(max_examples=60)
@given(_ARRIVALS)
def test_under_slo_nobody_who_keeps_the_deadline_was_predicted_too_early(arrivals: list[tuple[float, int]]) -> None:
    """With equal SLOs later arrivals have later deadlines: who is kept gets the first token as predicted or sooner."""
    instance = _Instance(QueuePolicy.SLO)
    now = 0.0
    predicted: dict[str, float] = {}
    deadlines: dict[str, float] = {}
    for number, (gap, blocks) in enumerate(arrivals):
        now += gap
        instance.run(now)
        prefill = COST.seconds(blocks * BLOCK, blocks * BLOCK)
        ttft = predict_ttft_s(instance.load(now), None, slack_bucket(SLO_S, SLO_S), priority_class(0), prefill)
        predicted[str(number)], deadlines[str(number)] = now + ttft, now + SLO_S
        instance.submit(str(number), blocks, now)
    instance.run(1e6)

    assert len(instance.first) == len(arrivals)
    for name, at in instance.first.items():
        if at <= deadlines[name] and predicted[name] <= deadlines[name]:
            assert at <= predicted[name] + 1e-6
