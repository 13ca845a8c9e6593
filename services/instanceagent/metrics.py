"""Metrics of an agent, `dualmap_agent_…`; labels are pool, instance and reason only."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dualmap.core.state import LoadReport

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.5, 5.0, 7.5, 10.0, 20.0, 60.0)
_ERROR_S = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class AgentMetrics:
    """Every series of the process; `of` gives those of one instance."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self.pool = pool
        names = ["pool", "instance"]
        reasons = [*names, "reason"]
        self.submitted = Counter("dualmap_agent_submitted_requests", "Taken from clients.", names, registry=registry)
        self.accepted = Counter("dualmap_agent_accepted_requests", "Taken in by Accept.", reasons, registry=registry)
        self.refused = Counter("dualmap_agent_refused_requests", "Not taken.", reasons, registry=registry)
        self.finished = Counter("dualmap_agent_finished_requests", "Served to the end.", names, registry=registry)
        self.in_slo = Counter("dualmap_agent_in_slo_requests", "First token within the SLO.", names, registry=registry)
        self.failed = Counter("dualmap_agent_failed_requests", "Ended without success.", reasons, registry=registry)
        self.moves = Counter("dualmap_agent_moves", "Hand-overs tried, by outcome.", reasons, registry=registry)
        self.put_back = Counter("dualmap_agent_put_back_requests", "Back in their queue.", reasons, registry=registry)
        self.void_tickets = Counter("dualmap_agent_void_tickets", "Tickets not counted.", reasons, registry=registry)
        self.offers = Counter("dualmap_agent_offers", "Offers by what came of them.", reasons, registry=registry)
        self.prompt_tokens = Counter("dualmap_agent_prompt_tokens", "Of the served.", names, registry=registry)
        self.cached_tokens = Counter("dualmap_agent_cached_tokens", "Found cached.", names, registry=registry)
        self.promised_tokens = Counter(
            "dualmap_agent_promised_hit_tokens", "Cached tokens that tickets promised.", names, registry=registry
        )
        self.realised_tokens = Counter(
            "dualmap_agent_realised_hit_tokens",
            "Cached tokens found where a ticket promised.",
            names,
            registry=registry,
        )
        self.ttft = Histogram(
            "dualmap_agent_ttft_seconds", "Submission to first token.", names, buckets=_TTFT_S, registry=registry
        )
        self.ttft_error = Histogram(
            "dualmap_agent_ttft_error_seconds",
            "Actual first token minus the ticket's prediction.",
            names,
            buckets=_ERROR_S,
            registry=registry,
        )
        self.regret = Histogram(
            "dualmap_agent_regret_seconds",
            "Actual first token minus what the ticket predicted for the other candidate.",
            names,
            buckets=_ERROR_S,
            registry=registry,
        )
        self.prefill_s = Counter(
            "dualmap_agent_prefill_seconds", "Prefills, release to first token.", names, registry=registry
        )
        self.predicted_prefill_s = Counter(
            "dualmap_agent_predicted_prefill_seconds",
            "The same prefills by the measured cost, as it was just before.",
            names,
            registry=registry,
        )
        self.cost_base_s = Gauge("dualmap_agent_cost_base_seconds", "Of any prefill now.", names, registry=registry)
        self.cost_token_s = Gauge(
            "dualmap_agent_cost_token_seconds", "Of an uncached token now.", names, registry=registry
        )
        self.cost_samples = Gauge(
            "dualmap_agent_cost_samples", "Prefills the measured cost rests on.", names, registry=registry
        )
        self.cost_refused = Gauge(
            "dualmap_agent_cost_refused_samples", "Prefills it could not learn from.", names, registry=registry
        )
        self.waiting = Gauge("dualmap_agent_waiting_requests", "Waiting now.", names, registry=registry)
        self.waiting_s = Gauge("dualmap_agent_waiting_seconds", "Prefill waiting now.", names, registry=registry)
        self.rest_s = Gauge("dualmap_agent_rest_seconds", "Rest of what is staged.", names, registry=registry)
        self.running = Gauge("dualmap_agent_running_requests", "In the engine now.", names, registry=registry)
        self.relays = Gauge("dualmap_agent_relays", "Relayed now.", names, registry=registry)
        self.kv_use = Gauge("dualmap_agent_kv_use_ratio", "Share of the KV cache in use.", names, registry=registry)
        self.kv_blocks = Gauge("dualmap_agent_kv_blocks", "Routing blocks indexed.", names, registry=registry)
        self.suspect = Gauge("dualmap_agent_suspect_bool", "1 while the engine is wedged.", names, registry=registry)
        by_reason = ["pool", "reason"]
        self.front_door = Counter(
            "dualmap_agent_front_door_requests",
            "Requests that came without a ticket, by where they went.",
            by_reason,
            registry=registry,
        )
        self.http_answers = Counter(
            "dualmap_agent_http_answers", "Answers of the OpenAI port, by what they were.", by_reason, registry=registry
        )
        self.byte_prompts = Counter(
            "dualmap_agent_byte_hashed_prompts",
            "OpenAI prompts hashed over bytes, by why there were no tokens.",
            by_reason,
            registry=registry,
        )
        self.ring_epoch = Gauge("dualmap_agent_ring_epoch", "Epoch of the ring known.", ["pool"], registry=registry)
        self.ring_failures = Counter(
            "dualmap_agent_ring_call_failures", "Calls to ring managers that failed.", ["pool"], registry=registry
        )

    def of(self, instance_id: str) -> InstanceMetrics:
        """The series of one instance."""
        return InstanceMetrics(self, instance_id)


