"""The agent's benches measure what they say: on a small scale, without a judgement on seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualmap.cli.bench_agent import AgentBench, Load, Streamed, Target, http_url, row_of, stream_all
from dualmap.cli.bench_agent_engine import BATCH_TOKENS, BatchingEngine, _Waiting
from dualmap.cli.bench_queue import floor, measure


@pytest.mark.parametrize("policy", ["slo", "fifo", "hit_first"])
def test_the_queue_bench_measures_every_step(policy: str) -> None:
    """Each step was taken and took time; the longest is no shorter than a median."""
    row = measure(policy, 50, 40, 1.0)

    assert min(row.enqueue_us, row.pick_us, row.move_us, row.report_us) > 0
    assert row.longest_ms * 1_000 >= row.pick_us


def test_the_floor_is_a_queue_without_order() -> None:
    """It has no move and no report to compare."""
    row = floor(50, 40)

    assert row.enqueue_us > 0
    assert row.move_us != row.move_us  # NaN


def test_a_batch_takes_what_fits_in_order() -> None:
    """Prompts of 3,000 tokens: two in a step of 8,192; one larger than a step has a step of its own."""
    engine = BatchingEngine(1.0, 0.0)
    engine._waiting += [_Waiting(3_000), _Waiting(3_000), _Waiting(3_000), _Waiting(BATCH_TOKENS + 1)]

    assert [len(engine._next_batch()) for _ in range(3)] == [2, 1, 1]


async def test_streams_through_the_pump_come_out_whole(tmp_path: Path) -> None:
    """Every stream has all its tokens, directly and through the pump, whose CPU is counted."""
    load = Load(streams=4, seconds=0.5, tokens=5, beat_ms=10.0)
    async with AgentBench(step_ms=1.0, token_us=0.0) as bench:
        engine = await bench.engine(tmp_path)
        pump = await bench.pump(tmp_path, http_url(engine))
        direct = (await stream_all(Target("direct", http_url(engine)), load))[""]
        pumped = (await stream_all(Target("pump", http_url(pump), (pump.process.pid,)), load))[""]
    row = row_of(load, "byte pump", pumped, direct, pumped.cpu_us_per_chunk)

    for streamed in (direct, pumped):
        assert streamed.failed == 0
        assert streamed.requests >= 4
        assert streamed.chunks == 5 * streamed.requests
    assert row.ttft_p50_ms == pytest.approx(row.added_ttft_p50_ms + sorted(direct.ttft_ms)[len(direct.ttft_ms) // 2])
    assert pumped.cpu_s >= 0.0


def test_cpu_a_chunk_is_no_division_by_nothing() -> None:
    """A target that gave nothing has no cost a chunk, not an error."""
    assert Streamed().cpu_us_per_chunk == 0.0
