"""`python -m dualmap.cli.agent_with_engine [ENGINE OPTIONS]`: an agent and the fake engine behind it, as one program.

For containers: the engine is started again when it ends, the agent's end is the program's. A stop goes to the agent
first, which drains; the engine stays until then.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from dualmap.cli.processes import die_with_parent
from dualmap.runtime.lifetime import stop_on_signals
from dualmap.runtime.logs import get_log, setup_logs
from dualmap.runtime.settings import LogSettings

AGENT = ("-m", "services.instanceagent")
ENGINE = ("-m", "dualmap.cli", "engine")
RESTART_S = 1.0
"""Pause before an engine that ended is started again: it may end at once, for ever."""

_log = get_log("agent_with_engine")


async def run(engine_options: Sequence[str]) -> int:
    """Run both until the agent ends or a signal stops it; gives the agent's exit code, negative for a signal's."""
    stop = stop_on_signals()
    engine = asyncio.create_task(_keep_engine(engine_options))
    try:
        agent = await _start(AGENT)
        ended = asyncio.create_task(agent.wait())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ended.done():
            agent.terminate()
        return await ended
    finally:
        engine.cancel()
        await asyncio.wait({engine})


async def _keep_engine(options: Sequence[str]) -> None:
    while True:
        process = await _start((*ENGINE, *options))
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        _log.warning("engine_ended", code=code, restart_s=RESTART_S)
        await asyncio.sleep(RESTART_S)


async def _start(arguments: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
        # A signal to the group reaches this program alone, which then stops both in order.
        start_new_session=True,
    )


def main() -> int:
    """Run the program; gives its exit code."""
    setup_logs(LogSettings(), "agent_with_engine")
    return asyncio.run(run(sys.argv[1:])) % 256


if __name__ == "__main__":
    sys.exit(main())
