"""Block hashes: what shares a hash and what never does."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.blocks import Chain, ChainKind, caller_chain, root_hash, text_chain, token_chain
from dualmap.core.errors import InvalidRequest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(a: list[int], b: list[int], block: int) -> None:
    """Equal tokens, equal hashes; from the first block that differs on, none is equal."""
    left, right = token_chain(1, packed(a), block), token_chain(1, packed(b), block)

    shared = sum(x == y for x, y in zip(left, right, strict=False))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    assert len(left) == len(a) // block
    assert shared == same // block
    assert left[:shared] == right[:shared]


def test_ids_cannot_be_joined_into_another_prompt() -> None:
    """[1, 23] and [12, 3] are different keys, as token ids and as a caller's ids."""
    assert token_chain(1, packed([1, 23]), 2) != token_chain(1, packed([12, 3]), 2)
    assert caller_chain(1, [1, 23], 2) != caller_chain(1, [12, 3], 2)


def test_parts_of_the_root_cannot_run_into_each_other() -> None:
    """Moving a letter from model to LoRA, or from salt to hash key, gives another root; so does each kind."""
    roots = [
        root_hash("ab", "c"),
        root_hash("a", "bc"),
        root_hash("abc"),
        root_hash("ab", "", "c"),
        root_hash("ab", hash_key=b"c"),
        root_hash("ab", "c", kind=ChainKind.BYTES),
        root_hash("ab", "c", kind=ChainKind.CALLER),
    ]

    assert len(set(roots)) == len(roots)


def test_a_text_is_hashed_in_blocks_of_four_bytes_a_token() -> None:
    """Ten bytes in blocks of one token are two full blocks."""
    assert len(text_chain(1, b"0123456789", 1)) == 2


def test_callers_block_size_is_part_of_its_hashes() -> None:
    """The same ids cut at another block size never meet."""
    assert set(caller_chain(1, [5, 6], 128)).isdisjoint(caller_chain(1, [5, 6], 512))


@pytest.mark.parametrize("block_tokens", [0, -1, 1 << 32])
def test_a_block_size_out_of_range_is_refused(block_tokens: int) -> None:
    """The refusal names the field, for every kind of chain."""
    with pytest.raises(InvalidRequest, match="block_tokens"):
        token_chain(1, b"", block_tokens)
    with pytest.raises(InvalidRequest, match="block_tokens"):
        text_chain(1, b"", block_tokens)
    with pytest.raises(InvalidRequest, match="block_tokens"):
        caller_chain(1, [], block_tokens)


def test_odd_token_bytes_and_ids_out_of_range_are_refused() -> None:
    """Half a token id, or an id beyond 64 bits, is the caller's mistake."""
    with pytest.raises(InvalidRequest, match="token_ids"):
        token_chain(1, b"12345", 1)
    with pytest.raises(InvalidRequest, match="block_hashes"):
        caller_chain(1, [1 << 64], 1)


def test_covered_tokens_never_exceed_the_prompt() -> None:
    """A caller's chain may end in a block that the prompt does not fill."""
    chain = Chain(ChainKind.CALLER, (1, 2, 3), 512, 1_200)

    assert chain.blocks == 3
    assert [chain.covered_tokens(n) for n in range(4)] == [0, 512, 1_024, 1_200]
