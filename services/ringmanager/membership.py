"""Who belongs to a pool, by whose word and until when: a state machine on injected monotonic time.

Knows no clock, no Redis and no message. It never removes an instance it had no fair chance to hear.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dualmap.core.errors import InvalidRequest, UnknownInstance
from dualmap.core.membership import InstanceState, Member
from services.ringmanager.errors import OlderLife

LEFT_REMEMBERED = 4_096
"""Lives of departed instances kept, so that a late call of an old life is known as such."""

LEFT_REMEMBERED_S = 60.0
"""And so long: a call is late by seconds, but an agent whose clock was set back would have to wait for hours."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """How long silence is forgiven, and how many may fall silent at once."""

    lease_s: float = 3.0
    expiry_share: float = 0.2
    late_s: float = 1.0
    """A judge who comes later than this may have slept through renewals."""


@dataclass(slots=True)
class _Seat:
    member: Member
    heard_s: float
    warmed: bool
    suspect: bool = False


class Membership:
    """Members of one pool as the leader knows them."""

    def __init__(self, rules: LeaseRules, now_s: float) -> None:
        self._rules = rules
        self._seats: dict[str, _Seat] = {}
        self._left: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._expired_s: deque[float] = deque()
        self._pardon_until_s = now_s + rules.lease_s
        self._judged_s = now_s

    @property
    def members(self) -> tuple[Member, ...]:
        """All but those that left, by id."""
        return tuple(self._seats[instance_id].member for instance_id in sorted(self._seats))

    @property
    def warming(self) -> tuple[Member, ...]:
        """Those whose first full state is awaited."""
        return tuple(seat.member for seat in self._seats.values() if not seat.warmed)

    def get(self, instance_id: str) -> Member | None:
        """The member of that id."""
        seat = self._seats.get(instance_id)
        return seat.member if seat else None

    def adopt(self, members: Iterable[Member], now_s: float) -> None:
        """Take over another leader's members; all count as just heard, and none is judged for one full lease."""
        self._seats = {
            member.instance_id: _Seat(
                member,
                now_s,
                warmed=member.state is not InstanceState.WARMING,
                suspect=member.state is InstanceState.SUSPECT,
            )
            for member in members
            if member.state is not InstanceState.LEFT
        }
        self.pardon(now_s)

    def pardon(self, now_s: float) -> None:
        """Judge nobody for one full lease from now: silence till now may have been ours."""
        self._pardon_until_s = now_s + self._rules.lease_s
        self._judged_s = max(self._judged_s, now_s)

    def join(self, wish: Member, now_s: float, was_member: bool = False) -> Member:
        """Bring an instance in, or back in a new life. The same life again changes nothing but address and weight.

        ``was_member``: it was on a ring that was lost, and returns to it without warming up once more.
        Raises OlderLife, and InvalidRequest when it serves another model than the pool.
        """
        self._refuse_old_life(wish, now_s)
        self._refuse_other_model(wish)
        seat = self._seats.get(wish.instance_id)
        if seat is not None and seat.member.agent_epoch == wish.agent_epoch:
            seat.heard_s = now_s
            seat.member = replace(wish, state=seat.member.state)
            return seat.member
        self._left.pop(wish.instance_id, None)
        state = InstanceState.ACTIVE if was_member else InstanceState.WARMING
        member = replace(wish, state=state)
        self._seats[wish.instance_id] = _Seat(member, now_s, warmed=was_member)
        return member

    def renew(self, instance_id: str, agent_epoch: int, suspect: bool, now_s: float) -> InstanceState:
        """Hear an instance. LEFT: this life of it is not a member; it should join again."""
        seat = self._seats.get(instance_id)
        if seat is None or seat.member.agent_epoch != agent_epoch:
            return InstanceState.LEFT
        seat.heard_s = now_s
        seat.suspect = suspect
        if seat.member.state in (InstanceState.ACTIVE, InstanceState.SUSPECT):
            self._settle(seat)
        return seat.member.state

    def full_state_stored(self, instance_id: str, agent_epoch: int) -> bool:
        """Its first full state of that life is stored: WARMING becomes ACTIVE. False when nothing changed."""
        seat = self._seats.get(instance_id)
        if seat is None or seat.warmed or seat.member.agent_epoch != agent_epoch:
            return False
        seat.warmed = True
        if seat.member.state is InstanceState.WARMING:
            self._settle(seat)
        return True

    def drain(self, instance_id: str) -> Member:
        """Stop new work for it. Raises UnknownInstance. Idempotent."""
        seat = self._seat(instance_id)
        seat.member = replace(seat.member, state=InstanceState.DRAINING)
        return seat.member

    def undrain(self, instance_id: str) -> Member:
        """Take a drain back; a member that does not drain stays as it is. Raises UnknownInstance."""
        seat = self._seat(instance_id)
        if seat.member.state is InstanceState.DRAINING:
            self._settle(seat)
        return seat.member

    def leave(self, instance_id: str, agent_epoch: int, now_s: float) -> Member | None:
        """Take it off at once, and return what it was. None: it was gone, or the leave is of an older life.

        ``agent_epoch`` 0 is an operator's word and holds for any life.
        """
        seat = self._seats.get(instance_id)
        if seat is None or 0 < agent_epoch < seat.member.agent_epoch:
            return None
        self._remove(instance_id, now_s)
        return seat.member

    def judge(self, now_s: float) -> tuple[Member, ...]:
        """Remove those unheard for a lease, longest silence first, and return them.

        None during a pardon or when this call itself comes late; at most max(1, ``expiry_share``) of the pool a lease.
        """
        late = now_s - self._judged_s > self._rules.late_s
        self._judged_s = now_s
        if late:
            self.pardon(now_s)
        while self._expired_s and now_s - self._expired_s[0] >= self._rules.lease_s:
            self._expired_s.popleft()
        if now_s < self._pardon_until_s:
            return ()
        silent = sorted(
            (seat for seat in self._seats.values() if now_s - seat.heard_s > self._rules.lease_s),
            key=lambda seat: (seat.heard_s, seat.member.instance_id),
        )
        pool = len(self._seats) + len(self._expired_s)
        allowed = max(1, int(self._rules.expiry_share * pool)) - len(self._expired_s)
        expired = tuple(seat.member for seat in silent[: max(0, allowed)])
        for member in expired:
            self._remove(member.instance_id, now_s)
            self._expired_s.append(now_s)
        return expired

    def _settle(self, seat: _Seat) -> None:
        state = InstanceState.WARMING
        if seat.warmed:
            state = InstanceState.SUSPECT if seat.suspect else InstanceState.ACTIVE
        seat.member = replace(seat.member, state=state)

    def _seat(self, instance_id: str) -> _Seat:
        seat = self._seats.get(instance_id)
        if seat is None:
            raise UnknownInstance(instance_id)
        return seat

    def _remove(self, instance_id: str, now_s: float) -> None:
        self._left[instance_id] = self._seats.pop(instance_id).member.agent_epoch, now_s
        self._left.move_to_end(instance_id)
        while len(self._left) > LEFT_REMEMBERED:
            self._left.popitem(last=False)

    def _refuse_old_life(self, wish: Member, now_s: float) -> None:
        seat = self._seats.get(wish.instance_id)
        known = seat.member.agent_epoch if seat else 0
        if seat is None and (left := self._left.get(wish.instance_id)) is not None:
            epoch, left_s = left
            known = epoch if now_s - left_s < LEFT_REMEMBERED_S else 0
        if wish.agent_epoch < known:
            raise OlderLife(wish.instance_id, known, wish.agent_epoch)

    def _refuse_other_model(self, wish: Member) -> None:
        for seat in self._seats.values():
            other = seat.member
            if other.instance_id != wish.instance_id and other.model and wish.model and other.model != wish.model:
                raise InvalidRequest("model", f"is {wish.model!r}; the pool serves {other.model!r}: join its own pool")
