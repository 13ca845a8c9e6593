"""What a reader of the pool's state holds of one instance: index, load, own bookings, and how fresh they are.

It refuses an update whose base it does not hold; the caller then loads the whole state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dualmap.core.blocks import Chain
from dualmap.core.bookings import Bookings
from dualmap.core.kv_index import KvIndex
from dualmap.core.load import parts_before, work_due_before
from dualmap.core.membership import InstanceState, Member
from dualmap.core.state import LoadReport, StateUpdate

_ACTIVE = InstanceState.ACTIVE
"""Here because an enum's member is looked up slowly, and this is asked several times a decision."""

DEFAULT_BOOKING_TTL_MS = 2_000.0
"""A booking that no report covers within this time is dropped (design: bookings)."""


@dataclass(slots=True, eq=False)
class InstanceView:
    """One instance as seen from here. ``router_id`` is 0 where the reader books nothing."""

    instance_id: str
    member: Member | None = None
    kv: KvIndex = field(default_factory=KvIndex)
    load: LoadReport = field(default_factory=LoadReport)
    bookings: Bookings = field(default_factory=Bookings)
    incarnation: int = 0
    agent_epoch: int = 0
    version: int = 0
    reachable: bool = True
    heard_at_ms: float | None = None
    router_id: int = 0
    booking_ttl_ms: float = DEFAULT_BOOKING_TTL_MS
    diverged: int = 0
    """Times the index differed from the digest of an update at the same version."""
    _due_load: LoadReport | None = None
    _due_s: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def eligible(self) -> bool:
        """Whether new work may go there: reachable, ACTIVE, and not reported as stuck."""
        member = self.member
        return self.reachable and member is not None and member.state is _ACTIVE and not self.load.suspect

    def age_ms(self, now_ms: float) -> float:
        """Age of the state in milliseconds; negative: never heard."""
        return -1.0 if self.heard_at_ms is None else max(0.0, now_ms - self.heard_at_ms)

    def work_due_s(self, bucket: int, pclass: int) -> float:
        """Waiting work, reported and booked, that goes before a request of this slack bucket and class: seconds.

        As ``load.work_due_before``, but the report's share is summed once a report instead of once a look.
        """
        load = self.load
        if self._due_load is not load:
            self._due_load = load
            self._due_s = {}
        place = (bucket, pclass)
        due = self._due_s.get(place)
        if due is None:
            due = self._due_s[place] = work_due_before(load, None, bucket, pclass)
        bookings = self.bookings
        if bookings.booked_s:
            booked = bookings.waiting_s
            booked_due = 0.0
            for part in parts_before(load.queue_policy, bucket, pclass):
                booked_due += sum(booked[part])
            due += booked_due
        return due

    def hit_tokens(self, chain: Chain) -> tuple[int, int]:
        """Prompt tokens of the leading run held by the index, and with what was sent here counted as held.

        In the second slower tiers count at their discount: what they are worth in tokens on the device.
        """
        hashes = chain.hashes
        kv = self.kv
        blocks = kv.leading_blocks(hashes, self.load.prefix_closed)
        if kv.slow and blocks:
            return self._discounted(chain, blocks)
        tokens = chain.block_tokens
        prompt = chain.prompt_tokens
        indexed = blocks * tokens
        if indexed > prompt:  # a caller's last block may reach beyond the prompt
            indexed = prompt
        elif blocks < len(hashes) and (extra := self.bookings.extra_blocks(hashes, blocks)):
            return indexed, min((blocks + extra) * tokens, prompt)
        return indexed, indexed

    def _discounted(self, chain: Chain, blocks: int) -> tuple[int, int]:
        hashes, tokens, prompt = chain.hashes, chain.block_tokens, chain.prompt_tokens
        indexed = min(blocks * tokens, prompt)
        load = self.load
        lost = self.kv.lost_blocks(hashes, blocks, load.host_discount, load.remote_discount, load.prefix_closed)
        extra = self.bookings.extra_blocks(hashes, blocks) if blocks < len(hashes) else 0
        return indexed, max(0, min((blocks + extra) * tokens, prompt) - lost * tokens)

    def apply(self, update: StateUpdate, now_ms: float) -> bool:
        """Take an update in. False: its base is not held here, or the index diverged; load the whole state.

        What is already held is ignored. A new life of the agent voids the bookings; a new life of the KV cache
        comes only with a whole snapshot, which replaces the index.
        """
        same_life = update.incarnation == self.incarnation and update.agent_epoch == self.agent_epoch
        if same_life and self.heard_at_ms is not None and update.version < self.version:
            return True
        if not update.full and not (same_life and self.heard_at_ms is not None and update.since <= self.version):
            return False
        if update.agent_epoch != self.agent_epoch:
            self.bookings = Bookings()
        if update.snapshot is not None:
            self.kv.replace(update.snapshot)
        elif update.changes:
            self.kv.apply(update.changes)
        self.incarnation, self.agent_epoch, self.version = update.incarnation, update.agent_epoch, update.version
        self.heard_at_ms = now_ms
        if update.load is not None:
            self._take_load(update.load, now_ms)
        if self.kv.digest != update.kv_digest:
            self.diverged += 1
            return False
        return True

    def _take_load(self, load: LoadReport, now_ms: float) -> None:
        self.load = load
        for seen in load.tickets:
            if seen.router_id == self.router_id:
                self.bookings.cover(seen)
        self.bookings.expire(now_ms, self.booking_ttl_ms)
