"""What is told of a request at its first token and its end, and what its ticket had promised."""

from __future__ import annotations

from dualmap.rpc import route_values
from services.instanceagent import engine as engines
from services.instanceagent.request import HeldRequest


def first_token_event(request: HeldRequest, event: engines.FirstToken) -> route_values.FirstToken:
    """The first token as its follower hears of it."""
    return route_values.FirstToken(
        instance_id=request.instance_id,
        ttft_ms=request.since_submission_ms(request.first_token_ms),
        hit_tokens=request.hit_tokens,
        prompt_tokens=request.submission.chain.prompt_tokens,
        prefill_ms=request.prefill_ms,
        data=event.data,
    )


def done_event(request: HeldRequest, event: engines.Done, now_ms: float) -> route_values.Done:
    """The end as its follower hears of it."""
    return route_values.Done(
        instance_id=request.instance_id,
        output_tokens=event.output_tokens,
        total_ms=request.since_submission_ms(now_ms),
        ttft_ms=request.since_submission_ms(request.first_token_ms) if request.first_token_ms else 0.0,
        waited_ms=request.since_submission_ms(request.staged_ms),
        hit_tokens=request.hit_tokens,
        prompt_tokens=request.submission.chain.prompt_tokens,
        handovers=request.came.number if request.came is not None else 0,
        finish_reason=event.finish_reason,
    )


def promised(request: HeldRequest) -> tuple[int, float, float] | None:
    """Hit tokens, predicted TTFT, and the other candidate's (seconds), as the ticket has it of the one that served.

    None where the ticket knows nothing of here. A moved request counts too: else only predictions that came true would.
    """
    ticket = request.submission.ticket
    if ticket is None:
        return None
    pair = (ticket.chosen, ticket.backup)
    for here, other in (pair, pair[::-1]):
        if here is not None and here.instance_id == request.instance_id:
            other_ms = other.predicted_ttft_ms if other is not None else 0.0
            return here.hit_tokens, here.predicted_ttft_ms / 1_000, other_ms / 1_000
    return None


def first_token_facts(request: HeldRequest) -> dict[str, str | int | float]:
    """Actual against promised, for the span of the prefill."""
    facts: dict[str, str | int | float] = {
        "cached_tokens": request.hit_tokens,
        "ttft_ms": request.since_submission_ms(request.first_token_ms),
    }
    known = promised(request)
    if known is not None:
        hit_tokens, predicted_s, other_s = known
        facts |= {"promised_hit_tokens": hit_tokens, "predicted_ttft_ms": predicted_s * 1_000}
        if other_s > 0:
            facts["other_predicted_ttft_ms"] = other_s * 1_000
    return facts
