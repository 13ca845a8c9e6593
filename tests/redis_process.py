"""A private Redis or Valkey on a unix socket, started for tests and ended by its own pid."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A running server: its kind (valkey or redis), its URL, its process."""

    kind: str
    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def running_server(kind: str, binary: Path, start_timeout_s: float = 10.0) -> Iterator[RedisServer]:
    """Run the binary with no persistence and no TCP port until the block ends."""
    # Not pytest's tmp_path: a unix socket's path may hold 107 bytes only.
    folder = Path(tempfile.mkdtemp(prefix="dm-"))
    socket_path = folder / "r.sock"
    command = [binary, "--port", "0", "--unixsocket", socket_path, "--save", "", "--appendonly", "no"]
    command += ["--dir", folder, "--maxmemory-policy", "noeviction"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
    try:
        _wait_ready(process, socket_path, folder / "log", start_timeout_s)
        yield RedisServer(kind=kind, url=f"unix://{socket_path}", process=process)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _wait_ready(process: subprocess.Popen[bytes], socket_path: Path, log: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        if socket_path.exists():
            with redis.Redis(unix_socket_path=str(socket_path)) as client:
                try:
                    client.ping()
                except redis.ConnectionError:
                    pass
                else:
                    return
        time.sleep(0.005)
    raise RuntimeError(f"the test server did not start:\n{log.read_text()}")
