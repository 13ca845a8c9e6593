"""Answers given in the last 30 s by (request id, attempt), so that a repeated request gets the same one."""

from __future__ import annotations

from collections import deque

from dualmap.core.bookings import Bookings
from dualmap.rpc.convert_route import Booked

CAPACITY = 262_144
KEEP_MS = 30_000.0
_FORGET_A_CALL = 8
"""More than one a call, so that a full memory shrinks; few, so that no call pays for an idle half-minute."""

Identity = tuple[str, int]


class Answer:
    """One answer: its bytes once serialised, and the booking behind it."""

    __slots__ = ("at_ms", "booked", "bookings", "digest", "identity", "instance_id", "raw", "sequence")

    def __init__(self, booked: Booked, digest: int, bookings: Bookings, at_ms: float) -> None:
        self.identity: Identity = (booked.request_id, booked.attempt)
        self.digest = digest
        self.instance_id = booked.decision.chosen.instance_id
        self.sequence = booked.sequence
        self.bookings = bookings
        self.at_ms = at_ms
        self.booked: Booked | None = booked
        self.raw = b""

    def release(self) -> bool:
        """Take the booking back; False when it is covered, expired, released or void with its agent's life."""
        return self.bookings.release(self.sequence)

    def seal(self, raw: bytes) -> None:
        """Keep the bytes only: what they were made from is not needed again."""
        self.raw = raw
        self.booked = None


class Answers:
    """Bounded by count and age; what falls out while young is counted. Not safe by itself: the decider locks."""

    def __init__(self, capacity: int = CAPACITY, keep_ms: float = KEEP_MS) -> None:
        self.overflowed = 0
        """Answers forgotten before their time."""
        self._capacity = capacity
        self._keep_ms = keep_ms
        self._by_identity: dict[Identity, Answer] = {}
        self._newest: dict[str, Answer] = {}
        self._order: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self._by_identity)

    def find(self, identity: Identity, now_ms: float) -> Answer | None:
        """The answer given for this identity, if it is still young enough to be given again."""
        answer = self._by_identity.get(identity)
        return None if answer is None or now_ms - answer.at_ms > self._keep_ms else answer

    def newest(self, request_id: str, now_ms: float) -> Answer | None:
        """The answer of the request's highest attempt; None means that no attempt of it is remembered."""
        answer = self._newest.get(request_id)
        return None if answer is None or now_ms - answer.at_ms > self._keep_ms else answer

    def add(self, answer: Answer) -> None:
        """Keep an answer; the caller has seen that its attempt is the request's highest."""
        order = self._order
        if order and (answer.at_ms - order[0].at_ms > self._keep_ms or len(order) >= self._capacity):
            self.forget(answer.at_ms, _FORGET_A_CALL)
        self._by_identity[answer.identity] = answer
        self._newest[answer.identity[0]] = answer
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
        # A later answer may have taken the place of an expired one with the same identity.
        if self._by_identity.get(answer.identity) is answer:
            del self._by_identity[answer.identity]
        if self._newest.get(answer.identity[0]) is answer:
            del self._newest[answer.identity[0]]
