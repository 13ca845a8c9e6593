"""Over its concurrency limit a router says so at once, with advice, and goes on serving what it took."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import grpc

from dualmap.rpc.status import problem_of
from services.router.worker_pool import WorkerPool
from tests.services.router.harness import Limits, chain_of_blocks, pool_of, request, running_router


def test_calls_over_the_limit_are_shed_with_a_delay_and_the_rest_served() -> None:
    """RESOURCE_EXHAUSTED comes at once, not after the calls it waits behind; those are served."""
    with running_router(pool_of(2), Limits(threads=2, concurrent=4)) as router, ThreadPoolExecutor(16) as callers:
        with router.pool.view.lock:
            # The deciding threads wait for the lock, so that calls pile up.
            calls = [
                callers.submit(router.route, request(f"r{number}", chain_of_blocks(number, 2))) for number in range(16)
            ]
            shed, held = wait(calls, timeout=0.7)
        assert held
        served = [call.result(timeout=5) for call in held]

    problems = [problem_of(error) for call in shed if isinstance(error := call.exception(), grpc.RpcError)]
    assert len(problems) == len(shed) >= 16 - 6
    assert {problem.code for problem in problems} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(problem.retry_after_ms and 40 <= problem.retry_after_ms <= 12_000 for problem in problems)
    assert all(answer.instance.instance_id for answer in served)
    assert router.metrics.counts["shed"] == len(shed)


def test_a_pool_knows_which_calls_to_shed() -> None:
    """Up to the limit calls work; the next learns in its own thread that it should give up."""
    pool = WorkerPool(threads=1, limit=2)
    began, release = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        release.wait(5)

    try:
        working = [pool.submit(work)]
        assert began.wait(5)
        working.append(pool.submit(work))
        shed = pool.submit(lambda: pool.shedding).result(timeout=5)
        release.set()
        wait(working, timeout=5)
        worked = pool.submit(lambda: pool.shedding).result(timeout=5)
    finally:
        release.set()
        pool.shutdown()

    assert shed is True
    assert worked is False
    assert pool.shed == 1
