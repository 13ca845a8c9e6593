"""`python -m dualmap.cli.bench_flood ADDRESS RATE FILE`: so many calls a second, whatever the answers do.

The file says, renewed four times a second, how many calls were sent, served and ended so far.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

from dualmap.cli.bench_cluster import ROUTE
from dualmap.cli.bench_raw import RawCaller
from dualmap.cli.bench_workload import HASHES_20, samples

_TELL_S = 0.25


def flood(address: str, rate: float, path: Path) -> None:
    """Call until the process is ended."""
    caller = RawCaller(address, ROUTE, [sample.body for sample in samples(HASHES_20)])
    gc.disable()
    print(json.dumps({"event": "serving", "port": 0}), flush=True)
    while True:
        until_s = time.perf_counter() + _TELL_S
        caller.open(rate, lambda until_s=until_s: time.perf_counter() < until_s)  # type: ignore[misc]
        counts = caller.counts
        path.write_text(f"{counts.sent} {counts.served} {counts.ended}")


if __name__ == "__main__":
    flood(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
