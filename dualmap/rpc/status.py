"""The only table from domain errors to gRPC codes, and the way back for clients. An unmapped error is INTERNAL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from opentelemetry import trace

from dualmap.core.errors import (
    AbortedAttempt,
    AlreadyExists,
    BindingIsEarly,
    DualMapError,
    InvalidRequest,
    NoInstance,
    NotFound,
    NotLeader,
    Overloaded,
    ParameterMismatch,
    StaleLeader,
    StalePlan,
    Superseded,
    Unavailable,
    UnknownModel,
)
from dualmap.runtime.logs import get_log

DOMAIN = "dualmap"
_DETAILS_KEY = "grpc-status-details-bin"
_LONGEST_MESSAGE = 1024  # A status travels in a header; headers over 8 KiB are cut by peers.

_CODES: Mapping[type[DualMapError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    NotFound: grpc.StatusCode.NOT_FOUND,
    NoInstance: grpc.StatusCode.UNAVAILABLE,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    NotLeader: grpc.StatusCode.UNAVAILABLE,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    AbortedAttempt: grpc.StatusCode.ABORTED,
    Superseded: grpc.StatusCode.ABORTED,
    StalePlan: grpc.StatusCode.ABORTED,
    ParameterMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    StaleLeader: grpc.StatusCode.FAILED_PRECONDITION,
    BindingIsEarly: grpc.StatusCode.FAILED_PRECONDITION,
}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

_log = get_log("rpc")


@dataclass(frozen=True, slots=True)
class Problem:
    """A failed call as its caller sees it; ``reason`` is the domain error's, empty when gRPC itself failed."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    retry_after_ms: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


def code_of(error: BaseException) -> grpc.StatusCode:
    """The code the error is answered with."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return grpc.StatusCode.INTERNAL


def status_of(error: BaseException, method: str = "") -> status_pb2.Status:
    """The whole status of the error: code, message, ErrorInfo, and RetryInfo or the bad field where there is one.

    An unmapped error is logged here with the trace id; its details stay inside.
    """
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL or not isinstance(error, DualMapError):
        return _internal(error, method)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_facts(error))
    details: list[Message] = [info]
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        details.append(retry)
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    number: int = code.value[0]
    return status_pb2.Status(
        code=number, message=error.message[:_LONGEST_MESSAGE], details=[_packed(detail) for detail in details]
    )


def problem_of_status(status: status_pb2.Status) -> Problem:
    """What a status says, whether it ended a call or came inside a stream."""
    reason, fields, retry_after_ms = "", {}, None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, fields = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    code = _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    return Problem(code, status.message, reason, retry_after_ms, fields)


def problem_of(error: grpc.RpcError) -> Problem:
    """What a failed call says, from the sync or the asyncio stack."""
    # Both stacks give pairs; their stubs know no common form of it.
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return problem_of_status(status_pb2.Status.FromString(value))
    return Problem(error.code(), error.details() or "")


def _internal(error: BaseException, method: str) -> status_pb2.Status:
    trace_id = trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)
    _log.error("rpc_failed", method=method, trace_id=trace_id, error=type(error).__name__, exc_info=error)
    return status_pb2.Status(code=code_pb2.INTERNAL, message=f"internal error, trace {trace_id}")


def _facts(error: DualMapError) -> dict[str, str]:
    names = ("field", "model", "request_id", "attempt", "leader", "kind", "name", "ours", "theirs", "newest_epoch")
    facts = {name: getattr(error, name, None) for name in names}
    return {name: str(value)[:_LONGEST_MESSAGE] for name, value in facts.items() if value is not None}


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
