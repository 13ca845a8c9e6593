"""A submission that an agent makes itself, from values: what came over HTTP enters the queue as if by Submit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from dualmap.core.errors import InvalidRequest
from dualmap.rpc.convert_agent import SubmissionDefaults, submission_of, ticket_of
from dualmap.rpc.convert_client import reason_name, submit_message
from dualmap.rpc.route_values import Request
from dualmap.rpc.submission import Submission
from dualmap.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class TicketFacts:
    """What a ticket says beside its booking. ``attempt`` is at least 1; ``reason`` is a name without prefix."""

    attempt: int
    reason: str


def ticket_facts(ticket: bytes) -> TicketFacts:
    """Read a ticket. Raises InvalidRequest for bytes that are none."""
    message = types_pb2.Ticket()
    try:
        message.ParseFromString(ticket)
    except DecodeError as error:
        raise InvalidRequest("ticket", "is no ticket: pass it on as the router gave it") from error
    return TicketFacts(message.attempt or 1, reason_name(message.reason))


def with_ticket(submission: Submission, ticket: bytes) -> Submission:
    """The same with a router's ticket: its prompt is not read again. Raises InvalidRequest."""
    message = submission.message
    try:
        message.ticket.ParseFromString(ticket)
    except DecodeError as error:
        raise InvalidRequest("ticket", "is no ticket: pass it on as the router gave it") from error
    return replace(submission, ticket=ticket_of(message.ticket))


def own_submission(request: Request, ticket: bytes, instance_id: str, defaults: SubmissionDefaults) -> Submission:
    """A checked submission; an empty ticket is none, an empty ``instance_id`` leaves the choice to the ticket.

    Raises InvalidRequest. O(prompt).
    """
    try:
        message = submit_message(request, ticket, instance_id)
    except DecodeError as error:
        raise InvalidRequest("ticket", "is no ticket: pass it on as the router gave it") from error
    except ValueError as error:
        # A number that no field of the contract holds.
        raise InvalidRequest("body", f"holds a number out of range: {error}") from error
    return submission_of(message, defaults)
