"""Ring messages <-> core values. Refuses what no ring may hold, naming the field; decides nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import InstanceState, Member, PreviousRing, RingParameters, RingSnapshot, Split
from dualmap.v1 import ring_pb2, types_pb2

MAX_EPOCH = 1 << 62
"""Epochs are wall-clock milliseconds or a little more; one beyond this would leave no room above it."""

MAX_WEIGHT = 16.0
MAX_SAMPLES = 4_096
"""Of one report: four times what a router sends a second, so that a report after a pause still passes."""
MAX_SAMPLE_HASHES = 256
MAX_SPLITS = 65_536
MAX_DEPTH = 16_384
MAX_RENEWALS = 4_096
MAX_REQUESTS = 1 << 40

ROLES = ("mixed", "prefill", "decode")

# Ids become part of Redis keys and labels: no spaces, and no braces, which would choose the cluster's slot.
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@/-]{0,199}")
_MAX_TEXT = 512


@dataclass(frozen=True, slots=True)
class Join:
    """A wish to be a member."""

    wish: Member
    highest_epoch_seen: int = 0
    parameters_digest: int = 0
    parameters: RingParameters | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """One instance's sign of life."""

    instance_id: str
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """Signs of life of one agent."""

    agent_epoch: int
    renewals: tuple[Renewal, ...]
    highest_epoch_seen: int = 0


@dataclass(frozen=True, slots=True)
class HeatSampleValue:
    """One sampled chain: hashes from depth ``first_depth`` on, root side first."""

    hashes: tuple[int, ...]
    first_depth: int
    requests: int = 1
    miss_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HeatReport:
    """What a router saw since its last report; ``splits`` is None when it offers no table."""

    router_id: int
    samples: tuple[HeatSampleValue, ...] = ()
    requests: int = 0
    parameters_digest: int = 0
    highest_epoch_seen: int = 0
    splits: tuple[Split, ...] | None = None
    splits_epoch: int = 0


def ring_to_message(snapshot: RingSnapshot) -> ring_pb2.Ring:
    """The whole ring."""
    message = ring_pb2.Ring(
        pool=snapshot.pool,
        epoch=snapshot.epoch,
        parameters=parameters_to_message(snapshot.parameters),
        members=[member_to_message(member) for member in snapshot.members],
        splits=[split_to_message(split) for split in snapshot.splits],
        default_ttft_slo_ms=snapshot.default_ttft_slo_ms,
    )
    if snapshot.previous is not None:
        message.previous.CopyFrom(_previous_to_message(snapshot.previous))
    return message


def ring_from_message(message: ring_pb2.Ring) -> RingSnapshot:
    """The whole ring. Raises InvalidRequest when no ring manager of ours can have sent it."""
    check_epoch(message.epoch, "ring.epoch")
    previous = None
    if message.HasField("previous"):
        previous = PreviousRing(
            message.previous.epoch,
            _members_of(message.previous.members, "ring.previous.members"),
            splits_of(message.previous.splits, "ring.previous.splits"),
            message.previous.grace_left_ms,
        )
    return RingSnapshot(
        pool=message.pool,
        epoch=message.epoch,
        parameters=parameters_of(message.parameters, "ring.parameters"),
        members=_members_of(message.members, "ring.members"),
        splits=splits_of(message.splits, "ring.splits"),
        default_ttft_slo_ms=message.default_ttft_slo_ms or 5_000,
        previous=previous,
    )


def member_to_message(member: Member) -> ring_pb2.Member:
    """One member."""
    return ring_pb2.Member(
        address=address_to_message(member),
        state=state_to_message(member.state),
        weight=member.weight,
        agent_epoch=member.agent_epoch,
        model=member.model,
        role=member.role,
    )


def address_to_message(member: Member) -> types_pb2.InstanceAddress:
    """How to reach a member."""
    return types_pb2.InstanceAddress(
        instance_id=member.instance_id, grpc_address=member.grpc_address, http_address=member.http_address
    )


def member_of(message: ring_pb2.Member, field: str = "member") -> Member:
    """One member. Raises InvalidRequest."""
    return Member(
        instance_id=instance_id_of(message.address.instance_id, f"{field}.address.instance_id"),
        grpc_address=_text(message.address.grpc_address, f"{field}.address.grpc_address"),
        http_address=_text(message.address.http_address, f"{field}.address.http_address"),
        state=state_of(message.state, f"{field}.state"),
        weight=_weight(message.weight, f"{field}.weight"),
        agent_epoch=message.agent_epoch,
        model=_text(message.model, f"{field}.model"),
        role=_role(message.role, f"{field}.role"),
    )


