"""The benchmarks measure what they say, and the promises that need no clock hold in short form."""

from __future__ import annotations

from dualmap.cli.bench_decision import CASES, decisions
from dualmap.cli.bench_load import Timed
from dualmap.cli.bench_memory import block_memory, decision_memory
from dualmap.cli.bench_rebalance import plans
from dualmap.cli.bench_report import Comparison, latency_of
from dualmap.cli.bench_workload import FORMS, HASHES_20, indexes, samples, streamed, with_id
from dualmap.core.membership import RingParameters
from dualmap.rpc.convert_route import RouteRules, read_route, route_call, streamed_route


def test_requests_read_as_the_prompts_they_were_made_of() -> None:
    """What is sent by the benchmark is a valid request, and its chain is the one whose blocks are held."""
    rules = RouteRules(("default",), RingParameters(), 5.0)
    for form in FORMS:
        sample = samples(form)[3]
        raw = with_id(sample.body, "an-id")
        call = route_call(read_route(raw), 0, rules)

        assert call.query.request_id == "an-id"
        assert tuple(call.query.chain.hashes) == sample.hashes
        assert streamed_route(streamed(raw)) == raw


def test_the_view_holds_what_the_requests_ask_for() -> None:
    """Each family is held on one of its pair at least, and every instance is filled."""
    prompts = samples(HASHES_20)[:64]
    filled = indexes(4, 2_000, prompts)

    assert all(len(index) >= 2_000 for index in filled.values())
    for one in prompts:
        assert max(index.leading_blocks(one.hashes) for index in filled.values()) == len(one.held)


def test_figures_are_percentiles_and_ratios_of_what_was_timed() -> None:
    """Milliseconds at p50, and one side over the other."""
    ours, theirs = Timed([0.002] * 100, seconds=1.0), Timed([0.001] * 100, seconds=0.5)

    compared = Comparison("x", latency_of(ours, cpu_s=0.01), latency_of(theirs))

    assert compared.ratios == (2.0, 2.0, 2.0)
    assert compared.rate_ratio == 0.5
    assert compared.router.cpu_us == 100.0


def test_a_cached_block_costs_at_most_sixteen_bytes() -> None:
    """Filled, and after doubling either way."""
    figures = block_memory(9_362)

    assert max(figures.bytes_a_block, figures.after_single_growth, figures.after_batch_growth) <= 16
    assert figures.kib_an_instance <= 150


def test_decisions_under_churn_leave_memory_flat() -> None:
    """Bookings made and covered, blocks come and gone: nothing stays. A short form of ten million."""
    figures = decision_memory(60_000, instances=4, blocks=1_000)

    assert figures.growth < 1.03


def test_a_decision_looks_at_two_and_under_threat_at_four() -> None:
    """The variants are what their names say."""
    figures = {one.name: one for one in decisions(500, 64, (CASES[0], CASES[3]))}

    assert figures["20 hashes"].mean_looks == 2.0
    assert figures["20 hashes, four looks"].mean_looks == 4.0


def test_a_plan_moves_something() -> None:
    """The round measured is one with work to do."""
    assert plans(8, 16, 500, 1).moves > 0
