"""docs/protocol.md against the code: every vector printed there is what we compute."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest, xxh64_intdigest

from dualmap.core.blocks import ChainKind, caller_chain, root_hash, text_chain, token_chain
from dualmap.core.keys import request_key
from dualmap.core.kv_index import KvIndex
from dualmap.core.membership import InstanceState, Member, RingParameters
from dualmap.core.ring import Ring
from dualmap.v1 import types_pb2

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def vectors(name: str) -> list[dict[str, Any]]:
    block = PAGE.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]
    found: list[dict[str, Any]] = json.loads(block)[name]
    assert found
    return found


def numbers(hexes: list[str]) -> list[int]:
    return [int(h, 16) for h in hexes]


@pytest.mark.parametrize("v", vectors("roots"))
def test_roots_are_as_printed(v: dict[str, Any]) -> None:
    """A root follows from the page's bytes, written out here once more by hand."""
    hash_key = bytes.fromhex(v["hash_key_hex"])
    parts = [v["model"].encode(), v["lora"].encode(), v["cache_salt"].encode(), hash_key]
    by_hand = bytes([1, v["kind"]]) + b"".join(len(p).to_bytes(4, "little") + p for p in parts)

    made = root_hash(v["model"], v["lora"], v["cache_salt"], ChainKind(v["kind"]), hash_key)

    assert made == int(v["root"], 16) == xxh3_64_intdigest(by_hand)


@pytest.mark.parametrize("v", vectors("token_chains"))
def test_token_chains_are_as_printed(v: dict[str, Any]) -> None:
    """A chain follows from the page's bytes, full blocks only."""
    ids, size = bytes.fromhex(v["token_ids_hex"]), 4 * v["block_tokens"]
    by_hand, previous = [], int(v["root"], 16)
    for block in range(len(ids) // size):
        previous = xxh3_64_intdigest(previous.to_bytes(8, "little") + ids[block * size : (block + 1) * size])
        by_hand.append(previous)

    assert token_chain(int(v["root"], 16), ids, v["block_tokens"]) == numbers(v["hashes"]) == by_hand


@pytest.mark.parametrize("v", vectors("text_chains"))
def test_text_chains_are_as_printed(v: dict[str, Any]) -> None:
    """A text's blocks are of 4 x block_tokens UTF-8 bytes."""
    assert text_chain(int(v["root"], 16), v["text"].encode(), v["block_tokens"]) == numbers(v["hashes"])


@pytest.mark.parametrize("v", vectors("caller_chains"))
def test_caller_chains_are_as_printed(v: dict[str, Any]) -> None:
    """Each id is mixed with the root and the block size."""
    assert caller_chain(int(v["root"], 16), map(int, v["ids"]), v["block_tokens"]) == numbers(v["hashes"])


@pytest.mark.parametrize("v", vectors("parameters"))
def test_parameter_digests_are_as_printed(v: dict[str, Any]) -> None:
    """The digest covers the six fields in the page's order."""
    fields = [v["hash_version"], v["block_tokens"], v["start_depth"], v["virtual_nodes"]]
    seeds = [int(v["seed_1"]), int(v["seed_2"])]
    by_hand = b"".join(f.to_bytes(4, "little") for f in fields) + b"".join(s.to_bytes(8, "little") for s in seeds)

    assert RingParameters(*fields, *seeds).digest() == int(v["digest"], 16) == xxh3_64_intdigest(by_hand)


@pytest.mark.parametrize("v", vectors("points"))
def test_points_are_as_printed(v: dict[str, Any]) -> None:
    """A point hashes the id, then its number, with the ring's seed."""
    by_hand = v["instance_id"].encode() + v["number"].to_bytes(4, "little")

    assert xxh64_intdigest(by_hand, int(v["seed"])) == int(v["point"], 16)


@pytest.mark.parametrize("v", vectors("pairs"))
def test_pairs_are_as_printed_and_follow_from_the_rule(v: dict[str, Any]) -> None:
    """A pair follows from the page's rule, worked here by looking at every point."""
    key = int(v["key"], 16)
    ring = Ring.build((Member(i, "", state=InstanceState.ACTIVE) for i in v["instances"]), RingParameters())

    def clockwise(seed: int) -> list[str]:
        points = sorted(
            (xxh64_intdigest(i.encode() + n.to_bytes(4, "little"), seed), i) for i in v["instances"] for n in range(160)
        )
        at = xxh64_intdigest(key.to_bytes(8, "little"), seed)
        return [i for point, i in points if point >= at] + [i for point, i in points if point < at]

    first = clockwise(1)[0]
    by_hand = [first, next(i for i in clockwise(2) if i != first)]

    assert list(ring.pair(key, lambda _: True)) == v["pair"] == by_hand
    assert xxh64_intdigest(key.to_bytes(8, "little"), 1) == int(v["on_ring_1"], 16)


@pytest.mark.parametrize("v", vectors("request_keys"))
def test_request_keys_are_as_printed(v: dict[str, Any]) -> None:
    """A prompt without a full block is keyed by its request id."""
    assert request_key(v["request_id"]) == int(v["key"], 16)


@pytest.mark.parametrize("v", vectors("kv_digests"))
def test_index_digests_are_as_printed(v: dict[str, Any]) -> None:
    """The digest of an index is the sum of its blocks' mixes."""
    index = KvIndex()
    for block, tier in v["blocks"]:
        index.set(int(block, 16), tier)

    assert index.digest == int(v["digest"], 16)


@pytest.mark.parametrize("v", vectors("tickets"))
def test_ticket_headers_are_as_printed(v: dict[str, Any]) -> None:
    """The header is the base64 of the serialized ticket."""
    ticket = types_pb2.Ticket.FromString(base64.b64decode(v["header"], validate=True))

    assert ticket.instance_id == v["instance_id"]
    assert (ticket.router_id, ticket.agent_epoch, ticket.sequence) == (
        int(v["router_id"]),
        int(v["agent_epoch"]),
        int(v["sequence"]),
    )
    assert (ticket.attempt, ticket.pool) == (v["attempt"], v["pool"])
