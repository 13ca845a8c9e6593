"""Every wire version of KV events is understood; what is unknown is tolerated; what is hostile does no harm."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from dualmap.core.blocks import ChainKind, root_hash, token_chain
from dualmap.core.state import Tier
from services.instanceagent.block_map import BlockMap, MapLimits
from services.instanceagent.engine import KvCleared, KvRemoved, KvStored
from services.instanceagent.kv_wire import (
    MAX_PAYLOAD_BYTES,
    Batch,
    BlocksStored,
    WireError,
    decode,
    decode_in_parts,
    hash_of,
)
from services.instanceagent.learnt_scopes import ScopeBook
from tests.services.instanceagent.wire_captures import ENGINES, Schema, engine_hash, schema

BLOCK_TOKENS = 16
TOKENS = [1_000 + number for number in range(18 * BLOCK_TOKENS)]
HOSTILE = 100_000


class Index:
    """A block map and what it told, as an agent keeps it."""

    def __init__(self, limits: MapLimits | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.scopes = ScopeBook("m")
        self.map = BlockMap(self.scopes, 128, lambda reason: self.counts.update([reason]), limits)
        self.held: dict[int, Tier] = {}
        self.lives = 0

    def take(self, payload: bytes, *, sglang: bool = False, now_s: float = 0.0) -> None:
        self.apply(decode(payload, sglang=sglang), now_s)

    def apply(self, batch: Batch, now_s: float = 0.0) -> None:
        self.counts.update(batch.dropped)
        for change in self.map.apply(batch.events, now_s):
            match change:
                case KvStored():
                    self.held |= dict.fromkeys(change.hashes, change.tier)
                case KvRemoved():
                    for block in change.hashes:
                        del self.held[block]
                case KvCleared():
                    self.held.clear()
                    self.lives += 1


def chain(tokens: list[int] = TOKENS, lora: str = "", salt: str = "") -> list[int]:
    return token_chain(root_hash("m", lora, salt, ChainKind.TOKENS), packed(tokens), 128)


def packed(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def prompt_events(wire: Schema, tokens: list[int] = TOKENS, first: int = 0, **values: Any) -> list[Any]:
    """The stored events of a prompt: one in vLLM, one a page in SGLang."""
    hashes = [engine_hash(wire.engine, first + number) for number in range(len(tokens) // BLOCK_TOKENS)]
    common: dict[str, Any] = {"block_size": BLOCK_TOKENS, "medium": "GPU", **values}
    if wire.engine == "vllm":
        return [wire.stored(block_hashes=hashes, parent_block_hash=None, token_ids=tokens, **common)]
    pages = [tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS)]
    parents = [None, *hashes]
    return [
        wire.stored(block_hashes=[page_hash], parent_block_hash=parent, token_ids=page, **common)
        for page_hash, parent, page in zip(hashes, parents, pages, strict=False)
    ]


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_a_prompt_is_indexed_moved_between_media_and_dropped_as_the_engine_says(engine: str, version: str) -> None:
    """Each version's capture gives our chain, its tiers, its end, and a new life after AllBlocksCleared."""
    wire, index = schema(engine, version), Index()
    sglang = engine == "sglang"
    last = engine_hash(engine, 15)

    index.take(wire.batch(prompt_events(wire)), sglang=sglang)

    assert index.held == dict.fromkeys(chain(), Tier.DEVICE)
    if wire.says_medium:
        host = prompt_events(wire, medium=wire.host_medium)
        index.take(wire.batch([*host, wire.removed(block_hashes=[last], medium="GPU")]), sglang=sglang)
        assert index.held == {chain()[0]: Tier.DEVICE, chain()[1]: Tier.HOST}
        index.take(wire.batch([wire.removed(block_hashes=[last], medium=wire.host_medium)]), sglang=sglang)
    else:
        index.take(wire.batch([wire.removed(block_hashes=[last])]), sglang=sglang)
    assert index.held == {chain()[0]: Tier.DEVICE}
    index.take(wire.batch([wire.cleared()]), sglang=sglang)
    assert (index.held, index.lives, len(index.map)) == ({}, 1, 0)
    assert not index.counts


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_a_batch_in_parts_says_what_it_says_whole(engine: str, version: str) -> None:
    """Parts of few blocks, an event cut where a block ends: the same index, each part small, one the last."""
    wire, whole, parted = schema(engine, version), Index(), Index()
    sglang = engine == "sglang"
    gone = wire.removed(block_hashes=[engine_hash(engine, at) for at in range(17, 9, -1)], medium="GPU")
    for payload in (wire.batch(prompt_events(wire)), wire.batch([*prompt_events(wire), gone, ["Strange"]])):
        whole.take(payload, sglang=sglang)
        parts = list(decode_in_parts(payload, sglang=sglang, blocks=4))
        for part in parts:
            parted.apply(part)

        assert (parted.held, len(parted.map), parted.counts) == (whole.held, len(whole.map), whole.counts)
        assert [part.partial for part in parts] == [True] * (len(parts) - 1) + [False]
        sizes = [sum(len(getattr(event, "hashes", "1")) for event in part.events) for part in parts]
        assert max(sizes) <= 4
        assert sum(sizes) >= 18


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_the_rank_of_a_batch_is_told_where_the_version_has_one(engine: str, version: str) -> None:
    """Data-parallel ranks are part of the identity from the first version that names them."""
    wire = schema(engine, version)

    batch = decode(wire.batch([wire.cleared()], rank=3), sglang=engine == "sglang")

    assert batch.rank == (None if wire.engine == "vllm" and wire.version < (0, 10) else 3)


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_the_same_blocks_announced_again_change_nothing(engine: str, version: str) -> None:
    """Adds are idempotent, with the parent or, as vLLM may, without it."""
    wire, index = schema(engine, version), Index()
    sglang = engine == "sglang"
    index.take(wire.batch(prompt_events(wire)), sglang=sglang)
    again = wire.stored(
        block_hashes=[engine_hash(engine, 8)],
        parent_block_hash=None,
        token_ids=TOKENS[128:144],
        block_size=BLOCK_TOKENS,
        medium="GPU",
    )

    index.take(wire.batch([*prompt_events(wire), again]), sglang=sglang)

    assert index.held == dict.fromkeys(chain(), Tier.DEVICE)
    assert len(index.map) == 18


