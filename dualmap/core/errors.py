"""The domain's errors: what went wrong, and in one line what the caller should do about it.

Transport codes are not known here: `dualmap.rpc.status` holds the only table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class DualMapError(Exception):
    """Something the caller can act on; any other exception is a defect of ours."""

    reason: ClassVar[str] = "DUALMAP_ERROR"

    @property
    def message(self) -> str:
        """What happened and what to do, on one line."""
        return str(self)

    @property
    def retry_after_ms(self) -> int | None:
        """How long to wait before trying again, in milliseconds; None when waiting does not help."""
        return None


class InvalidRequest(DualMapError):
    """The request is wrong whatever the state: correct the named field, do not retry."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class UnknownModel(DualMapError):
    """No pool serves this model: ask for one of the known ones."""

    reason = "UNKNOWN_MODEL"

    def __init__(self, model: str, known: Iterable[str]) -> None:
        self.model = model
        self.known = tuple(sorted(known))
        super().__init__(f"model {model!r} is not served here; known: {', '.join(self.known) or 'none'}")


class _RetryLater(DualMapError):
    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self._retry_after_ms = retry_after_ms

    @property
    def retry_after_ms(self) -> int | None:
        """The wait before the next try, in milliseconds."""
        return self._retry_after_ms


class NoInstance(_RetryLater):
    """The pool has no eligible instance: retry the same call after the delay."""

    reason = "NO_INSTANCE"

    def __init__(self, retry_after_ms: int, message: str = "no instance can take the request now") -> None:
        super().__init__(message, retry_after_ms)


class Unavailable(_RetryLater):
    """A part that this call needs does not answer: retry the same call after the delay."""

    reason = "UNAVAILABLE"

    def __init__(self, what: str, retry_after_ms: int) -> None:
        super().__init__(f"{what} does not answer", retry_after_ms)
        self.what = what


class Overloaded(_RetryLater):
    """There is more work than room: retry after the delay, or send less."""

    reason = "OVERLOADED"

    def __init__(self, retry_after_ms: int, what: str) -> None:
        super().__init__(f"overloaded: {what}", retry_after_ms)
        self.what = what


class AlreadyExists(DualMapError):
    """This (request id, attempt) is known already: use a higher attempt for a new decision."""

    reason = "ALREADY_EXISTS"

    def __init__(self, request_id: str, attempt: int, problem: str = "is known already") -> None:
        super().__init__(f"request {request_id!r} attempt {attempt} {problem}; use attempt {attempt + 1}")
        self.request_id = request_id
        self.attempt = attempt


class AbortedAttempt(DualMapError):
    """The earlier answer no longer holds: repeat the whole step with the next attempt."""

    reason = "ABORTED_ATTEMPT"

    def __init__(self, request_id: str, attempt: int, problem: str) -> None:
        super().__init__(f"request {request_id!r} attempt {attempt} {problem}; use attempt {attempt + 1}")
        self.request_id = request_id
        self.attempt = attempt


class Superseded(DualMapError):
    """A higher attempt of the request has taken over: stop following this one."""

    reason = "SUPERSEDED"

    def __init__(self, request_id: str, attempt: int) -> None:
        super().__init__(f"request {request_id!r} attempt {attempt} gave way to a higher attempt; stop following it")
        self.request_id = request_id
        self.attempt = attempt


class ParameterMismatch(DualMapError):
    """The two sides hash differently: do not retry until the named ring parameter agrees."""

    reason = "PARAMETER_MISMATCH"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: ours {ours}, theirs {theirs}; follow the published ring parameters")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class BindingIsEarly(DualMapError):
    """The instance binds requests when they arrive: neither offer it any nor pull from it."""

    reason = "BINDING_IS_EARLY"

    def __init__(self, instance_id: str) -> None:
        super().__init__(f"binding is early at {instance_id}; neither offer to it nor pull from it")
        self.instance_id = instance_id


class StalePlan(DualMapError):
    """The plan was made from a list that no longer holds: list the queue again, then plan again."""

    reason = "STALE_PLAN"

    def __init__(self, problem: str) -> None:
        super().__init__(f"the plan is stale: {problem}; list the queue again")
        self.problem = problem


class NotLeader(DualMapError):
    """This process is a standby: send the write to the leader, whose address is given when known."""

    reason = "NOT_LEADER"

    def __init__(self, leader: str | None = None) -> None:
        where = f"the leader is {leader}" if leader else "the leader is not known yet; try the next address"
        super().__init__(f"this process is a standby; {where}")
        self.leader = leader


class StaleLeader(DualMapError):
    """The caller's fencing epoch is past: it no longer leads and must stop acting as leader."""

    reason = "STALE_LEADER"

    def __init__(self, epoch: int, newest_epoch: int) -> None:
        super().__init__(f"fencing epoch {epoch} is past, {newest_epoch} leads; stop acting as leader")
        self.epoch = epoch
        self.newest_epoch = newest_epoch


class NotFound(DualMapError):
    """The named thing is not held here: it never was, it ended, or it was too long ago."""

    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name!r} is not known here")
        self.kind = kind
        self.name = name


class UnknownInstance(NotFound):
    """No instance of that id belongs to the pool: read the ring again, or join first."""

    reason = "UNKNOWN_INSTANCE"

    def __init__(self, instance_id: str) -> None:
        super().__init__("instance", instance_id)
        self.instance_id = instance_id
