"""The next ring from the last and what changed: epochs never fall, the previous ring stays while it is warm. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dualmap.core.membership import Member, PreviousRing, RingSnapshot, Split

Mapping = tuple[tuple[tuple[str, float], ...], tuple[Split, ...]]


def next_epoch(stored: int, heard: int, wall_ms: int) -> int:
    """An epoch above all that anybody may have seen, also where Redis lost its data and this process its memory."""
    return max(stored, heard, wall_ms) + 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A ring to be published; the previous ring is warm until ``grace_until_s`` of this process's monotonic clock."""

    snapshot: RingSnapshot
    grace_until_s: float = 0.0

    def differs(self, members: tuple[Member, ...], splits: tuple[Split, ...], now_s: float) -> bool:
        """Whether the ring to be is another than this one."""
        if self.snapshot.members != members or self.snapshot.splits != splits:
            return True
        return self.snapshot.previous is not None and now_s >= self.grace_until_s

    def remaps(self, members: tuple[Member, ...], splits: tuple[Split, ...]) -> bool:
        """Whether some key's pair may change: other owners of points, other weights or another split table."""
        return mapping_of(self.snapshot.members, self.snapshot.splits) != mapping_of(members, splits)

    def following(
        self, members: tuple[Member, ...], splits: tuple[Split, ...], epoch: int, now_s: float, grace_s: float
    ) -> Draft:
        """The ring after this one. A change of mapping makes this ring the previous one for ``grace_s``."""
        last = self.snapshot
        previous, until_s = last.previous, self.grace_until_s
        if self.remaps(members, splits):
            previous, until_s = None, now_s + grace_s
            if any(member.state.on_ring for member in last.members):
                previous = PreviousRing(last.epoch, last.members, last.splits, round(grace_s * 1000))
        elif previous is not None:
            left_ms = round((until_s - now_s) * 1000)
            previous = replace(previous, grace_left_ms=left_ms) if left_ms > 0 else None
        return Draft(replace(last, epoch=epoch, members=members, splits=splits, previous=previous), until_s)

    @classmethod
    def adopted(cls, snapshot: RingSnapshot, now_s: float) -> Draft:
        """A ring that another leader published, or this process in an earlier life; its grace runs on from now."""
        left_s = snapshot.previous.grace_left_ms / 1000 if snapshot.previous else 0.0
        return cls(snapshot, now_s + left_s)


def mapping_of(members: tuple[Member, ...], splits: tuple[Split, ...]) -> Mapping:
    """What decides the pair of every key."""
    owners = tuple(sorted((member.instance_id, member.weight) for member in members if member.state.on_ring))
    return owners, tuple(sorted(splits, key=lambda split: (split.depth, split.prefix)))
