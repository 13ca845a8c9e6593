"""Dead instances and blind observers: truth table of the judgement."""

from __future__ import annotations

from dualmap.view.reachability import Reachability

POOL = frozenset({"a", "b", "c", "d"})


def said(*unreachable: tuple[str, float]) -> Reachability:
    reachability = Reachability(lease_ms=3_000)
    for name, at_ms in unreachable:
        reachability.say(name, reachable=False, now_ms=at_ms)
    return reachability


def test_half_of_the_pool_may_be_dead() -> None:
    """Up to half, each is judged by itself."""
    reachability = said(("a", 0), ("b", 0))

    assert not reachability.judge(POOL, 0)
    assert not reachability.usable("a")
    assert reachability.usable("c")


def test_the_only_member_of_a_pool_is_always_usable() -> None:
    """One of one is more than half: refusing it would help nobody, and its lease tells whether it lives."""
    reachability = said(("a", 0))

    assert reachability.judge({"a"}, 0)
    assert reachability.usable("a")

    reachability.judge({"a", "b"}, 0)
    assert not reachability.usable("a")


def test_more_than_half_at_once_is_not_believed() -> None:
    """Three of four within a lease: the observer failed, all stay usable, and it is said once."""
    reachability = said(("a", 0), ("b", 1_000), ("c", 2_000))

    assert reachability.judge(POOL, 2_000)
    assert not reachability.judge(POOL, 2_500)
    assert reachability.usable("a")


def test_more_than_half_one_by_one_is_believed() -> None:
    """The same three, each a lease after the other, are dead."""
    reachability = said(("a", 0), ("b", 4_000), ("c", 8_000))

    assert not reachability.judge(POOL, 8_000)
    assert not reachability.usable("a")


def test_disbelief_lasts_until_half_is_back() -> None:
    """Time alone does not end it; returning instances do."""
    reachability = said(("a", 0), ("b", 0), ("c", 0))
    reachability.judge(POOL, 0)

    reachability.judge(POOL, 60_000)
    much_later = reachability.disbelieved
    reachability.say("a", reachable=True, now_ms=60_000)
    reachability.judge(POOL, 60_000)

    assert much_later
    assert not reachability.usable("b")


def test_the_departed_do_not_count() -> None:
    """An instance that left the pool is no part of the half."""
    reachability = said(("a", 0), ("x", 0), ("y", 0))
    reachability.judge(POOL, 0)
    assert not reachability.disbelieved

    reachability.forget("a")
    assert reachability.usable("a")


def test_repeating_it_does_not_make_it_newer() -> None:
    """The time that counts is when an instance turned, not when it was last said."""
    reachability = said(("a", 0), ("b", 0), ("a", 9_000), ("b", 9_000), ("c", 9_000))

    assert not reachability.judge(POOL, 9_000)


def test_only_news_needs_a_new_judgement() -> None:
    """What is said again costs nothing: a pool of a thousand says ten thousand times a second that it is well."""
    reachability = Reachability()

    said_well = [reachability.say("a", reachable=True, now_ms=0), reachability.say("a", reachable=True, now_ms=1)]
    said_dead = [reachability.say("a", reachable=False, now_ms=2), reachability.say("a", reachable=False, now_ms=3)]

    assert said_well == [False, False]
    assert said_dead == [True, False]
    assert reachability.say("a", reachable=True, now_ms=4)
