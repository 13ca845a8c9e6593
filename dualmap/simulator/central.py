"""One queue for all instances, with an instant view of every cache: what no set of agents could do. A ceiling only."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

from dualmap.core.engine_model import BlocksRemoved, BlocksStored, EngineEvent
from dualmap.core.kv_index import KvIndex
from dualmap.core.queue_order import feasible
from dualmap.core.state import PrefillCost
from dualmap.simulator.instance import SimInstance
from dualmap.simulator.options import ClusterOptions
from dualmap.simulator.requests import SimRequest

EXTRA_WEIGHT = 4.0
"""Seconds of slack that a second of work beyond the best cache's outweighs."""


class _Column:
    """What every waiting request would cost on one instance, kept as its cache changes."""

    def __init__(self, instance: SimInstance) -> None:
        self.instance = instance
        self.runs: dict[str, int] = {}
        """Leading blocks held."""
        self.costs: dict[str, float] = {}
        self._kv: KvIndex = instance.kv
        self._cost: PrefillCost = instance.known_cost

    def add(self, request: SimRequest) -> None:
        chain = request.chain
        run = self.instance.kv.leading_blocks(chain.hashes)
        miss = chain.prompt_tokens - min(chain.prompt_tokens, run * chain.block_tokens)
        self.runs[request.request_id] = run
        self.costs[request.request_id] = self.instance.known_cost.seconds(miss, chain.prompt_tokens)

    def drop(self, request_id: str) -> None:
        del self.runs[request_id], self.costs[request_id]

    def renew(self, waiting: Iterable[SimRequest]) -> None:
        """After a new life of the cache or another cost: everything anew."""
        instance = self.instance
        if self._kv is instance.kv and self._cost is instance.known_cost:
            return
        self._kv, self._cost = instance.kv, instance.known_cost
        for request in waiting:
            self.add(request)

    def changed(self, blocks: set[int], waiting: Iterable[SimRequest], *, stored: bool) -> None:
        """Correct those whose leading run ends, or ended, at one of these blocks."""
        for request in waiting:
            hashes = request.chain.hashes
            run = self.runs[request.request_id]
            if (run < len(hashes) and hashes[run] in blocks) if stored else not blocks.isdisjoint(hashes[:run]):
                self.add(request)


class CentralQueue:
    """Waiting requests of the whole cluster, earliest deadline first."""

    def __init__(self, options: ClusterOptions) -> None:
        self._ordered: list[tuple[float, int, SimRequest]] = []
        self._late: list[SimRequest] = []
        """Deadline passed: they can only be the oldest of what nobody keeps."""
        self._columns: dict[str, _Column] = {}
        self._options = options

    def __len__(self) -> int:
        return len(self._ordered) + len(self._late)

    def push(self, request: SimRequest, instances: Iterable[SimInstance]) -> None:
        """Add a request."""
        self._renew(instances)
        bisect.insort(self._ordered, (request.deadline_s, request.index, request))
        for column in self._columns.values():
            column.add(request)

    def note(self, instance: SimInstance, events: Iterable[EngineEvent]) -> None:
        """Follow what an engine stored and dropped; the instance's index has taken it in."""
        for event in events:
            if isinstance(event, BlocksStored | BlocksRemoved):
                blocks = set(event.hashes)
                waiting = [request for _, _, request in self._ordered]
                for column in self._columns.values():
                    if column.instance.kv is instance.kv:
                        column.changed(blocks, waiting, stored=isinstance(event, BlocksStored))

    def by_suitability(self, request: SimRequest, instances: Iterable[SimInstance]) -> list[SimInstance]:
        """The instances with room, the cheapest for this request first."""
        free = [one for one in instances if one.alive and one.room_tokens() > 0]
        return sorted(free, key=lambda one: (one.cost_s(request.chain), one.number))

    def pick(
        self, instance: SimInstance, instances: Mapping[str, SimInstance], now_s: float, room_tokens: int
    ) -> SimRequest | None:
        """Take out what this instance should run next; None: nothing fits, or all would better wait for another."""
        if not self._ordered and not self._late:
            return None
        self._renew(instances.values())
        self._expire(now_s)
        alive = [self._columns[name].costs for name, one in instances.items() if one.alive]
        start_s = now_s + instance.rest_s(now_s)
        costs = self._columns[instance.instance_id].costs
        live = [
            (deadline_s, cost_s, request)
            for deadline_s, _, request in self._ordered
            if start_s + (cost_s := costs[request.request_id]) <= deadline_s
        ]
        share = [(deadline_s, cost_s / len(alive)) for deadline_s, cost_s, _ in live]
        kept = [live[place] for place in feasible(share, start_s)[0]]
        best: tuple[float, SimRequest] | None = None
        for deadline_s, cost_s, request in kept:
            slack_s = deadline_s - start_s - cost_s
            if best is not None and slack_s >= best[0]:
                continue
            extra_s = cost_s - min(other[request.request_id] for other in alive)
            if extra_s > 0.0 and extra_s * EXTRA_WEIGHT > self._options.ttft_slo_s - slack_s:
                continue
            score = EXTRA_WEIGHT * extra_s + slack_s
            if best is None or score < best[0]:
                best = (score, request)
        if best is not None:
            chosen = best[1]
        elif kept:
            return None
        else:
            rest = (*self._late, *(request for _, _, request in self._ordered))
            chosen = min(rest, key=lambda one: (one.arrival_s, one.index))
        if instance.hit_and_miss(chosen.chain)[1] > room_tokens:
            return None
        self._take_out(chosen)
        return chosen

    def _renew(self, instances: Iterable[SimInstance]) -> None:
        waiting = [request for _, _, request in self._ordered]
        for instance in instances:
            column = self._columns.get(instance.instance_id)
            if column is None:
                column = self._columns[instance.instance_id] = _Column(instance)
                for request in waiting:
                    column.add(request)
            else:
                column.renew(waiting)

    def _expire(self, now_s: float) -> None:
        passed = bisect.bisect_left(self._ordered, (now_s,))
        for _, _, request in self._ordered[:passed]:
            self._late.append(request)
            for column in self._columns.values():
                column.drop(request.request_id)
        del self._ordered[:passed]

    def _take_out(self, request: SimRequest) -> None:
        if request in self._late:
            self._late.remove(request)
            return
        place = bisect.bisect_left(self._ordered, (request.deadline_s, request.index))
        del self._ordered[place]
        for column in self._columns.values():
            column.drop(request.request_id)
