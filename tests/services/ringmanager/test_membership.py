"""Membership: joins, leases, drains and who may be removed, on a clock moved by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.errors import InvalidRequest, ParameterMismatch, UnknownInstance
from dualmap.core.membership import InstanceState, Member
from services.ringmanager.membership import LeaseRules, Membership

RULES = LeaseRules(lease_s=3.0, expiry_share=0.2, late_s=1.0)


def member(name: str, agent_epoch: int = 1, model: str = "m") -> Member:
    return Member(name, f"127.0.0.1:{len(name)}", agent_epoch=agent_epoch, model=model)


def pool(*names: str, now_s: float = 0.0) -> Membership:
    membership = Membership(RULES, now_s)
    for name in names:
        membership.join(member(name), now_s)
        membership.full_state_stored(name, 1)
    return membership


def state(membership: Membership, name: str) -> InstanceState | None:
    found = membership.get(name)
    return found.state if found else None


def judge_till(membership: Membership, from_s: float, to_s: float) -> list[tuple[float, str]]:
    gone = []
    for step in range(round((to_s - from_s) * 10) + 1):
        now_s = from_s + step / 10
        gone += [(now_s, member.instance_id) for member in membership.judge(now_s)]
    return gone


def test_a_new_instance_warms_up_before_it_owns_points() -> None:
    """Joined is not yet on the ring: that takes the first full state of this very life."""
    membership = Membership(RULES, 0.0)

    assert membership.join(member("a", 7), 0.0).state is InstanceState.WARMING
    assert not membership.full_state_stored("a", 6)
    assert state(membership, "a") is InstanceState.WARMING
    assert membership.full_state_stored("a", 7)
    assert state(membership, "a") is InstanceState.ACTIVE
    assert not membership.full_state_stored("a", 7)


def test_joining_again_in_the_same_life_changes_nothing() -> None:
    """Join is idempotent: a retry neither warms up again nor takes a drain back."""
    membership = pool("a", "b")
    membership.drain("b")
    before = membership.members

    membership.join(member("a"), 1.0)
    membership.join(member("b"), 1.0)

    assert membership.members == before


def test_a_new_life_warms_up_again() -> None:
    """A restarted agent's state is unknown until its first full state."""
    membership = pool("a")

    assert membership.join(member("a", 2), 1.0).state is InstanceState.WARMING


def test_an_older_life_is_refused_also_after_the_newer_left() -> None:
    """A late join of a process that was replaced never takes the place of the newer one."""
    membership = pool()
    membership.join(member("a", 5), 0.0)

    with pytest.raises(ParameterMismatch, match="agent_epoch 4"):
        membership.join(member("a", 4), 0.0)
    membership.leave("a", 5, 1.0)
    with pytest.raises(ParameterMismatch, match="older life"):
        membership.join(member("a", 4), 0.0)
    membership.join(member("a", 5), 0.0)


def test_a_pool_serves_one_model() -> None:
    """An instance of another model cannot stand in for the others."""
    membership = pool("a")

    with pytest.raises(InvalidRequest, match="model"):
        membership.join(member("b", model="other"), 0.0)


def test_suspect_comes_and_goes_with_the_renewals() -> None:
    """An engine without progress is skipped and returns by itself."""
    membership = pool("a")

    assert membership.renew("a", 1, True, 1.0) is InstanceState.SUSPECT
    assert membership.renew("a", 1, True, 2.0) is InstanceState.SUSPECT
    assert membership.renew("a", 1, False, 3.0) is InstanceState.ACTIVE


def test_a_renewal_of_an_unknown_or_other_life_is_told_to_join() -> None:
    """LEFT is the word for: join again."""
    membership = pool("a")

    assert membership.renew("b", 1, False, 1.0) is InstanceState.LEFT
    assert membership.renew("a", 2, False, 1.0) is InstanceState.LEFT
    assert membership.renew("a", 1, False, 1.0) is InstanceState.ACTIVE


def test_a_drain_can_be_taken_back_to_what_it_was() -> None:
    """Undrain gives ACTIVE, SUSPECT or WARMING back, whichever holds now."""
    membership = pool("a", "b")
    membership.join(member("c"), 0.0)
    for name in "abc":
        assert membership.drain(name).state is InstanceState.DRAINING
    membership.renew("b", 1, True, 1.0)
    assert state(membership, "b") is InstanceState.DRAINING

    assert membership.undrain("a").state is InstanceState.ACTIVE
    assert membership.undrain("b").state is InstanceState.SUSPECT
    assert membership.undrain("c").state is InstanceState.WARMING
    assert membership.undrain("a").state is InstanceState.ACTIVE
    with pytest.raises(UnknownInstance):
        membership.drain("nobody")


