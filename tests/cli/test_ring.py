"""`dualmap ring`: what a ring manager knows, and changes that only the leader makes."""

from __future__ import annotations

import json

from dualmap.core.membership import InstanceState
from tests.cli.conftest import Run
from tests.cli.services import EPOCH, before, collector, member, nobody, ring, ring_manager, serving

PAIR = ring(member("agent-1/0"), member("agent-2/0", InstanceState.WARMING))


def test_the_ring_is_shown_with_who_leads(run: Run) -> None:
    """Members, parameters, grace period; the leader's ring before a standby's."""
    leader = ring_manager(before(PAIR, member("agent-1/0")))
    standby = ring_manager(ring(epoch=EPOCH + 9), leads=False)
    with serving(standby) as second, serving(leader) as first:
        code, out, err = run("ring", "show", "--ring-managers", f"{second},{first}")
        _, said, _ = run("ring", "show", "--ring-managers", f"{second},{first}", "--json")

    assert (code, err) == (0, "")
    assert f"default, epoch {EPOCH}," in out
    assert "moved 25.0% of pairs, grace period 9.0 s more" in out
    assert f"{second} (standby), {first} (leader)" in out
    assert "agent-2/0" in out
    assert "WARMING" in out
    shown = json.loads(said)
    assert (shown["leader"], shown["epoch"], shown["parameters"]["block_tokens"]) == (first, EPOCH, 128)
    assert [one["state"] for one in shown["members"]] == ["ACTIVE", "WARMING"]


def test_the_split_table_is_shown(run: Run) -> None:
    """Prefix and both depths, for people and for programs."""
    with serving(ring_manager(PAIR)) as address:
        _, out, _ = run("ring", "splits", "--ring-managers", address)
        _, said, _ = run("ring", "splits", "--ring-managers", address, "--json")

    assert "00000000000000ab" in out
    assert json.loads(said)["splits"] == [{"prefix": "00000000000000ab", "depth": 1, "next_depth": 4}]


def test_a_drain_goes_to_the_leader_and_can_be_taken_back(run: Run) -> None:
    """A dead manager and a standby are passed over; the share of pairs that will change is told."""
    leader, standby = ring_manager(PAIR), ring_manager(PAIR, leads=False)
    with nobody() as dead, serving(standby) as second, serving(leader) as first:
        managers = ("--ring-managers", f"{dead},{second},{first}")
        drained = run("ring", "drain", "agent-1/0", *managers)
        state = leader.ring.members[0].state
        undrained = run("ring", "undrain", "agent-1/0", *managers)

    assert drained == (0, f"agent-1/0: DRAINING at epoch {EPOCH + 1}; 50.0% of pairs change once it left\n", "")
    assert state is InstanceState.DRAINING
    assert undrained == (0, f"agent-1/0: ACTIVE at epoch {EPOCH + 2}\n", "")
    assert standby.asked == ["agent-1/0", "agent-1/0"]


def test_a_drain_may_be_waited_for(run: Run) -> None:
    """Until the instance left, within a bound; one that stays is an error."""
    going, staying = ring_manager(PAIR, drained_goes=True), ring_manager(PAIR)
    with serving(going) as first, serving(staying) as second:
        left = run("ring", "drain", "agent-1/0", "--wait-s", "5", "--ring-managers", first)
        stays = run("ring", "drain", "agent-1/0", "--wait-s", "0.2", "--ring-managers", second)

    assert left[0] == 0
    assert left[1].endswith("agent-1/0: has left\n")
    assert stays[0] == 1
    assert stays[2] == "dualmap: agent-1/0 still drains after 0.2 s\n"


def test_failures_are_one_line_and_a_code(run: Run) -> None:
    """Unknown instance or pool, no leader, nobody there, another service, no address."""
    leader, standby = ring_manager(PAIR), ring_manager(PAIR, leads=False)
    with (
        nobody() as dead,
        serving(leader) as first,
        serving(standby) as second,
        serving(collector()) as other,
    ):
        for words, says in (
            (("drain", "agent-9/0", "--ring-managers", first), "instance 'agent-9/0' is not known here"),
            (("drain", "agent-1/0", "--ring-managers", f"{second},{dead}"), "the leader is 10.0.0.1:7071"),
            (("undrain", "agent-1/0", "--ring-managers", dead), f"ring manager {dead} does not answer"),
            (("show", "--ring-managers", dead), f"ring manager {dead} does not answer"),
            (("show", "--ring-managers", first, "--pool", "other"), "pool 'other' is not known here"),
            (("splits", "--ring-managers", other), "another service listens"),
            (("show", "--ring-managers", "here"), "'here' is no address"),
        ):
            code, out, err = run("ring", *words)

            assert (code, out) == (1, ""), err
            assert err.startswith("dualmap: ")
            assert err.count("\n") == 1
            assert says in err
