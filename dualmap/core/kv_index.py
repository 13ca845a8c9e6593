"""Blocks that one instance holds and in which tier, packed (10 bytes a block), with a digest of the whole.

A small directory by the first bits of a hash narrows a bisection from the whole index to some ten blocks.

It knows nothing of engines, events or versions: an agent fills it, every view repeats it.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dualmap.core.errors import InvalidRequest
from dualmap.core.state import KvSnapshot, Tier

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX_1 = 0xBF58_476D_1CE4_E5B9
_MIX_2 = 0x94D0_49BB_1331_11EB

_CHANGE = struct.Struct("<QB")
_CHANGE_DTYPE = np.dtype([("hash", "<u8"), ("tier", "u1")])
_MERGE_FROM = 64
"""Changes in a batch from which one merge (about 8 ns a held block) beats single inserts."""

_ONE = np.uint32(1)

_MAX_TIER = int(max(Tier))
_HOST = int(Tier.HOST)

U64Array = npt.NDArray[np.uint64]
U8Array = npt.NDArray[np.uint8]


def pack_change(block_hash: int, tier: int) -> bytes:
    """One record of ``apply``: the hash (little-endian uint64), then the tier now held in, 0 for gone."""
    return _CHANGE.pack(block_hash, tier)


def mix64(block_hash: int, tier: int) -> int:
    """A block's share of the digest: the splitmix64 finaliser over hash + tier x golden ratio, mod 2^64."""
    x = (block_hash + tier * _GOLDEN) & _MASK
    x = (x ^ x >> 30) * _MIX_1 & _MASK
    x = (x ^ x >> 27) * _MIX_2 & _MASK
    return x ^ x >> 31


