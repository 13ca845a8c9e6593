"""A service's life as a process: signals to a stop event, expected start errors to one line, exit codes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from dualmap.runtime.logs import get_log

EXIT_CANNOT_START = 1

_log = get_log("lifetime")


class StartError(Exception):
    """The service cannot start, and the operator can do something about it: one line says what."""


Main = Callable[[asyncio.Event], Awaitable[None]]


def run_service(main: Main) -> int:
    """Run ``main(stop)`` until it returns; give the process's exit code.

    SIGTERM or SIGINT sets ``stop``; a second one ends the process at once. A port in use, an unreachable Redis and
    any StartError end in one line on stderr and code 1; another exception is a defect and keeps its traceback.
    """

    def run() -> int:
        asyncio.run(_run(main))
        return 0

    return start_error_code(run)


def start_error_code(run: Callable[[], int]) -> int:
    """What ``run`` gives, or the code of a start error, said in one line; see `run_service`."""
    try:
        return run()
    except StartError as error:
        return _refuse(str(error))
    except RedisError as error:
        return _refuse(f"Redis: {error}")
    except OSError as error:
        if error.errno not in {errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL}:
            raise
        return _refuse(error.strerror or str(error))


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets in the running loop; the second signal exits at once, without cleaning."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def received(number: signal.Signals) -> None:
        if stop.is_set():
            _log.warning("stop_forced", signal=number.name)
            sys.stderr.flush()
            os._exit(128 + number)
        _log.info("stop_asked", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    return stop


async def _run(main: Main) -> None:
    await main(stop_on_signals())


def _refuse(problem: str) -> int:
    print(f"cannot start: {problem}", file=sys.stderr)  # noqa: T201  (for the operator; logs may be JSON)
    return EXIT_CANNOT_START