@pytest.mark.parametrize(("engine", "version"), [item for item in ENGINES if schema(*item).says_scope])
def test_a_salt_of_ours_is_indexed_under_its_root_and_a_strange_one_not_at_all(engine: str, version: str) -> None:
    """Salts are learnt from our own requests; what matches none is left out and counted, never taken for unsalted."""
    wire, index = schema(engine, version), Index()
    sglang = engine == "sglang"
    index.scopes.learn("", "ours", packed(TOKENS))

    def salted(salt: str, first: int) -> bytes:
        keys = [[salt]] + [None] * 17
        return wire.batch(prompt_events(wire, first=first, cache_salt=salt, extra_keys=keys))

    index.take(salted("ours", 0), sglang=sglang)
    index.take(salted("theirs", 100), sglang=sglang)

    assert index.held == dict.fromkeys(chain(salt="ours"), Tier.DEVICE)
    assert index.counts["extra_keys_unmatched"] == 1


def test_sglang_says_a_salt_in_its_eighth_element_before_it_had_names() -> None:
    """The metadata element of 0.5.18 is a salt, not an adapter."""
    wire, index = schema("sglang", "0.5.18"), Index()
    index.scopes.learn("", "ours", packed(TOKENS))

    index.take(wire.batch(prompt_events(wire, metadata="ours")), sglang=True)

    assert index.held == dict.fromkeys(chain(salt="ours"), Tier.DEVICE)


