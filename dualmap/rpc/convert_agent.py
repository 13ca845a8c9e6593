"""The agent's messages <-> values; every refusal names its field. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import RingParameters
from dualmap.rpc.convert_client import event_value
from dualmap.rpc.convert_prompt import block_hashes_of, chain_of
from dualmap.rpc.limits import MAX_AGE_MS, MAX_ATTEMPT, MAX_ID_CHARACTERS, MAX_SLO_MS
from dualmap.rpc.request_events import (
    Accepted,
    AcceptOutcome,
    GaveWay,
    HandoverCause,
    MoveOutcome,
    Returned,
)
from dualmap.rpc.route_values import (
    Done,
    Event,
    FirstToken,
    HttpChunk,
    Pulse,
    Queued,
    Started,
    Tokens,
)
from dualmap.rpc.submission import Handover, PromisedCandidate, Submission, Ticket
from dualmap.rpc.wire import prompt_forms
from dualmap.v1 import agent_pb2, rebalancer_pb2, types_pb2

MAX_NAME_CHARS = 512
MAX_OUTPUT_TOKENS = 1_048_576
MAX_MOVES = 4_096
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class SubmissionDefaults:
    """What stands in for absent fields, and what prompts are hashed with."""

    model: str
    ttft_slo_ms: int
    parameters: RingParameters
    hash_key: bytes = b""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One waiting request as it is listed; times in milliseconds. ``moved_ago_ms`` negative: never moved."""

    submission: Submission
    deadline_ms: float
    age_ms: float
    miss_tokens: int
    moved_ago_ms: float


@dataclass(frozen=True, slots=True)
class QueueListing:
    """What waits at one instance, in the order of the queue."""

    ring_epoch: int
    list_token: bytes
    entries: tuple[QueueEntry, ...]
    waiting_requests: int
    rest_s: float
    stalled_ms: float


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """One move that a planner asks for."""

    request_id: str
    attempt: int
    target_instance_id: str


@dataclass(frozen=True, slots=True)
class MoveResult:
    """What came of one move; ``detail`` is for a person."""

    request_id: str
    outcome: MoveOutcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MigrationOrder:
    """A batch of moves from one instance."""

    instance_id: str
    list_token: bytes
    moves: tuple[MoveOrder, ...]
    fencing_epoch: int
    traceparent: str


def submit_from_wire(raw: bytes) -> agent_pb2.SubmitRequest:
    """Read a submission; one that holds two prompts is left with none, so that it is refused by name."""
    message = agent_pb2.SubmitRequest.FromString(raw)
    if prompt_forms(raw, agent_pb2.SubmitRequest.PROMPT_FIELD_NUMBER) > 1:
        message.prompt.Clear()
    return message


def accept_from_wire(raw: bytes) -> agent_pb2.AcceptRequest:
    """Read a hand-over, as `submit_from_wire` does."""
    message = agent_pb2.AcceptRequest.FromString(raw)
    path = (agent_pb2.AcceptRequest.REQUEST_FIELD_NUMBER, agent_pb2.SubmitRequest.PROMPT_FIELD_NUMBER)
    if prompt_forms(raw, *path) > 1:
        message.request.prompt.Clear()
    return message


def submission_of(message: agent_pb2.SubmitRequest, defaults: SubmissionDefaults, field: str = "") -> Submission:
    """A checked submission. ``field`` prefixes the names in refusals. Raises InvalidRequest. O(prompt)."""
    prefix = f"{field}." if field else ""
    _check_identity(message.request_id, message.attempt, prefix)
    for name in ("model", "lora", "cache_salt", "instance_id"):
        _check_length(getattr(message, name), MAX_NAME_CHARS, prefix + name)
    _check_range(message.priority, -1, 1, f"{prefix}priority")
    _check_range(message.ttft_slo_ms, 0, MAX_SLO_MS, f"{prefix}ttft_slo_ms")
    _check_range(message.max_output_tokens, 0, MAX_OUTPUT_TOKENS, f"{prefix}max_output_tokens")
    if not 0 <= message.age_ms <= MAX_AGE_MS:
        raise InvalidRequest(f"{prefix}age_ms", f"must be 0 to {MAX_AGE_MS}")
    if message.HasField("openai") and message.openai.path not in OPENAI_PATHS:
        raise InvalidRequest(f"{prefix}openai.path", f"must be one of {', '.join(OPENAI_PATHS)}")
    if not message.HasField("prompt"):
        raise InvalidRequest(f"{prefix}prompt", "is required")
    chain = chain_of(
        message.prompt,
        # All names of a pool are one base model: hashed as its first name, as routers hash.
        defaults.model,
        message.lora,
        message.cache_salt,
        defaults.parameters,
        defaults.hash_key,
        f"{prefix}prompt",
    )
    return Submission(
        request_id=message.request_id,
        attempt=message.attempt or 1,
        chain=chain,
        message=message,
        model=message.model or defaults.model,
        max_output_tokens=message.max_output_tokens,
        ttft_slo_ms=message.ttft_slo_ms or defaults.ttft_slo_ms,
        priority=message.priority,
        instance_id=message.instance_id,
        ticket=ticket_of(message.ticket, f"{prefix}ticket") if message.HasField("ticket") else None,
        age_ms=message.age_ms,
    )


