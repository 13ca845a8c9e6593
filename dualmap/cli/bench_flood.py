"""`python -m dualmap.cli.bench_flood ADDRESS CALLERS FILE`: callers that send again at once, whatever was answered.

The file says, renewed each half second, how many calls were served or refused so far.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path

from dualmap.cli.bench_cluster import ROUTE
from dualmap.cli.bench_load import Target, Timed, timed_call
from dualmap.cli.bench_workload import HASHES_20, samples


def flood(address: str, callers: int, path: Path) -> None:
    """Call until the process is ended."""
    target = Target(address, ROUTE, [sample.body for sample in samples(HASHES_20)], connections=4)
    parts = [Timed() for _ in range(callers)]

    def call_on(timed: Timed) -> None:
        while True:
            timed_call(target.call, next(target.bodies), time.perf_counter(), timed)

    gc.disable()
    for part in parts:
        threading.Thread(target=call_on, args=(part,), daemon=True).start()
    print(json.dumps({"event": "serving", "port": 0}), flush=True)
    while True:
        path.write_text(str(sum(len(part.latency_s) + len(part.refused_s) for part in parts)))
        time.sleep(0.5)


if __name__ == "__main__":
    flood(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
