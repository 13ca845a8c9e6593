"""Who else could run a request: from the ring as known, addresses from nowhere else. Calls nobody."""

from __future__ import annotations

from collections.abc import Callable

from dualmap.core.keys import SplitTable, key_of, request_key
from dualmap.core.membership import InstanceState, Member, RingSnapshot
from dualmap.core.ring import Ring
from services.instanceagent.request import HeldRequest


class Candidates:
    """The ring, its members by id, and each request's pair on it; the rings are built when first asked for."""

    def __init__(self, snapshot: Callable[[], RingSnapshot | None]) -> None:
        self._snapshot = snapshot
        self._members_of: RingSnapshot | None = None
        self._members: dict[str, Member] = {}
        self._built: tuple[RingSnapshot, Ring, SplitTable] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the ring known; 0: none yet."""
        snapshot = self._snapshot()
        return snapshot.epoch if snapshot is not None else 0

    def member(self, instance_id: str) -> Member | None:
        """The member of that id."""
        snapshot = self._snapshot()
        if snapshot is not self._members_of:
            self._members_of = snapshot
            self._members = {member.instance_id: member for member in snapshot.members} if snapshot else {}
        return self._members.get(instance_id)

    def eligible(self, instance_id: str) -> bool:
        """Whether the ring lets new work go there."""
        member = self.member(instance_id)
        return member is not None and member.state is InstanceState.ACTIVE

    def address_of(self, instance_id: str) -> str | None:
        """Where to reach an eligible instance; None where there is none of that id."""
        member = self.member(instance_id)
        return member.grpc_address if member is not None and self.eligible(instance_id) else None

    def other(self, request: HeldRequest, avoid: frozenset[str]) -> str | None:
        """The best other candidate: of the ticket's pair first, then of the pair on the ring without ``avoid``."""
        ticket = request.submission.ticket
        for instance_id in ticket.candidate_ids if ticket is not None else ():
            if instance_id not in avoid and self.eligible(instance_id):
                return instance_id
        snapshot = self._snapshot()
        if snapshot is None:
            return None
        if self._built is None or self._built[0] is not snapshot:
            ring = Ring.build(snapshot.members, snapshot.parameters)
            self._built = (snapshot, ring, SplitTable.build(snapshot.splits))
        _, ring, splits = self._built
        key, blocks = key_of(request.submission.chain.hashes, snapshot.parameters.start_depth, splits)
        if not blocks:
            key = request_key(request.request_id)
        first, second = ring.pair(key, lambda name: name not in avoid and self.eligible(name))
        return first or second