def test_an_adapter_named_by_number_only_is_found_by_the_tokens_we_sent() -> None:
    """Before 0.18 vLLM tells a LoRA as a number: our own request with the same tokens says which one it is."""
    wire, index = schema("vllm", "0.10.2"), Index()
    index.scopes.learn("sql", "", packed(TOKENS))

    index.take(wire.batch(prompt_events(wire, lora_id=1)))
    index.take(wire.batch(prompt_events(wire, tokens=TOKENS[::-1], first=100, lora_id=2)))

    assert index.held == dict.fromkeys(chain(lora="sql"), Tier.DEVICE)
    assert index.counts == {"extra_keys_unmatched": 1}


def test_tokens_that_we_sent_both_salted_and_not_are_not_guessed_where_the_version_cannot_say() -> None:
    """An unmarked event of an old version that fits two of our requests is left out."""
    wire, index = schema("vllm", "0.10.2"), Index()
    index.scopes.learn("", "a", packed(TOKENS))
    index.scopes.learn("", "", packed(TOKENS))

    index.take(wire.batch(prompt_events(wire)))

    assert not index.held
    assert index.counts == {"scope_ambiguous": 1}


def test_an_adapter_with_its_path_is_understood_and_media_are_left_out() -> None:
    """0.32 hashes a LoRA's name and path; a picture's hash matches no request of ours, nor does what follows it."""
    wire, index = schema("vllm", "0.32.0"), Index()
    index.scopes.learn("sql", "", b"")
    keys = [["sql", "/models/sql"]] * 18
    pictured = [["sql", "/models/sql"]] * 8 + [["f00dcafe", 4]] + [None] * 9

    index.take(wire.batch(prompt_events(wire, lora_name="sql", lora_id=1, extra_keys=keys)))
    index.take(wire.batch(prompt_events(wire, TOKENS[::-1], 100, lora_name="sql", lora_id=1, extra_keys=pictured)))

    assert index.held == dict.fromkeys([*chain(lora="sql"), chain(TOKENS[::-1], lora="sql")[0]], Tier.DEVICE)
    assert index.counts == {"extra_keys_unmatched": 1}


def test_windows_and_states_of_hybrid_models_say_nothing_about_the_prefix() -> None:
    """Only the group that keeps the whole prefix is indexed, its removal alone removes."""
    wire, index = schema("vllm", "0.25.0"), Index()
    full = prompt_events(wire, group_idx=0, kv_cache_spec_kind="full_attention")
    window = prompt_events(wire, first=100, group_idx=1, kv_cache_spec_kind="sliding_window")

    index.take(wire.batch([*full, *window, wire.removed(block_hashes=[engine_hash("vllm", 0)], group_idx=1)]))

    assert index.held == dict.fromkeys(chain(), Tier.DEVICE)
    assert index.counts == {"other_cache_group": 1}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_unknown_fields_and_events_are_passed_over(engine: str) -> None:
    """A newer engine's batch loses only what is new in it, in both encodings."""
    newer = {"type": "BlockPinned", "block_hashes": [1], "until": 3}
    stored = msgspec.to_builtins(prompt_events(schema("vllm", "0.25.0"))[0])
    as_map = msgspec.msgpack.encode([1.0, [newer, {**stored, "colour": "red"}], 0, "more"])
    array = msgspec.to_builtins(prompt_events(schema("vllm", "0.23.0"), group_idx=0)[0])
    as_array = msgspec.msgpack.encode([1.0, [["BlockPinned", 1], [*array, *[None] * 9, "red"]], 0])

    for payload in (as_map, as_array):
        index = Index()
        index.take(payload, sglang=engine == "sglang")
        assert index.held == dict.fromkeys(chain(), Tier.DEVICE)
        assert index.counts == {"unknown_event": 1}


