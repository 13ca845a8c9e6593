"""The engine in virtual time: cache, prefill, decode, pauses; deterministic and cheap."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.engine_model import (
    BlockCache,
    BlocksRemoved,
    BlocksStored,
    Done,
    EngineEvent,
    EngineModel,
    EngineOptions,
    FirstToken,
    Started,
    Tokens,
)
from dualmap.core.state import PrefillCost, Tier
from tests.core.pool import BLOCK, run_of

A = PrefillCost().a_s
B = PrefillCost().b_s_per_token
PLAIN = EngineOptions(decode_batch_slowdown=0.0, decode_share_in_prefill=1.0, prefill_slowdown_per_running=0.0)


def _stage(engine: EngineModel, name: str, hashes: Sequence[int], now_s: float, output: int = 1, **more: bool) -> None:
    engine.stage(name, hashes, BLOCK, len(hashes) * BLOCK, output, now_s, **more)


def _run(engine: EngineModel, until_s: float = 1e6) -> list[EngineEvent]:
    """From event to event, as a simulator does."""
    events: list[EngineEvent] = []
    while (due := engine.next_event_s()) is not None and due <= until_s:
        events += engine.advance(due)
    return events


def _first(events: list[EngineEvent], name: str) -> FirstToken:
    return next(e for e in events if isinstance(e, FirstToken) and e.request_id == name)


def _done(events: list[EngineEvent], name: str) -> Done:
    return next(e for e in events if isinstance(e, Done) and e.request_id == name)


def test_a_cold_prompt_costs_its_tokens_and_is_then_cached() -> None:
    """It costs a + b x miss; its blocks are stored at the first token, and the next one with them costs ``a``."""
    engine = EngineModel(PLAIN)
    hashes = run_of(1, 10)
    _stage(engine, "cold", hashes, 1.0)
    _stage(engine, "warm", hashes, 1.0)
    events = _run(engine)

    cold, warm = _first(events, "cold"), _first(events, "warm")
    assert (cold.hit_tokens, cold.at_s) == pytest.approx((0, 1.0 + A + B * 1_280))
    assert (warm.hit_tokens, warm.prefill_s) == pytest.approx((1_280, A))
    kinds = [type(event) for event in events]
    assert kinds == [Started, BlocksStored, FirstToken, Done, Started, FirstToken, Done]
    assert next(e for e in events if isinstance(e, BlocksStored)).hashes == tuple(hashes)


def test_a_fully_cached_prompt_is_no_miss() -> None:
    """Released code, defect 3: it counted as a full miss; here not a token of it is paid for."""
    engine = EngineModel(PLAIN)
    hashes = run_of(1, 4)
    engine.cache.store(hashes, BLOCK)
    engine.stage("r", hashes, BLOCK, 4 * BLOCK, 1, 0.0)

    assert engine.rest_s == pytest.approx(A)
    assert _first(_run(engine), "r").at_s == pytest.approx(A)


@pytest.mark.parametrize("output", [0, 1])
def test_an_answer_without_text_ends_its_prefill(output: int) -> None:
    """Released code, defect 2: such a response starved the instance for ever."""
    engine = EngineModel(PLAIN)
    _stage(engine, "silent", run_of(1, 4), 0.0, output)
    events = _run(engine)

    assert _done(events, "silent").output_tokens == output
    assert (engine.staged_requests, engine.running_requests, engine.rest_s) == (0, 0, 0.0)
    assert engine.next_event_s() is None


def test_eviction_takes_the_leaves_first() -> None:
    """Released code, defect 7: the root went first and orphaned the rest."""
    engine = EngineModel(EngineOptions(kv_tokens=6 * BLOCK))
    old, new = run_of(1, 4), run_of(2, 4)
    _stage(engine, "old", old, 0.0)
    _stage(engine, "new", new, 0.0)
    events = _run(engine)

    assert [e.hashes for e in events if isinstance(e, BlocksRemoved)] == [(old[3], old[2])]
    assert engine.cache.leading(old) == (2, 0)
    assert engine.kv_use == 1.0


def test_evicting_from_an_empty_cache_ends() -> None:
    """Released code, defect 7: it looped for ever."""
    cache = BlockCache(0, 0)
    stored, moved, gone = cache.store(run_of(1, 3), BLOCK)

    assert (len(stored), moved, len(gone), len(cache), cache.used) == (3, [], 3, 0, 0)
    assert cache.clear() == []


def test_the_host_tier_keeps_what_the_device_evicts() -> None:
    """A block that falls to the host is still a hit, at the price of loading it, and comes back on use."""
    options = EngineOptions(kv_tokens=4 * BLOCK, host_tier_tokens=4 * BLOCK, host_load_s_per_token=0.001)
    engine = EngineModel(options)
    old, new = run_of(1, 4), run_of(2, 4)
    for number, hashes in enumerate((old, new, old)):
        _stage(engine, str(number), hashes, float(number * 10))
    events = _run(engine)

    again = _first(events, "2")
    assert (again.hit_tokens, again.prefill_s) == pytest.approx((4 * BLOCK, A + 4 * BLOCK * 0.001))
    moved = [e.hashes for e in events if isinstance(e, BlocksStored) and e.tier is Tier.HOST]
    assert moved == [tuple(reversed(old)), tuple(reversed(new))]
    assert not any(isinstance(e, BlocksRemoved) for e in events)

    _stage(engine, "3", run_of(3, 4), 50.0)
    assert [e.hashes for e in _run(engine) if isinstance(e, BlocksRemoved)] == [tuple(reversed(new))]


def test_decode_runs_together_and_slows_with_the_batch() -> None:
    """Two running share one step; each is slower than alone by the configured share."""
    engine = EngineModel(EngineOptions(decode_tokens_per_s=100, decode_batch_slowdown=1.0))
    hashes = run_of(1, 1)
    engine.cache.store(hashes, BLOCK)
    _stage(engine, "a", hashes, 0.0, 101)
    events = _run(engine, A + 0.5)
    assert engine.running_requests == 1
    _stage(engine, "b", hashes, A + 0.5, 1_000)
    events += _run(engine)

    # a: 50 alone, then A seconds at half speed beside a prefill, the rest at half speed beside b.
    beside_prefill = A * 1.001 * 50
    assert _done(events, "a").at_s == pytest.approx(A + 0.5 + A * 1.001 + (50 - beside_prefill) / 50)
    assert _done(events, "b").output_tokens == 1_000


def test_running_requests_slow_a_prefill() -> None:
    """A prefill beside k running takes 1 + share x k as long."""
    engine = EngineModel(EngineOptions(prefill_slowdown_per_running=0.5))
    _stage(engine, "a", (), 0.0, 10_000)
    _run(engine, 1.0)
    _stage(engine, "b", run_of(1, 10), 1.0)

    assert _first(_run(engine, 10.0), "b").prefill_s == pytest.approx(1.5 * (A + B * 1_280))


def test_no_more_run_than_the_limit() -> None:
    """A prefill waits for a place among the running."""
    engine = EngineModel(EngineOptions(max_running=1, decode_tokens_per_s=10))
    _stage(engine, "a", (), 0.0, 11)
    _stage(engine, "b", (), 0.0)
    events = _run(engine)

    started = next(e for e in events if isinstance(e, Started) and e.request_id == "b")
    assert started.at_s == _done(events, "a").at_s


def test_a_pause_shifts_everything() -> None:
    """Nothing happens in it, prefill and decode go on after it; without an end nothing is due."""
    engine = EngineModel(PLAIN)
    _stage(engine, "a", run_of(1, 10), 0.0, 11)
    engine.advance(0.1)
    engine.pause(5.0)
    events = _run(engine)
    assert _first(events, "a").at_s == pytest.approx(5.0 + A + B * 1_280 - 0.1)
    assert _done(events, "a").at_s == pytest.approx(_first(events, "a").at_s + 10 / 50)

    engine.pause(math.inf)
    _stage(engine, "b", run_of(2, 1), 6.0)
    assert [type(e) for e in engine.advance(1_000.0)] == [Started]
    assert engine.next_event_s() is None
    engine.pause(0.0)
    assert _first(_run(engine), "b").at_s > 1_000.0


def test_cancel_takes_it_out_wherever_it_is() -> None:
    """Staged, prefilling or running: no event follows, the next one starts, sums end at zero."""
    engine = EngineModel(PLAIN)
    for name in "abcd":
        _stage(engine, name, run_of(ord(name), 10), 0.0, 1_000)
    engine.advance(0.3)
    assert (engine.running_requests, engine.staged_requests) == (1, 3)

    assert engine.cancel("a", 0.3)
    assert engine.cancel("b", 0.31)
    assert engine.cancel("d", 0.31)
    assert not engine.cancel("d", 0.31)
    assert "c" in engine
    events = _run(engine)

    assert {e.request_id for e in events if isinstance(e, FirstToken | Done)} == {"c"}
    assert _first(events, "c").at_s == pytest.approx(0.31 + A + B * 1_280)
    assert (engine.running_requests, engine.staged_requests, engine.rest_s) == (0, 0, 0.0)


def test_tokens_come_only_on_request_and_add_up() -> None:
    """A streaming request tells its tokens in batches; the first one is FirstToken itself."""
    engine = EngineModel(PLAIN)
    _stage(engine, "told", (), 0.0, 40, stream=True)
    _stage(engine, "silent", (), 0.0, 40)
    events = _run(engine)

    tokens = [e for e in events if isinstance(e, Tokens)]
    assert {e.request_id for e in tokens} == {"told"}
    assert sum(e.count for e in tokens) == 39
    assert len(tokens) <= 39 / 50 / 0.05 + 2
    assert events.index(tokens[-1]) < events.index(_done(events, "told"))


def test_a_cleared_cache_is_told_and_cold() -> None:
    """Every block is reported gone; the next prompt is a full miss."""
    engine = EngineModel(PLAIN)
    hashes = run_of(1, 5)
    _stage(engine, "a", hashes, 0.0)
    _run(engine)
    engine.clear_cache(10.0)
    engine.clear_cache(10.0)
    assert [e.hashes for e in engine.advance(10.0) if isinstance(e, BlocksRemoved)] == [tuple(reversed(hashes))]

    _stage(engine, "b", hashes, 11.0)
    assert _first(_run(engine), "b").hit_tokens == 0


def test_the_same_id_is_staged_once() -> None:
    """A second one of the name is a defect of the caller."""
    engine = EngineModel()
    _stage(engine, "a", (), 0.0)
    with pytest.raises(ValueError, match="already"):
        _stage(engine, "a", (), 0.0)


def test_a_wall_clock_far_from_zero_never_stands_still() -> None:
    """At times where a float cannot tell microseconds apart every request still ends."""
    engine = EngineModel()
    for number in range(200):
        _stage(engine, str(number), run_of(number % 7, 3), 1.7e9 + number * 0.001, number % 5)

    assert sum(isinstance(e, Done) for e in _run(engine, math.inf)) == 200


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["stage", "stage", "stage", "cancel", "pause", "clear"]),
        st.integers(0, 5),
        st.integers(0, 12),
        st.floats(0, 0.5),
    ),
    max_size=40,
)


@settings(max_examples=80)
@given(_STEPS, st.booleans())
def test_the_events_alone_rebuild_the_cache(steps: list[tuple[str, int, int, float]], host: bool) -> None:
    """Each request ends once, and whoever follows the block events holds what the cache holds, prefix-closed."""
    tier = 10 * BLOCK if host else 0
    engine = EngineModel(EngineOptions(kv_tokens=20 * BLOCK, host_tier_tokens=tier, max_running=2))
    held: dict[int, Tier] = {}
    ended: list[str] = []
    cancelled = set()
    now = 0.0
    staged = []
    for number, (what, family, blocks, wait) in enumerate(steps):
        now += wait
        if what == "stage":
            _stage(engine, str(number), run_of(family, blocks), now, blocks * 3)
            staged.append(str(number))
        elif what == "cancel" and staged and engine.cancel(staged[family % len(staged)], now):
            cancelled.add(staged[family % len(staged)])
        elif what == "pause":
            engine.pause(now + wait)
        elif what == "clear":
            engine.clear_cache(now)
        _follow(engine.advance(now), held, ended)
        _check(engine, held)
    _follow(_run(engine), held, ended)
    _check(engine, held)

    assert sorted(ended) == sorted(set(staged) - cancelled)
    assert (engine.staged_requests, engine.running_requests) == (0, 0)
    assert engine.rest_s == pytest.approx(0.0)


def _follow(events: list[EngineEvent], held: dict[int, Tier], ended: list[str]) -> None:
    for event in events:
        if isinstance(event, BlocksStored):
            held.update(dict.fromkeys(event.hashes, event.tier))
        elif isinstance(event, BlocksRemoved):
            for block in event.hashes:
                del held[block]
        elif isinstance(event, Done):
            ended.append(event.request_id)


def _check(engine: EngineModel, held: dict[int, Tier]) -> None:
    assert len(engine.cache) == len(held)
    assert engine.cache.used <= engine.options.kv_tokens
    assert engine.cache.used == sum(t is Tier.DEVICE for t in held.values()) * BLOCK
    for family in range(6):
        hashes = run_of(family, 12)
        run, on_host = engine.cache.leading(hashes)
        assert [block in held for block in hashes] == [True] * run + [False] * (12 - run)
        assert on_host == sum(held[block] is Tier.HOST for block in hashes[:run])
