"""Over its limit a router says so at once, with advice, and goes on serving what it took."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import grpc

from dualmap.rpc.status import problem_of
from dualmap.v1 import router_pb2_grpc
from tests.services.router.harness import Limits, Router, chain_of_blocks, pool_of, request, running_router


def test_calls_over_the_limit_are_shed_with_a_delay_and_the_rest_served() -> None:
    """RESOURCE_EXHAUSTED with advice for those beyond what may wait; every other call is served."""
    with running_router(pool_of(2), Limits(waiting=4)) as router, ThreadPoolExecutor(40) as callers:
        with router.pool.view.lock:
            # The decision waits for the lock, so that calls pile up.
            calls = [
                callers.submit(router.route, request(f"r{number}", chain_of_blocks(number, 2))) for number in range(40)
            ]
            wait(calls, timeout=0.3)
        errors = [error for call in calls if (error := call.exception(timeout=5)) is not None]
        served = [call.result() for call in calls if call.exception() is None]

        problems = [problem_of(error) for error in errors if isinstance(error, grpc.RpcError)]
        assert problems
        assert len(problems) == len(errors) == router.metrics.counts["shed"]
        assert {problem.code for problem in problems} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all(problem.retry_after_ms and 40 <= problem.retry_after_ms <= 12_000 for problem in problems)
        assert len(served) >= 4
        assert all(answer.instance.instance_id for answer in served)


def test_a_queue_that_stands_is_refused_and_a_calm_router_serves_all() -> None:
    """Overload ends with its cause: no call is refused once few wait."""
    with running_router(pool_of(2), Limits(burst_s=0.0)) as router, _channel(router) as channel:
        route = router_pb2_grpc.RouterStub(channel).Route
        with router.pool.view.lock:
            flood = [route.future(request(f"flood-{number}", (1,)), timeout=10) for number in range(300)]
        refused = sum(call.exception() is not None for call in flood)

        assert refused > 0
        assert refused == router.metrics.counts["shed"]
        for number in range(20):
            assert router.route(request(f"calm-{number}", (1,))).instance.instance_id


def _channel(router: Router) -> grpc.Channel:
    """One whose stubs give futures."""
    return grpc.insecure_channel(f"127.0.0.1:{router.server.port}")
