"""Service processes of a cluster on this machine: start, learn the port, stop.

Never touches a process it did not start.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Linux: the signal a child gets when its parent dies, so that a killed command leaves nothing behind."""


class StartError(Exception):
    """A service did not come up: the message says which and shows the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One `python -m module`: its environment on top of ours, where its log goes, what follows the module's name."""

    name: str
    module: str
    environment: Mapping[str, str]
    log_path: Path
    arguments: Sequence[str] = ()

    def log_tail(self, lines: int = 5) -> str:
        """The last lines that it said for a person, or else logged; indented, each after a line break."""
        text = self.log_path.read_text(errors="replace").strip().splitlines()
        plain = [line for line in text if not line.startswith("{")]
        return "".join(f"\n  {line}" for line in (plain or text)[-lines:])


class RunningService:
    """A started service: its process and what it printed when it served."""

    def __init__(
        self,
        spec: ServiceSpec,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        serving: Mapping[str, object],
    ) -> None:
        self.spec = spec
        self.process = process
        self.serving = serving
        self._reader = asyncio.create_task(_discard(output))

    @property
    def address(self) -> str:
        """Loopback address of its gRPC server."""
        return f"127.0.0.1:{self.serving['port']}"

    @property
    def metrics_address(self) -> str | None:
        """Loopback address of its Prometheus port; None without one."""
        port = self.serving.get("metrics_port")
        return f"127.0.0.1:{port}" if port else None

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it lives."""
        if self.running:
            self.process.send_signal(number)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after ``grace_s``. Returns when the process is gone. Idempotent."""
        await end_process(self.process, grace_s)
        await self._reader


async def start_service(spec: ServiceSpec, timeout_s: float = 60.0) -> RunningService:
    """Start a service and wait until it says that it serves; StartError with the log's tail otherwise."""
    with spec.log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            spec.module,
            *spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **spec.environment},
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
            # Ctrl-C goes to this command alone, which then stops its services in order.
            start_new_session=True,
        )
    output = process.stdout or asyncio.StreamReader()
    try:
        serving = await asyncio.wait_for(_serving_line(output), timeout_s)
    except TimeoutError:
        await end_process(process, 0.0)
        raise StartError(f"{spec.name} did not serve within {timeout_s:g} s{spec.log_tail()}") from None
    except BaseException:
        await end_process(process, 0.0)
        raise
    if serving is None:
        code = await process.wait()
        raise StartError(f"{spec.name} ended with code {code} before it served{spec.log_tail()}")
    return RunningService(spec, process, output, serving)


async def _serving_line(output: asyncio.StreamReader) -> Mapping[str, object] | None:
    async for line in output:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("event") == "serving":
            return said
    return None


async def _discard(output: asyncio.StreamReader) -> None:
    while await output.read(65_536):
        pass


async def end_process(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """SIGTERM, then SIGKILL after ``grace_s``; returns when the process is gone. Idempotent."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            process.kill()
            await process.wait()


def die_with_parent() -> None:
    """Called in a child before it execs: Linux kills it when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
