"""Over its concurrency limit a router says so at once, with advice, and goes on serving what it took."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue

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
    seen: SimpleQueue[bool] = SimpleQueue()

    def work() -> None:
        began.set()
        release.wait(5)
        seen.put(pool.shedding)

    try:
        pool.submit(work)
        assert began.wait(5)
        pool.submit(work)
        pool.submit(lambda: seen.put(pool.shedding))
        shed = seen.get(timeout=5)
        release.set()
        worked = [seen.get(timeout=5), seen.get(timeout=5)]
    finally:
        release.set()
        pool.shutdown()

    assert shed is True
    assert worked == [False, False]
    assert pool.shed == 1


def test_the_end_of_a_call_is_told_once_whenever_it_is_asked_for() -> None:
    """A listener hears of the end exactly once, asked for before or after: gRPC counts calls by it."""
    pool = WorkerPool(threads=1, limit=2)
    ended: SimpleQueue[str] = SimpleQueue()
    release = threading.Event()
    try:
        call = pool.submit(release.wait, 5)
        call.add_done_callback(lambda _: ended.put("asked before"))
        release.set()
        before = ended.get(timeout=5)
        call.add_done_callback(lambda _: ended.put("asked after"))
        after = ended.get(timeout=5)
    finally:
        release.set()
        pool.shutdown()

    assert (before, after) == ("asked before", "asked after")
    assert ended.empty()


def test_a_call_that_raises_does_not_cost_its_thread() -> None:
    """The pool counts it and goes on."""
    pool = WorkerPool(threads=1, limit=2)
    worked = threading.Event()

    def broken() -> None:
        raise RuntimeError("broken")

    try:
        pool.submit(broken)
        pool.submit(worked.set)
        assert worked.wait(5)
    finally:
        pool.shutdown()

    assert pool.broken == 1


def test_a_pool_that_is_ended_at_once_drops_what_waits() -> None:
    """A stop does not serve the queue first."""
    pool = WorkerPool(threads=1, limit=8)
    began, release, late = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        release.wait(5)

    pool.submit(work)
    assert began.wait(5)
    pool.submit(late.set)
    pool.shutdown(wait=False, cancel_futures=True)
    release.set()
    pool.shutdown()

    assert not late.is_set()


def test_many_that_wait_are_served_newest_first_and_the_overdue_give_up() -> None:
    """Under overload what is served was not long waited for; the oldest learn that they should give up."""
    pool = WorkerPool(threads=1, limit=1_000, max_wait_s=0.05)
    began, release, overdue = threading.Event(), threading.Event(), threading.Event()
    order: SimpleQueue[tuple[int, bool]] = SimpleQueue()

    def work() -> None:
        began.set()
        release.wait(5)

    def served(number: int) -> None:
        order.put((number, pool.shedding))

    try:
        pool.submit(work)
        assert began.wait(5)
        for number in range(80):
            pool.submit(served, number)
        overdue.wait(0.06)  # the clock is the pool's own
        pool.submit(served, 80)
        gave_up = {order.get(timeout=5) for _ in range(2)}
        release.set()
        first = order.get(timeout=5)
    finally:
        release.set()
        pool.shutdown()

    assert gave_up == {(0, True), (1, True)}
    assert first == (80, False)
