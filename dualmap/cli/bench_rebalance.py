"""`bench rebalance`: how long a round's plan takes, in this process, for hot and idle instances in equal number."""

from __future__ import annotations

import gc
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from dualmap.cli.bench_workload import HASHES_20, POOL, indexes, members, ring_of, samples, whole_state
from dualmap.core.blocks import Chain, ChainKind
from dualmap.core.keys import EMPTY_SPLITS, key_of
from dualmap.core.rebalance import QueueItem, QueuePicture, RebalanceOptions, plan
from dualmap.core.state import EMPTY_WAITING, LoadReport, PrefillCost
from dualmap.view.cluster_view import ClusterView, ViewOptions

COST = PrefillCost(a_s=0.02, b_s_per_token=0.000_16)
_SLO_MS = 5_000.0


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Milliseconds of a plan over so many instances and waiting requests, and what it moves.

    ``floor_ms`` is what no plan does without, in the same rounds: each listed request's hit looked up at each of its
    candidates, and one sort.
    """

    instances: int
    waiting: int
    listed: int
    p50_ms: float
    p99_ms: float
    best_ms: float
    moves: int
    floor_ms: float

    @property
    def ratio(self) -> float:
        """The plan over the floor."""
        return self.p50_ms / self.floor_ms


def plans(count: int, waiting: int, blocks: int, rounds: int) -> PlanFigures:
    """Plan the same round again and again: all queues listed, half of them beyond their deadlines."""
    view, queues = scene(count, waiting, blocks)
    options, spent, floors, moves = RebalanceOptions(), [], [], 0
    picture = view.picture
    if picture is None:
        raise RuntimeError("the view took no ring")
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        began_s = time.perf_counter()
        moves = len(plan(queues, view.instances, picture, options, 0.0))
        planned_s = time.perf_counter()
        _floor(view, queues)
        spent.append(planned_s - began_s)
        floors.append(time.perf_counter() - planned_s)
    gc.enable()
    floor_ms = float(np.median(floors)) * 1e3
    p50, p99 = np.percentile(np.array(spent) * 1e3, (50, 99))
    listed = sum(len(queue.items) for queue in queues)
    return PlanFigures(count, waiting, listed, float(p50), float(p99), min(spent) * 1e3, moves, floor_ms)


def _floor(view: ClusterView, queues: list[QueuePicture]) -> list[tuple[float, int]]:
    instances = view.instances
    looked = [
        (item.deadline_ms, instances[name].hit_tokens(item.chain)[1])
        for queue in queues
        for item in queue.items
        for name in item.candidates
    ]
    looked.sort()
    return looked


def scene(count: int, waiting: int, blocks: int, seed: int = 1) -> tuple[ClusterView, list[QueuePicture]]:
    """A view and the queues of its instances: on every other one work for twice the SLO, on the rest little."""
    draw = random.Random(seed)
    prompts = samples(HASHES_20)
    view = ClusterView(POOL, nullcontext(), lambda: 0.0, ViewOptions())
    view.adopt_ring(ring_of(count))
    filled = indexes(count, blocks, prompts)
    queues = []
    for number, member in enumerate(members(count)):
        hot = number % 2 == 0
        items = tuple(_item(view, prompts[draw.randrange(len(prompts))].hashes, draw, hot) for _ in range(waiting))
        work_s = sum(COST.seconds(item.miss_tokens, item.chain.prompt_tokens) for item in items)
        queue = QueuePicture(member.instance_id, items if hot else items[: waiting // 8], rest_s=0.3)
        load = LoadReport(waiting_s=_waiting(work_s if hot else 0.3), rest_s=0.3, cost=COST)
        view.instances[member.instance_id].apply(whole_state(member.instance_id, filled[member.instance_id], load), 0)
        queues.append(queue)
    return view, queues


def _waiting(seconds: float) -> tuple[float, ...]:
    table = list(EMPTY_WAITING)
    table[8 + 5] = seconds
    return tuple(table)


def _item(view: ClusterView, hashes: tuple[int, ...], draw: random.Random, hot: bool) -> QueueItem:
    chain = Chain(ChainKind.TOKENS, hashes, 128, len(hashes) * 128 + 5)
    key, _ = key_of(hashes, 1, EMPTY_SPLITS)
    pair = view.picture.ring.pair(key, lambda _name: True) if view.picture is not None else (None, None)
    miss = 128 * draw.randrange(4, len(hashes)) if hot else 128
    deadline_ms = _SLO_MS * draw.uniform(0.2, 1.0)
    name = f"{draw.getrandbits(64):016x}"
    return QueueItem(name, 1, deadline_ms, chain, miss, candidates=tuple(one for one in pair if one), key=key)