class KvIndex:
    """Sorted hashes and, beside them, tiers. A look-up is one bisection; a single change moves memory once."""

    __slots__ = ("_counts", "_digest", "_hashes", "_high", "_low", "_shift", "_starts", "_tiers", "slow")

    def __init__(self) -> None:
        self._hashes = array("Q")
        self._tiers = bytearray()
        self._digest = 0
        self.slow = 0
        """Blocks held on no device: none, and a look needs no tiers."""

        self._direct()

    @property
    def digest(self) -> int:
        """Sum of ``mix64`` over the blocks, mod 2^64: equal indexes, equal digests, in whatever order they grew."""
        return self._digest

    @property
    def nbytes(self) -> int:
        """Bytes held, with what growth allocated in advance."""
        return sys.getsizeof(self._hashes) + sys.getsizeof(self._tiers) + sys.getsizeof(self._starts)

    def __len__(self) -> int:
        return len(self._hashes)

    def replace(self, snapshot: KvSnapshot) -> None:
        """Take over a whole index.

        Raises:
            InvalidRequest: lengths disagree, hashes do not ascend, or a tier is unknown; the index is unchanged.
        """
        if len(snapshot.hashes) != 8 * len(snapshot.tiers):
            raise InvalidRequest("snapshot", "hashes and tiers differ in number")
        hashes: U64Array = np.frombuffer(snapshot.hashes, "<u8")
        tiers: U8Array = np.frombuffer(snapshot.tiers, np.uint8)
        if not bool(np.all(hashes[1:] > hashes[:-1])):
            raise InvalidRequest("snapshot", "hashes do not ascend")
        if not bool(np.all((tiers > 0) & (tiers <= _MAX_TIER))):
            raise InvalidRequest("snapshot", "a tier is unknown")
        self._store(hashes, tiers)
        self._digest = _mix_sum(hashes, tiers)

    def apply(self, changes: bytes) -> None:
        """Make packed changes in their order; idempotent.

        Raises:
            InvalidRequest: not whole records, or an unknown tier; the index is unchanged.
        """
        if len(changes) % _CHANGE.size:
            raise InvalidRequest("changes", f"{len(changes)} bytes are not whole 9-byte records")
        if len(changes) >= _MERGE_FROM * _CHANGE.size:
            self._merge(np.frombuffer(changes, _CHANGE_DTYPE))
            return
        if changes and max(changes[8::9]) > _MAX_TIER:
            raise InvalidRequest("changes", "a tier is unknown")
        for block_hash, tier in _CHANGE.iter_unpack(changes):
            self._change(block_hash, tier)

    def set(self, block_hash: int, tier: int) -> None:
        """Hold a block in a tier, or move it there.

        Raises:
            InvalidRequest: an unknown tier.
        """
        if not 0 < tier <= _MAX_TIER:
            raise InvalidRequest("tier", f"{tier} is unknown")
        self._change(block_hash, tier)

    def discard(self, block_hash: int) -> None:
        """Forget a block; one not held is no error."""
        self._change(block_hash, 0)

    def tier_of(self, block_hash: int) -> int:
        """Tier of a block, 0 when it is not held: O(log blocks), about 0.2 µs."""
        hashes = self._hashes
        position = bisect_left(hashes, block_hash)
        if position < len(hashes) and hashes[position] == block_hash:
            return self._tiers[position]
        return 0

    def leading_blocks(self, hashes: Sequence[int], prefix_closed: bool = True) -> int:
        """Blocks of a chain held without a gap from its root.

        With ``prefix_closed`` (a held block implies its ancestors are held) it looks at the first block, then halves
        what is left: O(log chain x log blocks), one look-up where nothing is held.
        """
        held = self._hashes
        size = len(held)
        chain = len(hashes)
        if not prefix_closed:
            for number, block in enumerate(hashes):
                position = bisect_left(held, block)
                if position == size or held[position] != block:
                    return number
            return chain
        starts, shift = self._starts, self._shift
        low, probe, high = 0, 0, chain  # blocks before `low` are held, none from `high` on
        while low < high:
            block = hashes[probe]
            top = block >> shift
            position = bisect_left(held, block, starts[top], starts[top + 1])
            if position < size and held[position] == block:
                low = probe + 1
            else:
                high = probe
            probe = (low + high) >> 1
        return low

    def leading_tiers(self, hashes: Sequence[int], n: int) -> bytes:
        """Tier of each of the first ``n`` blocks of a chain, one byte each, 0 for not held."""
        return bytes(self.tier_of(block) for block in hashes[:n])

    def slow_blocks(self, hashes: Sequence[int], held: int, prefix_closed: bool = True) -> tuple[int, int]:
        """How many of a chain's first ``held`` blocks are on the host, and how many further away.

        With ``prefix_closed`` a block is taken to be nowhere faster than its parent: O(log held x log blocks).
        """
        if not self.slow:
            return 0, 0
        if not prefix_closed:
            tiers = self.leading_tiers(hashes, held)
            return tiers.count(_HOST), tiers.count(_MAX_TIER)

        def tier(place: int) -> int:
            return self.tier_of(hashes[place])

        host_from = bisect_left(range(held), _HOST, key=tier)
        remote_from = bisect_left(range(held), _MAX_TIER, lo=host_from, key=tier)
        return remote_from - host_from, held - remote_from

    def lost_blocks(
        self, hashes: Sequence[int], held: int, host_discount: float, remote_discount: float, prefix_closed: bool = True
    ) -> int:
        """By how much a chain's first ``held`` blocks are worth less than on the device, in whole blocks rounded up."""
        host, remote = self.slow_blocks(hashes, held, prefix_closed)
        return math.ceil(host * host_discount + remote * remote_discount)

    def snapshot(self) -> KvSnapshot:
        """The whole index as it travels."""
        return KvSnapshot(np.asarray(self._hashes).astype("<u8", copy=False).tobytes(), bytes(self._tiers))

    def _change(self, block_hash: int, tier: int) -> None:
        hashes, tiers = self._hashes, self._tiers
        position = bisect_left(hashes, block_hash)
        if position < len(hashes) and hashes[position] == block_hash:
            self._digest -= mix64(block_hash, tiers[position])
            self.slow -= tiers[position] >= _HOST
            if tier:
                tiers[position] = tier
            else:
                del hashes[position]
                del tiers[position]
                self._counts[(block_hash >> self._shift) + 1 :] -= _ONE
                if len(hashes) < self._low:
                    self._direct()
        elif tier:
            hashes.insert(position, block_hash)
            tiers.insert(position, tier)
            self._counts[(block_hash >> self._shift) + 1 :] += _ONE
            if len(hashes) > self._high:
                self._direct()
        if tier:
            self._digest += mix64(block_hash, tier)
            self.slow += tier >= _HOST
        self._digest &= _MASK

    def _merge(self, changes: npt.NDArray[np.void]) -> None:
        """A big batch at once: the last record of each hash counts."""
        if int(changes["tier"].max()) > _MAX_TIER:
            raise InvalidRequest("changes", "a tier is unknown")
        changed, last = np.unique(changes["hash"][::-1], return_index=True)
        new_tiers: U8Array = changes["tier"][::-1][last]
        held: U64Array = np.frombuffer(self._hashes, np.uint64)
        held_tiers: U8Array = np.frombuffer(self._tiers, np.uint8)
        position = np.searchsorted(held, changed)
        found = position < len(held)
        found[found] = held[position[found]] == changed[found]
        stays = np.ones(len(held), bool)
        stays[position[found]] = False
        digest = self._digest - _mix_sum(held[~stays], held_tiers[~stays])
        kept, kept_tiers = held[stays], held_tiers[stays]
        lives = new_tiers > 0
        changed, new_tiers = changed[lives], new_tiers[lives]
        at = np.searchsorted(kept, changed)
        del held, held_tiers  # they pin the buffers that are replaced below
        self._store(np.insert(kept, at, changed), np.insert(kept_tiers, at, new_tiers))
        self._digest = (digest + _mix_sum(changed, new_tiers)) & _MASK

    def _store(self, hashes: U64Array, tiers: U8Array) -> None:
        packed = array("Q")
        packed.frombytes(hashes.astype(np.uint64, copy=False).tobytes())
        self._hashes = packed
        self._tiers = bytearray(tiers.tobytes())
        self.slow = int(np.count_nonzero(tiers >= _HOST))
        self._direct()

    def _direct(self) -> None:
        """Make the directory anew: where the blocks of each leading bit pattern start, 8 to 16 blocks a pattern."""
        size = len(self._hashes)
        bits = max(0, size.bit_length() - 4)
        self._shift = 64 - bits
        firsts = np.array([0], np.uint64)
        if bits:
            firsts = np.arange(1 << bits, dtype=np.uint64) << np.uint64(self._shift)
        starts = np.searchsorted(np.asarray(self._hashes), firsts).astype(np.uint32)
        self._starts = array("I", starts.tobytes())
        self._starts.append(size)
        self._counts: npt.NDArray[np.uint32] = np.frombuffer(self._starts, np.uint32)
        self._low, self._high = size // 4, 2 * size + 16


def _mix_sum(hashes: U64Array, tiers: U8Array) -> int:
    """Sum of ``mix64`` over blocks; numpy's uint64 wraps as mod 2^64 asks."""
    x = hashes + tiers.astype(np.uint64) * np.uint64(_GOLDEN)
    x = (x ^ x >> np.uint64(30)) * np.uint64(_MIX_1)
    x = (x ^ x >> np.uint64(27)) * np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return int(x.sum(dtype=np.uint64)) & _MASK
