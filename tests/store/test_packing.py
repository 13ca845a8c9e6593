"""Stored values outlive a release: read one format back and ahead, by name, with unknown fields passed over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot
from dualmap.core.state import EMPTY_WAITING, LoadReport, QueuePolicy, StateUpdate, TicketsSeen
from dualmap.store.packing import (
    UnreadableValueError,
    pack_change,
    pack_load,
    pack_ring,
    unpack_change,
    unpack_load,
    unpack_ring,
)

U64 = st.integers(0, 2**64 - 1)
RING = RingSnapshot("p", 5, RingParameters(), (Member("a/0", "h:1", state=InstanceState.ACTIVE),))


def edited(packed: bytes, **fields: object) -> bytes:
    """The value as another release would have written it."""
    content: dict[str, Any] = msgspec.msgpack.decode(packed)
    return msgspec.msgpack.encode({**content, **fields})


@given(
    U64,
    U64,
    st.integers(0, 2**256 - 1),
    st.lists(st.floats(0, 1e9), min_size=24, max_size=24),
    st.sampled_from(QueuePolicy),
)
def test_any_load_comes_back(
    finished: int, router_id: int, seen: int, waiting: list[float], policy: QueuePolicy
) -> None:
    """Every value that a load can hold survives, at the edges of 64 and 256 bits too."""
    load = LoadReport(
        waiting_s=tuple(waiting),
        queue_policy=policy,
        tickets=(TicketsSeen(router_id, finished, seen),),
        finished=finished,
    )

    assert unpack_load(pack_load(load)) == load


@given(st.tuples(U64, U64, U64, U64), st.binary(max_size=90), U64)
def test_any_change_comes_back(identity: tuple[int, int, int, int], changes: bytes, digest: int) -> None:
    """Every step that a stream entry can tell survives."""
    incarnation, agent_epoch, since, version = identity
    update = StateUpdate("a/0", incarnation, agent_epoch, version, since, None, None, changes, digest, 3)

    change = unpack_change(pack_change(update, b""))

    assert (change.incarnation, change.agent_epoch, change.since, change.version) == identity
    assert (change.changes, change.kv_digest, change.kv_blocks) == (changes, digest, 3)
    assert change.load is None
    assert not change.full


@pytest.mark.parametrize("form", [0, 1, 2])
def test_a_neighbouring_format_is_read(form: int) -> None:
    """One format back and one ahead are read, and fields that this release does not know are passed over."""
    assert unpack_ring(edited(pack_ring(RING), f=form, news="unknown")) == RING
    assert unpack_load(edited(pack_load(LoadReport()), f=form, news=[1, 2])) == LoadReport()


def test_fields_that_an_older_release_did_not_write_take_their_default() -> None:
    """Absent is what the field's default says."""
    assert unpack_load(msgspec.msgpack.encode({"f": 1})) == LoadReport()
    ring = unpack_ring(
        msgspec.msgpack.encode({"f": 1, "pool": "p", "epoch": 3, "parameters": {}, "members": [{"instance_id": "a/0"}]})
    )
    assert ring == RingSnapshot("p", 3, RingParameters(), (Member("a/0", ""),))


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\x90", edited(pack_ring(RING), f=3), edited(pack_ring(RING), epoch="x")]
)
def test_what_cannot_be_read_says_so(packed: bytes) -> None:
    """Damage, another shape, or two formats ahead is one named error."""
    with pytest.raises(UnreadableValueError):
        unpack_ring(packed)


def test_a_later_release_may_add_states_and_policies() -> None:
    """An unknown state owns its arcs but gets nothing; an unknown policy is counted as the most pessimistic one."""
    content: dict[str, Any] = msgspec.msgpack.decode(pack_ring(RING))
    content["members"][0]["state"] = 9

    ring = unpack_ring(msgspec.msgpack.encode(content))
    load = unpack_load(edited(pack_load(LoadReport()), queue_policy=9))

    assert ring.members[0].state is InstanceState.SUSPECT
    assert load.queue_policy is QueuePolicy.FIFO


def test_more_or_fewer_buckets_fit() -> None:
    """A table of another size is cut or filled up to ours."""
    assert unpack_load(edited(pack_load(LoadReport()), waiting_s=[1.0])).waiting_s == (1.0, *EMPTY_WAITING[1:])
    assert len(unpack_load(edited(pack_load(LoadReport()), waiting_s=[0.0] * 99)).waiting_s) == len(EMPTY_WAITING)
