"""KV event payloads of vLLM and SGLang to values, in every encoding they have had.

It trusts nothing: unknown fields and events are passed over, what is malformed or too large is refused with a reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from dualmap.core.blocks import TOKEN_BYTES

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
MAX_EVENTS = 65_536
MAX_HASHES = 65_536
"""Most blocks that one event may name: a million tokens in blocks of 16."""

PART_BLOCKS = 64
"""Blocks applied in one turn of the loop: half a millisecond to a whole one."""

MAX_TOKENS = 1 << 20
MAX_BLOCK_TOKENS = 1 << 16
MAX_LEAVES = 64
MAX_DEPTH = 4

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
_LORA_NAME_AT = 7


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Engine blocks that follow each other, now held in ``medium``; hashes as unsigned 64 bits.

    ``parent`` None: the first one begins a prompt. ``extra_keys``: for each block what else its hash was made of, as
    strings (numbers as "#n"). ``self_describing``: had there been extra keys, the event would say so.
    """

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: bytes
    block_tokens: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str = ""
    cache_salt: str = ""
    extra_keys: tuple[tuple[str, ...], ...] = ()
    self_describing: bool = False
    group: int | None = None
    spec_kind: str = ""

    def __repr__(self) -> str:
        # Token ids and salts must reach no log.
        return f"BlocksStored({len(self.hashes)} blocks of {self.block_tokens}, medium={self.medium!r})"


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Engine blocks no longer held in ``medium``; None: in no medium at all."""

    hashes: tuple[int, ...]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The cache is empty."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """What one payload said. ``dropped``: a reason for each event passed over. ``partial``: more of it follows."""

    events: tuple[KvEvent, ...]
    rank: int | None = None
    dropped: tuple[str, ...] = ()
    partial: bool = False


class WireError(Exception):
    """A payload, or one event of it, is not what the protocol says; ``reason`` is fit for a metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(payload: bytes, *, sglang: bool = False) -> Batch:
    """One batch. ``sglang``: the eighth element of its array form is metadata, not a LoRA's name.

    Raises WireError where the whole payload is refused. O(payload).
    """
    parts = list(decode_in_parts(payload, sglang=sglang, blocks=MAX_EVENTS * MAX_HASHES))
    return parts[0]


def decode_in_parts(payload: bytes, *, sglang: bool = False, blocks: int = PART_BLOCKS) -> Iterator[Batch]:
    """The same in parts of about so many blocks, so that others get their turn between them; the last is not partial.

    Raises WireError before the first part where the whole payload is refused.
    """
    listed, rank = _opened(payload)
    events: list[KvEvent] = []
    dropped: list[str] = []
    room = blocks
    for item in listed:
        try:
            event = _event(item, sglang=sglang)
        except WireError as error:
            dropped.append(error.reason)
            room -= 1
        else:
            for piece, size in _pieces(event, blocks):
                if room < size and events:
                    yield Batch(tuple(events), rank, tuple(dropped), partial=True)
                    events, dropped, room = [], [], blocks
                events.append(piece)
                room -= size
    yield Batch(tuple(events), rank, tuple(dropped))


def _pieces(event: KvEvent, blocks: int) -> Iterator[tuple[KvEvent, int]]:
    """An event in pieces of at most so many blocks, each beginning where the one before ends; with their sizes."""
    if isinstance(event, AllCleared):
        yield event, 1
        return
    count = len(event.hashes)
    if count <= blocks:
        yield event, count
        return
    for start in range(0, count, blocks):
        hashes = event.hashes[start : start + blocks]
        if isinstance(event, BlocksRemoved):
            yield replace(event, hashes=hashes), len(hashes)
            continue
        step = event.block_tokens * TOKEN_BYTES
        yield (
            replace(
                event,
                hashes=hashes,
                parent=event.hashes[start - 1] if start else event.parent,
                token_ids=event.token_ids[start * step : (start + len(hashes)) * step],
                extra_keys=event.extra_keys[start : start + blocks],
            ),
            len(hashes),
        )


def _opened(payload: bytes) -> tuple[Sequence[object], int | None]:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError("payload_too_large")
    try:
        outer: object = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise WireError("not_msgpack") from error
    listed, rank = _outer(outer)
    if len(listed) > MAX_EVENTS:
        raise WireError("too_many_events")
    return listed, rank