def ticket_of(message: types_pb2.Ticket, field: str = "ticket") -> Ticket:
    """A ticket. Raises InvalidRequest where it cannot be one."""
    for name in ("router_id", "instance_id", "sequence"):
        if not getattr(message, name):
            raise InvalidRequest(f"{field}.{name}", "is required in a ticket")
    _check_length(message.instance_id, MAX_NAME_CHARS, f"{field}.instance_id")
    return Ticket(
        router_id=message.router_id,
        instance_id=message.instance_id,
        agent_epoch=message.agent_epoch,
        sequence=message.sequence,
        parameters_digest=message.parameters_digest,
        chosen=_promise_of(message.chosen),
        backup=_promise_of(message.backup),
        key=message.key,
        traceparent=message.traceparent,
    )


def _promise_of(message: types_pb2.Promise) -> PromisedCandidate | None:
    if not message.instance_id:
        return None
    return PromisedCandidate(message.instance_id, message.hit_tokens, message.predicted_ttft_ms)


def accept_of(message: agent_pb2.AcceptRequest, defaults: SubmissionDefaults) -> tuple[Submission, Handover]:
    """A handed-over request. Raises InvalidRequest."""
    if not message.HasField("request"):
        raise InvalidRequest("request", "is required")
    for name in ("target_instance_id", "origin_instance_id", "handover"):
        if not getattr(message, name):
            raise InvalidRequest(name, "is required")
    for name in ("deadline_left_ms", "age_ms"):
        # Not a number has no place in an ordered queue: it would wait there for ever.
        if not math.isfinite(getattr(message, name)):
            raise InvalidRequest(name, "must be a number")
    try:
        cause = HandoverCause(message.cause)
    except ValueError as error:
        raise InvalidRequest("cause", f"unknown cause {int(message.cause)}") from error
    handover = Handover(
        target_instance_id=message.target_instance_id,
        origin_instance_id=message.origin_instance_id,
        number=message.handover,
        deadline_left_ms=message.deadline_left_ms,
        age_ms=max(0.0, message.age_ms),
        cause=cause,
        traceparent=message.traceparent,
    )
    return submission_of(message.request, defaults, "request"), handover


def accept_message(submission: Submission, handover: Handover) -> agent_pb2.AcceptRequest:
    """The inverse of `accept_of`: the request goes on exactly as it came."""
    return agent_pb2.AcceptRequest(
        request=submission.message,
        target_instance_id=handover.target_instance_id,
        origin_instance_id=handover.origin_instance_id,
        handover=handover.number,
        deadline_left_ms=handover.deadline_left_ms,
        age_ms=handover.age_ms,
        cause=agent_pb2.HandoverCause.ValueType(int(handover.cause)),
        traceparent=handover.traceparent,
    )


def event_message(event: Event) -> agent_pb2.RequestEvent:
    """The message of one event."""
    match event:
        case Queued():
            queued = agent_pb2.Queued(
                instance_id=event.instance_id, position=event.position, predicted_ttft_ms=event.predicted_ttft_ms
            )
            return agent_pb2.RequestEvent(queued=queued)
        case Started():
            started = agent_pb2.Started(instance_id=event.instance_id, waited_ms=event.waited_ms)
            return agent_pb2.RequestEvent(started=started)
        case FirstToken():
            first = agent_pb2.FirstToken(
                instance_id=event.instance_id,
                ttft_ms=event.ttft_ms,
                hit_tokens=event.hit_tokens,
                prompt_tokens=event.prompt_tokens,
                prefill_ms=event.prefill_ms,
                data=event.data,
            )
            return agent_pb2.RequestEvent(first_token=first)
        case Tokens():
            return agent_pb2.RequestEvent(tokens=agent_pb2.Tokens(count=event.count, data=event.data))
        case Done():
            return agent_pb2.RequestEvent(done=_done_message(event))
        case HttpChunk():
            chunk = agent_pb2.HttpChunk(status=event.status, headers=dict(event.headers), data=event.data)
            return agent_pb2.RequestEvent(http_chunk=chunk)
        case Pulse():
            return agent_pb2.RequestEvent(pulse=agent_pb2.Pulse())


def _done_message(event: Done) -> agent_pb2.Done:
    return agent_pb2.Done(
        instance_id=event.instance_id,
        output_tokens=event.output_tokens,
        total_ms=event.total_ms,
        ttft_ms=event.ttft_ms,
        waited_ms=event.waited_ms,
        hit_tokens=event.hit_tokens,
        prompt_tokens=event.prompt_tokens,
        handovers=event.handovers,
        finish_reason=event.finish_reason,
    )