class InstanceMetrics:
    """Counts for one instance; series without reason are looked up once."""

    def __init__(self, metrics: AgentMetrics, instance_id: str) -> None:
        self._all = metrics
        labels = self._labels = {"pool": metrics.pool, "instance": instance_id}
        self._submitted = metrics.submitted.labels(**labels)
        self._finished = metrics.finished.labels(**labels)
        self._in_slo = metrics.in_slo.labels(**labels)
        self._prompt_tokens = metrics.prompt_tokens.labels(**labels)
        self._cached_tokens = metrics.cached_tokens.labels(**labels)
        self._promised_tokens = metrics.promised_tokens.labels(**labels)
        self._realised_tokens = metrics.realised_tokens.labels(**labels)
        self._ttft = metrics.ttft.labels(**labels)
        self._ttft_error = metrics.ttft_error.labels(**labels)
        self._regret = metrics.regret.labels(**labels)
        self._prefill_s = metrics.prefill_s.labels(**labels)
        self._predicted_prefill_s = metrics.predicted_prefill_s.labels(**labels)

    def submitted(self) -> None:
        """A client's request was taken."""
        self._submitted.inc()

    def count(self, counter: Counter, reason: str) -> None:
        """One more of a counter with a reason."""
        counter.labels(**self._labels, reason=reason).inc()

    def accepted(self, cause: str) -> None:
        """Another agent's request was taken in."""
        self.count(self._all.accepted, cause)

    def refused(self, reason: str) -> None:
        """A request was not taken."""
        self.count(self._all.refused, reason)

    def failed(self, reason: str) -> None:
        """A request ended without success."""
        self.count(self._all.failed, reason)

    def moved(self, outcome: str) -> None:
        """A hand-over was tried."""
        self.count(self._all.moves, outcome)

    def put_back(self, reason: str) -> None:
        """A request is back in its place."""
        self.count(self._all.put_back, reason)

    def void_ticket(self, reason: str) -> None:
        """A ticket was not counted."""
        self.count(self._all.void_tickets, reason)

    def offer(self, reason: str) -> None:
        """Something came of an offer."""
        self.count(self._all.offers, reason)

    def first_token(self, ttft_s: float, promised: tuple[int, float, float] | None, hit_tokens: int) -> None:
        """A first token is out. ``promised``: hit tokens, predicted TTFT, the other's predicted TTFT (seconds)."""
        self._ttft.observe(ttft_s)
        if promised is None:
            return
        promised_hits, predicted_s, other_s = promised
        self._ttft_error.observe(ttft_s - predicted_s)
        self._promised_tokens.inc(promised_hits)
        self._realised_tokens.inc(hit_tokens)
        if other_s > 0:
            self._regret.observe(ttft_s - other_s)

    def prefilled(self, predicted_s: float, actual_s: float) -> None:
        """A prefill is over."""
        self._predicted_prefill_s.inc(predicted_s)
        self._prefill_s.inc(max(0.0, actual_s))

    def show_refused_samples(self, count: int) -> None:
        """Prefills that the measured cost could not learn from."""
        self._all.cost_refused.labels(**self._labels).set(count)

    def finished(self, prompt_tokens: int, cached_tokens: int, *, in_slo: bool) -> None:
        """A request was served to its end."""
        self._finished.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        if in_slo:
            self._in_slo.inc()

    def show(self, load: LoadReport, kv_blocks: int) -> None:
        """Gauges as of now."""
        labels = self._labels
        self._all.waiting.labels(**labels).set(load.waiting_requests)
        self._all.waiting_s.labels(**labels).set(sum(load.waiting_s))
        self._all.rest_s.labels(**labels).set(load.rest_s)
        self._all.running.labels(**labels).set(load.running_requests)
        self._all.relays.labels(**labels).set(load.relays)
        self._all.kv_use.labels(**labels).set(load.kv_use)
        self._all.kv_blocks.labels(**labels).set(kv_blocks)
        self._all.suspect.labels(**labels).set(load.suspect)
        self._all.cost_base_s.labels(**labels).set(load.cost.a_s)
        self._all.cost_token_s.labels(**labels).set(load.cost.b_s_per_token)
        self._all.cost_samples.labels(**labels).set(load.cost.samples)
