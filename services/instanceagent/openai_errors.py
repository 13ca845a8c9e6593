"""The only table from our errors to HTTP: status, OpenAI's error body, Retry-After. Says nothing of a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from dualmap.core.errors import DualMapError, InvalidRequest
from dualmap.rpc.route_calls import CallFailed
from dualmap.rpc.status import code_of

_STATUS: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "FAILED_PRECONDITION": 412,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    412: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES: Mapping[str, str] = {"UNKNOWN_MODEL": "model_not_found", "OVERLOADED": "rate_limit_exceeded"}


class HttpProblem(Exception):
    """An answer that is an error. ``reason`` is fit for a metric; ``retry_after_ms`` None: waiting does not help."""

    def __init__(
        self, status: int, message: str, reason: str, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.param = param
        self.retry_after_ms = retry_after_ms

    @property
    def body(self) -> bytes:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error")
        code = _CODES.get(self.reason, self.reason.lower())
        error = {"message": self.message, "type": kind, "param": self.param, "code": code}
        return msgspec.json.encode({"error": error})

    @property
    def event(self) -> bytes:
        """The same as an event of a stream that has begun."""
        return b"data: " + self.body + b"\n\n"

    @property
    def headers(self) -> dict[str, str]:
        """When to come again: whole seconds as HTTP has it, and the exact milliseconds that OpenAI's clients read."""
        if self.retry_after_ms is None:
            return {}
        return {
            "Retry-After": str(max(1, math.ceil(self.retry_after_ms / 1_000))),
            "retry-after-ms": str(self.retry_after_ms),
        }


def problem_of(error: Exception) -> HttpProblem:
    """What a caller hears of an error; one that is in no table keeps its details inside."""
    match error:
        case HttpProblem():
            return error
        case InvalidRequest():
            return HttpProblem(400, error.message, error.reason, error.field)
        case DualMapError():
            status = _STATUS.get(code_of(error).name, 500)
            return HttpProblem(status, error.message, error.reason, retry_after_ms=error.retry_after_ms)
        case CallFailed() if error.code in _STATUS:
            field = error.fields.get("field")
            return HttpProblem(_STATUS[error.code], error.message, error.reason, field, error.retry_after_ms)
    return HttpProblem(500, "internal error", "INTERNAL")
