"""The state log: changes since any version it keeps equal the whole, and it says when it cannot."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.kv_index import KvIndex
from dualmap.core.state import LoadReport
from services.instanceagent.state_log import ChangeLog, StateLog

LOAD = LoadReport()


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=120),
    st.integers(1, 40),
    st.integers(0, 130),
)
def test_changes_since_a_version_bring_a_copy_up_to_date_or_the_answer_is_whole(
    changes: list[tuple[int, int]], kept: int, at: int
) -> None:
    """For any history and any bound: base + answer = state, digest included."""
    log = StateLog("a/0", 5, 7, kept)
    copy, base = KvIndex(), (7, 5, log.version)
    for number, (block, tier) in enumerate(changes):
        if number == at:
            copy.replace(log.kv.snapshot())
            base = (7, 5, log.version)
        if tier:
            log.store([block], tier)
        else:
            log.remove([block])
    update = log.update(base, LOAD, full=False)
    if update.snapshot is not None:
        copy.replace(update.snapshot)
    else:
        assert len(update.changes) // 9 <= kept
        copy.apply(update.changes)
    assert (copy.digest, len(copy)) == (update.kv_digest, update.kv_blocks) == (log.kv.digest, len(log.kv))


def test_the_log_forgets_the_oldest_and_says_so() -> None:
    """Beyond its bound a version is no base any more."""
    log = ChangeLog(kept=3)
    for version in range(1, 6):
        log.add(version, bytes([version] * 9))
    assert log.since(1) is None
    assert log.since(2) == bytes([3] * 9 + [4] * 9 + [5] * 9)
    assert log.since(5) == b""
    log.clear(9)
    assert log.since(8) is None
    assert log.since(9) == b""


def test_a_base_of_another_life_or_of_the_future_gets_everything() -> None:
    """Incarnation, agent epoch and version must all be known."""
    log = StateLog("a/0", 5, 7)
    log.store([1, 2], 1)
    for base in ((6, 5, log.version), (7, 4, log.version), (7, 5, log.version + 1), (7, 5, 0)):
        whole = log.update(base, LOAD, full=False)
        assert whole.full is (base != (7, 5, 0))
    assert log.update((7, 5, log.version), LOAD, full=True).full


def test_a_new_incarnation_is_empty_and_no_base_of_the_old_one_holds() -> None:
    """Renewed: higher version, nothing held."""
    log = StateLog("a/0", 5, 7)
    log.store([1, 2], 1)
    old = (7, 5, log.version)
    log.renew(8)
    update = log.update(old, LOAD, full=False)
    assert (update.full, update.incarnation, update.kv_blocks) == (True, 8, 0)
    assert update.version > old[2]


def test_what_changes_nothing_is_no_change() -> None:
    """Storing what is held in that tier, or removing what is not held, advances no version."""
    log = StateLog("a/0", 5, 7)
    log.store([1], 1)
    version = log.version
    log.store([1], 1)
    log.remove([9])
    assert log.version == version


async def test_a_waiter_wakes_at_the_first_change_and_not_before() -> None:
    """Held while nothing changes, answered at once when the caller is behind."""
    log = StateLog("a/0", 5, 7)
    base = (7, 5, log.version)
    waiter = asyncio.ensure_future(log.wait_for_change(base, 30))
    await asyncio.sleep(0)
    assert not waiter.done()
    log.advance()
    await asyncio.wait_for(waiter, 1)
    await asyncio.wait_for(log.wait_for_change(base, 30), 1)
    await log.wait_for_change((7, 5, log.version), 0.01)
