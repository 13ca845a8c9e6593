"""Keeps one pool's ring in this process: leads or follows, publishes each change, tells the watchers.

Changes are made only while leading. Decides nothing that `membership`, `draft` or `heat` could decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from dualmap.core.errors import NotLeader, ParameterMismatch, Unavailable
from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot
from dualmap.rpc.convert_ring import HeatReport, Join, Renew
from dualmap.runtime.logs import get_log
from services.ringmanager.draft import Draft
from services.ringmanager.heat import HeatRules, PoolHeat
from services.ringmanager.membership import LeaseRules, Membership
from services.ringmanager.metrics import RingManagerMetrics
from services.ringmanager.moved import MovedShares
from services.ringmanager.publisher import Published, Publisher
from services.ringmanager.watchers import WatcherHub

RETRY_MS = 300
"""Delay told to callers; a takeover or a Redis retry lasts about so long."""

GATHER_S = 0.02
"""A pool that starts joins all at once: an epoch for each instance would send every watcher n rings of n members."""

HEAT_CHUNK = 64
"""Samples counted before other calls get their turn: some 1 ms of tree work."""

_log = get_log("ring")


@dataclass(frozen=True, slots=True)
class KeeperRules:
    """What a ring manager is told about its pool."""

    pool: str
    parameters: RingParameters
    default_ttft_slo_ms: int = 5_000
    grace_s: float = 60.0
    heartbeat_s: float = 5.0
    most_watches: int = 4_096
    leases: LeaseRules = field(default_factory=LeaseRules)
    heat: HeatRules = field(default_factory=HeatRules)


@dataclass(frozen=True, slots=True)
class Lead:
    """Whether this process leads (its fencing epoch, or None), and who does as far as is known."""

    epoch: Callable[[], int | None]
    leader: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class RingNow:
    """What GetRing tells."""

    ring: RingSnapshot
    leader: bool
    last_moved_share: float


class RingKeeper:
    """The ring of one pool. Calls raise NotLeader on a standby, Unavailable while Redis does not take a change."""

    def __init__(
        self,
        rules: KeeperRules,
        publisher: Publisher,
        lead: Lead,
        metrics: RingManagerMetrics,
        now_s: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._publisher = publisher
        self._lead = lead
        self._metrics = metrics
        self._now_s = now_s
        self._lock = asyncio.Lock()
        self._membership = Membership(rules.leases, now_s())
        self._heat = PoolHeat(rules.heat)
        self._draft = Draft(
            RingSnapshot(rules.pool, 0, rules.parameters, default_ttft_slo_ms=rules.default_ttft_slo_ms)
        )
        self._reign: int | None = None
        self._cold = False
        self._rebuild_until_s = 0.0
        self._unmeasured: tuple[tuple[Member, ...], tuple[Member, ...]] | None = None
        self._last_moved_share = 0.0
        self._moved = MovedShares(rules.parameters)
        self._gathering: asyncio.Future[None] | None = None
        self.watchers = WatcherHub(rules.heartbeat_s, metrics.cut_off.inc, rules.most_watches)

    @property
    def lease_ms(self) -> int:
        """Lease of an instance, milliseconds."""
        return round(self._rules.leases.lease_s * 1000)

    @property
    def epoch(self) -> int:
        """Epoch of the ring this process knows; 0: none."""
        return self._draft.snapshot.epoch

    # --- reads, on leader and standby alike ---

    def ring(self) -> RingSnapshot:
        """The ring known here, its grace period as it stands now."""
        snapshot = self._draft.snapshot
        if snapshot.previous is None:
            return snapshot
        left_ms = round((self._draft.grace_until_s - self._now_s()) * 1000)
        previous = replace(snapshot.previous, grace_left_ms=left_ms) if left_ms > 0 else None
        return replace(snapshot, previous=previous)

    def get_ring(self) -> RingNow:
        """The ring, whether this process leads, and what the last change of the ring moved."""
        return RingNow(self.ring(), self._leads(), self._last_moved_share)

    def watch(self, known_epoch: int) -> AsyncGenerator[RingSnapshot | None, None]:
        """The ring at once where it is newer than ``known_epoch``, then each change; None is a sign of life."""
        self._publisher.heard(known_epoch)
        newer = self._draft.snapshot.epoch > known_epoch
        return self.watchers.watch(self.ring() if newer else None)

    # --- changes, on the leader only ---

    async def join(self, join: Join) -> Member:
        """Bring an instance in. Raises ParameterMismatch naming the field, OlderLife, InvalidRequest."""
        self._refuse_other_parameters(join)
        async with self._lock:
            self._hear(join.highest_epoch_seen)
            await self._take_duty()
            now_s = self._now_s()
            was_member = now_s < self._rebuild_until_s and join.highest_epoch_seen > 0
            member = self._membership.join(join.wish, now_s, was_member)
            reign = self._reign
        await self._publish_together(reign)
        self._metrics.joined.inc()
        return member

    async def renew(self, renew: Renew) -> tuple[InstanceState, ...]:
        """Hear an agent's instances, also while Redis does not answer. The change is published by the next turn."""
        await self._lead_now()
        self._hear(renew.highest_epoch_seen)
        now_s = self._now_s()
        return tuple(
            self._membership.renew(renewal.instance_id, renew.agent_epoch, renewal.suspect, now_s)
            for renewal in renew.renewals
        )

    async def drain(self, instance_id: str) -> tuple[Member, float]:
        """Stop new work for an instance; also the share of pairs that change once it left. Raises UnknownInstance."""
        async with self._lock:
            await self._take_duty()
            before = self._membership.members
            member = self._membership.drain(instance_id)
            reign = self._reign
        await self._publish_together(reign)
        return member, await asyncio.to_thread(self._moved.without, before, instance_id)

    async def undrain(self, instance_id: str) -> Member:
        """Take a drain back. Raises UnknownInstance."""
        async with self._lock:
            await self._take_duty()
            member = self._membership.undrain(instance_id)
            reign = self._reign
        await self._publish_together(reign)
        return member

    async def leave(self, instance_id: str, agent_epoch: int) -> float:
        """Take an instance off at once; the share of pairs that changed. Idempotent."""
        async with self._lock:
            await self._take_duty()
            # As published last: those that leave together are each measured on one ring.
            before = self._draft.snapshot.members
            gone = self._membership.leave(instance_id, agent_epoch, self._now_s())
            reign = self._reign
        await self._publish_together(reign)
        if gone is None:
            return 0.0
        self._metrics.left.inc()
        _log.info("instance_left", instance=instance_id, agent_epoch=agent_epoch)
        return await asyncio.to_thread(self._moved.without, before, instance_id)

    async def report_heat(self, report: HeatReport) -> bool:
        """Count a router's samples and take the table it offers; whether its table is wanted with the next report."""
        await self._lead_now()
        self._hear(report.highest_epoch_seen)
        digest = self._rules.parameters.digest()
        if report.parameters_digest != digest and (report.samples or report.splits or report.parameters_digest):
            self._metrics.mismatches.inc()
            raise ParameterMismatch("parameters_digest", digest, report.parameters_digest)
        if self._heat.offer(report, self._now_s()):
            self._metrics.restored.inc()
            _log.info("splits_adopted", splits=len(self._heat.splits), epoch=report.splits_epoch)
        for start in range(0, len(report.samples), HEAT_CHUNK):
            self._heat.observe(report.samples[start : start + HEAT_CHUNK], self._now_s())
            await asyncio.sleep(0)
        self._metrics.samples.inc(len(report.samples))
        return self._heat.wants_splits(report)

    # --- the loop ---

    async def turn(self) -> bool:
        """Lead: warm up, judge, plan, publish. Standby: follow what the leader publishes. False: Redis let it not."""
        self._metrics.leader.set(self._leads())
        self._metrics.watchers.set(len(self.watchers))
        try:
            await self._turn()
        except (Unavailable, NotLeader) as error:
            # Ten a second while Redis is away: the health component says it once.
            self._metrics.failed_turns.inc()
            _log.debug("turn_without_effect", problem=error.message)
            return False
        await self._measure()
        return True

    async def _turn(self) -> None:
        async with self._lock:
            if self._lead.epoch() is None:
                self._reign = None
                await self._follow()
                return
            try:
                await self._take_duty()
                if await self._publisher.lost(self._draft.snapshot.epoch, self._now_s()):
                    self._membership.pardon(self._now_s())
                await self._warm_up()
            except Unavailable:
                # Whoever is silent now may be so for the same reason as Redis.
                self._membership.pardon(self._now_s())
                raise
            self._judge()
            active = sum(member.state is InstanceState.ACTIVE for member in self._membership.members)
            self._heat.plan(active, self._now_s())
            await self._publish()

    async def _publish_together(self, reign: int | None) -> None:
        """Publish within `GATHER_S`; all that ask meanwhile share one epoch. Raises as `_publish` does, to each.

        ``reign``: the one in which the change was made; where it ended, the change is lost and Unavailable is raised.
        """
        if self._gathering is None:
            self._gathering = asyncio.ensure_future(self._gathered())
            self._gathering.add_done_callback(_seen)
        await asyncio.shield(self._gathering)
        if self._reign != reign:
            # The members were taken over anew from the store, and this change was not among them.
            raise Unavailable("the lead", RETRY_MS)

    async def _gathered(self) -> None:
        await asyncio.sleep(GATHER_S)
        async with self._lock:
            # Whoever changes something from now on needs the next one.
            self._gathering = None
            await self._publish()

    async def _follow(self) -> None:
        snapshot = await self._publisher.newer(self._draft.snapshot.epoch)
        if snapshot is not None:
            self._show(Draft.adopted(snapshot, self._now_s()))

    async def _take_duty(self) -> None:
        """Begin the reign if it is new: take over the stored ring, or the one remembered where Redis lost it."""
        fencing = self._lead.epoch()
        if fencing is None:
            raise NotLeader(self._lead.leader())
        if fencing == self._reign:
            return
        snapshot = await self._publisher.begin(self._draft.snapshot.epoch)
        now_s = self._now_s()
        if snapshot is not None:
            self._draft = Draft.adopted(snapshot, now_s)
        mine = replace(
            self._draft.snapshot,
            parameters=self._rules.parameters,
            default_ttft_slo_ms=self._rules.default_ttft_slo_ms,
        )
        if mine != self._draft.snapshot:
            self._draft = replace(self._draft, snapshot=mine)
            self._publisher.publish_anyway()
        self._membership.adopt(mine.members, now_s)
        self._heat.begin(mine.epoch, mine.splits, now_s)
        self._cold = mine.epoch == 0
        self._reign = fencing
        self._metrics.taken_over.inc()
        _log.info("reign_began", fencing_epoch=fencing, found_epoch=mine.epoch, members=len(mine.members))

    async def _warm_up(self) -> None:
        for member in await self._publisher.full_states(self._membership.warming):
            self._membership.full_state_stored(member.instance_id, member.agent_epoch)

    def _judge(self) -> None:
        for member in self._membership.judge(self._now_s()):
            self._metrics.expired.inc()
            _log.warning("lease_expired", instance=member.instance_id, agent_epoch=member.agent_epoch)

    async def _publish(self) -> None:
        now_s = self._now_s()
        members, splits = self._membership.members, self._heat.splits
        if now_s < self._rebuild_until_s:
            return
        if not (self._publisher.must_publish or self._draft.differs(members, splits, now_s)):
            return
        fencing = self._lead.epoch()
        if fencing is None or fencing != self._reign:
            raise NotLeader(self._lead.leader())
        draft = self._draft.following(
            members, splits, self._publisher.next_epoch(self.epoch), now_s, self._rules.grace_s
        )
        outcome = await self._publisher.publish(draft.snapshot, fencing)
        if outcome is not Published.YES:
            # Take over anew: what is stored is another's.
            self._reign = None
            self._metrics.refused.inc()
            raise Unavailable("the stored ring", RETRY_MS)
        before = self._draft.snapshot.members
        if self._draft.remaps(members, self._draft.snapshot.splits):
            self._unmeasured = (before, members)
        self._heat.published(draft.snapshot.epoch)
        self._metrics.published.inc()
        self._show(draft)

    def _show(self, draft: Draft) -> None:
        self._draft = draft
        self._metrics.ring(draft.snapshot)
        self.watchers.publish(draft.snapshot)

    async def _measure(self) -> None:
        if self._unmeasured is not None:
            before, after = self._unmeasured
            self._unmeasured = None
            # Arithmetic on values that never change: not in the loop.
            self._last_moved_share = await asyncio.to_thread(self._moved.between, before, after)
            self._metrics.moved_share.set(self._last_moved_share)

    # --- what is heard and refused ---

    def _hear(self, epoch: int) -> None:
        self._publisher.heard(epoch)
        if self._cold and epoch > 0:
            # Not a new cluster, but one whose ring is lost: a ring of the first to return would empty every router's
            # view. All get one lease to join again, and routers to offer their split tables.
            self._cold = False
            self._rebuild_until_s = self._now_s() + self._rules.leases.lease_s
            self._metrics.restored.inc()
            _log.warning("ring_lost_rebuilding", highest_epoch_heard=epoch)

    def _leads(self) -> bool:
        epoch = self._lead.epoch()
        return epoch is not None and epoch == self._reign

    async def _lead_now(self) -> None:
        """Waits for Redis only where a reign has just begun. Raises NotLeader, Unavailable."""
        if not self._leads():
            async with self._lock:
                await self._take_duty()

    def _refuse_other_parameters(self, join: Join) -> None:
        ours = self._rules.parameters
        if join.parameters is not None:
            field = ours.first_difference(join.parameters)
            if field is not None:
                self._metrics.mismatches.inc()
                raise ParameterMismatch(f"parameters.{field}", getattr(ours, field), getattr(join.parameters, field))
        if join.parameters_digest not in (0, ours.digest()):
            self._metrics.mismatches.inc()
            raise ParameterMismatch("parameters_digest", ours.digest(), join.parameters_digest)


def _seen(publication: asyncio.Future[None]) -> None:
    """Each caller is told by its own await; where all are gone, the next turn publishes."""
    if not publication.cancelled():
        publication.exception()
