"""Keys of chains: start depth, split table, and what happens at their edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.errors import InvalidRequest
from dualmap.core.keys import EMPTY_SPLITS, SplitTable, key_of, request_key
from dualmap.core.membership import Split

CHAIN = [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("blocks", "start", "splits", "expected"),
    [
        (0, 1, [], (0, 0)),
        (6, 1, [], (11, 1)),
        (6, 2, [], (12, 2)),
        (1, 2, [], (11, 1)),
        (6, 1, [Split(11, 1, 4)], (14, 4)),
        (6, 1, [Split(11, 1, 4), Split(14, 4, 6)], (16, 6)),
        (6, 1, [Split(11, 1, 4), Split(14, 4, 9)], (16, 6)),
        (3, 1, [Split(11, 1, 4)], (13, 3)),
        (1, 1, [Split(11, 1, 4)], (11, 1)),
        (6, 1, [Split(12, 2, 4)], (11, 1)),
        (6, 3, [Split(13, 1, 2)], (13, 3)),
    ],
)
def test_the_key_follows_the_split_table(
    blocks: int, start: int, splits: list[Split], expected: tuple[int, int]
) -> None:
    """The walk goes on while the prefix is split and blocks remain; short chains use their last block."""
    assert key_of(CHAIN[:blocks], start, SplitTable.build(splits)) == expected


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_growing_chat_keeps_its_key(start: int, blocks: int) -> None:
    """Once a chat has the start depth, further turns do not change its key."""
    if blocks >= start:
        assert key_of(CHAIN[:blocks], start, EMPTY_SPLITS) == key_of(CHAIN, start, EMPTY_SPLITS)


def test_a_table_is_ordered_and_counted() -> None:
    """Equal tables are equal however they were offered."""
    a, b = Split(5, 1, 2), Split(4, 2, 3)

    assert SplitTable.build([b, a]).splits == SplitTable.build([a, b]).splits == (a, b)
    assert len(SplitTable.build([a, b])) == 2
    assert SplitTable.build([a]).next_depth(5) == 2
    assert SplitTable.build([a]).next_depth(4) is None


@pytest.mark.parametrize("splits", [[Split(1, 2, 2)], [Split(1, 0, 2)], [Split(1, 1, 2), Split(1, 1, 3)]])
def test_a_table_that_leads_nowhere_or_two_ways_is_refused(splits: list[Split]) -> None:
    """Such a table could end no walk, or end it differently in two processes."""
    with pytest.raises(InvalidRequest, match="splits"):
        SplitTable.build(splits)


def test_prompts_without_a_block_spread_by_request_id() -> None:
    """The same id repeats its key; others have others."""
    assert request_key("a") == request_key("a")
    assert len({request_key(str(n)) for n in range(100)}) == 100