def test_a_leave_of_an_older_life_is_ignored() -> None:
    """A dying process does not take its successor off the ring; an operator's word (0) does."""
    membership = pool()
    membership.join(member("a", 3), 0.0)

    assert membership.leave("a", 2, 1.0) is None
    assert membership.get("a") is not None
    assert membership.leave("a", 0, 1.0) is not None
    assert membership.leave("a", 3, 1.0) is None


def test_silence_beyond_the_lease_removes_an_instance() -> None:
    """One that is heard stays; one that is not goes after a lease, not before."""
    membership = pool("a", "b")
    gone = []
    for step in range(80):
        now_s = step / 10
        membership.renew("a", 1, False, now_s)
        gone += [(now_s, m.instance_id) for m in membership.judge(now_s)]

    assert [name for _, name in gone] == ["b"]
    assert 3.0 < gone[0][0] < 3.3


def test_a_machine_whose_clock_was_set_back_waits_a_minute_not_an_hour() -> None:
    """A life counted from a wrong clock is refused while the former one may still call, and taken after that."""
    membership = Membership(RULES, 0.0)
    membership.join(member("a", agent_epoch=7_200_000), 0.0)
    membership.leave("a", 0, 10.0)

    with pytest.raises(ParameterMismatch, match="older life"):
        membership.join(member("a", agent_epoch=1), 69.9)

    assert membership.join(member("a", agent_epoch=1), 70.0).agent_epoch == 1


def test_a_mass_expiry_is_slow() -> None:
    """At most a fifth of the pool goes goes in a lease, two of ten, then one of eight: the fault may be ours."""
    names = [f"i{number}" for number in range(10)]
    membership = pool(*names)

    gone = judge_till(membership, 0.0, 8.9)

    assert [round(at_s) for at_s, _ in gone] == [3, 3, 6]


def test_a_small_pool_still_loses_the_dead() -> None:
    """One of three may expire, although a fifth of three is none."""
    membership = pool("a", "b", "c")

    assert len(judge_till(membership, 0.0, 3.2)) == 1


def test_none_is_judged_for_a_lease_after_a_takeover() -> None:
    """A new leader hears each instance for one full lease before it judges."""
    old = pool("a", "b")
    membership = Membership(RULES, 0.0)
    membership.adopt(old.members, 100.0)

    assert judge_till(membership, 100.0, 102.9) == []
    assert len(judge_till(membership, 103.0, 103.2)) == 1


def test_none_is_judged_for_a_lease_when_the_judge_slept() -> None:
    """A loop that comes late may have missed renewals that were sent in time."""
    membership = pool("a", "b")
    membership.judge(0.1)

    assert membership.judge(10.0) == ()
    assert judge_till(membership, 10.1, 12.9) == []
    assert judge_till(membership, 13.0, 13.2) != []


def test_a_pardon_spares_the_silent_for_one_lease() -> None:
    """Redis back, or a leader's change: nobody goes for a lease."""
    membership = pool("a")
    judge_till(membership, 0.0, 2.9)
    membership.pardon(2.9)

    assert judge_till(membership, 2.9, 5.8) == []


def test_adopted_members_keep_their_states() -> None:
    """A takeover changes no state: who warmed up need not again."""
    old = pool("a", "b", "c")
    old.renew("b", 1, True, 0.0)
    old.drain("c")
    old.join(member("d"), 0.0)
    membership = Membership(RULES, 0.0)

    membership.adopt(old.members, 1.0)

    assert membership.members == old.members
    assert [m.instance_id for m in membership.warming] == ["d"]


def test_only_a_lost_ring_lets_an_instance_skip_warming_up() -> None:
    """Members of a ring that was lost come back to it as they were."""
    membership = Membership(RULES, 0.0)

    assert membership.join(member("a"), 0.0, was_member=True).state is InstanceState.ACTIVE


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 0.9)), max_size=60))
def test_no_schedule_expires_more_than_the_bound_in_a_lease(renewals: list[tuple[str, float]]) -> None:
    """Whatever is heard, in any lease period at most max(1, a fifth) of the pool goes."""
    membership = pool(*"abcdefgh")
    now_s = 0.0
    gone: list[float] = []
    for name, step_s in renewals:
        now_s += step_s
        membership.renew(name, 1, False, now_s)
        gone += [now_s] * len(membership.judge(now_s))

    for at_s in gone:
        assert sum(at_s - 3.0 < other <= at_s for other in gone) <= 1
