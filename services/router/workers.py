"""Several routers on one port: forked before any gRPC object exists, sharing nothing but the port and Redis.

The kernel spreads connections, not calls, over them. One that dies is started again; one that cannot start ends all.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dualmap.rpc.server import hold_port
from dualmap.runtime.logs import get_log
from services.router.settings import Settings

RESTART_AFTER_S = 1.0
_KILL_AFTER_S = 5.0
"""Beyond the drain grace; then a worker is taken for hung."""

_STOP = frozenset({signal.SIGTERM, signal.SIGINT})
_HEARD = _STOP | {signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1

Announce = Callable[[Mapping[str, Any]], None]
ServeOne = Callable[[Settings, Announce], int]
"""Serves until a signal and gives the exit code; announces once where it serves."""

_log = get_log("workers")


@dataclass(slots=True)
class _Worker:
    number: int
    pid: int
    said: int
    """The reading end of the pipe it announces itself on."""


def run_workers(settings: Settings, serve_one: ServeOne) -> int:
    """Serve with ``router.workers`` processes until a signal; gives the exit code. Raises StartError, OSError."""
    with hold_port(settings.server) as port, _signals_held():
        return _Workers(settings, port, serve_one).run()


class _Workers:
    """The parent: it serves nothing itself."""

    def __init__(self, settings: Settings, port: int, serve_one: ServeOne) -> None:
        self._settings = settings
        self._port = port
        self._serve_one = serve_one
        self._workers: dict[int, _Worker] = {}
        self._restarts: dict[int, float] = {}

    def run(self) -> int:
        for number in range(self._settings.router.workers):
            self._fork(number)
        serving = [self._announced(worker) for worker in tuple(self._workers.values())]
        if not all(serving):
            return self._stop() or 1
        ports = [line.get("metrics_port") for line in serving]
        line = {"event": "serving", "port": self._port, "metrics_port": ports[0], "worker_metrics_ports": ports}
        print(json.dumps(line), flush=True)  # noqa: T201  (parents find the ports by it)
        while True:
            heard = self._wait()
            if heard in _STOP:
                return self._stop()
            self._reap()
            self._restart()

    def _wait(self) -> int | None:
        """The next signal; None when a restart is due first."""
        if not self._restarts:
            return signal.sigwait(_HEARD)
        left_s = max(0.0, min(self._restarts.values()) - time.monotonic())
        heard = signal.sigtimedwait(_HEARD, left_s)
        return None if heard is None else heard.si_signo

    def _reap(self) -> None:
        for pid, worker in tuple(self._workers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _log.error("worker_ended", worker=worker.number, code=os.waitstatus_to_exitcode(status))
                self._forget(worker)
                self._restarts[worker.number] = time.monotonic() + RESTART_AFTER_S

    def _restart(self) -> None:
        now_s = time.monotonic()
        for number in [number for number, due_s in self._restarts.items() if due_s <= now_s]:
            del self._restarts[number]
            self._fork(number)

    def _stop(self) -> int:
        """Ask all to stop, end those that do not; the first code that is not 0."""
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + self._settings.server.drain_grace_s + _KILL_AFTER_S
        first_code = 0
        while self._workers:
            heard = signal.sigtimedwait(_HEARD, max(0.0, until_s - time.monotonic()))
            for pid, worker in tuple(self._workers.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    first_code = first_code or os.waitstatus_to_exitcode(status)
                    self._forget(worker)
                elif heard is None or heard.si_signo in _STOP:
                    os.kill(pid, signal.SIGKILL)
        return first_code

    def _forget(self, worker: _Worker) -> None:
        del self._workers[worker.pid]
        os.close(worker.said)

    def _announced(self, worker: _Worker) -> dict[str, Any]:
        """What the worker announced; empty when it ended first."""
        with os.fdopen(os.dup(worker.said)) as said:
            line = said.readline()
        return json.loads(line) if line else {}

    def _fork(self, number: int) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os._exit(self._child(number, writing))
        os.close(writing)
        self._workers[pid] = _Worker(number, pid, reading)

    def _child(self, number: int, writing: int) -> int:
        """One worker's whole life; its code. Nothing may escape into the parent's stack."""
        code = 1
        try:
            _die_with_parent()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)

            def announce(line: Mapping[str, Any]) -> None:
                with os.fdopen(writing, "w") as said:
                    said.write(json.dumps(line) + "\n")

            code = self._serve_one(_settings_of(self._settings, number, self._port), announce)
        except BaseException:
            _log.exception("worker_broken", worker=number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return code


def _settings_of(settings: Settings, number: int, port: int) -> Settings:
    """One worker's settings: the common port, and a metrics port of its own (the first's, the next, …)."""
    metrics = settings.metrics
    if metrics.port:
        metrics = metrics.model_copy(update={"port": metrics.port + number})
    server = settings.server.model_copy(update={"port": port})
    return settings.model_copy(update={"server": server, "metrics": metrics})


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait until they are asked for: none is lost between a fork and the next wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
