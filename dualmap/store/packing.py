"""Values of core as bytes for Redis and files: MessagePack maps decoded by name, each with its format version.

Readable one format back and one ahead: unknown fields are passed over, absent ones take their default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from dualmap.core.membership import InstanceState, Member, PreviousRing, RingParameters, RingSnapshot, Split
from dualmap.core.state import (
    PRIORITY_CLASSES,
    SLACK_BUCKETS,
    LoadReport,
    PrefillCost,
    QueuePolicy,
    StateUpdate,
    TicketsSeen,
)

FORMAT = 1
"""Rises when a reader of the format before would misread, not when a field is added."""

_SEEN_BYTES = 32

T = TypeVar("T", bound="_Packed")


class UnreadableValueError(Exception):
    """A stored value is damaged or two formats away: upgrade this process, or let the owner write it anew."""


class _Packed(msgspec.Struct, kw_only=True):
    f: int = FORMAT


class _Member(msgspec.Struct):
    instance_id: str
    grpc_address: str = ""
    http_address: str = ""
    state: int = InstanceState.WARMING
    weight: float = 1.0
    agent_epoch: int = 0
    model: str = ""
    role: str = "mixed"


class _Split(msgspec.Struct, array_like=True):
    prefix: int
    depth: int
    next_depth: int


class _Previous(msgspec.Struct):
    epoch: int
    members: list[_Member] = []
    splits: list[_Split] = []
    grace_left_ms: int = 0


class _Ring(_Packed):
    pool: str
    epoch: int
    parameters: RingParameters
    members: list[_Member] = []
    splits: list[_Split] = []
    default_ttft_slo_ms: int = 5_000
    previous: _Previous | None = None


class _Seen(msgspec.Struct):
    router_id: int
    watermark: int
    seen: bytes = b""


class _Load(_Packed):
    waiting_s: list[float] = []
    rest_s: float = 0.0
    queue_policy: int = QueuePolicy.SLO
    admitting: bool = True
    waiting_requests: int = 0
    waiting_miss_tokens: int = 0
    running_requests: int = 0
    staged_miss_tokens: int = 0
    kv_use: float = 0.0
    cost: PrefillCost = PrefillCost()
    tickets: list[_Seen] = []
    stalled_ms: float = 0.0
    suspect: bool = False
    moved_out: int = 0
    moved_in: int = 0
    put_back: int = 0
    relays: int = 0
    finished: int = 0
    finished_in_slo: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    offered_s: float = 0.0
    prefix_closed: bool = True
    modelled: bool = False
    host_discount: float = 0.0
    remote_discount: float = 0.0


class _Entry(_Packed, omit_defaults=True):
    incarnation: int
    agent_epoch: int
    since: int
    version: int
    load: bytes = b""
    full: bool = False
    changes: bytes = b""
    kv_digest: int = 0
    kv_blocks: int = 0


_COUNTED = tuple(
    name for name in _Load.__struct_fields__ if name not in {"f", "waiting_s", "queue_policy", "cost", "tickets"}
)
_encoder = msgspec.msgpack.Encoder()
_ring_decoder = msgspec.msgpack.Decoder(_Ring)
_load_decoder = msgspec.msgpack.Decoder(_Load)
_entry_decoder = msgspec.msgpack.Decoder(_Entry)


def pack_ring(ring: RingSnapshot) -> bytes:
    """A ring as bytes."""
    previous = ring.previous
    return _encoder.encode(
        _Ring(
            pool=ring.pool,
            epoch=ring.epoch,
            parameters=ring.parameters,
            members=[_pack_member(member) for member in ring.members],
            splits=[_Split(split.prefix, split.depth, split.next_depth) for split in ring.splits],
            default_ttft_slo_ms=ring.default_ttft_slo_ms,
            previous=None
            if previous is None
            else _Previous(
                epoch=previous.epoch,
                members=[_pack_member(member) for member in previous.members],
                splits=[_Split(split.prefix, split.depth, split.next_depth) for split in previous.splits],
                grace_left_ms=previous.grace_left_ms,
            ),
        )
    )


def unpack_ring(packed: bytes, age_ms: int = 0) -> RingSnapshot:
    """The ring; ``age_ms`` is what of its grace period has gone since. Raises UnreadableValueError."""
    ring = _decode(_ring_decoder, packed)
    previous = None
    if ring.previous is not None and ring.previous.grace_left_ms > age_ms:
        previous = PreviousRing(
            epoch=ring.previous.epoch,
            members=_members(ring.previous.members),
            splits=_splits(ring.previous.splits),
            grace_left_ms=ring.previous.grace_left_ms - age_ms,
        )
    return RingSnapshot(
        pool=ring.pool,
        epoch=ring.epoch,
        parameters=ring.parameters,
        members=_members(ring.members),
        splits=_splits(ring.splits),
        default_ttft_slo_ms=ring.default_ttft_slo_ms,
        previous=previous,
    )


def pack_load(load: LoadReport) -> bytes:
    """A load as bytes."""
    return _encoder.encode(
        _Load(
            waiting_s=list(load.waiting_s),
            queue_policy=int(load.queue_policy),
            cost=load.cost,
            tickets=[
                _Seen(seen.router_id, seen.watermark, seen.seen.to_bytes(_SEEN_BYTES, "little").rstrip(b"\0"))
                for seen in load.tickets
            ],
            **{name: getattr(load, name) for name in _COUNTED},
        )
    )


def unpack_load(packed: bytes) -> LoadReport:
    """The load. Raises UnreadableValueError."""
    load = _decode(_load_decoder, packed)
    cells = PRIORITY_CLASSES * SLACK_BUCKETS
    return LoadReport(
        waiting_s=tuple(load.waiting_s[:cells]) + (0.0,) * (cells - len(load.waiting_s)),
        queue_policy=_known_policy(load.queue_policy),
        cost=load.cost,
        tickets=tuple(
            TicketsSeen(seen.router_id, seen.watermark, int.from_bytes(seen.seen, "little")) for seen in load.tickets
        ),
        **{name: getattr(load, name) for name in _COUNTED},
    )


@dataclass(frozen=True, slots=True)
class PackedChange:
    """One entry of a shard stream but for its instance: the step from ``since`` to ``version``.

    ``full``: the step cannot be told as changes; the whole state is to be loaded. ``load`` is None when unchanged.
    """

    incarnation: int
    agent_epoch: int
    since: int
    version: int
    load: LoadReport | None
    full: bool
    changes: bytes
    kv_digest: int
    kv_blocks: int


def pack_change(update: StateUpdate, load: bytes) -> bytes:
    """A stream entry of an update; of a whole index it says only that there is a new one."""
    return _encoder.encode(
        _Entry(
            incarnation=update.incarnation,
            agent_epoch=update.agent_epoch,
            since=update.since,
            version=update.version,
            load=load,
            full=update.full,
            changes=b"" if update.full else update.changes,
            kv_digest=update.kv_digest,
            kv_blocks=update.kv_blocks,
        )
    )


def unpack_change(packed: bytes) -> PackedChange:
    """The entry. Raises UnreadableValueError."""
    entry = _decode(_entry_decoder, packed)
    return PackedChange(
        incarnation=entry.incarnation,
        agent_epoch=entry.agent_epoch,
        since=entry.since,
        version=entry.version,
        load=unpack_load(entry.load) if entry.load else None,
        full=entry.full,
        changes=entry.changes,
        kv_digest=entry.kv_digest,
        kv_blocks=entry.kv_blocks,
    )


def _decode(decoder: msgspec.msgpack.Decoder[T], packed: bytes) -> T:
    try:
        value = decoder.decode(packed)
    except msgspec.MsgspecError as error:
        raise UnreadableValueError(f"a stored value cannot be read: {error}") from error
    if abs(value.f - FORMAT) > 1:
        raise UnreadableValueError(
            f"a stored value has format {value.f}; this process reads {FORMAT} and its neighbours"
        )
    return value


def _pack_member(member: Member) -> _Member:
    return _Member(
        instance_id=member.instance_id,
        grpc_address=member.grpc_address,
        http_address=member.http_address,
        state=int(member.state),
        weight=member.weight,
        agent_epoch=member.agent_epoch,
        model=member.model,
        role=member.role,
    )


def _members(packed: list[_Member]) -> tuple[Member, ...]:
    return tuple(
        Member(
            instance_id=member.instance_id,
            grpc_address=member.grpc_address,
            http_address=member.http_address,
            state=_known_state(member.state),
            weight=member.weight,
            agent_epoch=member.agent_epoch,
            model=member.model,
            role=member.role,
        )
        for member in packed
    )


def _splits(packed: list[_Split]) -> tuple[Split, ...]:
    return tuple(Split(split.prefix, split.depth, split.next_depth) for split in packed)


def _known_state(number: int) -> InstanceState:
    # A later format's state is skipped like a suspect one: it owns its arcs and gets nothing.
    return InstanceState(number) if number in InstanceState._value2member_map_ else InstanceState.SUSPECT


def _known_policy(number: int) -> QueuePolicy:
    # fifo counts all that waits: never too hopeful.
    return QueuePolicy(number) if number in QueuePolicy._value2member_map_ else QueuePolicy.FIFO
