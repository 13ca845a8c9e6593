"""Answers given in the last 30 s by (request id, attempt), so that a repeated request gets the same one."""

from __future__ import annotations

from collections import deque

from dualmap.core.bookings import Bookings

CAPACITY = 262_144
KEEP_MS = 30_000.0
_FORGET_A_CALL = 8
"""More than one a call, so that a full memory shrinks; few, so that no call pays for an idle half-minute."""


class Answer:
    """One answer: its bytes, and the booking behind it."""

    __slots__ = ("_bookings", "_sequence", "at_ms", "attempt", "digest", "instance_id", "older", "raw", "request_id")

    def __init__(  # noqa: PLR0917  (one answer, told flat: this is on the path of every route)
        self,
        request_id: str,
        attempt: int,
        digest: int,
        instance_id: str,
        bookings: Bookings,
        sequence: int,
        raw: bytes,
        at_ms: float,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.digest = digest
        self.instance_id = instance_id
        self.raw = raw
        self.at_ms = at_ms
        self.older: Answer | None = None
        """The same request's answer before this one, while it is kept."""
        self._bookings = bookings
        self._sequence = sequence

    def release(self) -> bool:
        """Take the booking back; False when it is covered, expired, released or void with its agent's life."""
        return self._bookings.release(self._sequence)


class Answers:
    """Bounded by count and age; what falls out while young is counted. Not safe by itself: the decider locks."""

    def __init__(self, capacity: int = CAPACITY, keep_ms: float = KEEP_MS) -> None:
        self.overflowed = 0
        """Answers forgotten before their time."""
        self._capacity = capacity
        self._keep_ms = keep_ms
        self._newest: dict[str, Answer] = {}
        self._order: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self._order)

    def find(self, request_id: str, attempt: int, now_ms: float) -> Answer | None:
        """The answer given for this identity, if it is still young enough to be given again."""
        answer = self._newest.get(request_id)
        while answer is not None and answer.attempt != attempt:
            answer = answer.older
        return None if answer is None or now_ms - answer.at_ms > self._keep_ms else answer

    def newest(self, request_id: str, now_ms: float) -> Answer | None:
        """The answer of the request's highest attempt."""
        answer = self._newest.get(request_id)
        return None if answer is None or now_ms - answer.at_ms > self._keep_ms else answer

    def add(self, answer: Answer) -> None:
        """Keep an answer; the caller has seen that its attempt is the request's highest."""
        order = self._order
        if order and (answer.at_ms - order[0].at_ms > self._keep_ms or len(order) >= self._capacity):
            self.forget(answer.at_ms, _FORGET_A_CALL)
        request_id = answer.request_id
        newest = self._newest
        if request_id in newest:
            answer.older = newest[request_id]
        newest[request_id] = answer
        order.append(answer)

    def forget(self, now_ms: float, most: int) -> int:
        """Drop at most ``most`` answers that are too old or too many; how many that were."""
        order = self._order
        dropped = 0
        while order and dropped < most:
            old = now_ms - order[0].at_ms > self._keep_ms
            if not old and len(order) < self._capacity:
                break
            self.overflowed += not old
            self._drop(order.popleft())
            dropped += 1
        return dropped

    def _drop(self, answer: Answer) -> None:
        newer = self._newest[answer.request_id]
        if newer is answer:
            del self._newest[answer.request_id]
            return
        # Answers are dropped oldest first, so this one is the last of its request's.
        while newer.older is not None and newer.older is not answer:
            newer = newer.older
        newer.older = None
