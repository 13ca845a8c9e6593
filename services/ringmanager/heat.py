"""The heat of one pool's prefixes and the split table it leads to; and the tables that routers kept when Redis did not.

Adopts an offered table only where it is newer than what was found at the start of this reign. Publishes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dualmap.core.heat_tree import HeatOptions, HeatTree
from dualmap.core.membership import Split
from dualmap.rpc.convert_ring import HeatReport, HeatSampleValue

ROUTERS_ASKED = 1_024
"""Routers remembered as asked for their table in one reign."""


@dataclass(frozen=True, slots=True)
class HeatRules:
    """Whether and how often to plan, and the tree's own options."""

    enabled: bool = True
    plan_s: float = 1.0
    options: HeatOptions = field(default_factory=HeatOptions)


class PoolHeat:
    """Heat tree of one pool and the table it last planned."""

    def __init__(self, rules: HeatRules) -> None:
        self._rules = rules
        self._tree = HeatTree(rules.options)
        self._plan_due_s = 0.0
        self._found_epoch = 0
        self._own_epoch: int | None = None
        self._answered: set[int] = set()
        self.splits: tuple[Split, ...] = ()

    def begin(self, found_epoch: int, splits: tuple[Split, ...], now_s: float) -> None:
        """A reign begins with the table of the ring of ``found_epoch`` (0: nothing was found)."""
        self._found_epoch = found_epoch
        self._own_epoch = None
        self._answered = set()
        if not self._rules.enabled:
            self.splits = ()
        elif splits != self.splits or found_epoch == 0:
            # Another has planned since: what this tree remembers of its own plans is void.
            self._tree = HeatTree(self._rules.options)
            self._tree.adopt(splits, now_s)
            self.splits = splits

    def published(self, epoch: int) -> None:
        """This reign published; tables of its own epochs are no news."""
        if self._own_epoch is None:
            self._own_epoch = epoch

    def wants_splits(self, report: HeatReport) -> bool:
        """Whether the router may know a newer table than was found."""
        if not self._rules.enabled or report.router_id in self._answered or len(self._answered) >= ROUTERS_ASKED:
            return False
        return self._found_epoch == 0 or self._is_news(report.highest_epoch_seen)

    def offer(self, report: HeatReport, now_s: float) -> bool:
        """Take the table that a report brings, if it is newer than the one held. True when it was taken."""
        if report.splits is None:
            return False
        self._answered.add(report.router_id)
        if not self._rules.enabled or not self._is_news(report.splits_epoch):
            return False
        self._found_epoch = report.splits_epoch
        self._tree.adopt(report.splits, now_s)
        known = {split.prefix for split in self.splits}
        added = tuple(split for split in report.splits if split.prefix not in known)
        self.splits = tuple(sorted((*self.splits, *added), key=lambda split: (split.depth, split.prefix)))
        return True

    def observe(self, samples: Iterable[HeatSampleValue], now_s: float) -> None:
        """Count sampled chains."""
        if not self._rules.enabled:
            return
        for sample in samples:
            self._tree.observe(sample.hashes, sample.first_depth, sample.requests, sample.miss_tokens, now_s)

    def plan(self, n_active: int, now_s: float) -> None:
        """Plan anew if the period is over; the outcome is `splits`."""
        if not self._rules.enabled or n_active < 1 or now_s < self._plan_due_s:
            return
        self._plan_due_s = now_s + self._rules.plan_s
        self.splits = tuple(self._tree.plan(n_active, now_s))

    def _is_news(self, epoch: int) -> bool:
        return self._found_epoch < epoch and (self._own_epoch is None or epoch < self._own_epoch)
