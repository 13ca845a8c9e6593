"""`python -m dualmap.cli.bench_feeder URL CHANGES_A_S`: states in Redis that change as a collector would write them.

Each instance in turn, ten times a second (at most 80 writes a second in all), blocks added and removed in balance.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque

from dualmap.cli.bench_workload import AGENT_EPOCH, FAST, INCARNATION, POOL
from dualmap.core.kv_index import mix64, pack_change
from dualmap.core.state import StateUpdate
from dualmap.store.connection import connect
from dualmap.store.state_store import StateHead, StateStore

_MOST_WRITES_A_S = 80
_PERIOD_S = 0.1
_KEPT = 64
"""Own blocks that an instance holds before the oldest of them goes."""


class _Instance:
    """The changing part of one instance: its version, digest and the blocks that come and go."""

    def __init__(self, head: StateHead, draw: random.Random) -> None:
        self.name = head.instance_id
        self._version = head.base.version
        self._digest = head.kv_digest
        self._blocks = head.kv_blocks
        self._own: deque[int] = deque()
        self._draw = draw

    def update(self, changes: int) -> StateUpdate:
        """The next update with so many block changes."""
        packed = []
        for _ in range(changes):
            if len(self._own) >= _KEPT:
                gone = self._own.popleft()
                packed.append(pack_change(gone, 0))
                self._digest -= mix64(gone, 1)
                self._blocks -= 1
            else:
                new = self._draw.getrandbits(64)
                self._own.append(new)
                packed.append(pack_change(new, 1))
                self._digest += mix64(new, 1)
                self._blocks += 1
        since, self._version = self._version, self._version + max(1, changes)
        self._digest &= (1 << 64) - 1
        return StateUpdate(
            self.name,
            INCARNATION,
            AGENT_EPOCH,
            self._version,
            since,
            FAST,
            None,
            b"".join(packed),
            self._digest,
            self._blocks,
        )


async def feed(url: str, changes_a_s: int) -> None:
    """Write until the process is ended."""
    client = connect(url)
    store = StateStore(client, POOL)
    draw = random.Random(1)
    names = sorted(await store.known_instances())
    fed = [_Instance(head, draw) for head in (await store.heads(names)).values()]
    writes_a_s = min(_MOST_WRITES_A_S, round(len(fed) / _PERIOD_S))
    print(json.dumps({"event": "serving", "port": 0}), flush=True)
    due_s, owed, turn = time.monotonic(), 0.0, 0
    while True:
        owed += changes_a_s / writes_a_s
        instance = fed[turn % len(fed)]
        if not await store.write(instance.update(int(owed))):
            raise RuntimeError(f"the state of {instance.name} was moved by someone else")
        owed -= int(owed)
        turn += 1
        due_s += 1 / writes_a_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    asyncio.run(feed(sys.argv[1], int(sys.argv[2])))
