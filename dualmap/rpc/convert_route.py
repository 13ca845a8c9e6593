"""Route messages <-> values for the router: checked requests in, answers with their tickets out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from dualmap.core.choose import Candidate, Decision, RouteQuery
from dualmap.core.errors import InvalidRequest, UnknownModel
from dualmap.core.membership import Member, RingParameters
from dualmap.rpc.convert_prompt import chain_of
from dualmap.rpc.wire import prompt_forms, sub_message
from dualmap.v1 import router_pb2, types_pb2

MAX_ID_CHARACTERS = 128
MAX_NAME_BYTES = 256
MAX_SLO_MS = 3_600_000
MAX_EXCLUDED = 64
_PROMPT_FIELD = 6
_STREAMED_REQUEST_FIELD = 1


@dataclass(frozen=True, slots=True)
class RouteRules:
    """What a router checks requests against: the pool's models (the first is the default), parameters and limits."""

    models: tuple[str, ...]
    parameters: RingParameters
    default_slo_s: float
    hash_key: bytes = b""


class RouteCall(NamedTuple):
    """A checked request. ``digest`` is of the message's bytes: what "other content" is judged by."""

    query: RouteQuery
    attempt: int
    digest: int


AddressBook = Mapping[str, types_pb2.InstanceAddress]
"""Addresses of the members as messages, made once a ring."""


class Booked(NamedTuple):
    """A decision with its booking: all that an answer and its ticket say."""

    request_id: str
    attempt: int
    decision: Decision
    prompt_tokens: int
    router_id: int
    agent_epoch: int
    sequence: int
    pool: str
    ring_epoch: int
    parameters_digest: int
    addresses: AddressBook
    traceparent: str = ""


def read_route(raw: bytes) -> router_pb2.RouteRequest:
    """The message of these bytes. Raises InvalidRequest when they are none, or hold two prompts."""
    try:
        message = router_pb2.RouteRequest.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest("request", "is not a RouteRequest") from error
    # Bytes that were dropped leave the message shorter than what came; the scan costs ten times this look.
    if message.ByteSize() != len(raw) and prompt_forms(raw, _PROMPT_FIELD) > 1:
        raise InvalidRequest("prompt", "set exactly one of block_hashes, token_ids and text, not two")
    return message


def streamed_route(raw: bytes) -> bytes:
    """The bytes of the RouteRequest inside a RouteStreamRequest; empty when there is none."""
    return sub_message(raw, _STREAMED_REQUEST_FIELD)


def identity_of(message: router_pb2.RouteRequest | router_pb2.ReleaseRequest) -> tuple[str, int]:
    """(request id, attempt), absent attempt as 1. Raises InvalidRequest."""
    request_id = message.request_id
    if not 1 <= len(request_id) <= MAX_ID_CHARACTERS:
        raise InvalidRequest("request_id", f"must be 1 to {MAX_ID_CHARACTERS} characters, has {len(request_id)}")
    return request_id, message.attempt or 1


def digest_of(raw: bytes) -> int:
    """Digest of a request's bytes; a client that repeats a request sends the same."""
    return xxh3_64_intdigest(raw)


def route_call(message: router_pb2.RouteRequest, digest: int, rules: RouteRules) -> RouteCall:
    """The checked request. Raises InvalidRequest naming the field, UnknownModel naming the known. O(prompt)."""
    request_id, attempt = identity_of(message)
    models = rules.models
    if message.model and message.model not in models:
        raise UnknownModel(message.model[:MAX_NAME_BYTES], models)
    lora, cache_salt, slo_ms, priority = message.lora, message.cache_salt, message.ttft_slo_ms, message.priority
    if lora or cache_salt:
        _check_names(lora, cache_salt)
    if slo_ms > MAX_SLO_MS:
        raise InvalidRequest("ttft_slo_ms", f"at most {MAX_SLO_MS}, is {slo_ms}")
    if not -1 <= priority <= 1:
        raise InvalidRequest("priority", f"must be -1, 0 or 1, is {priority}")
    excluded = message.exclude_instance_ids
    query = RouteQuery(
        request_id,
        # All names of a pool are one base model, so all hash as its first name.
        chain_of(message.prompt, models[0], lora, cache_salt, rules.parameters, rules.hash_key),
        slo_ms / 1000 if slo_ms else rules.default_slo_s,
        priority,
        _excluded(excluded) if excluded else _NONE_EXCLUDED,
    )
    return RouteCall(query, attempt, digest)


_NONE_EXCLUDED: frozenset[str] = frozenset()


def _check_names(lora: str, cache_salt: str) -> None:
    for name, value in (("lora", lora), ("cache_salt", cache_salt)):
        if len(value.encode()) > MAX_NAME_BYTES:
            raise InvalidRequest(name, f"at most {MAX_NAME_BYTES} bytes")


def _excluded(ids: Sequence[str]) -> frozenset[str]:
    if len(ids) > MAX_EXCLUDED:
        raise InvalidRequest("exclude_instance_ids", f"at most {MAX_EXCLUDED}, got {len(ids)}")
    if any(len(instance_id) > MAX_NAME_BYTES for instance_id in ids):
        raise InvalidRequest("exclude_instance_ids", f"an id has more than {MAX_NAME_BYTES} characters")
    return frozenset(ids)


def address_book(members: Iterable[Member]) -> AddressBook:
    """The address messages of the members, to be copied into answers."""
    return {
        member.instance_id: types_pb2.InstanceAddress(
            instance_id=member.instance_id,
            grpc_address=member.grpc_address,
            http_address=member.http_address,
        )
        for member in members
    }


def answer_bytes(booked: Booked) -> bytes:
    """The RouteResponse of a decision, serialised once: a repeated request gets the same bytes."""
    decision, addresses = booked.decision, booked.addresses
    chosen, backup = decision.chosen, decision.backup
    message = router_pb2.RouteResponse(
        request_id=booked.request_id,
        instance=addresses[chosen.instance_id],
        reason=types_pb2.Reason.ValueType(int(decision.reason)),
        predicted_ttft_ms=chosen.predicted_ttft_s * 1000,
        hit_tokens=chosen.hit_tokens,
        key_blocks=decision.key_blocks,
        ring_epoch=booked.ring_epoch,
        state_age_ms=chosen.state_age_ms,
        attempt=booked.attempt,
    )
    if backup is not None:
        message.backup.CopyFrom(addresses[backup.instance_id])
    _fill_ticket(message.ticket, booked)
    return message.SerializeToString()


def _fill_ticket(ticket: types_pb2.Ticket, booked: Booked) -> None:
    decision = booked.decision
    ticket.router_id = booked.router_id
    ticket.instance_id = decision.chosen.instance_id
    ticket.agent_epoch = booked.agent_epoch
    ticket.sequence = booked.sequence
    ticket.attempt = booked.attempt
    ticket.pool = booked.pool
    ticket.ring_epoch = booked.ring_epoch
    ticket.parameters_digest = booked.parameters_digest
    ticket.key = decision.key
    ticket.key_blocks = decision.key_blocks
    ticket.prompt_tokens = booked.prompt_tokens
    ticket.traceparent = booked.traceparent
    ticket.reason = types_pb2.Reason.ValueType(int(decision.reason))
    _fill_promise(ticket.chosen, decision.chosen)
    if decision.backup is not None:
        _fill_promise(ticket.backup, decision.backup)


def _fill_promise(promise: types_pb2.Promise, candidate: Candidate) -> None:
    promise.instance_id = candidate.instance_id
    promise.hit_tokens = candidate.hit_tokens
    promise.predicted_ttft_ms = candidate.predicted_ttft_s * 1000