def outcome_message(outcome: AcceptOutcome) -> agent_pb2.AcceptResponse:
    """The message of one outcome of an Accept."""
    match outcome:
        case Accepted():
            return agent_pb2.AcceptResponse(accepted=agent_pb2.Accepted(agent_epoch=outcome.agent_epoch))
        case Returned():
            cause = agent_pb2.HandoverCause.ValueType(int(outcome.cause))
            returned = agent_pb2.Returned(wanted_instance_id=outcome.wanted_instance_id, cause=cause)
            return agent_pb2.AcceptResponse(returned=returned)
        case GaveWay():
            return agent_pb2.AcceptResponse(superseded=agent_pb2.Superseded(attempt=outcome.attempt))
        case _:
            return agent_pb2.AcceptResponse(event=event_message(outcome))


def outcome_of(message: agent_pb2.AcceptResponse) -> AcceptOutcome:
    """The inverse of `outcome_message`; an unknown cause counts as a migration."""
    match message.WhichOneof("outcome"):
        case "accepted":
            return Accepted(message.accepted.agent_epoch)
        case "returned":
            known = message.returned.cause in {int(cause) for cause in HandoverCause}
            cause = HandoverCause(message.returned.cause) if known else HandoverCause.MIGRATE
            return Returned(message.returned.wanted_instance_id, cause)
        case "superseded":
            return GaveWay(message.superseded.attempt)
        case "event":
            return event_value(message.event)
        case _:
            return Pulse()


def listing_message(listing: QueueListing) -> agent_pb2.ListQueueResponse:
    """The answer of ListQueue."""
    return agent_pb2.ListQueueResponse(
        ring_epoch=listing.ring_epoch,
        list_token=listing.list_token,
        items=[_entry_message(entry) for entry in listing.entries],
        waiting_requests=listing.waiting_requests,
        rest_s=listing.rest_s,
        stalled_ms=listing.stalled_ms,
    )


def _entry_message(entry: QueueEntry) -> agent_pb2.QueueItem:
    submission = entry.submission
    ticket = submission.ticket
    return agent_pb2.QueueItem(
        request_id=submission.request_id,
        attempt=submission.attempt,
        deadline_ms=entry.deadline_ms,
        age_ms=entry.age_ms,
        priority=submission.priority,
        prompt_tokens=submission.chain.prompt_tokens,
        miss_tokens=entry.miss_tokens,
        blocks=block_hashes_of(submission.chain),
        candidate_instance_ids=ticket.candidate_ids if ticket else (),
        key=ticket.key if ticket else 0,
        moved_ago_ms=entry.moved_ago_ms,
    )


def migration_of(message: agent_pb2.MigrateRequest) -> MigrationOrder:
    """A batch of moves. Raises InvalidRequest naming the item."""
    if len(message.items) > MAX_MOVES:
        raise InvalidRequest("items", f"at most {MAX_MOVES}, got {len(message.items)}")
    moves = []
    for index, item in enumerate(message.items):
        prefix = f"items[{index}]."
        _check_identity(item.request_id, item.attempt, prefix)
        if not item.target_instance_id:
            raise InvalidRequest(f"{prefix}target_instance_id", "is required")
        moves.append(MoveOrder(item.request_id, item.attempt or 1, item.target_instance_id))
    return MigrationOrder(
        message.instance_id, message.list_token, tuple(moves), message.fencing_epoch, message.traceparent
    )


def migration_message(ring_epoch: int, results: Sequence[MoveResult]) -> agent_pb2.MigrateResponse:
    """The outcomes, in the order asked."""
    items = [
        agent_pb2.MigrateItemResult(
            request_id=result.request_id, outcome=outcome_value(result.outcome), detail=result.detail
        )
        for result in results
    ]
    return agent_pb2.MigrateResponse(ring_epoch=ring_epoch, results=items)


def outcome_value(outcome: MoveOutcome) -> rebalancer_pb2.MoveOutcome.ValueType:
    """The contract's number of a move's outcome."""
    return rebalancer_pb2.MoveOutcome.ValueType(int(outcome))


def _check_identity(request_id: str, attempt: int, prefix: str) -> None:
    if not request_id:
        raise InvalidRequest(f"{prefix}request_id", "is required")
    _check_length(request_id, MAX_ID_CHARACTERS, f"{prefix}request_id")
    _check_range(attempt, 0, MAX_ATTEMPT, f"{prefix}attempt")


def _check_length(text: str, longest: int, field: str) -> None:
    if len(text) > longest:
        raise InvalidRequest(field, f"at most {longest} characters, got {len(text)}")


def _check_range(value: int, least: int, most: int, field: str) -> None:
    if not least <= value <= most:
        raise InvalidRequest(field, f"must be {least} to {most}, is {value}")
