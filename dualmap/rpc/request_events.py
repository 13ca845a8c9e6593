"""What passes between agents about a request, as values, beside the events that its client hears of (route_values)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dualmap.rpc.route_values import Event


class HandoverCause(IntEnum):
    """Why a request is handed over; numbers equal those of the contract."""

    MIGRATE = 1
    PULL = 2
    DRAIN = 3
    FRONT_DOOR = 4


class MoveOutcome(IntEnum):
    """What came of a move; numbers equal those of the contract."""

    MOVED = 1
    NOT_WAITING = 2
    UNKNOWN = 3
    REFUSED = 4
    FAILED = 5
    STALE_PLAN = 6


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in the target's queue; the target's life comes with it."""

    agent_epoch: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Given back before its first token. ``wanted_instance_id`` empty: the origin decides where it goes."""

    wanted_instance_id: str
    cause: HandoverCause


@dataclass(frozen=True, slots=True)
class GaveWay:
    """A higher attempt took its place at the target: not to be put back."""

    attempt: int


AcceptOutcome = Accepted | Returned | GaveWay | Event
"""One message of the target to the origin."""
