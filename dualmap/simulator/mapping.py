"""The ring manager in virtual time: members, epochs, the heat tree and the grace period of the previous mapping."""

from __future__ import annotations

from dualmap.core.choose import RingPicture
from dualmap.core.heat_tree import HeatTree
from dualmap.core.keys import SplitTable
from dualmap.core.membership import InstanceState, Member, RingParameters
from dualmap.core.ring import Ring
from dualmap.simulator.options import ClusterOptions

_SAMPLES_PER_REPORT = 1_024


class Mapping:
    """Publishes `picture`; a change keeps the one before readable for ``grace_s``."""

    def __init__(self, options: ClusterOptions, *, heat: bool) -> None:
        self._parameters = RingParameters(start_depth=options.control.start_depth)
        self._slo_s = options.ttft_slo_s
        self._grace_s = options.control.grace_s
        self._members: dict[str, Member] = {}
        self.tree = HeatTree(options.heat) if heat and options.control.heat_s > 0 else None
        self._look_blocks = options.heat.look_blocks
        self._samples: list[tuple[tuple[int, ...], int, int]] = []
        self.picture = RingPicture(
            Ring.build((), self._parameters), SplitTable.build(()), self._parameters, 0, self._slo_s
        )
        self._grace_until_s = 0.0
        self.key_blocks: dict[int, int] = {}
        """How many requests were keyed at each depth."""

    @property
    def active(self) -> int:
        """Members that take new work."""
        return sum(member.state is InstanceState.ACTIVE for member in self._members.values())

    def set_member(self, instance_id: str, state: InstanceState, now_s: float) -> None:
        """Join, drain or leave; the ring changes when ownership of points does."""
        before = self._members.get(instance_id)
        self._members[instance_id] = Member(instance_id, "", state=state)
        if before is None or before.state.on_ring != state.on_ring:
            self._publish(Ring.build(self._members.values(), self._parameters), self.picture.splits, now_s)

    def sample(self, hashes: tuple[int, ...], key_blocks: int, miss_tokens: int) -> None:
        """A router's sample of one chain: from the present key to the end of the look."""
        self.key_blocks[key_blocks] = self.key_blocks.get(key_blocks, 0) + 1
        if self.tree is not None and key_blocks and len(self._samples) < _SAMPLES_PER_REPORT:
            first = key_blocks - 1
            self._samples.append((hashes[first : first + self._look_blocks], key_blocks, miss_tokens))

    def tick(self, now_s: float) -> None:
        """Take the heat reports in, publish a changed split table, end a grace period."""
        if self.tree is not None:
            for hashes, depth, miss_tokens in self._samples:
                self.tree.observe(hashes, depth, 1, miss_tokens, now_s)
            self._samples.clear()
            splits = self.tree.plan(self.active, now_s)
            if splits != self.picture.splits.splits:
                self._publish(self.picture.ring, SplitTable.build(splits), now_s)
        if self.picture.previous is not None and now_s >= self._grace_until_s:
            self._set(self.picture.ring, self.picture.splits, None)

    def _publish(self, ring: Ring, splits: SplitTable, now_s: float) -> None:
        previous = None
        if self._grace_s > 0 and self.picture.ring.instance_ids and now_s > 0:
            # Two changes in a row: the older mapping is the one whose caches are warm.
            previous = self.picture.previous or (self.picture.ring, self.picture.splits)
            self._grace_until_s = now_s + self._grace_s
        self._set(ring, splits, previous)

    def _set(self, ring: Ring, splits: SplitTable, previous: tuple[Ring, SplitTable] | None) -> None:
        epoch = self.picture.epoch + 1
        self.picture = RingPicture(ring, splits, self._parameters, epoch, self._slo_s, previous)
