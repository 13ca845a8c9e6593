"""KV event payloads of every wire version by an independent encoder: msgspec structs of the documented schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

VLLM = (
    "0.9.3",
    "0.10.2",
    "0.11.1",
    "0.13.3",
    "0.18.0",
    "0.19.0",
    "0.21.0",
    "0.22.0",
    "0.23.0",
    "0.24.0",
    "0.25.0",
    "0.32.0",
)
SGLANG = ("0.4.9", "0.5.6", "0.5.9", "0.5.18", "0.5.19", "0.5.20", "0.5.22", "0.5.23")
ENGINES = [("vllm", version) for version in VLLM] + [("sglang", version) for version in SGLANG]

_REQUIRED = msgspec.NODEFAULT


@dataclass(frozen=True, slots=True)
class Schema:
    """Structs of one version. Required fields are written even when null, the others left out then."""

    engine: str
    version: tuple[int, ...]

    @property
    def as_map(self) -> bool:
        return self.version >= ((0, 24) if self.engine == "vllm" else (0, 5, 20))

    @property
    def says_medium(self) -> bool:
        return self.version >= ((0, 11, 1) if self.engine == "vllm" else (0, 5, 9))

    @property
    def says_scope(self) -> bool:
        """Whether an event tells a salt or an adapter."""
        return self.version >= ((0, 18) if self.engine == "vllm" else (0, 5, 20))

    @property
    def host_medium(self) -> str:
        return "CPU" if self.engine == "vllm" else "CPU_PINNED"

    def stored(self, **values: Any) -> Any:
        fields: list[tuple[str, Any, Any]] = [
            ("block_hashes", Any, _REQUIRED),
            ("parent_block_hash", Any, _REQUIRED),
            ("token_ids", Any, _REQUIRED),
            ("block_size", int, _REQUIRED),
            ("lora_id", Any, _REQUIRED),
        ]
        if self.says_medium:
            fields.append(("medium", Any, _REQUIRED))
        fields += self._vllm_fields() if self.engine == "vllm" else self._sglang_fields()
        return self._make("BlockStored", fields, values)

    def _vllm_fields(self) -> list[tuple[str, Any, Any]]:
        fields: list[tuple[str, Any, Any]] = []
        if self.version >= (0, 18):
            fields += [("lora_name", Any, _REQUIRED), ("extra_keys", Any, None)]
        if self.version >= (0, 19):
            fields.append(("group_idx", Any, None))
        if self.version >= (0, 22):
            fields += [("kv_cache_spec_kind", Any, None), ("kv_cache_spec_sliding_window", Any, None)]
        if self.version >= (0, 32):
            fields += [("locality", Any, None), ("ownership", Any, None), ("session_id", Any, None)]
        return fields

    def _sglang_fields(self) -> list[tuple[str, Any, Any]]:
        fields: list[tuple[str, Any, Any]] = []
        if self.version >= (0, 5, 20):
            fields += [("cache_salt", Any, None), ("session_id", Any, None)]
        elif self.version >= (0, 5, 18):
            fields.append(("metadata", Any, None))
        if self.version >= (0, 5, 22):
            fields.append(("lora_name", Any, None))
        return fields

    def removed(self, **values: Any) -> Any:
        fields: list[tuple[str, Any, Any]] = [("block_hashes", Any, _REQUIRED)]
        if self.says_medium:
            fields.append(("medium", Any, _REQUIRED))
        if self.engine == "vllm" and self.version >= (0, 19):
            fields.append(("group_idx", Any, None))
        return self._make("BlockRemoved", fields, values)

    def cleared(self) -> Any:
        return self._make("AllBlocksCleared", [], {})

    def batch(self, events: list[Any], rank: int = 0) -> bytes:
        outer: list[tuple[str, Any, Any]] = [("ts", float, _REQUIRED), ("events", Any, _REQUIRED)]
        name = "data_parallel_rank" if self.engine == "vllm" else "attn_dp_rank"
        if self.engine == "sglang" or self.version >= (0, 10):
            outer.append((name, Any, None))
        struct = msgspec.defstruct("Batch", _filled(outer), array_like=True, omit_defaults=True)
        values = {"ts": 1.5, "events": events} | ({name: rank} if len(outer) == 3 else {})
        return msgspec.msgpack.encode(struct(**values))

    def _make(self, tag: str, fields: list[tuple[str, Any, Any]], values: dict[str, Any]) -> Any:
        struct = msgspec.defstruct(
            tag, _filled(fields), tag=tag, tag_field="type", array_like=not self.as_map, omit_defaults=True
        )
        known = {name for name, _, _ in fields}
        required = {name: None for name, _, default in fields if default is _REQUIRED}
        return struct(**(required | {name: value for name, value in values.items() if name in known}))


def _filled(fields: list[tuple[str, Any, Any]]) -> list[Any]:
    return [(name, kind) if default is _REQUIRED else (name, kind, default) for name, kind, default in fields]


def schema(engine: str, version: str) -> Schema:
    return Schema(engine, tuple(int(part) for part in version.split(".")))


def engine_hash(engine: str, number: int) -> int:
    """A block's hash as the engine writes it: unsigned in vLLM, signed in SGLang."""
    unsigned = (number * 0x9E37_79B9_7F4A_7C15 + 0x1234_5678_9ABC_DEF1) % (1 << 64)
    return unsigned - (1 << 64) if engine == "sglang" and unsigned >= 1 << 63 else unsigned
