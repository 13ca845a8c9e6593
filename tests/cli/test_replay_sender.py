"""What the replay takes note of while a request runs."""

from __future__ import annotations

import pytest

from dualmap.cli.replay_sender import Events, Pace, send_all
from dualmap.client import Address, CallFailed, Done, Event, FirstToken, OnRoute, Queued, Request, Route
from dualmap.simulator.trace import TraceRequest


def _route(attempt: int) -> Route:
    return Route("r", attempt, Address("a/0", ""), Address("b/0", ""), b"", "CACHE_HIT", 0.0, 0, 0, 0, -1.0)


class _Script:
    """A sender that plays routes and events in order."""

    def __init__(self, *steps: Route | Event | CallFailed) -> None:
        self._steps = steps

    async def run(self, request: Request, timeout_s: float, on_route: OnRoute) -> Events:
        for step in self._steps:
            if isinstance(step, Route):
                on_route(step, 0.001)
            elif isinstance(step, CallFailed):
                raise step
            else:
                yield step


_END = (FirstToken("c/0", 1.0, 0, 10, 1.0), Done("c/0", 1, 1.0, 1.0, 0.0, 0, 10, 1, "stop"))
"""Run elsewhere than it was queued: it was handed over."""


@pytest.mark.parametrize(
    ("steps", "attempts"),
    [
        ((_route(1), Queued("a/0", 0, 1.0), *_END), 1),
        ((_route(1), Queued("b/0", 0, 1.0), *_END), 2),
        ((_route(1), Queued("a/0", 0, 1.0), Queued("b/0", 0, 1.0), *_END), 2),
        ((_route(1), _route(3), Queued("a/0", 0, 1.0), *_END), 3),
        ((_route(1), Queued("b/0", 0, 1.0), _route(3), Queued("b/0", 0, 1.0), *_END), 4),
    ],
)
async def test_every_attempt_counts_also_one_that_never_got_into_a_queue(
    steps: tuple[Route | Event, ...], attempts: int
) -> None:
    """At the chosen, at the backup, by another route; a hand-over is no attempt."""
    request = TraceRequest(0, 0.0, 10, 1, (), 512)
    (outcome,) = await send_all([request], _Script(*steps), Pace(1.0, 10.0, "t"), lambda _: None)

    assert (outcome.status, outcome.attempts, outcome.instance_id) == ("done", attempts, "c/0")