def parameters_to_message(parameters: RingParameters) -> types_pb2.RingParameters:
    """Ring parameters."""
    return types_pb2.RingParameters(
        hash_version=parameters.hash_version,
        block_tokens=parameters.block_tokens,
        start_depth=parameters.start_depth,
        virtual_nodes=parameters.virtual_nodes,
        seed_1=parameters.seed_1,
        seed_2=parameters.seed_2,
    )


def parameters_of(message: types_pb2.RingParameters, field: str = "parameters") -> RingParameters:
    """Ring parameters. Raises InvalidRequest for those no ring can be built with."""
    for name in ("hash_version", "block_tokens", "start_depth", "virtual_nodes"):
        if getattr(message, name) < 1:
            raise InvalidRequest(f"{field}.{name}", "must be at least 1")
    if message.seed_1 == message.seed_2:
        raise InvalidRequest(f"{field}.seed_2", "must differ from seed_1: the two rings would be one")
    return RingParameters(
        hash_version=message.hash_version,
        block_tokens=message.block_tokens,
        start_depth=message.start_depth,
        virtual_nodes=message.virtual_nodes,
        seed_1=message.seed_1,
        seed_2=message.seed_2,
    )


def split_to_message(split: Split) -> ring_pb2.Split:
    """One entry of the split table."""
    return ring_pb2.Split(prefix=split.prefix, depth=split.depth, next_depth=split.next_depth)


def splits_of(messages: Iterable[ring_pb2.Split], field: str = "splits") -> tuple[Split, ...]:
    """A split table. Raises InvalidRequest for an entry on which the key walk would not advance."""
    splits = tuple(Split(message.prefix, message.depth, message.next_depth) for message in messages)
    if len(splits) > MAX_SPLITS:
        raise InvalidRequest(field, f"at most {MAX_SPLITS}, got {len(splits)}")
    for index, split in enumerate(splits):
        if not 1 <= split.depth < split.next_depth <= MAX_DEPTH:
            problem = f"depth {split.depth} must be 1 or more and below next_depth {split.next_depth}"
            raise InvalidRequest(f"{field}[{index}]", problem)
    if len({split.prefix for split in splits}) != len(splits):
        raise InvalidRequest(field, "a prefix is split twice")
    return splits


def state_to_message(state: InstanceState) -> types_pb2.InstanceState.ValueType:
    """The contract's number of a state."""
    return types_pb2.InstanceState.ValueType(int(state))


def state_of(value: int, field: str = "state") -> InstanceState:
    """A state. Raises InvalidRequest for a number of no state."""
    try:
        return InstanceState(value)
    except ValueError as error:
        raise InvalidRequest(field, f"{value} is no state") from error


def join_of(message: ring_pb2.JoinRequest) -> Join:
    """A wish to be a member. Raises InvalidRequest naming the field."""
    wish = Member(
        instance_id=instance_id_of(message.address.instance_id, "address.instance_id"),
        grpc_address=_text(message.address.grpc_address, "address.grpc_address"),
        http_address=_text(message.address.http_address, "address.http_address"),
        weight=_weight(message.weight, "weight"),
        agent_epoch=agent_epoch_of(message.agent_epoch),
        model=_text(message.model, "model"),
        role=_role(message.role, "role"),
    )
    if not wish.grpc_address:
        raise InvalidRequest("address.grpc_address", "is required: host:port of the agent's gRPC server")
    check_epoch(message.highest_epoch_seen, "highest_epoch_seen")
    parameters = parameters_of(message.parameters) if message.HasField("parameters") else None
    return Join(wish, message.highest_epoch_seen, message.parameters_digest, parameters)


def join_to_message(pool: str, join: Join) -> ring_pb2.JoinRequest:
    """The message of a wish, as an agent sends it."""
    wish = join.wish
    return ring_pb2.JoinRequest(
        pool=pool,
        address=address_to_message(wish),
        weight=wish.weight,
        agent_epoch=wish.agent_epoch,
        model=wish.model,
        role=wish.role,
        highest_epoch_seen=join.highest_epoch_seen,
        parameters_digest=join.parameters_digest,
        parameters=parameters_to_message(join.parameters) if join.parameters else None,
    )


def renew_of(message: ring_pb2.RenewRequest) -> Renew:
    """Signs of life. Raises InvalidRequest naming the field."""
    if len(message.instances) > MAX_RENEWALS:
        raise InvalidRequest("instances", f"at most {MAX_RENEWALS}, got {len(message.instances)}")
    check_epoch(message.highest_epoch_seen, "highest_epoch_seen")
    renewals = tuple(
        Renewal(instance_id_of(item.instance_id, f"instances[{index}].instance_id"), item.suspect)
        for index, item in enumerate(message.instances)
    )
    return Renew(agent_epoch_of(message.agent_epoch), renewals, message.highest_epoch_seen)


