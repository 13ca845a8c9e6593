"""Heat samples: bounded, weighted to all requests, from the present key on, and never a burden to a route."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from dualmap.core.membership import RingParameters, Split
from dualmap.rpc.heat_client import HeatClient
from dualmap.v1 import ring_pb2, ring_pb2_grpc
from services.router.heat_reporter import HeatReporter
from services.router.heat_sampler import HeatSampler, weighted
from tests.services.router.harness import ROUTER_ID, Router, chain_of_blocks, request, ring_of


class FakeRingManager(ring_pb2_grpc.RingManagerServicer):
    """Keeps the reports; a standby refuses them."""

    def __init__(self, standby: bool = False) -> None:
        self.reports: list[ring_pb2.ReportHeatRequest] = []
        self.arrived = threading.Event()
        self.want_splits = False
        self._standby = standby

    def ReportHeat(
        self, request: ring_pb2.ReportHeatRequest, context: grpc.ServicerContext
    ) -> ring_pb2.ReportHeatResponse:
        if self._standby:
            context.abort(grpc.StatusCode.UNAVAILABLE, "standby")
        self.reports.append(request)
        self.arrived.set()
        return ring_pb2.ReportHeatResponse(ring_epoch=5, want_splits=self.want_splits)

    def _unused(self, *_: object) -> None:
        raise AssertionError("not called by a router")

    Join = Renew = Drain = Undrain = Leave = GetRing = WatchRing = _unused  # type: ignore[assignment]


@contextmanager
def serving(*managers: FakeRingManager) -> Iterator[list[str]]:
    servers, addresses = [], []
    for manager in managers:
        server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        ring_pb2_grpc.add_RingManagerServicer_to_server(manager, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            server.stop(0).wait()


def reporter_of(router: Router, addresses: list[str]) -> HeatReporter:
    client = HeatClient(addresses, "default", timeout_s=2)
    return HeatReporter(router.pool.view, router.sampler, client, router.metrics, ROUTER_ID)


def test_a_report_holds_the_chains_from_the_key_on(router: Router) -> None:
    """At most 64 blocks beyond the present key, root side first, with the misses they stand for."""
    hashes = chain_of_blocks(1, 100)
    router.route(request("a", hashes))
    router.route(request("short", prompt_tokens=5))
    manager = FakeRingManager()
    with serving(manager) as addresses:
        reporter = reporter_of(router, addresses)
        assert reporter.report()
        reporter.stop()

    (report,) = manager.reports
    (sample,) = report.samples
    assert list(sample.hashes) == list(hashes[:65])
    assert (sample.first_depth, sample.requests, sample.miss_tokens) == (1, 1, 12_800)
    assert (report.pool, report.router_id, report.requests) == ("default", ROUTER_ID, 2)
    assert report.highest_epoch_seen == 5
    assert report.parameters_digest == ring_of(1).parameters.digest()


def test_a_split_prefix_is_sampled_from_its_longer_key(router: Router) -> None:
    """The present key is where the split table leads."""
    hashes = chain_of_blocks(1, 20)
    router.pool.adopt(ring_of(4, epoch=6, splits=(Split(hashes[0], 1, 5),)))
    assert router.route(request("a", hashes)).key_blocks == 5

    kept, _, _ = router.sampler.take()

    assert kept[0][:2] == (hashes[4:], 5) or (list(kept[0][0]), kept[0][1]) == (list(hashes[4:]), 5)


def test_a_standby_is_passed_over_and_the_table_sent_when_asked(router: Router) -> None:
    """The next ring manager takes the report; the split table goes with the one after it was wanted."""
    split = Split(7, 1, 4)
    router.pool.adopt(ring_of(4, epoch=9, splits=(split,)))
    leader = FakeRingManager()
    leader.want_splits = True
    with serving(FakeRingManager(standby=True), leader) as addresses:
        reporter = reporter_of(router, addresses)
        assert reporter.report()
        assert reporter.report()
        reporter.stop()

    assert [len(report.splits) for report in leader.reports] == [0, 1]
    assert leader.reports[1].splits_epoch == 9
    assert leader.reports[1].splits[0].next_depth == 4


def test_no_ring_manager_costs_samples_and_a_count_only(router: Router) -> None:
    """What nobody takes is dropped, counted, and never sent late."""
    router.route(request("a", chain_of_blocks(1, 4)))
    with serving(FakeRingManager(standby=True)) as addresses:
        reporter = reporter_of(router, addresses)
        assert not reporter.report()
        reporter.stop()

    assert router.metrics.counts["heat_report_failures"] == 1
    assert router.sampler.take() == ([], 0, 0)


def test_samples_of_other_parameters_are_dropped(router: Router) -> None:
    """A chain made under other parameters means nothing to the tree."""
    manager = FakeRingManager()
    with serving(manager) as addresses:
        reporter = reporter_of(router, addresses)
        reporter.report()
        router.route(request("a", chain_of_blocks(1, 4)))
        router.pool.adopt(replace(ring_of(4, epoch=9), parameters=RingParameters(block_tokens=256)))
        reporter.report()
        reporter.stop()

    assert len(manager.reports[1].samples) == 0
    assert manager.reports[1].requests == 1


def test_the_thread_reports_by_itself_and_stops(router: Router) -> None:
    """A report comes within its period without anybody asking."""
    manager = FakeRingManager()
    with serving(manager) as addresses:
        reporter = reporter_of(router, addresses)
        reporter.start(0.02)
        assert manager.arrived.wait(5)
        reporter.stop()


@pytest.mark.parametrize("requests", [5, 8, 100, 1003])
def test_samples_are_bounded_and_stand_for_every_request(requests: int) -> None:
    """However many requests, at most so many samples, and their weights sum to the requests."""
    draws = iter(number / 1003 for number in range(2000))
    sampler = HeatSampler(8, lambda: next(draws))
    for number in range(requests):
        sampler.observe([number], 1, 10)
    sampler.observe([], 0, 10)

    samples = weighted(*sampler.take())

    assert len(samples.samples) == min(8, requests)
    assert sum(sample.requests for sample in samples.samples) == requests
    assert samples.requests == requests + 1
    assert sum(sample.miss_tokens for sample in samples.samples) == 10 * requests
