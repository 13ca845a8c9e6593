"""Who is in a pool and what all its processes must agree on: values only, no ring arithmetic (see ring.py)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum

import xxhash


class InstanceState(IntEnum):
    """Life of an instance on the ring; numbers equal those of the contract."""

    WARMING = 1
    ACTIVE = 2
    SUSPECT = 3
    DRAINING = 4
    LEFT = 5

    @property
    def on_ring(self) -> bool:
        """Whether the instance owns points of the rings."""
        return self in (InstanceState.ACTIVE, InstanceState.SUSPECT, InstanceState.DRAINING)


@dataclass(frozen=True, slots=True)
class RingParameters:
    """What must be equal everywhere for equal prompts to give equal pairs (design: ring parameters)."""

    hash_version: int = 1
    block_tokens: int = 128
    start_depth: int = 1
    virtual_nodes: int = 160
    seed_1: int = 1
    seed_2: int = 2

    def digest(self) -> int:
        """64-bit digest of all fields; never 0, which stands for "none yet" on the wire."""
        packed = struct.pack(
            "<IIIIQQ",
            self.hash_version,
            self.block_tokens,
            self.start_depth,
            self.virtual_nodes,
            self.seed_1,
            self.seed_2,
        )
        return xxhash.xxh3_64_intdigest(packed) or 1

    def first_difference(self, other: RingParameters) -> str | None:
        """Name of the first field that differs, or None."""
        for field in fields(self):
            if getattr(self, field.name) != getattr(other, field.name):
                return field.name
        return None


@dataclass(frozen=True, slots=True)
class Member:
    """One instance as the ring knows it."""

    instance_id: str
    grpc_address: str
    http_address: str = ""
    state: InstanceState = InstanceState.WARMING
    weight: float = 1.0
    agent_epoch: int = 0
    model: str = ""
    role: str = "mixed"


@dataclass(frozen=True, slots=True)
class Split:
    """A prefix too hot for one pair: the key walk that meets it goes on to ``next_depth`` blocks."""

    prefix: int
    depth: int
    next_depth: int


@dataclass(frozen=True, slots=True)
class PreviousRing:
    """The mapping before the last change, readable while its caches are warm."""

    epoch: int
    members: tuple[Member, ...]
    splits: tuple[Split, ...]
    grace_left_ms: int


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """A pool's ring at one epoch, whole."""

    pool: str
    epoch: int
    parameters: RingParameters
    members: tuple[Member, ...] = ()
    splits: tuple[Split, ...] = ()
    default_ttft_slo_ms: int = 5_000
    previous: PreviousRing | None = None
