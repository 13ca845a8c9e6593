"""Route requests as checked values for the router; answers are written by route_answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from dualmap.core.choose import RouteQuery
from dualmap.core.errors import InvalidRequest, UnknownModel
from dualmap.core.membership import RingParameters
from dualmap.rpc.convert_prompt import chain_of
from dualmap.rpc.limits import MAX_ATTEMPT, MAX_ID_CHARACTERS, MAX_SLO_MS
from dualmap.rpc.wire import prompt_forms, sub_message
from dualmap.v1 import router_pb2

MAX_NAME_BYTES = 256
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
    if message.attempt >= MAX_ATTEMPT:
        raise InvalidRequest("attempt", f"at most {MAX_ATTEMPT - 1}, is {message.attempt}")
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