def heat_of(message: ring_pb2.ReportHeatRequest) -> HeatReport:
    """A router's report. Raises InvalidRequest naming the field."""
    if len(message.samples) > MAX_SAMPLES:
        raise InvalidRequest("samples", f"at most {MAX_SAMPLES}, got {len(message.samples)}")
    check_epoch(message.highest_epoch_seen, "highest_epoch_seen")
    check_epoch(message.splits_epoch, "splits_epoch")
    if message.requests > MAX_REQUESTS:
        raise InvalidRequest("requests", f"at most {MAX_REQUESTS}")
    offered = splits_of(message.splits) if message.splits_epoch else None
    return HeatReport(
        router_id=message.router_id,
        samples=tuple(_sample_of(sample, f"samples[{index}]") for index, sample in enumerate(message.samples)),
        requests=message.requests,
        parameters_digest=message.parameters_digest,
        highest_epoch_seen=message.highest_epoch_seen,
        splits=offered,
        splits_epoch=message.splits_epoch,
    )


def heat_to_message(pool: str, report: HeatReport) -> ring_pb2.ReportHeatRequest:
    """The message of a report, as a router sends it."""
    return ring_pb2.ReportHeatRequest(
        pool=pool,
        router_id=report.router_id,
        samples=[
            ring_pb2.HeatSample(
                hashes=sample.hashes,
                first_depth=sample.first_depth,
                requests=sample.requests,
                miss_tokens=sample.miss_tokens,
            )
            for sample in report.samples
        ],
        requests=report.requests,
        parameters_digest=report.parameters_digest,
        highest_epoch_seen=report.highest_epoch_seen,
        splits=[split_to_message(split) for split in report.splits or ()],
        splits_epoch=report.splits_epoch,
    )


def instance_id_of(value: str, field: str = "instance_id") -> str:
    """An instance's id. Raises InvalidRequest when it could not be part of a key."""
    if not _INSTANCE_ID.fullmatch(value):
        raise InvalidRequest(field, "must be 1 to 200 of letters, digits and _.:@/-, such as agent-1/0")
    return value


def agent_epoch_of(value: int, field: str = "agent_epoch") -> int:
    """The life of an agent process. Raises InvalidRequest for 0, which stands for none."""
    if value < 1:
        raise InvalidRequest(field, "must be at least 1, and higher at each start of the agent")
    return value


def check_epoch(value: int, field: str) -> None:
    """Raises InvalidRequest for an epoch that would leave none above it."""
    if value > MAX_EPOCH:
        raise InvalidRequest(field, f"{value} is no ring epoch")


def _previous_to_message(previous: PreviousRing) -> ring_pb2.PreviousRing:
    return ring_pb2.PreviousRing(
        epoch=previous.epoch,
        members=[member_to_message(member) for member in previous.members],
        splits=[split_to_message(split) for split in previous.splits],
        grace_left_ms=max(0, previous.grace_left_ms),
    )


def _members_of(messages: Iterable[ring_pb2.Member], field: str) -> tuple[Member, ...]:
    return tuple(member_of(message, f"{field}[{index}]") for index, message in enumerate(messages))


def _sample_of(message: ring_pb2.HeatSample, field: str) -> HeatSampleValue:
    if not 1 <= len(message.hashes) <= MAX_SAMPLE_HASHES:
        raise InvalidRequest(f"{field}.hashes", f"must be 1 to {MAX_SAMPLE_HASHES}, got {len(message.hashes)}")
    if not 1 <= message.first_depth <= MAX_DEPTH:
        raise InvalidRequest(f"{field}.first_depth", f"must be 1 to {MAX_DEPTH}")
    return HeatSampleValue(tuple(message.hashes), message.first_depth, message.requests or 1, message.miss_tokens)


def _weight(value: float, field: str) -> float:
    if value == 0:
        return 1.0
    if not (math.isfinite(value) and 0 < value <= MAX_WEIGHT):
        raise InvalidRequest(field, f"must be above 0 and at most {MAX_WEIGHT:g}")
    return value


def _role(value: str, field: str) -> str:
    if value not in ("", *ROLES):
        raise InvalidRequest(field, f"must be one of {', '.join(ROLES)}, or empty for mixed")
    return value or "mixed"


def _text(value: str, field: str) -> str:
    if len(value) > _MAX_TEXT or not value.isprintable():
        raise InvalidRequest(field, f"must be at most {_MAX_TEXT} printable characters")
    return value