def hash_of(value: object) -> int:
    """An engine's block hash as unsigned 64 bits: of a signed number its two's complement, of bytes the last 8.

    Raises WireError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value & _U64
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise WireError("bad_hash")


def _outer(outer: object) -> tuple[Sequence[object], int | None]:
    rank: object = None
    listed: object = None
    if isinstance(outer, list) and len(outer) >= 2:
        listed = outer[1]
        rank = outer[2] if len(outer) > 2 else None
    elif isinstance(outer, dict):
        listed = outer.get("events")
        rank = outer.get("data_parallel_rank", outer.get("attn_dp_rank"))
    if not isinstance(listed, list):
        raise WireError("not_a_batch")
    return listed, _int_or_none(rank)


def _event(item: object, *, sglang: bool) -> KvEvent:
    if isinstance(item, dict):
        tag, by_name = item.get("type"), item
    elif isinstance(item, list) and item:
        tag, by_name = item[0], {}
        if tag == "BlockStored":
            by_name = _named(_STORED, item, sglang=sglang)
        elif tag == "BlockRemoved":
            by_name = _named(_REMOVED, item, sglang=False)
    else:
        raise WireError("not_an_event")
    reader = _READERS.get(tag) if isinstance(tag, str) else None
    if reader is None:
        raise WireError("unknown_event")
    described = isinstance(item, dict) or len(item) > _LORA_NAME_AT
    return reader(by_name, described)


def _named(names: Sequence[str], item: Sequence[object], *, sglang: bool) -> dict[str, object]:
    by_name = dict(zip(names, item[1:], strict=False))
    metadata = by_name.get("lora_name")
    if isinstance(metadata, dict):
        by_name |= {"lora_name": metadata.get("lora_name"), "cache_salt": metadata.get("cache_salt")}
    elif sglang and metadata is not None:
        by_name |= {"lora_name": None, "cache_salt": metadata}
    return by_name


def _stored(fields: Mapping[str, object], described: bool) -> BlocksStored:
    hashes = _hashes(fields)
    parent = fields.get("parent_block_hash")
    block_tokens = _int_or_none(fields.get("block_size"))
    if block_tokens is None or not 0 < block_tokens <= MAX_BLOCK_TOKENS:
        raise WireError("bad_block_size")
    token_ids = _token_ids(fields.get("token_ids"))
    count = len(token_ids) // 4
    # Only the last block may be shorter: the last page of an SGLang node, a partial block of vLLM.
    if not (len(hashes) - 1) * block_tokens < count <= len(hashes) * block_tokens:
        raise WireError("tokens_and_blocks_disagree")
    extra_keys = _extra_keys(fields.get("extra_keys"), len(hashes))
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else hash_of(parent),
        token_ids=token_ids,
        block_tokens=block_tokens,
        lora_id=_int_or_none(fields.get("lora_id")),
        medium=_str_or_none(fields.get("medium")),
        lora_name=_str_or_none(fields.get("lora_name")) or "",
        cache_salt=_str_or_none(fields.get("cache_salt")) or "",
        extra_keys=extra_keys,
        self_describing=described,
        group=_int_or_none(fields.get("group_idx")),
        spec_kind=_str_or_none(fields.get("kv_cache_spec_kind")) or "",
    )


def _removed(fields: Mapping[str, object], _described: bool) -> BlocksRemoved:
    medium, group = _str_or_none(fields.get("medium")), _int_or_none(fields.get("group_idx"))
    return BlocksRemoved(_hashes(fields), medium, group)


def _cleared(_fields: Mapping[str, object], _described: bool) -> AllCleared:
    return AllCleared()


_READERS: dict[str, Callable[[Mapping[str, object], bool], KvEvent]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}


def _hashes(fields: Mapping[str, object]) -> tuple[int, ...]:
    value = fields.get("block_hashes")
    if not isinstance(value, list) or not value:
        raise WireError("no_hashes")
    if len(value) > MAX_HASHES:
        raise WireError("too_many_hashes")
    return tuple([hash_of(item) for item in value])


def _token_ids(value: object) -> bytes:
    if not isinstance(value, list) or not value:
        raise WireError("no_tokens")
    if len(value) > MAX_TOKENS:
        raise WireError("too_many_tokens")
    if isinstance(value[0], list):
        # Bigram models say (token, next token): the first of each pair is the prompt.
        value = [pair[0] if isinstance(pair, list) and pair else None for pair in value]
    try:
        return struct.pack(f"<{len(value)}I", *value)
    except struct.error as error:
        raise WireError("bad_token") from error


def _extra_keys(value: object, blocks: int) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list):
        return ()
    keys = [tuple(_leaves(item, 0)) for item in value[:blocks]]
    return tuple(keys) if any(keys) else ()


def _leaves(value: object, depth: int) -> list[str]:
    match value:
        case None | bool():
            return []
        case str():
            return [value]
        case bytes():
            return [value.hex()]
        case int() | float():
            return [f"#{value}"]
        case list() | dict():
            if depth == MAX_DEPTH or len(value) > MAX_LEAVES:
                raise WireError("bad_extra_keys")
            items = value.values() if isinstance(value, dict) else value
            return [leaf for item in items for leaf in _leaves(item, depth + 1)]
        case _:
            raise WireError("bad_extra_keys")


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _str_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
