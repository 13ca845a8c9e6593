"""Which (request id, attempt) this agent holds or ended lately: nothing runs twice. Bounded in count and time."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from dualmap.core.errors import AlreadyExists, Superseded
from services.instanceagent.request import HeldRequest

KEPT_MS = 60_000.0
MAX_KEPT = 262_144

K = TypeVar("K")


class Identities:
    """Requests held by all instances of one agent, those ended for their client, and hand-over numbers seen."""

    def __init__(self, kept_ms: float = KEPT_MS, max_kept: int = MAX_KEPT) -> None:
        self._kept_ms = kept_ms
        self._max_kept = max_kept
        self._held: dict[str, list[HeldRequest]] = {}
        self._ended: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._handovers: OrderedDict[tuple[str, str, int], tuple[int, float]] = OrderedDict()
        self.overflowed = 0

    @property
    def held(self) -> int:
        """Ids of requests held."""
        return len(self._held)

    def find(self, request_id: str, attempt: int, instance_id: str) -> HeldRequest | None:
        """The request as that instance holds it."""
        for request in self._held.get(request_id, ()):
            if request.attempt == attempt and request.instance_id == instance_id:
                return request
        return None

    def check_submit(self, request_id: str, attempt: int, now_ms: float) -> None:
        """Raises AlreadyExists or Superseded for an attempt held, ended, or below one that is."""
        self._check_ended(request_id, attempt, now_ms)
        highest = max((held.attempt for held in self._held.get(request_id, ())), default=0)
        if attempt == highest:
            raise AlreadyExists(request_id, attempt, "is held here")
        if attempt < highest:
            raise Superseded(request_id, attempt)

    def check_accept(self, request_id: str, attempt: int, instance_id: str, number: int, now_ms: float) -> None:
        """The same for a hand-over, whose ``number`` must be higher than any seen.

        What the instance holds under a lower number is of a stream that its origin gave up: see `lower`.
        """
        self._check_ended(request_id, attempt, now_ms)
        if any(held.attempt > attempt for held in self._held.get(request_id, ())):
            raise Superseded(request_id, attempt)
        held = self.find(request_id, attempt, instance_id)
        if held is not None and held.came is None:
            raise AlreadyExists(request_id, attempt, "was submitted here")
        key = (instance_id, request_id, attempt)
        seen, _ = self._handovers.get(key, (0, 0.0))
        if number <= seen:
            raise AlreadyExists(request_id, attempt, f"came with hand-over {seen} already")
        self._handovers.pop(key, None)
        self._handovers[key] = (number, now_ms)
        self._trim(self._handovers, now_ms)

    def lower(self, request_id: str, attempt: int) -> list[HeldRequest]:
        """Held requests that give way to this attempt."""
        return [held for held in self._held.get(request_id, ()) if held.attempt < attempt]

    def hold(self, request: HeldRequest) -> None:
        """It is here now."""
        self._held.setdefault(request.request_id, []).append(request)

    def release(self, request: HeldRequest, *, ended: bool, now_ms: float) -> None:
        """It is not here any more. ``ended``: finished, failed or cancelled for its client, so never to run again."""
        held = self._held.get(request.request_id, [])
        if request in held:
            held.remove(request)
            if not held:
                del self._held[request.request_id]
        if ended:
            attempt = max(request.attempt, self._ended.pop(request.request_id, (0, 0.0))[0])
            self._ended[request.request_id] = (attempt, now_ms)
            self._trim(self._ended, now_ms)

    def all_held(self) -> list[HeldRequest]:
        """Every request held."""
        return [request for held in self._held.values() for request in held]

    def _check_ended(self, request_id: str, attempt: int, now_ms: float) -> None:
        ended, at_ms = self._ended.get(request_id, (0, 0.0))
        if not ended or now_ms - at_ms > self._kept_ms or attempt > ended:
            return
        if attempt == ended:
            raise AlreadyExists(request_id, attempt, "has ended here")
        raise Superseded(request_id, attempt)

    def _trim(self, table: OrderedDict[K, tuple[int, float]], now_ms: float) -> None:
        while table:
            at_ms = next(iter(table.values()))[1]
            if now_ms - at_ms <= self._kept_ms:
                if len(table) <= self._max_kept:
                    return
                self.overflowed += 1
            table.popitem(last=False)