def test_an_unknown_medium_is_taken_for_the_slowest() -> None:
    """A new name of a medium costs credit, not the block."""
    wire, index = schema("vllm", "0.25.0"), Index()

    index.take(wire.batch(prompt_events(wire, medium="HOLOGRAM")))

    assert index.held == dict.fromkeys(chain(), Tier.REMOTE)
    assert index.counts == {"unknown_medium": 1}


def test_media_not_worth_indexing_are_left_out() -> None:
    """Remote stores can be given no credit."""
    wire, index = schema("vllm", "0.25.0"), Index(MapLimits(tiers=frozenset({Tier.DEVICE, Tier.HOST})))

    index.take(wire.batch(prompt_events(wire, medium="OBJ")))
    assert not index.held
    index.take(wire.batch(prompt_events(wire, medium="CPU")))

    assert index.held == dict.fromkeys(chain(), Tier.HOST)


def test_hashes_are_one_whatever_their_form() -> None:
    """Signed, unsigned and raw digests of one block are the same block."""
    unsigned = 0xFEDC_BA98_7654_3210
    digest = bytes(range(24)) + unsigned.to_bytes(8, "big")

    assert hash_of(unsigned) == hash_of(unsigned - (1 << 64)) == hash_of(digest) == unsigned
    for wrong in (True, 1.5, "7", b"", None):
        with pytest.raises(WireError):
            hash_of(wrong)


