"""What the benchmarks route: prompts in four forms over families that share a prefix, and the states that hold them.

All of it comes from a seed: two runs send the same bytes but for the request ids.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualmap.core.blocks import ChainKind, root_hash, text_chain, token_chain
from dualmap.core.keys import EMPTY_SPLITS, key_of
from dualmap.core.kv_index import KvIndex
from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot
from dualmap.core.ring import Ring
from dualmap.core.state import KvSnapshot, LoadReport, PrefillCost, StateUpdate
from dualmap.rpc.convert_client import route_message
from dualmap.rpc.route_values import Prompt, Request

POOL = "bench"
MODEL = "default"
AGENT_EPOCH = 1
INCARNATION = 1

FAST = LoadReport(cost=PrefillCost(a_s=1e-6, b_s_per_token=1e-10))
"""Engines so fast that bookings never threaten the SLO: every decision is that of the pair."""

_TAIL_SHARE = 0.4
"""Share of a chain that no one holds: the new part of a prompt."""

_TEXT = "The cache is warm where the prefix was served before. "
_WORDS = 4


@dataclass(frozen=True, slots=True)
class Form:
    """A prompt form: its name, its blocks of 128 tokens, how many different bodies are sent in turn."""

    name: str
    kind: str
    tokens: int
    bodies: int


HASHES_20 = Form("20 hashes", "hashes", 20 * 128, 2048)
HASHES_640 = Form("640 hashes", "hashes", 640 * 128, 512)
TOKENS_10K = Form("10,000 token_ids", "token_ids", 10_000, 128)
TEXT_10K = Form("10,000 bytes of text", "text", 2_500, 256)
FORMS = (HASHES_20, HASHES_640, TOKENS_10K, TEXT_10K)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt: as a client sends it, and its chain."""

    prompt: Prompt
    hashes: tuple[int, ...]

    @property
    def body(self) -> bytes:
        """The RouteRequest without its id, which is appended at each send."""
        return route_message(Request("", self.prompt)).SerializeToString()

    @property
    def held(self) -> tuple[int, ...]:
        """The blocks of its family, held somewhere."""
        return self.hashes[: len(self.hashes) - max(1, int(len(self.hashes) * _TAIL_SHARE))]


def samples(form: Form, seed: int = 1, families: int = 64) -> list[Sample]:
    """The form's prompts, family after family in turn."""
    draw = random.Random(f"{seed} {form.name}")
    make = {"hashes": _by_hashes, "token_ids": _by_tokens, "text": _by_text}[form.kind]
    heads = [draw.getrandbits(64) for _ in range(families)]
    return [make(form, heads[number % families], number) for number in range(form.bodies)]


def _by_hashes(form: Form, head: int, number: int) -> Sample:
    blocks = form.tokens // 128
    tail = max(1, int(blocks * _TAIL_SHARE))
    shared, own = random.Random(head), random.Random(head ^ number << 1 ^ 1)
    hashes = tuple([shared.getrandbits(64) for _ in range(blocks - tail)] + [own.getrandbits(64) for _ in range(tail)])
    return Sample(Prompt.of_hashes(hashes, form.tokens + 5), hashes)


def _by_tokens(form: Form, head: int, number: int) -> Sample:
    tail = int(form.tokens * _TAIL_SHARE)
    shared, own = np.random.default_rng(head), np.random.default_rng([head, number])
    ids = np.concatenate([shared.integers(0, 128_000, form.tokens - tail), own.integers(0, 128_000, tail)])
    data = ids.astype("<u4").tobytes()
    return Sample(Prompt.of_tokens(data), tuple(token_chain(root_hash(MODEL), data, 128)))


def _by_text(form: Form, head: int, number: int) -> Sample:
    length = form.tokens * _WORDS
    tail = int(length * _TAIL_SHARE)
    text = (f"{head:x} " + _TEXT * (length // len(_TEXT) + 1))[: length - tail]
    text = (text + f"{number} " + _TEXT * (tail // len(_TEXT) + 1))[:length]
    root = root_hash(MODEL, kind=ChainKind.BYTES)
    return Sample(Prompt.of_text(text), tuple(text_chain(root, text.encode(), 128)))


def members(count: int) -> tuple[Member, ...]:
    """ACTIVE members with addresses as long as real ones."""
    return tuple(
        Member(
            f"agent-{number}/0",
            f"10.0.{number // 256}.{number % 256}:7080",
            f"10.0.{number // 256}.{number % 256}:8080",
            InstanceState.ACTIVE,
            agent_epoch=AGENT_EPOCH,
        )
        for number in range(count)
    )


def ring_of(count: int, epoch: int = 1) -> RingSnapshot:
    """The published ring of so many members."""
    return RingSnapshot(POOL, epoch, RingParameters(), members(count))


def indexes(count: int, blocks: int, held: Sequence[Sample], seed: int = 1) -> dict[str, KvIndex]:
    """Each instance's index: families whose pair it is in (half of them on both), then noise up to ``blocks``."""
    ring = Ring.build(members(count), RingParameters())
    wanted: dict[str, set[int]] = {name: set() for name in ring.instance_ids}
    for number, sample in enumerate(held):
        first, second = ring.pair(key_of(sample.hashes, 1, EMPTY_SPLITS)[0], lambda _name: True)
        wanted[first or ""].update(sample.held)
        if second is not None and number % 2:
            wanted[second].update(sample.held[: len(sample.held) // 2])
    noise = np.random.default_rng(seed)
    return {name: _index(hashes, blocks, noise) for name, hashes in wanted.items()}


def _index(hashes: set[int], blocks: int, noise: np.random.Generator) -> KvIndex:
    filler = noise.integers(0, 1 << 63, max(0, blocks - len(hashes)), dtype=np.uint64)
    every = np.unique(np.concatenate([np.fromiter(hashes, np.uint64, len(hashes)), filler]))
    index = KvIndex()
    index.replace(KvSnapshot(every.astype("<u8").tobytes(), b"\1" * len(every)))
    return index


def whole_state(instance_id: str, index: KvIndex, load: LoadReport = FAST) -> StateUpdate:
    """The first whole state of an instance."""
    return StateUpdate(
        instance_id, INCARNATION, AGENT_EPOCH, 1, 0, load, index.snapshot(), b"", index.digest, len(index)
    )


def with_id(body: bytes, request_id: str) -> bytes:
    """The request's bytes with its id; fields of a message may come in any order."""
    return body + struct.pack("BB", 0x0A, len(request_id)) + request_id.encode()


def streamed(raw: bytes) -> bytes:
    """A RouteRequest as the one field of a RouteStreamRequest."""
    length, prefix = len(raw), bytearray(b"\x0a")
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + raw
