"""One round after another: observe, list the few in trouble, plan, send one batch a source. Decides no move itself.

A source that fails costs its own part of the round only; a process that does not lead sends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dualmap.core.errors import Unavailable
from dualmap.core.rebalance import Move, QueuePicture, RebalanceOptions, plan
from dualmap.rpc.convert_rebalance import MigrateBatch, PlannedMove, QueueList, RebalancerStatus
from dualmap.rpc.queue_calls import QueueCallError, QueueCalls
from dualmap.rpc.request_events import MoveOutcome
from dualmap.runtime.logs import get_log
from dualmap.view.cluster_view import ClusterView
from services.rebalancer.metrics import RebalancerMetrics
from services.rebalancer.settings import RoundSettings
from services.rebalancer.sources import Source, sources_of

RETRY_MS = 1_000

_log = get_log("rebalancer")
_traces = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Outside:
    """All that a round touches: the view, the agents, the lead, the clock, the tracer."""

    view: ClusterView
    agents: QueueCalls
    fencing_epoch: Callable[[], int | None]
    now_s: Callable[[], float]
    tracer: trace.Tracer


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan with the lists it rests on."""

    ring_epoch: int
    moves: tuple[Move, ...]
    lists: dict[str, tuple[Source, QueueList]]
    failed: int
    plan_ms: float


