"""`bench memory`: bytes a cached block costs, after growth too, and what decisions under churn leave behind."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import psutil

from dualmap.cli.bench_decision import DecisionCase, view_of
from dualmap.cli.bench_workload import HASHES_20, samples
from dualmap.core.blocks import Chain, ChainKind
from dualmap.core.choose import ChooseOptions, RouteQuery, book, choose
from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.core.state import TicketsSeen

PAPER_BLOCKS = 9_362
"""Blocks of 128 tokens in the 1.2 M tokens that the paper gives an instance."""

_COVER_EVERY = 512
_CHANGES = 256
"""Block changes at each cover: more than 2,000 a second at any rate a router reaches."""
_SETTLED = 40_000
"""Decisions after which bookings and expected blocks come and go in equal number."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes a block at a size, and after it doubled by single changes and by batches."""

    blocks: int
    bytes_a_block: float
    after_single_growth: float
    after_batch_growth: float
    kib_an_instance: float


@dataclass(frozen=True, slots=True)
class DecisionMemory:
    """Resident bytes at the start (once bookings come and go in equal number) and the end of so many decisions."""

    decisions: int
    rss_start: int
    rss_end: int

    @property
    def growth(self) -> float:
        """End over start."""
        return self.rss_end / self.rss_start


def block_memory(blocks: int = PAPER_BLOCKS) -> BlockMemory:
    """Fill an index, then grow copies of it both ways."""
    draw = random.Random(1)
    filled = _filled(blocks, draw)
    single, batch = _filled(blocks, draw), _filled(blocks, draw)
    for _ in range(blocks):
        single.set(draw.getrandbits(64), 1)
    for _ in range(8):
        batch.apply(b"".join(pack_change(draw.getrandbits(64), 1) for _ in range(blocks // 8)))
    each, after_single, after_batch = (index.nbytes / len(index) for index in (filled, single, batch))
    return BlockMemory(blocks, each, after_single, after_batch, filled.nbytes / 1024)


def _filled(blocks: int, draw: random.Random) -> KvIndex:
    index = KvIndex()
    index.apply(b"".join(pack_change(draw.getrandbits(64), 1) for _ in range(blocks)))
    return index


def decision_memory(decisions: int, instances: int = 8, blocks: int = PAPER_BLOCKS) -> DecisionMemory:
    """So many decisions with bookings made and covered while blocks come and go."""
    prompts = samples(HASHES_20)
    view = view_of(DecisionCase("memory", HASHES_20, instances), blocks, prompts)
    picture, options, draw = view.picture, ChooseOptions(), random.Random(1)
    if picture is None:
        raise RuntimeError("the view took no ring")
    chains = [Chain(ChainKind.TOKENS, list(one.hashes), 128, one.prompt.prompt_tokens) for one in prompts]
    names, own = list(view.instances), {name: deque[int]() for name in view.instances}
    process, start = psutil.Process(), 0
    settled = max(decisions // 10, min(decisions // 2, _SETTLED))
    for number in range(decisions):
        query = RouteQuery("memory", chains[number % len(chains)])
        decision = choose(query, picture, view.instances, options, number / 4)
        book(decision, view.instances[decision.chosen.instance_id], query, number / 4)
        if number % _COVER_EVERY == 0:
            name = names[number // _COVER_EVERY % len(names)]
            _change(view.instances[name].kv, own[name], draw)
            for one in view.instances.values():
                one.bookings.cover(TicketsSeen(1, 1 << 62))
        if number == settled:
            start = process.memory_info().rss
    return DecisionMemory(decisions, start, process.memory_info().rss)


def _change(index: KvIndex, own: deque[int], draw: random.Random) -> None:
    """Half of the changes add, half remove; the index's size stays."""
    packed = []
    for _ in range(_CHANGES // 2):
        own.append(draw.getrandbits(64))
        packed.append(pack_change(own[-1], 1))
    while len(own) > 4 * _CHANGES:
        packed.append(pack_change(own.popleft(), 0))
    index.apply(b"".join(packed))
