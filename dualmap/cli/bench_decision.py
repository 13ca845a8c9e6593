"""The decision alone, in this process: chain, choose and book over a full view, without messages and transport."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dualmap.cli.bench_workload import (
    FAST,
    HASHES_20,
    HASHES_640,
    POOL,
    TEXT_10K,
    TOKENS_10K,
    Form,
    Sample,
    indexes,
    ring_of,
    samples,
    whole_state,
)
from dualmap.core.blocks import Chain, ChainKind, root_hash, text_chain, token_chain
from dualmap.core.choose import ChooseOptions, RouteQuery, book, choose
from dualmap.core.state import LoadReport, PrefillCost, TicketsSeen
from dualmap.view.cluster_view import ClusterView, ViewOptions

BLOCK_TOKENS = 128
_ROUTER_ID = 1
_COVER_EVERY = 256
_ALL = TicketsSeen(_ROUTER_ID, 1 << 62)

SLOW = LoadReport(cost=PrefillCost(a_s=30.0, b_s_per_token=1e-10))
"""Every prediction is beyond the SLO: escapes are looked at."""


@dataclass(frozen=True, slots=True)
class DecisionCase:
    """One variant; ``load`` SLOW makes every decision look at four."""

    name: str
    form: Form
    instances: int = 8
    load: LoadReport = FAST


CASES = (
    DecisionCase("20 hashes", HASHES_20),
    DecisionCase("20 hashes, n = 64", HASHES_20, 64),
    DecisionCase("20 hashes, n = 1,024", HASHES_20, 1024),
    DecisionCase("20 hashes, four looks", HASHES_20, load=SLOW),
    DecisionCase("640 hashes", HASHES_640),
    DecisionCase("10,000 token_ids, hashed", TOKENS_10K),
    DecisionCase("10,000 bytes of text, hashed", TEXT_10K),
)


@dataclass(frozen=True, slots=True)
class DecisionFigures:
    """Microseconds of one decision."""

    name: str
    p50_us: float
    p99_us: float
    mean_looks: float


def decisions(blocks: int, count: int, cases: Sequence[DecisionCase] = CASES) -> list[DecisionFigures]:
    """Measure each case; ``blocks`` held by each instance, ``count`` decisions (an eighth for long prompts)."""
    return [_measure(case, blocks, count if case.form.tokens < 9_000 else count // 8) for case in cases]


def view_of(case: DecisionCase, blocks: int, prompts: Sequence[Sample]) -> ClusterView:
    """A view whose instances hold so many blocks, the prompts' families among them."""
    view = ClusterView(POOL, threading.Lock(), lambda: 0.0, ViewOptions(_ROUTER_ID))
    view.adopt_ring(ring_of(case.instances))
    for name, index in indexes(case.instances, blocks, prompts).items():
        view.instances[name].apply(whole_state(name, index, case.load), 0.0)
    return view


def _measure(case: DecisionCase, blocks: int, count: int) -> DecisionFigures:
    prompts = samples(case.form)
    view = view_of(case, blocks, prompts)
    picture, instances, options = view.picture, view.instances, ChooseOptions()
    if picture is None:
        raise RuntimeError("the view took no ring")
    readers = [_reader(sample) for sample in prompts]
    spent: list[float] = []
    looks = 0
    clock = time.perf_counter
    gc.collect()
    gc.disable()
    for number in range(count):
        read = readers[number % len(readers)]
        began_s = clock()
        query = RouteQuery("bench", read())
        decision = choose(query, picture, instances, options, 0.0)
        book(decision, instances[decision.chosen.instance_id], query, 0.0)
        spent.append(clock() - began_s)
        looks += len(decision.candidates)
        if number % _COVER_EVERY == 0:
            for one in instances.values():
                one.bookings.cover(_ALL)
    gc.enable()
    p50, p99 = np.percentile(np.array(spent) * 1e6, (50, 99))
    return DecisionFigures(case.name, float(p50), float(p99), looks / count)


def _reader(sample: Sample) -> Callable[[], Chain]:
    """What makes the chain: a list of hashes as it is, or the hashing."""
    prompt = sample.prompt
    if prompt.token_ids is not None:
        return _hasher(token_chain, ChainKind.TOKENS, prompt.token_ids)
    if prompt.text is not None:
        return _hasher(text_chain, ChainKind.BYTES, prompt.text.encode())
    hashes, tokens = list(sample.hashes), prompt.prompt_tokens
    return lambda: Chain(ChainKind.TOKENS, hashes, BLOCK_TOKENS, tokens)


def _hasher(make: Callable[[int, bytes, int], list[int]], kind: ChainKind, data: bytes) -> Callable[[], Chain]:
    root, tokens = root_hash("default", kind=kind), len(data) // 4
    return lambda: Chain(kind, make(root, data, BLOCK_TOKENS), BLOCK_TOKENS, tokens)
