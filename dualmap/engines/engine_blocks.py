"""Block hashes as the fake engines make them, and what each cached block was made of, to tell events. No socket."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dualmap.core.engine_model import BlocksRemoved, BlocksStored
from dualmap.core.state import Tier
from dualmap.engines.event_wire import Dialect, Event, Removed, Stored


@dataclass(slots=True)
class _Block:
    parent: int | None
    token_ids: tuple[int, ...]
    lora_name: str
    cache_salt: str
    media: set[str]
    waiting: int = 0
    """Requests in the engine that have this block in their prompt."""


class EngineBlocks:
    """Blocks of one engine life. vLLM's hashes have a random seed, SGLang's are the same everywhere."""

    def __init__(self, dialect: Dialect, block_tokens: int, host_medium: str) -> None:
        self.block_tokens = block_tokens
        self._dialect = dialect
        self._host_medium = host_medium
        self._seed = os.urandom(32) if dialect == "vllm" else b""
        self._blocks: dict[int, _Block] = {}

    def chain(self, token_ids: Sequence[int], lora_name: str = "", cache_salt: str = "") -> tuple[int, ...]:
        """Hashes of the full blocks of a prompt; kept until they are removed. O(tokens)."""
        step = self.block_tokens
        digest = self._seed
        if lora_name or cache_salt:
            digest = hashlib.sha256(digest + f"{lora_name}\0{cache_salt}".encode()).digest()
        hashes: list[int] = []
        parent: int | None = None
        for start in range(0, len(token_ids) - step + 1, step):
            tokens = tuple(token_ids[start : start + step])
            digest = hashlib.sha256(digest + struct.pack(f"<{step}I", *tokens)).digest()
            # vLLM shows the last 8 bytes of a digest, SGLang the first.
            part = digest[-8:] if self._dialect == "vllm" else digest[:8]
            block_hash = int.from_bytes(part, "big")
            block = self._blocks.get(block_hash)
            if block is None:
                block = self._blocks[block_hash] = _Block(parent, tokens, lora_name, cache_salt, set())
            block.waiting += 1
            hashes.append(block_hash)
            parent = block_hash
        return tuple(hashes)

    def release(self, hashes: Sequence[int]) -> None:
        """The request of this chain left the engine."""
        for block_hash in hashes:
            block = self._blocks[block_hash]
            block.waiting -= 1
            self._forget(block_hash, block)

    def stored(self, event: BlocksStored) -> list[Event]:
        """What an engine says of blocks that the model stored on a tier."""
        if event.tier is Tier.DEVICE:
            back = tuple(item for item in event.hashes if self._host_medium in self._blocks[item].media)
            events: list[Event] = [Removed(back, self._host_medium)] if back else []
            for item in back:
                self._blocks[item].media.discard(self._host_medium)
            return list(self._stored(event.hashes, "GPU")) + events
        moved = list(self._stored(event.hashes, self._host_medium))
        for item in event.hashes:
            self._blocks[item].media.discard("GPU")
        return [*moved, Removed(event.hashes, "GPU")]

    def removed(self, event: BlocksRemoved) -> list[Event]:
        """What an engine says of blocks that the model dropped."""
        events: list[Event] = []
        for medium in ("GPU", self._host_medium):
            gone = tuple(item for item in event.hashes if item in self._blocks and medium in self._blocks[item].media)
            if gone:
                events.append(Removed(gone, medium))
        for item in event.hashes:
            block = self._blocks.get(item)
            if block is not None:
                block.media.clear()
                self._forget(item, block)
        return events

    def _forget(self, block_hash: int, block: _Block) -> None:
        if not block.media and not block.waiting:
            del self._blocks[block_hash]

    def _stored(self, hashes: Sequence[int], medium: str) -> Iterator[Stored]:
        """Runs of blocks that follow each other: one event each in vLLM, one a page in SGLang."""
        run: list[int] = []
        for block_hash in hashes:
            follows = bool(run) and self._blocks[block_hash].parent == run[-1]
            if run and (self._dialect == "sglang" or not follows):
                yield self._run(run, medium)
                run = []
            run.append(block_hash)
        if run:
            yield self._run(run, medium)

    def _run(self, run: Sequence[int], medium: str) -> Stored:
        first = self._blocks[run[0]]
        for block_hash in run:
            self._blocks[block_hash].media.add(medium)
        token_ids = tuple(token for block_hash in run for token in self._blocks[block_hash].token_ids)
        return Stored(tuple(run), first.parent, token_ids, self.block_tokens, medium, first.lora_name, first.cache_salt)
