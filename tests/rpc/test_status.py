"""Promises of the one table from domain errors to gRPC codes."""

from __future__ import annotations

import grpc
import pytest

from dualmap.core import errors
from dualmap.rpc.status import code_of, problem_of_status, status_of

_EXAMPLES: list[tuple[errors.DualMapError, grpc.StatusCode]] = [
    (errors.InvalidRequest("prompt.token_ids", "odd length"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel("gpt", ["b", "a"]), grpc.StatusCode.NOT_FOUND),
    (errors.NotFound("request", "r1"), grpc.StatusCode.NOT_FOUND),
    (errors.UnknownInstance("a/0"), grpc.StatusCode.NOT_FOUND),
    (errors.NoInstance(500), grpc.StatusCode.UNAVAILABLE),
    (errors.Unavailable("Redis", 500), grpc.StatusCode.UNAVAILABLE),
    (errors.NotLeader("127.0.0.1:7071"), grpc.StatusCode.UNAVAILABLE),
    (errors.Overloaded(50, "queue full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.AlreadyExists("r1", 1), grpc.StatusCode.ALREADY_EXISTS),
    (errors.AbortedAttempt("r1", 1, "lost its instance"), grpc.StatusCode.ABORTED),
    (errors.Superseded("r1", 1), grpc.StatusCode.ABORTED),
    (errors.StalePlan("list is 3 s old"), grpc.StatusCode.ABORTED),
    (errors.ParameterMismatch("seeds", "1", "2"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StaleLeader(3, 4), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BindingIsEarly("a/0"), grpc.StatusCode.FAILED_PRECONDITION),
]


def _all_kinds(kind: type[errors.DualMapError]) -> set[type[errors.DualMapError]]:
    return {kind, *(deeper for child in kind.__subclasses__() for deeper in _all_kinds(child))}


@pytest.mark.parametrize(("error", "code"), _EXAMPLES, ids=lambda value: getattr(value, "reason", ""))
def test_each_error_has_its_code_reason_and_message(error: errors.DualMapError, code: grpc.StatusCode) -> None:
    """And the client reads them back."""
    problem = problem_of_status(status_of(error))

    assert (problem.code, problem.reason, problem.message) == (code, error.reason, str(error))
    assert problem.retry_after_ms == error.retry_after_ms
    assert "\n" not in problem.message


def test_no_error_is_left_out_of_the_table() -> None:
    """A new one must be given a code, and an example here."""
    kinds = _all_kinds(errors.DualMapError) - {errors.DualMapError}
    concrete = {kind for kind in kinds if "reason" in vars(kind) and kind.__module__ == errors.__name__}

    assert {type(error) for error, _ in _EXAMPLES} == concrete


def test_the_bad_field_and_the_retry_delay_travel() -> None:
    """As google.rpc details, for clients in any language."""
    bad = status_of(errors.InvalidRequest("attempt", "must be 1 or more"))
    busy = status_of(errors.Overloaded(1500, "queue full"))

    assert [detail.type_url.rsplit(".", 1)[1] for detail in bad.details] == ["ErrorInfo", "BadRequest"]
    assert [detail.type_url.rsplit(".", 1)[1] for detail in busy.details] == ["ErrorInfo", "RetryInfo"]
    assert problem_of_status(bad).fields["field"] == "attempt"
    assert problem_of_status(busy).retry_after_ms == 1500


def test_an_unmapped_error_keeps_its_details_inside(capsys: pytest.CaptureFixture[str]) -> None:
    """The caller gets a trace id, the log gets the rest."""
    problem = problem_of_status(status_of(KeyError("inner secret"), "/s/M"))

    assert problem.code is grpc.StatusCode.INTERNAL
    assert "inner secret" not in problem.message
    assert "inner secret" in capsys.readouterr().out


def test_a_long_message_still_fits_a_header() -> None:
    """A name as long as it likes must not cost the whole status."""
    status = status_of(errors.UnknownModel("m" * 100_000, ["a"]))

    assert status.ByteSize() < 8000
    assert code_of(errors.NotFound("x", "y")) is grpc.StatusCode.NOT_FOUND
