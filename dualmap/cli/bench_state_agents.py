"""`python -m dualmap.cli.bench_state_agents`: many instances that have state and no engine, in one process.

Each holds a full index and changes some of its blocks all the time, as a busy cache does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from array import array

from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.rpc.convert_state import StateQuery
from dualmap.rpc.state_server import serve_states

TICK_S = 0.1
_DEVICE = 1
_KEPT = 64
"""Ticks of changes kept; a collector that falls further behind gets everything."""


class HollowInstance:
    """Index, version and the last changes of one instance."""

    def __init__(self, instance_id: str, blocks: int, seed: int) -> None:
        self.instance_id = instance_id
        self._draw = random.Random(seed)
        self._held = array("Q", (self._draw.getrandbits(64) for _ in range(blocks)))
        self.kv = KvIndex()
        ascending = array("Q", sorted(set(self._held)))
        self.kv.replace(KvSnapshot(ascending.tobytes(), bytes((_DEVICE,)) * len(ascending)))
        self.version = 1
        self._steps: list[tuple[int, bytes]] = []

    def change(self, count: int) -> None:
        """Half of ``count`` blocks go and as many new ones come, as one version."""
        records = bytearray()
        for _ in range(max(1, count // 2)):
            place = self._draw.randrange(len(self._held))
            gone, come = self._held[place], self._draw.getrandbits(64)
            self._held[place] = come
            self.kv.discard(gone)
            self.kv.set(come, _DEVICE)
            records += pack_change(gone, 0) + pack_change(come, _DEVICE)
        self.version += 1
        self._steps.append((self.version, bytes(records)))
        del self._steps[:-_KEPT]

    def update(self, query: StateQuery) -> StateUpdate:
        """The answer to a poll; its load's ``finished`` is when it was given, in monotonic milliseconds."""
        known = not query.full and (query.incarnation, query.agent_epoch) == (1, 1)
        oldest = self._steps[0][0] - 1 if self._steps else self.version
        since = query.since_version
        load = LoadReport(running_requests=1, finished=int(time.monotonic() * 1_000))
        if known and oldest <= since <= self.version:
            changes = b"".join(records for version, records in self._steps if version > since)
            snapshot = None
        else:
            changes, since, snapshot = b"", 0, self.kv.snapshot()
        return StateUpdate(
            self.instance_id, 1, 1, self.version, since, load, snapshot, changes, self.kv.digest, len(self.kv)
        )


async def _serve(prefix: str, count: int, blocks: int, changes_per_s: float) -> None:
    instances = {f"{prefix}/{rank}": HollowInstance(f"{prefix}/{rank}", blocks, rank) for rank in range(count)}

    async def answer(query: StateQuery) -> StateUpdate:
        return instances[query.instance_id].update(query)

    server, port = await serve_states(answer)
    sys.stdout.write(json.dumps({"event": "serving", "port": port, "metrics_port": None}) + "\n")
    sys.stdout.flush()
    per_tick = round(changes_per_s * TICK_S)
    try:
        while True:
            await asyncio.sleep(TICK_S)
            for instance in instances.values() if per_tick else ():
                instance.change(per_tick)
    finally:
        await server.stop(0)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="dualmap.cli.bench_state_agents", description=__doc__)
    parser.add_argument("--prefix", required=True, help="agent name; instances are PREFIX/RANK")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--changes-per-s", type=float, required=True, help="changed blocks a second and instance")
    given = parser.parse_args()
    try:
        asyncio.run(_serve(given.prefix, given.count, given.blocks, given.changes_per_s))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
