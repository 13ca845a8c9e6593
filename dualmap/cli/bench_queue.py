"""`dualmap bench queue`: what the agent's queue costs at 10, 1,000 and 10,000 waiting, against the fifo floor.

No engine and no network: the queue itself, in the steps an agent makes with it. The stall is the longest of those
steps, which is how long the event loop hears nothing else.
"""

from __future__ import annotations

import gc
import json as jsonlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dualmap.core.state import QueuePolicy
from dualmap.core.waiting import QueueBounds, WaitingQueue, WaitingRequest

STALL_AIM_MS = 2.0
SLO_MS = 5_000.0
_POLICIES = {"slo": QueuePolicy.SLO, "hit_first": QueuePolicy.HIT_FIRST, "fifo": QueuePolicy.FIFO}


@dataclass(frozen=True, slots=True)
class QueueRow:
    """Microseconds a step (median and 99th percentile), and the longest step of any kind in milliseconds."""

    waiting: int
    policy: str
    enqueue_us: float
    enqueue_p99_us: float
    pick_us: float
    pick_p99_us: float
    move_us: float
    move_p99_us: float
    report_us: float
    longest_ms: float
    of_floor: float
    """Enqueue and pick, medians, against the floor of the same run and size."""


class Timed:
    """Times of one kind of step, seconds."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def run(self, step: Callable[[], object]) -> None:
        """Do it once, in this thread's CPU time: on a shared machine the wall's tells of others."""
        began_s = time.thread_time()
        step()
        self.times_s.append(time.thread_time() - began_s)

    def us(self, share: float) -> float:
        """A quantile in microseconds."""
        ordered = sorted(self.times_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6


class Requests:
    """Makes requests as a loaded agent sees them: 0.1 to 3 s of prefill, deadlines from its arrival."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._number = 0

    def next(self, now_ms: float) -> WaitingRequest:
        """One that came now."""
        self._number += 1
        tokens = self._draw.randrange(500, 20_000)
        return WaitingRequest(
            request_id=f"r{self._number}",
            attempt=1,
            deadline_ms=now_ms + SLO_MS * self._draw.uniform(0.5, 40.0),
            submitted_ms=now_ms,
            priority=0,
            prompt_tokens=tokens,
            miss_tokens=tokens,
            prefill_s=0.02 + 0.000_16 * tokens,
        )


def measure(policy: str, waiting: int, rounds: int, floor_us: float) -> QueueRow:
    """Keep so many waiting while they come, go to the engine and are moved, 5 ms of queue time a round."""
    queue, made = WaitingQueue(_POLICIES[policy], QueueBounds(1 << 30, 1 << 60)), Requests(waiting)
    for age in range(waiting):
        queue.push(made.next(-float(age % 4_000)))
    enqueue, pick, move, report = Timed(), Timed(), Timed(), Timed()
    picker = random.Random(waiting)
    now_ms = 0.0
    for number in range(rounds):
        now_ms += 5.0
        request = made.next(now_ms)
        enqueue.run(lambda: queue.push(request))  # noqa: B023  (called at once)
        pick.run(lambda: queue.pick(now_ms, 1 << 30, 1.0))  # noqa: B023
        if number % 4 == 0:
            moved = picker.choice([one.identity for one in queue])
            move.run(lambda: queue.remove(*moved))  # noqa: B023
            queue.push(made.next(now_ms))
        if number % 20 == 0:
            report.run(lambda: queue.waiting_s(now_ms, SLO_MS / 1_000))  # noqa: B023
    steps = (enqueue, pick, move, report)
    return QueueRow(
        waiting=waiting,
        policy=policy,
        enqueue_us=enqueue.us(0.5),
        enqueue_p99_us=enqueue.us(0.99),
        pick_us=pick.us(0.5),
        pick_p99_us=pick.us(0.99),
        move_us=move.us(0.5),
        move_p99_us=move.us(0.99),
        report_us=report.us(0.5),
        longest_ms=max(max(step.times_s) for step in steps) * 1_000,
        of_floor=(enqueue.us(0.5) + pick.us(0.5)) / floor_us,
    )


def floor(waiting: int, rounds: int) -> QueueRow:
    """What a plain deque with a dictionary of its members costs: nothing can be cheaper and still be a queue."""
    made = Requests(waiting)
    line: deque[WaitingRequest] = deque(made.next(0.0) for _ in range(waiting))
    members = {one.identity: one for one in line}
    enqueue, pick = Timed(), Timed()

    def push(request: WaitingRequest) -> None:
        line.append(request)
        members[request.identity] = request

    def take() -> None:
        del members[line.popleft().identity]

    for number in range(rounds):
        request = made.next(5.0 * number)
        enqueue.run(lambda: push(request))  # noqa: B023
        pick.run(take)
    longest_s = max(*enqueue.times_s, *pick.times_s)
    nothing = float("nan")
    return QueueRow(
        waiting,
        "deque",
        enqueue.us(0.5),
        enqueue.us(0.99),
        pick.us(0.5),
        pick.us(0.99),
        nothing,
        nothing,
        nothing,
        longest_s * 1_000,
        1.0,
    )


def queue(
    waiting: Annotated[str, typer.Option(help="Requests waiting, one run each, comma-separated.")] = "10,1000,10000",
    rounds: Annotated[int, typer.Option(min=10, max=100_000, help="Requests that come and go in each run.")] = 2_000,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """What enqueue, pick and move cost; the longest stall of the event loop."""
    rows: list[QueueRow] = []
    # As an agent's process does: full collections never walk what its start made, and wait for calm.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 1 << 30)
    for size in [int(size) for size in waiting.split(",")]:
        least = floor(size, rounds)
        floor_us = least.enqueue_us + least.pick_us
        rows += [least, *(measure(policy, size, rounds, floor_us) for policy in ("fifo", "hit_first", "slo"))]
    Console().print(_table(rows))
    if json is not None:
        json.write_text(jsonlib.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def _table(rows: Sequence[QueueRow]) -> Table:
    table = Table(title=f"CPU µs a step, median / 99th percentile; aim: no step over {STALL_AIM_MS:g} ms")
    for name in ("waiting", "policy", "enqueue", "pick", "move", "report", "longest ms", "of floor"):
        table.add_column(name, justify="right")
    for row in rows:
        pairs = (
            (row.enqueue_us, row.enqueue_p99_us),
            (row.pick_us, row.pick_p99_us),
            (row.move_us, row.move_p99_us),
        )
        cells = ["" if isnan(p50) else f"{p50:.1f} / {p99:.0f}" for p50, p99 in pairs]
        report = "" if isnan(row.report_us) else f"{row.report_us:.0f}"
        table.add_row(str(row.waiting), row.policy, *cells, report, f"{row.longest_ms:.2f}", f"{row.of_floor:.1f}")
    return table
