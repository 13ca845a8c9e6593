"""Which part is hurt when and how, all from one seed: equal seeds give equal plans, so that a failing one replays."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

ROLES = ("router", "statecollector", "ringmanager", "rebalancer", "agent", "redis")
"""What is hurt: one of two routers, one of two collectors, the leading ring manager, the leading rebalancer, an agent,
Redis."""


class Act(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL, then a new process."""
    PAUSE = "pause"
    """SIGSTOP, then SIGCONT."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``at_s`` since the load began, ``lasts_s`` until the part comes back, ``pick`` which of several.

    ``empty``: a killed Redis comes back without its data.
    """

    at_s: float
    role: str
    act: Act
    lasts_s: float
    pick: float
    empty: bool

    @property
    def label(self) -> str:
        """In words."""
        kept = f" {'empty' if self.empty else 'with data'}" if (self.role, self.act) == ("redis", Act.KILL) else ""
        return f"{self.act} {self.role}{kept} for {self.lasts_s:.1f} s"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a seed becomes faults, in seconds. The longest pause outlasts each lease of 3 s."""

    faults: int = 12
    first_s: float = 2.0
    least_gap_s: float = 0.5
    most_gap_s: float = 3.5
    least_s: float = 0.3
    most_s: float = 4.5
    alone_s: float = 4.0


def plan_faults(seed: int, options: PlanOptions) -> tuple[Fault, ...]:
    """Every role killed and paused in random order, over and over to ``faults``; gaps and lengths drawn too.

    For half of the seeds a fault may begin while another lasts, but never on a role that is being hurt already: of two
    routers one answers. For the other half each begins when the one before should be over, and there are half as many.
    """
    draw = random.Random(seed)
    together = draw.random() < 0.5
    count = options.faults if together else max(1, options.faults // 2)
    bag: list[tuple[str, Act]] = []
    free_at_s = dict.fromkeys(ROLES, 0.0)
    faults: list[Fault] = []
    at_s = options.first_s
    while len(faults) < count:
        if not bag:
            bag = [(role, act) for role in ROLES for act in Act]
            draw.shuffle(bag)
        role, act = bag.pop()
        lasts_s = draw.uniform(options.least_s, options.most_s)
        begin_s = max(at_s, free_at_s[role])
        faults.append(Fault(begin_s, role, act, lasts_s, draw.random(), draw.random() < 0.5))
        # A killed part needs a few seconds to start on a small machine.
        free_at_s[role] = begin_s + lasts_s + 5.0
        gap_s = draw.uniform(options.least_gap_s, options.most_gap_s)
        at_s = begin_s + gap_s + (0.0 if together else lasts_s + options.alone_s)
    return tuple(faults)
