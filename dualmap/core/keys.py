"""The routing key of a chain: start depth, then the split table while the prefix is split (design: key)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import Split


class SplitTable:
    """Prefixes too hot for one pair and the depth, in blocks, at which the key walk goes on. Immutable."""

    __slots__ = ("_next_depth", "next_depth", "splits")

    def __init__(self, splits: tuple[Split, ...]):
        self.splits = splits
        self._next_depth = {split.prefix: split.next_depth for split in splits}
        self.next_depth = self._next_depth.get
        """Depth at which the walk goes on from a prefix hash, or None where the prefix is not split."""

    @classmethod
    def build(cls, splits: Iterable[Split]) -> SplitTable:
        """A table of these splits, ordered by depth and prefix.

        Raises:
            InvalidRequest: a split does not lead deeper, or a prefix is named twice.
        """
        ordered = tuple(sorted(splits, key=lambda split: (split.depth, split.prefix)))
        for split in ordered:
            if not 0 < split.depth < split.next_depth:
                raise InvalidRequest("splits", f"next_depth {split.next_depth} is not beyond depth {split.depth}")
        table = cls(ordered)
        if len(table._next_depth) != len(ordered):
            raise InvalidRequest("splits", "a prefix is split twice")
        return table

    def __len__(self) -> int:
        return len(self.splits)


EMPTY_SPLITS = SplitTable(())


def key_of(hashes: Sequence[int], start_depth: int, table: SplitTable) -> tuple[int, int]:
    """Hash and length in blocks of the chain's key; (0, 0) when the prompt has no full block.

    Where fewer blocks remain than a step asks for, the last block is the key.
    """
    blocks = len(hashes)
    if not blocks:
        return 0, 0
    depth = start_depth if start_depth < blocks else blocks  # noqa: FURB136 - a call costs more
    prefix = hashes[depth - 1]
    while depth < blocks:
        next_depth = table.next_depth(prefix)
        # A chain that holds the prefix at another depth than the table says must not send the walk back.
        if next_depth is None or next_depth <= depth:
            break
        depth = min(next_depth, blocks)
        prefix = hashes[depth - 1]
    return prefix, depth


def request_key(request_id: str) -> int:
    """Key of a prompt without a full block: spreads such requests, the same for a repeated id."""
    return xxh3_64_intdigest(request_id.encode())