class Rounds:
    """The rebalancer of one pool."""

    def __init__(self, settings: RoundSettings, outside: Outside, metrics: RebalancerMetrics) -> None:
        self._settings = settings
        self._options: RebalanceOptions = settings.options
        self._outside = outside
        self._metrics = metrics
        self._moved_s: dict[str, float] = {}
        self._rounds = 0
        self._failed_rounds = 0
        self._planned = 0
        self._moved = 0
        self._last_plan_ms = 0.0
        self._last_fencing = 0
        self._last_moves: tuple[PlannedMove, ...] = ()

    async def turn(self) -> None:
        """One round, while leading. Whatever fails in it is counted and does not reach the next."""
        epoch = self._outside.fencing_epoch()
        self._metrics.leader.set(epoch is not None)
        if epoch is None or self._outside.view.picture is None:
            return
        self._last_fencing = epoch
        self._rounds += 1
        self._metrics.rounds.inc()
        began_s = self._outside.now_s()
        try:
            failed = await self._round()
        except Exception:
            self._count_failed_round()
            raise
        if failed:
            self._count_failed_round()
        self._metrics.round_seconds.observe(self._outside.now_s() - began_s)

    async def plan_once(self) -> Plan:
        """Plan and send nothing, leader or not. Raises Unavailable before the first ring."""
        if self._outside.view.picture is None:
            raise Unavailable("the ring", RETRY_MS)
        return await self._plan(self._sources())

    def status(self) -> RebalancerStatus:
        """How it does."""
        return RebalancerStatus(
            ring_epoch=self._outside.view.epoch,
            leader=self._outside.fencing_epoch() is not None,
            fencing_epoch=self._last_fencing,
            period_ms=self._settings.period_ms,
            rounds=self._rounds,
            failed_rounds=self._failed_rounds,
            planned=self._planned,
            moved=self._moved,
            last_plan_ms=self._last_plan_ms,
            last_moves=self._last_moves,
            dry_run=self._settings.dry_run,
        )

    async def _round(self) -> bool:
        """Whether some source failed."""
        sources = self._sources()
        if not sources:
            return False
        with self._outside.tracer.start_as_current_span("rebalance.round") as span:
            planned = await self._plan(sources)
            span.set_attribute("dualmap.pool", self._outside.view.pool)
            span.set_attribute("dualmap.ring_epoch", planned.ring_epoch)
            span.set_attribute("dualmap.sources", len(sources))
            span.set_attribute("dualmap.moves", len(planned.moves))
            self._planned += len(planned.moves)
            self._metrics.planned(list(planned.moves))
            self._last_plan_ms = planned.plan_ms
            if not planned.moves:
                return planned.failed > 0
            results, failed = ([PlannedMove(move) for move in planned.moves], 0)
            if not self._settings.dry_run:
                results, failed = await self._send(planned)
            self._last_moves = tuple(results)
        await self._outside.agents.keep(self._addresses())
        return planned.failed + failed > 0

    def _sources(self) -> tuple[Source, ...]:
        picture = self._outside.view.picture
        if picture is None:
            return ()
        views = self._outside.view.instances.values()
        return sources_of(views, picture.default_slo_s, self._options.stalled_after_ms)

    async def _plan(self, sources: Iterable[Source]) -> Plan:
        sources = tuple(sources)
        lists = await asyncio.gather(*(self._list(source) for source in sources))
        found = {source.instance_id: (source, got) for source, got in zip(sources, lists, strict=True) if got}
        picture = self._outside.view.picture
        if picture is None:
            raise Unavailable("the ring", RETRY_MS)
        pictures = [self._settled(got.picture) for _, got in found.values()]
        began_s = self._outside.now_s()
        moves = plan(pictures, self._outside.view.instances, picture, self._options, self._outside.view.clock_ms())
        took_s = self._outside.now_s() - began_s
        self._metrics.plan_seconds.observe(took_s)
        moves.sort(key=lambda move: -move.gain_s)
        return Plan(picture.epoch, tuple(moves), found, len(sources) - len(found), took_s * 1_000)

    async def _list(self, source: Source) -> QueueList | None:
        timeout_s = self._settings.list_timeout_ms / 1_000
        try:
            got = await self._outside.agents.list_queue(source.address, source.instance_id, source.suspect, timeout_s)
        except QueueCallError as error:
            self._metrics.list_failures.inc()
            _log.warning("queue_not_listed", instance=source.instance_id, code=error.problem.code.name)
            return None
        self._metrics.listed.inc()
        return got

    def _settled(self, picture: QueuePicture) -> QueuePicture:
        """The picture, with what we moved ourselves: the agent that holds it now may not know when."""
        now_s = self._outside.now_s()
        settle_s = self._settings.settle_ms / 1_000
        self._moved_s = {name: at_s for name, at_s in self._moved_s.items() if now_s - at_s < settle_s}
        if not self._moved_s:
            return picture
        items = tuple(
            replace(item, moved_ago_ms=(now_s - self._moved_s[item.request_id]) * 1_000)
            if item.request_id in self._moved_s
            else item
            for item in picture.items
        )
        return replace(picture, items=items)

    async def _send(self, planned: Plan) -> tuple[list[PlannedMove], int]:
        by_source: dict[str, list[Move]] = {}
        for move in planned.moves:
            by_source.setdefault(move.source, []).append(move)
        carrier: dict[str, str] = {}
        _traces.inject(carrier)
        traceparent = carrier.get("traceparent", "")
        answers = await asyncio.gather(
            *(self._migrate(*planned.lists[name], tuple(moves), traceparent) for name, moves in by_source.items())
        )
        results = {(done.move.request_id, done.move.source): done for answer, _ in answers for done in answer}
        ordered = [results[(move.request_id, move.source)] for move in planned.moves]
        return ordered, sum(failed for _, failed in answers)

    async def _migrate(
        self, source: Source, queue: QueueList, moves: tuple[Move, ...], traceparent: str
    ) -> tuple[list[PlannedMove], bool]:
        # Read now, not at the start of the round: the lists took their time.
        epoch = self._outside.fencing_epoch()
        if epoch is None:
            self._metrics.unlead_rounds.inc()
            return [PlannedMove(move) for move in moves], False
        batch = MigrateBatch(source.instance_id, queue.token, moves, epoch, traceparent)
        outcomes: tuple[MoveOutcome | None, ...] = (None,) * len(moves)
        failed = False
        try:
            outcomes = await self._outside.agents.migrate(
                source.address, batch, self._settings.migrate_timeout_ms / 1_000
            )
        except QueueCallError as error:
            failed = True
            self._metrics.migrate_failures.inc()
            outcomes = (_outcome_of(error),) * len(moves)
            _log.warning("batch_failed", instance=source.instance_id, code=error.problem.code.name, moves=len(moves))
        now_s = self._outside.now_s()
        for move, outcome in zip(moves, outcomes, strict=True):
            self._metrics.outcome(outcome)
            # Unanswered may still have moved.
            if outcome in (MoveOutcome.MOVED, None):
                self._moved_s[move.request_id] = now_s
            self._moved += outcome is MoveOutcome.MOVED
        return [PlannedMove(*pair) for pair in zip(moves, outcomes, strict=True)], failed

    def _addresses(self) -> frozenset[str]:
        members = (view.member for view in self._outside.view.instances.values())
        return frozenset(member.grpc_address for member in members if member is not None)

    def _count_failed_round(self) -> None:
        self._failed_rounds += 1
        self._metrics.failed_rounds.inc()


def _outcome_of(error: QueueCallError) -> MoveOutcome | None:
    """A whole batch refused is known not to have moved."""
    return MoveOutcome.STALE_PLAN if error.problem.reason in ("STALE_PLAN", "STALE_LEADER") else None
