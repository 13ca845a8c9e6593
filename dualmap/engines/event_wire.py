"""KV events as each version of vLLM and SGLang writes them: which fields, array or map, which hashes, which frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

Dialect = Literal["vllm", "sglang"]
Version = tuple[int, ...]

DEFAULT_VERSIONS: dict[Dialect, str] = {"vllm": "0.25.0", "sglang": "0.5.23"}
_SIGN = 1 << 63
_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow each other, now held in ``medium``; a parent of None begins a prompt."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    block_tokens: int
    medium: str = "GPU"
    lora_name: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks no longer held in ``medium``."""

    hashes: tuple[int, ...]
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


Event = Stored | Removed | Cleared


def parse_version(text: str) -> Version:
    """Numbers of a version like "0.25.0" or "0.5.9.post1". Raises ValueError."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    if len(numbers) < 2:
        raise ValueError(f"{text!r} is no version like 0.25.0")
    return tuple(numbers)


@dataclass(frozen=True, slots=True)
class EventWire:
    """The encoding of one engine version. ``bytes_hashes``: vLLM with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""

    dialect: Dialect
    version: Version
    bytes_hashes: bool = False

    @property
    def as_map(self) -> bool:
        """Whether events are maps by name, not arrays by place."""
        return self.version >= ((0, 24) if self.dialect == "vllm" else (0, 5, 20))

    @property
    def replay_topic(self) -> bool:
        """Whether replayed frames carry the topic."""
        return self.version >= ((0, 25) if self.dialect == "vllm" else (0, 5, 22))

    @property
    def names_medium(self) -> bool:
        """Whether events say the medium."""
        return self.version >= ((0, 11, 1) if self.dialect == "vllm" else (0, 5, 9))

    @property
    def host_medium(self) -> str:
        """What host memory is called."""
        return "CPU" if self.dialect == "vllm" else "CPU_PINNED"

    def batch(self, at_s: float, events: Sequence[Event], rank: int) -> bytes:
        """The payload of one frame."""
        outer: list[object] = [at_s, [self._event(event) for event in events]]
        if self.dialect == "sglang" or self.version >= (0, 10):
            outer.append(rank)
        return msgspec.msgpack.encode(outer)

    def _event(self, event: Event) -> object:
        match event:
            case Stored():
                return self._shape("BlockStored", self._stored(event), required=7)
            case Removed():
                fields: list[tuple[str, object]] = [("block_hashes", [self._hash(item) for item in event.hashes])]
                if self.names_medium:
                    fields.append(("medium", event.medium))
                if self.dialect == "vllm" and self.version >= (0, 19):
                    fields.append(("group_idx", 0))
                return self._shape("BlockRemoved", fields, required=2)
            case Cleared():
                return self._shape("AllBlocksCleared", [], required=0)

    def _stored(self, event: Stored) -> list[tuple[str, object]]:
        fields: list[tuple[str, object]] = [
            ("block_hashes", [self._hash(item) for item in event.hashes]),
            ("parent_block_hash", None if event.parent is None else self._hash(event.parent)),
            ("token_ids", event.token_ids),
            ("block_size", event.block_tokens),
            ("lora_id", 1 if event.lora_name else None),
        ]
        if self.names_medium:
            fields.append(("medium", event.medium))
        return fields + (self._vllm_extras(event) if self.dialect == "vllm" else self._sglang_extras(event))

    def _vllm_extras(self, event: Stored) -> list[tuple[str, object]]:
        extras: list[tuple[str, object]] = []
        if self.version >= (0, 18):
            extras += [("lora_name", event.lora_name or None), ("extra_keys", _extra_keys(event))]
        if self.version >= (0, 19):
            extras.append(("group_idx", 0))
        if self.version >= (0, 22):
            extras += [("kv_cache_spec_kind", "full_attention"), ("kv_cache_spec_sliding_window", None)]
        if self.version >= (0, 32):
            extras += [("locality", "LOCAL"), ("ownership", None), ("session_id", None)]
        return extras

    def _sglang_extras(self, event: Stored) -> list[tuple[str, object]]:
        if self.as_map:
            extras: list[tuple[str, object]] = [("cache_salt", event.cache_salt or None), ("session_id", None)]
            return [*extras, ("lora_name", event.lora_name or None)] if self.version >= (0, 5, 22) else extras
        if event.cache_salt and self.version >= (0, 5, 18):
            return [("metadata", {"cache_salt": event.cache_salt})]
        return []

    def _shape(self, tag: str, fields: list[tuple[str, object]], required: int) -> object:
        if self.as_map:
            # Required fields are there even when null, optional ones are left out then.
            kept = {name: value for at, (name, value) in enumerate(fields) if at < required or value is not None}
            return {"type": tag, **kept}
        values = [value for _, value in fields]
        while len(values) > required and values[-1] is None:
            values.pop()
        return [tag, *values]

    def _hash(self, block_hash: int) -> int | bytes:
        if self.dialect == "sglang":
            return block_hash - _RANGE if block_hash >= _SIGN else block_hash
        # A whole digest has 32 bytes; numbers are its last 8.
        return bytes(24) + block_hash.to_bytes(8, "big") if self.bytes_hashes else block_hash


def _extra_keys(event: Stored) -> list[list[str] | None] | None:
    """In vLLM's way: the adapter in every block, the salt in a prompt's first."""
    if not (event.lora_name or event.cache_salt):
        return None
    keys: list[list[str] | None] = []
    for number in range(len(event.hashes)):
        key = [event.lora_name] if event.lora_name else []
        if event.cache_salt and number == 0 and event.parent is None:
            key.append(event.cache_salt)
        keys.append(key or None)
    return keys