def test_raw_digests_are_accepted_in_events() -> None:
    """As vLLM sends them with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    wire, index = schema("vllm", "0.25.0"), Index()
    hashes = [bytes(24) + engine_hash("vllm", number).to_bytes(8, "big") for number in range(18)]
    event = wire.stored(block_hashes=hashes, parent_block_hash=None, token_ids=TOKENS, block_size=16, medium="GPU")

    index.take(wire.batch([event, wire.removed(block_hashes=[engine_hash("vllm", 8)], medium="GPU")]))

    assert index.held == {chain()[0]: Tier.DEVICE}


def test_token_pairs_of_bigram_models_give_the_prompt() -> None:
    """EAGLE's keys are pairs: the first of each is the prompt's token."""
    wire, index = schema("sglang", "0.5.23"), Index()
    pairs = [[token, token + 1] for token in TOKENS]
    hashes = [engine_hash("sglang", number) for number in range(18)]
    events = [
        wire.stored(
            block_hashes=[item], parent_block_hash=parent, token_ids=pairs[at * 16 : at * 16 + 16], block_size=16
        )
        for at, (item, parent) in enumerate(zip(hashes, [None, *hashes], strict=False))
    ]

    index.take(wire.batch(events), sglang=True)

    assert index.held == dict.fromkeys(chain(), Tier.DEVICE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": [-1] * 288}, "bad_token"),
        ({"token_ids": [1 << 32] * 288}, "bad_token"),
        ({"token_ids": ["a"] * 288}, "bad_token"),
        ({"token_ids": []}, "no_tokens"),
        ({"token_ids": TOKENS[:100]}, "tokens_and_blocks_disagree"),
        ({"token_ids": [*TOKENS, 1]}, "tokens_and_blocks_disagree"),
        ({"block_size": 0}, "bad_block_size"),
        ({"block_size": -16}, "bad_block_size"),
        ({"block_size": 1 << 40}, "bad_block_size"),
        ({"block_hashes": []}, "no_hashes"),
        ({"block_hashes": "abc"}, "no_hashes"),
        ({"block_hashes": [None] * 18}, "bad_hash"),
        ({"parent_block_hash": "x"}, "bad_hash"),
        ({"extra_keys": [[[[[[[1]]]]]]]}, "bad_extra_keys"),
        ({"extra_keys": [["k"] * 1_000]}, "bad_extra_keys"),
    ],
)
def test_a_malformed_event_is_dropped_with_its_reason_and_the_rest_of_its_batch_applied(
    change: dict[str, Any], reason: str
) -> None:
    """One bad event never costs its neighbours."""
    stored = msgspec.to_builtins(prompt_events(schema("vllm", "0.25.0"))[0])
    index = Index()

    index.take(msgspec.msgpack.encode([1.0, [{**stored, **change}, stored], 0]))

    assert index.counts == {reason: 1}
    assert index.held == dict.fromkeys(chain(), Tier.DEVICE)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not_msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not_msgpack"),
        (b"\x91" * 100_000, "not_msgpack"),
        (msgspec.msgpack.encode(7), "not_a_batch"),
        (msgspec.msgpack.encode([1.0]), "not_a_batch"),
        (msgspec.msgpack.encode([1.0, 2]), "not_a_batch"),
        (msgspec.msgpack.encode([1.0, [0] * 70_000]), "too_many_events"),
        (bytes(MAX_PAYLOAD_BYTES + 1), "payload_too_large"),
    ],
)
def test_a_payload_that_is_no_batch_is_refused_with_its_reason(payload: bytes, reason: str) -> None:
    """Refusals are values that a counter takes."""
    with pytest.raises(WireError) as refused:
        decode(payload)

    assert refused.value.reason == reason


def hostile(chance: random.Random, captures: list[bytes]) -> bytes:
    """Noise, cut captures, captures with changed bytes, and well-formed nonsense."""
    capture = chance.choice(captures)
    match chance.randrange(4):
        case 0:
            return chance.randbytes(chance.randrange(64))
        case 1:
            return capture[: chance.randrange(len(capture))]
        case 2:
            changed = bytearray(capture)
            for _ in range(chance.randrange(1, 5)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            return bytes(changed)
        case _:
            return msgspec.msgpack.encode([nonsense(chance, 0), [nonsense(chance, 0) for _ in range(3)], 0])


def nonsense(chance: random.Random, depth: int) -> object:
    kind = chance.randrange(9 if depth < 3 else 6)
    if kind >= 8:
        tag = chance.choice(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
        names = ("block_hashes", "token_ids", "block_size", "parent_block_hash", "medium", "extra_keys")
        return {"type": tag} | {name: nonsense(chance, depth + 1) for name in names}
    if kind >= 6:
        return [nonsense(chance, depth + 1) for _ in range(chance.randrange(5))]
    values = [None, True, chance.getrandbits(64), -chance.getrandbits(63), chance.randbytes(9), "BlockStored"]
    return values[kind]


def test_a_hundred_thousand_hostile_payloads_neither_crash_nor_grow_the_index() -> None:
    """Whatever arrives is refused by name; the map stays within its bounds, and so does the time."""
    chance = random.Random(20_260_214)
    captures = [
        schema(*item).batch([*prompt_events(schema(*item), TOKENS[:64]), schema(*item).cleared()]) for item in ENGINES
    ]
    limits = MapLimits(max_blocks=500, max_orphans=100)
    index = Index(limits)
    refused: Counter[str] = Counter()
    began_s = time.monotonic()

    for number in range(HOSTILE):
        payload = hostile(chance, captures)
        try:
            batch = decode(payload, sglang=number % 2 == 0)
        except WireError as error:
            refused[error.reason] += 1
            continue
        assert all(isinstance(event.token_ids, bytes) for event in batch.events if isinstance(event, BlocksStored))
        index.map.apply(batch.events, float(number))
        assert len(index.map) <= limits.max_blocks
        assert index.map.orphans <= limits.max_orphans

    assert sum(refused.values()) > HOSTILE / 4
    assert len(index.map._entries) <= limits.max_blocks
    assert len(index.map._pending) <= limits.max_orphans
    # A bound on a hang, not a measurement.
    assert time.monotonic() - began_s < 60


def test_pure_noise_leaves_the_index_empty() -> None:
    """Random bytes hold no event."""
    chance = random.Random(7)
    index = Index()

    for _ in range(20_000):
        try:
            index.take(chance.randbytes(chance.randrange(200)))
        except WireError:
            continue

    assert (len(index.map), index.held) == (0, {})
