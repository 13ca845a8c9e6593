"""What a router shows of itself: explanations of decisions and its view, as numbers and hashes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualmap.core.choose import Candidate, Decision, Reason
from dualmap.v1 import router_pb2, types_pb2

RULES: Mapping[Reason, str] = {
    Reason.CACHE_HIT: "The pair's longer cached prefix won: its prediction is within the affinity limit.",
    Reason.LESS_LOADED: "Both of the pair hold the same prefix within one block: the lower prediction won.",
    Reason.SLO_THREAT: "The longer cached prefix threatened the SLO: the pair's lower prediction won.",
    Reason.ESCAPE: "Both of the pair are above the escape limit: another instance had the lowest prediction.",
    Reason.ESCAPE_STAYED: "Both of the pair are above the escape limit; one of them still had the lowest prediction.",
    Reason.PREVIOUS_PAIR: "The pair before the last change of ring or splits is still warm and was better.",
    Reason.NO_KEY: "The prompt has no full block: the pair came from the request id.",
    Reason.ONLY_CANDIDATE: "Only one eligible instance exists.",
    Reason.DEGRADED: "The chosen instance's state is old or unknown: hash and own bookings decided.",
}


@dataclass(frozen=True, slots=True)
class Explained:
    """A decision, booked or only considered, as it is shown. ``decided_ago_ms`` 0 is a what-if."""

    request_id: str
    attempt: int
    decision: Decision
    prompt_tokens: int
    ttft_slo_s: float
    ring_epoch: int
    decided_ago_ms: float
    router_id: int


def explanation(explained: Explained) -> router_pb2.ExplainResponse:
    """The message of an explanation."""
    decision = explained.decision
    return router_pb2.ExplainResponse(
        request_id=explained.request_id,
        attempt=explained.attempt,
        reason=types_pb2.Reason.ValueType(int(decision.reason)),
        rule=RULES[decision.reason],
        key=decision.key,
        key_blocks=decision.key_blocks,
        prompt_tokens=explained.prompt_tokens,
        ttft_slo_ms=explained.ttft_slo_s * 1000,
        candidates=[_candidate(candidate, decision.chosen.instance_id) for candidate in decision.candidates],
        ring_epoch=explained.ring_epoch,
        decided_ago_ms=explained.decided_ago_ms,
        router_id=explained.router_id,
    )


def _candidate(candidate: Candidate, chosen_id: str) -> router_pb2.CandidateExplanation:
    return router_pb2.CandidateExplanation(
        instance_id=candidate.instance_id,
        role=candidate.role,
        indexed_hit_tokens=candidate.indexed_hit_tokens,
        hit_tokens=candidate.hit_tokens,
        miss_tokens=candidate.miss_tokens,
        work_ahead_s=candidate.work_ahead_s,
        booked_s=candidate.booked_s,
        prefill_s=candidate.prefill_s,
        predicted_ttft_ms=candidate.predicted_ttft_s * 1000,
        state_age_ms=candidate.state_age_ms,
        chosen=candidate.instance_id == chosen_id,
        admitting=candidate.admitting,
    )


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What a router knows of one instance, as shown to operators. ``state_age_ms`` negative: never heard."""

    instance_id: str
    state: int
    incarnation: int
    agent_epoch: int
    version: int
    kv_blocks: int
    kv_digest: int
    state_age_ms: float
    reachable: bool
    bookings: int
    booked_s: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ViewFacts:
    """What a router knows of its pool."""

    router_id: int
    ring_epoch: int
    parameters_digest: int
    instances: tuple[InstanceFacts, ...]
    degraded: bool
    splits: int


def view_message(facts: ViewFacts) -> router_pb2.GetViewResponse:
    """The message of a view."""
    return router_pb2.GetViewResponse(
        router_id=facts.router_id,
        ring_epoch=facts.ring_epoch,
        parameters_digest=facts.parameters_digest,
        instances=[_instance(instance) for instance in facts.instances],
        degraded=facts.degraded,
        splits=facts.splits,
    )


def _instance(facts: InstanceFacts) -> router_pb2.InstanceView:
    return router_pb2.InstanceView(
        instance_id=facts.instance_id,
        state=types_pb2.InstanceState.ValueType(facts.state),
        incarnation=facts.incarnation,
        agent_epoch=facts.agent_epoch,
        version=facts.version,
        kv_blocks=facts.kv_blocks,
        kv_digest=facts.kv_digest,
        state_age_ms=facts.state_age_ms,
        reachable=facts.reachable,
        bookings=facts.bookings,
        booked_s=facts.booked_s,
        kv_bytes=facts.kv_bytes,
    )
