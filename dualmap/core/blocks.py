"""Prompt to cumulative block hashes, byte for byte as docs/protocol.md says; engine hashes are never made here."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from dualmap.core.errors import InvalidRequest

HASH_VERSION = 1
"""First byte of every root: another version, other hashes."""

TOKEN_BYTES = 4
"""A token id is a little-endian uint32; of a text, four UTF-8 bytes are taken as one token."""

_LENGTH = struct.Struct("<I")
_put_hash = struct.Struct("<Q").pack_into
_HASH_BYTES = 8
_CALLER_BLOCK = struct.Struct("<QIQ")


class ChainKind(IntEnum):
    """How a chain came about; kinds never share a hash. Numbers equal those of the contract."""

    TOKENS = 1
    BYTES = 2
    CALLER = 3


class Chain(NamedTuple):
    """Hashes of a prompt's full blocks, root first, and the size of the whole prompt with its partial tail."""

    kind: ChainKind
    hashes: Sequence[int]
    block_tokens: int
    prompt_tokens: int

    @property
    def blocks(self) -> int:
        """Number of full blocks."""
        return len(self.hashes)

    def covered_tokens(self, blocks: int) -> int:
        """Prompt tokens that the first ``blocks`` blocks hold, never more than the prompt has."""
        return min(blocks * self.block_tokens, self.prompt_tokens)


def root_hash(
    model: str, lora: str = "", cache_salt: str = "", kind: ChainKind = ChainKind.TOKENS, hash_key: bytes = b""
) -> int:
    """h_0: what must be equal before equal tokens may share a cache. Lengths keep the parts apart."""
    parts = [bytes((HASH_VERSION, kind))]
    for part in (model.encode(), lora.encode(), cache_salt.encode(), hash_key):
        parts += (_LENGTH.pack(len(part)), part)
    return xxh3_64_intdigest(b"".join(parts))


def token_chain(root: int, token_ids: bytes, block_tokens: int) -> list[int]:
    """Hashes of the full blocks of little-endian uint32 token ids; about 0.17 µs a block of 128.

    Raises:
        InvalidRequest: the bytes are not whole token ids, or ``block_tokens`` is below 1.
    """
    if len(token_ids) % TOKEN_BYTES:
        raise InvalidRequest("token_ids", f"{len(token_ids)} bytes are not a whole number of 4-byte token ids")
    return _chain(root, token_ids, block_tokens)


def text_chain(root: int, utf8: bytes, block_tokens: int) -> list[int]:
    """Hashes of the full blocks of ``4 * block_tokens`` bytes of a text; the root must be of kind BYTES.

    Raises:
        InvalidRequest: ``block_tokens`` is below 1.
    """
    return _chain(root, utf8, block_tokens)


def caller_chain(root: int, ids: Iterable[int], block_tokens: int) -> list[int]:
    """A caller's own cumulative ids, each mixed into our hash space; the root must be of kind CALLER.

    Raises:
        InvalidRequest: an id is no uint64, or ``block_tokens`` is not in 1 to 2^32 - 1.
    """
    _require_block(block_tokens)
    pack = _CALLER_BLOCK.pack
    try:
        return [xxh3_64_intdigest(pack(root, block_tokens, block_id)) for block_id in ids]
    except struct.error as error:
        raise InvalidRequest("block_hashes", "every id must be an unsigned 64-bit number") from error


def _chain(root: int, data: bytes, block_tokens: int) -> list[int]:
    _require_block(block_tokens)
    block_bytes = TOKEN_BYTES * block_tokens
    full_bytes = len(data) - len(data) % block_bytes
    # The hash before a block goes over the end of the block before, which is hashed already: no copy a block.
    chained = bytearray(_HASH_BYTES)
    chained += data
    blocks = memoryview(chained)
    hashed_bytes = _HASH_BYTES + block_bytes
    hashes: list[int] = []
    put_hash, digest_of, keep = _put_hash, xxh3_64_intdigest, hashes.append
    previous = root
    for start in range(0, full_bytes, block_bytes):
        put_hash(chained, start, previous)
        previous = digest_of(blocks[start : start + hashed_bytes])
        keep(previous)
    return hashes


def _require_block(block_tokens: int) -> None:
    if not 0 < block_tokens < 1 << 32:
        raise InvalidRequest("block_tokens", f"{block_tokens} is not in 1 to 2^32 - 1")
