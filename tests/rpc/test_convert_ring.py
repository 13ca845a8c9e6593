"""Ring messages: what goes in comes out, and what no ring may hold is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import InstanceState, Member, PreviousRing, RingParameters, RingSnapshot, Split
from dualmap.rpc.convert_ring import (
    HeatReport,
    HeatSampleValue,
    Join,
    heat_of,
    heat_to_message,
    join_of,
    join_to_message,
    parameters_of,
    renew_of,
    ring_from_message,
    ring_to_message,
    splits_of,
)
from dualmap.v1 import ring_pb2, types_pb2

U64 = st.integers(0, (1 << 64) - 1)
EPOCHS = st.integers(0, 1 << 62)
members = st.builds(
    Member,
    instance_id=st.from_regex(r"[a-z]{1,8}/[0-9]{1,2}", fullmatch=True),
    grpc_address=st.just("host:1"),
    http_address=st.sampled_from(["", "host:2"]),
    state=st.sampled_from(InstanceState),
    weight=st.floats(0.1, 16),
    agent_epoch=U64,
    model=st.sampled_from(["", "m"]),
    role=st.sampled_from(["mixed", "prefill", "decode"]),
)
splits = st.lists(
    st.builds(lambda p, d, n: Split(p, d, d + n), U64, st.integers(1, 50), st.integers(1, 50)),
    unique_by=lambda split: split.prefix,
    max_size=4,
).map(tuple)
previous = st.builds(PreviousRing, EPOCHS, st.lists(members, max_size=3).map(tuple), splits, st.integers(0, 60_000))
snapshots = st.builds(
    RingSnapshot,
    pool=st.just("pool"),
    epoch=EPOCHS,
    parameters=st.builds(RingParameters, seed_1=st.just(7), seed_2=U64.filter(lambda seed: seed != 7)),
    members=st.lists(members, max_size=4).map(tuple),
    splits=splits,
    default_ttft_slo_ms=st.integers(1, 60_000),
    previous=st.none() | previous,
)


@given(snapshots)
def test_a_ring_survives_the_wire(snapshot: RingSnapshot) -> None:
    """Nothing of a ring is lost or invented between two processes."""
    wire = ring_to_message(snapshot).SerializeToString()

    assert ring_from_message(ring_pb2.Ring.FromString(wire)) == snapshot


def test_a_join_and_a_heat_report_survive_the_wire() -> None:
    """What an agent or a router means is what the ring manager reads."""
    join = Join(Member("a/0", "h:1", agent_epoch=3, model="m"), 9, RingParameters().digest(), RingParameters())
    report = HeatReport(5, (HeatSampleValue((1, 2), 1, 3, 4),), 7, 8, 9, (Split(1, 1, 2),), 10)

    assert join_of(join_to_message("pool", join)) == join
    assert heat_of(heat_to_message("pool", report)) == report


def test_absent_means_the_default() -> None:
    """Weight 1, role mixed, one request a sample, no table offered."""
    request = ring_pb2.JoinRequest(
        address=types_pb2.InstanceAddress(instance_id="a/0", grpc_address="h:1"), agent_epoch=1
    )
    heat = ring_pb2.ReportHeatRequest(samples=[ring_pb2.HeatSample(hashes=[1], first_depth=1)])

    wish = join_of(request).wish
    assert (wish.weight, wish.role, wish.state) == (1.0, "mixed", InstanceState.WARMING)
    assert heat_of(heat).samples[0].requests == 1
    assert heat_of(heat).splits is None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (ring_pb2.Split(prefix=1, depth=2, next_depth=2), "splits[0]"),
        (ring_pb2.Split(prefix=1, depth=0, next_depth=2), "splits[0]"),
        (ring_pb2.Split(prefix=1, depth=1, next_depth=1 << 20), "splits[0]"),
    ],
)
def test_a_split_that_leads_nowhere_is_refused(message: ring_pb2.Split, field: str) -> None:
    """The key walk must advance, or it would never end."""
    with pytest.raises(InvalidRequest) as refused:
        splits_of([message])

    assert refused.value.field == field


def test_a_prefix_split_twice_is_refused() -> None:
    """Two routers could walk two ways."""
    twice = [ring_pb2.Split(prefix=1, depth=1, next_depth=depth) for depth in (2, 3)]

    with pytest.raises(InvalidRequest, match="twice"):
        splits_of(twice)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_tokens": 0}, "parameters.block_tokens"),
        ({"virtual_nodes": 0}, "parameters.virtual_nodes"),
        ({"seed_2": 1}, "parameters.seed_2"),
    ],
)
def test_parameters_no_ring_can_have_are_refused(change: dict[str, int], field: str) -> None:
    """Each by its name."""
    values = {"hash_version": 1, "block_tokens": 128, "start_depth": 1, "virtual_nodes": 160, "seed_1": 1, "seed_2": 2}

    with pytest.raises(InvalidRequest) as refused:
        parameters_of(types_pb2.RingParameters(**{**values, **change}))

    assert refused.value.field == field


@pytest.mark.parametrize("name", ["", "a b", "{a}", "a" * 201, "-a", "ä"])
def test_an_id_that_cannot_be_part_of_a_key_is_refused(name: str) -> None:
    """Ids become keys and labels."""
    request = ring_pb2.RenewRequest(instances=[ring_pb2.RenewInstance(instance_id=name)], agent_epoch=1)

    with pytest.raises(InvalidRequest) as refused:
        renew_of(request)

    assert refused.value.field == "instances[0].instance_id"


def test_an_over_long_report_is_refused() -> None:
    """Bounded work for each call."""
    many = [ring_pb2.HeatSample(hashes=[1], first_depth=1)] * 4_097
    long = ring_pb2.HeatSample(hashes=range(1, 258), first_depth=1)

    for samples, field in ((many, "samples"), ([long], "samples[0].hashes")):
        with pytest.raises(InvalidRequest) as refused:
            heat_of(ring_pb2.ReportHeatRequest(samples=samples))
        assert refused.value.field == field
