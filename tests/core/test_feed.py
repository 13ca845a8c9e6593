"""The engine gets enough to stay busy and no more."""

from __future__ import annotations

import pytest

from dualmap.core.feed import UNBOUNDED, FeedRule

RULE = FeedRule(feed_tokens=1_000, max_sequences=4, block_tokens=128)


@pytest.mark.parametrize(
    ("miss", "staged_tokens", "staged", "running", "admitted"),
    [
        (100, 0, 0, 0, True),
        (5_000, 0, 0, 3, True),      # larger than the budget: enters when nothing else prefills
        (5_000, 128, 1, 0, False),
        (872, 128, 1, 0, True),
        (873, 128, 1, 0, False),
        (0, 900, 3, 0, False),       # a fully cached prompt still counts one block
        (0, 872, 3, 0, True),
        (100, 0, 0, 4, False),       # the engine's sequence limit
        (100, 256, 2, 2, False),
    ],
)  # fmt: skip
def test_release_stays_within_the_engines_batch(
    miss: int, staged_tokens: int, staged: int, running: int, admitted: bool
) -> None:
    """Tokens and sequences bound what is released; an idle engine takes any size."""
    assert RULE.admits(miss, staged_tokens, staged, running) is admitted


def test_room_is_what_may_still_be_released() -> None:
    """Room and charge agree with admits."""
    assert RULE.room_tokens(0, 0, 0) == UNBOUNDED
    assert RULE.room_tokens(400, 1, 0) == 600
    assert RULE.room_tokens(0, 0, 4) == 0
    assert RULE.charge(5) == 128
