"""Beside a rival: `python -m bench.rival PYTHON [--seconds N]`, NVIDIA Dynamo's select_service against our router.

PYTHON is an interpreter with the `ai-dynamo-runtime` wheel in an environment of its own. Same number of workers, same
hashes, same client technique (threads, one keep-alive connection each), in turns. Its transport is HTTP, ours gRPC.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count

from dualmap.cli.bench_cluster import ROUTE, Bench, Process, View
from dualmap.cli.bench_load import Target, Timed, closed_turn, in_turns
from dualmap.cli.bench_report import latency_of
from dualmap.cli.bench_workload import HASHES_20, HASHES_640, Sample

BLOCK = 128
MODEL = "default"


class Selector:
    """A running select_service and its catalog of workers."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._here = threading.local()
        self._ids = count()
        self._run = f"{time.time_ns():x}"

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """One request on this thread's own connection."""
        connection = getattr(self._here, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=10)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._here.connection = connection
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def register(self, workers: int) -> None:
        """The catalog. Nobody publishes events, so its index stays empty and it finds no hits, where ours does."""
        for number in range(workers):
            entry: dict[str, object] = {
                "worker_id": number + 1,
                "model_name": MODEL,
                "endpoint": f"http://10.0.0.{number}:8000",
            }
            entry |= {"block_size": BLOCK, "data_parallel_start_rank": 0, "data_parallel_size": 1}
            entry |= {"total_kv_blocks": 9_362, "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{number + 1}"}}
            status, said = self.ask("POST", "/workers", json.dumps(entry).encode())
            if status >= 300:
                raise RuntimeError(f"POST /workers: {status} {said.decode(errors='replace')[:300]}")

    def select(self, body: bytes) -> None:
        """Select and book, then free the booking outside of the time measured."""
        name = f"{self._run}-{next(self._ids)}"
        status, said = self.ask("POST", "/select_and_reserve", body.replace(b"@", name.encode(), 1))
        if status != 200:
            raise RuntimeError(f"select_and_reserve: {status} {said.decode(errors='replace')[:300]}")
        self._here.last = name

    def free(self) -> None:
        """Give the last booking of this thread back, as ours expire."""
        self.ask("DELETE", f"/reservations/{self._here.last}")


def body_of(sample: Sample) -> bytes:
    """The request with a place for its id."""
    hashes = [block >> 1 for block in sample.hashes]  # its hashes are signed
    fields = {"selection_id": "@", "model_name": MODEL, "isl_tokens": sample.prompt.prompt_tokens}
    return json.dumps(fields | {"block_hashes": hashes, "sequence_hashes": hashes}).encode()


def selector_turn(selector: Selector, bodies: list[bytes], timed: Timed, threads: int, seconds: float) -> None:
    """So many threads, each selecting again when the last was answered and freed."""
    until_s = time.perf_counter() + seconds
    turn = count()

    def work(part: Timed) -> None:
        while time.perf_counter() < until_s:
            body = bodies[next(turn) % len(bodies)]
            began_s = time.perf_counter()
            selector.select(body)
            part.latency_s.append(time.perf_counter() - began_s)
            selector.free()

    parts = [Timed() for _ in range(threads)]
    running = [threading.Thread(target=work, args=(part,)) for part in parts]
    began_s = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    timed.seconds += time.perf_counter() - began_s
    for part in parts:
        timed.add(part)


@contextmanager
def select_service(python: str, workers: int) -> Iterator[Selector]:
    """The rival with its workers registered."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python, "-m", "dynamo.select_service", "--port", str(port)]
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        selector = Selector(Process(popen, port))
        _wait(selector)
        selector.register(workers)
        yield selector
    finally:
        popen.terminate()
        popen.wait(10)


def _wait(selector: Selector) -> None:
    until_s = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(("127.0.0.1", selector.process.port), 1):
                pass
            selector.ask("GET", "/health")
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def main() -> None:
    """Print one row for each number of hashes and callers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    print("| hashes | callers | | p50 ms | p99 ms | calls/s | server µs a call | MiB resident |")
    print("|---|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        bench = stack.enter_context(Bench(View(options.workers)))
        router = stack.enter_context(bench.router())
        rival = stack.enter_context(select_service(options.python, options.workers))
        for form in (HASHES_20, HASHES_640):
            for callers in (1, 16):
                _rows(bench.samples[form.name], callers, router, rival, options.seconds)


def _rows(prompts: Sequence[Sample], callers: int, router: Process, rival: Selector, seconds: float) -> None:
    target = Target(router.address, ROUTE, [sample.body for sample in prompts], connections=callers)
    bodies, theirs = [body_of(sample) for sample in prompts], Timed()
    turns = (
        lambda s: closed_turn(target, callers, s),
        lambda s: selector_turn(rival, bodies, theirs, callers, s),
    )
    in_turns(turns, 0.5)
    target.timed = Timed()
    theirs.latency_s.clear()
    theirs.seconds = 0.0
    before = router.cpu_s, rival.process.cpu_s
    in_turns(turns, seconds)
    spent = router.cpu_s - before[0], rival.process.cpu_s - before[1]
    for name, timed, cpu_s, process in (
        ("DualMap, gRPC", target.timed, spent[0], router),
        ("select_service, HTTP", theirs, spent[1], rival.process),
    ):
        one = latency_of(timed, cpu_s)
        memory = process.rss_bytes / 2**20
        print(
            f"| {len(prompts[0].hashes)} | {callers} | {name} | {one.p50_ms:.2f} | {one.p99_ms:.2f} | {one.rate:,.0f} "
            f"| {one.cpu_us:.0f} | {memory:.0f} |",
            flush=True,
        )
    target.close()


if __name__ == "__main__":
    sys.exit(main())
